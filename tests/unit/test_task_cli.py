"""Checking a task and starting a new one: every broken promise is told with its value and its place."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from echo_planes.config.schema import TaskConfig
from echo_planes.data.tasks.adapter import EpisodeBuilder, TaskAdapter, TaskOptions, Tokenizer
from echo_planes.data.tasks.check import Finding, Setting, TaskCheck
from echo_planes.data.tasks.registry import (
    adapter_class,
    build_adapter,
    installed_adapter,
    installed_tasks,
)
from echo_planes.data.tasks.skeleton import write_skeleton
from echo_planes.errors import ConfigError, DataError
from echo_planes.loop.loading import load_config
from echo_planes.task import check_task, main
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Omega, Prompt, Reward, Trajectory

ROOT = Path(__file__).resolve().parents[2]


class GoodTask(TaskAdapter):
    """Keeps every promise. The tasks below break one each."""

    def prompt(self, index: int) -> Prompt:
        return self._ask(index, random.Random(f"{self.seed}/{index}").randrange(10**6))

    def eval_prompt(self, index: int) -> Prompt:
        return self._ask(index, 10**6 + index % 1000)

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        correct = episode.text == prompt.answer
        return Reward(float(correct), correct, {"length": float(len(episode.text))})

    def _ask(self, index: int, n: int) -> Prompt:
        ids = tuple(self.tokenizer.encode(f"{n}?", add_special_tokens=False))
        return Prompt(index, ids, answer=str(n), text=f"{n}?")


def look(cls: type[TaskAdapter], *probes: str, **changes: Any) -> list[Finding]:
    """The findings of some probes, or of all, of a class of this module, in this process."""
    setting = Setting(
        task=TaskConfig(name="it", adapter=f"{__name__}:GoodTask"),
        tokenizer=cast(Tokenizer, FakeTokenizer()),
        vocabulary=sys.maxunicode + 1,
        seed=0,
        max_model_len=64,
        max_new_tokens=16,
    )
    check = TaskCheck(replace(setting, **changes))
    check.cls = cls
    check._built = lambda seed_offset=0: cls(TaskOptions(), check.setting.tokenizer, seed_offset)
    findings = check.run("build")
    for probe in probes or check.probes:
        if probe != "build":
            findings += check.run(probe)
    return findings


def problem(cls: type[TaskAdapter], probe: str, level: str = "error", **changes: Any) -> str:
    """The one thing that is wrong with a class."""
    findings = [finding for finding in look(cls, probe, **changes) if finding.level != "ok"]
    assert [(finding.level, finding.probe) for finding in findings] == [(level, probe)], findings
    assert "\n" not in findings[0].text
    return findings[0].text


def but(**methods: Any) -> type[TaskAdapter]:
    """A good task with some methods replaced."""
    return type("Task", (GoodTask,), methods)


def test_a_good_task_is_ok_in_every_probe() -> None:
    findings = look(GoodTask)
    assert {finding.level for finding in findings} == {"ok"}
    assert len(findings) == len(
        TaskCheck(Setting(TaskConfig(), cast(Tokenizer, FakeTokenizer()), 1, 0, 1, 1)).probes
    )


# --- prompts -------------------------------------------------------------------------------------


def changed(**fields: Any) -> Callable[[Any, int], Prompt]:
    """A `prompt` whose result has other fields."""
    return lambda self, index: replace(GoodTask.prompt(self, index), **fields)


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        (lambda self, index: "hello", ["prompt(0) returned 'hello' (str)", "must return a Prompt"]),
        (lambda self, index: None, ["prompt(0) returned None"]),
        (changed(token_ids=[1, 2]), ["token_ids is [1, 2] (list)", "tuple(...)"]),
        (changed(token_ids=(1, 2.0)), ["token_ids holds 2.0 (float)", "int(...)"]),
        (changed(token_ids=(1, -5)), ["token -5", "use self.tokenizer"]),
        (changed(token_ids=(1, 300)), ["token 300", "(0 to 255)"]),
        (changed(token_ids=()), ["has 0 tokens", "1 to 48"]),
        (changed(token_ids=(1,) * 49), ["has 49 tokens", "1 to 48", "raise model.max_model_len"]),
        (changed(index=7), ["prompt(0)", "Prompt.index is 7 (int)"]),
        (changed(answer=7), ["Prompt.answer is 7 (int)", "text"]),
        (changed(text=None), ["Prompt.text is None", "text"]),
    ],
)
def test_a_prompt_of_the_wrong_kind(prompt: Any, parts: list[str]) -> None:
    text = problem(but(prompt=prompt), "prompts", vocabulary=256)
    for part in parts:
        assert part in text, text


def test_prompts_that_depend_on_more_than_seed_and_index() -> None:
    rng = random.Random(0)

    def drawn(self: Any, index: int) -> Prompt:
        return self._ask(index, rng.randrange(10**6))

    assert "from one instance" in problem(but(prompt=drawn), "prompts")

    class Stateful(GoodTask):
        """The n-th call, not the n-th prompt."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.calls = count()

        def prompt(self, index: int) -> Prompt:
            return self._ask(index, next(self.calls))

    assert "draw from (seed, index)" in problem(Stateful, "prompts")


def test_a_prompt_far_on_in_a_long_run_is_asked_for_too() -> None:
    rows = list(range(1000))
    text = problem(but(prompt=lambda self, index: self._ask(index, rows[index])), "prompts")
    assert "IndexError: list index out of range" in text
    assert f"{__file__}:" in text


def test_equal_prompts_are_a_warning() -> None:
    same = but(prompt=lambda self, index: self._ask(index, 5))
    assert "is the index used?" in problem(same, "prompts", "warning")


def test_held_out_prompts_must_not_depend_on_the_seed_nor_be_trained() -> None:
    seeded = but(eval_prompt=lambda self, index: self._ask(index, 10**6 + index + 1000 * self.seed))
    assert "eval_prompt(0) is '1000000?' for one seed and '1001000?'" in problem(seeded, "held out")
    text = problem(but(prompt=_unseeded, eval_prompt=_doubled), "held out")
    assert "eval_prompt(0) is prompt(0) too: '0?'; 64 of 64" in text


def _unseeded(self: Any, index: int) -> Prompt:
    return cast(Prompt, self._ask(index, index))


def _doubled(self: Any, index: int) -> Prompt:
    return cast(Prompt, self._ask(index, 2 * index))


def test_what_a_method_raises_is_told_with_its_line() -> None:
    line = _raises.__code__.co_firstlineno + 1
    for method, probe in (("prompt", "prompts"), ("eval_prompt", "held-out prompts"), ("rollout", "rollout")):
        text = problem(but(**{method: _raises}), probe)
        assert f"raised KeyError: 'no such thing' ({__file__}:{line})" in text


def _raises(self: Any, *arguments: Any) -> Any:
    raise KeyError("no such thing")


@pytest.mark.parametrize("limit", [0, -1, 64, 2.5, True, "4"])
def test_an_impossible_answer_length(limit: Any) -> None:
    assert f"max_new_tokens={limit!r}" in problem(but(max_new_tokens=limit), "build")


# --- rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "probe", "parts"),
    [
        (
            lambda self, p, e: Reward(float("nan"), False),
            "reward: empty answer",
            ["answer ''", "nan", "finite"],
        ),
        (lambda self, p, e: Reward(float("-inf"), False), "reward: garbage", ["-inf", "finite"]),
        (lambda self, p, e: Reward(1e39, False), "reward: garbage", ["1e+39", "1e+12"]),
        (lambda self, p, e: Reward("1", False), "reward: garbage", ["Reward.value is '1' (str)"]),
        (lambda self, p, e: Reward(1.0, 1), "reward: right answer", ["Reward.correct is 1 (int)"]),
        (
            lambda self, p, e: Reward(1.0, True, {"a": None}),
            "reward: right answer",
            ["Reward.parts['a'] is None"],
        ),
        (
            lambda self, p, e: Reward(1.0, True, [1.0]),
            "reward: right answer",
            ["Reward.parts is [1.0] (list)"],
        ),
        (lambda self, p, e: 1.0, "reward: cut off", ["reward returned 1.0 (float)", "must return a Reward"]),
        (lambda self, p, e: None, "reward: cut off", ["reward returned None"]),
        (
            lambda self, p, e: Reward(float(e.text), False),
            "reward: empty answer",
            ["ValueError", f"{__file__}:"],
        ),
        (lambda self, p, e: Reward(float(e.text), False), "reward: odd numbers", ["answer '99999", "inf"]),
        (
            lambda self, p, e: Reward(float(e.text == str(int("0" + e.text))), False),
            "reward: odd numbers",
            ["4300"],
        ),
        (
            lambda self, p, e: Reward(float(int(e.text)) if e.text.isdigit() else 0.0, False),
            "reward: non-ASCII",
            ["answer '²'", "ValueError"],
        ),
        (lambda self, p, e: Reward(float(e.text[0] == "x"), False), "reward: empty answer", ["IndexError"]),
        (
            lambda self, p, e: Reward(len(e.text.encode("ascii")), False),
            "reward: non-ASCII",
            ["UnicodeEncodeError"],
        ),
    ],
)
def test_a_reward_that_cannot_take_an_answer(reward: Any, probe: str, parts: list[str]) -> None:
    text = problem(but(reward=reward), probe)
    for part in ["prompt 0, answer ", *parts]:
        assert part in text, text


def test_a_task_with_a_rollout_of_its_own_rewards_the_episodes_it_made() -> None:
    """As games do: the reward reads what the rollout noted, and answers are cut where a run cuts them."""

    async def rollout(self: Any, prompt: Prompt, policy: Any) -> Episode:
        episode = await TaskAdapter.rollout(self, prompt, policy)
        assert len(episode.response_ids) <= 16
        return replace(episode, notes=f"{len(episode.text)}")

    notes = but(rollout=rollout, reward=lambda self, p, e: Reward(float(e.notes), False))
    assert {finding.level for finding in look(notes)} == {"ok"}
    empty = but(rollout=rollout, reward=lambda self, p, e: Reward(1.0 / int(e.notes), False))
    assert "ZeroDivisionError" in problem(empty, "reward: empty answer")
    trained = but(rollout=rollout, eval_prompt=_doubled, prompt=_unseeded)
    assert "prompt(0) too" in problem(trained, "held out", "warning")


def test_what_prepares_the_rewards_is_called_and_may_not_raise_either() -> None:
    assert "KeyError: 'no such thing'" in problem(but(prepare=_raises), "reward: cut off")


def test_an_answer_that_the_task_s_own_limit_excludes_is_only_a_warning() -> None:
    strict = {
        "reward": lambda self, p, e: Reward(
            float(int("0" + "".join(filter(str.isdecimal, e.text)))) * 0, False
        )
    }
    assert "4300" in problem(but(**strict), "reward: odd numbers")
    text = problem(but(**strict, max_new_tokens=4), "reward: odd numbers", "warning")
    assert "too long for max_new_tokens=4" in text


def test_two_different_rewards_of_one_answer_are_a_warning() -> None:
    rng = random.Random(0)
    text = problem(but(reward=lambda self, p, e: Reward(rng.random(), False)), "reward: garbage", "warning")
    assert "two different rewards" in text


def test_rewards_that_are_all_equal_are_a_warning() -> None:
    text = problem(but(reward=lambda self, p, e: Reward(0.5, False)), "something to learn", "warning")
    assert "all earn 0.5" in text


def test_the_right_answer_is_what_the_task_says_it_is() -> None:
    def reward(self: TaskAdapter, prompt: Prompt, episode: Episode) -> Reward:
        right = episode.text == f"<{prompt.answer}>"
        return Reward(float(right), right)

    assert "all earn 0" in problem(but(reward=reward), "something to learn", "warning")
    in_form = but(reward=reward, right_answer=lambda self, prompt: f"<{prompt.answer}>")
    assert {finding.level for finding in look(in_form)} == {"ok"}
    none = but(right_answer=lambda self, prompt: None)
    assert "right_answer of prompt 0 is None" in problem(none, "something to learn")


@pytest.mark.parametrize(
    ("name", "row", "words", "right"),
    [
        ("math", {"answer": "so #### 42"}, ["task.dataset=gsm8k"], r"\boxed{42}"),
        (
            "code",
            {"code": "def add(a, b):\n    return a + b", "test_setup_code": ""}
            | {"test_list": ["assert add(1, 2) == 3"]},
            ["task.dataset=mbpp"],
            "```python\ndef add(a, b):\n    return a + b\n```",
        ),
        ("function", {"answer": "9", "q": 1}, ["task.reward=builtins:max"], "9"),
        (
            "function",
            {"sum": 9},
            ["task.reward=builtins:max", "task.row_fields=[sum]"],
            "9",
        ),
    ],
)
def test_the_right_answer_stands_in_the_form_that_the_prompt_asks_for(
    tmp_path: Path, name: str, row: dict[str, Any], words: list[str], right: str
) -> None:
    rows = [
        {**row, "text": f"Add. {number}", "question": f"{number}?", "prompt": f"{number}?"}
        for number in range(40)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = load_config([f"task={name}", f"task.data={data}", "task.template=plain", *words])
    task = build_adapter(config.task, cast(Tokenizer, FakeTokenizer()), 0)
    assert task.right_answer(task.prompt(0)) == right


# --- episodes ------------------------------------------------------------------------------------


def with_episode(change: Callable[[Episode], Any]) -> type[TaskAdapter]:
    """A task whose rollout returns what `change` makes of a right episode."""

    async def rollout(self: Any, prompt: Prompt, policy: Any) -> Any:
        return change(await TaskAdapter.rollout(self, prompt, policy))

    return but(rollout=rollout)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda e: e.text, ["returned ", "(str)", "must return an Episode"]),
        (
            lambda e: replace(e, response_mask=e.response_mask[:-1]),
            ["response_mask is", "tuple, one entry for each"],
        ),
        (lambda e: replace(e, logprobs=list(e.logprobs)), ["logprobs is", "(list)", "tuple"]),
        (lambda e: replace(e, logprobs=(*e.logprobs, -0.5)), ["logprobs is"]),
        (lambda e: replace(e, logprobs=(float("nan"),) * len(e.logprobs)), ["logprobs", "finite"]),
        (lambda e: replace(e, spans=()), ["spans do not cover"]),
        (lambda e: replace(e, spans=(replace(e.spans[0], start=1),)), ["spans do not cover"]),
        (lambda e: replace(e, top_logprobs=((),) * 3 * len(e.logprobs)), ["top_logprobs"]),
        (
            lambda e: replace(e, response_ids=tuple(i + 1 for i in e.response_ids)),
            ["did not sample", "very ids"],
        ),
        (lambda e: replace(e, text=None), ["text is None"]),
    ],
)
def test_an_episode_that_does_not_fit_together(change: Any, parts: list[str]) -> None:
    text = problem(with_episode(change), "rollout")
    for part in ["prompt 0, answer ", *parts]:
        assert part in text, text


def test_environment_tokens_that_claim_to_be_sampled() -> None:
    async def rollout(self: Any, prompt: Prompt, policy: Any) -> Episode:
        builder = EpisodeBuilder()
        builder.add_sample(await policy.generate(prompt.token_ids))
        builder.add_environment(self.tokenizer.encode("more!"))
        builder.add_sample(await policy.generate((*prompt.token_ids, *builder.response_ids)))
        return builder.build(self.tokenizer)

    assert {finding.level for finding in look(but(rollout=rollout), "rollout", "materialize")} == {"ok"}

    async def all_true(self: Any, prompt: Prompt, policy: Any) -> Episode:
        episode = await rollout(self, prompt, policy)
        return replace(episode, response_mask=(True,) * len(episode.response_ids))

    assert "did not sample" in problem(but(rollout=all_true), "rollout")


def test_rollouts_that_are_not_async_or_never_end() -> None:
    assert "write `async def rollout`" in problem(but(rollout=lambda self, prompt, policy: None), "rollout")

    calls = count()

    async def endless(self: Any, prompt: Prompt, policy: Any) -> Any:
        while True:
            next(calls)
            await policy.generate(prompt.token_ids)

    assert "asked the policy more than 256 times" in problem(but(rollout=endless), "rollout")
    assert next(calls) == 257


def with_omegas(change: Callable[[list[Omega]], Any]) -> type[TaskAdapter]:
    def materialize(self: Any, trajectories: Sequence[Trajectory]) -> Any:
        return change(TaskAdapter.materialize(self, trajectories))

    return but(materialize=materialize)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda omegas: omegas[1:], "list of 7 Omega"),
        (lambda omegas: None, "returned None"),
        (lambda omegas: [0.5, *omegas[1:]], "entry 0 is 0.5 (float)"),
        (lambda omegas: [replace(o, loss_mask=(*o.loss_mask, True)) for o in omegas], "loss_mask has"),
        (lambda omegas: [replace(o, advantage_group=3) for o in omegas], "advantage_group is 3 (int)"),
        (lambda omegas: [replace(o, advantage=float("inf")) for o in omegas], "advantage is inf (float)"),
    ],
)
def test_training_metadata_that_does_not_fit(change: Any, part: str) -> None:
    assert part in problem(with_omegas(change), "materialize")


def test_masks_within_what_was_sampled_and_not_empty() -> None:
    async def rollout(self: Any, prompt: Prompt, policy: Any) -> Episode:
        builder = EpisodeBuilder()
        builder.add_environment([65])
        builder.add_sample(await policy.generate(prompt.token_ids))
        return builder.build(self.tokenizer)

    def trains(value: bool) -> Any:
        return lambda self, group: [Omega((value,) * len(t.episode.response_ids), t.group_id) for t in group]

    wrong = problem(but(rollout=rollout, materialize=trains(True)), "materialize")
    assert "trains tokens that the environment wrote" in wrong
    assert "no token" in problem(but(materialize=trains(False)), "materialize", "warning")


# --- registration --------------------------------------------------------------------------------


def install(site: Path, package: str, **tasks: str) -> None:
    """Write what pip leaves of a package with entry points."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in tasks.items())
    (info / "entry_points.txt").write_text(f"[echo_planes.tasks]\n{lines}")


def test_installed_tasks_are_listed_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_adapter("riddles") is None
    install(tmp_path, "some-riddles", riddles="examples.own_task:OwnTask", hard="some.riddles:Hard")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"riddles", "hard"} <= set(installed_tasks())
    assert installed_adapter("riddles") == "examples.own_task:OwnTask"
    task = load_config(["task=riddles", "task.limit=50"]).task
    assert (task.name, task.adapter) == ("riddles", "examples.own_task:OwnTask")


def test_two_installed_tasks_of_one_name_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "a", "one", riddles="one:Riddles", fine="one:Fine")
    install(tmp_path / "b", "two", riddles="two:Riddles")
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    monkeypatch.syspath_prepend(str(tmp_path / "b"))
    with pytest.raises(ConfigError, match=r"one \(one:Riddles\) and two \(two:Riddles\).*uninstall one"):
        installed_adapter("riddles")
    assert installed_adapter("fine") == "one:Fine"


def test_a_module_that_cannot_be_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raising_task.py").write_text("x = 1\nraise RuntimeError('not today')\n")
    (tmp_path / "unfinished_task.py").write_text("x = 1\n\nclass Task(\n")
    with pytest.raises(ConfigError, match=r"RuntimeError: not today \(.*raising_task\.py:2\)"):
        adapter_class("raising_task:Task")
    with pytest.raises(ConfigError, match=r"SyntaxError: .*unfinished_task\.py:3\)"):
        adapter_class("unfinished_task:Task")
    for malformed in ("", ":", ":Task", "a..b:Task", "a-b:Task", "module"):
        with pytest.raises(ConfigError, match=r"not of the form package\.module:Class"):
            adapter_class(malformed)


# --- the command ---------------------------------------------------------------------------------

BROKEN = """
import os
from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.types import Prompt, Reward

class Base(TaskAdapter):
    reward_limit_s = 1.0

    def prompt(self, index):
        n = index + 1000 * (hash("seed") % 10)
        return Prompt(index, tuple(self.tokenizer.encode(f"{n}?")), str(n))

    def eval_prompt(self, index):
        return Prompt(index, tuple(self.tokenizer.encode(f"{index}!")), str(index))

    def reward(self, prompt, episode):
        print("a task may print")
        if episode.text.startswith("((("):
            9 ** 9 ** 9
        if episode.text.startswith("word"):
            os._exit(3)
        return Reward(float(episode.text == prompt.answer), episode.text == prompt.answer)

class Raising(Base):
    def __init__(self, options, tokenizer, seed):
        raise OSError("no riddles here")

NotATask = 5
"""


# Found before the real one, which takes a child process seconds to import. One token per character stands in.
NO_TRANSFORMERS = "raise ImportError('no transformers here')\n"


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "broken_task.py").write_text(BROKEN)
    (tmp_path / "transformers.py").write_text(NO_TRANSFORMERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "broken_task.py"


def test_hangs_crashes_and_unstable_prompts_are_told_and_the_rest_goes_on(broken: Path) -> None:
    findings = check_task("broken_task:Base")
    told = {finding.probe: finding.text for finding in findings if finding.level != "ok"}
    assert set(told) == {"tokenizer", "reward: garbage", "reward: very long answer", "another process"}
    assert "one token per character stands in, as no transformers here" in told["tokenizer"]
    line = BROKEN.split("\n").index("            9 ** 9 ** 9") + 1
    assert "prompt 0, answer '((((" in told["reward: garbage"]
    assert f"did not come back within 1 s (it was at {broken}:{line})" in told["reward: garbage"]
    assert "ended its process (exit status 3)" in told["reward: very long answer"]
    assert "prompt(0) is another prompt in another process" in told["another process"]
    fine = {finding.probe for finding in findings if finding.level == "ok"}
    assert {"build", "prompts", "held out", "rollout", "reward: cut off", "materialize"} <= fine


def test_a_module_that_hangs_while_it_is_imported(broken: Path) -> None:
    broken.with_name("waiting_task.py").write_text("import time\nwhile True:\n    time.sleep(1)\n")
    (finding,) = check_task("waiting_task:Task", start_limit_s=3.0)
    assert (finding.level, finding.probe) == ("error", "start")
    assert "importing the task did not come back within 3 s" in finding.text


def test_prompts_that_come_to_hang_at_last_end_the_check(broken: Path) -> None:
    """Not even the third look at the same prompts goes on for ever."""
    extra = (
        "\nclass Once(Base):\n    built = 0\n    def __init__(self, *a):\n        super().__init__(*a)\n"
        "        Once.built += 1\n        if Once.built == 4:\n            os._exit(4)\n"
        "    def reward(self, prompt, episode):\n        return Reward(float(len(episode.text)), False)\n"
    )
    broken.write_text(BROKEN + extra)
    last = check_task("broken_task:Once")[-1]
    assert (last.level, last.probe) == ("error", "another process")
    assert "ended its process (exit status 4)" in last.text


def test_a_constructor_that_raises_is_one_line_and_ends_the_check(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "broken_task:Raising"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [line for line in lines if line.startswith("FAILED")]
    assert "Raising cannot be built: OSError: no riddles here" in failed
    assert f"({broken}:" in failed
    assert lines[-1].endswith("1 failed")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["no command", "check or new"]),
        (["chekc", "math"], ["'chekc': unknown command", "check or new"]),
        (["check"], ["one name is needed after 'check'"]),
        (["new"], ["one name is needed after 'new'"]),
        (["new", "a", "b"], ["one name is needed after 'new'"]),
        (["check", "mahts"], ["task=mahts: unknown", "riddles", "did you mean 'math'?"]),
        (["check", "no.such.module:Task"], ["no.such.module:Task", "no module named 'no'"]),
        (["check", "broken_task:NotATask"], ["'NotATask' is not a TaskAdapter in broken_task"]),
        (["check", "nowhere.yaml"], ["nowhere.yaml", "No such file"]),
        (["check", "math", "task.dataset=gsm"], ["task.dataset", "did you mean 'gsm8k'?"]),
        (["check", "math", "hello"], ["'hello'", "key=value"]),
        (["new", "Bad-Name"], ["'Bad-Name' cannot name a task", "my_task"]),
        (["new", "test_it"], ["'test_it' cannot name a task"]),
        (["new", "class"], ["'class' is the name of something in Python"]),
        (["new", "json"], ["'json' is the name of something in Python"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    broken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    parts: list[str],
) -> None:
    install(tmp_path, "some-riddles", riddles="examples.own_task:OwnTask")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err, captured.err


def test_files_and_installed_names_are_checked_like_classes(
    broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both name a class whose constructor raises, which is how it is seen that they were found."""
    install(tmp_path, "some-riddles", riddles="broken_task:Raising", math="broken_task:Raising")
    own = tmp_path / "own.yaml"
    own.write_text("name: own\nadapter: broken_task:Raising\n")
    for task in ("riddles", str(own)):
        (finding,) = [finding for finding in check_task(task) if finding.level == "error"]
        assert f"task {'own' if task != 'riddles' else 'riddles'}: Raising cannot be built" in finding.text
    # A name of configs/task/ cannot be taken over.
    assert load_config(["task=math"]).task.adapter == "echo_planes.tasks.math.adapter:MathTask"


# --- a new one -----------------------------------------------------------------------------------


def test_a_new_task_passes_its_own_test_and_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert main(["new", "larger_number", "--folder", str(folder)]) == 0
    *_, first, second, third = capsys.readouterr().out.splitlines()
    assert first.split() == ["python", "-m", "pytest", "test_larger_number.py"]
    assert second.split()[2:] == ["echo_planes.task", "check", "larger_number:LargerNumberTask"]
    assert third.split()[2:] == ["echo_planes.run", "task=larger_number:LargerNumberTask"]
    light = tmp_path / "light"  # its own test needs no real tokenizer; the check is made with one
    light.mkdir()
    (light / "transformers.py").write_text(NO_TRANSFORMERS)
    for command, path in ((first, f"{light}{os.pathsep}{ROOT}"), (second, str(ROOT))):
        environment = {**os.environ, "PYTHONPATH": path}
        words = [sys.executable, *command.split()[1:]]
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "0 warnings, 0 failed" in done.stdout


def test_a_new_task_replaces_nothing(tmp_path: Path) -> None:
    made = write_skeleton("riddles", tmp_path)
    before = made.task.read_text()
    with pytest.raises(DataError, match=r"riddles\.py is there already and is not replaced"):
        write_skeleton("riddles", tmp_path)
    made.task.unlink()
    with pytest.raises(DataError, match=r"test_riddles\.py is there already"):
        write_skeleton("riddles", tmp_path)
    assert not made.task.exists()
    assert "class RiddlesTask(TaskAdapter)" in before
    with pytest.raises(DataError, match="cannot be written"):
        write_skeleton("riddles", made.test / "below")
