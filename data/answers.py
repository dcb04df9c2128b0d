"""
What a response says: the rules by which rewards compare it with a gold answer.

The idea. A rule maps (text, gold answer) to True or False, or to the fraction that is right.
Numbers are compared by value, so what LaTeX and typography do to them is undone first (`plain`);
anything else is compared word for word, letters and units too. A policy finds whatever is paid by
mistake. So a number that cannot be read as a whole (2^n, 12:30, 2½, 1/2, 42k, 42x, \\sqrt{42})
counts as one of unknown value: it is never right, and never lets a part of itself be right.

Left out: arithmetic (1/2 is not 0.5, and no two ways to write a formula are one, but for brackets
around fractions), numbers in words (to `number` 42 million is 42), digits of other scripts,
choosing among several answers, and what a sentence means: "\\boxed{42} is wrong" is a box with 42,
"not Paris" contains Paris, and so does a list of all cities. So take `contains` for answers that
nobody lists. A unit in a box is any word that is not known to change the number. To `boxed`
"Answer - \\boxed{42}" may be minus 42 and is refused, to `number` "41: 42" is 42, a product such as
(2)\\boxed{42} is not seen. tests/test_answers.py has a table of what each rule is fooled by.
"""
import re
import unicodedata
from decimal import Decimal

ODD = "\x1a"  # stands for what is no number that this file reads
# thousands come in groups of three behind commas or apostrophes; a point before the first digit is
# one unless it ends something ("v.5", "...5")
DIGITS = (r"(?:\d{1,3}(?:[,'’]\d{3})+(?!\d)|\d+)(?:\.\d+)?"
          r"|(?<![\w.)\]}])\.\d+")
MONEY = r"(?:[$€£¥₹]|USD|EUR|GBP)"
# no digits of a name or of its exponent (X7, x^2); a minus is a sign unless something stands right
# before it; 3e4, 3 x 10^4 and 2^10 are one number each
NUMBER = re.compile(
    rf"(?P<odd>[\d.,]*{ODD}[\d.,{ODD}]*)"
    r"|(?P<sign>(?<![\w)\]}^])[-+])?[$€£]?(?<![A-Za-z_\d^])(?<!\d\.)(?<!\^[-+])"
    rf"(?:(?:(?P<times>{DIGITS})\s*[x×·*]\s*)?(?P<base>{DIGITS})\s*\^(?P<power>[-+]?\d+)"
    rf"|(?P<digits>{DIGITS})(?:[eE](?P<exponent>[-+]?\d+))?)", re.ASCII)
# what may stand between alternatives, "41, or maybe 42"
OFFER = (r"(?:\.(?!\s*\n)|[\s,;?、/|&*×·()\-–—$`'\"{}\\]|or|and|maybe|perhaps|possibly|rather|"
         r"else|vs|versus|\\(?:text|mbox|quad|qquad)[a-z]*(?![a-z]))*")
HEDGE = re.compile(rf"{OFFER}|\}}{OFFER}\\boxed{OFFER}")
# minus, hyphens, en dash -> the ASCII sign; fractions' strokes -> a slash
SIGNS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2013\ufe63\uff0d"), "-")
SIGNS |= dict.fromkeys(map(ord, "\u2044\u2215÷"), "/") | {ord("，"): ",", ord("．"): "."}
QUOTES = str.maketrans("‘’“”", "''\"\"")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
PLAIN = [(re.compile(pattern), new) for pattern, new in (
    ("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]", ""),  # characters that nobody sees
    (r"\\([$%])", r"\1"),
    (r"\\(?:times|cdot)(?![A-Za-z])", "×"),
    # thousands: 9{,}500, 9\,500, 9~500, 9_500
    (r"(?<=\d)(?:\{,\}|\{?\\[,;:! ]\}?|\\thinspace ?|&nbsp;|[~_\u00a0\u2009\u202f])"
     r"(?=\d{3}(?!\d))", ","),
    (r"\{,\}", ","),
    # powers: x**4, 10^{4}, 10^( 4)
    (r"((?<![A-Za-z\d_])[A-Za-z]|[\d)\]}])\*\*(?=[-+]?\d+(?![\d.,]*\*))", r"\1^"),
    (r"\^\s*[({]\s*(?:\\,\s*)?([-+]?)\s*(\d+)\s*[)}]", r"^\1\2"),
    # signs: minus 5, -(5), {-}5, x = - 5
    (r"\b(?:minus|negative)\s+(?=[$€£]?[.\d])", "-"),
    (r"\{-\}", "-"),
    (r"-\s*[({]\s*([$€£]?[\d.,]+)\s*[)}]", r"-\1"),
    (rf"(?:(?<=[=:])|(?<=\bis)|(?<=\bare)|(?<=\bbe)|(?<=\bget)|(?<=\bequals))"
     rf"[^\S\n]*-[^\S\n]+(?={MONEY}?\s?[.\d]|\\boxed)", " -"))]
# a fraction whose parts are one factor each needs no brackets: x^2/3, but (x+1)/(2y)
FRACTION = re.compile(r"([\d^/.]?)\\[dtc]?frac\{([^{}]*)\}\{([^{}]*)\}(?=([\d^!]?))")
PRODUCT, FACTOR = r"-?[\w\\.^]+", r"(?:\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)(?:\^\w)?"
ROOT = r"(?:\\?(?<![A-Za-z])(?:pi|sqrt)(?![A-Za-z])|[π√])"
FUNCTION = r"\\(?:log|ln|sin|cos|tan)(?![A-Za-z])"
AHEAD = r"(?=[$€£]?\.?\d)"
MARKED = [(re.compile(pattern), new) for pattern, new in (
    (rf"-\$?(?:{MONEY}\s*|\\boxed\s*\{{\s*)(?=\.?\d)", "-"),
    # what is no number: a bullet, a subscript, the n of an n-th root
    (rf"(?m)^[ \t>*#]*[1-9][.)][^\S\n]+\**{AHEAD}", ""),
    (r"(?<![\s\d])_\{[^{}]*\}|(?<=\\sqrt)\s*\[[^][]*\]", ""),
    # what is none that is read: 2^n; 12:30, 2.5.1, 0. 3; --5, ±5, is —5
    (r"(?<=\d)\s*\^\s*[({][^(){}]*[)}]|(?<=\d)\s*\^(?![-+]?\d)|\^\s*[({][^(){}]*[)}]", ODD),
    (r"(?<![\d:])\d+(?:(?::| : )\d+)+|(?<![\d.])\d+(?:\.\d+){2,}|(?<![\d.,])0\.\s(?=\d)", ODD),
    (rf"[-+] ?[-+] ?(?=[.\d])|±\s*|(?<=\w )—{AHEAD}", ODD),
    # a part of one: 1/2, 2\pi, 42_{8}, 42k, $42!$, 42x, 42 + x, x + 42
    (rf"/[\s({{]*[$€£]?(?=\.?\d)|\\over(?![A-Za-z])\s*|(?<=\d) over (?=\d)|(?<=\}})\{{{AHEAD}",
     ODD),
    (rf"(?<=\d)\s*{ROOT}|(?:{ROOT}|{FUNCTION})[ ({{×]*{AHEAD}", ODD),
    (r"(?<=\d)(?:_\{[^{}]*\}|\s?(?:[kK]|bn|mn)(?![A-Za-z])|!(?=\s*(?:[$}=]|\\[)\]])))", ODD),
    (r"(?<=\d)\s*(?:[-+*/×·]\s*)?[xyzn](?![A-Za-z\d])(?!\s*[$€£(]?\d)", ODD),
    (rf"(?<![A-Za-z\\])[xyzn]\s*[-+*/×·]\s*{AHEAD}", ODD),
    # 41 to 42, but not "from 41 to 42"
    (rf"((?<!from )(?<!by )(?<![\d.,$€£])[$€£]?\d[\d.,]*) to {AHEAD}", rf"\1 {ODD} "))]
# LaTeX: spaces and sizes; what is put around words
LOOKS = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:! ]|(?<=^-)\s+")
WRAP = re.compile(r"(?:\\(?:boxed|mbox|text\w*|math\w+)|^)\{([^{}]*)\}")
# words that make another number of the one before them, or that deny it
SCALE = (r"(?:(?:hundred|thousand|million|billion|trillion|lakh|crore|dozen|ten)(?:s|ths?)?|bn|mn|"
         r"half|halves|thirds|quarters|fourths|fifths|sixths|eighths|squared|cubed|factorial|pi)")
CHANGE = (rf"(?:{SCALE}|or|and|to|of|more|less|not?|never|wrong|false|incorrect|is|isn|plus|minus|"
          r"times|over|under|above|below|divided|multiplied|negative|base|mod|root|power|log|ln)")
# in a box a number may have a name before it and a unit behind, words or one of five letters
WORD = r"(?:[A-Za-z]{2,}|(?-i:[mgshL])(?![A-Za-z]))"
NOUN = rf"(?=[A-Za-z])(?![A-Za-z ./-]*\b{CHANGE}\b){WORD}(?:[ ./-]{{1,2}}{WORD})*\.?"
SPACE = r"(?:\s|~|\\[,;:! ])"
UNIT = re.compile(rf"^\s*[A-Za-z]\s*=|\^\{{?\\circ\}}?(?:\s*(?:\\(?:text|mathrm)\{{)?[CF]\}}?$)?|"
                  rf"(?<=\d)(?:{SPACE}{{0,9}}\\(?:mbox|text\w*|mathrm)\{{[\s~]*{NOUN}\s*\}}"
                  rf"(?:\^\{{?[23]\}}?)?|{SPACE}{{1,9}}{NOUN})\s*$", re.IGNORECASE)
# what makes a box, here ODD, a part of something: -(\boxed{4}), 2*\boxed{4}, A\boxed{4},
# \sqrt{\boxed{4}}; \boxed{4}x, \boxed{4},000, \boxed{4} + 1, \boxed{4} million
OPEN, CLOSE = r"(?:[\s$(]|\\[(\[])*", r"(?:[^\S\n]|[$)]|\\[)\]])*"
GLUED = re.compile(
    rf"(?:[-+/^×]|(?i:\bminus|\bnegative)|(?:[\d)\]}}]|(?<![A-Za-z])[A-Za-z])\s?\*|\d\s?x"
    rf"|\\(?:pm|mp|div|sqrt)|{FUNCTION}){OPEN}{ODD}"
    rf"|(?:\d[.(]?|(?<![A-Za-z\\])[A-Za-z]){ODD}"
    rf"|(?:\\(?!text|mbox|math|underline)[A-Za-z]+|[\]}}^_])\s*\{{[^{{}}]*{ODD}"
    rf"|{ODD}(?:[\d^/{{]|(?:[.,'’]|\\[,;:! ])\d|[A-Za-z](?![A-Za-z]))"
    rf"|{ODD}{CLOSE}(?:[-+*/×]\s*(?:[\d.($]|[b-zB-HJ-Z](?![\w'’])|\\(?:frac|sqrt|pi))"
    rf"|[×^]|\\(?:pm|div|sqrt|pi|frac)(?![A-Za-z])|(?:\\text\s?\{{\s?)?(?i:{SCALE})\b)")
# a letter that may be a choice: no part of a word, name or formula (AB, A's, C++, A.M., F(x)), no
# article or pronoun (a dog, I think)
ONE = (r"(?<![\w'’])(?:\(([A-J])\)|\[([A-J])\]"
       r"|(?!(?-i:[a-jAI])(?:,|[^\S\n])[^\S\n]*(?!because|since|or\b|and\b|is\b)\w)"
       r"([A-J])(?![\w'’+#=°^|(]|[-&]\w|\.(?!(?-i:[A-Z][a-z]{3}))\w|\s?=|\. ?(?-i:[A-Z])\.)\)?)")
LABEL = r"(?:option|choice)?\s{0,9}"
SAID = re.compile(
    r"\b(?:answer|choice|option|ans)(?:\s{0,9}[:=]|['’]s\s|\s{1,9}(?:is|would be|should be|must be)"
    rf"\b\s{{0,9}}:?)\s{{0,9}}{LABEL}{ONE}"
    rf"|\b(?:choose|pick|select|go with|must be|it is|it's)\s{{1,9}}{LABEL}{ONE}"
    rf"|{ONE} is (?:the )?(?:correct|right|answer|best (?:answer|choice|option))\b(?!\?)"
    rf"|^[^\w\n]*(?:(?:answer|option|choice|so|thus|hence|therefore)[^\w\n]*)?{ONE}[^\w\n]*$",
    re.IGNORECASE | re.MULTILINE)
LISTED = re.compile(rf"^[^\w\n]*{ONE}(?:(?<=[)\]])|[.:]| -|, ?(?:because|since)).*$",
                    re.IGNORECASE | re.MULTILINE)
# what stands before a choice that is denied, or behind it; letters that are named; what may stand
# between two that are both offered
DENIED = re.compile(
    r"(?:\b(?:not|cannot|never|wrong|incorrect|except|nobody|no one|neither|nor)\b|n['’]t\b"
    r"|(?<!\bno )(?<!\ba )(?<!\bany )(?<!without )\bdoubt)[^.!?\n,;:]*$"
    r"|\b(?:worst|false|eliminated|excluded|rejected|least likely|rul(?:e|ed) out)\s{0,9}$",
    re.IGNORECASE)
TAKEN_BACK = re.compile(r"\W*(?:is|was|seems|looks)(?:n['’]t|\s+(?:\w+\s+)?"
                        r"(?:not|never|wrong|false|incorrect))\b", re.IGNORECASE)
NAMED = re.compile(r"(?<!['’\w])(?!(?-i:[aAiI])[^\S\n]+(?!or\b|and\b)(?-i:[a-z]))([A-J])(?!['’\w])",
                   re.IGNORECASE)
BESIDE = re.compile(r"(?:\W|\b(?:or|and|maybe|perhaps|possibly|else|also|either|both|but|it|could|"
                    r"might|may|be|is|the|correct|answer|option|choice)\b)*", re.IGNORECASE)
OR_ELSE = re.compile(r".*\b(?:or|and)\b\W*", re.IGNORECASE)
INSTEAD = re.compile(r".*\b(?:rather|vs|versus|no|wait|actually)\b\W*", re.IGNORECASE)
DRESS = re.compile(
    r"[*`$\"“”]|^#+|\\[ ()[\]]|(?<!\w)_|_(?!\w)|</?answer>"
    r"|(?<!\w)['‘](?=[A-J]['’])|(?<=['‘][A-J])['’](?!\w)", re.MULTILINE)
# where whole words begin and end
BEFORE = r"(?<!\w)(?<!\w')(?<!-)(?<!\d[.,/])"
BEHIND = r"(?![\w+#^])(?![-/]\w|[.,]\d|'(?!s\b)\w)"


def plain(text):
    """The ways in which LaTeX and typography write numbers, signs and spaces, written plainly."""
    text = re.sub(r"(?<=\d)[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: "^" + m[0].translate(SUPERSCRIPTS), text)
    # a minus sign with a space behind it, unless it takes something away
    text = re.sub(r"(?<![\d)\]}])(?<![\d)\]}]\s)\u2212\s+(?=[$€£]?[.\d])", "-", text)
    text = FRACTION.sub(fraction, text.translate(SIGNS))
    for pattern, new in PLAIN:
        text = pattern.sub(new, text)
    return text


def fraction(m):
    """A match of FRACTION -> a/b, in brackets what would be read otherwise without."""
    before, a, b, behind = m.groups()
    a = a if re.fullmatch(PRODUCT, a) else f"({a})"
    b = b if re.fullmatch(FACTOR, b) else f"({b})"
    return f"{before}({a}/{b})" if before or behind else f"{a}/{b}"


def marked(text):
    """plain(text) with a mark in place of what is no number that `numbers` reads."""
    text = plain(text)
    # other digits, 2½ and ①: full-width and bold ones are read
    text = re.sub(r"[^\x00-\x7f]", lambda m: digit(m[0]), text)
    for pattern, new in MARKED:
        text = pattern.sub(new, text)
    return text


def digit(c):
    if unicodedata.numeric(c, None) is None or c.isalpha():
        return c
    if ord(c) in SUPERSCRIPTS:  # x²; behind digits they are powers
        return ""
    same = unicodedata.normalize("NFKC", c)
    return same if c.isdecimal() and same.isascii() else ODD


def numbers(text):
    """Every number in marked(text) -> list of (value, start, end) there; "-$1,234.50" is one."""
    return [(value_of(m), *m.span()) for m in NUMBER.finditer(marked(text))]


def value_of(m):
    """A match of NUMBER -> Decimal, NaN beyond its range"""
    digits = re.sub(r"[^\d.]", "", m["digits"] or m["times"] or "1")
    try:
        value = Decimal(f"{m['sign'] or ''}{digits}e{m['exponent'] or 0}")
        if m["base"]:
            power = Decimal(re.sub(r"[^\d.]", "", m["base"])) ** int(m["power"])
            value *= power if power else Decimal("NaN")  # 0, or too small
    except (ArithmeticError, ValueError):
        return Decimal("NaN")
    return Decimal("NaN") if m["odd"] else value


def is_number(gold):
    """Is a gold answer one number, but for its unit of money or percent and its full stop?"""
    found = NUMBER.fullmatch(marked(gold).strip().strip("$€£").rstrip(" .%}"))
    return found is not None and not found["odd"]


def exact(text, gold):
    """Same words, whatever the case and spacing; around them brackets, quotes and asterisks that
    close again, and behind them punctuation, unless gold has it."""
    text, gold = words(text).casefold(), core(gold).casefold()
    before, found, behind = text.partition(gold) if gold else ("", "", "")
    closed = re.sub(r"[\s.,:;!?]", "", behind)[::-1].translate(str.maketrans(")]", "(["))
    opened = re.sub(r"\s", "", before)
    return bool(found) and opened == closed and not opened.strip(
        "\"'`*" if "," in gold else "\"'`*([")


def words(text):
    text = unicodedata.normalize("NFC", plain(text)).translate(QUOTES)
    text = re.sub(r"\\(?:boxed|text|mathrm)\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\s*=\s*", "=", " ".join(text.split()))


def core(gold):
    """The words of a gold answer without what a text may lack; "" if there are none."""
    gold = words(gold)
    if not gold.strip(" .,:;!?\"'`*()[]"):
        return ""
    gold = re.sub(r"^([\"'`*]{1,3})(.+)\1$", r"\2", gold.rstrip(" .,:;?")).rstrip(" .,:;?")
    return re.sub(r"^\(([^(),]*)\)$|^\[([A-Za-z]*)\]$", r"\1\2", gold)


def only_number(text, gold):
    """The gold number occurs and no other number does: "4817 or 9999" is no answer."""
    want, got = numbers(gold), {value for value, _, _ in numbers(text)}
    return len(want) == 1 and got == {want[0][0]}


def last_number(text, gold):
    """The last number is the gold one, and no other is offered beside it: "41 or 42 42"."""
    text = marked(text)
    want, got = numbers(gold), numbers(text)
    if len(want) != 1 or not got or got[-1][0] != want[0][0]:
        return False
    for before, last in zip(got[-2::-1], got[::-1]):
        if not HEDGE.fullmatch(text[before[2]:last[1]].casefold()):
            break
        if before[0] != want[0][0]:
            return False
    return True


def boxed(text, gold):
    """The last \\boxed{...} holds the gold answer, and no other stands beside it: one number with
    its unit if gold is one, else the same words. A box that stays open holds nothing."""
    found = boxes(text)
    if not found or GLUED.search(
            plain(text[:found[-1][1]]) + ODD + plain(text[found[-1][2]:])):
        return False
    for i, (content, _, end) in enumerate(found[::-1]):
        if i and not HEDGE.fullmatch(" ".join(text[end:found[-i][1]].casefold().split())):
            break
        if not in_box(content, gold):
            return False
    return True


def boxes(text):
    """(content, start, end) of each \\boxed{...} that is in no other; [] if one stays open."""
    found, end = [], 0
    for m in re.finditer(r"\\boxed\s*\{", text):
        if m.start() < end:
            continue
        depth, end = 1, m.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth:
            return []
        found.append((text[m.end():end - 1], m.start(), end))
    return found


def in_box(content, gold):
    content, gold = plain(content), plain(gold)
    if is_number(gold):
        number = unwrapped(UNIT.sub("", content))
        return (is_number(number) and ".." not in content
                and numbers(number)[0][0] == numbers(gold)[0][0])
    content, gold = squeezed(content), squeezed(gold)
    return bool(core(gold)) and gold in (content, re.sub(r"^[(\[]([^(),]*)[)\]]$", r"\1", content))


def unwrapped(text):
    """LaTeX without what changes only its looks."""
    text = LOOKS.sub("", text)
    for _ in range(4):  # what is nested deeper stays
        text = WRAP.sub(r"\1", text)
    return re.sub(r"^(\*{1,3})([\s\S]+)\1$", r"\2", text.strip(" .$"))


def squeezed(text):
    """LaTeX to compare: one way to write fractions and roots, no space but between digits."""
    for short, whole in ((r"\\[dtc]frac", r"\\frac"), (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
                         (r"\\sqrt(\w)", r"\\sqrt{\1}")):
        text = re.sub(short, whole, text)
    text = plain(unwrapped(text))
    text = unicodedata.normalize("NFC", text).casefold()
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def choice(text, gold):
    """The response says that its choice is gold, a letter from A to J: in words ("the answer is
    B"), on a line of its own, or at the beginning of the only line that begins so. The last word
    counts; different choices side by side are none."""
    wanted = re.fullmatch(r"[(\[]?([A-J])[)\].:]*", gold.strip(), re.IGNORECASE)
    text = DRESS.sub("", unwrapped(unicodedata.normalize("NFKC", plain(text))))
    said = [m for m in SAID.finditer(text)
            if not DENIED.search(text, max(0, m.start() - 80), m.start())
            and not TAKEN_BACK.match(text, m.end(m.lastindex))]
    said = said or [*LISTED.finditer(text)]
    if not wanted or not said or letter(said[-1]) != wanted[1].upper():
        return False
    for before, after in zip(said[-2::-1], said[::-1]):
        if not BESIDE.fullmatch(text, before.end(), after.start()):
            break
        if letter(before) != letter(after):
            return False
    return not offered_beside(text, said[-1])


def letter(m):
    """The letter that a match of SAID, LISTED or NAMED found, a capital."""
    return m[m.lastindex].upper()


def offered_beside(text, m):
    """Does the same line offer another letter right before or after the one that m found?"""
    start, end = m.span(m.lastindex)
    named = [*NAMED.finditer(text)]
    left = [(n, n.end(), start) for n in named if n.end() <= start][-1:]
    right = [(n, end, n.start()) for n in named if n.start() >= end][:1]
    for n, a, b in left + right:
        rules = (BESIDE, OR_ELSE, INSTEAD) if a == end else (BESIDE, OR_ELSE)
        between = text[a:b]
        if letter(n) != letter(m) and "\n" not in between and any(
                rule.fullmatch(between) for rule in rules):
            return True
    return False


def contains(text, gold):
    """Gold occurs somewhere, as whole words or as a whole number."""
    if is_number(gold):
        return numbers(gold)[0][0] in [value for value, _, _ in numbers(text)]
    if not re.search("[*`]", gold):
        text = re.sub(r"[*`]|(?<!\w)_|_(?!\w)", "", text)
    gold, text = core(gold), words(text)
    if not (gold.isupper() and len(gold) <= 2):  # US is not us
        gold, text = gold.casefold(), text.casefold()
    before = BEFORE + (r"(?<!\d )" if re.match(r"\d+/\d", gold) else "")  # no part of 3 1/2
    return bool(gold) and re.search(f"{before}{re.escape(gold)}{BEHIND}", text) is not None


def in_form(text, gold):
    """The fraction of gold's codes, numbers of four digits, that stand in their places; 0 if
    anything else differs from gold, or gold holds none."""
    codes = r"\d{4}"
    want = re.findall(codes, gold)
    found = re.fullmatch(re.sub(codes, r"(\\d{4})", re.escape(gold)), text, re.ASCII)
    if not want or not found:
        return 0.0
    return sum(a == b for a, b in zip(found.groups(), want)) / len(want)


def after_thought(text, thinks):
    """What follows the last thought; nothing where a thought stays open. thinks: it began in
    the prompt."""
    _, closed, rest = text.rpartition("</think>")
    if "<think>" in rest or (thinks and not closed):
        return ""
    return rest.strip()


RULES = dict(exact=exact, number=last_number, boxed=boxed, choice=choice, contains=contains)
