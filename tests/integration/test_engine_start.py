"""An engine that cannot start: the run ends at once, says why, and keeps what the engine's process wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import SMALL, events, program

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_an_engine_that_refuses_its_settings_is_not_tried_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    refused = (
        "fleet.workers.0.engine.extra={num_gpu_blocks_override: 1}"  # no check before the engine's knows it
    )
    words = (*SMALL, "run.steps=2", "fleet=single", refused)
    with program(tmp_path / "work", run_dir, *words) as running:
        assert running.wait() == 1, running.tail()
        *_, line = running.stderr.splitlines()
    cause = "ValueError: No available memory for the cache blocks"
    assert line.startswith(
        "error: no worker is left; the last one, w0: the vLLM engine did not start: " + cause
    )
    (lost,) = events(run_dir, "worker lost")
    assert cause in lost["text"]
    kept = run_dir / "failures" / "engine-w0-0.txt"
    assert str(kept) in line
    assert "EngineCore failed to start" in kept.read_text()
    logs = [path.read_text() for path in run_dir.glob("ray_logs/session_*/worker-*")]
    assert any("EngineCore failed to start" in text for text in logs)
