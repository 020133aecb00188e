"""A run's temporary files: a folder on disk and one in shared memory, cleared however the run ends.

Whoever starts a run makes them, named after its process id and start time, and holds a lock in each while it
lives; its processes inherit the one on disk as TMPDIR. On a cluster that somebody else started, each actor
does so for its own processes. A small process beside the owner clears both as soon as that has ended, by
kill -9 too (`scratch_guard.py`). What is left where the guard was killed as well, or the machine went down,
the next start clears: by the owner that is recorded inside, never by name alone.
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
# In the environment of every process of a run: its two folders.
FOLDER, SHARED_FOLDER = "ECHO_PLANES_SCRATCH", "ECHO_PLANES_SHARED"
# The longest socket beneath it is <folder>/p/ray/session_<42 characters>/sockets/plasma_store, and the
# address of a Unix socket has 107 bytes.
MAX_FOLDER_BYTES = 37
MAX_RECORD_BYTES = 4096
CLEAR_LIMIT_S = 10.0  # for the guard to end what is left and clear up
START_LIMIT_S = 30.0  # a fresh interpreter on a busy machine
VLLM_RANKS = "vllm_dist_"  # vLLM names its ranks' shared memory after their file of this name
ROOT = Path(__file__).resolve().parents[2]
# -I -S: the guard starts in milliseconds and imports nothing but this package.
BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from echo_planes.cluster.scratch_guard import main; main(sys.argv[1:])"
)


# --- who owns what: decisions ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from all that ever have its id.

    Args:
        start_ticks: when it began, clock ticks since the machine started.
        boot: id of that start of the machine.
        pid_namespace: of the container that counts its id.
    """

    pid: int
    start_ticks: int
    boot: str
    pid_namespace: int
    uid: int

    @property
    def name(self) -> str:
        """Of its folders."""
        return f"{PREFIX}{self.pid}-{self.start_ticks:x}"


def start_ticks(stat_line: str) -> int | None:
    """Start of a process in clock ticks, by /proc/PID/stat; None for one that has ended, not yet reaped."""
    fields = stat_line.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_left(owner: Owner, here: Owner, lock_is_free: bool, now_ticks: int | None) -> bool:
    """Whether a folder is what a dead process left, and ours to clear.

    Args:
        owner: who made it.
        here: the process that asks.
        lock_is_free: nobody holds the folder's lock. Also true for a moment while it is being made.
        now_ticks: when the process began that has the owner's id here and now; None where there is none.
    """
    if owner.uid != here.uid or not lock_is_free:
        return False
    if (owner.boot, owner.pid_namespace) != (here.boot, here.pid_namespace):
        return True  # ids of elsewhere say nothing here; the lock does
    return now_ticks != owner.start_ticks


def parse_record(text: str) -> tuple[Owner, tuple[Path, ...]] | None:
    """Parse what `record` wrote; None if it is no such thing, or names folders that are not the owner's."""
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
    """Text that is written into each of the owner's folders."""
    return json.dumps({**asdict(owner), "folders": [str(folder) for folder in folders]})


# --- one process's ---------------------------------------------------------------------------------


class Scratch:
    """The folders of this process and of all that it starts. Use `opened`, or `join`."""

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
        """On disk. Others may pass through, as sandboxed programs must that run as another user."""
        return self.folders[0]

    @property
    def private(self) -> Path:
        """A folder in it that nobody else may enter."""
        return self.folder / "p"

    def close(self) -> None:
        """Clear everything, after whatever of this run is still alive has been ended."""
        _set_environment(self._before)
        with suppress(OSError):  # the guard was killed
            self._line.shutdown(socket.SHUT_WR)
            self._line.settimeout(CLEAR_LIMIT_S)
            self._line.recv(1)  # ends when the guard does
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
                # It forks, so that no parent of ours takes it for our child and kills it beside us.
                subprocess.run(
                    [sys.executable, "-I", "-S", "-c", BOOT, *words],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=kept,
                    start_new_session=True,  # Ctrl-C and the end of a terminal are not for it
                    timeout=START_LIMIT_S,
                    check=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                clear(self.folders)
                raise RunError(f"the guard of the run's temporary files did not start: {error}") from error
        return ours


@contextmanager
def opened() -> Iterator[Scratch]:
    """The scratch of a run, cleared at the end.

    Raises:
        ClusterError: no folder can be made; the message says what to set.
    """
    scratch = Scratch()
    try:
        name_shared_memory()
        yield scratch
    finally:
        scratch.close()


_kept: list[Scratch] = []  # an actor's own, as long as its process lives


def join() -> None:
    """In an actor's process: take part in the scratch of the run that started the cluster, or make one.

    Raises:
        ClusterError: no folder can be made; the message says what to set.
    """
    if FOLDER not in os.environ:
        _kept.append(Scratch())
    name_shared_memory()


def name_shared_memory() -> None:
    """Name what Python makes in shared memory from now on after the run's scratch, if there is one.

    Semaphores and blocks of shared memory have no folder, so their names must say whose they are. Children
    by `multiprocessing` inherit the one for semaphores alone.
    """
    if FOLDER not in os.environ:
        return
    name = f"/{Path(os.environ[FOLDER]).name}"
    multiprocessing.current_process().__dict__["_config"]["semprefix"] = name
    # 16 hexadecimal digits follow, at random.
    vars(shared_memory).update(_SHM_NAME_PREFIX=f"{name}-", _SHM_SAFE_NAME_LENGTH=len(name) + 17)


def shared_folder() -> Path:
    """Folder for files in memory: the run's own, or all of shared memory where no run is on."""
    return Path(os.environ.get(SHARED_FOLDER, SHARED_MEMORY))


def this_process() -> Owner:
    """The calling one."""
    began = start_ticks(Path("/proc/self/stat").read_text())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Owner(os.getpid(), began or 0, boot, os.stat("/proc/self/ns/pid").st_ino, os.geteuid())


# --- clearing up -----------------------------------------------------------------------------------


def sweep(here: Owner, roots: Sequence[Path]) -> None:
    """Clear what dead owners left in `roots`."""
    for root in roots:
        for folder in root.glob(f"{PREFIX}*-*"):
            left = _left_in(folder, here)
            if left:
                clear(left)


def clear(folders: Sequence[Path]) -> bool:
    """Remove an owner's folders and all that bears their name in shared memory. Whether they are gone."""
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
    """The folders of the dead process that made this one; none if it lives, or if it is not ours."""
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != here.uid:
            return ()
        descriptor = os.open(folder / RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ()  # removed meanwhile, or not one of these
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
    """On disk, and in shared memory where there is any."""
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
    """Make a folder with its record; the descriptor that holds its lock."""
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
    tempfile.tempdir = None  # looked up again
