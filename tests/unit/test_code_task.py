"""The code task without a sandbox: what is asked, what counts as an answer, what a run says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import rewards
from echo_planes.errors import ConfigError, DataError
from echo_planes.loop.loading import load_config
from echo_planes.sandbox.model import Outcome
from echo_planes.tasks.code import inside
from echo_planes.tasks.code.adapter import CodeTask
from echo_planes.tasks.code.functions import formula, is_held_out
from echo_planes.tasks.code.judging import Verdict, counted, parse_answer, programs, verdict
from echo_planes.tasks.code.options import CodeOptions
from echo_planes.tasks.code.problems import load_problems, split
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Reward, Sample, Span


def task(seed: int = 0, **options: object) -> CodeTask:
    return CodeTask(CodeOptions.model_validate(options), FakeTokenizer(), seed)


def said(text: str) -> Episode:
    return Episode((1,), (True,), (-1.0,), (), "stop", text)


# --- generated functions -------------------------------------------------------------------------


@given(st.text("0123456789", min_size=1, max_size=5))
def test_a_formula_means_in_python_what_its_words_say(seed: str) -> None:
    for held_out in (False, True):
        found = formula(seed, held_out=held_out)
        assert is_held_out(found) == held_out
        assert found.code == found.words.replace(" plus ", "+").replace(" minus ", "-").replace(
            " times ", "*"
        )
        space: dict[str, object] = {}
        exec(f"f=lambda x,y:{found.code}\n{found.tests()}", space)
        with pytest.raises(AssertionError):
            exec(f"f=lambda x,y:{found.code}+1\n{found.tests()}", space)


def test_prompts_are_pure_functions_and_held_out_formulas_are_never_trained() -> None:
    trained = [task(seed).prompt(i) for seed in (0, 1) for i in range(300)]
    assert trained[:300] == [task(0).prompt(i) for i in range(300)]
    held_out = [task(1).eval_prompt(i) for i in range(100)]
    assert held_out == [task(2).eval_prompt(i) for i in range(100)]
    assert not {p.text for p in trained} & {p.text for p in held_out}


# --- answers -------------------------------------------------------------------------------------

HEAD = "def add(a, b):\n"


def test_an_answer_is_the_last_block_after_the_thinking() -> None:
    block = "```python\ndef add(a, b):\n    return a + b\n```"
    text = f"<think>first\n```python\nx = 1\n```\n</think>\nso\n{block}\n"
    found = parse_answer(text, HEAD, fenced=True)
    assert found.code == "def add(a, b):\n    return a + b\n"
    assert found.is_python
    assert found.has_thinking
    continued = parse_answer("```python\n    return a + b\n```", HEAD, fenced=True)
    assert continued.code == "def add(a, b):\n    return a + b\n"
    assert parse_answer("return a + b", HEAD, fenced=True).code is None
    assert not parse_answer("```python\nreturn (\n```", HEAD, fenced=True).is_python
    assert parse_answer("x+1", "f=lambda x,y:", fenced=False).code == "f=lambda x,y:x+1"


@pytest.mark.parametrize(
    "kind", ["python", "Python", "python3", "python3.11", "ipython", "py", "", "python "]
)
def test_blocks_are_paired_and_told_apart(kind: str) -> None:
    text = f"```bash\npip install x\n```\nThen:\n```{kind}\n    return 1\n```\nand\n```text\n1\n```\n"
    for written in (text, text.replace("\n", "\r\n")):
        assert parse_answer(written, HEAD, fenced=True).code == HEAD + "    return 1\n"


@pytest.mark.parametrize("way", rewards.WAYS)
def test_each_way_to_write_a_program_down_is_read(way: str) -> None:
    code = "import re\n\n\ndef add(a, b):\n    return a + b\n\n\ndef other():\n    return 1"
    found = parse_answer(rewards.WAYS[way](code), "", fenced=True, names={"add"})
    assert found.is_python
    space: dict[str, Any] = {}
    exec(found.code or "", space)
    assert space["add"](2, 3) == 5


def test_of_several_blocks_the_last_that_defines_what_the_tests_call_counts() -> None:
    first, second = (f"```python\ndef add(a, b):\n    return {n}\n```" for n in (1, 2))
    demo, other = "```python\nprint(add(1, 2))\n```", "```\n3\n```"
    found = parse_answer("\n".join([first, second, demo, other]), "", fenced=True, names={"add"})
    assert found.code == "def add(a, b):\n    return 2\n"
    # Where none does, the last one does: `judging` says what it lacks.
    assert parse_answer(f"{demo}\n{other}", "", fenced=True, names={"add"}).code == "3\n"


def test_helpers_of_earlier_blocks_come_with_the_program_that_lacks_them() -> None:
    imports = "```python\nfrom math import fsum\n```"
    helper = "```python\ndef total(values):\n    return fsum(values)\n```"
    unused = "```python\nprint(undefined)\n```"
    program = "```python\ndef add(a, b):\n    return total([a, b])\n```"
    found = parse_answer("\n".join([imports, unused, helper, program]), "", fenced=True, names={"add"})
    space: dict[str, Any] = {}
    exec(found.code or "", space)
    assert space["add"](2, 3) == 5
    # One that lacks nothing stays alone.
    complete = "```python\ndef add(a, b):\n    return sum([a, b])\n```"
    found = parse_answer("\n".join([unused, helper, complete]), "", fenced=True, names={"add"})
    assert found.code == "def add(a, b):\n    return sum([a, b])\n"


def test_an_open_thought_holds_no_program() -> None:
    block = "```python\ndef add(a, b):\n    return a + b\n```"
    assert parse_answer(f"<think>perhaps\n{block}", HEAD, fenced=True).code is None
    assert parse_answer(block, HEAD, fenced=True, opened=True).code is None
    assert parse_answer(f"so</think>\n{block}", HEAD, fenced=True, opened=True).code is not None


def test_imports_of_the_future_come_first() -> None:
    head = "import math\n\n\ndef add(a, b):\n"
    text = "```python\nfrom __future__ import annotations\n\ndef add(a: Nothing, b):\n    return a + b\n```"
    found = parse_answer(text, head, fenced=True)
    assert found.is_python
    assert found.code is not None
    assert found.code.startswith("from __future__ import annotations\nimport math\n")


def test_what_stands_before_the_function_stays() -> None:
    head = 'import math\n\ndef helper(): return 1\n\n\ndef add(a, b):\n    """Adds."""\n'
    found = parse_answer("```python\ndef add(a, b):\n    return a + helper()\n```", head, fenced=True)
    assert (
        found.code == "import math\n\ndef helper(): return 1\n\n\ndef add(a, b):\n    return a + helper()\n"
    )


@given(st.text(max_size=60), st.booleans())
def test_no_answer_raises(text: str, fenced: bool) -> None:
    parse_answer(text, HEAD, fenced=fenced)
    parse_answer(text + "\0" + "(" * 5000, HEAD, fenced=fenced)


# --- judging -------------------------------------------------------------------------------------


def judged(tests: str, **space: object) -> tuple[int, int]:
    counts = [0, 0]

    def case(check: object) -> None:
        counts[1] += 1
        with contextlib.suppress(Exception):
            counts[0] += bool(check())  # type: ignore[operator]

    exec(counted(tests), {"_case": case, **space})
    return counts[0], counts[1]


def test_every_assertion_is_counted_by_itself() -> None:
    tests = """
def check(candidate):
    assert candidate(1) == 2, "one"
    assert candidate(2) == 0
    for i in range(3):
        assert candidate(i) == i + 1
    assert missing(1)
check(add)
"""
    assert judged(tests, add=lambda x: x + 1) == (4, 6)


ANSWERING = "import json, os, sys; sys.path.insert(0, sys.argv[1]); import inside; inside.answer()"
INCREMENT = "def f(x): return x + 1"


def run(code: str, tests: str = "assert f(1) == 2\nassert f(2) == 3", solution: str = INCREMENT) -> Verdict:
    """As the two programs in the sandbox would do it, but here: only for answers written in this file."""
    return run_problem(code, tests, "", solution)


def run_problem(code: str, tests: str, head: str, solution: str) -> Verdict:
    judge, answer = programs(code, tests, head, solution)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in answer.files.items():
            Path(folder, name).write_text(text)
        answering = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", ANSWERING, folder],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert answering.stdin is not None
        assert answering.stdout is not None
        channel = inside.Channel(answering.stdout.fileno(), answering.stdin.fileno())
        found = inside.judged(json.loads(judge.files[inside.TOLD]), channel)
        answering.stdin.close()  # the pool ends what goes on from here
        answering.stdout.close()
        assert answering.stderr is not None
        with answering.stderr as errors:
            said = errors.read()
        answering.wait()
    ended = Outcome("ok", 0, "", f"\n{json.dumps(found)}", 0.1)
    return verdict(ended, Outcome("ok", 0, "", said.decode(), 0.1), tests)


def counts(found: Verdict) -> tuple[int, int, str]:
    return found.passed, found.total, found.status


def test_the_verdict_of_a_run() -> None:
    assert run(INCREMENT) == Verdict(2, 2, "ok")
    assert counts(run("def f(x): return 2")) == (1, 2, "ok")
    assert counts(run("def g(x): return 2")) == (0, 2, "ok")
    assert counts(run("raise SystemExit")) == (0, 2, "ok")
    many = "\n".join(["assert f(1) == 2"] * 10)
    assert counts(run(INCREMENT, f"assert f(1) == 2\nraise ValueError\n{many}")) == (1, 11, "ok")
    ends = "calls = []\ndef f(x):\n    calls.append(x)\n    if len(calls) > 3: raise SystemExit\n    return 2"
    assert counts(run(ends, many)) == (3, 10, "ok")


def test_rewards_of_answers_that_need_no_run() -> None:
    plain, chat = task(), task(dataset="functions", reward="composite")
    prompt = plain.prompt(0)
    found = plain.reward(prompt, said("x +* y"))
    assert replace(found, notes="") == Reward(
        0.0, False, {"passed": 0.0, "syntax": 0.0, "format": 1.0, "thinking": 0.0, "is_syntax": 1.0}
    )
    assert json.loads(found.notes)["verdict"] == "syntax"
    assert chat.reward(prompt, said("x +* y")).value == pytest.approx(0.1)


class HalfJudge:
    """Stands for the sandbox: every program passes one of two tests."""

    def judge(self, codes: list[str], tests: str, head: str, solution: str) -> dict[str, Verdict]:
        return {code: Verdict(1, 2, "ok") for code in codes}


ANSWER = "<think>easy</think>\n```python\ndef f(x): return x + 1\n```"
SHARES = {  # of PULSE's four parts: passed, syntax, format, thinking
    ANSWER: (0.5, 1, 1, 1),
    ANSWER.replace("return", "retrun"): (0, 0, 1, 1),
    ANSWER.replace("```", ""): (0, 0, 0, 1),
    ANSWER.replace("<think>easy</think>", ""): (0.5, 1, 1, 0),
}


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({}, (0.7, 0.1, 0.1, 0.1)),  # PULSE, eq. 21
        ({"passed": 1, "syntax": 0, "format": 0, "thinking": 0}, (1, 0, 0, 0)),
        ({"passed": 0, "syntax": 1, "format": 0, "thinking": 0}, (0, 1, 0, 0)),
        ({"passed": 0, "syntax": 0, "format": 1, "thinking": 0}, (0, 0, 1, 0)),
        ({"passed": 0, "syntax": 0, "format": 0, "thinking": 1}, (0, 0, 0, 1)),
        ({"passed": 0.6, "thinking": 0.2}, (0.6, 0.1, 0.1, 0.2)),
    ],
)
def test_each_weight_pays_for_its_own_part(
    tmp_path: Path, weights: dict[str, float], shares: tuple[float, ...]
) -> None:
    """The weights stand in a YAML file."""
    path, data = (
        tmp_path / "mine.yaml",
        rows(tmp_path / "mbpp.jsonl", *({**MBPP, "text": f"{i}"} for i in range(5))),
    )
    adapter = "echo_planes.tasks.code.adapter:CodeTask"
    settings = {"name": "c", "adapter": adapter, "dataset": "mbpp", "data": data, "template": "plain"}
    path.write_text(
        json.dumps({**settings, "reward": "composite", **({"weights": weights} if weights else {})})
    )
    it = task(**load_config([f"task={path}"]).task.options)
    it.__dict__["_runner"] = HalfJudge()
    for answer, parts in SHARES.items():
        value = sum(weight * part for weight, part in zip(shares, parts, strict=True))
        assert it.reward(it.prompt(0), said(answer)).value == pytest.approx(value), answer


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["task.reward=composite", "task.weights.passed=0.8"],
            "task.weights: passed=0.8, syntax=0.1, format=0.1, thinking=0.1 add up to 1.1, but a perfect "
            "answer must earn 1; make them add up to 1",
        ),
        (["task.weights.passed=0.7"], "reward=exact uses no weights: set task.reward=composite or leave out"),
    ],
)
def test_weights_that_cannot_be_are_told_in_one_line(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["task=code", *words])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


# --- files ---------------------------------------------------------------------------------------


def rows(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


MBPP = {
    "text": "Add one.",
    "code": "def f(x): return x + 1",
    "test_list": ["assert f(1) == 2"],
    "test_setup_code": "",
}


def test_problems_from_files(tmp_path: Path) -> None:
    found = load_problems(
        "mbpp", rows(tmp_path / "mbpp.jsonl", *([MBPP] * 3), {**MBPP, "text": "Add 1."}, MBPP)
    )
    assert found[0].tests.strip() == "assert f(1) == 2"
    assert found[0].question.endswith("assert f(1) == 2")
    assert [problem.question[:7] for problem in found] == ["Add one"] * 3 + ["Add 1.\n", "Add one"]
    with pytest.raises(DataError, match="leave 2 to train on and 0 held out; at least 5"):
        split(found[:2])
    with pytest.raises(DataError, match="leave 0 to train on and 1 held out; at least 5"):
        split(found[:1] * 5)
    with pytest.raises(DataError, match=r"row 2.*test_list"):
        load_problems(
            "mbpp", rows(tmp_path / "bad.jsonl", MBPP, {"text": "x", "code": "y", "test_setup_code": ""})
        )


def test_a_missing_file_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHO_PLANES_DATA", raising=False)
    with pytest.raises(DataError, match=r"set task\.data=PATH"):
        load_problems("humaneval", None)


class Says:
    """A policy that answers one thing, character by character."""

    def __init__(self, text: str) -> None:
        self._ids = tuple(ord(character) for character in text)

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        count = len(self._ids)
        return Sample(self._ids, (-1.0,) * count, (Span(0, count, 0, "d"),), "stop")


def test_notes_tell_people_the_program_and_its_tests(tmp_path: Path) -> None:
    generated = task()
    prompt = generated.prompt(3)
    episode = asyncio.run(generated.rollout(prompt, Says("x+y")))
    assert json.loads(episode.notes) == {"tests": prompt.answer}
    generated.__dict__["_runner"] = HalfJudge()
    assert json.loads(generated.reward(prompt, episode).notes) == {
        "tests": prompt.answer,
        "passed": 1,
        "total": 2,
        "verdict": "ok",
        "output": "",
        "program": "f=lambda x,y:x+y",
    }
    path = rows(
        tmp_path / "mbpp.jsonl",
        *({**MBPP, "text": f"{i}", "test_list": ["assert f(1)"] * 999} for i in range(5)),
    )
    filed = task(dataset="mbpp", data=str(path), template="plain")
    notes = json.loads(asyncio.run(filed.rollout(filed.prompt(0), Says("```\n1\n```"))).notes)
    assert list(notes) == ["tests"]
    assert len(notes["tests"]) == 2000
