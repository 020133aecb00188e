"""The parts of the simulator, each alone: clock, engine, lengths, spot markets, network, scenario."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import ConfigError, DataError, RunError
from echo_planes.sim.engine_model import Engine, EngineSpec
from echo_planes.sim.kernel import Kernel
from echo_planes.sim.lengths import LengthModel
from echo_planes.sim.network import Links, Network, t_bcast_s
from echo_planes.sim.scenario import dump_scenario, load_scenario, parse_scenario, scenario_names
from echo_planes.sim.spot import SpotTrace, read_trace
from echo_planes.weights.chain.plan import ideal_broadcast_s
from echo_planes.weights.chain.simulated import MBIT, BroadcastSim, SimSettings
from echo_planes.weights.wire.manifest import PublicationKey

DATA = Path(os.environ.get("ECHO_PLANES_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
TRACES = DATA / "spot_traces" / "bamboo"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no recorded spot traces in {TRACES}")

# --- clock ---------------------------------------------------------------------------------------


def test_events_happen_by_time_then_by_order() -> None:
    kernel, seen = Kernel(), []
    kernel.at(2.0, lambda: seen.append("c"))
    kernel.at(1.0, lambda: seen.append("a"))
    kernel.at(1.0, lambda: kernel.after(0.0, lambda: seen.append("b2")))
    kernel.at(1.0, lambda: seen.append("b"))
    cancelled = kernel.at(1.5, lambda: seen.append("never"))
    cancelled.cancel()
    kernel.at(9.0, lambda: seen.append("later"))
    kernel.run(until_s=5.0)
    assert seen == ["a", "b", "b2", "c"]
    assert kernel.now_s == 5.0
    assert kernel.num_events == 5
    with pytest.raises(RunError, match="events lie ahead"):
        kernel.at(4.0, lambda: None)
    with pytest.raises(RunError):
        kernel.at(math.nan, lambda: None)


# --- engine --------------------------------------------------------------------------------------


def drain(engine: Engine, limit_s: float = math.inf) -> list[tuple[float, str]]:
    """Let groups end, one after another: (when, which)."""
    ends = []
    while (when_s := engine.next_end_s()) <= limit_s and when_s < math.inf:
        engine.advance(when_s)
        ends += [(when_s, key) for key in engine.take_ended()]
    return ends


def test_one_sample_takes_what_the_formula_says() -> None:
    engine = Engine(EngineSpec(1000.0, 9.0), 4, now_s=5.0)
    engine.add("a", [500])
    assert engine.next_end_s() == pytest.approx(5.0 + 500 * (1 + 9) / 1000)


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.lists(st.integers(1, 400), min_size=2, max_size=4), min_size=1, max_size=5),
    half=st.floats(0, 20),
    starts=st.lists(st.floats(0, 3), min_size=5, max_size=5),
)
def test_engine_agrees_with_small_steps(lengths: list[list[int]], half: float, starts: list[float]) -> None:
    spec, starts = EngineSpec(500.0, half), sorted(starts[: len(lengths)])
    engine, ends = Engine(spec, len(lengths), 0.0), []
    for number, (sizes, start_s) in enumerate(zip(lengths, starts, strict=True)):
        ends += drain(engine, start_s)
        engine.advance(start_s)
        ends += [(start_s, key) for key in engine.take_ended()]
        engine.add(str(number), sizes)
    ends += drain(engine)
    assert engine.tokens == pytest.approx(sum(map(sum, lengths)))
    assert engine.num_groups == 0
    # The same in small steps.
    step_s, now_s = 1e-3, 0.0
    left = {str(n): [float(size) for size in sizes] for n, sizes in enumerate(lengths)}
    begin = {str(n): start_s for n, start_s in enumerate(starts)}
    expected: dict[str, float] = {}
    while left:
        running = [key for key in left if begin[key] <= now_s]
        batch = sum(size > 0 for key in running for size in left[key])
        now_s += step_s
        for key in running:
            left[key] = [size - spec.tokens_per_s(batch) / max(batch, 1) * step_s for size in left[key]]
            if all(size <= 0 for size in left[key]):
                expected[key] = now_s
                del left[key]
    for when_s, key in ends:
        assert when_s == pytest.approx(expected[key], abs=0.05, rel=0.02)


@given(cuts=st.lists(st.floats(0.0, 5.0), max_size=6), pause=st.booleans())
def test_looking_at_the_engine_changes_nothing(cuts: list[float], pause: bool) -> None:
    """However often it is advanced between two events, tokens and ends are the same."""
    plain, watched = (Engine(EngineSpec(300.0, 4.0), 3, 0.0) for _ in range(2))
    for engine in (plain, watched):
        engine.add("a", [100, 200])
        engine.add("b", [50, 400])
    for when_s in sorted(cuts):
        if when_s < watched.next_end_s():
            watched.advance(when_s)
            assert sum(watched.progress("a")) + sum(watched.progress("b")) == pytest.approx(
                watched.tokens, abs=4
            )
        if pause:
            watched.pause(True)
            assert watched.next_end_s() == math.inf
            watched.pause(False)
    for (when_s, key), (other_s, other) in zip(drain(plain), drain(watched), strict=True):
        assert (key, when_s) == (other, pytest.approx(other_s))


def test_a_group_goes_on_elsewhere_from_its_last_token() -> None:
    first, second = (Engine(EngineSpec(100.0, 0.0), 1, 0.0) for _ in range(2))
    first.add("a", [60, 200])
    first.advance(1.5)  # 50 tokens/s each
    assert first.saturated_tokens == pytest.approx(first.tokens)
    tokens = first.remove("a")
    assert tokens == (60, 90)
    assert first.room == 1
    second.add("a", [60, 200], have=tokens)
    assert drain(second) == [(pytest.approx(1.1), "a")]
    assert first.tokens + second.tokens == pytest.approx(260)


def test_a_slow_engine_takes_longer_from_then_on() -> None:
    engine = Engine(EngineSpec(100.0, 0.0), 1, 0.0)
    engine.add("a", [100])
    engine.advance(0.5)
    engine.set_speed(0.5)
    assert engine.next_end_s() == pytest.approx(1.5)


def test_a_worker_measures_itself_by_its_own_clock() -> None:
    engine = Engine(EngineSpec(100.0, 0.0), 1, 0.0)
    engine.add("a", [1000])
    engine.clock_rate = 0.5
    engine.advance(4.0)
    assert engine.saturated_s == 2.0
    assert engine.saturated_tokens == pytest.approx(400.0)


# --- lengths -------------------------------------------------------------------------------------


def lengths(seed: int = 0, **changes: float) -> LengthModel:
    settings = {"median_tokens": 1000.0, "sigma": 0.8, "max_tokens": 4000, **changes}
    return LengthModel(seed, num_samples=4, **settings)  # type: ignore[arg-type]


def test_lengths_are_a_function_of_seed_prompt_and_sample() -> None:
    forwards, backwards = lengths(), lengths()
    wanted = [100_000, 5, 0, 70_000, 5]
    seen = {index: list(forwards.tokens(index)) for index in wanted}
    assert {index: list(backwards.tokens(index)) for index in reversed(wanted)} == seen
    assert list(lengths(seed=1).tokens(5)) != seen[5]
    assert len({tuple(forwards.tokens(index)) for index in range(200)}) == 200


def test_lengths_have_the_distribution_they_are_named_after() -> None:
    model = lengths()
    drawn = [size for index in range(20_000) for size in model.tokens(index)]
    assert sum(drawn) / len(drawn) == pytest.approx(model.mean_tokens, rel=0.01)
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(1000, rel=0.02)
    assert max(drawn) == 4000
    assert min(drawn) >= 1
    logs = [math.log(size) for size in drawn if size < 4000]
    assert sum(log < math.log(1000) - 0.8 for log in logs) / len(drawn) == pytest.approx(0.1587, abs=0.01)
    assert set(lengths(sigma=0.0).tokens(3)) == {1000}


# --- spot markets --------------------------------------------------------------------------------


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_three_formats_of_traces(tmp_path: Path) -> None:
    machines = read_trace(written(tmp_path, "0,add,a\n5000,add,b\n60000,remove,a\n"))
    assert (machines.times_s, machines.counts, machines.end_s) == ((0.0, 5.0, 60.0), (1, 2, 1), 60.0)
    corners = read_trace(written(tmp_path, "0,0\n10,0\n10,4\n12,4\n12,3\n20,3\n"))
    assert (corners.times_s, corners.counts, corners.end_s) == ((0.0, 10.0, 12.0), (0, 4, 3), 20.0)
    text = "2021-12-10, 23:59:45, 80\n2021-12-11, 00:01:45, 75\n2021-12-11, 00:00:45, 70\n"
    foreseen = read_trace(written(tmp_path, text))
    assert (foreseen.times_s, foreseen.counts) == ((0.0, 60.0), (80, 70))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no rows"),
        ("a,b\n", "no known format"),
        ("0,add,a\n1000,add,a\n", "line 2.*cannot be"),
        ("0,add,a\n1000,remove,b\n", "line 2.*cannot be"),
        ("9,add,a\n1,add,b\n", "back in time"),
        ("0,1\n10,x\n", "no number of machines"),
        ("0,1\n10\n", "1 columns"),
        ("0,1\nnan,2\n", "no time"),
        ("0,1\n", "one moment"),
        ("2021-12-10, 25:00:00, 80\n", "no moment"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        read_trace(written(tmp_path, text))


def test_a_trace_that_ends_is_a_stated_policy() -> None:
    steps = {"name": "t", "times_s": (0.0, 10.0, 30.0), "counts": (2, 0, 5), "end_s": 40.0}
    repeat, hold, error = (SpotTrace(**steps, at_end=at_end) for at_end in ("repeat", "hold", "error"))
    assert [repeat.count(s) for s in (0, 10, 39, 40, 51, 111)] == [2, 0, 5, 2, 0, 5]
    assert [repeat.next_change_s(s) for s in (0, 30, 40, 95)] == [10, 40, 50, 110]
    assert hold.count(1e6) == 5
    assert hold.next_change_s(30.0) == math.inf
    assert error.next_change_s(30.0) == 40.0
    with pytest.raises(DataError, match="ends after 40 s"):
        error.count(40.0)


@given(st.integers(1, 5), st.floats(0.1, 7.3), st.integers(0, 400))
def test_a_repeated_trace_has_all_its_changes(steps: int, width_s: float, periods: int) -> None:
    """Walking from change to change, as the simulator does, no count is missed and no moment is met twice."""
    times = tuple(i * width_s / steps for i in range(steps))
    trace = SpotTrace("t", times, tuple(range(steps)), width_s, "repeat")
    now_s, seen = periods * width_s, []
    for _ in range(4 * steps):
        later = trace.next_change_s(now_s)
        assert later > now_s
        now_s = later
        if not seen or trace.count(now_s) != seen[-1]:
            seen.append(trace.count(now_s))
    for before, after in itertools.pairwise(seen):
        assert after == (before + 1) % steps


@needs_traces
@pytest.mark.parametrize(
    ("name", "end_s", "most", "last"),
    [
        ("g4dn-trace.csv", 38_760.0, None, 5),
        ("p3-trace.csv", 40_920.0, None, 10),
        ("aws-spot-instances-g4dn-xlarge-us-east-1c-2020-11-20-1930-to-2020-11-21-2200.csv", 88_194.0, 12, 7),
        ("v100x1-east1c.txt", None, 80, None),
    ],
)
def test_recorded_traces(name: str, end_s: float | None, most: int | None, last: int | None) -> None:
    trace = read_trace(TRACES / name, "hold")
    assert list(trace.times_s) == sorted(set(trace.times_s))
    assert end_s is None or trace.end_s == end_s
    assert most is None or max(trace.counts) == most
    assert last is None or trace.count(trace.end_s) == last
    assert min(trace.counts) >= 0


# --- network -------------------------------------------------------------------------------------

CHUNK = 4 * 2**20
PAYLOAD = 100 * CHUNK


def network(mode: str = "chain", uplink_mbit: float = 300.0) -> Network:
    return Network(Links(mode, uplink_mbit * MBIT, 100 * MBIT, 0.08, CHUNK, 5.0))  # type: ignore[arg-type]


def arrivals(net: Network, count: int, now_s: float = 0.0, version: int = 0) -> dict[str, float]:
    names = [f"w{i}" for i in range(count)]
    for name in names:
        net.join(name, "")
    return net.publish(version, PAYLOAD, names, now_s)


@pytest.mark.parametrize("num_workers", [1, 3, 7, 16])
@pytest.mark.parametrize("mode", ["chain", "star", "star_unlimited"])
def test_broadcasts_agree_with_links_simulated_chunk_by_chunk(mode: str, num_workers: int) -> None:
    uplink = 1e6 if mode == "star_unlimited" else 300.0
    settings = SimSettings(
        uplink * MBIT, 100 * MBIT, 0.08, CHUNK, direct=mode != "chain", reports=False, seed=0
    )
    sim = BroadcastSim(settings)
    for i in range(num_workers):
        sim.join(f"w{i}")
    sim.publish(PublicationKey("net", 0, "full", -1), PAYLOAD // CHUNK)
    sim.run(limit_s=1e5)
    found = t_bcast_s(arrivals(network(mode), num_workers), 0.0, 1.0)
    assert found == pytest.approx(sim.seconds(), rel=0.04)


def test_the_last_of_a_chain_waits_as_long_as_the_formula_says() -> None:
    found = arrivals(network(uplink_mbit=100.0), 6)
    assert max(found.values()) == pytest.approx(ideal_broadcast_s(PAYLOAD, 6, CHUNK, 100 * MBIT, 0.08))


def test_a_dead_relay_holds_up_those_behind_it_only() -> None:
    net = network()
    before = arrivals(net, 9)
    first = min(before, key=lambda name: before[name])
    late = net.leave(first, 1.0)
    assert len(late) == 2  # three chains of three
    assert all(late[name] == pytest.approx(before[name] + 5.0 + 0.12) for name in late)
    assert net.leave("w8", 1e4) == {}  # nothing is on its way any more


def test_a_slow_link_slows_its_chain_and_is_seed_no_more() -> None:
    net = network()
    even = arrivals(net, 9)
    seed = min(even, key=lambda name: even[name])
    net.set_speed(seed, 0.25)
    slowed = net.publish(1, PAYLOAD, even, 1000.0)
    assert sum(slowed[name] - 1000 > 3 * even[name] for name in even) == 3
    again = net.publish(2, PAYLOAD, even, 5000.0)
    assert sum(again[name] - 5000 > 3 * even[name] for name in even) == 1  # the slow one, at a tail
    assert again[seed] == max(again.values())


def test_a_link_carries_one_publication_after_the_other() -> None:
    net = network(uplink_mbit=1e5)
    first = arrivals(net, 1)["w0"]
    second = net.publish(1, PAYLOAD, ["w0"], 1.0)["w0"]
    assert second == pytest.approx(first + PAYLOAD / (100 * MBIT))


def test_t_bcast_is_of_the_share_that_the_redundancy_leaves() -> None:
    times = {str(i): float(i) for i in range(1, 12)}
    assert t_bcast_s(times, 0.0, 1.1) == 10.0
    assert t_bcast_s(times, 0.0, 1.0) == 11.0


# --- scenario ------------------------------------------------------------------------------------


def test_scenarios_that_come_with_the_library_are_whole() -> None:
    assert len(scenario_names()) >= 3
    for name in scenario_names():
        scenario = load_scenario([f"scenario={name}", "seed=7"])
        assert scenario.seed == 7
        assert parse_scenario(yaml.safe_load(dump_scenario(scenario))) == scenario


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["scenario=nothing"], "unknown; allowed"),
        (["seed=1"], "no scenario is named"),
        (["seed"], "key=value"),
        (["scenario=steady", "learner.t_trian_s=1"], "learner.t_trian_s=1: unknown key"),
        (["scenario=steady", "learner.t_train_s=0"], "learner.t_train_s=0"),
        (["scenario=steady", "offers.0.max_count=1"], "is called instance_types now"),
        (["scenario=steady", "instance_types.0.max_count=1"], "max_count=1 is less than its count"),
        (["scenario=steady", "instance_types.0.count=0", "instance_types.0.max_count=0"], "no worker"),
        (["scenario=steady", "staleness.publish_every=9"], "publish_every=9"),
        (["scenario=steady", "faults=[{at_s: 1, kind: kill, worker: x-1}]"], "x-1 is no worker"),
        (["scenario=steady", "faults=[{at_s: 1, kind: sneeze}]"], "sneeze"),
    ],
)
def test_a_mistake_is_named(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_scenario(words)
