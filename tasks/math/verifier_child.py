"""Child process of the verifier: reads one JSON request per line, writes one verdict per line. A script."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

MEMORY_BYTES = 4 << 30
DIGITS, MOST_DIGITS = 40, 10_000  # of numbers that are compared, and to get those of a small difference
ROUNDED = 1e-6  # relative difference of decimals that counts as none
MOST_SYMBOLS, LEAST_REALS = 3, 5
# Values of the symbols, as numerators and denominators: both signs, sizes around 1, none in a row equal.
POINTS = [
    [(sign * (7 * i + 3 * j + 2), 5 + 2 * ((i + j) % 7)) for j in range(MOST_SYMBOLS)]
    for i in range(8)
    for sign in (1, -1)
]


def reply(word: str) -> None:
    """Write a whole line by one system call, because the parent reads it by one."""
    os.write(1, word.encode() + b"\n")


def differs(gold: object, value: object) -> bool:
    """Return whether numbers differ that math-verify takes for equal: it rounds to six decimals."""
    import sympy  # type: ignore[import-untyped]

    percent = sympy.UnevaluatedExpr  # math-verify lets 50 % be 50, and one half
    if isinstance(gold, sympy.Tuple | sympy.FiniteSet) and type(gold) is type(value):
        pairs = zip(gold.args, value.args, strict=False)  # type: ignore[attr-defined]
        return any(differs(*pair) for pair in pairs)
    if not (isinstance(gold, sympy.Expr) and isinstance(value, sympy.Expr)):
        return False
    if gold.free_symbols or value.free_symbols or gold.has(percent) or value.has(percent):
        return False
    gap = gold - value
    if gap.is_Rational:
        return bool(gap != 0) and not gap.has(sympy.Float)
    size = abs(sympy.N(gap, DIGITS, maxn=MOST_DIGITS))
    limit = ROUNDED if gap.has(sympy.Float) else 10.0 ** (10 - DIGITS)
    return bool(size > limit * max(abs(sympy.N(gold, DIGITS)), abs(sympy.N(value, DIGITS))))


def same_equation(gold: object, value: object) -> bool:
    """Return whether two equations say the same: the differences of their sides are in a constant ratio."""
    import sympy

    if not (isinstance(gold, sympy.Eq) and isinstance(value, sympy.Eq)):
        return False
    gaps = [sympy.expand(one.lhs - one.rhs) for one in (gold, value)]
    if not all(gap.is_polynomial() and gap.free_symbols for gap in gaps):
        return False
    ratio = sympy.cancel(gaps[0] / gaps[1])
    return bool(ratio.is_number and ratio != 0)


def agrees(gold: object, value: object) -> bool:
    """Return whether two terms are equal wherever both are real, as `sqrt(1/n)` and `1/sqrt(n)` are.

    Both must be real at the same of some points, and at several of them.
    """
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(value, sympy.Expr)):
        return False
    symbols = sorted(gold.free_symbols, key=str)
    if not 0 < len(symbols) <= MOST_SYMBOLS or gold.free_symbols != value.free_symbols:
        return False
    if not any(power.exp.is_Rational and not power.exp.is_Integer for power in gold.atoms(sympy.Pow)):
        return False
    reals = 0
    for point in POINTS:
        places = {one: sympy.Rational(*point[i]) for i, one in enumerate(symbols)}
        found = [sympy.N(one.subs(places), DIGITS) for one in (gold, value)]
        is_real = [one.is_real for one in found]
        if is_real[0] != is_real[1]:
            return False
        if is_real[0]:
            reals += 1
            if abs(found[0] - found[1]) > 10.0 ** (10 - DIGITS) * max(map(abs, found)):
                return False
    return reals >= LEAST_REALS


def main() -> None:
    """Answer requests until the parent closes standard input."""
    sys.stdout = sys.stderr  # so that the output of a library is not taken for a verdict
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        reply("missing")
        return
    logging.disable(logging.CRITICAL)
    # LaTeX only: math-verify's plain-expression path hands model-written text to sympy's eval.
    latex = [LatexExtractionConfig()]

    def compare(gold: str, answer: str) -> str:
        parsed = [
            parse(f"${text}$", extraction_config=latex, parsing_timeout=None) for text in (gold, answer)
        ]
        if all(isinstance(item, str) for item in parsed[1]):  # math-verify parsed nothing but plain text
            return "unparsable"
        gold_value, value = (next((one for one in item if not isinstance(one, str)), None) for item in parsed)
        if verify(*parsed, timeout_seconds=None):
            return "wrong" if differs(gold_value, value) else "correct"
        is_same = agrees(gold_value, value) or same_equation(gold_value, value)
        return "correct" if is_same else "wrong"

    # With the default action the kernel ends this process even in a long C call, and even without a parent.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    compare("x", "1+x")  # the first call loads the grammar, which must not count towards a deadline
    reply("ready")
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            verdict = compare(request["gold"], request["answer"])
        except MemoryError:
            verdict = "timeout"
        except RecursionError:
            verdict = "unparsable"
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(verdict)


if __name__ == "__main__":
    main()
