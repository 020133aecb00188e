"""Disk operations of the store, in one small class, and an append-only file on top of it.

Everything that makes bytes durable goes through `Files`, so that a test can put a disk in its place that
is full, or that loses what was not synced.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from echo_planes.errors import ClusterError, DataError

REPLAY_FOLDER = "replay"  # of a run's store, in the run folder
LOCK_NAME = "LOCK"

Piece = bytes | memoryview

_LIBC = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE = 1
_RESERVED_MIN_BYTES = 64 * 2**10  # small files are left alone
_RESERVED_MAX_BYTES = 8 * 2**20


class Files:
    """The disk. Every method raises OSError as the system does."""

    def open(self, path: Path, *, create: bool) -> int:
        """A file descriptor for reading and writing. `create`: the file must be new."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)

    def write(self, fd: int, pieces: Sequence[Piece], offset: int) -> int:
        """Write at `offset`; returns how many bytes were taken, perhaps not all."""
        return os.pwritev(fd, pieces, offset)

    def reserve(self, fd: int, start: int, size_bytes: int) -> None:
        """Set blocks aside for what will be written from `start` on; the file's own size stays."""
        sizes = ctypes.c_int64(start), ctypes.c_int64(size_bytes)
        if _LIBC.fallocate(fd, _FALLOC_FL_KEEP_SIZE, *sizes):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def sync(self, fd: int) -> None:
        """Returns when all that was written is durable, the file's size included."""
        os.fdatasync(fd)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Make the creation and renaming of files in `folder` durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class LogFile:
    """A file that only grows, and of which `size_bytes` are durable.

    Blocks are set aside before they are written, as many as the file has already and at most 8 MiB: the
    system then takes a third less time to accept the bytes. What is spare is given back by `close`.

    Args:
        path: the file.
        files: the disk.
        size_bytes: what is durable already; whatever lies behind is cut off before the first append.
        create: the file must be new. It is durable, and empty, once this returns.

    Raises:
        ClusterError: the file cannot be opened or created.
    """

    def __init__(self, path: Path, files: Files, size_bytes: int = 0, *, create: bool = False) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._files = files
        self._dirty = not create
        self._reserved_bytes = size_bytes  # from the beginning of the file
        self._can_reserve = True
        try:
            self._fd = files.open(path, create=create)
            if create:
                files.sync_folder(path.parent)
        except OSError as error:
            raise cannot_write(path, error) from error

    def append(self, messages: Iterable[Sequence[Piece]]) -> None:
        """Write messages behind one another; all of them are durable when this returns.

        After a failure the file is as it was before (or is made so before the next append, while the disk
        does not let it), and what was durable stays so.

        Raises:
            ClusterError: the disk is full or cannot be written; nothing was appended.
        """
        try:
            if self._dirty:
                self._cut()
            self._dirty = True
            end = self.size_bytes
            for pieces in messages:
                self._reserve(end, sum(map(len, pieces)))
                end = self._write(pieces, end)
            self._files.sync(self._fd)
        except OSError as error:
            # Also after a failed sync: the kernel then forgets which pages it owes the disk, so that a
            # second sync would prove nothing. The bytes are cut off and written again.
            self._cut_if_possible()
            raise cannot_write(self.path, error) from error
        self._dirty = False
        self.size_bytes = end

    def close(self) -> None:
        if self._reserved_bytes > self.size_bytes:
            self._cut_if_possible()
        os.close(self._fd)

    def _reserve(self, offset: int, size_bytes: int) -> None:
        """Before `size_bytes` are written at `offset`."""
        end = offset + size_bytes
        if end <= self._reserved_bytes or end < _RESERVED_MIN_BYTES or not self._can_reserve:
            return
        ahead = min(end, _RESERVED_MAX_BYTES)
        try:
            self._files.reserve(self._fd, offset, size_bytes + ahead)
        except OSError:
            # The file system cannot, or has not so much room. The write itself says whether there is enough.
            self._can_reserve = False
        else:
            self._reserved_bytes = end + ahead

    def _write(self, pieces: Sequence[Piece], offset: int) -> int:
        while pieces:
            written = self._files.write(self._fd, pieces, offset)
            offset += written
            pieces = _after(pieces, written)
        return offset

    def _cut(self) -> None:
        self._files.truncate(self._fd, self.size_bytes)
        self._reserved_bytes = self.size_bytes
        self._files.sync(self._fd)
        self._dirty = False

    def _cut_if_possible(self) -> None:
        try:
            self._cut()
        except OSError:
            self._dirty = True  # tried again before the next append; recovery would do it too


def _after(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """Rest of `pieces` behind their first `count` bytes."""
    left: list[Piece] = []
    for piece in pieces:
        if count < len(piece):
            left.append(memoryview(piece)[count:])
            count = 0
        else:
            count -= len(piece)
    return left


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Turns what the system says about a path into our error.

    Raises:
        ClusterError: an OSError came out of the block.
    """
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def stage(path: Path, files: Files, messages: Iterable[Sequence[Piece]]) -> Path:
    """Write what shall become `path` to a durable file beside it; returns that file.

    Raises:
        ClusterError: the disk is full or cannot be written.
    """
    partial = path.with_suffix(path.suffix + ".partial")
    with on_disk(path):
        partial.unlink(missing_ok=True)
    log = LogFile(partial, files, create=True)
    try:
        log.append(messages)
    finally:
        log.close()
    return partial


def write_whole(path: Path, files: Files, messages: Iterable[Sequence[Piece]]) -> None:
    """Write a file, whole and durable, in the place of what was there, or leave that as it is.

    Raises:
        ClusterError: the disk is full or cannot be written.
    """
    partial = stage(path, files, messages)
    with on_disk(path):
        files.replace(partial, path)
        files.sync_folder(path.parent)


def map_file(path: Path) -> memoryview:
    """A file as it is now, mapped for reading; released with its last reference.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as source:
            size_bytes = os.fstat(source.fileno()).st_size
            if size_bytes == 0:
                return memoryview(b"")  # an empty file cannot be mapped
            return memoryview(mmap.mmap(source.fileno(), size_bytes, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error


def read_part(path: Path, offset: int, size_bytes: int) -> memoryview:
    """A copy of a part of a file, shorter where the file ends before. Unlike a map, it outlives a cut.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as source:
            source.seek(offset)
            return memoryview(source.read(size_bytes))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error


class Lock:
    """One writer per store: an flock, which the system releases when its holder dies.

    Raises:
        ClusterError: somebody else holds it, and who; or the file cannot be written.
    """

    _MAX_BYTES = 1024

    def __init__(self, path: Path, holder: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = os.pread(self._fd, self._MAX_BYTES, 0).decode(errors="replace") or "an unknown process"
            os.close(self._fd)
            raise ClusterError(
                f"the replay store {path.parent} is in use by {who}; end that run or take another folder"
            ) from error
        name = json.dumps(holder)[: self._MAX_BYTES // 2]
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"run {name}, process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError as error:
            os.close(self._fd)
            raise cannot_write(path, error) from error

    def release(self) -> None:
        os.close(self._fd)


def cannot_read(path: Path, error: OSError) -> DataError:
    """The error of a file that is there and cannot be read."""
    return DataError(f"cannot read {path}: {error.strerror or error}; see to its permissions")


def cannot_write(path: Path, error: OSError) -> ClusterError:
    """The error of a disk that is full, or cannot be written for another reason."""
    return ClusterError(
        f"cannot write {path}: {error.strerror or error}; free some space, then the store goes on"
    )
