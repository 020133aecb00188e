"""Tasks that users bring from elsewhere: a plain reward function, an environment with `step`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_planes.config.extensions import raised_at
from echo_planes.data.tasks.reward_child import outcomes
from echo_planes.errors import ConfigError, DataError, TaskError
from echo_planes.tasks.bridges.gym import GymOptions, GymTask
from echo_planes.tasks.bridges.plain import FunctionOptions, FunctionTask
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Reward, RewardFailure, Sample, Span

HERE = "tests.unit.test_bridges"
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]


def length_reward(prompt: Any, response: str, row: dict[str, Any]) -> float:
    """Reward function as a user would bring it."""
    if response == "nan":
        return math.nan
    if response == "none":
        return None  # type: ignore[return-value]
    return float(response == row["answer"] and prompt == row["prompt"])


class Counter:
    """Environment as a user would bring it: asks until it is told the number."""

    closed = 0

    def __init__(self, row: dict[str, Any]) -> None:
        self.goal = row["answer"]
        self.messages: Any = None

    def init(self, messages: Any) -> Any:
        self.messages = messages
        return messages, {}

    def step(self, action: str) -> Any:
        if action == "broken":
            return {"reward": 1.0}
        done = action == self.goal
        out = {
            "observations": [{"role": "user", "content": f"not {action}:"}],
            "reward": float(done),
            "done": done,
        }
        return SimpleNamespace(**out) if done else out

    def close(self) -> None:
        Counter.closed += 1


def file(tmp_path: Path, rows: Sequence[object] = ROWS) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def function_task(tmp_path: Path, seed: int = 0, **options: object) -> FunctionTask:
    settings = {"reward": f"{HERE}:length_reward", "data": file(tmp_path), "holdout": 5, "template": "plain"}
    return FunctionTask(FunctionOptions.model_validate({**settings, **options}), FakeTokenizer(), seed)


def said(text: str) -> Episode:
    return Episode((1,), (True,), (-1.0,), (), "stop", text)


def test_a_function_with_a_file_is_a_task(tmp_path: Path) -> None:
    task = function_task(tmp_path)
    epoch = [task.prompt(i).text for i in range(8)]
    assert sorted(epoch) == sorted(row["prompt"] for i, row in enumerate(ROWS) if i % 5)
    assert [task.prompt(i).text for i in range(8, 16)] != epoch
    assert [task.eval_prompt(i).text for i in range(3)] == ["0+1=", "5+1=", "0+1="]
    prompt = task.eval_prompt(1)
    right, wrong, nan, none = outcomes(task, prompt, [said("6"), said("7"), said("nan"), said("none")])
    assert right == Reward(1.0, True)
    assert wrong == Reward(0.0, False)
    assert isinstance(nan, RewardFailure)
    assert isinstance(none, RewardFailure)
    assert {nan.status, none.status} == {"reward_invalid"}


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"reward": "nowhere.at_all:f"}, ConfigError, "no module named 'nowhere'"),
        ({"reward": f"{HERE}:missing"}, ConfigError, "there is no 'missing' in"),
        ({"reward": f"{HERE}:"}, ConfigError, "is not of the form package.module:NAME"),
        ({"row_fields": ["gold"]}, DataError, r"row 1.*no field 'gold'"),
        ({"reward": "rewards.py:f"}, ConfigError, "no module named 'rewards'; leave out '.py'"),
        ({"prompt_field": "question"}, DataError, r"no field 'question'.*task.prompt_field names"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, options: dict[str, object], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why) as caught:
        function_task(tmp_path, **options).prompt(0)
    assert "\n" not in str(caught.value)


def test_of_few_rows_one_is_held_out(tmp_path: Path) -> None:
    task = function_task(tmp_path, holdout=11)
    assert {task.eval_prompt(i).text for i in range(3)} == {"0+1="}
    assert sorted(task.prompt(i).text for i in range(9)) == sorted(row["prompt"] for row in ROWS[1:])
    (tmp_path / "one.jsonl").write_text('{"prompt": "0+1=", "answer": "1"}\n')
    with pytest.raises(DataError, match="none is left to train on; give 2 rows or more"):
        function_task(tmp_path, data=str(tmp_path / "one.jsonl")).prompt(0)


class Scripted:
    """Gives its answers in order."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = iter(answers)
        self.asked: list[str] = []

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        self.asked.append("".join(map(chr, token_ids)).replace("\0", "."))
        ids = (*map(ord, next(self._answers)), 0)
        return Sample(ids, (-1.0,) * len(ids), (Span(0, len(ids), 1, "d"),), "stop")


def gym_task(tmp_path: Path) -> GymTask:
    settings = {"env": f"{HERE}:Counter", "data": file(tmp_path), "holdout": 5}
    return GymTask(GymOptions.model_validate(settings), FakeTokenizer(), 0)


def test_an_environment_with_step_is_a_task(tmp_path: Path) -> None:
    task, policy, closed = gym_task(tmp_path), Scripted(["3", "6"]), Counter.closed
    prompt = task.eval_prompt(1)
    episode = asyncio.run(task.rollout(prompt, policy))
    assert policy.asked == ["5+1=", "5+1=3.not 3:"]
    assert episode.turn_rewards == (0.0, 1.0)
    assert task.reward(prompt, episode) == Reward(1.0, True, {"cut_off": 0.0})
    assert Counter.closed == closed + 1


def test_an_environment_that_answers_nothing_useful_is_named(tmp_path: Path) -> None:
    task = gym_task(tmp_path)
    with pytest.raises(TaskError, match="step of Counter returned no done, observations"):
        asyncio.run(task.rollout(task.prompt(0), Scripted(["broken"])))


def test_an_error_is_told_at_its_place_in_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a library noticed it, nor where this package called the user's code."""
    path = tmp_path / "judge_of_mine.py"
    path.write_text("import json\n\n\ndef judge(prompt, response, row):\n    return json.loads(response)\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 40)
    monkeypatch.syspath_prepend(tmp_path)
    given = {"reward": "judge_of_mine:judge", "data": str(tmp_path / "rows.jsonl"), "template": "plain"}
    options = FunctionOptions.model_validate(given)
    task = FunctionTask(options, FakeTokenizer(), 0)
    episode = Episode((5,), (True,), (-0.5,), (Span(0, 1, 0, "d0"),), "stop", "{")
    with pytest.raises(ValueError, match="Expecting") as caught:
        task.reward(task.prompt(0), episode)
    assert raised_at(caught.value) == f"{path}:5"
    (outcome,) = outcomes(task, task.prompt(0), [episode])
    assert isinstance(outcome, RewardFailure)
    assert "JSONDecodeError at judge_of_mine.py:5" in outcome.error
    with pytest.raises(TypeError) as caught_here:
        json.loads(None)  # type: ignore[arg-type]
    assert raised_at(caught_here.value).startswith(f"{__file__}:")
