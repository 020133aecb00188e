"""A checkpoint is whole or not there, the newest are kept, and the data plane continues from it exactly."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_planes.checkpoint import (
    CheckpointMeta,
    newest_checkpoint,
    open_lineage,
    rewind_metrics,
    save_checkpoint,
)
from echo_planes.clock import ManualClock
from echo_planes.data.schema import read_groups
from echo_planes.data.service import DataService
from echo_planes.data.task import TaskOptions
from echo_planes.errors import ClusterError, ConfigError, DataError
from echo_planes.fakes import FakeTask, FakeTokenizer
from echo_planes.metrics import MetricsWriter, read_metrics
from echo_planes.testing import tiny_config
from echo_planes.types import Group, Lease, TrainBatch
from tests.unit.test_buffer import answer


class Part:
    """Writes one file; may fail, or look around while the checkpoint is half written."""

    def __init__(self, text: str = "x", error: OSError | None = None) -> None:
        self.text = text
        self.error = error
        self.saw: list[str] = []

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "part").write_text(self.text)
        self.saw = sorted(path.name for path in folder.parents[1].glob("step-*"))
        if self.error:
            raise self.error


def save(
    folder: Path, step: int, *, data: Part | None = None, learner: Part | None = None, keep: int = 2
) -> Path:
    meta = CheckpointMeta(step, lineage_number=3, next_epoch=7)
    return asyncio.run(
        save_checkpoint(folder / "checkpoints", meta, data or Part(), learner or Part(), keep=keep)
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    path = save(tmp_path, 50, data=Part("d"), learner=Part("l"))
    assert newest_checkpoint(tmp_path) == (path, CheckpointMeta(50, 3, 7))
    assert (path / "data" / "part").read_text() == "d"
    assert (path / "learner" / "part").read_text() == "l"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 95, 100, 1000):
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-000095", "step-000100", "step-001000"]
    assert newest_checkpoint(tmp_path)[1].step == 1000


def test_steps_beyond_a_million_are_newer(tmp_path: Path) -> None:
    save(tmp_path, 999_999)
    save(tmp_path, 1_000_000, keep=1)
    assert newest_checkpoint(tmp_path)[1].step == 1_000_000


def test_a_checkpoint_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 50)
    part = Part()
    save(tmp_path, 100, data=part, keep=1)
    assert part.saw == ["step-000050"]  # the old one is removed only when the new one is there
    assert names(tmp_path) == ["step-000100"]


@pytest.mark.parametrize("which", ["data", "learner"])
def test_one_that_breaks_off_leaves_the_older_ones_and_the_next_attempt_works(
    tmp_path: Path, which: str
) -> None:
    old = save(tmp_path, 50)
    broken: Any = {which: Part(error=OSError(28, "No space left on device"))}
    with pytest.raises(ClusterError) as caught:
        save(tmp_path, 100, keep=1, **broken)
    for part in ("step-000100", "No space left on device", "free some space"):
        assert part in str(caught.value)
    assert newest_checkpoint(tmp_path)[0] == old
    again = save(tmp_path, 100, data=Part("whole"))
    assert newest_checkpoint(tmp_path)[0] == again
    assert names(tmp_path) == ["step-000050", "step-000100"]


def test_the_same_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, 50, data=Part("old"))
    path = save(tmp_path, 50, data=Part("new"))
    assert names(tmp_path) == ["step-000050"]
    assert (path / "data" / "part").read_text() == "new"


def test_nothing_to_resume_from_is_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".partial-000050").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no checkpoint") as caught:
        newest_checkpoint(tmp_path)
    assert f"run.resume={tmp_path}" in str(caught.value)


def test_no_two_incarnations_share_a_lineage(tmp_path: Path) -> None:
    meta = CheckpointMeta(50, lineage_number=1, next_epoch=7)
    numbers = [open_lineage(tmp_path, meta).lineage_number for _ in range(3)]
    assert numbers == [1, 2, 3]
    later = CheckpointMeta(90, lineage_number=9, next_epoch=8)
    assert open_lineage(tmp_path, later) == later


def test_the_metrics_of_steps_that_are_done_again_are_forgotten(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(1, 8):
        writer.step({"step": step, "reward_mean": step / 10})
    assert rewind_metrics(tmp_path, 5) == 2
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert rewind_metrics(tmp_path, 5) == 0
    assert rewind_metrics(tmp_path / "never", 5) == 0


# --- the data plane's part -----------------------------------------------------------------------


class Plane:
    """A data plane with one worker that answers at once."""

    def __init__(self, folder: Path, lineage: str, restore: Path | None = None) -> None:
        self.clock = ManualClock()
        self.lineage = lineage
        self.data = DataService(
            tiny_config(),
            lineage,
            folder / "trajectories",
            restore,
            adapter=FakeTask(TaskOptions(), FakeTokenizer(), 0),
            clock=self.clock,
        )

    async def serve(self, version: int) -> None:
        await self.data.publish(version, f"d{version}")
        await self.data.register("w0", 0)
        await self.data.installed("w0", version)

    async def pull(self, count: int) -> list[Lease]:
        return await self.data.pull("w0", 0, count, 0.0)

    async def submit(self, leases: list[Lease]) -> None:
        groups = [(lease.lease_id, of_lineage(self.lineage, answer(lease))) for lease in leases]
        for receipt in await self.data.submit("w0", 0, groups):
            assert receipt.accepted, receipt.reason


def of_lineage(lineage: str, group: Group) -> Group:
    return replace(group, trajectories=tuple(replace(t, lineage=lineage) for t in group.trajectories))


def test_the_data_plane_continues_without_skipping_or_repeating_a_prompt(tmp_path: Path) -> None:
    async def first() -> tuple[list[int], list[int], list[int]]:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        leases = await plane.pull(6)
        await plane.submit(leases[:5])
        batch = await plane.data.next_batch(0, 0.0)
        assert isinstance(batch, TrainBatch)
        await plane.data.save(tmp_path / "saved")
        trained, buffered, leased = leases[:4], leases[4:5], leases[5:]
        return tuple([lease.prompt.index for lease in part] for part in (trained, buffered, leased))  # type: ignore[return-value]

    async def second(trained: list[int], buffered: list[int], leased: list[int]) -> None:
        plane = Plane(tmp_path, "L1", tmp_path / "saved")
        assert await plane.data.ready() == 1
        counts = await plane.data.counts()
        assert (counts.accepted, counts.trained, counts.buffered, counts.leased) == (10, 8, 2, 0)
        assert counts.lost == 0
        await plane.serve(1)
        leases = await plane.pull(4)
        await plane.submit(leases)
        again = [lease.prompt.index for lease in leases]
        assert again[: len(leased)] == leased  # what was out goes out again, first
        assert not set(again) & {*trained, *buffered}
        assert sorted([*trained, *buffered, *again]) == list(range(9))
        batch = await plane.data.next_batch(1, 0.0)
        assert isinstance(batch, TrainBatch)
        assert 0 in batch.versions.tolist()  # buffered before the crash, under the old lineage
        assert len(set(batch.trajectory_ids)) == batch.num_trajectories

    parts = asyncio.run(first())
    asyncio.run(second(*parts))


def test_a_damaged_buffer_is_refused_and_names_the_file(tmp_path: Path) -> None:
    async def damaged() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        await plane.submit(await plane.pull(3))
        await plane.data.save(tmp_path / "saved")
        path = tmp_path / "saved" / "buffered.arrow"
        path.write_bytes(path.read_bytes()[:-100])
        Plane(tmp_path, "L1", tmp_path / "saved")

    with pytest.raises(DataError, match=r"buffered\.arrow"):
        asyncio.run(damaged())


def test_trained_and_buffered_rows_are_on_disk_after_a_save(tmp_path: Path) -> None:
    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        await plane.submit(await plane.pull(5))
        await plane.data.next_batch(0, 0.0)
        await plane.data.save(tmp_path / "saved")

    asyncio.run(main())
    (trained,) = sorted((tmp_path / "trajectories").glob("*.arrow"))
    assert trained.name.startswith("L0-")
    assert len(read_groups(trained)) == 4
    assert len(read_groups(tmp_path / "saved" / "buffered.arrow")) == 1
    assert json.loads((tmp_path / "saved" / "state.json").read_text())["step"] == 1
