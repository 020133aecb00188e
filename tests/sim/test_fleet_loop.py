"""The whole loop with a fleet that follows price and need: real fleet, keeper, runner and data plane."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_planes.config import Config, FleetConfig, WorkerConfig
from echo_planes.testing import Faults, Simulation, Trace, tiny_config
from tests.sim.test_loop import check


def fleet_config(steps: int = 40, **fleet: object) -> Config:
    kinds = [
        WorkerConfig(sku="cheap", market="spot", usd_per_hour=0.2, count=1, max_count=3),
        WorkerConfig(sku="dear", usd_per_hour=1.0, count=1, max_count=3),
    ]
    config = tiny_config(steps=steps)
    settings = FleetConfig(workers=kinds, scale="static", tick_s=1.0, sustain_s=5.0, **fleet)  # type: ignore[arg-type]
    return config.model_copy(update={"fleet": settings})


def started(trace: Trace) -> list[str]:
    return [line.split()[1] for line in trace.lines if line.startswith("worker ") and line.endswith("alive=True")]


@pytest.mark.parametrize("seed", range(5))
def test_lost_workers_are_replaced_and_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    config = fleet_config()
    faults = Faults(die_at_s={("w0", 0): 12.0, ("w1", 0): 20.0})
    outcome, trace = Simulation(config, tmp_path, faults=faults, seed=seed).run()
    check(config, outcome, trace)
    assert outcome.status == "done", outcome.error
    assert len(started(trace)) > 2
