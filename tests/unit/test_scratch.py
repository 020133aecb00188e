"""Temporary folders left by the dead, and those that may never be cleared."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from echo_planes.cluster import scratch, scratch_guard
from echo_planes.cluster.scratch import (
    FOLDER,
    MAX_FOLDER_BYTES,
    RECORD,
    SHARED_FOLDER,
    SHARED_MEMORY,
    Owner,
    clear,
    is_left,
    parse_record,
    record,
    start_ticks,
    sweep,
    this_process,
)
from echo_planes.errors import ClusterError

HERE = Owner(pid=7, start_ticks=900, boot="b1", pid_namespace=11, uid=1000)
OWNER = Owner(pid=40, start_ticks=500, boot="b1", pid_namespace=11, uid=1000)
LONGEST_SOCKET = "p/ray/session_2026-11-23_04-45-17_224903_4194304/sockets/plasma_store"
UNIX_ADDRESS_BYTES = 107


# --- decisions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "lock_is_free", "now_ticks", "left"),
    [
        pytest.param(OWNER, True, None, True, id="its process is gone"),
        pytest.param(OWNER, True, 501, True, id="another process has its id now"),
        pytest.param(OWNER, True, 500, False, id="it lives"),
        pytest.param(OWNER, False, None, False, id="somebody holds its lock"),
        pytest.param(OWNER, False, 501, False, id="somebody holds its lock, and its id is another's"),
        pytest.param(replace(OWNER, uid=0), True, None, False, id="another user's"),
        pytest.param(replace(OWNER, boot="b0"), True, 500, True, id="before the machine went down"),
        pytest.param(replace(OWNER, pid_namespace=12), True, None, True, id="of a container that has ended"),
        pytest.param(replace(OWNER, pid_namespace=12), False, None, False, id="of a container that runs"),
    ],
)
def test_only_what_a_dead_owner_of_the_same_user_left_is_cleared(
    owner: Owner, lock_is_free: bool, now_ticks: int | None, left: bool
) -> None:
    assert is_left(owner, HERE, lock_is_free, now_ticks) is left


@pytest.mark.parametrize(
    ("line", "ticks"),
    [
        ("40 (python) S 1 40 40 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 500 1 2", 500),
        ("40 (a) R) (b) S 1 40 40 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 500 1 2", 500),
        ("40 (python) Z 1 40 40 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 500 1 2", None),
    ],
)
def test_a_process_is_told_by_its_start_and_a_dead_one_has_none(line: str, ticks: int | None) -> None:
    assert start_ticks(line) == ticks


def test_a_record_says_who_made_which_folders() -> None:
    folders = (Path("/tmp") / OWNER.name, SHARED_MEMORY / OWNER.name)
    assert parse_record(record(OWNER, folders)) == (OWNER, folders)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"folders": 5}',
        record(OWNER, [Path("/home/somebody")]),  # never a folder by another name
        record(OWNER, [Path(OWNER.name)]),
        record(OWNER, [Path("/tmp") / OWNER.name]).replace("500", '"500"'),
    ],
)
def test_a_record_that_is_none_clears_nothing(text: str) -> None:
    assert parse_record(text) is None


def test_the_longest_socket_of_a_run_fits_an_address() -> None:
    folder = "x" * MAX_FOLDER_BYTES
    assert len(f"{folder}/{LONGEST_SOCKET}") <= UNIX_ADDRESS_BYTES
    newest = replace(OWNER, pid=4_194_304, start_ticks=100 * 86_400 * 365 * 20)  # after twenty years
    assert len(f"/tmp/{newest.name}") <= MAX_FOLDER_BYTES


# --- folders -------------------------------------------------------------------------------------


@pytest.fixture
def root() -> Iterator[Path]:
    """A short one, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield Path(folder)


def left_by(owner: Owner, root: Path) -> Path:
    """A folder with its owner's record."""
    folder = root / owner.name
    folder.mkdir()
    (folder / RECORD).write_text(record(owner, [folder]))
    (folder / "socket").touch()
    return folder


def test_a_start_clears_what_the_dead_left_and_nothing_else(root: Path) -> None:
    here = this_process()
    dead = left_by(replace(here, pid=2**22 - 1, start_ticks=5), root)
    recycled = left_by(replace(here, start_ticks=here.start_ticks - 1), root)
    mine = left_by(here, root)
    others = left_by(replace(here, pid=2**22 - 2, uid=here.uid + 1), root)
    bare = root / f"{scratch.PREFIX}4194301-5"
    bare.mkdir()
    lying = root / f"{scratch.PREFIX}4194300-5"
    lying.mkdir()
    (lying / RECORD).write_text(record(replace(here, pid=2**22 - 1, start_ticks=5), [dead]))
    sweep(here, [root])
    assert sorted(root.iterdir()) == sorted([mine, others, bare, lying])
    assert not dead.exists()
    assert not recycled.exists()


def test_what_is_found_in_shared_memory_names_the_folder_on_disk(root: Path) -> None:
    """The folder on disk lies elsewhere if TMPDIR was another then."""
    here = this_process()
    dead = replace(here, pid=2**22 - 1, start_ticks=5)
    disk, shared = root / "disk" / dead.name, root / "shared" / dead.name
    for folder in (disk, shared):
        folder.mkdir(parents=True)
        (folder / RECORD).write_text(record(dead, [disk, shared]))
    sweep(here, [root / "shared"])
    assert not disk.exists()
    assert not shared.exists()


def test_a_link_in_the_place_of_a_folder_is_not_followed(root: Path) -> None:
    here = this_process()
    target = left_by(replace(here, pid=2**22 - 1, start_ticks=5), root)
    moved = root / "moved"
    target.rename(moved)
    target.symlink_to(moved)
    sweep(here, [root])
    assert (moved / "socket").exists()


def test_clearing_takes_what_bears_the_name_in_shared_memory(root: Path) -> None:
    mine, longer = f"{scratch.PREFIX}4194303-{os.getpid():x}", f"{scratch.PREFIX}4194303-{os.getpid():x}f"
    ranks = f"vllm_dist_{os.getpid():x}"
    gone = [f"sem.{mine}-abc", f"{mine}-0123", f"{ranks}-tp:0"]
    kept = [f"sem.{longer}-abc", f"{longer}-0123", f"other-{mine}-"]
    folder = root / mine
    folder.mkdir()
    (folder / ranks).touch()
    try:
        for name in gone + kept:
            (SHARED_MEMORY / name).touch()
        assert clear([folder])
        assert not folder.exists()
        assert [name for name in gone + kept if (SHARED_MEMORY / name).exists()] == kept
    finally:
        for name in gone + kept:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_somebody_who_reads_a_log_of_a_run_is_not_of_it(root: Path) -> None:
    log = root / "log"
    log.touch()
    with log.open() as reading:
        assert reading.fileno() >= 0
        assert os.getpid() not in scratch_guard.processes_of(str(root))
    with log.open("a") as writing:
        assert writing.fileno() >= 0
        assert os.getpid() in scratch_guard.processes_of(str(root))


def test_a_folder_for_temporary_files_that_is_too_long_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Path("/tmp") / ("x" * 40)
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(long))
    assert scratch._roots(OWNER.name)[0] == Path("/tmp")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        ClusterError, match=r"TMPDIR=/tmp/x+ is too long .* set TMPDIR to a folder of at most"
    ):
        scratch._roots(OWNER.name)


def test_processes_of_a_run_inherit_its_folder_and_an_actor_of_it_makes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix = multiprocessing.current_process().__dict__["_config"]["semprefix"]
    monkeypatch.setenv(FOLDER, "/tmp/echo_planes-40-1f4")
    monkeypatch.setenv(SHARED_FOLDER, "/dev/shm/echo_planes-40-1f4")
    monkeypatch.setattr(scratch, "Scratch", None)  # it would fail
    monkeypatch.setitem(multiprocessing.current_process().__dict__["_config"], "semprefix", prefix)
    for name in ("_SHM_NAME_PREFIX", "_SHM_SAFE_NAME_LENGTH"):
        monkeypatch.setattr(scratch.shared_memory, name, getattr(scratch.shared_memory, name))
    scratch.join()
    assert scratch.shared_folder() == Path("/dev/shm/echo_planes-40-1f4")
    block = scratch.shared_memory.SharedMemory(create=True, size=1)
    try:
        assert block.name.startswith("echo_planes-40-1f4-")
    finally:
        block.close()
        block.unlink()
