"""One way of writing for answers that mean the same: marks, units, money, letters of choices, intervals.

math-verify reads LaTeX. What people and models write besides, it takes for something else or refuses.
"""

from __future__ import annotations

import re

from .grade import as_fraction, closing_braces

_MINUS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
_FULL_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # of ASCII
_SPACES = dict.fromkeys(
    map(ord, "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000"), " "
)
_NOTHING = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), "")
_SIGNS = {
    "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "\u00d7": r"\times ", "·": r"\cdot ", "÷": r"\div ",
    "±": r"\pm ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∅": r"\emptyset ", "≈": r"\approx ", "\u222a": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "\u2032": "'",
    "²": "^{2}", "³": "^{3}", "θ": r"\theta ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
}  # fmt: skip
_TRANSLATED = _FULL_WIDTH | _MINUS | _SPACES | _NOTHING | {ord(sign): text for sign, text in _SIGNS.items()}
_ROOT = re.compile(r"√(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-zA-Z]))")
_WRAPPED = (
    re.compile(r"\*\*(?P<in>[^*]+)\*\*"),
    re.compile(r"__(?P<in>[^_]+)__"),
    re.compile(r"\*(?P<in>[^*]+)\*"),
    re.compile(r"_(?P<in>[^_]+)_"),
    re.compile(r"`(?P<in>[^`]+)`"),
    re.compile(r"\$\$?(?P<in>[^$]*[^$\\])\$\$?"),
    re.compile(r"\\\((?P<in>(?:(?!\\[()]).)*)\\\)", re.DOTALL),
    re.compile(r"\\\[(?P<in>(?:(?!\\[\[\]]).)*)\\\]", re.DOTALL),
)
_LOOK = re.compile(
    r"\\(?:bm|boldsymbol|pmb|mathbf|textbf|textcolor\s*\{[^{}]*\}|mathit|textit|underline)\s*\{([^{}]*)\}"
)
_COLOR = re.compile(r"\\color\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}\s*(?:\{([^{}]*)\}$)?")
_THOUSANDS = re.compile(r"(?<=\d),(?:\\!\s*)+(?=\d{3})")
_AROUND = re.compile(
    r"^(?:\s|\\(?:[,;:! ]|q?quad|displaystyle|[hH]uge|[lL]arge|LARGE|rm)(?![a-zA-Z]))+"
    r"|(?:\s|\\(?:[,;:!]|q?quad)(?![a-zA-Z]))+$"
)
_SPACE = re.compile(r"(?<!\\)\\[;: ]|\\text\s*\{\s*\}")
_UPRIGHT = re.compile(r"\\(?:rm\s*(?=\{)|textup(?=\s*\{))|(?P<rest>\\rm(?![a-zA-Z])\s*)")
_PART = r"(?:\d|\{[^{}]*\}|\\[a-zA-Z]+(?![a-zA-Z{]))"
_FRACTION = re.compile(rf"\\[dtc]?frac\s*({_PART})\s*({_PART})")
_NAMED = re.compile(r"(?<![a-zA-Z\\{])(ln|log|sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_ABOUT = re.compile(r"^(?:=|(?:\\approx|\\simeq|\\thickapprox)(?![a-zA-Z]))\s*")
# Words before an answer that say that it is one.
_LEAD = re.compile(
    r"^(?:the\s+)?(?:(?:final|correct|right)\s+)?(?:answer|option|choice)\s*(?:is\b|:|=)?\s*(?=\S)",
    re.IGNORECASE,
)
_END = re.compile(r"(?:\s|(?<!\\)[.,;]|\\\\)+$")
_FUNCTION = re.compile(r"^[fghFGHPES]'*\s*\([^()=]*\)\s*=\s*(?=[^=]+$)")
_EXPONENT = re.compile(r"\^\s*(-\d+|\d{2,})")
_INFINITY = re.compile(r"(?<![a-zA-Z\\])infinity(?![a-zA-Z])", re.IGNORECASE)
_MINUS_TEXT = re.compile(r"\\text\s*\{\s*-\s*\}")
_ALL_TEXT = re.compile(r"\\(?:text(?:normal|bf|it|rm|sf)?|mbox|math(?:rm|it|bf|sf))\s*\{([^{}]*)\}")
_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?(?:[ap]m)?")
_SEVERAL_LETTERS = re.compile(r"[a-z'-]{3,}")
_IN_WORDS = {
    "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10", "eleven": "11", "twelve": "12", "thirteen": "13",
    "fourteen": "14", "fifteen": "15", "sixteen": "16", "seventeen": "17", "eighteen": "18",
    "nineteen": "19", "twenty": "20",
}  # fmt: skip
_MONEY = re.compile(
    r"^([+-]?)\s*(?:[£€¥]|(?:US|A|C)?\\?\$|\\(?:pounds|euro|texteuro|yen)(?![a-zA-Z])|(?:USD|EUR|GBP)\s)"
    r"\s*([+-]?)\s*(?=[\d.])"
)
_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_TEXT = r"\\(?:text(?:normal|bf|it|rm|sf)?|mbox|math(?:rm|it|bf|sf))\s*\{[^{}]*\}"
_UNIT_PART = (
    rf"(?:{_TEXT}|[a-zA-Zµμ]+\.?|[€£¥]|\\%|%|\^\s*(?:\{{-?\d\}}|\d|\\circ|\{{\\circ\}})"
    r"|[/·]|\\cdot|\\[,!;: ]|[\s()])"
)
_WITH_UNIT = re.compile(
    rf"(?P<number>{_NUMBER}|[+-]?(?:\d+ )?\d+/\d+|[+-]?(?:\d+\s*)?\\frac\{{[+-]?\d+\}}\{{\d+\}})"
    rf"(?P<unit>(?:\s|\\[,!;: ])*{_UNIT_PART}+)"
)
_WORD = re.compile(r"[a-zA-Zµμ]+")
_COMMAND = re.compile(r"\\(?:text(?:normal|bf|it|rm|sf)?|mbox|math(?:rm|it|bf|sf)|cdot)(?![a-zA-Z])")
MOST_WORDS = 4  # of a unit: "miles per hour", "square meters"
# Words behind a number that make it another one, or none.
_NO_UNIT = {
    "or", "and", "maybe", "perhaps", "possibly", "probably", "not", "no", "but", "either", "plus", "minus",
    "times", "less", "more", "than", "to", "through", "at", "least", "most", "about", "approximately", "if",
    "is", "are", "was", "over", "under", "between", "by", "squared", "cubed", "factorial", "half", "halves",
    "third", "thirds", "quarter", "quarters", "zero", "one", "two", "three", "four", "five", "six", "seven",
    "eight", "nine", "ten", "eleven", "twelve", "twenty", "thirty", "forty", "fifty", "sixty", "seventy",
    "eighty", "ninety", "hundred", "thousand", "million", "billion", "trillion", "dozen", "dozens", "pair",
    "pairs", "mod", "base", "x", "y", "z", "n", "e", "i", "pi",
}  # fmt: skip
_PERCENT = re.compile(r"(?P<number>.*\d)\s*(?:\\?%|¢|\\?(?:text\s*\{\s*)?cents?\s*\}?)", re.DOTALL)
_TIMES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_LETTER = re.compile(r"\(([A-J])\)|([A-J])\)?")
_BETWEEN = re.compile(r"\s*(?:,\s*(?:and|or)\b|,|\b(?:and|or)\b|\\text\s*\{\s*,?\s*(?:and|or)\s*\})\s*")
_CHOICE = re.compile(r"\(?([A-J])[:.)](?:(?=[\s\\])(?P<text>.*))?", re.DOTALL)
_OTHER_CHOICE = re.compile(r"(?<![a-zA-Z])\(?[A-J]\)")
_SIZED = re.compile(r"\\(?:left|right)(?![a-zA-Z])\s*")
_BASE = re.compile(r"([0-9A-Z]+)_\s*(?:\{\s*(\d+)\s*\}|(\d+)|\{\s*\\text\s*\{\s*(\w+)\s*\}\s*\})")


def clean(text: str) -> str:
    """Return a text without marks that say nothing of what it means."""
    # Dollars around the numbers of a sentence: none of it is outside.
    dollars = text.replace("\\$", "").split("$")
    if len(dollars) > 1 and len(dollars) % 2 and not any(map(str.isdigit, "".join(dollars[::2]))):
        text = re.sub(r"(?<!\\)\$", "", text)
    text = _ROOT.sub(lambda found: f"\\sqrt{{{next(filter(None, found.groups()))}}}", text)
    text = text.translate(_TRANSLATED).strip()
    text = _SPACE.sub(" ", _UPRIGHT.sub(lambda found: "" if found["rest"] else "\\text", text))
    while True:
        before = text
        for wrapped in _WRAPPED:
            if found := wrapped.fullmatch(text):
                text = found["in"].strip()
        text = _LEAD.sub("", _END.sub("", _AROUND.sub("", text.strip())))
        if text.startswith("{") and closing_braces(text).get(0) == len(text) - 1:
            text = text[1:-1].strip()
        if text == before:
            break
    text = _COLOR.sub(lambda found: found[1] or "", _LOOK.sub(r"\1", text))
    text = text.replace("~", " ").replace("\\degree", "^\\circ").replace("\\varnothing", "\\emptyset")
    text = _THOUSANDS.sub(",", _FRACTION.sub(_with_braces, _AROUND.sub("", text)))
    text = _FUNCTION.sub("", _ABOUT.sub("", text.strip()))
    text = _NAMED.sub(r"\\\1", _INFINITY.sub(r"\\infty ", text))
    text = _EXPONENT.sub(r"^{\1}", _MINUS_TEXT.sub("-", text))
    text = _MONEY.sub(r"\1\2", text).strip()
    if (inner := _ALL_TEXT.fullmatch(text)) and any(map(str.isdigit, inner[1])):
        text = inner[1].strip()
    return _IN_WORDS.get(text.lower(), text)


def _with_braces(fraction: re.Match[str]) -> str:
    above, below = (part if part.startswith("{") else f"{{{part}}}" for part in fraction.groups())
    return f"\\frac{above}{below}"


def without_unit(text: str) -> str | None:
    """Return the number of a number with a unit, the text if it is none; None: more than a unit follows."""
    found = _WITH_UNIT.fullmatch(text)
    if found is None or not any(map(str.isdigit, found["number"])):
        return text
    words = _WORD.findall(_COMMAND.sub(" ", found["unit"]))
    if not words:  # a percent sign, a degree sign: math-verify knows them
        return found["number"] if any(sign in found["unit"] for sign in "€£¥") else text
    if words[0].lower().removesuffix("s") in _TIMES and (
        size := as_fraction(found["number"].replace(",", ""))
    ):
        size *= _TIMES[words[0].lower().removesuffix("s")]
        words, number = (
            words[1:],
            f"{size.numerator}/{size.denominator}" if size.denominator > 1 else f"{size}",
        )
    else:
        number = found["number"]
    if any(word.lower() in _NO_UNIT for word in words) or len(words) > MOST_WORDS:
        return None if _COMMAND.search(found["unit"]) or len(words) > 1 else text
    return number


def same_letter(gold: str, answer: str) -> bool | None:
    """Return whether an answer names the choices that are right; None: the gold answer names none."""
    right = _letters(_plain(gold))
    if right is None:
        return None
    if (said := _letters(_plain(answer))) is not None:
        return said == right
    choice = _CHOICE.fullmatch(_plain(answer))
    return choice is not None and right == [choice[1]] and not _OTHER_CHOICE.search(choice["text"] or "")


def _letters(text: str) -> list[str] | None:
    """Return the letters of choices, each once; None where there is something else."""
    found = [_LETTER.fullmatch(part.strip()) for part in _BETWEEN.split(text)]
    return sorted({letter[1] or letter[2] for letter in found if letter}) if all(found) else None


def _plain(text: str) -> str:
    found = re.fullmatch(r"\\(?:text(?:bf|rm|it)?|mathrm|mbox)\s*\{([^{}]*)\}(.*)", text, re.DOTALL)
    return _SIZED.sub("", found[1] + found[2] if found else text).strip()


def has_same_words(gold: str, answer: str) -> bool:
    """Return whether both say the same words, or the same time of a day, whatever their case."""
    right, said = (re.sub(r"[\s.~]|\\ ", "", _ALL_TEXT.sub(r"\1", text)).lower() for text in (gold, answer))
    if _TIME.fullmatch(right):
        said = said if right.endswith("m") else re.sub("[ap]m$", "", said)
    elif not _SEVERAL_LETTERS.fullmatch(right):
        return False
    return right == said


def same_share(gold: str, answer: str) -> bool | None:
    """Return whether numbers are equal of which one is in percent or cents: 50 % is 50, or one half.

    None where neither or both are, or something is not a number.
    """
    found = [_PERCENT.fullmatch(text) for text in (gold, answer)]
    if (found[0] is None) == (found[1] is None):
        return None
    share, other = (found[0], answer) if found[0] else (found[1], gold)
    if share is None:
        return None
    number = as_fraction(_MONEY.sub(r"\1\2", share["number"].rstrip("\\ ")))
    plain = as_fraction(without_unit(other) or other)
    return None if number is None or plain is None else plain in (number, number / 100)


def same_in_base(gold: str, answer: str) -> bool | None:
    """Return whether numerals with a base are equal; None where neither of both has one.

    A numeral without a base is compared by its digits: the question names the base.
    """
    right, said = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if right is None and said is None:
        return None
    if right is None or said is None:
        return (right[1] if right else gold) == (said[1] if said else answer)
    values = []
    for found in (right, said):
        base = next(filter(None, found.groups()[1:]))
        try:
            values.append(int(found[1], int(_IN_WORDS.get(base, base))))
        except ValueError:  # a digit that the base does not have, or no base at all
            return gold == answer
    return values[0] == values[1]


# --- intervals -----------------------------------------------------------------------------------

_NAME = r"(?:[a-zA-Z]|\\[a-zA-Z]+)"
_RELATION = re.compile(r"(\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt|neq|ne)(?![a-zA-Z])|<=|>=|<|>)")
_UNEQUAL = frozenset({"\\ne", "\\neq"})
_CLOSED = frozenset({"\\le", "\\leq", "\\leqslant", "<=", "\\ge", "\\geq", "\\geqslant", ">="})
_LESS = frozenset({"\\le", "\\leq", "\\leqslant", "<=", "<", "\\lt"})
_OR = re.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\\(?:lor|vee)(?![a-zA-Z])|\bor\b)\s*")
_AND = re.compile(r"\s*(?:\\text\s*\{\s*and\s*\}|\\(?:land|wedge)(?![a-zA-Z])|\band\b)\s*")
_INTERVAL = re.compile(r"(?:\\left)?\s*[\[(].*,.*(?:\\right)?\s*[\])]", re.DOTALL)


def as_interval(text: str) -> str | None:
    """Return the interval that inequalities of one variable say, as LaTeX; None: it is something else."""
    if len(both := _AND.split(text)) == 2:
        return _both(*(_one_interval(part.strip()) for part in both))
    found = [_one_interval(part.strip()) for part in _OR.split(text)]
    return None if None in found else "\\cup".join(filter(None, found))


def _both(first: str | None, second: str | None) -> str | None:
    """Return the interval that lies in one above a number and in one below another."""
    above, below = sorted((first or "", second or ""), key=lambda one: one.startswith("(-\\infty,"))
    if not (above.endswith(",\\infty)") and below.startswith("(-\\infty,")):
        return None
    return above.removesuffix("\\infty)") + below.removeprefix("(-\\infty,")


def _one_interval(text: str) -> str | None:
    parts = _RELATION.split(text)
    sides, relations = [part.strip() for part in parts[::2]], parts[1::2]
    named = [re.fullmatch(_NAME, side) is not None for side in sides]
    if len(sides) == 2 and named in ([True, False], [False, True]):
        name_first = named[0]
        bound, relation = sides[1 if name_first else 0], relations[0]
        if relation in _UNEQUAL:
            return f"(-\\infty,{bound})\\cup({bound},\\infty)"
        below = (relation in _LESS) == name_first  # the variable is below the bound
        closed = relation in _CLOSED
        if below:
            return f"(-\\infty,{bound}{']' if closed else ')'}"
        return f"{'[' if closed else '('}{bound},\\infty)"
    if len(sides) == 3 and named == [False, True, False] and not _UNEQUAL & {*relations}:
        less = [relation in _LESS for relation in relations]
        if less[0] != less[1]:
            return None
        if not less[0]:
            sides, relations = sides[::-1], relations[::-1]
        opening = "[" if relations[0] in _CLOSED else "("
        return f"{opening}{sides[0]},{sides[2]}{']' if relations[1] in _CLOSED else ')'}"
    return None


def is_interval(text: str) -> bool:
    """Return whether a text looks like an interval, or a union of some."""
    return all(_INTERVAL.fullmatch(part.strip()) for part in re.split(r"\\cup(?![a-zA-Z])", text))


def same_letters(first: str, second: str) -> bool:
    """Return whether both name the same variables, commands and words apart."""
    plain = (re.sub(r"\\[a-zA-Z]+|\b(?:and|or)\b", " ", text) for text in (first, second))
    left, right = ({letter for letter in text if letter.isalpha()} for text in plain)
    return left == right
