"""Skeleton of a new task: a small working adapter with comments, and its test."""

from __future__ import annotations

import importlib.util
import keyword
from dataclasses import dataclass
from pathlib import Path
from string import Template

from echo_planes.errors import ConfigError, DataError

MAX_NAME_CHARS = 40

_TASK = Template('''"""$class_name: a task for echo_planes. It works as it is: change it piece by piece.

    python -m echo_planes.task check $name:$class_name
    python -m echo_planes.run task=$name:$class_name
"""

from __future__ import annotations

import random
from typing import cast

from pydantic import Field

from echo_planes import Episode, Prompt, Reward, TaskAdapter, TaskOptions


class ${class_name}Options(TaskOptions):
    """Settings of the task: each is a key of the command line, as task.limit=20. Others are refused."""

    limit: int = Field(default=10, ge=2, le=100, description="both numbers are below this")


class $class_name(TaskAdapter):
    """Asks for the larger of two numbers."""

    Options = ${class_name}Options
    max_new_tokens = 4  # answers are short; leave this line out where sampling.max_new_tokens should decide

    # Training prompt number `index`. A pure function of (seed, index): the same in every process of a run,
    # and again after a crash. Never use the global `random`, the time, or hash().
    def prompt(self, index: int) -> Prompt:
        rng = random.Random(f"{self.seed}/{index}")
        while True:
            a, b = rng.randrange(self._limit), rng.randrange(self._limit)
            if not _is_held_out(a, b):
                return self._ask(index, a, b)

    # Prompt number `index` of the held-out set that accuracy is measured on. Never among the training
    # prompts, and the same whatever the seed: otherwise two runs could not be compared.
    def eval_prompt(self, index: int) -> Prompt:
        pairs = [(a, b) for a in range(self._limit) for b in range(self._limit) if _is_held_out(a, b)]
        return self._ask(index, *pairs[index % len(pairs)])

    # The score of an answer. It gets whatever the policy wrote: nothing, nonsense, text without end. It must
    # come back within `reward_limit_s` seconds and never raise.
    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        # "stop": the policy ended the answer itself; "length": it was cut off.
        text = episode.text.strip() if episode.finish_reason == "stop" else ""
        correct = text == prompt.answer
        is_number = text.isascii() and text.isdigit()
        # `value` is trained on, `correct` is what accuracy counts, `parts` are shown in the report. A little
        # for the right form gives the policy something to climb while it is still wrong.
        value = 1.0 if correct else 0.1 if is_number else 0.0
        return Reward(value=value, correct=correct, parts={"is_number": float(is_number)})

    # For several turns subclass `EpisodeTask` and write an `Environment` instead: see docs/tasks.md.

    @property
    def _limit(self) -> int:
        return cast(${class_name}Options, self.options).limit

    def _ask(self, index: int, a: int, b: int) -> Prompt:
        text = f"max({a},{b})="
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        # `answer` carries what the reward needs (JSON where it is more than one thing); `text` is for people.
        return Prompt(index=index, token_ids=tuple(ids), answer=str(max(a, b)), text=text)


def _is_held_out(a: int, b: int) -> bool:
    return (a + 3 * b) % 7 == 3
''')

_TEST = Template('''"""Tests of $class_name: python -m pytest test_$name.py"""

from __future__ import annotations

import asyncio

import pytest

from $name import $class_name
from echo_planes.data.tasks.check import ScriptedPolicy
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.task import check_task


@pytest.fixture
def task() -> $class_name:
    return $class_name($class_name.Options(), FakeTokenizer(), seed=0)


def score(task: $class_name, answer: str) -> float:
    """What an answer to the first prompt earns: one episode, without any engine."""
    prompt = task.prompt(0)
    policy = ScriptedPolicy(task.tokenizer, [answer])
    episode = asyncio.run(task.rollout(prompt, policy))
    assert episode.text == answer
    return task.reward(prompt, episode).value


def test_the_contract_is_kept() -> None:
    findings = check_task("$name:$class_name")
    assert [finding.text for finding in findings if finding.level == "error"] == []


def test_right_answers_earn_more_than_wrong_ones(task: $class_name) -> None:
    right = task.prompt(0).answer
    assert score(task, right) == 1.0
    assert 0.0 < score(task, right + "1") < 1.0
    assert score(task, "") == score(task, "no idea") == 0.0


def test_held_out_prompts_are_not_trained(task: $class_name) -> None:
    training = {task.prompt(index).text for index in range(500)}
    assert training.isdisjoint(task.eval_prompt(index).text for index in range(100))
''')


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Files that were written, and the name of the new adapter."""

    task: Path
    test: Path
    adapter: str  # "module:Class"


def write_skeleton(name: str, folder: Path) -> Skeleton:
    """Write `NAME.py` and `test_NAME.py`, which work as they are. Make the folder; replace no file.

    Raises:
        ConfigError: `name` cannot be the name of a new module.
        DataError: one of the files exists already, or cannot be written.
    """
    _check_name(name, folder)
    class_name = "".join(part.capitalize() for part in name.removesuffix("_task").split("_")) + "Task"
    made = Skeleton(folder / f"{name}.py", folder / f"test_{name}.py", f"{name}:{class_name}")
    for path in (made.task, made.test):
        if path.exists():
            raise DataError(f"{path} is there already and is not replaced; choose another name or --folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in ((made.task, _TASK), (made.test, _TEST)):
            with path.open("x") as file:
                file.write(template.substitute(name=name, class_name=class_name))
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror}); choose another --folder") from error
    return made


def _check_name(name: str, folder: Path) -> None:
    if (
        not (name.isascii() and name.isidentifier() and name.islower())
        or name.startswith(("_", "test_"))
        or len(name) > MAX_NAME_CHARS
    ):
        raise ConfigError(
            f"'{name}' cannot name a task: use lower-case letters, digits and _, at most {MAX_NAME_CHARS}, "
            "not starting with _, test_ or a digit, as in my_task"
        )
    taken = keyword.iskeyword(name) or keyword.issoftkeyword(name)
    if taken or (not (folder / f"{name}.py").exists() and importlib.util.find_spec(name) is not None):
        raise ConfigError(
            f"'{name}' is the name of something in Python already; choose another, as my_{name}"
        )
