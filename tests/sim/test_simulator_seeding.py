"""Seeders, steps in parts and prefill in the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from echo_planes.errors import ConfigError
from echo_planes.sim.engine_model import Engine, EngineSpec
from echo_planes.sim.scenario import parse_scenario
from echo_planes.sim.world import Result, World

STEPS = 6


def simulated(remote: int, engines: int = 0, parts: int | None = 2, **more: Any) -> Result:
    """A synchronous run whose learner is fast beside so few workers."""
    engine = {"max_groups": 8, "peak_tokens_per_s": 2000.0, "half_batch": 16.0}
    scenario: dict[str, Any] = {
        "run": {"steps": STEPS},
        "sampling": {"prompts_per_step": 16, "samples_per_prompt": 4},
        "lengths": {"median_tokens": 500.0},
        "staleness": {"max_staleness": 0},
        "learner": {"t_train_s": 20.0, "micro_batch_groups": parts},
        "network": {"snapshot_mb": 100.0},
        "seeding": {"engines": engines, "first_s": 10.0, **engine},
        "instance_types": [{"name": "g", "count": remote, "boot_s": 0.0, "usd_per_hour": 1.0, **engine}],
        **more,
    }
    return World(parse_scenario(scenario)).run()


def seconds(result: Result) -> float:
    """Of the steps after the first two."""
    return float(result.steps[-1]["time_s"] - result.steps[1]["time_s"])


def test_a_seeded_step_is_shorter_than_a_colocated_and_than_a_remote_one() -> None:
    seeded, colocated, remote = simulated(1, 2), simulated(0, 2), simulated(1)
    for result in (seeded, colocated, remote):
        assert result.summary["status"] == "done"
        assert result.summary["trained"] == STEPS * 16 * 4
        assert result.summary["max_staleness_observed"] == 0
    assert seconds(seeded) < 0.95 * seconds(colocated)
    assert seconds(seeded) < 0.8 * seconds(remote)
    assert all("t_seed_s" in row for row in seeded.steps)
    assert not any("t_seed_s" in row for row in remote.steps)


def test_parts_shorten_a_step_and_train_the_same() -> None:
    whole, in_parts = simulated(2, parts=None), simulated(2, parts=2)
    assert seconds(in_parts) < seconds(whole)
    assert [row["trained"] for row in whole.steps] == [row["trained"] for row in in_parts.steps]


def test_a_preempted_fleet_leaves_its_steps_to_the_seeders() -> None:
    faults = [{"at_s": 60.0, "kind": "preempt", "worker": "w0"}]
    result = simulated(1, 2, faults=faults, fleet={"restarts": 0})
    assert result.summary["status"] == "done"
    assert result.summary["trained"] == STEPS * 16 * 4
    assert result.steps[-1]["mean_remote"] == 0.0


def test_a_prefill_delays_all_samples_and_none_costs_nothing() -> None:
    ends = []
    for rate in (None, 100.0):
        engine = Engine(EngineSpec(10.0, 0.0, rate), 4, 0.0)
        engine.add("a", [50], prompt_tokens=20)
        engine.add("b", [80], have=[30], prompt_tokens=20)
        ends.append(engine.next_end_s())
        engine.advance(ends[-1])
        assert engine.take_ended() == ["a", "b"]
    assert ends == [pytest.approx(10.0), pytest.approx(10.0 + (20 + 20 + 30) / 100.0)]


@pytest.mark.parametrize("section", [{"seeding": {"engines": 1}}, {"learner": {"micro_batch_groups": 2}}])
def test_seeding_and_parts_are_for_steps_of_one_version(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"set staleness\.max_staleness=0"):
        parse_scenario({"instance_types": [{"name": "g", "count": 1}], **section})
