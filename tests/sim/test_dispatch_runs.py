"""Dispatch policies in whole runs: with modelled workers, and with real ones whose every token is logged."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from echo_planes.data.replay.dispatch import Proportional
from echo_planes.data.replay.dispatcher import Dispatcher
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.sim.scenario import parse_scenario
from echo_planes.sim.world import World
from echo_planes.testing.simulation import Faults, Simulation, replace_section, tiny_config
from tests.sim.test_migration import Sampled, check_answers, long_engine
from tests.sim.test_simulator import check


def scenario(
    router: str, instance_types: list[dict[str, Any]], *, hours: float = 0.3, groups: int = 48
) -> World:
    """Strictly synchronous: the rollouts of a step are all that its time depends on."""
    same = {"half_batch": 4.0, "max_groups": 4, "boot_s": 30.0, "usd_per_hour": 1.0}
    tree = {
        "run": {"hours": hours},
        "sampling": {"prompts_per_step": groups, "samples_per_prompt": 4, "router": router},
        "lengths": {"median_tokens": 1500.0, "sigma": 0.3, "max_tokens": 6000},
        "staleness": {"max_staleness": 0, "queue_batches": 1.0},
        "learner": {"t_train_s": 10.0},
        "network": {"snapshot_mb": 100.0, "patch_mb": 20.0},
        "instance_types": [same | instance_type for instance_type in instance_types],
    }
    return World(parse_scenario(tree))


FAST = {"name": "fast", "count": 4, "peak_tokens_per_s": 2000.0}
SLOW = {"name": "slow", "count": 4, "peak_tokens_per_s": 500.0}


def steps(router: str) -> int:
    world = scenario(router, [FAST, SLOW])
    check(world, world.run())
    return world.data.step


def test_a_split_by_speed_beats_an_even_one(monkeypatch: pytest.MonkeyPatch) -> None:
    by_speed = steps("proportional")
    monkeypatch.setattr(Proportional, "settle", lambda *_: None)
    assert by_speed > 1.5 * steps("proportional")


@pytest.mark.parametrize("router", ["jsq", "proportional"])
def test_equal_scenarios_give_equal_bytes(router: str) -> None:
    first, second = (scenario(router, [FAST, SLOW], hours=0.1).run().lines() for _ in range(2))
    assert first == second


class Moves:
    """Counts of moves: of each prompt, and to each worker that was to go on with one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: Counter[int] = Counter()
        self.targets: Counter[str] = Counter()
        handed_over = Dispatcher.handed_over

        def watched(dispatcher: Dispatcher, *others: Any) -> None:
            before = dispatcher.kept
            handed_over(dispatcher, *others)
            for index, target in dispatcher.kept.items():
                if index not in before:
                    self.times[index] += 1
                    self.targets[target] += 1

        monkeypatch.setattr(Dispatcher, "handed_over", watched)


def test_a_newcomer_is_sent_what_waits_elsewhere_and_nothing_bounces(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves(monkeypatch)
    late = {"name": "late", "count": 1, "peak_tokens_per_s": 2000.0, "boot_s": 75.0}
    world = scenario("jsq", [{**SLOW, "count": 2}, late], hours=0.5, groups=12)
    check(world, world.run())
    assert moves.targets["w2"] > 0
    assert max(moves.times.values()) == 1
    assert world.data.counts.discarded_tokens == 0


def test_an_idle_newcomer_gets_what_others_execute_beyond_their_plateau(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves = Moves(monkeypatch)
    flat = {"half_batch": 0.5, "max_groups": 8}  # two groups are as good as eight
    slow, late = {**SLOW, **flat, "count": 2}, {**FAST, **flat, "name": "late", "count": 1, "boot_s": 70.0}
    world = scenario("jsq", [slow, late], hours=0.5, groups=16)
    check(world, world.run())
    assert moves.targets["w2"] > 0
    counts = world.data.counts
    assert counts.continued_tokens > 0
    assert counts.discarded_tokens == 0
    assert max(moves.times.values()) == 1


def test_real_workers_move_what_waits_to_the_faster_and_every_token_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(monkeypatch)
    log: list[Sampled] = []
    monkeypatch.setattr("echo_planes.testing.simulation.FakeEngine", long_engine(log))
    config = tiny_config(steps=12, max_staleness=2)
    sampling = {"stream_s": 0.25, "max_new_tokens": 100, "router": "jsq", "prompts_per_step": 12}
    simulation = Simulation(
        replace_section(config, sampling={**config.sampling.model_dump(), **sampling}),
        tmp_path,
        seconds_per_token=(0.02, 0.2, 0.02),
        max_groups=3,
        faults=Faults(die_at_s={("w2", 0): 6.0}),
    )
    outcome, trace = simulation.run()
    rows = StoreSnapshot(tmp_path / REPLAY_FOLDER).table().to_pylist()
    assert (outcome.status, outcome.counts.lost, len(trace.batches)) == ("done", 0, 12)
    assert len(rows) == outcome.counts.accepted
    assert set(Counter(row["prompt_index"] for row in rows).values()) == {2}, "accepted twice"
    check_answers(rows, log)
    assert outcome.counts.discarded_tokens == 0
    assert moves.targets["w0"] > 5
    assert moves.targets["w0"] > 2 * moves.targets["w1"]


@pytest.mark.parametrize("router", ["jsq", "proportional"])
@pytest.mark.parametrize("max_staleness", [0, 3])
def test_a_run_goes_on_through_deaths_and_lost_installs(
    tmp_path: Path, router: str, max_staleness: int
) -> None:
    config = tiny_config(steps=15, max_staleness=max_staleness)
    sampling = replace_section(config.sampling, router=router, stream_s=0.25)
    faults = Faults(
        die_at_s={("w0", 0): 4.0, ("w1", 0): 9.0, ("w0", 1): 12.0},
        lose_installs={("w1", 2), ("w2", 3), ("w2", 4)},
        refuse_installs={("w0", 2), ("w1", 4)},
    )
    simulation = Simulation(
        replace_section(config, sampling=sampling.model_dump()),
        tmp_path,
        seconds_per_token=(0.05, 0.1, 0.2),
        faults=faults,
    )
    outcome, trace = simulation.run()
    assert (outcome.status, outcome.counts.lost, len(trace.batches)) == ("done", 0, 15)
    for batch in trace.batches:
        assert (batch.step - batch.versions).max() <= max_staleness
