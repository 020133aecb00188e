"""Machines of the learner's ranks: one if one can hold them, and none that is rented to be taken away."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from echo_planes.cluster.placement import place_ranks
from echo_planes.config.schema import Config

Machine = tuple[Mapping[str, float], Mapping[str, str]]
SPOT = {"sku": "l40s", "market": "spot", "labels": {"kind": "l40s"}}
STEADY = {"sku": "a100", "labels": {"kind": "a100"}}


def config(ranks: int, resources: dict[str, float], *workers: dict[str, object]) -> Config:
    learner = {"num_ranks": ranks, "resources": resources}
    return Config.model_validate({"learner": learner, "fleet": {"workers": list(workers or (SPOT, STEADY))}})


def machine(kind: str = "", **resources: float) -> Machine:
    return {"CPU": 16.0, **resources}, {"kind": kind} if kind else {}


@pytest.mark.parametrize(
    ("ranks", "machines", "strategy"),
    [
        (4, [machine(GPU=8)], "STRICT_PACK"),
        (4, [machine(GPU=3), machine(GPU=4)], "STRICT_PACK"),
        (4, [machine(GPU=2), machine(GPU=2)], "PACK"),
        (4, [machine("l40s", GPU=8), machine(GPU=2), machine(GPU=2)], "PACK"),  # the large one may go away
    ],
)
def test_ranks_share_a_machine_if_one_can_hold_them(
    ranks: int, machines: list[Machine], strategy: str
) -> None:
    found = place_ranks(config(ranks, {"CPU": 1.0, "GPU": 1.0}), machines)
    assert found.strategy == strategy
    assert dict(found.label_selector) == {"kind": "!in(l40s)"}


def test_several_spot_types_are_left_out_together() -> None:
    other = {"sku": "a10", "market": "spot", "labels": {"kind": "a10", "zone": "b"}}
    found = place_ranks(config(1, {"CPU": 1.0}, SPOT, other), [machine()])
    assert dict(found.label_selector) == {"kind": "!in(a10,l40s)", "zone": "!in(b)"}


def test_where_only_spot_machines_have_room_they_are_taken() -> None:
    found = place_ranks(config(2, {"GPU": 1.0}), [machine("l40s", GPU=1), machine("l40s", GPU=1), machine()])
    assert (found.strategy, dict(found.label_selector)) == ("PACK", {})


@pytest.mark.parametrize("seed", range(20))
def test_of_one_machine_and_twenty_spot_ones_the_first_is_chosen(seed: int) -> None:
    rng = random.Random(seed)
    machines = [machine(GPU=8), *(machine("l40s", GPU=float(rng.choice([1, 4, 8]))) for _ in range(20))]
    rng.shuffle(machines)
    found = place_ranks(config(rng.randint(1, 8), {"CPU": 1.0, "GPU": 1.0}), machines)
    assert (found.strategy, dict(found.label_selector)) == ("STRICT_PACK", {"kind": "!in(l40s)"})
