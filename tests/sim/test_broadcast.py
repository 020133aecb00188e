"""Broadcasts over simulated links, with the real tracker: times against the ideal, and random faults.

Every draw comes from one seed, which a failure names.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from echo_planes.weights.chain.events import SENDER_ID, Assign, CancelBroadcast, Demote, Throttle
from echo_planes.weights.chain.plan import ideal_broadcast_s
from echo_planes.weights.chain.simulated import MBIT, BroadcastSim, SimSettings
from echo_planes.weights.chain.tracker import Tracker, TrackerSettings
from echo_planes.weights.wire.manifest import PublicationKey
from tests.thorough import examples

CHUNK = 512 * 1024
CHUNKS = 200  # 100 MiB: 8.4 s at 100 Mbit/s
START_S = 1.0
KEY = PublicationKey("run", 0, "full", -1)


def network(num_workers: int, uplink_mbit: float = 300, seed: int = 0, **more: object) -> BroadcastSim:
    settings = SimSettings(uplink_mbit * MBIT, 100 * MBIT, chunk_bytes=CHUNK, seed=seed, **more)  # type: ignore[arg-type]
    sim = BroadcastSim(settings)
    for number in range(num_workers):
        sim.join(f"w{number}")
    sim.at(START_S, lambda: sim.publish(KEY, CHUNKS))
    return sim


def check_tree(sim: BroadcastSim) -> None:
    parents = sim.tracker.parents()
    for peer in parents:
        seen = {peer}
        while (peer := parents[peer]) != SENDER_ID:
            assert peer not in seen, f"a cycle: {parents}"
            seen.add(peer)
    in_chains = [peer for chain in sim.tracker.chains() for peer in chain]
    for chain in sim.tracker.chains():
        assert [parents[peer] for peer in chain] == [SENDER_ID, *chain[:-1]], "one relay, one chain child"
    assert set(parents.values()) <= {SENDER_ID, *in_chains}, "a leaf forwards to nobody"
    assert len(in_chains) == len(set(in_chains))


def finish(sim: BroadcastSim, limit_s: float = 90.0) -> None:
    """Run to the end; the tree is looked at after every change."""
    seen = -1
    while not sim.published:
        sim.step()
    while not sim.is_over():
        assert sim.now_s < limit_s, "not over"
        sim.step()
        if len(sim.actions) != seen:
            seen = len(sim.actions)
            check_tree(sim)
    for node in sim.workers():
        wanted = sum(one.stop - one.start for one in sim.published if one.number not in node.cancelled)
        assert len(node.have) >= wanted
    assert sim.num_duplicates == 0


@cache
def unfaulted_s(num_workers: int, uplink_mbit: float) -> float:
    sim = network(num_workers, uplink_mbit)
    finish(sim)
    return sim.seconds()


def moved_after(sim: BroadcastSim, when_s: float) -> list[tuple[float, Assign]]:
    return [(at_s, a) for at_s, a in sim.actions if at_s > when_s and isinstance(a, Assign)]


@pytest.mark.parametrize("uplink_mbit", [100, 300, 800])
@pytest.mark.parametrize("num_workers", [1, 4, 8, 16])
def test_time_is_ideal_and_flat(num_workers: int, uplink_mbit: float) -> None:
    sim = network(num_workers, uplink_mbit)
    finish(sim)
    num_hops = -(-num_workers // int(uplink_mbit // 100))
    ideal_s = ideal_broadcast_s(CHUNKS * CHUNK, num_hops, CHUNK, 100 * MBIT, 0.08)
    assert 0.98 * ideal_s <= sim.seconds() <= 1.02 * ideal_s
    assert sim.num_sent == num_workers * CHUNKS
    assert not moved_after(sim, START_S)


def one_after_another(
    num_workers: int, uplink_mbit: float, known: TrackerSettings, slow: dict[str, float], num: int
) -> list[tuple[int, float]]:
    """(chains, seconds) of each broadcast; `slow` workers carry so many Mbit/s less than the others' 100."""
    sim = BroadcastSim(SimSettings(uplink_mbit * MBIT, 100 * MBIT, chunk_bytes=CHUNK))
    sim.tracker = Tracker(known)
    for number in range(num_workers):
        sim.join(f"w{number}")
    for name, less_mbit in slow.items():
        sim.nodes[name].up_bytes_per_s -= less_mbit * MBIT
        sim.nodes[name].down_bytes_per_s -= less_mbit * MBIT
    found = []
    for version in range(num):
        key = PublicationKey("run", version, "full", -1)
        sim.at(sim.now_s + 3.0, lambda key=key: sim.publish(key, 80))  # type: ignore[misc]
        while len(sim.published) <= version:
            sim.step()
        count = len(sim.tracker.chains())
        sim.run(sim.now_s + 90.0)
        found.append((count, sim.seconds(version)))
    return found


@pytest.mark.parametrize(
    ("uplink_mbit", "num_workers", "expected", "is_set", "slow"),
    [
        (300, 8, 3, "nothing", {}),
        (300, 8, 3, "uplink", {}),
        (300, 8, 3, "worker", {}),
        (300, 8, 3, "nothing", {"w1": 20, "w4": 25, "w6": 15}),
        (800, 8, 8, "nothing", {}),
        (800, 16, 8, "nothing", {}),
        (800, 4, 4, "nothing", {}),
        (100, 8, 1, "nothing", {}),
        (50, 8, 1, "nothing", {}),
    ],
)
def test_the_number_of_chains_is_learnt_and_stays(
    uplink_mbit: float, num_workers: int, expected: int, is_set: str, slow: dict[str, float]
) -> None:
    uplink, worker = uplink_mbit * MBIT, 100 * MBIT
    known = TrackerSettings(uplink if is_set == "uplink" else None, worker if is_set == "worker" else None)
    found = one_after_another(num_workers, uplink_mbit, known, slow, num=12)
    told = one_after_another(num_workers, uplink_mbit, TrackerSettings(uplink, worker), slow, num=1)
    assert [count for count, _ in found[8:]] == [expected] * 4
    assert told[0][0] == expected
    assert all(seconds <= 1.03 * told[0][1] for _, seconds in found[8:])


def test_a_star_takes_as_long_as_the_uplink_needs() -> None:
    sim = network(16, 300, direct=True)
    finish(sim)
    assert sim.seconds() == pytest.approx(16 * CHUNKS * CHUNK / (300 * MBIT), rel=0.02)


def test_uplink_below_a_workers_rate() -> None:
    sim = network(3, 50)
    finish(sim)
    assert sim.tracker.parents() == {"w0": SENDER_ID, "w1": "w0", "w2": "w1"}
    assert sim.seconds() <= 1.05 * CHUNKS * CHUNK / (50 * MBIT)


def test_slow_encoding_moves_nobody_and_costs_no_more_than_itself() -> None:
    sim = network(8)
    sim.at(0.0, lambda: None)
    slow = BroadcastSim(sim.settings)
    for number in range(8):
        slow.join(f"w{number}")
    slow.at(START_S, lambda: slow.publish(KEY, CHUNKS, source_bytes_per_s=40 * MBIT))
    finish(slow)
    assert slow.seconds() <= CHUNKS * CHUNK / (40 * MBIT) + 1.0
    assert not moved_after(slow, START_S)


@pytest.mark.parametrize("uplink_mbit", [100, 300, 800])
@pytest.mark.parametrize("fault", ["kill", "slow", "cut_off"])
@pytest.mark.parametrize("seed", range(examples(8)))
def test_one_forwarder_of_eight(fault: str, uplink_mbit: float, seed: int) -> None:
    sim = network(8, uplink_mbit, seed)
    rng = random.Random(seed)
    forwarders = sorted(set(sim.tracker.parents().values()) - {SENDER_ID})
    if not forwarders:  # eight chains of one: somebody without a child
        forwarders = sorted(sim.tracker.parents())
    victim = rng.choice(forwarders)
    child = next((c for c, p in sim.tracker.parents().items() if p == victim), None)
    fault_s = START_S + rng.uniform(2.5, 4.0)
    apply = {
        "kill": lambda: sim.kill(victim),
        "slow": lambda: sim.slow(victim, 0.5),
        "cut_off": lambda: sim.cut_off(victim),
    }
    sim.at(fault_s, apply[fault])
    finish(sim)
    detection_s = 0.0
    if child is not None:
        detection_s = next(at_s for at_s, a in moved_after(sim, fault_s) if a.peer_id == child) - fault_s
    assert detection_s <= 3.0
    assert sim.seconds() <= 1.25 * unfaulted_s(8, uplink_mbit) + detection_s
    # What was on its way when hops were dissolved is all that is sent twice.
    assert sim.num_sent <= 8 * CHUNKS + 8 * len(moved_after(sim, fault_s)) + 8


@pytest.mark.parametrize("seed", range(examples(60)))
def test_random_faults(seed: int) -> None:
    rng = random.Random(seed)
    num_workers = rng.randint(2, 14)
    sim = network(num_workers, rng.choice([100, 200, 300, 500, 800]), seed)
    names = [f"w{number}" for number in range(num_workers)]
    for victim in rng.sample(names, rng.randint(1, max(1, num_workers // 2))):
        at_s = START_S + rng.uniform(0.0, 9.0)
        fault = rng.choice(["kill", "slow", "cut_off", "blink", "damage", "forge"])
        if fault == "kill":
            sim.at(at_s, lambda v=victim: sim.kill(v))  # type: ignore[misc]
        elif fault == "slow":
            sim.at(at_s, lambda v=victim: sim.slow(v, rng.uniform(0.1, 0.7)))  # type: ignore[misc]
        elif fault in ("cut_off", "blink"):
            sim.at(at_s, lambda v=victim: sim.cut_off(v))  # type: ignore[misc]
            if fault == "blink":
                sim.at(at_s + rng.uniform(0.1, 4.0), lambda v=victim: sim.heal(v))  # type: ignore[misc]
        elif fault == "damage":
            sim.nodes[victim].damage_share = 10 ** rng.uniform(-4, -0.5)
        elif child := next((c for c, p in sim.tracker.parents().items() if p == victim), None):
            sim.at(at_s, lambda v=victim, c=child: sim.accuse(v, c))  # type: ignore[misc]
    for number in range(rng.randint(0, 3)):
        sim.at(START_S + rng.uniform(0.0, 8.0), lambda n=number: sim.join(f"late{n}"))  # type: ignore[misc]
    finish(sim)
    moves = len([a for _, a in sim.actions if isinstance(a, Assign)])
    blinks = 4 * 8 * num_workers
    assert sim.num_sent <= CHUNKS * (len(sim.nodes) - 1) + 1.1 * sim.num_damaged + 8 * moves + blinks


@pytest.mark.parametrize("share", [1e-4, 1e-2, 1e-1])
def test_damage_on_every_link_is_sent_again_once(share: float) -> None:
    sim = network(8)
    for node in sim.nodes.values():
        node.damage_share = share
    finish(sim)
    assert sim.num_sent <= 8 * CHUNKS + 1.1 * sim.num_damaged
    assert not [a for _, a in sim.actions if isinstance(a, Demote)]


def test_one_bad_link_is_throttled_and_then_left() -> None:
    sim = network(8)
    sim.nodes["w1"].damage_share = 0.3
    finish(sim)
    assert [a.parent_id for _, a in sim.actions if isinstance(a, Throttle)][:1] == ["w1"]
    assert "w1" not in sim.tracker.parents().values()
    assert sim.seconds() <= 1.25 * unfaulted_s(8, 300) + 3.0


def test_joining_in_mid_broadcast_disturbs_nobody() -> None:
    sim = network(4)
    sim.at(START_S + 4.0, lambda: sim.join("late"))
    finish(sim)
    assert sim.published[0].complete_s["late"] - START_S - 4.0 <= 1.05 * CHUNKS * CHUNK / (100 * MBIT) + 1.0
    others = [when for name, when in sim.published[0].complete_s.items() if name != "late"]
    assert max(others) - START_S <= 1.02 * unfaulted_s(4, 300)


def test_patches_follow_one_another_without_false_alarm() -> None:
    sim = network(8)
    for version in range(1, 12):
        key = PublicationKey("run", version, "fast", version - 1)
        sim.at(START_S + 1.5 * version, lambda key=key: sim.publish(key, 20))  # type: ignore[misc]
    while len(sim.published) < 12:
        sim.step()
    finish(sim)
    assert not moved_after(sim, START_S)
    assert not [a for _, a in sim.actions if isinstance(a, CancelBroadcast)]


def test_tails_never_starve_however_fast_versions_come() -> None:
    sim = network(6, 100)
    for version in range(1, 20):  # a full one every 3 s, each 8.4 s long
        key = PublicationKey("run", version, "full", -1)
        sim.at(START_S + 3.0 * version, lambda key=key: sim.publish(key, CHUNKS))  # type: ignore[misc]
    had: dict[str, list[float]] = {f"w{number}": [] for number in range(6)}
    while sim.now_s < 60.0:
        sim.step()
    for one in sim.published:
        for name, when_s in one.complete_s.items():
            if name != SENDER_ID:
                had[name].append(when_s)
    for name, times in had.items():
        gaps = [b - a for a, b in zip([START_S, *sorted(times)], [*sorted(times), 60.0], strict=True)]
        assert max(gaps) <= 2.1 * CHUNKS * CHUNK / (100 * MBIT), f"{name} went without for too long: {gaps}"


def test_runs_repeat_exactly() -> None:
    def run() -> tuple[float, list[tuple[float, object]], int]:
        sim = network(8, seed=5)
        sim.nodes["w2"].damage_share = 0.05
        sim.at(START_S + 3.0, lambda: sim.cut_off("w1"))
        finish(sim)
        return sim.seconds(), [*sim.actions], sim.num_sent

    assert run() == run()
