"""Scratch storage of a node: a folder of its own, and files that vanish with the process.

Memory-backed where there is room, because every byte is read again within the second by the children.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from echo_planes.cluster.scratch import shared_folder
from echo_planes.errors import ClusterError

PREFIX = "echo-node-"
LOCK_NAME = "lock"
MIN_ROOM_BYTES = 256 * 1024**2  # less than this in shared memory: use the temporary folder


def claim_folder() -> Path:
    """A fresh folder that only this user may enter; folders that dead nodes left behind are removed first.

    Raises:
        ClusterError: no folder can be made.
    """
    root = _root()
    sweep(root)
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    except OSError as error:
        raise ClusterError(f"cannot make a folder for weights in {root}: {error.strerror}") from error


def hold_folder(folder: Path) -> int:
    """Mark `folder` as in use for as long as this process lives; returns the lock's file descriptor."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def sweep(root: Path) -> None:
    """Remove the folders of nodes that were killed: their lock exists and nobody holds it."""
    for lock in root.glob(f"{PREFIX}*/{LOCK_NAME}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or removed meanwhile
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        else:
            remove_folder(lock.parent)
        finally:
            os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove a node's folder with all that is in it; no error when it is gone."""
    shutil.rmtree(folder, ignore_errors=True)


class SpoolFile:
    """The bytes of one publication, written and read at any offset. It has no name: it ends with the process.

    Args:
        folder: where the file system to use is.

    Raises:
        ClusterError: the file system is full or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ClusterError(f"cannot keep arriving weights in {folder}: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, self._descriptor)  # also where nobody closes it

    def write(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        """Put all of `data` at `offset_bytes`."""
        view = memoryview(data).cast("B")
        try:
            while len(view):
                num = os.pwrite(self._descriptor, view, offset_bytes)
                view, offset_bytes = view[num:], offset_bytes + num
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise ClusterError(
                    f"cannot keep arriving weights: {error.strerror}; free some space"
                ) from error
            raise

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Exactly `size_bytes` from `offset_bytes`, which must have been written before."""
        data = os.pread(self._descriptor, size_bytes, offset_bytes)
        if len(data) == size_bytes:
            return data
        parts = [data]  # the kernel may give less at a time, from 2 GiB on
        while sum(map(len, parts)) < size_bytes and parts[-1]:
            done = sum(map(len, parts))
            parts.append(os.pread(self._descriptor, size_bytes - done, offset_bytes + done))
        return b"".join(parts)

    def close(self) -> None:
        """Give the space back. May be called twice."""
        self._descriptor = -1
        self._close()


def _root() -> Path:
    """Shared memory where it exists with room, else the temporary folder."""
    shared = shared_folder()
    try:
        status = os.statvfs(shared)
    except OSError:
        return Path(tempfile.gettempdir())
    has_room = status.f_bavail * status.f_frsize >= MIN_ROOM_BYTES and os.access(shared, os.W_OK)
    return shared if has_room else Path(tempfile.gettempdir())
