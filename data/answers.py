"""
What a response says: the rules by which rewards compare it with a gold answer.

The idea. A rule maps (text, gold answer) to True or False, or to the fraction that is right.
Numbers are compared by value, so what LaTeX and typography do to them is undone first (`plain`);
anything else is compared word for word, letters and units too. A policy finds whatever is paid by
mistake. So a number that cannot be read as a whole (2^n, 12:30, 2½) counts as one of unknown value:
it is never right, and never lets a part of itself be right.

Left out: arithmetic (1/2 is not 0.5), numbers in words, digits of other scripts, choosing among
several answers.
"""
import re
import unicodedata
from decimal import Decimal

ODD = "\x1a"  # stands for what is no number that this file reads
# thousands come in groups of three behind commas or apostrophes; a point before the first digit is
# one unless it ends something ("v.5", "...5")
DIGITS = (r"(?:\d{1,3}(?:[,'’]\d{3})+(?!\d)|\d+)(?:\.\d+)?"
          r"|(?<![\w.)\]}])\.\d+")
# no digits of a name or of its exponent (X7, x^2); a minus is a sign unless something stands right
# before it; 3e4, 3 x 10^4 and 2^10 are one number each
NUMBER = re.compile(
    rf"(?P<odd>[\d.,]*{ODD}[\d.,{ODD}]*)"
    r"|(?P<sign>(?<![\w)\]}^])[-+])?[$€£]?(?<![A-Za-z_\d^])(?<!\d\.)(?<!\^[-+])"
    rf"(?:(?:(?P<times>{DIGITS})\s*[x×·*]\s*)?(?P<base>{DIGITS})\s*\^(?P<power>[-+]?\d+)"
    rf"|(?P<digits>{DIGITS})(?:[eE](?P<exponent>[-+]?\d+))?)", re.ASCII)
# what may stand between alternatives, "41, or maybe 42"
HEDGE = re.compile(r"(?:[\s,;、/|&*×·()\-–]|or|and|maybe|perhaps)*")
# minus, hyphens, en dash -> the ASCII sign; fractions' strokes -> a slash
SIGNS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2013\ufe63\uff0d"), "-")
SIGNS |= dict.fromkeys(map(ord, "\u2044\u2215÷"), "/") | {ord("，"): ",", ord("．"): "."}
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
PLAIN = [(re.compile(pattern), new) for pattern, new in (
    ("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]", ""),  # characters that nobody sees
    (r"\\([$%])", r"\1"),
    (r"\\[dtc]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2"),
    (r"\\(?:times|cdot)(?![A-Za-z])", "×"),
    # thousands: 9{,}500, 9\,500, 9~500, 9_500
    (r"(?<=\d)(?:\{,\}|\{?\\[,;:! ]\}?|\\thinspace ?|&nbsp;|[~_\u00a0\u2009\u202f])"
     r"(?=\d{3}(?!\d))", ","),
    (r"\{,\}", ","),
    # powers: 10**4, 10^{4}, 10^( 4)
    (r"(?<=\d)\*\*(?=[-+\d])", "^"),
    (r"\^\s*[({]\s*(?:\\,\s*)?([-+]?)\s*(\d+)\s*[)}]", r"^\1\2"),
    # signs: minus 5, -(5), {-}5, x = - 5
    (r"\b(?:minus|negative)\s+(?=[$€£]?[.\d])", "-"),
    (r"\{-\}", "-"),
    (r"-\s*[({]\s*([$€£]?[\d.,]+)\s*[)}]", r"-\1"),
    (r"(?<=[=:])\s*-\s+(?=[$€£]?[.\d])", " -"))]
MARKED = [(re.compile(pattern), ODD) for pattern in (
    r"(?<=\d)\s*\^\s*[({][^(){}]*[)}]|(?<=\d)\s*\^(?![-+]?\d)|\^\s*[({][^(){}]*[)}]",  # 2^n
    r"(?<![\d:])\d+(?::\d+)+",                                                          # 12:30
    r"[-+] ?[-+] ?(?=[.\d])|±\s*")]                                                  # --5, ±5


def plain(text):
    """The ways in which LaTeX and typography write numbers, signs and spaces, written plainly."""
    text = re.sub(r"(?<=\d)[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: "^" + m[0].translate(SUPERSCRIPTS), text)
    text = text.translate(SIGNS)
    for pattern, new in PLAIN:
        text = pattern.sub(new, text)
    return text


def marked(text):
    """plain(text) with a mark in place of what is no number that `numbers` reads."""
    text = plain(text)
    # other digits, 2½ and ①: full-width and bold ones are read
    text = re.sub(r"[^\x00-\x7f]", lambda m: digit(m[0]), text)
    for pattern, mark in MARKED:
        text = pattern.sub(mark, text)
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
    """Same words, whatever the case, spacing and outer punctuation."""
    return words(text) == words(gold) != ""


def words(text):
    text = unicodedata.normalize("NFC", plain(text)).casefold()
    text = re.sub(r"\\(?:boxed|text|mathrm)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s*=\s*", "=", " ".join(text.split()))
    return text.strip(" .,:;!?\"'`*()[]“”‘’")


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


def boxed(text, gold):
    r"""The last \boxed{...} is the gold answer, by value or word for word."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return bool(found) and (last_number(found[-1], gold) or exact(found[-1], gold))


def choice(text, gold):
    """The last letter that stands alone is the gold one."""
    found = re.findall(r"\b[A-Z]\b", text)
    return bool(found) and found[-1] == gold.strip(" ().")


def contains(text, gold):
    """The gold answer stands somewhere in the text, as whole words."""
    return bool(words(gold)) and f" {words(gold)} " in f" {words(text)} "


RULES = dict(exact=exact, number=last_number, boxed=boxed, choice=choice, contains=contains)
