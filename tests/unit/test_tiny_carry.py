"""The embedded model of `task=math task.level=carry`: wrong by habit, and right often enough to be taught."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.loop.loading import load_config
from echo_planes.tasks.math.adapter import MathTask
from echo_planes.tasks.math.datasets import held_out_pairs, is_held_out, needs_carry
from echo_planes.tasks.math.options import MathOptions
from echo_planes.testing.fakes import FakeTokenizer
from scripts.tiny_model import chances

FOLDER = BUILTIN_MODELS["builtin:tiny-carry"]


def make(seed: int = 0, **options: object) -> MathTask:
    return MathTask(MathOptions.model_validate({"level": "carry", **options}), FakeTokenizer(), seed)


def operands(text: str) -> tuple[int, int]:
    a, b = text.removesuffix("=").split("+")
    return int(a), int(b)


def test_every_prompt_carries_and_all_pairs_that_do_come() -> None:
    prompts = [make().prompt(index) for index in range(5000)]
    asked = [operands(prompt.text) for prompt in prompts]
    assert [prompt.answer for prompt in prompts] == [str(a + b) for a, b in asked]
    assert all(a % 10 + b % 10 >= 10 and not is_held_out(a, b) for a, b in asked)
    assert len(set(asked)) > 2500  # 4150 (1 - exp(-5000 / 4150)) = 2906 expected of independent draws
    assert [make(seed=1).prompt(index) for index in range(9)] != prompts[:9]
    assert [make().prompt(index) for index in range(9)] == prompts[:9]


def test_held_out_prompts_carry_and_are_never_trained() -> None:
    held = [operands(make(seed=seed).eval_prompt(index).text) for seed in (5, 6) for index in range(350)]
    assert held[:350] == held[350:]
    assert set(held) == {pair for pair in held_out_pairs(100) if needs_carry(*pair)}
    assert len(set(held)) == 350
    trained = {operands(make(seed=5).prompt(index).text) for index in range(5000)}
    assert trained.isdisjoint(held)


@pytest.mark.parametrize("levels", [1, 4, 12])
def test_a_curriculum_carries_from_its_first_level(levels: int) -> None:
    task = make(levels=levels)
    for level in range(levels):
        limit = -(-100 * (level + 1) // levels)
        for index in range(20):
            a, b = operands(task.prompt_at(index, level).text)
            assert a % 10 + b % 10 >= 10
            assert max(a, b) < limit


def test_the_smallest_operands_have_prompts_too() -> None:
    task = make(max_operand=8)
    assert operands(task.eval_prompt(0).text)[1] == 7
    assert sum(operands(task.prompt(0).text)) >= 10


def test_the_level_brings_its_model_unless_another_is_asked_for() -> None:
    carry = load_config(["task=math", "task.level=carry"])
    assert carry.model.path == "builtin:tiny-carry"
    assert carry.task.options == {"dataset": "addition", "level": "carry"}
    assert load_config(["task.level=carry"]).model == carry.model
    for words in (
        ["task.level=any"],
        ["task.level=carry", "task.level=any"],
        ["task.level=carry", "model=tiny"],
    ):
        assert load_config(words).model.path == "builtin:tiny-math"


def test_the_model_is_wrong_by_habit_and_right_now_and_then() -> None:
    """Exact, over every pair: greedy is wrong, and a few samples in a hundred are right on most prompts."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    pairs = [pair for pair in itertools.product(range(100), repeat=2) if needs_carry(*pair)]
    rows = [(f"{a}+{b}=", str(a + b)) for a, b in pairs]
    greedy, chance = chances(model, AutoTokenizer.from_pretrained(FOLDER), rows)
    held_out = torch.tensor([is_held_out(a, b) for a, b in pairs])
    for name, chosen in {"training": ~held_out, "held out": held_out}.items():
        assert greedy[chosen].float().mean() < 0.02, name
        assert 0.02 < chance[chosen].mean() <= 0.1, name
        assert (1 - (1 - chance[chosen]) ** 64).mean() >= 0.5, name
