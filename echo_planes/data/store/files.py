"""Disk operations of the store, in one small class, and an append-only file on top of it.

Everything that makes bytes durable goes through `Files`, so that a test can replace it by a disk that is
full, or that loses bytes that were not synced.
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

REPLAY_FOLDER = "replay"  # folder of the run's store, in the run folder
LOCK_NAME = "LOCK"

Piece = bytes | memoryview

_LIBC = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE = 1
_RESERVED_MIN_BYTES = 64 * 2**10  # smaller files reserve nothing
_RESERVED_MAX_BYTES = 8 * 2**20


class Files:
    """The disk. Every method raises the system's OSError."""

    def open(self, path: Path, *, create: bool) -> int:
        """Return a file descriptor for reading and writing. `create`: the file must be new."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)

    def write(self, fd: int, pieces: Sequence[Piece], offset: int) -> int:
        """Write at `offset`; return how many bytes were written, which may be fewer than given."""
        return os.pwritev(fd, pieces, offset)

    def reserve(self, fd: int, start: int, size_bytes: int) -> None:
        """Reserve `size_bytes` of disk blocks from `start` on; the file's size does not change."""
        sizes = ctypes.c_int64(start), ctypes.c_int64(size_bytes)
        if _LIBC.fallocate(fd, _FALLOC_FL_KEEP_SIZE, *sizes):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def sync(self, fd: int) -> None:
        """Wait until all written bytes are durable, and the file's size too."""
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
    """Append-only file whose first `size_bytes` are durable.

    Disk blocks are reserved ahead of the writes, as many as the file has and at most 8 MiB; the system then
    takes a third less time for a write. `close` frees the unused blocks.

    Args:
        path: the file.
        files: the disk.
        size_bytes: bytes that are durable already; bytes behind them are cut off before the first append.
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
        """Append messages; all of them are durable when this returns.

        After a failure the new bytes are cut off, at once or, if the disk refuses that, before the next
        append. Bytes that were durable stay durable.

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
            # Also after a failed sync: the kernel then marks the pages as clean, so a second sync would
            # prove nothing. The bytes must be cut off and written again.
            self._cut_if_possible()
            raise cannot_write(self.path, error) from error
        self._dirty = False
        self.size_bytes = end

    def close(self) -> None:
        if self._reserved_bytes > self.size_bytes:
            self._cut_if_possible()
        os.close(self._fd)

    def _reserve(self, offset: int, size_bytes: int) -> None:
        """Reserve blocks before `size_bytes` are written at `offset`."""
        end = offset + size_bytes
        if end <= self._reserved_bytes or end < _RESERVED_MIN_BYTES or not self._can_reserve:
            return
        ahead = min(end, _RESERVED_MAX_BYTES)
        try:
            self._files.reserve(self._fd, offset, size_bytes + ahead)
        except OSError:
            # The file system cannot reserve, or lacks the space. If space is too small, the write will fail.
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
            self._dirty = True  # the next append tries again; after a crash recovery does it


def _after(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """Return `pieces` without their first `count` bytes."""
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
    """Turn an OSError about a path into a ClusterError.

    Raises:
        ClusterError: an OSError came out of the block.
    """
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def stage(path: Path, files: Files, messages: Iterable[Sequence[Piece]]) -> Path:
    """Write the future contents of `path` to a durable file beside it; return that file.

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
    """Write a file atomically and durably; after a failure the old file, if any, is unchanged.

    Raises:
        ClusterError: the disk is full or cannot be written.
    """
    partial = stage(path, files, messages)
    with on_disk(path):
        files.replace(partial, path)
        files.sync_folder(path.parent)


def map_file(path: Path) -> memoryview:
    """Map a file at its present size for reading; the map is released with its last reference.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: the file cannot be read.
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
    """Copy a part of a file, shorter if the file ends early. Unlike a map, the copy survives a truncation.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: the file cannot be read.
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
    """Lock for a single writer per store: an flock, which the system releases when its holder dies.

    Raises:
        ClusterError: another process holds it (the message names it), or the file cannot be written.
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
    """Return the error for a file that exists but cannot be read."""
    return DataError(f"cannot read {path}: {error.strerror or error}; see to its permissions")


def cannot_write(path: Path, error: OSError) -> ClusterError:
    """Return the error for a disk that is full, or cannot be written for another reason."""
    return ClusterError(
        f"cannot write {path}: {error.strerror or error}; free some space, then the store goes on"
    )
