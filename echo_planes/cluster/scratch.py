"""Scratch of a run: a folder on disk and one in shared memory for temporary files, cleared after any end.

The process that starts a run owns the folders. It names them after its process id and start time, and holds a
lock in each while it lives. Its child processes inherit the one on disk as TMPDIR. On a cluster that another
process started, each actor owns such folders for its own processes. A small guard process clears both as soon
as the owner has ended, after kill -9 too (`scratch_guard.py`). If the guard was killed, or the machine went
down, the next start clears them: by the owner recorded inside, never by name alone.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import shared_memory
from pathlib import Path

from echo_planes.errors import ClusterError, RunError

PREFIX = "echo_planes-"
RECORD = "owner.json"
SHARED_MEMORY = Path("/dev/shm")
# Environment variables of every process of a run, which hold the paths of its two folders.
FOLDER, SHARED_FOLDER = "ECHO_PLANES_SCRATCH", "ECHO_PLANES_SHARED"
# The address of a Unix socket has at most 107 bytes. The longest one in the folder is that of Ray:
# <folder>/p/ray/<session, 42 characters>/sockets/plasma_store.
MAX_FOLDER_BYTES = 37
MAX_RECORD_BYTES = 4096
CLEAR_LIMIT_S = 10.0  # for the guard to end remaining processes and clear the folders
START_LIMIT_S = 30.0  # for a new interpreter on a busy machine
VLLM_RANKS = "vllm_dist_"  # prefix of a file in the folder; vLLM's ranks name shared memory after that file
ROOT = Path(__file__).resolve().parents[2]
# With -I -S the guard starts in milliseconds and imports only the standard library and this package.
BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from echo_planes.cluster.scratch_guard import main; main(sys.argv[1:])"
)


# --- ownership: decisions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owner:
    """Identity of a process, unlike that of any other process with the same id.

    Args:
        start_ticks: its start, in clock ticks since the machine booted.
        boot: id of that boot.
        pid_namespace: inode of the PID namespace that its id belongs to.
    """

    pid: int
    start_ticks: int
    boot: str
    pid_namespace: int
    uid: int

    @property
    def name(self) -> str:
        """Name of the owner's folders."""
        return f"{PREFIX}{self.pid}-{self.start_ticks:x}"


def start_ticks(stat_line: str) -> int | None:
    """Return the start of a process in clock ticks, from /proc/PID/stat; None for a zombie."""
    fields = stat_line.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_left(owner: Owner, here: Owner, lock_is_free: bool, now_ticks: int | None) -> bool:
    """Return whether a dead process left a folder that this user may clear.

    Args:
        owner: the process that made the folder.
        here: the calling process.
        lock_is_free: no process holds the folder's lock. Also true for a moment while it is being made.
        now_ticks: start of the process that has the owner's id here now; None if there is none.
    """
    if owner.uid != here.uid or not lock_is_free:
        return False
    if (owner.boot, owner.pid_namespace) != (here.boot, here.pid_namespace):
        return True  # a process id of another boot or namespace means nothing here, but the free lock does
    return now_ticks != owner.start_ticks


def parse_record(text: str) -> tuple[Owner, tuple[Path, ...]] | None:
    """Parse a text of `record`; return None if it is malformed, or names folders that are not the owner's."""
    try:
        fields = json.loads(text)
        folders = tuple(Path(folder) for folder in fields.pop("folders"))
        owner = Owner(**fields)
        whole = all(
            type(getattr(owner, key)) is int for key in ("pid", "start_ticks", "pid_namespace", "uid")
        )
        named = all(folder.is_absolute() and folder.name == owner.name for folder in folders)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return (owner, folders) if whole and named else None


def record(owner: Owner, folders: Sequence[Path]) -> str:
    """Return the text to write into each of the owner's folders."""
    return json.dumps({**asdict(owner), "folders": [str(folder) for folder in folders]})


# --- the scratch of one process --------------------------------------------------------------------


class Scratch:
    """Folders of this process and of its child processes. Make them with `opened` or `join`."""

    def __init__(self) -> None:
        self.owner = this_process()
        roots = _roots(self.owner.name)
        sweep(self.owner, roots)
        self.folders = tuple(root / self.owner.name for root in roots)
        self._locks = [_make(folder, record(self.owner, self.folders)) for folder in self.folders]
        (self.folder / "p").mkdir(0o700)
        self._line = self._start_guard()
        self._before = {name: os.environ.get(name) for name in (FOLDER, SHARED_FOLDER, "TMPDIR")}
        now = {FOLDER: self.folder, SHARED_FOLDER: self.folders[-1], "TMPDIR": self.folder}
        _set_environment({name: str(path) for name, path in now.items()})

    @property
    def folder(self) -> Path:
        """Folder on disk. Other users may traverse it, since sandboxed programs run as other users."""
        return self.folders[0]

    @property
    def private(self) -> Path:
        """Folder inside `folder` that other users may not enter."""
        return self.folder / "p"

    def close(self) -> None:
        """Clear the folders, after the guard has ended the run's remaining processes."""
        _set_environment(self._before)
        with suppress(OSError):  # the guard was killed
            self._line.shutdown(socket.SHUT_WR)
            self._line.settimeout(CLEAR_LIMIT_S)
            self._line.recv(1)  # returns when the guard ends
        self._line.close()
        clear(self.folders)
        for lock in self._locks:
            os.close(lock)

    def _start_guard(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        words = [str(ROOT), str(self.owner.pid), *map(str, self.folders)]
        kept = {k: v for k, v in os.environ.items() if k not in (FOLDER, SHARED_FOLDER)}
        with theirs:
            try:
                # The guard forks, so that a parent of this process does not kill it as a descendant.
                subprocess.run(
                    [sys.executable, "-I", "-S", "-c", BOOT, *words],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=kept,
                    start_new_session=True,  # a terminal's Ctrl-C or end must not reach it
                    timeout=START_LIMIT_S,
                    check=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                clear(self.folders)
                raise RunError(f"the guard of the run's temporary files did not start: {error}") from error
        return ours


@contextmanager
def opened() -> Iterator[Scratch]:
    """Make the scratch of a run, and clear it at the end.

    Raises:
        ClusterError: no folder can be made; the message says what to set.
    """
    scratch = Scratch()
    try:
        name_shared_memory()
        yield scratch
    finally:
        scratch.close()


_kept: list[Scratch] = []  # an actor's own scratch, for the life of its process


def join() -> None:
    """Use the scratch of the run that started the cluster in an actor's process, or make one.

    Raises:
        ClusterError: no folder can be made; the message says what to set.
    """
    if FOLDER not in os.environ:
        _kept.append(Scratch())
    name_shared_memory()


def name_shared_memory() -> None:
    """Make Python name its objects in shared memory after the run's scratch from now on, if there is one.

    Semaphores and blocks of shared memory have no folder, so `clear` finds them by name. Children that
    `multiprocessing` starts inherit the prefix of semaphores, but not that of blocks.
    """
    if FOLDER not in os.environ:
        return
    name = f"/{Path(os.environ[FOLDER]).name}"
    multiprocessing.current_process().__dict__["_config"]["semprefix"] = name
    # Python appends 16 random hexadecimal digits.
    vars(shared_memory).update(_SHM_NAME_PREFIX=f"{name}-", _SHM_SAFE_NAME_LENGTH=len(name) + 17)


def shared_folder() -> Path:
    """Return the folder for files in memory: the run's own, or /dev/shm outside a run."""
    return Path(os.environ.get(SHARED_FOLDER, SHARED_MEMORY))


def this_process() -> Owner:
    """Return the identity of the calling process."""
    began = start_ticks(Path("/proc/self/stat").read_text())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Owner(os.getpid(), began or 0, boot, os.stat("/proc/self/ns/pid").st_ino, os.geteuid())


# --- clearing up -----------------------------------------------------------------------------------


def sweep(here: Owner, roots: Sequence[Path]) -> None:
    """Clear the folders that dead owners left in `roots`."""
    for root in roots:
        for folder in root.glob(f"{PREFIX}*-*"):
            left = _left_in(folder, here)
            if left:
                clear(left)


def clear(folders: Sequence[Path]) -> bool:
    """Remove an owner's folders and its objects in shared memory; return whether the folders are gone."""
    name = folders[0].name
    beginnings = [f"{name}-", f"sem.{name}-", *(file.name for file in folders[0].glob(f"{VLLM_RANKS}*"))]
    with suppress(OSError):  # there is no shared memory
        for entry in SHARED_MEMORY.iterdir():
            if entry.name.startswith(tuple(beginnings)) and entry.is_file():
                with suppress(OSError):  # gone meanwhile, or another user's
                    entry.unlink()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return not any(folder.exists() for folder in folders)


def _left_in(folder: Path, here: Owner) -> tuple[Path, ...]:
    """Return all folders of the dead process that made this one; () if it lives or is another user's."""
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != here.uid:
            return ()
        descriptor = os.open(folder / RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ()  # removed meanwhile, or not a folder of a run
    try:
        told = parse_record(os.read(descriptor, MAX_RECORD_BYTES).decode(errors="replace"))
        if told is None or folder not in told[1] or os.fstat(descriptor).st_uid != here.uid:
            return ()
        owner, folders = told
        ours = tuple(one for one in folders if one == folder or _is_ours(one, here.uid))
        return ours if is_left(owner, here, _is_free(descriptor), _ticks_of(owner.pid)) else ()
    finally:
        os.close(descriptor)


def _is_ours(folder: Path, uid: int) -> bool:
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == uid


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or this file system has no locks
        return False
    return True


def _ticks_of(pid: int) -> int | None:
    try:
        return start_ticks(Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return None


def _roots(name: str) -> tuple[Path, ...]:
    """Return where to make the folders: on disk, and in shared memory if there is any."""
    usual = Path(tempfile.gettempdir())
    for root in (usual, Path("/tmp")):
        if len(os.fsencode(root / name)) <= MAX_FOLDER_BYTES and os.access(root, os.W_OK | os.X_OK):
            return (root, SHARED_MEMORY) if os.access(SHARED_MEMORY, os.W_OK) else (root,)
    most = MAX_FOLDER_BYTES - len(name) - 1
    raise ClusterError(
        f"TMPDIR={usual} is too long for the sockets of a run, and /tmp cannot be written; set TMPDIR to a "
        f"folder of at most {most} bytes"
    )


def _make(folder: Path, text: str) -> int:
    """Make a folder with its record; return the descriptor that holds its lock."""
    try:
        folder.mkdir(0o711)
        folder.chmod(0o711)  # whatever the umask
        descriptor = os.open(folder / RECORD, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, text.encode())
    except OSError as error:
        raise ClusterError(
            f"{folder}: the run's folder for temporary files cannot be made ({error.strerror}); free some "
            "space there, or set TMPDIR to another folder"
        ) from error
    return descriptor


def _set_environment(values: dict[str, str] | dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None  # so that Python reads TMPDIR again
