"""A checkpoint is whole or not there, the newest are kept, and the data plane continues from it exactly."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_planes.cluster.clock import ManualClock
from echo_planes.config.schema import Config
from echo_planes.data.replay.buffer_state import Accepted, BufferState, NotReady
from echo_planes.data.replay.checkpoint_state import rejoin
from echo_planes.data.service import DataService
from echo_planes.data.store.index import StoreCounts
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.data.tasks.adapter import Progress, TaskAdapter, TaskOptions
from echo_planes.errors import ClusterError, ConfigError, DataError
from echo_planes.loop.checkpoint import (
    CheckpointMeta,
    go_back,
    newest_checkpoint,
    open_lineage,
    resume_command,
    rewind_metrics,
    save_checkpoint,
)
from echo_planes.reporting.metrics import MetricsWriter, read_metrics
from echo_planes.testing.fakes import FakeTask, FakeTokenizer
from echo_planes.testing.simulation import replace_section, tiny_config
from echo_planes.types import (
    BufferCounts,
    Group,
    Lease,
    Prompt,
    Reward,
    TrainBatch,
    WorkerStats,
    sampled_tokens,
)
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


def test_the_command_that_resumes_is_quoted_and_needs_a_checkpoint(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a run"
    assert resume_command(folder) == ""
    save(folder, 0)
    assert resume_command(folder) == f"python -m echo_planes.run 'run.resume={folder}'"


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


def test_files_and_folders_are_on_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that loses its power may leave a checkpoint that lacks files, or their bytes."""
    changes: list[str] = []
    sync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        changes.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path.resolve()))
        sync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        changes.append(f"{source.name} -> {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    path = save(tmp_path, 50)
    inside = [found.relative_to(path).as_posix() for found in (path, *path.rglob("*"))]
    assert "data/part" in inside
    assert changes.pop() == ".partial -> step-000050"
    assert sorted(changes) == sorted(os.path.normpath(f"checkpoints/.partial/{one}") for one in inside)


class Killed(BaseException):
    """End of the process, in the middle of its work on the disk."""


def kill_at(monkeypatch: pytest.MonkeyPatch, change: int) -> list[str]:
    """Have the process die at that change of the disk; return the list of changes, which grows."""
    made: list[str] = []

    def dying(name: str) -> Any:
        do = getattr(os, name)

        def call(*arguments: Any, **more: Any) -> Any:
            if len(made) >= change:
                raise Killed
            made.append(name)
            return do(*arguments, **more)

        return call

    for name in ("rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, dying(name))
    return made


def killed_everywhere(
    folder: Path, begin: Callable[[Path], None], work: Callable[[Path], None]
) -> list[Path]:
    """Do the work in fresh folders, killed at its first change of the disk, its second, ...: the folders."""
    folders = []
    for change in range(100):
        folders.append(folder / str(change))
        begin(folders[-1])
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, change)
            try:
                work(folders[-1])
            except Killed:
                continue
        return folders
    raise AssertionError("the work never ended")


def newest_whole(folder: Path) -> tuple[int, str]:
    """Return the step of the newest checkpoint and the text of its parts, which must be the same in both."""
    path, meta = newest_checkpoint(folder)
    texts = {(path / plane / "part").read_text() for plane in ("learner", "data")}
    assert len(texts) == 1
    return meta.step, texts.pop()


def test_a_step_that_is_saved_again_has_a_whole_checkpoint_at_every_moment(tmp_path: Path) -> None:
    def once(folder: Path) -> None:
        save(folder, 50, data=Part("old"), learner=Part("old"))

    def again(folder: Path) -> None:
        save(folder, 50, data=Part("new"), learner=Part("new"))

    folders = killed_everywhere(tmp_path, once, again)
    assert len(folders) > 5
    found = [newest_whole(folder) for folder in folders]
    assert found == sorted(found, key=lambda one: one != (50, "old"))  # the old one, until it is the new one
    assert {text for _, text in found} == {"old", "new"}
    for folder in folders:
        again(folder)
        assert newest_whole(folder) == (50, "new")
        assert names(folder) == ["step-000050"]


def test_a_checkpoint_that_is_half_removed_is_never_found(tmp_path: Path) -> None:
    def three(folder: Path) -> None:
        for step in (10, 20, 30):
            save(folder, step, keep=3)

    def back(folder: Path) -> None:
        go_back(folder / "checkpoints" / "step-000010", 9, dict)

    for folder in killed_everywhere(tmp_path, three, back):
        newest_whole(folder)
        back(folder)
        assert newest_whole(folder)[0] == 10


def test_a_save_that_broke_off_leaves_nothing_behind_once_another_step_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ClusterError):
        save(tmp_path, 7, data=Part(error=OSError(errno.ENOSPC, "No space left on device")))
    save(tmp_path, 8)
    assert names(tmp_path) == ["step-000008"]


def test_nothing_to_resume_from_is_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".partial").mkdir(parents=True)
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

    def __init__(
        self,
        folder: Path,
        lineage: str,
        restore: Path | None = None,
        config: Config | None = None,
        task: TaskAdapter | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.lineage = lineage
        self.data = DataService(
            config or tiny_config(),
            lineage,
            folder / "replay",
            restore,
            adapter=task or FakeTask(TaskOptions(), FakeTokenizer(), 0),
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
        await plane.data.close()
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


def test_work_of_the_time_between_checkpoint_and_crash_is_kept_where_it_can_be(tmp_path: Path) -> None:
    """Trained after the checkpoint: trained again. Accepted after it: kept. Of a later version: set aside."""

    async def first() -> list[Lease]:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        leases = await plane.pull(6)
        await plane.submit(leases[:5])
        await plane.data.next_batch(0, 0.0)
        await plane.data.save(tmp_path / "saved")  # trained: 0 to 3, buffered: 4, leased: 5
        await plane.submit(leases[5:])
        later = await plane.pull(2)
        await plane.submit(later)
        await plane.data.next_batch(1, 0.0)  # 4 to 7
        await plane.data.publish(2, "d2")
        await plane.data.installed("w0", 2)
        newest = await plane.pull(1)
        await plane.submit(newest)
        await plane.data.close()
        return leases + later + newest

    async def second(leases: list[Lease]) -> None:
        plane = Plane(tmp_path, "L1", tmp_path / "saved")
        assert await plane.data.ready() == 1
        counts = await plane.data.counts()
        assert (counts.trained, counts.buffered, counts.accepted, counts.lost) == (8, 8, 16, 0)
        await plane.serve(1)
        (again,) = await plane.pull(1)
        assert again.prompt.index == leases[-1].prompt.index  # of version 2, which is no more
        batch = await plane.data.next_batch(1, 0.0)
        assert isinstance(batch, TrainBatch)
        trained = {name.rpartition("/")[0] for name in batch.trajectory_ids}
        assert trained == {lease.group_id for lease in leases[4:8]}
        await plane.data.close()

    asyncio.run(second(asyncio.run(first())))
    fates = StoreSnapshot(tmp_path / "replay").table().column("fate").to_pylist()
    assert (fates.count("trained"), fates.count("quarantined")) == (16, 2)


def test_a_resume_that_breaks_off_can_be_done_again(tmp_path: Path) -> None:
    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        await plane.submit(await plane.pull(6))
        await plane.data.save(tmp_path / "saved")
        await plane.data.next_batch(0, 0.0)
        await plane.data.close()
        for lineage in ("L1", "L2"):
            plane = Plane(tmp_path, lineage, tmp_path / "saved")
            assert await plane.data.ready() == 0
            counts = await plane.data.counts()
            assert (counts.trained, counts.buffered, counts.lost) == (0, 12, 0)
            await plane.data.close()

    asyncio.run(main())


def test_a_checkpoint_without_its_store_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        await plane.submit(await plane.pull(3))
        await plane.data.save(tmp_path / "saved")
        await Plane(tmp_path / "elsewhere", "L1", tmp_path / "saved").data.ready()

    with pytest.raises(
        DataError, match=r"store is empty, and the checkpoint .* 3 groups; restore the whole run folder"
    ):
        asyncio.run(main())


def test_a_damaged_cut_is_refused(tmp_path: Path) -> None:
    async def main(change: str) -> None:
        folder = tmp_path / (change or "empty")
        plane = Plane(folder, "L0")
        await plane.serve(0)
        await plane.data.save(folder / "saved")
        await plane.data.close()
        (folder / "saved" / "state.json").write_text(change)
        await Plane(folder, "L1", folder / "saved").data.ready()

    for change in ("", "{}", "[]", '{"step": 0}'):
        with pytest.raises(DataError, match=r"state\.json"):
            asyncio.run(main(change))


def test_two_data_planes_cannot_share_a_store(tmp_path: Path) -> None:
    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.data.ready()
        with pytest.raises(ClusterError, match="is in use by run"):
            await Plane(tmp_path, "L1").data.ready()
        with pytest.raises(ClusterError, match="is in use by run"):
            await Plane(tmp_path, "L1").data.next_batch(0, 0.0)
        other = Plane(tmp_path, "L1").data
        counters = WorkerStats("w0", 0, "d0", 0, 0, 0, 0.0)
        for call in (
            other.register("w0", 0),
            other.park("w0", True),
            other.pull("w0", 0, 1, 0.0),
            other.stream("w0", 0, []),
            other.tell(0, counters),
            other.hand_over("w0", 0, []),
            other.recall("w0", 1),
            other.submit("w0", 0, []),
            other.publish(0, "d0"),
            other.installed("w0", 0),
            other.lose("w0"),
            other.limit_staleness(0),
            other.counts(),
            other.accepted(),
            other.complaints(),
            other.save(tmp_path / "saved"),
            other.close(),
        ):
            with pytest.raises(ClusterError, match="is in use by run"):
                await call

    asyncio.run(main())


def test_groups_with_numbers_of_numpy_are_kept_and_saved_like_others(tmp_path: Path) -> None:
    """A task may well make its masks and its rewards with numpy."""

    def of_numpy(lease: Lease) -> Group:
        group = of_lineage("L0", answer(lease))
        first = group.trajectories[0]
        mask = tuple(np.array(first.episode.response_mask))
        reward = Reward(1.0, True, {"length": np.float32(0.5), "turns": np.int64(3)})  # type: ignore[dict-item]
        changed = replace(first, episode=replace(first.episode, response_mask=mask), reward=reward)
        group = replace(group, trajectories=(changed, *group.trajectories[1:]))
        assert type(sampled_tokens(group)) is int  # workers count with it, and send the counts
        return group

    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        leases = await plane.pull(4)
        await plane.data.submit("w0", 0, [(lease.lease_id, of_numpy(lease)) for lease in leases])
        batch = await plane.data.next_batch(0, 0.0)
        assert isinstance(batch, TrainBatch)
        assert batch.reward_parts == (("length", 0.5, 4), ("turns", 3.0, 4))
        await plane.data.save(tmp_path / "saved")
        accepted = await plane.data.accepted()
        tokens = (await plane.data.counts()).accepted_tokens
        assert json.loads(json.dumps(list(accepted.values()))) == [[tokens, 8]]
        await plane.data.close()

    asyncio.run(main())


def test_a_closed_data_plane_writes_nothing_more(tmp_path: Path) -> None:
    """Workers may submit until they are stopped. The store's files are closed, and another may have a number
    of theirs."""

    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        leases = await plane.pull(6)
        await plane.submit(leases[:4])
        counts = await plane.data.close()
        (tmp_path / "another").write_bytes(b"")
        others = [os.open(tmp_path / "another", os.O_RDWR) for _ in range(8)]
        try:
            groups = [(lease.lease_id, of_lineage("L0", answer(lease))) for lease in leases[4:]]
            receipts = await plane.data.submit("w0", 0, groups)
            assert isinstance(await plane.data.next_batch(0, 0.0), NotReady)
            assert [(receipt.accepted, receipt.detail) for receipt in receipts] == [
                (False, "the run is over")
            ] * 2
            assert (await plane.data.counts()).accepted == counts.accepted == 8
        finally:
            for fd in others:
                os.close(fd)
        assert (tmp_path / "another").read_bytes() == b""

    asyncio.run(main())


def test_a_cut_that_cannot_be_written_is_our_error(tmp_path: Path) -> None:
    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        (tmp_path / "file").write_text("")
        with pytest.raises(ClusterError, match="cannot write"):
            await plane.data.save(tmp_path / "file" / "data")
        await plane.data.close()

    asyncio.run(main())


def test_a_full_disk_ends_acceptance_and_loses_nothing_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        leases = await plane.pull(6)
        await plane.submit(leases[:4])

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            with pytest.raises(ClusterError, match="No space left on device; free some space"):
                await plane.submit(leases[4:])
        with pytest.raises(ClusterError, match="No space left"):
            await plane.data.next_batch(0, 0.0)
        await plane.data.close()

    asyncio.run(main())
    rows = StoreSnapshot(tmp_path / "replay").table()
    assert len(set(rows.column("group_id").to_pylist())) == 4


def test_what_a_dead_run_left_is_not_taken_for_this_one(tmp_path: Path) -> None:
    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        await plane.submit(await plane.pull(4))
        await plane.data.close()
        plane = Plane(tmp_path, "L1")
        await plane.serve(0)
        assert not isinstance(await plane.data.next_batch(0, 0.0), TrainBatch)
        leases = await plane.pull(4)
        await plane.submit(leases)
        batch = await plane.data.next_batch(0, 0.0)
        assert isinstance(batch, TrainBatch)
        assert {name.rpartition("/")[0] for name in batch.trajectory_ids} == {one.group_id for one in leases}
        await plane.data.close()

    asyncio.run(main())


def test_rows_beyond_the_limits_go_and_their_prompts_come_again(tmp_path: Path) -> None:
    async def main() -> None:
        config = replace_section(tiny_config(), replay={"max_gib": 1e-6, "trim_every": 1})
        plane = Plane(tmp_path, "L0", config=config)
        await plane.serve(0)
        leases = await plane.pull(6)
        await plane.submit(leases)
        assert isinstance(await plane.data.next_batch(0, 0.0), TrainBatch)
        counts = await plane.data.counts()
        assert counts.trained == 8
        assert counts.removed > 0
        assert counts.removed + counts.buffered == 4
        assert counts.lost == 0
        again = await plane.pull(counts.removed // 2)
        assert {one.prompt.index for one in again} <= {one.prompt.index for one in leases[4:]}
        await plane.data.close()

    asyncio.run(main())


def test_prompts_of_groups_that_left_after_the_cut_go_out_again() -> None:
    def accepted(name: str, index: int) -> Accepted:
        return Accepted(name, index, version=0, share_correct=0.5)

    cut = BufferState(
        step=3,
        next_index=10,
        returned=(2,),
        issued=12,
        groups=(accepted("a", 4), accepted("b", 5)),
        counts=BufferCounts(accepted=20, trained=16, buffered=4, refused=7),
        published=(),
    )
    later = [accepted("c", 2), accepted("d", 12)]
    # "a" was dropped, or is damaged, since.
    ledger = StoreCounts(24, 16, dropped=2, uninformative=0, quarantined=0, removed=0, lost=0, buffered=6)
    state = rejoin(cut, later, [accepted("b", 5), *later], ledger)
    assert (state.next_index, state.returned) == (13, (4, 10, 11))
    assert [group.group_id for group in state.groups] == ["b", "c", "d"]
    assert (state.counts.accepted, state.counts.lost, state.counts.refused) == (24, 0, 7)
    # Two more came, and were set aside as uninformative: their prompts are done.
    ledger = replace(ledger, accepted=28, uninformative=4)
    done = [accepted("e", 10), accepted("f", 14)]
    state = rejoin(cut, later, [accepted("b", 5), *later], ledger, done)
    assert (state.next_index, state.returned) == (15, (4, 11, 13))
    assert (state.counts.accepted, state.counts.uninformative, state.counts.lost) == (28, 4, 0)


class LeveledTask(FakeTask):
    """Prompts that say at which level they were issued; the level rises with every group."""

    num_levels = 1000

    def level(self, progress: Progress) -> int:
        return progress.level + progress.num_groups

    def prompt_at(self, index: int, level: int) -> Prompt:
        return Prompt(index, (level,), text=f"{index} at {level}")


def test_a_prompt_of_a_curriculum_is_the_same_when_it_goes_out_again(tmp_path: Path) -> None:
    issued: dict[int, str] = {}

    async def live(lineage: str, restore: Path | None) -> None:
        config = replace_section(tiny_config(), staleness={"queue_batches": 30.0, "max_staleness": 30})
        plane = Plane(tmp_path, lineage, restore, config, LeveledTask(TaskOptions(), FakeTokenizer(), 0))
        step = await plane.data.ready()
        await plane.serve(step)
        for _ in range(8):
            leases = await plane.pull(10)
            for lease in leases:
                assert issued.setdefault(lease.prompt.index, lease.prompt.text) == lease.prompt.text
            await plane.submit(leases[:6])
            await plane.data.lose("w0")
            await plane.data.register("w0", 0)
            await plane.data.installed("w0", step)
        if restore is None:
            await plane.data.save(tmp_path / "saved")
            await plane.submit(await plane.pull(3))
        await plane.data.close()

    asyncio.run(live("L0", None))
    asyncio.run(live("L1", tmp_path / "saved"))
    assert len({text.rpartition(" ")[2] for text in issued.values()}) > 2


# --- what may be found on disk -------------------------------------------------------------------


async def a_life(folder: Path, *, train: int = 4, more: int = 2) -> list[Lease]:
    """Groups trained in step 0 and others buffered, with a checkpoint of step 1."""
    plane = Plane(folder, "L0")
    await plane.serve(0)
    leases = await plane.pull(train + more)
    await plane.submit(leases[:train])
    assert isinstance(await plane.data.next_batch(0, 0.0), TrainBatch)
    for lease in leases[train:]:
        await plane.submit([lease])
    await plane.data.save(folder / "saved")
    await plane.data.close()
    return leases


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_groups_whose_fate_is_forgotten_are_not_trained_again(tmp_path: Path, harm: str) -> None:
    async def main() -> None:
        leases = await a_life(tmp_path)
        path = tmp_path / "replay" / "fates.arrows"
        content = bytearray(path.read_bytes())
        content[-200] ^= 1
        path.unlink() if harm == "remove" else path.write_bytes(content)
        plane = Plane(tmp_path, "L1", tmp_path / "saved")
        assert await plane.data.ready() == 1
        counts = await plane.data.counts()
        assert (counts.buffered, counts.lost) == (4, 0)
        assert counts.damaged > 0
        await plane.serve(1)
        again = await plane.pull(3)
        assert not {one.prompt.index for one in again} & {one.prompt.index for one in leases}
        await plane.data.close()

    asyncio.run(main())


def test_an_acknowledged_group_that_was_altered_costs_only_itself(tmp_path: Path) -> None:
    async def main() -> None:
        leases = await a_life(tmp_path)
        (path,) = (tmp_path / "replay" / "segments").glob("*.arrows")
        content = bytearray(path.read_bytes())
        content[-50] ^= 1  # in the last message: looks like a torn end
        path.write_bytes(content)
        for lineage in ("L1", "L2"):
            plane = Plane(tmp_path, lineage, tmp_path / "saved")
            assert await plane.data.ready() == 1
            counts = await plane.data.counts()
            buffered = 2 if lineage == "L1" else 4
            assert (counts.trained, counts.buffered, counts.lost) == (8, buffered, 0)
            await plane.serve(1)
            (again,) = await plane.pull(1)
            assert (again.prompt.index == leases[-1].prompt.index) == (lineage == "L1")
            await plane.submit([again])
            await plane.data.close()

    asyncio.run(main())


def test_a_run_that_died_before_its_first_checkpoint_leaves_nothing_to_count(tmp_path: Path) -> None:
    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        await plane.submit(await plane.pull(6))
        assert isinstance(await plane.data.next_batch(0, 0.0), TrainBatch)
        await plane.data.close()
        plane = Plane(tmp_path, "L1")
        await plane.serve(0)
        await plane.submit(await plane.pull(2))
        await plane.data.save(tmp_path / "saved")
        await plane.data.close()
        plane = Plane(tmp_path, "L2", tmp_path / "saved")
        assert await plane.data.ready() == 0
        counts = await plane.data.counts()
        assert (counts.trained, counts.buffered, counts.accepted) == (0, 4, 4)
        await plane.data.close()

    asyncio.run(main())


def test_another_number_of_samples_is_refused_on_a_resume(tmp_path: Path) -> None:
    async def main() -> None:
        await a_life(tmp_path)
        config = replace_section(tiny_config(), sampling={"samples_per_prompt": 5})
        await Plane(tmp_path, "L1", tmp_path / "saved", config).data.ready()

    with pytest.raises(ConfigError, match="samples_per_prompt=5, but the run has groups of 2"):
        asyncio.run(main())


def test_a_group_that_cannot_be_written_down_ends_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise OverflowError("too large")  # `claims` let something pass that no file takes

    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        (lease,) = await plane.pull(1)
        group = of_lineage("L0", answer(lease))
        monkeypatch.setattr(plane.data._store, "append_groups", cannot)
        with pytest.raises(DataError, match=f"groups {lease.group_id} cannot be kept: OverflowError"):
            await plane.data.submit("w0", 0, [(lease.lease_id, group)])
        for call in (plane.data.next_batch(0, 0.0), plane.data.save(tmp_path / "saved"), plane.pull(1)):
            with pytest.raises(DataError, match="cannot be kept"):
                await call
        assert not (tmp_path / "saved").exists()
        await plane.data.close()

    asyncio.run(main())


class BrokenTask(FakeTask):
    """Has no prompt 3."""

    def prompt(self, index: int) -> Prompt:
        return {i: super(BrokenTask, self).prompt(i) for i in range(3)}[index]


def test_a_prompt_that_cannot_be_made_is_told_and_none_is_skipped(tmp_path: Path) -> None:
    async def main() -> None:
        task = BrokenTask(TaskOptions(), FakeTokenizer(), 0)
        plane = Plane(tmp_path, "L0", task=task)
        await plane.serve(0)
        await plane.data.save(tmp_path / "saved")
        for call in (plane.pull(6), plane.data.next_batch(0, 0.0), plane.data.save(tmp_path / "later")):
            with pytest.raises(DataError, match="cannot be made: KeyError: 3"):
                await call
        await plane.data.close()
        plane = Plane(tmp_path, "L1", tmp_path / "saved")
        await plane.serve(0)
        assert [one.prompt.index for one in await plane.pull(6)] == list(range(6))
        await plane.data.close()

    asyncio.run(main())


def test_a_checkpoint_whose_numbers_are_damaged_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 50) / "meta.json"
    for content in ("", "[]", '{"step": 3}'):
        path.write_text(content)
        with pytest.raises(DataError, match=r"meta\.json is not (readable|JSON).* remove the folder"):
            newest_checkpoint(tmp_path)
