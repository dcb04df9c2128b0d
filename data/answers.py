"""
What a response says: the rules by which rewards compare it with a gold answer.

The idea. A rule maps (text, gold answer) to True or False, or to the fraction that is right.
Numbers are compared by value, so what LaTeX and typography do to them is undone first (`plain`);
anything else is compared word for word, letters and units too. A policy finds whatever is paid by
mistake. So a number that cannot be read as a whole (2^n, 12:30, 2½, 1/2, 42k, 42x, \\sqrt{42},
1 234) counts as one of unknown value: it is never right, and never lets a part of itself be right.
`math` pays what `boxed` pays, and a box that is equal by the package math-verify (0.5 for 1/2).

Left out, but for `math`: arithmetic (1/2 is not 0.5, and no two ways to write a formula are one,
but for brackets around fractions). Left out by all: numbers in words (to `number` 42 million is
42), digits of other scripts, decimal commas, choosing among several answers, and what a sentence
means: "\\boxed{42} is wrong" is a box with 42, "not Paris" contains Paris, and so does a list of
all cities. So take `contains` for answers that nobody lists. A unit in a box is any word that is
not known to change the number. To `boxed` "Answer - \\boxed{42}" may be minus 42 and is refused, to
`number` "41: 42" is 42, a product such as (2)\\boxed{42} is not seen. `choice` reads sentences of
the languages in ANSWER. tests/test_answers.py has a table of what each rule is fooled by.
"""
import html
import json
import os
import re
import subprocess
import sys
import threading
import unicodedata
from decimal import Decimal

ODD = "\x1a"  # stands for what is no number that this file reads
# thousands come in groups of three behind commas, or the Indian way; a point before the first digit
# is one unless it ends something ("v.5", "...5")
DIGITS = (r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d+)(?:\.\d+)?"
          r"|(?<![\w.)\]}])\.\d+")
MONEY = r"(?:[$€£¥₹]|USD|EUR|GBP)"
# no digits of a name or of its exponent (X7, x^2); a minus is a sign unless something stands right
# before it; 3e4, 3 x 10^4 and 2^10 are one number each
NUMBER = re.compile(rf"(?P<odd>[\d.,]*{ODD}[\d.,{ODD}]*)"
    r"|(?P<sign>(?<![\w)\]}^])[-+])?[$€£]?(?<![A-Za-z_\d^])(?<!\d\.)(?<!\^[-+])"
    rf"(?:(?:(?P<times>{DIGITS})\s*[x×·*]\s*)?(?P<base>{DIGITS})\s*\^(?P<power>[-+]?\d+)"
    rf"|(?P<digits>{DIGITS})(?:[eE](?P<exponent>[-+]?\d+))?)", re.ASCII)
# what may stand between alternatives, "41, or maybe 42"
OFFER = (r"(?:\.(?!\s*\n)|[\s,;?、/|&*×·()\-–—$`'\"{}\\]|or|and|maybe|perhaps|possibly|rather|"
         r"else|vs|versus|\\(?:text|mbox|quad|qquad)[a-z]*(?![a-z]))*")
HEDGE = re.compile(rf"{OFFER}|\}}{OFFER}\\boxed{OFFER}")

# LaTeX: what changes only the looks of what follows; spaces; what is put around words; names of
# values, where any other command only leads to one
STYLE = (r"\\(?:text)?color\{[^{}]*\}|\\(?:left|right|(?:display|text|script)style|bf|it|rm|sf|tt|"
         r"em|boldmath|small|normalsize|[lL]arge|LARGE|[hH]uge|[bB]igg?[lr]?|allowbreak)"
         r"(?![A-Za-z])\s?")
SKIP = (r"\\(?:thin|med|thick|en)?space(?![A-Za-z]) ?|\\[hm]s(?:pace|kip)\*?\{[^{}]*\}"
        r"|\\(?:m?kern|[hm]skip|penalty) ?-?[\d.]+ ?(?:mu|pt|em|ex|cm|mm)? ?")
SPACE = r"(?:\\[,;:> ]|~|[^\S\x00-\x7f])"
WRAP = re.compile(r"(?:\\(?:[fm]box|text(?!color)[a-z]*|math[a-z]+|bm|boldsymbol|emph|underline)"
                  r"\s*|^)\{([^{}]*)\}")
VALUE = (r"(?:(?i:(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|"
         r"xi|pi|rho|sigma|tau|upsilon|phi|chi|psi|omega))|infty|ell|[cdlv]?dots[bcmio]?"
         r")(?![A-Za-z])")
# minus, hyphens, en dash -> the ASCII sign; fractions' strokes -> a slash
SIGNS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2013\ufe63\uff0d"), "-")
SIGNS |= str.maketrans("\u2044\u2215÷．٫，﹐∓˚", "///..,,±°")
QUOTES = str.maketrans("‘’“”", "''\"\"")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
# a minus is the sign of a number right behind it, however that is dressed ("-**5**"), and of one
# behind a space or a line's end where something leads to it or opens: "is - 5", "($- 5$)"
NUM = rf"(?=(?:{MONEY}\s?)?\.?\d)"
TIES = r"[*_`~]|\\[,;:>! ]|\{\}"
LEADS = (r"(?:[=:≈≡≅≃∼→⇒⟹⟶↦⟼⇔⟺↔]|[-=]>|\b(?:is|are|be|gets?|equals?)\b"
         rf"|(?<!\\)\\(?!{VALUE})[A-Za-z]+)")
OPENS = r"(?:\\?[(\[]|\{|(?<![\w)\]}$*_`.,!?%])[$*_`]{1,3})"
PLAIN = [(re.compile(pattern), new) for pattern, new in (
    ("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]", ""),  # characters that nobody sees
    (STYLE, ""), (SKIP, r"\\,"), (r"\\neg[a-z]*space(?![A-Za-z]) ?", r"\\!"),
    (r"\\([$%])", r"\1"), (r"\\(?:times|cdot)(?![A-Za-z])", "×"),
    (r"\\(?:pm|mp)(?![A-Za-z])|\+ ?/ ?-", "±"),
    (r" ?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\(?:text)?degree(?![A-Za-z])", "°"),
    # thousands: 9{,}500, 9,\!500, 9\,500, 9~500, 9_500, 9'500
    (rf"(?<=\d)(?:(?:\\[a-z]+ ?)?\{{(?:[\s,~]|\\[,;:>! ])*\}} ?|\\math[a-z]+ ?,|{SPACE}|\\!"
     r"|,(?=(?:\\,)?(?:\\!|\{\}))|[_'‘’‛ʹʼˈ´′٬،‚＇])+(?=\d{3}(?!\d))", ","),
    (r"(?:\\(?:text|math[a-z]+) ?)?\{([.,])\}", r"\1"), # powers: x**4, 10^{4}, 10^( 4)
    (r"((?<![A-Za-z\d_])[A-Za-z]|[\d)\]}])\*\*(?=[-+]?\d+(?![\d.,]*\*))", r"\1^"),
    (r"\^\s*[({]\s*(?:\\,\s*)?([-+]?)\s*(\d+)\s*[)}]", r"^\1\2"),
    # signs: minus 5, -(5), {-}5, x = - 5, -\,5
    (r"\b(?:minus|negative)\s+(?=[$€£]?[.\d])", "-"),
    (r"(?:\\(?:text|math[a-z]+) ?)?\{-\}", "-"),
    (r"-\s*[({]\s*([$€£]?[\d.,]+)\s*[)}]", r"-\1"),
    (rf"({LEADS}(?:[^\S\n]|[$({{[]|\\[(\[]|{TIES})*)-(?:\s|{TIES})+(?={NUM}|\\boxed)", r"\1 -"),
    (rf"({OPENS}) ?-\s+{NUM}", r"\1-"),
    (rf"(?<![\w)\]}}])(?<![\d)\]}}]\s)-(?:{TIES})+ ?{NUM}", "-"))]
# how a page shows numbers: HTML and emphasis
SHOWN = [(re.compile(pattern, re.IGNORECASE), new) for pattern, new in (
    (r"<wbr ?/?>|</?(?:b|i|u|em|strong|span|mark|code|small|big|font|tt)(?: \w+=[^<>]*)?>", ""),
    (r"<sup>([^<>]*)</sup>", r"^{\1}"), (r"<sub>([^<>]*)</sub>", r"_{\1}"),
    (r"(?<![^\W_])(?<![\\)\]}$_])_+(?=[-+\u2212\u2013.$€£\d])|(?<=[\d%)}])_+(?!\w)", ""))]
# a fraction whose parts are one factor each needs no brackets: x^2/3, but (x+1)/(2y)
FRACTION = re.compile(r"([\d^/.]?)\\[dtc]?frac\{([^{}]*)\}\{([^{}]*)\}(?=([\d^!]?))")
PRODUCT, FACTOR = r"-?[\w\\.^]+", r"(?:\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)(?:\^\w)?"
ROOT = r"(?:\\?(?<![A-Za-z])(?:pi|sqrt)(?![A-Za-z])|[π√])"
FUNCTION = r"\\(?:log|ln|sin|cos|tan)(?![A-Za-z])"
AHEAD = r"(?=[$€£]?\.?\d)"
MARKED = [(re.compile(pattern), new) for pattern, new in (
    # a sign or a point behind a value, as in \pi-5, f(x)-5, x_-5 and {0}.5, or behind what leads
    # to one
    (rf"\\{VALUE}\s*[-+]?\s*{AHEAD}|(?:(?<=[^\s:=>({{[][)\]}}])|_)[-+]{AHEAD}|(?<=\d[)\]}}])\.(?=\d)",
     ODD),
    (rf"(?:{ROOT}|{FUNCTION}|\\(?:[cdt]?frac|[dt]?binom))[ ({{×]*[-+]?{AHEAD}", ODD),
    (r"((?<!\\)\\[A-Za-z]+(?:\{\})?|[:=>\s({[][)\]}])(?=[-+.$\d])", r"\1 "),
    (rf"-\$?(?:{MONEY}\s*|\\boxed\s*\{{\s*)(?=\.?\d)", "-"),
    # what is no number: a bullet, a subscript, the n of an n-th root
    (rf"(?m)^[ \t>*#]*[1-9][.)][^\S\n]+\**{AHEAD}", ""),
    (r"(?<![\s\d])_\{[^{}]*\}|(?<=\\sqrt)\s*\[[^][]*\]", ""),
    # what is none that is read: 2^n; 12:30, 2.5.1, 0. 3; --5, ±5, is —5, a lone minus before a line
    (r"(?<=\d)\s*\^\s*[({][^(){}]*[)}]|(?<=\d)\s*\^(?![-+]?\d)|\^\s*[({][^(){}]*[)}]", ODD),
    (r"(?<![\d:])\d+(?:(?::| : )\d+)+|(?<![\d.])\d+(?:\.\d+){2,}|(?<![\d.,])0\.\s(?=\d)", ODD),
    (rf"[-+] ?[-+] ?(?=[.\d])|±\s*|(?<=\w )—{AHEAD}|(?<!\S)(?<!- )-[^\S\n]*\n\s*{AHEAD}", ODD),
    # thousands behind a space or another mark: 1 234, 9,\ 500, 1.234,5, 0,500
    (r"(?<![\d.,])(?!(\d{3})(?: \1)+(?!\d))[1-9]\d{0,2}(?: \d{3})+(?!\d)"
     r"|(?<![\d.,])(?:\d{1,3}(?:\.\d{3})+,\d+(?![\d.])|0\d{0,2}(?:,\d{3})+(?!\d))"
     r"|(?<=\d)[\u00a8-\u00b4\u00b6-\u00b8\u02b0-\u036f\u2012-\u205e\u30fb](?=\d{3})"
     rf"|(?<=\d),{SPACE}+(?=\d{{3}}(?!\d))", ODD),
    # a part of one: 1/2, 2\pi, 42_{8}, 42k, $42!$, 42x, 42 + x, x + 42
    (rf"/[\s({{]*[-+]?[$€£]?(?=\.?\d)|\\over(?![A-Za-z])\s*|(?<=\d) over (?=\d)|(?<=\}})\{{{AHEAD}",
     ODD), (rf"(?<=\d)\s*{ROOT}", ODD),
    (r"(?<=\d)(?:_\{[^{}]*\}|\s?(?:[kK]|bn|mn)(?![A-Za-z])|!(?=\s*(?:[$}=]|\\[)\]])))", ODD),
    (r"(?<=\d)\s*(?:[-+*/×·]\s*)?[xyzn](?![A-Za-z\d])(?!\s*[$€£(]?\d)", ODD),
    (rf"(?<![A-Za-z\\])[xyzn](?:\^\d+)?\s*[-+*/×·]\s*{AHEAD}", ODD),
    # 41 to 42, but not "from 41 to 42"
    (rf"((?<!from )(?<!by )(?<![\d.,$€£])[$€£]?\d[\d.,]*) to {AHEAD}", rf"\1 {ODD} "))]

# words that make another number of the one beside them or deny it, and others behind it that do
SCALE = (r"(?:(?:hundred|thousand|million|billion|trillion|lakh|crore|dozen|ten)(?:s|ths?)?|bn|mn|"
         r"half|halves|thirds|quarters|fourths|fifths|sixths|eighths|squared|cubed|factorial|pi)")
OTHER = (rf"(?:{SCALE}|not?|never|wrong|false|incorrect|isn|more|less|plus|minus|negative|times|"
         r"over|under|above|below|divided|multiplied|base|mod|root|power|log|ln|or)")
CHANGE = rf"(?:{OTHER}|and|to|of|is)"
# in a box a number may have a name before it (x_1 =, f(2) =, "The answer is:") and a unit behind
# it, words or one of five letters
NAME = re.compile(
    rf"^(?:\\angle\s*)?(?:(?:\\{VALUE}|[A-Za-z]\w?(?:_\{{?\w+\}}?)?(?:\([\w, ]*\))?)\s*="
    rf"|(?![A-Za-z ]*\b{OTHER}\b)[A-Za-z][A-Za-z ]*(?:[:=]|\bis\b)[ :=]*)\s*", re.IGNORECASE)
WORD = (r"(?:(?!(?:xyz?|xz|yz|abc?|bc)\b)[A-Za-z]{2,}|(?-i:[mgshL])(?![A-Za-z]))"
        r"(?:\s?(?:\^-?[1-4]|[²³]))?")
UNIT = re.compile(rf"\s*°\s*[CF]?$|(?<=\d)\s+(?!(?:[A-Za-z ./×·²³-]|\^-?\d)*\b{CHANGE}\b)"
                  rf"{WORD}(?:[ ./×·-]{{1,5}}{WORD})*\.?$", re.IGNORECASE)
# to math-verify 41 is about 42, and Paris a product; xy, 2ab and amn are products
NEARLY = r"\\(?:approx|sim|[cl]?dots)|[≈∼±]|\.\."
A_WORD = r"(?<![\\A-Za-z])(?![a-dmnx-z]{2,3}(?![A-Za-z]))[A-Za-z]{2,}"
# what makes a box, here ODD, a part of something: -(\boxed{4}), 2*\boxed{4}, A\boxed{4},
# \sqrt{\boxed{4}}; \boxed{4}x, \boxed{4},000, \boxed{4} + 1, \boxed{4} million
OPEN, CLOSE = r"(?:[\s$(]|\\[(\[])*", r"(?:[^\S\n]|[$)°]|\\[)\]])*"
GLUED = re.compile(
    rf"(?:[-+±/^×]|(?i:\bminus|\bnegative)|(?:[\d)\]}}]|(?<![A-Za-z])[A-Za-z])\s?\*|\d\s?x"
    rf"|\\(?:div|sqrt)|{FUNCTION}){OPEN}{ODD}"
    rf"|(?:\d[.(]?|(?<![\w.)\]}}*])\.|(?<![A-Za-z\\])[A-Za-z]){ODD}"
    rf"|(?:\\(?!text|[fm]box|math|underline|bm|bold)[A-Za-z]+|[\]}}^_])\s*\{{[^{{}}]*{ODD}"
    rf"|{ODD}(?:[\d^/{{]|(?:[.,'’]|\\[,;:! ])\d|[A-Za-z](?![A-Za-z]))"
    rf"|{ODD}{CLOSE}(?:[-+*/×]\s*(?:[\d.($]|[b-zB-HJ-Z](?![\w'’])|\\(?:frac|sqrt|pi))"
    rf"|[×^±]|\\(?:div|sqrt|pi|frac)(?![A-Za-z])|(?:\\text\s?\{{\s?)?(?i:{SCALE})\b)")
# a letter that may be a choice: no part of a word, name or formula (AB, A's, C++, A.M., F(x)), no
# article or pronoun (a dog, I think)
OR = r"(?:or|and|oder|und|ou|et|o|y|e|en|lub|и|или)"
BECAUSE = r"(?:because|since|weil|denn|car|parce|porque|perché|omdat)"
CJK = "\u3000-\ud7ff"
ONE = (r"(?<![\w'’])(?:\(([A-J])\)|\[([A-J])\]|(?!(?-i:[a-jAI])(?:,|[^\S\n])[^\S\n]*"
       rf"(?!(?:{BECAUSE}|{OR}|is|ist|est|es|è|é)\b)[^\W{CJK}])"
       r"([A-J])(?![\w'’+#=°^|(]|[-&]\w|\.(?!(?-i:[A-Z][a-z]{3}))\w|\s?=|\. ?(?-i:[A-Z])\.)\)?)")
ANSWER = (r"(?:\b(?:answer|ans|choice|option|antwort|lösung|réponse|respuesta|opción|risposta|"
          r"resposta|antwoord|odpowiedź|svar|cevap|đáp án|ответ)"
          r"|答案|选项|選項|答え?|回答|正解|정답|답)")
IS = r"(?:(?:is|ist|lautet|est|es|è|é|är|er|jest|là|это)\b|[是为為は은는])"
RIGHT = (r"(?:correct[aeo]?|corretta|correta|right|richtig\w{0,2}|juste|bonne|giusta|esatta|certa|"
         r"goed|正确|正確|对|정답)")
LABEL = r"(?:die |el |l[ea] |l['’])?(?:option|choice|opción|opzione|opção|вариант|选项)?\s{0,9}"
SAID = re.compile(rf"{ANSWER}(?:\s{{1,9}}(?:{RIGHT}|finale?))?(?:\s{{0,9}}[:=—]|['’]s\s"
    rf"|\s{{0,9}}(?:{IS}|(?:would|should|must) be\b)\s{{0,9}}:?)\s{{0,9}}{LABEL}{ONE}"
    r"|(?:\b(?:choose|pick|select|go with|must be|it is|it's|ist die antwort|wähle|choisis|elijo|"
    rf"scelgo|escolho|kies|выбираю)\s{{1,9}}|[选選][择擇]?\s{{0,9}}){LABEL}{ONE}"
    rf"|{ONE}\s?(?:选项)?{IS}\s?(?:the |die |l[ea] )?"
    rf"(?:{RIGHT}|answer|best (?:answer|choice|option))(?![a-z?])"
    rf"|^[^\w\n]*(?:(?:{ANSWER}|so|thus|hence|therefore|also|donc|quindi|所以|因此|故)[^\w\n]*)?"
    rf"{ONE}[^\w\n]*$", re.IGNORECASE | re.MULTILINE)
LISTED = re.compile(rf"^[^\w\n]*{ONE}(?:(?<=[)\]])|[.:]| -|, ?{BECAUSE}).*$",
                    re.IGNORECASE | re.MULTILINE)
# a line that ends with a letter, "Vastaus: C"
LAST = re.compile(rf"{ONE}[^\w\n]*$", re.MULTILINE)
# what stands before a choice that is denied, or behind it; letters that are named; what may stand
# between two that are both offered
DENIED = re.compile(
    r"(?:\b(?:not|cannot|never|wrong|incorrect|except|nobody|no one|neither|nor|nicht|kein\w*|"
    r"falsch\w*|pas|jamais|faus\w*|mauvais\w*|fals[ao]|incorrecta|não|errada|sbagliata|niet|не)\b"
    r"|n['’]t\b|[不错錯]|(?<!\bno )(?<!\ba )(?<!\bany )(?<!without )\bdoubt)[^.!?\n,;:]*$"
    r"|\b(?:worst|false|eliminated|excluded|rejected|least likely|rul(?:e|ed) out)\s{0,9}$",
    re.IGNORECASE)
TAKEN_BACK = re.compile(
    rf"\s*[不错錯]|\W*(?:(?:is|was|seems|looks)n['’]t|n['’]est pas|no es\b|n[oã][no] [èé]\b"
    rf"|(?:{IS}|was|seems|looks)\s*(?:\w+\s+)?(?:[不错錯]|(?:not|never|wrong|false|incorrect|"
    r"nicht|falsch|pas|faux|fausse|fals[ao]|incorrecta|errada|sbagliata)\b))", re.IGNORECASE)
NAMED = re.compile(rf"(?<!['’\w])(?!(?-i:[aAiI])[^\S\n]+(?!{OR}\b)(?-i:[a-z]))([A-J])(?!['’\w])",
                   re.IGNORECASE)
BESIDE = re.compile(rf"(?:\W|\b(?:{OR}|maybe|perhaps|possibly|else|also|either|both|but|it|could|"
                    r"might|may|be|is|the|correct|answer|option|choice)\b|[或和])*", re.IGNORECASE)
OR_ELSE = re.compile(rf".*(?:\b{OR}\b|[或和])\W*", re.IGNORECASE)
INSTEAD = re.compile(r".*\b(?:rather|vs|versus|no|wait|actually|nein|eher|plutôt)\b\W*",
                     re.IGNORECASE)
DRESS = re.compile(r"[*`$\"“”]|^#+|\\[ ()[\]]|(?<!\w)_|_(?!\w)|</?answer>"
    r"|(?<!\w)['‘](?=[A-J]['’])|(?<=['‘][A-J])['’](?!\w)", re.MULTILINE)
# where whole words begin and end
BEFORE = r"(?<!\w)(?<!\w')(?<!-)(?<!\d[.,/])"
A_POINT = r"(?<!(?<![\w.)\]}])\.)"  # none before a number, see DIGITS
BEHIND = r"(?![\w+#^])(?![-/]\w|[.,]\d|'(?!s\b)\w)"


def plain(text):
    """The ways in which LaTeX and typography write numbers, signs and spaces, written plainly."""
    text = re.sub(r"(?<=\d)[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+",
                  lambda m: "^" + m[0].translate(SUPERSCRIPTS), text)
    # a minus sign with a space behind it, unless it takes something away
    text = re.sub(r"(?<![\d)\]}])(?<![\d)\]}]\s)\u2212\s+(?=[$€£]?[.\d])", "-", text)
    text = text.translate(SIGNS)
    for pattern, new in PLAIN:
        text = pattern.sub(new, text)
    return text


def flat(text):
    """plain(text) with fractions in one line, for eyes that read (a/b) and a/b alike."""
    return FRACTION.sub(fraction, plain(text))


def fraction(m):
    """A match of FRACTION -> a/b, in brackets what would be read otherwise without."""
    before, a, b, behind = m.groups()
    a = a if re.fullmatch(PRODUCT, a) else f"({a})"
    b = b if re.fullmatch(FACTOR, b) else f"({b})"
    return f"{before}({a}/{b})" if before or behind else f"{a}/{b}"


def marked(text):
    """What a page shows of a text, plain, with a mark for what is no number that is read."""
    text = re.sub(r"&#?\w{1,9};", lambda m: html.unescape(m[0]), text)
    for pattern, new in SHOWN:
        text = pattern.sub(new, text)
    text = flat(unwrapped(text))
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


def unwrapped(text):
    """\\text{words} and the like -> " words "; what is nested deeper than four times stays."""
    for _ in range(4):
        text = WRAP.sub(lambda m: f" {m[1]} " if re.search("[A-Za-z]", m[1]) else m[1],
                        text)
    return text


def numbers(text):
    """Every number in a text -> list of (value, start, end) in marked(text); "-$1,234.50" is
    one."""
    return read(marked(text))


def read(text):
    return [(value_of(m), *m.span()) for m in NUMBER.finditer(text)]


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
    """Is a gold answer one number, but for its unit of money, percent or degrees and its full
    stop?"""
    found = NUMBER.fullmatch(marked(gold).strip(" \n$€£¥₹").rstrip(" \n.%°"))
    return found is not None and not found["odd"]


def exact(text, gold):
    """Same words, whatever the case and spacing; around them brackets, quotes and asterisks that
    close again, and behind them punctuation, unless gold has it."""
    text, gold = words(text).casefold(), core(gold).casefold()
    before, found, behind = text.partition(gold) if gold else ("", "", "")
    closed = re.sub(r"[\s.,:;!?]", "", behind)[::-1]
    closed = closed.translate(str.maketrans(")]", "(["))
    opened = re.sub(r"\s", "", before)
    return bool(found) and opened == closed and not opened.strip(
        "\"'`*" if "," in gold else "\"'`*([")


def words(text):
    text = unicodedata.normalize("NFC", flat(text)).translate(QUOTES)
    text = re.sub(r"\\(?:boxed|text|mathrm)\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\s*=\s*", "=", " ".join(text.split()))


def core(gold):
    """The words of a gold answer without what a text may lack; "" if there are none."""
    gold = words(gold)
    if not gold.strip(" .,:;!?\"'`*()[]"):
        return ""
    gold = re.sub(r"^([\"'`*]{1,3})(.+)\1$", r"\2", gold.rstrip(" .,:;?"))
    gold = gold.rstrip(" .,:;?")
    return re.sub(r"^\(([^(),]*)\)$|^\[([A-Za-z]*)\]$", r"\1\2", gold)


def only_number(text, gold):
    """The gold number occurs and no other number does: "4817 or 9999" is no answer."""
    want, got = numbers(gold), {value for value, _, _ in numbers(text)}
    return len(want) == 1 and got == {want[0][0]}


def last_number(text, gold):
    """The last number is the gold one, and no other is offered beside it: "41 or 42 42"."""
    text = marked(text)
    want, got = numbers(gold), read(text)
    if len(want) != 1 or not got or got[-1][0] != want[0][0]:
        return False
    for before, last in zip(got[-2::-1], got[::-1]):
        if not HEDGE.fullmatch(text[before[2]:last[1]].casefold()):
            break
        if before[0] != want[0][0]:
            return False
    return True


def boxed(text, gold, same=None):
    """The last \\boxed{...} holds the gold answer, and no other stands beside it: one number with
    its name and unit if gold is one, else the same words. A box that stays open holds nothing.
    same(content, gold): what a box must be."""
    # \fbox{4}, \boxed 4 and \boxed x; \boxed 42 is a box with 4 and a 2 behind it
    text = re.sub(r"\\f(?:rame)?box(?![A-Za-z])", r"\\boxed", text)
    text = re.sub(r"\\boxed(?:\s*(\d)|\s+([A-Za-z])(?![A-Za-z]))",
                  r"\\boxed{\1\2}", text)
    found = boxes(text)
    if not found or GLUED.search(
            plain(text[:found[-1][1]]) + ODD + plain(text[found[-1][2]:])):
        return False
    for i, (content, _, end) in enumerate(found[::-1]):
        if i and not HEDGE.fullmatch(" ".join(text[end:found[-i][1]].casefold().split())):
            break
        if not (same or in_box)(content, gold):
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
    if is_number(gold):
        number = re.sub(r"^\(([^()]*)\)$", r"\1",
                        re.sub(r"^([-+])\s+", r"\1", amount(content)))
        return (is_number(number) and ".." not in content
                and numbers(number)[0][0] == numbers(gold)[0][0])
    content, gold = squeezed(content), squeezed(gold)
    return bool(core(gold)) and gold in (content, re.sub(r"^[(\[]([^(),]*)[)\]]$", r"\1", content))


def inner(text):
    """What stands in a box, plain and without what is put around it."""
    text = re.sub(SPACE, " ", re.sub(r"\\!", "", plain(text)))
    text = unwrapped(re.sub(r"\\boxed\s*(?=\{)", r"\\text", text))
    text = text.rstrip(" \n.$").lstrip(" \n$")
    return re.sub(r"^(\*{1,3})([\s\S]+)\1$", r"\2", text)


def amount(text):
    """What stands in a box, without a name before it and a unit behind it."""
    return UNIT.sub("", NAME.sub("", inner(text)))


def squeezed(text):
    """LaTeX to compare: one way to write fractions and roots, no space but between digits."""
    for short, whole in ((r"\\[dtc]frac", r"\\frac"),
                         (r"\\(frac|sqrt)\s*(\d)", r"\\\1{\2}"),
                         (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
                         (r"\\sqrt\s*(\w)", r"\\sqrt{\1}")):
        text = re.sub(short, whole, text)
    text = unicodedata.normalize("NFC", flat(inner(text))).casefold()
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def choice(text, gold):
    """The response says that its choice is gold, a letter from A to J: in words ("the answer is
    B"), on a line of its own, or at the beginning of the only line that begins so. The last word
    counts; different choices side by side are none."""
    wanted = re.fullmatch(r"[(\[]?([A-J])[)\].:]*", gold.strip(), re.IGNORECASE)
    text = DRESS.sub("", inner(unicodedata.normalize("NFKC", text)))
    text = re.sub(rf"(?<=[{CJK}])(?=\(?[A-J](?![a-z]))|(?<=[A-J])(?=是|は|です|だ|입|은|이|选项)",
                  " ", text)  # 答案是B, Bです
    said = [m for m in SAID.finditer(text)
            if not DENIED.search(text, max(0, m.start() - 80), m.start())
            and not TAKEN_BACK.match(text, m.end(m.lastindex))]
    if not said:  # a list of one; but not where a sentence of another language ends with a letter
        said = [*LISTED.finditer(text)]
        if any(letter(m) != letter(said[-1]) and not said[-1].start() <= m.start() < said[-1].end()
               for m in LAST.finditer(text) if said):
            return False
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
    before = BEFORE + (A_POINT if gold[:1].isdigit() else "")
    if re.match(r"\d+/\d|\d{3}(?!\d)", gold):  # no part of 3 1/2, of 1 234 men
        before += r"(?<!\d )"
    return bool(gold and re.search(f"{before}{re.escape(gold)}{BEHIND}", text))


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


# math-verify: it may take long on a long formula, and its own limit on that needs the main thread

JUDGE = """
import json, logging, signal, sys
from math_verify import parse, verify
logging.disable()
signal.signal(signal.SIGPROF, signal.SIG_DFL)
print("ready", flush=True)
for line in sys.stdin:
    signal.setitimer(signal.ITIMER_PROF, 3)
    gold, found = (parse(f"\\\\boxed{{{x}}}", parsing_timeout=None) for x in json.loads(line))
    print(verify(gold, found, timeout_seconds=None), flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)
"""
judges, one_at_a_time = {}, threading.Lock()  # process id: its judge


def math(text, gold):
    """As `boxed`, but a box is also right that math-verify finds equal to gold, unless that holds
    a word, which to it is a product of letters. What it has not compared within three seconds of
    a processor is wrong."""
    return boxed(text, gold, same=equal)


def equal(content, gold):
    if in_box(content, gold):
        return True
    found, want = amount(content), amount(gold)
    if not core(squeezed(gold)) or re.search(A_WORD, want) or re.search(NEARLY, content):
        return False
    return verified(*(re.sub(r"\b(?:and|or)\b", ",", x) for x in (found, want)))


def verified(content, gold):
    """Does math-verify find them equal? ValueError where it does not start."""
    with one_at_a_time:
        judge = judges.get(os.getpid())
        if judge is None or judge.poll() is not None:
            judge = judges[os.getpid()] = subprocess.Popen(
                [sys.executable, "-c", JUDGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, start_new_session=True)
            if judge.stdout.readline() != "ready\n":
                judge.wait()
                raise ValueError("reward=math needs the package math-verify: "
                                 "pip install math-verify")
        judge.stdin.write(json.dumps([gold, content]) + "\n")
        judge.stdin.flush()
        answer = judge.stdout.readline()
        if not answer:
            judge.wait()
        return answer == "True\n"


RULES = dict(exact=exact, number=last_number, boxed=boxed, math=math, choice=choice,
             contains=contains)
