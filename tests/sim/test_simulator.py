"""Whole simulated runs: the capacity rule, determinism, faults, money, spot markets, the fleet."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import ConfigError, DataError
from echo_planes.fleet.capacity import Pace, needed_capacity
from echo_planes.fleet.instance_record import MOST_BACK_OFF_S
from echo_planes.sim.scaling import GroupShape, expected_mu
from echo_planes.sim.scenario import parse_scenario
from echo_planes.sim.trace import Record
from echo_planes.sim.world import Result, World
from tests.thorough import examples, takes_minutes

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("ECHO_PLANES_DATA", ROOT.parent / "shared" / "data"))
FATES = ("trained", "stale", "uninformative", "lost", "refused")  # of tokens, in the summary
P3_TRACE = DATA / "spot_traces" / "bamboo" / "p3-trace.csv"


def small(**changes: Any) -> dict[str, Any]:
    """Six workers for a learner of 60 s a step, one virtual hour and a half."""
    instance_type = {
        "name": "gpu",
        "count": 6,
        "peak_tokens_per_s": 1000.0,
        "half_batch": 4.0,
        "max_groups": 2,
    }
    tree: dict[str, Any] = {
        "run": {"hours": 1.5},
        "sampling": {"prompts_per_step": 32, "samples_per_prompt": 4},
        "lengths": {"median_tokens": 1500.0, "sigma": 0.5, "max_tokens": 6000},
        "staleness": {"max_staleness": 3, "queue_batches": 3.0},
        "learner": {"t_train_s": 60.0, "usd_per_hour": 10.0, "jitter": 0.2},
        "network": {"snapshot_mb": 500.0, "patch_mb": 20.0},
        "instance_types": [
            instance_type | {"usd_per_hour": 1.0, "boot_s": 30.0, **changes.pop("instance_type", {})}
        ],
    }
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) and key in tree else value
    return tree


def simulate(**changes: Any) -> tuple[World, Result]:
    world = World(parse_scenario(small(**changes)))
    result = world.run()
    check(world, result)
    return world, result


def check(world: World, result: Result) -> None:
    """Check what must hold however a run went."""
    summary, counts = result.summary, world.data.counts
    assert summary["lost_trajectories"] == 0
    parts = counts.trained + counts.dropped_stale + counts.uninformative + counts.buffered
    assert counts.accepted == parts
    assert summary["max_staleness_observed"] <= world.scenario.staleness.max_staleness
    samples = world.scenario.sampling.samples_per_prompt
    assert counts.trained == samples * world.scenario.sampling.prompts_per_step * world.data.step
    # Every dollar is in one part, and of one machine.
    money, now_s = world.trace.money, world.kernel.now_s
    total = money.total(now_s)
    assert sum(money.parts(now_s).values(), Fraction()) == total
    assert sum(summary["usd_by_sku"].values()) == pytest.approx(float(total))
    assert all(value >= 0 for value in money.parts(now_s).values())
    # No token has two fates, and all that were trained were made.
    fated = sum(summary[f"{fate}_tokens"] for fate in FATES)
    made = sum(machine.made for machine in money._machines.values())
    assert fated <= made


@pytest.mark.parametrize(("rate", "expires"), [(0.1, True), (1.0, False), (10.0, False)])
def test_workers_whose_clock_is_slow_renew_their_leases_too_rarely(rate: float, expires: bool) -> None:
    sampling = {"prompts_per_step": 32, "samples_per_prompt": 4, "lease_s": 20.0, "stream_s": 2.0}
    world = World(parse_scenario(small(sampling=sampling)))

    def skew() -> None:
        for member in world.workers.serving():
            assert member.engine is not None
            member.engine.engine.clock_rate = rate

    world.kernel.at(1000.0, skew)
    result = world.run()
    check(world, result)
    assert (result.summary["expired_leases"] > 0) == expires


# --- the capacity rule (ECHO-2, section 3.3) --------------------------------------------------------

T_TRAIN_S, T_BCAST_S, MU = 100.0, 40.0, 0.4


def rule(max_staleness: int, count: int, *, in_place: bool = True, steps: int = 21) -> tuple[float, int]:
    """Bubble after the first batch, with identical workers of MU trajectories/s, and the greatest age."""
    tree = {
        "run": {"steps": steps, "hours": 1000.0},
        "sampling": {"prompts_per_step": 200, "samples_per_prompt": 2},
        "lengths": {"median_tokens": 500.0, "sigma": 0.0, "max_tokens": 1000},
        "staleness": {"max_staleness": max_staleness, "queue_batches": 100.0},
        "learner": {"t_train_s": T_TRAIN_S, "publish_s": 0.0, "checkpoint_s": 0.0},
        "network": {
            "mode": "star_unlimited",
            "snapshot_mb": 12.5 * T_BCAST_S,
            "rtt_s": 0.0,
            "chunk_kib": 1,
            "install_s": 0.0,
            "receive_in_place": in_place,
        },
        "instance_types": [
            {"name": "a", "count": count, "peak_tokens_per_s": 200.0, "half_batch": 0.0, "max_groups": 1}
        ],
    }
    world = World(parse_scenario(tree))
    result = world.run()
    check(world, result)
    assert expected_mu(world.scenario.instance_types[0], GroupShape.of(world.lengths)) == pytest.approx(MU)
    assert result.summary["t_bcast_s_median"] == pytest.approx(T_BCAST_S, rel=1e-3)
    later = result.steps[1:]
    idle_s = sum(row["t_idle_s"] for row in later)
    return idle_s / (idle_s + sum(row["t_train_s"] for row in later)), result.summary[
        "max_staleness_observed"
    ]


@pytest.mark.parametrize("max_staleness", [2, 3, 6])
def test_the_bubble_vanishes_at_the_predicted_number_of_workers(max_staleness: int) -> None:
    kappa = max_staleness - 1
    needed = needed_capacity(kappa, 400, T_TRAIN_S, T_BCAST_S)
    assert needed is not None
    enough = math.ceil(needed / MU)
    bubbles = {}
    for count in (enough - 3, enough - 1, enough):
        bubbles[count], oldest = rule(max_staleness, count)
        assert oldest <= max_staleness
    assert bubbles[enough] < 0.002
    assert bubbles[enough - 1] > 0.01
    assert bubbles[enough - 3] > bubbles[enough - 1] + 0.05


def test_workers_that_go_on_while_they_receive_need_less_than_the_rule_says() -> None:
    """Its assumption is that nothing is generated meanwhile; staged weights make that untrue."""
    only_sampling = math.ceil(400 / T_TRAIN_S / MU)
    assert rule(2, only_sampling, in_place=False)[0] < 0.002
    assert rule(2, only_sampling, in_place=True)[0] > 0.2
    assert rule(2, only_sampling - 1, in_place=False)[0] > 0.05


def test_how_long_the_learner_asks_for_a_batch_changes_nothing() -> None:
    """The simulator looks only where something may have changed: it must not look too late."""
    often, seldom = (
        simulate(instance_type={"count": 3}, run={"hours": 3.0, "batch_wait_s": wait_s})[1]
        for wait_s in (1.0, 600.0)
    )
    assert often.summary["bubble_ratio"] > 0.2
    assert seldom.summary["bubble_ratio"] == pytest.approx(often.summary["bubble_ratio"], rel=0.01)


def test_a_saturated_worker_makes_what_is_expected_of_it() -> None:
    world, result = simulate(instance_type={"count": 1}, run={"hours": 6.0})
    expected = expected_mu(world.scenario.instance_types[0], GroupShape.of(world.lengths))
    assert result.summary["trajectories_per_s"] == pytest.approx(expected, rel=0.05)


def test_a_star_slows_with_the_workers_and_chains_do_not() -> None:
    found = {}
    for mode in ("chain", "star", "star_unlimited"):
        for count in (4, 32):
            network = {"mode": mode, "uplink_mbit": 300.0, "patch_mb": 100.0, "chunk_kib": 64}
            _, result = simulate(instance_type={"count": count, "peak_tokens_per_s": 250.0}, network=network)
            found[mode, count] = result.summary["t_bcast_s_median"]
    assert found["star", 32] > 7 * found["star", 4]
    assert found["chain", 32] < 1.2 * found["chain", 4]
    assert found["chain", 32] < 1.2 * found["star_unlimited", 32]


# --- determinism -------------------------------------------------------------------------------------

FAULTY: dict[str, Any] = {
    "run": {"hours": 0.75},
    "fleet": {"mode": "kept"},
    "instance_type": {"market": "spot", "interruptions_per_hour": 1.0, "max_count": 8},
    "faults": [{"at_s": 900.0, "kind": "kill", "count": 2}, {"at_s": 2000.0, "kind": "silence"}],
}


def test_same_seed_same_bytes() -> None:
    first, second, other = (simulate(**FAULTY, seed=seed)[1].lines() for seed in (5, 5, 6))
    assert first == second
    assert first != other
    assert all('"simulated": true' in line for line in first.splitlines())


def test_the_bytes_do_not_hang_on_how_python_orders_sets(tmp_path: Path) -> None:
    code = (
        "from tests.sim.test_simulator import FAULTY, simulate;"
        "import hashlib; print(hashlib.sha256(simulate(**FAULTY, seed=5)[1].lines().encode()).hexdigest())"
    )
    digests = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


# --- faults ------------------------------------------------------------------------------------------

faults = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": st.floats(0.0, 5000.0),
            "kind": st.sampled_from(["kill", "preempt", "slow", "slow_link", "silence", "refuse_install"]),
            "count": st.integers(1, 3),
            "duration_s": st.floats(1.0, 2000.0),
        }
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=examples(40))
@given(
    faults=faults,
    seed=st.integers(0, 1000),
    mode=st.sampled_from(["fixed", "kept", "provisioned"]),
    policy=st.sampled_from(["wait", "drop"]),
    max_staleness=st.sampled_from([0, 1, 3]),
    notice_s=st.sampled_from([0.0, 20.0]),
)
def test_nothing_is_lost_and_every_dollar_is_found(
    faults: list[dict[str, Any]], seed: int, mode: str, policy: str, max_staleness: int, notice_s: float
) -> None:
    simulate(
        seed=seed,
        faults=faults,
        fleet={"mode": mode, "restarts": 10},
        staleness={"max_staleness": max_staleness, "policy": policy, "reuse": 1},
        instance_type={"interruptions_per_hour": 0.5, "notice_s": notice_s, "max_count": 9, "market": "spot"},
    )


def test_what_a_killed_worker_had_streamed_goes_on_elsewhere() -> None:
    world, result = simulate(faults=[{"at_s": 1500.5, "kind": "kill", "worker": "w2"}])
    summary = result.summary
    assert summary["workers_lost"] == 1
    assert summary["continued_leases"] > 0
    assert summary["discarded_tokens"] == 0
    # At most what its 8 samples make between two streams is gone.
    spec = world.scenario.instance_types[0].engine
    assert 0 < summary["lost_tokens"] <= spec.tokens_per_s(8) * world.scenario.sampling.stream_s + 8
    (fault,) = summary["faults"]
    assert fault["capacity_drop"] == pytest.approx(1 / 6)
    # Noticed, built again, and the whole snapshot fetched.
    network = world.scenario.network
    again_s = network.detection_s + 30.0 + network.snapshot_mb * 8 / network.worker_mbit
    assert fault["recovered_after_s"] == pytest.approx(again_s, abs=2.0)


def test_a_notice_is_long_enough_to_lose_nothing() -> None:
    faults = [{"at_s": 1500.5, "kind": "preempt", "count": 3}]
    _, warned = simulate(fleet={"mode": "kept"}, faults=faults, instance_type={"notice_s": 30.0})
    _, sudden = simulate(fleet={"mode": "kept"}, faults=faults)
    assert warned.summary["lost_tokens"] == 0
    assert warned.summary["continued_tokens"] > 0
    assert warned.summary["workers_lost"] == 0
    assert sudden.summary["lost_tokens"] > 0
    assert sudden.summary["workers_lost"] == 3
    for result in (warned, sudden):
        assert result.steps[-1]["workers"] == 6


def test_a_silent_worker_is_not_waited_for_and_comes_back() -> None:
    silence = {"at_s": 1500.0, "kind": "silence", "worker": "w1", "duration_s": 1500.0}
    _, result = simulate(faults=[silence])
    summary = result.summary
    assert summary["expired_leases"] > 0
    assert summary["refused_tokens"] > 0  # what it made while nobody heard it
    assert summary["workers_lost"] == 0
    assert summary["faults"][0]["recovered_after_s"] == pytest.approx(1500.0)
    assert result.steps[-1]["workers"] == 6


def test_a_slow_worker_slows_the_run_in_its_share() -> None:
    slow = [{"at_s": 0.0, "kind": "slow", "worker": f"w{i}", "duration_s": 1e5} for i in range(3)]
    late = [fault | {"at_s": 120.0, "factor": 0.5} for fault in slow]
    _, usual = simulate(learner={"t_train_s": 1.0})
    _, slowed = simulate(learner={"t_train_s": 1.0}, faults=late)
    ratio = slowed.summary["trajectories_per_s"] / usual.summary["trajectories_per_s"]
    assert 0.70 < ratio < 0.80


def watched(at_s: list[float], look: Callable[[World], Any], **changes: Any) -> list[Any]:
    """Return what `look` sees of a run at these times."""
    world, seen = World(parse_scenario(small(**changes))), []
    for when_s in at_s:
        world.kernel.at(when_s, lambda: seen.append(look(world)))
    check(world, world.run())
    return seen


def fault(kind: str, at_s: float, duration_s: float, factor: float = 0.5) -> dict[str, Any]:
    return {"kind": kind, "worker": "w1", "at_s": at_s, "duration_s": duration_s, "factor": factor}


@pytest.mark.parametrize("kind", ["slow", "slow_link"])
def test_of_two_faults_that_overlap_each_has_its_own_end(kind: str) -> None:
    """The slower one counts while it lasts."""

    def speed(world: World) -> float:
        member = world.workers.members["w1"]
        return member.speed if kind == "slow" else world.workers.network._peers["w1"].speed

    faults = [fault(kind, 600.0, 2400.0), fault(kind, 1200.0, 600.0, 0.25), fault(kind, 2000.0, 1500.0, 0.8)]
    seen = watched([500.0, 700.0, 1300.0, 1900.0, 2100.0, 3100.0, 3600.0], speed, faults=faults)
    assert seen == [1.0, 0.5, 0.25, 0.5, 0.5, 0.8, 1.0]


def test_a_slow_worker_that_was_started_again_is_slow_for_as_long_as_its_next_fault_says() -> None:
    faults = [fault("slow", 600.0, 1800.0), fault("kill", 900.0, 1.0), fault("slow", 1500.0, 1500.0)]
    seen = watched(
        [700.0, 1400.0, 1600.0, 2500.0, 3100.0],
        lambda world: world.workers.members["w1"].speed,
        faults=faults,
    )
    assert seen == [0.5, 1.0, 0.5, 0.5, 1.0]


def test_a_silence_within_another_neither_ends_it_nor_lets_tokens_through() -> None:
    def sent(world: World) -> dict[str, int]:
        engine = world.workers.members["w1"].engine
        assert engine is not None
        return {name: sum(work.sent) for name, work in engine.work.items()}

    def serves(world: World) -> bool:
        return "w1" in world.trace._capacity

    faults = [fault("silence", 1500.0, 1500.0), fault("silence", 1502.0, 100.0)]
    assert watched([1400.0, 1550.0, 1700.0, 2900.0, 3100.0], serves, faults=faults) == [
        True,
        False,
        False,
        False,
        True,
    ]
    before, after = watched([1501.0, 1503.0], sent, faults=faults)
    both = before.keys() & after.keys()
    assert both
    assert {name: before[name] for name in both} == {name: after[name] for name in both}


def test_a_refused_install_is_made_again() -> None:
    _, result = simulate(faults=[{"at_s": 1500.0, "kind": "refuse_install", "worker": "w3"}])
    assert Counter(event["kind"] for event in result.events)["refused"] == 1
    assert result.summary["workers_lost"] == 0
    assert result.steps[-1]["workers"] == 6


# --- money -------------------------------------------------------------------------------------------


def test_dollars_are_hours_times_prices() -> None:
    _, result = simulate(run={"hours": 2.0})
    assert result.summary["usd_by_sku"] == {
        "gpu on_demand": pytest.approx(6 * 2.0 * 1.0),
        "learner on_demand": pytest.approx(20.0),
    }


# --- spot markets and the fleet ------------------------------------------------------------------------


def spot(tmp_path: Path, text: str, **instance_type: Any) -> dict[str, Any]:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return {
        "fleet": {"mode": "kept"},
        "instance_type": {"market": "spot", "trace": str(path), "trace_at_end": "hold", **instance_type},
    }


def test_the_fleet_follows_a_recorded_market(tmp_path: Path) -> None:
    _, result = simulate(**spot(tmp_path, "0,6\n1800,2\n3600,4\n"))
    workers = {row["time_s"]: row["workers"] for row in result.steps}
    assert max(n for t, n in workers.items() if t < 1800) == 6
    assert {n for t, n in workers.items() if 1900 < t < 3600} == {2}
    # Two that could not be had were given up, and their instance type backed off, for ten minutes at most.
    assert {n for t, n in workers.items() if t > 3600 + MOST_BACK_OFF_S + 100} == {4}
    most_s = 6 * 1800 + 2 * 1800 + 4 * 1800
    paid_s = 3600 * result.summary["usd_by_sku"]["gpu spot"]
    assert most_s - 2 * (MOST_BACK_OFF_S + 100) <= paid_s < most_s


def test_only_a_share_of_the_market_is_ours(tmp_path: Path) -> None:
    _, result = simulate(**spot(tmp_path, "0,6\n5400,6\n", trace_share=0.5))
    assert result.summary["workers_most"] == 3


def test_a_trace_that_ends_stops_the_simulation_unless_told_otherwise(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ends after 3,600 s"):
        simulate(**spot(tmp_path, "0,6\n3600,6\n", trace_at_end="error"))
    _, result = simulate(**spot(tmp_path, "0,6\n1000,0\n2000,0\n", trace_at_end="repeat"))
    taken = [event["time_s"] for event in result.events if event["kind"] == "worker lost"]
    assert sorted(set(taken)) == [1000.0, 3000.0, 5000.0]


def test_a_trace_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"trace=no\.csv of gpu is not there"):
        simulate(instance_type={"trace": "no.csv"})


@pytest.mark.skipif(not P3_TRACE.is_file(), reason=f"no recorded spot trace {P3_TRACE}")
def test_a_recorded_market_of_machines_that_come_and_go() -> None:
    _, result = simulate(
        fleet={"mode": "kept"},
        run={"hours": 3.0},
        instance_type={"count": 30, "market": "spot", "trace": str(P3_TRACE), "trace_at_end": "hold"},
    )
    assert result.summary["workers_lost"] > 5
    assert result.summary["lost_trajectories"] == 0


def instance_types(**cheap: Any) -> list[dict[str, Any]]:
    common = {"peak_tokens_per_s": 1000.0, "half_batch": 4.0, "max_groups": 2, "boot_s": 30.0}
    return [
        common | {"name": "dear", "sku": "dear", "usd_per_hour": 2.0, "count": 1, "max_count": 20},
        common | {"name": "cheap", "sku": "cheap", "usd_per_hour": 1.0, "max_count": 20, **cheap},
    ]


def test_the_fleet_grows_to_what_the_learner_needs_by_price() -> None:
    network = {"snapshot_mb": 20.0, "patch_mb": 20.0}
    fleet = {"mode": "provisioned"}
    world, result = simulate(
        instance_types=instance_types(max_count=4),
        fleet=fleet,
        network=network,
        run={"hours": 4.0},
        learner={"jitter": 0.0},
    )
    mu = expected_mu(world.scenario.instance_types[0], GroupShape.of(world.lengths))
    needed = result.summary["mu_min"] / mu
    assert needed <= result.steps[-1]["workers"] <= math.ceil(1.1 * needed) + 1
    late = [row for row in result.steps if row["time_s"] > 2 * 3600]
    idle_s = sum(row["t_idle_s"] for row in late)
    assert idle_s / (idle_s + sum(row["t_train_s"] for row in late)) < 0.02
    assert world.workers.scaling is not None
    assert world.workers.scaling.fleet.counts["cheap"] == 4  # as many as there are, then the dear ones
    assert any("trajectories/s are needed" in event["text"] for event in result.events)


def test_machines_that_never_come_are_replaced_by_dearer_ones(tmp_path: Path) -> None:
    path = tmp_path / "none.csv"
    path.write_text("0,0\n10,0\n")
    _, result = simulate(
        instance_types=instance_types(trace=str(path), trace_at_end="hold", market="spot"),
        fleet={"mode": "provisioned", "boot_limit_s": 300.0},
        network={"snapshot_mb": 20.0, "patch_mb": 20.0},
        run={"hours": 4.0},
    )
    assert "cheap spot" not in result.summary["usd_by_sku"]
    assert result.steps[-1]["workers"] >= 3


@pytest.mark.parametrize("seed", range(3))
def test_at_the_end_of_a_run_nothing_is_bought_that_would_not_pay(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer dollars than without a look at what is left, in the same time; until then nothing differs."""
    boot_s, steps = 400.0, 40
    market = {"boot_s": boot_s, "interruptions_per_hour": 2.0, "market": "spot", "max_count": 12}
    changes = {"run": {"hours": 12.0, "steps": steps}, "fleet": {"mode": "provisioned"}, "seed": seed}
    _, with_look = simulate(instance_type=market, **changes)
    monkeypatch.setattr(Pace, "left_s", lambda *_: None)
    _, without = simulate(instance_type=market, **changes)
    ends_s = [result.steps[-1]["time_s"] for result in (with_look, without)]
    assert len(with_look.steps) == len(without.steps) == steps
    assert with_look.summary["usd_total"] < without.summary["usd_total"]
    assert ends_s[0] <= 1.03 * ends_s[1]

    def until(result: Result, end_s: float) -> list[Record]:
        return [one for one in (*result.events, *result.steps) if one["time_s"] < end_s]

    pays_until_s = ends_s[1] - 3 * boot_s
    assert until(with_look, pays_until_s) == until(without, pays_until_s)


@takes_minutes
@pytest.mark.parametrize("solved", [0.5, 0.75])
def test_a_provisioned_fleet_samples_what_refill_replaces_as_well(solved: float) -> None:
    changes: dict[str, Any] = {
        "run": {"hours": 4.0},
        "fleet": {"mode": "provisioned"},
        "staleness": {"max_staleness": 6, "queue_batches": 6.0},
        "instance_type": {"count": 2, "max_count": 60},
    }
    fleets = []
    for refill in ("off", "reward"):
        sampling = {"prompts_per_step": 32, "samples_per_prompt": 4, "solved": solved, "refill": refill}
        world, result = simulate(
            **{**changes, "sampling": sampling, "instance_type": dict(changes["instance_type"])}
        )
        late = result.steps[len(result.steps) // 2 :]
        assert sum(row["t_idle_s"] for row in late) < 0.03 * sum(row["t_train_s"] for row in late)
        fleets.append(late[-1]["workers"])
    counts = world.data.counts
    share = counts.uninformative / (counts.uninformative + counts.trained)
    assert share == pytest.approx(solved, abs=0.05)
    assert fleets[1] == pytest.approx(fleets[0] / (1 - share), rel=0.25)
    assert result.summary["usd_by_part"]["uninformative"] > 0
