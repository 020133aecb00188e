"""Standbys and slow workers in the simulator: the real fleet and the real buffer, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from echo_planes.errors import ConfigError
from echo_planes.sim.scenario import Scenario, parse_scenario
from echo_planes.sim.world import Result, World

BOOT_S = 200.0
TICK_S = 5.0
LOST_AT_S = 900.0


def scenario(fault: dict[str, Any], *, standby: int, count: int = 4, mode: str = "kept") -> Scenario:
    return parse_scenario(
        {
            "name": "standby",
            "run": {"steps": 200, "hours": 0.8},
            "sampling": {"prompts_per_step": 8, "samples_per_prompt": 2},
            "lengths": {"median_tokens": 100, "sigma": 0.3, "max_tokens": 400},
            "learner": {"t_train_s": 30.0},
            "network": {"snapshot_mb": 10, "detection_s": 2.0},
            "fleet": {"mode": mode, "standby": standby, "tick_s": TICK_S},
            "instance_types": [
                {
                    "name": "gpu",
                    "sku": "gpu",
                    "market": "spot",
                    "usd_per_hour": 1.0,
                    "count": count,
                    "max_count": 2 * count,
                    "peak_tokens_per_s": 25.0,
                    "half_batch": 4.0,
                    "max_groups": 2,
                    "boot_s": BOOT_S,
                }
            ],
            "faults": [{"at_s": LOST_AT_S, "worker": "w1", **fault}],
        }
    )


def recovered_s(result: Result) -> float:
    (fault,) = result.summary["faults"]
    assert fault["recovered_after_s"] is not None
    return float(fault["recovered_after_s"])


@pytest.mark.parametrize("kind", ["preempt", "kill"])
def test_with_a_standby_a_lost_worker_is_made_good_within_a_tick_and_no_boot(kind: str) -> None:
    """Without one it takes the boot, the snapshot and its install besides."""
    without = recovered_s(World(scenario({"kind": kind}, standby=0)).run())
    world = World(scenario({"kind": kind}, standby=1))
    result = world.run()
    assert BOOT_S < without <= BOOT_S + 3 * TICK_S + 10.0
    assert recovered_s(result) <= 2.0 + TICK_S  # detection, and the next look
    (part,) = [event for event in result.events if event["kind"] == "takes part"]
    assert part["worker"] == "w4"
    assert part["text"] == "in place of w1, which goes"
    # The next one was launched, is parked, and has made nothing.
    parked = [event["worker"] for event in result.events if event["kind"] == "standby"]
    assert parked == ["w4", "w5"]
    assert world.workers.members["w5"].accepted == 0 < world.workers.members["w4"].accepted
    assert world.workers.scaling is not None
    assert world.workers.scaling.fleet.num_serving == 4
    assert result.summary["lost_trajectories"] == 0


def test_a_standby_takes_every_version_is_leased_nothing_and_its_dollars_are_idle() -> None:
    fault = {"kind": "slow_link", "factor": 1.0}
    without, world = World(scenario(fault, standby=0)).run(), World(scenario(fault, standby=1))
    result = world.run()
    standby = world.workers.members["w4"]
    assert standby.engine is not None
    assert standby.engine.version == world.workers.members["w0"].engine.version  # type: ignore[union-attr]
    assert standby.accepted == 0
    assert standby.engine.engine.tokens == 0
    hours = result.summary["seconds"] / 3600.0
    more = {
        part: usd - without.summary["usd_by_part"][part]
        for part, usd in result.summary["usd_by_part"].items()
    }
    assert more["booting"] == pytest.approx(BOOT_S / 3600.0, rel=0.01)
    assert more["idle"] == pytest.approx(hours - BOOT_S / 3600.0, rel=0.1)
    assert {row["workers"] for row in result.steps} == {4}  # it is no capacity


@pytest.mark.parametrize("standby", [0, 1])
@pytest.mark.parametrize("mode", ["kept", "provisioned"])
def test_a_slow_worker_is_replaced_and_nobody_else(mode: str, standby: int) -> None:
    fault = {"kind": "slow", "factor": 0.3, "duration_s": 36000.0}
    result = World(scenario(fault, standby=standby, mode=mode)).run()
    gone = [
        event for event in result.events if event["kind"] == "worker leaves" and "free place" in event["text"]
    ]
    assert [event["worker"] for event in gone] == ["w1"]
    assert "of the" in gone[0]["text"]
    assert gone[0]["time_s"] > LOST_AT_S + 100.0
    took_s = gone[0]["time_s"] - LOST_AT_S
    assert took_s < (900.0 if standby else 900.0 + BOOT_S)
    assert recovered_s(result) <= took_s


def test_a_fleet_of_fixed_size_has_no_standby() -> None:
    with pytest.raises(ConfigError, match="standby=1"):
        scenario({"kind": "kill"}, standby=1, mode="fixed")
