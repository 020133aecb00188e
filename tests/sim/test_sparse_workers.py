"""Sparse rollouts in the whole loop, in virtual time: what every worker has when it begins to sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from echo_planes.config.kv_schedule import Schedule
from echo_planes.errors import WeightsError
from echo_planes.testing import simulation as simulations
from echo_planes.testing.fakes import FakeEngine, FakeLearner
from echo_planes.testing.simulation import Faults, Simulation, Trace, replace_section, tiny_config
from echo_planes.types import Sample
from echo_planes.weights.sparse_adapter import Distilled, SparseAdapter


class Engine(FakeEngine):
    """An engine that samples sparsely, and notes the schedule and the adapter of each prompt, by version."""

    refuses: tuple[str, int, int] | None = None  # worker, epoch, and version of the adapter

    def __init__(self, worker_id: str, epoch: int, *others: Any) -> None:
        super().__init__(worker_id, epoch, *others)
        self.name = (worker_id, epoch)
        self.budgets: int | None = None
        self.adapter: int | None = None
        self.had: list[tuple[int | None, int | None]] = []

    async def set_schedule(self, schedule: Schedule) -> None:
        self.budgets = schedule.number

    async def set_adapter(self, adapter: SparseAdapter) -> None:
        if (*self.name, adapter.version) == self.refuses:
            raise WeightsError("a sparse adapter of none of the model's layers")
        self.adapter = adapter.version

    def take_audits(self) -> list[Any]:
        return []

    async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> list[Sample]:
        self.had.append((self.budgets, self.adapter))
        return await super().generate(prompt_ids, **asked)


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refuses: tuple[str, int, int] | None = None
) -> tuple[dict[tuple[str, int], Engine], Trace]:
    """A run whose worker w1 dies after 8 s: its engines by worker and epoch."""
    engines: dict[tuple[str, int], Engine] = {}

    def made(worker_id: str, epoch: int, *others: Any) -> Engine:
        engines[worker_id, epoch] = Engine(worker_id, epoch, *others)
        engines[worker_id, epoch].refuses = refuses
        return engines[worker_id, epoch]

    async def distil(_: FakeLearner, schedule: Schedule, version: int) -> Distilled:
        await asyncio.sleep(0.1)
        return Distilled(SparseAdapter(version, b""), 0.1, 100, 0.1)

    monkeypatch.setattr(simulations, "FakeEngine", made)
    monkeypatch.setattr(FakeLearner, "distil", distil)
    config = replace_section(tiny_config(), sparse={"schedule": [8], "distill_rank": 2})
    outcome, trace = Simulation(config, folder, faults=Faults(die_at_s={("w1", 0): 8.0})).run()
    assert (outcome.status, len(trace.batches)) == ("done", 20)
    return engines, trace


def test_every_worker_has_budgets_and_adapter_from_its_first_prompt_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter comes as it is made; a worker that starts later begins with the newest."""
    engines, trace = run(tmp_path, monkeypatch)
    assert engines.keys() == {("w0", 0), ("w1", 0), ("w1", 1)}
    assert {budgets for engine in engines.values() for budgets, _ in engine.had} == {0}
    adapters = {name: [adapter for _, adapter in engine.had] for name, engine in engines.items()}
    assert (
        sorted(set(adapters["w0", 0])) == trace.versions[:-1]
    )  # the last one is made of the finished policy
    before, after = adapters["w1", 0][-1], adapters["w1", 1]
    assert before is not None
    assert after[0] in trace.versions[trace.versions.index(before) :]
    assert sorted(set(after)) == trace.versions[trace.versions.index(after[0]) : -1]


@pytest.mark.parametrize("version", [0, 4])
def test_a_worker_that_cannot_have_the_adapter_is_lost_and_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """At its start, or while it samples: else it would go on without it, or with an old one."""
    engines, trace = run(tmp_path, monkeypatch, refuses=("w0", 0, version))
    (line,) = [line for line in trace.lines if line.startswith("worker lost w0 ")]
    assert "a sparse adapter of none of the model's layers" in line
    assert {adapter for _, adapter in engines["w0", 0].had} == set(trace.versions[: version // 2])
    assert engines["w0", 1].had[0][1] is not None
