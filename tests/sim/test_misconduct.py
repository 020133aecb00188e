"""A worker that sends what no worker sends is replaced like any that misbehaves, and the run says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.rollout.episodes import Player
from echo_planes.rollout.worker import RolloutWorker
from echo_planes.testing.simulation import Simulation, replace_section, tiny_config
from echo_planes.types import Draw, Group, Reward, Trajectory, WorkerStats

EVIL = ("w1", 0)  # the first incarnation of w1


def simulation(folder: Path, **more: Any) -> Simulation:
    config = tiny_config(steps=12)
    changed = {
        "fleet": replace_section(config.fleet, restarts=1),
        "eval": replace_section(config.eval, every=2),  # so often that each worker takes part
    }
    return Simulation(replace_section(config, **changed), folder, **more)


def spoil(monkeypatch: pytest.MonkeyPatch, *workers: tuple[str, int], kind: str = "group") -> None:
    """Make malformed what these incarnations say of groups, held-out answers or themselves."""
    play, evaluate, stats = Player.group, RolloutWorker.evaluate, RolloutWorker.stats
    player_of: dict[int, tuple[str, int]] = {}
    make = RolloutWorker.__init__

    def made(self: RolloutWorker, worker_id: str, epoch: int, *others: Any, **parts: Any) -> None:
        make(self, worker_id, epoch, *others, **parts)
        player_of[id(self._player)] = (worker_id, epoch)

    async def group(self: Player, *arguments: Any, **more: Any) -> Group:
        answer = await play(self, *arguments, **more)
        if kind == "group" and player_of[id(self)] in workers and not answer.group_id.startswith("eval"):
            return replace(answer, trajectories=tuple(map(nan, answer.trajectories)))
        return answer

    async def answers(
        self: RolloutWorker, indices: Sequence[int], samples: int, draw: Draw | None
    ) -> list[Trajectory]:
        found = await evaluate(self, indices, samples, draw)
        return list(map(nan, found)) if kind == "eval" and (self._id, self._epoch) in workers else found

    async def counters(self: RolloutWorker) -> WorkerStats:
        found = await stats(self)
        return (
            replace(found, busy_s=-1.0) if kind == "stats" and (self._id, self._epoch) in workers else found
        )

    monkeypatch.setattr(RolloutWorker, "__init__", made)
    monkeypatch.setattr(Player, "group", group)
    monkeypatch.setattr(RolloutWorker, "evaluate", answers)
    monkeypatch.setattr(RolloutWorker, "stats", counters)


def nan(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, reward=Reward(math.nan, False))


@pytest.mark.parametrize("kind", ["group", "eval", "stats"])
def test_who_sends_malformed_things_is_replaced_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    spoil(monkeypatch, EVIL, kind=kind)
    outcome, trace = simulation(tmp_path).run()
    assert outcome.status == "done", outcome.error
    assert len(trace.batches) == 12
    lost = [line for line in trace.lines if line.startswith("worker lost w1")]
    assert any("bad_number" in line or "fenced" in line for line in lost), trace.lines
    assert "worker w1.1 alive=True" in trace.lines
    assert not any(line.startswith("worker lost w0") for line in trace.lines)
    assert all(math.isfinite(report.reward_mean) for report in trace.evals)
    rows = StoreSnapshot(tmp_path / REPLAY_FOLDER).table().to_pylist()
    assert all(math.isfinite(row["reward"]) for row in rows)
    if kind == "group":
        assert outcome.counts.malformed >= 4
        told = [line for line in trace.lines if line.startswith("malformed w1")]
        assert told
        assert "bad_number" in told[-1]


def test_a_run_whose_workers_all_do_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody = [(worker, epoch) for worker in ("w0", "w1") for epoch in range(9)]
    spoil(monkeypatch, *everybody)
    outcome, trace = simulation(tmp_path).run()
    assert outcome.status == "failed"
    assert outcome.error.startswith("no worker is left")
    assert "too many in a row" in outcome.error
    assert "bad_number" in outcome.error
    assert trace.batches == []
    assert outcome.counts.accepted == 0
    assert len(StoreSnapshot(tmp_path / REPLAY_FOLDER).table()) == 0
