"""Scratch storage of a node: a folder of its own, and files that vanish with the process.

They are memory-backed where there is room, because children read every byte within a second of its arrival.
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
    """Make a folder that only this user may enter, after removing those that dead nodes left behind.

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
    """Mark `folder` as in use while this process lives. Return the lock's file descriptor.

    Raises:
        ClusterError: the folder is another node's, or cannot be written.
    """
    lock, new = folder / LOCK_NAME, folder / f"{LOCK_NAME}.new"
    if lock.exists():
        raise ClusterError(f"{folder} is the folder of another node: give each node its own")
    try:
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(lock)  # `sweep` of another node sees the lock file only once it is held
    except OSError as error:
        raise ClusterError(f"cannot keep weights in {folder}: {error.strerror}") from error
    return descriptor


def sweep(root: Path) -> None:
    """Remove the folders of killed nodes: those with a lock file that no process holds."""
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
    """The bytes of one publication, at any offset, in an unnamed file that ends with the process.

    Args:
        folder: a folder on the file system to use.

    Raises:
        ClusterError: the file system is full or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ClusterError(f"cannot keep arriving weights in {folder}: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, self._descriptor)  # also without a call of `close`

    def write(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` at `offset_bytes`."""
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
        """Return `size_bytes` bytes from `offset_bytes`; fewer only where the file ends before."""
        data = os.pread(self._descriptor, size_bytes, offset_bytes)
        if len(data) == size_bytes:
            return data
        parts = [data]  # one call reads less than 2 GiB
        while sum(map(len, parts)) < size_bytes and parts[-1]:
            done = sum(map(len, parts))
            parts.append(os.pread(self._descriptor, size_bytes - done, offset_bytes + done))
        return b"".join(parts)

    def close(self) -> None:
        """Free the space. May be called twice."""
        self._descriptor = -1
        self._close()


def _root() -> Path:
    """Return the shared-memory folder if it has room, else the temporary folder."""
    shared = shared_folder()
    try:
        status = os.statvfs(shared)
    except OSError:
        return Path(tempfile.gettempdir())
    has_room = status.f_bavail * status.f_frsize >= MIN_ROOM_BYTES and os.access(shared, os.W_OK)
    return shared if has_room else Path(tempfile.gettempdir())
