"""Real data against the tasks that judge it: `python -m bench.verify [--data DIR] [--json FILE]`.

- gsm8k, math500: every gold answer, and every reference solution's text, must be right by the reward of
  task=math; the answer plus one, both of them, and the answer of another row must be wrong.
- humaneval, mbpp: every reference program must pass its tests in the sandbox, by the reward of task=code;
  programs that return nothing, or what equals everything, belong to another row or end early must not.
- poker: every hand must replay by the rules, to the stacks it states where it states them, and to the payoffs
  that pokerkit's own reader finds.

What did not come out as it must is listed with its text and the reason; then the exit status is 1, and also
where nothing was there to judge. Rates are of this machine at this moment, the start of the sandbox and of
the verifier included.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pokerkit import HandHistory

from echo_planes.data.tasks.datasets import has_split, iter_rows
from echo_planes.errors import DataError
from echo_planes.tasks.code.adapter import CodeTask
from echo_planes.tasks.code.options import CodeOptions
from echo_planes.tasks.code.problems import load_problems, split
from echo_planes.tasks.math.adapter import MathTask
from echo_planes.tasks.math.datasets import PARSERS
from echo_planes.tasks.math.options import MathOptions
from echo_planes.tasks.poker.phh import read_replays
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Prompt, Reward

DATA_DIR = Path(os.environ.get("ECHO_PLANES_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
NUM_SLOTS = 2
PROGRAM_S = 30.0  # the longest takes 3.3 s of a free core; what is tried is the judging, not the machine
SHOWN_CHARS = 200
MATH_TEXTS = {"gsm8k": {"question": str, "answer": str}, "math500": {"problem": str, "solution": str}}


@dataclass(frozen=True, slots=True)
class Oddity:
    """Judgement that did not come out as it must."""

    check: str
    where: str
    text: str  # what was judged, cut
    reason: str


@dataclass(slots=True)
class Section:
    """Findings in one data set."""

    name: str
    rows: int
    judged: dict[str, int] = field(default_factory=dict)  # check -> how many
    counts: dict[str, int] = field(default_factory=dict)  # what is neither right nor wrong
    oddities: list[Oddity] = field(default_factory=list)
    elapsed_s: float = 0.0

    def note(self, check: str, where: str, text: str, reason: str | None) -> None:
        """Count one judgement; `reason` says why it is not as it must be, None that it is."""
        self.judged[check] = self.judged.get(check, 0) + 1
        if reason is not None:
            self.oddities.append(Oddity(check, where, text[-SHOWN_CHARS:], reason))

    def odd(self, check: str) -> int:
        """Count the judgements of a check that are not as they must be."""
        return sum(oddity.check == check for oddity in self.oddities)


def answered(text: str) -> Episode:
    """A finished answer of one token, whose text is `text`."""
    return Episode((1,), (True,), (0.0,), (), "stop", text)


# --- math ----------------------------------------------------------------------------------------


def verify_math(folder: Path, dataset: str) -> Section:
    """Judge answers, solutions and wrong answers of a file's test rows.

    Raises:
        DataError: nothing to read.
    """
    task = MathTask(MathOptions(dataset=dataset, template="plain"), FakeTokenizer(), 0)
    part = "test" if has_split(folder, "test") else None
    fields, parse = PARSERS[dataset]
    rows = [row for _, row in iter_rows(folder, {**fields, **MATH_TEXTS[dataset]}, split=part, what=dataset)]
    golds = [parse(row).answer for row in rows]
    section = Section(dataset, len(rows))
    begun_s = time.perf_counter()
    for number, (row, gold) in enumerate(zip(rows, golds, strict=True)):
        prompt = Prompt(number, (), gold, "")
        for check, text in right_texts(dataset, row):
            reward = task.reward(prompt, answered(text))
            reason = None if reward.correct else f"{math_reason(reward)}; the gold answer is {gold}"
            section.note(check, f"row {number + 1}", text, reason)
        for check, wrong in wrong_answers(golds, number):
            reward = task.reward(prompt, answered(boxed(wrong)))
            reason = f"counted as {gold}" if reward.correct else None
            section.note(check, f"row {number + 1}", wrong, reason)
    section.elapsed_s = time.perf_counter() - begun_s
    return section


def boxed(answer: str) -> str:
    """An answer as the prompt asks for it."""
    return f"<think>so</think>\\boxed{{{answer}}}"


def right_texts(dataset: str, row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the texts of a policy that knows the answer or the authors' solution, as they wrote them."""
    if dataset == "gsm8k":
        working, _, answer = row["answer"].rpartition("####")
        yield "answer against itself", boxed(answer.strip())
        yield "reference solution", f"{working}\\boxed{{{answer.strip()}}}"
    else:
        yield "answer against itself", boxed(str(row["answer"]))
        yield "reference solution", row["solution"]


def wrong_answers(golds: Sequence[str], number: int) -> Iterator[tuple[str, str]]:
    """Answers that are not row `number`'s."""
    gold = golds[number]
    whole = gold.removeprefix("-").isdecimal()
    more = str(int(gold) + 1) if whole else f"{gold}+1"
    yield "wrong: plus one", more
    yield "wrong: two answers", f"{gold}, {more}"
    yield "wrong: two answers", f"{more}, {gold}"
    for step in (1, 7):
        other = golds[(number + step) % len(golds)]
        if other.rpartition("=")[2] != gold:  # "x=5" is right where 5 is
            yield "wrong: another row's", other


def math_reason(reward: Reward) -> str:
    """Why an answer was not right."""
    parts = reward.parts
    if not parts["format"]:
        return "no answer found"
    return next((name for name in ("timeout", "unparsable") if parts[name]), "judged to differ")


# --- code ----------------------------------------------------------------------------------------


def verify_code(folder: Path, dataset: Any) -> Section:
    """Run reference programs and wrong ones, each problem's side by side.

    Raises:
        DataError: nothing to read.
        SandboxError: this machine instance types no protection; nothing ran.
    """
    options = CodeOptions(
        dataset=dataset, data=str(folder), template="plain", slots=NUM_SLOTS, program_s=PROGRAM_S
    )
    task = CodeTask(options, FakeTokenizer(), 0)
    parts = split(load_problems(dataset, str(folder)))
    prompts = [task.prompt(index) for index in range(len(parts[0]))]
    prompts += [task.eval_prompt(index) for index in range(len(parts[1]))]
    section = Section(dataset, len(prompts))
    begun_s = time.perf_counter()
    for number, prompt in enumerate(prompts):
        part, row = map(int, prompt.answer.split("/"))
        problem, other = parts[part][row], parts[part][row - 1]
        right = dict(right_programs(problem))
        texts = {**right, **dict(wrong_programs(problem.solution, other.solution))}
        episodes = {check: answered(f"```python\n{code}\n```") for check, code in texts.items()}
        task.prepare(prompt, list(episodes.values()))
        for check, episode in episodes.items():
            reward = task.reward(prompt, episode)
            why = None if reward.correct == (check in right) else code_reason(reward)
            section.note(check, f"prompt {number + 1}: {problem.question[:80]!r}", texts[check], why)
    section.elapsed_s = time.perf_counter() - begun_s
    return section


def right_programs(problem: Any) -> Iterator[tuple[str, str]]:
    """The authors' program, whole, and where the question begins it, what follows there."""
    yield "reference program", problem.solution
    if problem.head:
        yield "reference continuation", problem.solution.removeprefix(problem.head)


def wrong_programs(solution: str, other: str) -> Iterator[tuple[str, str]]:
    """Programs that must not pass."""
    names = [node.name for node in ast.parse(solution).body if isinstance(node, ast.FunctionDef)]
    yield "wrong: returns nothing", "".join(f"def {name}(*_, **__): pass\n" for name in names)
    yield "wrong: another row's", other
    always = "class Always:\n def __eq__(self, other): return True\n __hash__ = None\n"
    yield (
        "wrong: equals everything",
        always + "".join(f"def {name}(*_, **__): return Always()\n" for name in names),
    )
    anything = "from unittest.mock import ANY\n"
    yield (
        "wrong: equals anything",
        anything + "".join(f"def {name}(*_, **__): return ANY\n" for name in names),
    )
    yield "wrong: ends early", f"{solution}\nimport os\nos._exit(0)\n"


def code_reason(reward: Reward) -> str:
    """Outcome of a program, in words."""
    status = next(name.removeprefix("is_") for name in reward.parts if name.startswith("is_"))
    return f"{status}, passed {reward.parts['passed']:.0%} of its tests"


# --- poker ---------------------------------------------------------------------------------------


def verify_poker(folder: Path) -> Section:
    """Replay every hand of a folder. A file of a variant that is not played is counted, not judged."""
    section = Section("poker", 0)
    begun_s = time.perf_counter()
    for path in sorted(folder.iterdir()):
        if path.name.removesuffix(".gz").endswith((".phh", ".phhs")):
            verify_hands(path, section)
    section.elapsed_s = time.perf_counter() - begun_s
    return section


def verify_hands(path: Path, section: Section) -> None:
    """Replay a file's hands into `section`."""
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    content = tomllib.loads(text)
    hands = [content] if "actions" in content else list(content.values())
    section.rows += len(hands)
    if any(hand.get("variant") != "NT" for hand in hands):
        count(section, "hands of other variants, not read", len(hands))
        return
    try:
        replays = list(read_replays(path))
    except DataError as error:
        section.note("replays by the rules", path.name, "", str(error))
        return
    histories = [HandHistory.loads(text)] if hands[0] is content else list(HandHistory.loads_all(text))
    for hand, replay, history in zip(hands, replays, histories, strict=True):
        section.note("replays by the rules", replay.source, "", None)
        stated = hand.get("finishing_stacks")
        if stated is None:
            count(section, "hands that state no finishing stacks")
        else:
            # `read_replays` refuses a hand that ends with other stacks than it states.
            section.note("finishing stacks", replay.source, str(stated), None)
        *_, end = history
        payoffs = list(end.payoffs)
        odd = None if payoffs == list(replay.net_chips) and not sum(payoffs) else f"pokerkit pays {payoffs}"
        section.note("payoffs of pokerkit's reader", replay.source, str(replay.net_chips), odd)


def count(section: Section, what: str, number: int = 1) -> None:
    """Count what is neither right nor wrong."""
    section.counts[what] = section.counts.get(what, 0) + number


# --- the command ---------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Path], Section]] = {
    "gsm8k": lambda folder: verify_math(folder, "gsm8k"),
    "math500": lambda folder: verify_math(folder, "math500"),
    "humaneval": lambda folder: verify_code(folder, "humaneval"),
    "mbpp": lambda folder: verify_code(folder, "mbpp"),
    "poker": verify_poker,
}


def report(section: Section) -> str:
    """A section in lines for people."""
    judged = sum(section.judged.values())
    rate = judged / section.elapsed_s
    lines = [f"{section.name}: {section.rows} rows, {judged} judged, {rate:.1f}/s"]
    lines += [
        f"  {check}: {number - section.odd(check)}/{number}" for check, number in section.judged.items()
    ]
    lines += [f"  {what}: {number}" for what, number in section.counts.items()]
    lines += [f"  ! {odd.check}, {odd.where}: {odd.reason}\n    {odd.text!r}" for odd in section.oddities]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.verify", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA_DIR, help=f"folder of data sets ({DATA_DIR})")
    parser.add_argument("--json", type=Path, help="write the figures as one JSON object")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="data sets")
    arguments = parser.parse_args()
    sections = []
    for name in arguments.only:
        sections.append(SECTIONS[name](arguments.data / name))
        print(report(sections[-1]), flush=True)
    if arguments.json:
        result = {section.name: asdict(section) for section in sections}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(section.oddities or not section.judged for section in sections))


if __name__ == "__main__":
    raise SystemExit(main())
