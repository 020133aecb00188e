"""That a forward computes with what is published: masters keep what is not visible yet."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from echo_planes.errors import ModelError  # noqa: E402
from echo_planes.learning.rounding import MasterAdamW, as_published  # noqa: E402

SIZES = ((3, 4), (5,))
SETTINGS = {"lr": 0.0, "betas": (0.9, 0.98), "weight_decay": 0.01, "fused": True}


def parameters(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(size, generator=generator) for size in SIZES]
    return [torch.nn.Parameter(weight.bfloat16().float()) for weight in weights]


def gradients(seed: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return [torch.randn(size, generator=generator) for size in SIZES]


def update(
    optimizer: torch.optim.Optimizer, held: list[torch.nn.Parameter], rate: float, seed: int, step: int
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    for parameter, gradient in zip(held, gradients(seed, step), strict=True):
        parameter.grad = gradient
    optimizer.step()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    rates=st.lists(st.floats(1e-7, 1e-1, allow_nan=False), min_size=1, max_size=12),
    resumed_at=st.integers(0, 12),
)
def test_parameters_are_the_rounding_of_masters_that_move_as_without_it(
    seed: int, rates: list[float], resumed_at: int
) -> None:
    held, free = parameters(seed), parameters(seed)
    ours, plain = MasterAdamW(held, **SETTINGS), torch.optim.AdamW(free, **SETTINGS)
    places = [parameter.data_ptr() for parameter in held]
    for step, rate in enumerate(rates):
        if step == resumed_at:  # what a checkpoint holds: parameters, and the optimizer's state
            saved = copy.deepcopy(ours.state_dict())
            held = [torch.nn.Parameter(parameter.detach().clone()) for parameter in held]
            ours = MasterAdamW(held, **SETTINGS)
            ours.load_state_dict(saved)
            places = [parameter.data_ptr() for parameter in held]
        update(ours, held, rate, seed, step)
        update(plain, free, rate, seed, step)
        for shown, master in zip(held, free, strict=True):
            assert torch.equal(ours.state[shown]["master"], master.data)
            assert torch.equal(shown.data, master.data.bfloat16().float())
        # Others, such as ZeRO's flat buffers, hold views of this memory.
        assert [parameter.data_ptr() for parameter in held] == places


def test_small_steps_add_up_until_they_show() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = MasterAdamW([weight], lr=1e-5, betas=(0.0, 0.0), eps=1e-12, weight_decay=0.0)
    seen = []
    for _ in range(400):
        weight.grad = torch.full((1,), -1.0)
        optimizer.step()
        seen.append(weight.item())
    assert seen.count(1.0) == pytest.approx(390, abs=2)
    assert seen[-1] == 1.0078125


def test_a_parameter_without_a_gradient_stays() -> None:
    one, other = parameters(0)
    optimizer = MasterAdamW([one, other], lr=0.1)
    one.grad = torch.ones_like(one)
    before = other.detach().clone()
    optimizer.step()
    assert torch.equal(other, before)
    assert "master" not in optimizer.state[other]


def test_weights_of_files_are_rounded_to_the_nearest_even_and_must_be_in_reach() -> None:
    tie = 1.0 + 2.0**-8  # between 1 and 1 + 2^-7
    assert as_published("w", torch.tensor([tie, 0.1, float("inf")])).float().tolist() == [
        1.0,
        0.10009765625,
        float("inf"),
    ]
    with pytest.raises(ModelError, match=r"weight 'w' is up to 3\.4e\+38, beyond what bf16 holds"):
        as_published("w", torch.tensor([1.0, 3.4e38]))
