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
from echo_planes.data.tasks.chat import plain_prompt
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


def function_task(tmp_path: Path, rows: Sequence[object] = ROWS, **options: object) -> FunctionTask:
    settings = {"reward": f"{HERE}:length_reward", "holdout": 5, "template": "plain"}
    settings |= {"data": file(tmp_path, rows), **options}
    return FunctionTask(FunctionOptions.model_validate(settings), FakeTokenizer(), 0)


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


def gym_task(
    tmp_path: Path, rows: Sequence[object] = ROWS, tokenizer: Any = None, env: str = "Counter"
) -> GymTask:
    settings = {"env": f"{HERE}:{env}", "data": file(tmp_path, rows), "holdout": 5}
    return GymTask(GymOptions.model_validate(settings), tokenizer or FakeTokenizer(), 0)


def test_an_environment_with_step_is_a_task(tmp_path: Path) -> None:
    task, policy = gym_task(tmp_path), Scripted(["3", "6"])
    prompt = task.eval_prompt(1)
    closed = Counter.closed
    episode = asyncio.run(task.rollout(prompt, policy))
    assert policy.asked == ["5+1=", "5+1=3.not 3:"]
    assert episode.turn_rewards == (0.0, 1.0)
    assert task.reward(prompt, episode) == Reward(1.0, True, {"cut_off": 0.0})
    assert Counter.closed == closed + 1


def test_an_environment_that_answers_nothing_useful_is_named(tmp_path: Path) -> None:
    task = gym_task(tmp_path)
    with pytest.raises(TaskError, match="step of Counter returned no done, observations"):
        asyncio.run(task.rollout(task.prompt(0), Scripted(["broken"])))


class Opening(Counter):
    """Begins with its own words, as skyrl-gym's environments may."""

    def init(self, messages: Any) -> Any:
        return [{"role": "system", "content": [{"type": "text", "text": "Count."}]}, *messages], {}


class Moody(Counter):
    """Begins with other words each time."""

    def init(self, messages: Any) -> Any:
        Counter.closed += 1
        return [{"role": "user", "content": f"game {Counter.closed}"}]


class Silent(Counter):
    def init(self, messages: Any) -> Any:
        return [{"role": "user", "content": None}], {}


class Illustrated(Counter):
    """Observes in parts; the second one is a picture."""

    def step(self, action: str) -> Any:
        parts = [{"type": "text", "text": "not "}, {"type": "text", "text": f"{action}:"}]
        if action == "picture":
            parts = [{"type": "image_url", "image_url": "x"}]
        return {"observations": [{"role": "user", "content": parts}], "reward": 0.0, "done": action == "6"}


def test_the_messages_that_an_environment_begins_with_are_asked(tmp_path: Path) -> None:
    task, policy = gym_task(tmp_path, env="Opening"), Scripted(["6"])
    prompt = task.eval_prompt(1)
    assert prompt.text == "Count.\n\n5+1="
    asyncio.run(task.rollout(prompt, policy))
    assert policy.asked == ["Count.\n\n5+1="]


def test_an_environment_that_begins_otherwise_each_time_is_named(tmp_path: Path) -> None:
    task = gym_task(tmp_path, env="Moody")
    prompt, closed = task.eval_prompt(1), Counter.closed
    with pytest.raises(TaskError, match=r"prompt 1: init returned 'game \d+' for an episode and 'game \d+'"):
        asyncio.run(task.rollout(prompt, Scripted(["6"])))
    assert Counter.closed == closed + 2  # Moody counts its calls, and it was closed
    with pytest.raises(DataError, match=r"row 6: .* what init of Silent returned holds .* None; only text"):
        gym_task(tmp_path, env="Silent").eval_prompt(1)


def test_parts_of_an_observation_are_joined(tmp_path: Path) -> None:
    task, policy = gym_task(tmp_path, env="Illustrated"), Scripted(["3", "6"])
    asyncio.run(task.rollout(task.eval_prompt(1), policy))
    assert policy.asked[1] == "5+1=3.not 3:"
    with pytest.raises(TaskError, match=r"step of Illustrated returned observations=.*of text only"):
        asyncio.run(task.rollout(task.eval_prompt(1), Scripted(["picture"])))


# --- prompts as people write them ----------------------------------------------------------------


class Chatting(FakeTokenizer):
    """A chat template of brackets that leaves out roles it does not know, and never ends on "boom"."""

    chat_template = "in brackets"

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        said = [m for m in conversation if m["role"] in ("system", "user", "assistant")]
        if any("boom" in m["content"] for m in said):
            raise ValueError("roles must alternate")
        return self.encode("".join(f"[{m['role']}: {m['content']}]" for m in said))


def user(content: object, role: str = "user") -> list[dict[str, object]]:
    return [{"role": role, "content": content}]


def asked(tmp_path: Path, prompt: object, template: str = "chat") -> str:
    """Return the text that the policy reads of a prompt, the second row of a file."""
    rows = [{"prompt": "first", "answer": "1"}, {"prompt": prompt, "answer": "2"}]
    settings = {"reward": f"{HERE}:length_reward", "data": file(tmp_path, rows), "template": template}
    task = FunctionTask(FunctionOptions.model_validate(settings), Chatting(), 0)
    return "".join(map(chr, task.prompt(0).token_ids))


def test_parts_of_a_message_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?", "image_url": None}]
    for template, expected in (("chat", "[user: What is 1+1?]"), ("plain", "What is 1+1?")):
        assert asked(tmp_path, user(parts), template) == expected
        assert asked(tmp_path, user(["What is ", "1+1?"]), template) == expected
    assert asked(tmp_path, [*user("Be brief.", "system"), *user("Hi")]) == "[system: Be brief.][user: Hi]"


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (user([{"type": "image_url", "image_url": "x"}]), "image_url.*only text can be asked"),
        (user([{"type": "text", "text": "a"}, {"type": "image", "text": "b"}]), "image.*only text"),
        (user([]), "only text can be asked"),
        (user(None), "the content None; only text can be asked"),
        (user(7), "the content 7; only text can be asked"),
        ([{"role": "user"}], "the content None"),
        ([{"content": "a"}], 'it must be text, or messages with "role"'),
        ([], 'it must be text, or messages with "role"'),
        ("", "holds no text: ''; write the question there"),
        (user(" \n"), "holds no text"),
        (user("Hi", "human"), "the chat template leaves out message 1, of role 'human'"),
        ([*user("Hi"), *user("rules", "developer")], "leaves out message 2, of role 'developer'"),
        (user("boom"), r"its prompt cannot be made: ValueError: roles must alternate"),
    ],
)
def test_a_prompt_that_would_be_lost_is_named_with_its_row(tmp_path: Path, prompt: object, why: str) -> None:
    with pytest.raises(DataError, match=why) as told:
        asked(tmp_path, prompt)
    assert str(told.value).startswith(f"{tmp_path / 'prompts.jsonl'}: row 2")
    assert str(told.value).isprintable()


class Beginning(FakeTokenizer):
    """Begins a text with token 1 and ends it with 0, as some tokenizers do by default."""

    bos_token_id = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(c) for c in text]
        return [1, *ids, 0] if add_special_tokens else ids


def test_a_plain_prompt_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    settings = {"reward": f"{HERE}:length_reward", "data": file(tmp_path), "template": "plain", "holdout": 5}
    options = FunctionOptions.model_validate(settings)
    assert FunctionTask(options, Beginning(), 0).eval_prompt(0).token_ids == (1, *map(ord, "0+1="))
    task, policy = gym_task(tmp_path, tokenizer=Beginning()), Scripted(["3", "6"])
    prompt = task.eval_prompt(1)
    assert prompt.token_ids == (1, *map(ord, "5+1="))
    episode = asyncio.run(task.rollout(prompt, policy))
    assert 1 not in episode.response_ids  # an observation begins no text
    assert plain_prompt(Beginning(), "\1already") == (1, *map(ord, "already"))
    assert plain_prompt(FakeTokenizer(), "7") == (ord("7"),)


# --- held-out rows -------------------------------------------------------------------------------


def test_equal_rows_are_on_one_side(tmp_path: Path) -> None:
    """Also where all copies of a row stand together, and where one is written as messages."""
    rows = [row for row in ROWS for _ in range(5)]
    rows += [{"prompt": user(f" {row['prompt']}"), "answer": f"{row['answer']}.0"} for row in ROWS]
    task = function_task(tmp_path, rows)
    held_out = {task.eval_prompt(i).text for i in range(10)}
    assert held_out == {"0+1=", "5+1="}
    training = [task.prompt(i).text.strip() for i in range(48)]
    assert sorted(training) == sorted([row["prompt"] for row in ROWS if row["prompt"] not in held_out] * 6)
    with pytest.raises(DataError, match="none is left to train on"):
        function_task(tmp_path, ROWS[:1] * 9).prompt(0)


def test_equal_games_are_on_one_side_and_one_opening_may_begin_many(tmp_path: Path) -> None:
    rows = [{"prompt": "Guess:", "answer": str(i)} for i in range(10) for _ in range(3)]
    task = gym_task(tmp_path, rows)
    held_out = {task.eval_prompt(i).answer for i in range(9)}
    assert len(held_out) == 2
    training = {task.prompt(i).answer for i in range(24)}
    assert len(training) == 8
    assert not training & held_out


def test_an_error_is_told_at_its_place_in_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a library noticed it, nor where this package called the user's code."""
    path = tmp_path / "judge_of_mine.py"
    path.write_text("import json\n\n\ndef judge(prompt, response, row):\n    return json.loads(response)\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
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
