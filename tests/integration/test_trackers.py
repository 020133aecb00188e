"""Trackers of other projects: the program of each reads back what a run told it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_planes.errors import ConfigError
from echo_planes.loop import trackers
from echo_planes.loop.loading import load_config
from echo_planes.loop.tracking import open_tracking
from echo_planes.reporting.metrics import EVENTS_FILE, METRICS_FILE

pytestmark = pytest.mark.integration

LOG_BLOCK, FULL, LAST = 32768, 1, 4  # of LevelDB's log format
STEPS: list[dict[str, Any]] = [
    {"step": step, "reward_mean": 0.5 + step / 10, "eval_pass_at": {"1": 0.25 * step}, "codec": "compact"}
    for step in (1, 2, 3)
]
AGAIN = {"step": 2, "reward_mean": 0.9, "kl_reference": None, "loss": float("nan")}  # after a rollback


RESUMED = [{"step": step, "reward_mean": 0.95} for step in (2, 3, 4)]  # from a checkpoint at step 1
KNOWN = [(1, 0.6), (2, 0.7), (3, 0.8), (2, 0.9)]
GONE_ON = [(2, 0.95), (3, 0.95), (4, 0.95)]


def told(name: str, folder: Path, *, resumed: bool = False) -> None:
    """Tell a tracker the steps, as a run would, or one that goes on in its folder."""
    pytest.importorskip(name, reason=f"{name} is missing: pip install 'echo_planes[{name}]'")
    config = load_config([f"run.tracker={name}"])
    if resumed:
        config = config.model_copy(update={"run": config.run.model_copy(update={"resume": str(folder)})})
    tracking = open_tracking(config, folder)
    assert tracking is not None
    for record in RESUMED if resumed else (*STEPS, AGAIN):
        tracking.offer(METRICS_FILE, record)
    tracking.offer(EVENTS_FILE, {"time_s": 1.0, "kind": "guard", "text": "rollback"})
    assert tracking.close(limit_s=60.0) == []


def test_tensorboard_reads_its_event_file(tmp_path: Path) -> None:
    told("tensorboard", tmp_path)
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    reader = module.EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=False)
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == {"reward_mean", "eval_pass_at/1"}
    rewards = [(one.step, round(one.value, 6)) for one in reader.Scalars("reward_mean")]
    assert rewards == KNOWN


def test_tensorboard_shows_no_step_twice_after_a_rollback_and_a_resume(tmp_path: Path) -> None:
    told("tensorboard", tmp_path)
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")

    def rewards() -> list[tuple[int, float]]:
        reader = module.EventAccumulator(str(tmp_path / "tensorboard"))
        reader.Reload()
        return [(one.step, round(one.value, 6)) for one in reader.Scalars("reward_mean")]

    assert rewards() == [(1, 0.6), (2, 0.9)]
    told("tensorboard", tmp_path, resumed=True)
    assert rewards() == [(1, 0.6), *GONE_ON]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: a log of LevelDB after a header of 7 bytes.

    wandb's own reader is a program that sends them to a server.
    """
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := LOG_BLOCK - at % LOG_BLOCK) < 7:  # a block's end too short for a header
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    told("wandb", tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert wandb_rewards(file) == KNOWN
    told("wandb", tmp_path, resumed=True)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [one.name for one in files] == [file.name] * 2  # of one run's id
    assert wandb_rewards(files[1]) == GONE_ON


def wandb_rewards(file: Path) -> list[tuple[int, float]]:
    """Steps and rewards in a .wandb file."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rewards = []
    for data in wandb_records(file.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        row = {one.key or "/".join(one.nested_key): one.value_json for one in record.history.item}
        if "reward_mean" in row:
            rewards.append((json.loads(row["step"]), json.loads(row["reward_mean"])))
    return rewards


def test_trackio_has_the_run_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "run"
    folder.mkdir()
    told("trackio", folder)
    told("trackio", folder, resumed=True)
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    assert len(storage.get_run_records(trackers.PROJECT)) == 1
    rows = storage.get_logs(trackers.PROJECT, "run")
    assert [(one["step"], one["reward_mean"]) for one in rows] == [*KNOWN, *GONE_ON]


def test_numbers_alone_go_on() -> None:
    assert trackers.scalars(AGAIN) == {"step": 2, "reward_mean": 0.9}
    assert trackers.scalars({"table": {"a": 1, "b": {"c": 2}}, "on": True}) == {"table/a": 1, "table/b/c": 2}


def test_a_package_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run\.tracker=wandb: .* pip install 'echo_planes\[wandb\]'"):
        trackers.check_installed("wandb")
    trackers.check_installed("none")
    trackers.check_installed("my.module:make")
