"""Judges of answers beside what is known to be right: `python -m bench.rewards [math|code ...]`.

    math   answers of GSM8K and MATH-500, each in 20 writings that mean the same and 20 that do not, judged
           by the task and by math-verify alone; seconds of a verdict
    code   solutions of HumanEval's and MBPP's authors, written down in 12 ways, beside their verdicts alone

The data lie in folders of these names in $ECHO_PLANES_DATA. Every figure goes into FILE, with `verdicts`:
{claim: true or false}. The exit status is 1 where one is false.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from echo_planes.sandbox.model import Limits
from echo_planes.tasks.code.judging import called, parse_answer
from echo_planes.tasks.code.problems import Problem, load_problems
from echo_planes.tasks.code.runner import ProgramRunner
from echo_planes.tasks.math.datasets import read_problems
from echo_planes.tasks.math.grade import as_fraction
from echo_planes.tasks.math.judging import MathJudge
from echo_planes.tasks.math.verifier import Verifier

DATA = Path(os.environ.get("ECHO_PLANES_DATA", "data"))
WRITINGS = 20  # of each answer, that mean the same, and that do not
LIMIT_S, LONGEST = 10.0, 4096
FALSE_SHARE = 0.001
UNITS = (
    "cm",
    "dollars",
    "eggs",
    "people",
    "miles per hour",
    "square meters",
    "USD",
    "kg",
    "hours",
    "years old",
)
Writing = tuple[str, str]  # how it is made, and the text

# --- math ----------------------------------------------------------------------------------------

LOOKS: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "dollars": lambda text: f"${text}$",
    "round": lambda text: f"\\({text}\\)",
    "square": lambda text: f"\\[ {text} \\]",
    "bold": lambda text: f"**{text}**",
    "stop": lambda text: f"{text}.",
    "spaces": lambda text: f"  {text}\n",
    "color": lambda text: f"\\color{{red}}{{{text}}}" if "{" not in text else f"\\color{{red}}{text}",
    "bold dollars": lambda text: f"**${text}$**",
    "display": lambda text: f"\\displaystyle {text}",
    "dfrac": lambda text: text.replace("\\frac", "\\dfrac"),
    "tfrac": lambda text: text.replace("\\dfrac", "\\frac").replace("\\frac", "\\tfrac"),
    "thin space": lambda text: f"\\,{text}\\,",
    "tilde": lambda text: f"~{text}",
    "wide": lambda text: f"\\quad {text}",
    "bm": lambda text: f"\\bm{{{text}}}" if "{" not in text else text,
    "minus sign": lambda text: text.replace("-", "\u2212"),
    "left right": lambda text: (
        text if "\\left" in text else text.replace("(", "\\left(").replace(")", "\\right)")
    ),
    "braces": lambda text: f"{{{text}}}",
    "dollars, stop": lambda text: f"${text}$.",
}


def same_numbers(text: str, value: Fraction, draw: random.Random) -> Iterator[Writing]:
    """Yield writings of a number that mean it."""
    whole = value.denominator == 1
    yield "named", f"x={text}"
    yield "named, spaces", f"x = {text}"
    yield "about", f"\\approx {text}"
    for unit in draw.sample(UNITS, 3):
        yield "unit", f"{text} {unit}"
        yield "text unit", f"{text}\\text{{ {unit}}}"
    yield "tilde unit", f"{text}~\\text{{cm}}"
    yield "degrees", f"{text}°"
    yield "degree", f"{text}^\\circ"
    yield "ratio", f"\\frac{{{2 * value.numerator}}}{{{2 * value.denominator}}}"
    yield "slash", f"{3 * value.numerator}/{3 * value.denominator}"
    if whole:
        yield "thousands", f"{value.numerator:,}"
        yield "thousands, braces", f"{value.numerator:,}".replace(",", "{,}")
        yield "decimals", f"{value.numerator}.00"
        yield "money", f"\\${value.numerator}"
        yield "pounds", f"£{value.numerator}"
        yield "sum", f"{value.numerator - 3}+3={value.numerator}"
        yield "scientific", f"{value.numerator}e0"
        yield "full width", str(value.numerator).translate({ord(str(i)): chr(0xFF10 + i) for i in range(10)})


def other_numbers(value: Fraction, draw: random.Random) -> Iterator[Writing]:
    """Yield writings of something else than a number."""
    said, one = shown(value), Fraction(draw.randrange(1, 10))
    for name, other in {
        "more": value + one,
        "less": value - one,
        "negative": -value if value else Fraction(1),
        "ten times": 10 * value if value else Fraction(10),
        "a little more": value + Fraction(1, 1000),
        "squared": value * value + (1 if value in (0, 1) else 0),
        "doubled": 2 * value if value else Fraction(2),
    }.items():
        yield name, shown(other)
        yield f"{name}, unit", f"{shown(other)} {draw.choice(UNITS)}"
    yield "or", f"{said} or {shown(value + one)}"
    yield "text or", f"{said} \\text{{ or }} {shown(value + one)}"
    yield "list", f"{said}, {shown(value + one)}"
    yield "lie", f"{shown(value + one)}={said}"
    yield "two equations", f"x={shown(value + one)}, x={said}"
    yield "maybe", f"{said} \\text{{ or maybe more}}"
    yield "dozen", f"{shown(value or Fraction(1))} dozen"
    yield "factorial", f"{shown(abs(value) + 3)}!"
    yield "variable", f"{said}y" if value else "y"
    yield "sum", f"{said}+1"
    yield "million", f"{shown(value or Fraction(1))} million"


def shown(value: Fraction) -> str:
    return (
        str(value.numerator)
        if value.denominator == 1
        else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    )


def other_terms(text: str) -> Iterator[Writing]:
    """Yield writings of something else than a term, whatever it is."""
    for number in (1, 2, 3, 5, 7, 11, 13):
        yield f"another number {number}", f"{1000 * number + 37}"
        yield f"and {number}", f"{text}, {1000 * number + 37}"
        yield (
            f"a lie {number}",
            f"{1000 * number + 37}={text}" if "=" not in text else f"{1000 * number + 37}",
        )


def writings(text: str, seed: int) -> tuple[list[Writing], list[Writing]]:
    """Return `WRITINGS` that mean an answer, and as many that do not; a function of both arguments."""
    draw = random.Random(f"{seed}/{text}")
    value = as_fraction(re.sub(r"(?<=\d),(?:\\!)?(?=\d{3})", "", text))
    looks = [(name, look(text)) for name, look in LOOKS.items()]
    if value is None:
        return looks[:WRITINGS], list(other_terms(text))[:WRITINGS]
    same = [*looks, *same_numbers(text, value, draw)]
    return draw.sample(same, WRITINGS), draw.sample(list(other_numbers(value, draw)), WRITINGS)


def judge_math(seed: int, most: int) -> dict[str, Any]:
    """Judge all writings; `most` answers of each data set."""
    judge, alone = MathJudge(LIMIT_S, LONGEST), Verifier(LIMIT_S, LONGEST)
    told: dict[str, Any] = {}
    for name in ("gsm8k", "math500"):
        golds = sorted({one.answer for one in read_problems(DATA / name, name, "test")})[:most]
        rows = {who: {"same": 0, "refused": 0, "other": 0, "accepted": 0} for who in ("ours", "math-verify")}
        seconds, wrong = [], []
        for gold in golds:
            same, other = writings(gold, seed)
            for meant, some in ((True, same), (False, other)):
                for kind, text in some:
                    begun_s = time.perf_counter()
                    said = judge.verdict(gold, text) == "correct"
                    seconds.append(time.perf_counter() - begun_s)
                    for who, verdict in (
                        ("ours", said),
                        ("math-verify", alone.verify(gold, text) == "correct"),
                    ):
                        rows[who]["same" if meant else "other"] += 1
                        rows[who]["refused" if meant else "accepted"] += verdict != meant
                    if said != meant:
                        wrong.append([gold, kind, text])
        told[name] = {"answers": len(golds), **rows, "median_s": statistics.median(seconds), "wrong": wrong}
        shares = ", ".join(
            f"{who} refuses {row['refused'] / row['same']:.2%} of {row['same']:,} and accepts "
            f"{row['accepted'] / row['other']:.2%} of {row['other']:,}"
            for who, row in rows.items()
        )
        print(f"[rewards] {name}: {shares}; a verdict {1000 * told[name]['median_s']:.1f} ms", flush=True)
        for gold, kind, text in wrong[:40]:
            print(f"[rewards]   {kind}: {gold!r} and {text!r}", flush=True)
    judge.close()
    alone.close()
    return told


def math_verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims about the math judge, and whether each holds."""
    rows = [one["ours"] for one in told.values()]
    refused = sum(row["refused"] for row in rows) / sum(row["same"] for row in rows)
    accepted = sum(row["accepted"] for row in rows) / sum(row["other"] for row in rows)
    return {
        f"of writings that mean the answer at most {FALSE_SHARE:.1%} are refused": refused <= FALSE_SHARE,
        f"of writings of something else at most {FALSE_SHARE:.1%} are accepted": accepted <= FALSE_SHARE,
    }


# --- code ----------------------------------------------------------------------------------------

DEMO = "```python\nprint('a demonstration')\n```"
OUTPUT = "```\na demonstration\n```"
WAYS: dict[str, Callable[[str], str]] = {
    "a fence": lambda code: f"```python\n{code}\n```",
    "prose around it": lambda code: f"Here it is:\n\n```python\n{code}\n```\n\nIt loops once.",
    "after a thought": lambda code: f"<think>\n```python\nx = 1\n```\n</think>\n```python\n{code}\n```",
    "a demo behind it": lambda code: f"```python\n{code}\n```\nSo:\n{DEMO}",
    "an output behind it": lambda code: f"```python\n{code}\n```\nIt prints:\n{OUTPUT}",
    "four backticks": lambda code: f"````python\n{code}\n````",
    "tildes": lambda code: f"~~~python\n{code}\n~~~",
    "attributes": lambda code: f'```python title="answer.py"\n{code}\n```',
    "text behind the closing fence": lambda code: f"```python\n{code}\n``` That is all.",
    "never closed": lambda code: f"```python\n{code}\n",
    "indented": lambda code: "1. So:\n\n" + textwrap.indent(f"```python\n{code}\n```", "    "),
    "a docstring with a fence": lambda code: (
        f'```python\n"""Example:\n```\nf(1)\n```\n"""\n{code}\n```'
    ),
}  # fmt: skip


def judge_code(most: int) -> dict[str, Any]:
    """Judge all solutions as they are, and in all ways; `most` problems of each data set."""
    runner = ProgramRunner(2, Limits(wall_s=10.0, cpu_s=10.0))
    told: dict[str, Any] = {}
    for name in ("humaneval", "mbpp"):
        problems = load_problems(name, str(DATA / name))[:most]
        passed, other = 0, []
        for number, problem in enumerate(problems):
            codes = {way: parsed(write(problem.solution), problem) for way, write in WAYS.items()}
            asked = sorted({problem.solution, *filter(None, codes.values())})
            found = runner.judge(asked, problem.tests, problem.head, problem.solution)
            share = {code: one.share for code, one in found.items()}
            passed += share[problem.solution] == 1.0
            for way, code in codes.items():
                if code is None or share[code] != share[problem.solution]:
                    other.append([number, way])
        told[name] = {"problems": len(problems), "passed": passed, "judged otherwise": other}
        print(
            f"[rewards] {name}: {passed} of {len(problems)} solutions pass as they are; of "
            f"{len(problems) * len(WAYS):,} writings {len(other)} are judged otherwise: {other[:20]}",
            flush=True,
        )
    runner.close()
    return told


def parsed(text: str, problem: Problem) -> str | None:
    names = called(problem.tests, problem.head, problem.solution)
    code: str | None = parse_answer(text, problem.head, fenced=True, names=names).code
    return code


def code_verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims about the code judge, and whether each holds."""
    return {
        f"in {len(WAYS)} ways of writing it down each solution is judged as it is alone": not any(
            one["judged otherwise"] for one in told.values()
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="math|code", help="default: both")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0, help="of the writings")
    parser.add_argument("--most", type=int, default=10_000, help="answers or problems of each data set")
    args = parser.parse_args()
    if unknown := set(args.parts) - {"math", "code"}:
        parser.error(f"{', '.join(unknown)}: there are math and code")
    told: dict[str, Any] = {}
    verdicts: dict[str, bool] = {}
    for part in args.parts or ["math", "code"]:
        told[part] = judge_math(args.seed, args.most) if part == "math" else judge_code(args.most)
        verdicts |= (math_verdicts if part == "math" else code_verdicts)(told[part])
    told["verdicts"] = verdicts
    for claim, holds in verdicts.items():
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    if args.json:
        args.json.write_text(json.dumps(told, indent=2) + "\n")
    raise SystemExit(0 if all(verdicts.values()) else 1)


if __name__ == "__main__":
    main()
