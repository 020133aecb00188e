"""Engines that cannot start, in virtual time: none is tried in vain, and none ends what others can serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_planes.errors import ConfigError, EchoPlanesError, EngineStartError
from echo_planes.loop.runner import Outcome
from echo_planes.testing import simulation as simulations
from echo_planes.testing.fakes import FakeEngine
from echo_planes.testing.simulation import Simulation, Trace, tiny_config

REFUSAL = EngineStartError("the engine did not start: ValueError: page size", is_final=True)
PASSING = EngineStartError("the engine did not start: killed")


def run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    errors: dict[tuple[str, int], EchoPlanesError],
    steps: int = 5,
    **settings: Any,
) -> tuple[Outcome, Trace]:
    """A run whose incarnations (worker, epoch) fail at their start, by these errors."""

    class Engine(FakeEngine):
        def __init__(self, worker_id: str, epoch: int, *others: Any) -> None:
            super().__init__(worker_id, epoch, *others)
            self._error = errors.get((worker_id, epoch))

        async def start(self) -> None:
            await super().start()
            if self._error is not None:
                raise self._error

    monkeypatch.setattr(simulations, "FakeEngine", Engine)
    return Simulation(tiny_config(steps=steps), folder, **settings).run()


def starts(trace: Trace, worker_id: str) -> list[str]:
    return [line for line in trace.lines if line.startswith(f"worker {worker_id}.") and "True" in line]


def test_a_refusal_ends_that_worker_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, trace = run(tmp_path, monkeypatch, {("w0", 0): REFUSAL})
    assert (outcome.status, len(trace.batches)) == ("done", 5)
    assert starts(trace, "w0") == ["worker w0.0 alive=True"]
    (told,) = [line for line in trace.lines if line.startswith("worker lost")]
    assert told == f"worker lost w0 None {REFUSAL}; w0 is not started again: it would fail alike"


def test_the_run_ends_at_once_with_the_reason_if_no_other_worker_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, trace = run(tmp_path, monkeypatch, {("w0", 0): REFUSAL}, seconds_per_token=(0.05,))
    assert (outcome.status, trace.batches) == ("failed", [])
    assert outcome.error == f"no worker is left; the last one, w0: {REFUSAL}"
    assert len(starts(trace, "w0")) == 1


def test_a_passing_failure_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: dict[tuple[str, int], EchoPlanesError] = {("w0", 0): PASSING, ("w0", 1): PASSING}
    outcome, trace = run(tmp_path, monkeypatch, errors, seconds_per_token=(0.05,))
    assert outcome.status == "done"
    assert len(starts(trace, "w0")) == 3


def test_a_refusal_of_an_engine_that_has_started_before_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause may pass: another process holds the memory, say."""

    faults = simulations.Faults(die_at_s={("w0", 0): 3.0})
    errors: dict[tuple[str, int], EchoPlanesError] = {("w0", 1): REFUSAL}
    outcome, trace = run(tmp_path, monkeypatch, errors, seconds_per_token=(0.05,), faults=faults)
    assert outcome.status == "done"
    assert len(starts(trace, "w0")) == 3


def test_a_mistake_in_the_settings_of_one_worker_ends_the_run_only_if_none_can_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = ConfigError("engine.extra={...}: vLLM refuses it")
    errors: dict[tuple[str, int], EchoPlanesError] = {("w1", 0): mistake}
    outcome, _ = run(tmp_path / "one", monkeypatch, errors)
    assert outcome.status == "done"
    with pytest.raises(ConfigError, match="vLLM refuses it"):  # of exit status 2
        run(tmp_path / "all", monkeypatch, {("w0", 0): mistake}, seconds_per_token=(0.05,))
    dies = simulations.Faults(die_at_s={("w0", epoch): 20.0 for epoch in range(5)})
    outcome, _ = run(tmp_path / "later", monkeypatch, errors, faults=dies, steps=1000)
    assert (outcome.status, "w0 was killed" in outcome.error) == ("failed", True)
