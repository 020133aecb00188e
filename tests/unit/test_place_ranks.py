"""Machines of the learner's ranks: none that is rented to be taken away, if others have room."""

from __future__ import annotations

import random

import pytest

from echo_planes.cluster.placement import Machine, lasting_machines
from echo_planes.config.schema import Config

SPOT = {"sku": "l40s", "market": "spot", "labels": {"market": "spot", "region": "east"}}
STEADY = {"sku": "a100", "labels": {"market": "on_demand", "region": "east"}}


def config(ranks: int, *workers: dict[str, object], **resources: float) -> Config:
    learner = {"num_ranks": ranks, "resources": resources or {"CPU": 1.0, "GPU": 1.0}}
    return Config.model_validate({"learner": learner, "fleet": {"workers": list(workers or (SPOT, STEADY))}})


def machine(name: str, labels: dict[str, str] | None = None, **resources: float) -> Machine:
    return Machine(name, {"CPU": 16.0, **resources}, labels or {})


def spot(name: str, gpus: float) -> Machine:
    return machine(name, {"market": "spot", "region": "east", "ray.io/node-id": name}, GPU=gpus)


def test_a_label_that_spot_machines_share_with_others_does_not_make_these_spot() -> None:
    steady = machine("b", {"market": "on_demand", "region": "east"}, GPU=4)
    assert lasting_machines(config(4), [spot("a", 8), steady]) == ("b",)


@pytest.mark.parametrize(
    ("wanted", "excluded"),
    [("spot", True), ("in(cheap, spot)", True), ("!on_demand", True), ("!in(spot)", False), ("cheap", False)],
)
def test_labels_are_selectors_of_ray(wanted: str, excluded: bool) -> None:
    kind = {"sku": "l40s", "market": "spot", "labels": {"market": wanted}}
    found = lasting_machines(config(1, kind), [spot("a", 8), machine("b", {"market": "on_demand"}, GPU=1)])
    assert ("a" not in found) == excluded


def test_ranks_may_be_on_several_machines_that_last() -> None:
    machines = [machine("a", GPU=2), spot("b", 8), machine("c", GPU=2)]
    assert lasting_machines(config(4), machines) == ("a", "c")


def test_where_only_spot_machines_have_room_or_nothing_is_spot_any_will_do() -> None:
    assert lasting_machines(config(2), [spot("a", 1), spot("b", 1), machine("c")]) == ()
    assert lasting_machines(config(2, STEADY), [machine("a", GPU=2)]) == ()
    assert lasting_machines(config(2, {"sku": "x", "market": "spot"}), [machine("a", GPU=2)]) == ()


@pytest.mark.parametrize("seed", range(20))
def test_of_one_machine_and_twenty_spot_ones_the_first_is_chosen(seed: int) -> None:
    rng = random.Random(seed)
    machines = [machine("own", GPU=8), *(spot(str(n), float(rng.choice([1, 4, 8]))) for n in range(20))]
    rng.shuffle(machines)
    assert lasting_machines(config(rng.randint(1, 8)), machines) == ("own",)
