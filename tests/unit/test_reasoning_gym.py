"""The bridge to reasoning-gym: on a stand-in with the library's interface, and on the library where it is.

The stand-in follows reasoning-gym 0.1.25: `factory.DATASETS`, `factory.create_dataset(name, **config)` whose
datasets give entries by number and `score_answer(answer, entry)`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.data.tasks.registry import build_adapter
from echo_planes.data.tasks.reward_child import outcomes
from echo_planes.errors import ConfigError, DataError
from echo_planes.loop.loading import load_config
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Reward, RewardFailure

LIBRARY = {
    "__init__": "",
    "factory": """
import random
from dataclasses import dataclass
salt = 0
@dataclass
class DoubleConfig:
    below: int = 10**6
    seed: int | None = None
    size: int = 500
    def validate(self):
        assert self.below > 0, "below must be positive"
class Double:
    def __init__(self, config):
        self.config = config
    def __getitem__(self, idx):
        if idx >= self.config.size:
            raise IndexError(idx)
        n = random.Random(self.config.seed + idx + salt).randrange(self.config.below)
        return {"question": f"Twice {n}?", "answer": str(2 * n), "metadata": {"n": n}}
    def score_answer(self, answer, entry):
        if answer is None:
            return 0.0
        if answer == "nonsense":
            raise ValueError("not a number")
        return 1.0 if int(answer) == 2 * entry["metadata"]["n"] else 0.25
DATASETS = {"double": (Double, DoubleConfig), "doubly": (Double, DoubleConfig), "sum": (Double, DoubleConfig)}
def create_dataset(name, **kwargs):
    config = DATASETS[name][1](**kwargs)
    config.validate()
    return DATASETS[name][0](config)
""",
}
MODULES = ("reasoning_gym", "reasoning_gym.factory")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in, wherever the library itself may be installed."""
    folder = tmp_path / "reasoning_gym"
    folder.mkdir()
    for name, text in LIBRARY.items():
        (folder / f"{name}.py").write_text(text)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def task(*words: str, name: str = "double", seed: int = 0) -> TaskAdapter:
    config = load_config([f"task=reasoning_gym:{name}", "task.template=plain", *words])
    return build_adapter(config.task, FakeTokenizer(), seed)


def said(text: str) -> Episode:
    return Episode((1,), (True,), (-1.0,), (), "stop", text)


@pytest.mark.usefixtures("library")
def test_items_are_pure_functions_of_seed_and_index() -> None:
    one, twin, other = task(), task(), task(seed=1)
    indices = [0, 1, 255, 256, 10**6]
    prompts = [one.prompt(i) for i in indices]
    assert [prompt.index for prompt in prompts] == indices
    assert prompts == [twin.prompt(i) for i in reversed(indices)][::-1]
    assert {p.text for p in prompts}.isdisjoint(other.prompt(i).text for i in indices)
    assert len({one.prompt(i).text for i in range(600)}) > 590
    held_out = {one.eval_prompt(i).text for i in range(300)}
    assert held_out == {other.eval_prompt(i).text for i in range(300)}


@pytest.mark.usefixtures("library")
def test_questions_are_held_out_by_what_they_ask() -> None:
    """There are 100 questions, so that both streams ask each of theirs many times."""
    few = task("task.config.below=100")
    training = {few.prompt(i).text for i in range(2000)}
    held_out = {few.eval_prompt(i).text for i in range(600)}
    assert training.isdisjoint(held_out)
    assert training | held_out == {f"Twice {n}?" for n in range(100)}
    one = task("task.config.below=1")
    with pytest.raises(DataError, match=r"task\.dataset=double: .* too few questions; widen task\.config"):
        [ask(0) for ask in (one.prompt, one.eval_prompt)]


@pytest.mark.usefixtures("library")
def test_score_answer_is_the_reward_and_one_is_correct() -> None:
    it = task()
    prompt = it.prompt(300)
    assert "<answer></answer>" in "".join(map(chr, prompt.token_ids))
    right = json.loads(prompt.answer)["answer"]
    texts = [f"<answer>1</answer> no, <answer> {right}</answer>", "<answer>-1</answer>", right]
    # Another process makes the entry again from the prompt alone.
    assert list(outcomes(task(), prompt, [said(text) for text in texts])) == [
        Reward(1.0, True, {"answered": 1.0}),
        Reward(0.25, False, {"answered": 1.0}),
        Reward(0.0, False, {"answered": 0.0}),
    ]


@pytest.mark.usefixtures("library")
def test_what_cannot_be_scored_is_a_counted_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = task().prompt(0)
    (raised,) = outcomes(task(), prompt, [said("<answer>nonsense</answer>")])
    assert isinstance(raised, RewardFailure)
    assert raised.status == "reward_error"
    assert "not a number" in raised.error
    # A dataset whose items depend on more than their seed: the answer would be held against another question.
    monkeypatch.setattr("reasoning_gym.factory.salt", 10**9)
    (other,) = outcomes(task(), prompt, [said("<answer>2</answer>")])
    assert isinstance(other, RewardFailure)
    assert "prompt 0 is another one in another process" in other.error


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["task=reasoning_gym:dubble"],
            "task=reasoning_gym:dubble: it has no such dataset; the nearest are dou",
        ),
        (["task.config.bellow=3"], "task.config={'bellow': 3}: double of reasoning_gym does not take it"),
        (["task.config.below=0"], "(below must be positive)"),
        (["task.config.seed=0"], "task.config.seed: the run sets it itself; leave it out"),
        (
            ["task.dataset=sum"],
            "task=reasoning_gym:double: task.dataset=sum names another task; leave it out",
        ),
        (["task.confg=3"], "did you mean 'config'?"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task(*words).prompt(0)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ModuleNotFoundError
    with pytest.raises(ConfigError) as caught:
        task(name="spell_backward")
    assert str(caught.value).startswith("task=reasoning_gym:spell_backward: no module named 'reasoning_gym")
    assert str(caught.value).endswith("pip install 'echo_planes[reasoning_gym]'")


@pytest.mark.usefixtures("library")
def test_the_name_may_stand_in_a_file_too(tmp_path: Path) -> None:
    config = load_config(["task=reasoning_gym", "task.dataset=double", "task.template=plain"])
    assert build_adapter(config.task, FakeTokenizer(), 0).prompt(5) == task().prompt(5)
    with pytest.raises(ConfigError, match=r"task\.dataset=\.\.\.: this setting is needed"):
        load_config(["task=reasoning_gym"])


def test_a_module_of_the_users_own_is_not_taken_for_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tasks/bridges/gym.py brings no library's tasks, so `gym:Mine` is a class in the user's gym.py."""
    (tmp_path / "gym.py").write_text("from examples.own_task import OwnTask as Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gym", raising=False)
    assert load_config(["task=gym:Mine"]).task.adapter == "gym:Mine"
    sys.modules.pop("gym", None)


# --- the library itself --------------------------------------------------------------------------

NAMES = ("spell_backward", "chain_sum", "gsm_symbolic", "basic_arithmetic", "figlet_font")
PRINT_PROMPTS = """
import sys
from tests.unit.test_reasoning_gym import task
it = task(name=sys.argv[1])
print([it.prompt(i) for i in (0, 1, 300)], [it.eval_prompt(i) for i in (0, 1)])
"""


@pytest.mark.parametrize("name", NAMES)
def test_real_datasets(name: str) -> None:
    pytest.importorskip(
        "reasoning_gym", reason="reasoning_gym is missing: pip install 'echo_planes[reasoning_gym]'"
    )
    it = task(name=name)
    for prompt in (it.prompt(0), it.prompt(300), it.eval_prompt(0)):
        right = json.loads(prompt.answer)["answer"]
        scored = list(outcomes(task(name=name), prompt, [said(f"<answer>{right}</answer>"), said("")]))
        assert scored[0] == Reward(1.0, True, {"answered": 1.0})
        assert isinstance(scored[1], Reward)
        assert scored[1].value < 1
    assert _as_another_process_sees_it(name) == repr([it.prompt(i) for i in (0, 1, 300)]) + " " + repr(
        [it.eval_prompt(i) for i in (0, 1)]
    )


def _as_another_process_sees_it(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRINT_PROMPTS, name], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
