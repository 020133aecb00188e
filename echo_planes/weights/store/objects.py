"""Named byte strings in a local folder or in an S3-compatible bucket: the storage below a store.

A store's place is a path or `s3://bucket/prefix`, with the options `?region=`, `endpoint_override=` and
`scheme=` where needed. It never contains credentials: they come from the environment or from ~/.aws.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from pyarrow import fs

from echo_planes.config.files import user_path
from echo_planes.errors import ClusterError, ConfigError, WeightsError

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 20.0  # without receiving a byte
MAX_ATTEMPTS = 3  # of one S3 request, by the S3 client
CHECK_TIMEOUT_S = 5.0  # short, because a user waits for the check at the start
PROBE = "probe"  # object that `check_store` writes, reads back and removes
_NAME = re.compile(r"[A-Za-z0-9._%-]+(/[A-Za-z0-9._%-]+)*")
_OPTIONS = ("endpoint_override", "region", "scheme")
# Words in errors of the file system or of the S3 client, the error to raise for them, and its advice.
_ADVICE: tuple[tuple[tuple[str, ...], type[ConfigError] | type[ClusterError], str], ...] = (
    (
        ("ACCESS_DENIED", "INVALID_ACCESS_KEY", "SIGNATURE_DOES_NOT_MATCH", "status 403", "credentials"),
        ConfigError,
        "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and what they may do",
    ),
    (("NO_SUCH_BUCKET", "status 404"), ConfigError, "make the bucket, or correct its name"),
    (
        ("Read-only file system", "Permission denied", "Not a directory"),
        ClusterError,
        "it cannot be written: choose another folder, or change its owner or mount",
    ),
    (
        ("No space left", "Disk quota", "status 507"),
        ClusterError,
        "free some space or choose another place",
    ),
)

Piece = bytes | memoryview


class StoreUnreachableError(WeightsError):
    """Error when the store does not answer or refuses: whether the object is there is unknown."""


class ObjectReader(Protocol):
    """Reader of objects by name: `/`-separated, relative to the store's place."""

    def read(self, name: str, max_bytes: int) -> bytes:
        """Read a whole object.

        Raises:
            WeightsError: there is none, or it is longer than `max_bytes`, found before memory is allocated.
            StoreUnreachableError: the store cannot be read now.
        """
        ...

    def read_range(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Read `size_bytes` bytes of an object, from `offset_bytes`.

        Raises:
            WeightsError: there is no such object, or it ends before that.
            StoreUnreachableError: the store cannot be read now.
        """
        ...

    def list(self, prefix: str) -> list[str]:
        """Return the names of all objects in the folder `prefix`, at any depth; [] if there is none.

        Raises:
            StoreUnreachableError: the store cannot be read now.
        """
        ...


class Objects:
    """An `ObjectReader` that can write too, on any `pyarrow.fs` file system. Thread-safe for distinct names.

    Args:
        filesystem: the file system.
        root: folder, or bucket and prefix, that names are relative to.
        renames: whether to write an object under another name and rename it then. A folder needs that, so
            that an object appears only once it is whole; a bucket ensures it by itself.
    """

    def __init__(self, filesystem: Any, root: str, *, renames: bool) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._renames = renames

    def read(self, name: str, max_bytes: int) -> bytes:
        path = self._path(name)
        try:
            with self._fs.open_input_file(path) as file:
                size = file.size()
                if size > max_bytes:
                    raise WeightsError(f"{name} has {size} bytes; at most {max_bytes} make sense")
                return bytes(file.read(size))
        except OSError as error:
            raise _unread(name, error) from error

    def read_range(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        path = self._path(name)
        try:
            with self._fs.open_input_file(path) as file:
                if file.size() < offset_bytes + size_bytes:
                    raise WeightsError(
                        f"{name} has {file.size()} bytes; {offset_bytes + size_bytes} are needed"
                    )
                return bytes(file.read_at(size_bytes, offset_bytes))
        except OSError as error:
            raise _unread(name, error) from error

    def list(self, prefix: str) -> list[str]:
        selector = fs.FileSelector(self._path(prefix), recursive=True, allow_not_found=True)
        try:
            infos = self._fs.get_file_info(selector)
        except OSError as error:
            raise _unread(prefix, error) from error
        return sorted(info.path[len(self._root) + 1 :] for info in infos if info.type == fs.FileType.File)

    def exists(self, name: str) -> bool:
        """Return whether there is such an object.

        Raises:
            StoreUnreachableError: the store cannot be read now.
        """
        try:
            return bool(self._fs.get_file_info(self._path(name)).type == fs.FileType.File)
        except OSError as error:
            raise _unread(name, error) from error

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write an object from its bytes in order. After an error, try to remove the incomplete object.

        In a bucket, an error also removes an earlier object of that name.

        Raises:
            OSError: the store is full, read-only, unreachable, or refuses. Errors of `pieces` propagate.
        """
        path = self._path(name)
        target = f"{path}.partial" if self._renames else path
        if self._renames:
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)
        stream = self._fs.open_output_stream(target)
        try:
            with stream as file:
                for piece in pieces:
                    file.write(piece)
                    file.flush()  # a bucket's parts go in the background: without end in memory, and unseen
            if self._renames:
                self._fs.move(target, path)
        except BaseException:  # closing the stream may have created an incomplete object
            with contextlib.suppress(OSError):
                self._fs.delete_file(target)
            raise

    def delete(self, name: str) -> None:
        """Remove an object, if it exists.

        Raises:
            OSError: it could not be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(self._path(name))

    def delete_folder(self, name: str) -> None:
        """Remove a folder and its contents, if it exists.

        Raises:
            OSError: it could not be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_dir(self._path(name))

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name) or any(part in (".", "..") for part in name.split("/")):
            raise WeightsError(f"{name!r} is no name of an object in a store")
        return f"{self._root}/{name}"


def open_objects(
    url: str, *, request_timeout_s: float = REQUEST_TIMEOUT_S, max_attempts: int = MAX_ATTEMPTS
) -> Objects:
    """Return the objects at a store's place, without access to disk or network.

    Args:
        url: a path or s3://bucket/prefix.
        request_timeout_s: seconds without a byte from S3 after which a request fails.
        max_attempts: attempts of one S3 request.

    Raises:
        ConfigError: not a path and not an S3 URL of this form.
    """
    if not url.strip():
        raise ConfigError("weights.store is empty: give a folder, or s3://bucket/prefix")
    if "\0" in url:
        raise ConfigError("weights.store has a NUL character: give a folder, or s3://bucket/prefix")
    if "://" not in url:
        return Objects(fs.LocalFileSystem(), str(user_path(url).absolute()), renames=True)
    scheme = urlsplit(url).scheme
    if scheme != "s3":
        raise ConfigError(f"weights.store={url}: {scheme}:// is not supported; give a folder or s3://bucket")
    return _open_s3(url, request_timeout_s, max_attempts)


def _open_s3(url: str, request_timeout_s: float, max_attempts: int) -> Objects:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            "weights.store holds credentials: put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "and leave only s3://bucket/prefix"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown or not parts.netloc:
        what = f"unknown option {unknown[0]!r}" if unknown else "no bucket"
        raise ConfigError(
            f"weights.store={url}: {what}; write s3://bucket/prefix?{'=...&'.join(_OPTIONS)}=..."
        )
    prefix = [part for part in parts.path.split("/") if part]
    if any(part in (".", "..") for part in prefix):
        raise ConfigError(f"weights.store={url}: write the prefix as plain names")
    try:
        filesystem = _s3(request_timeout_s, max_attempts, options)
    except ValueError as error:
        raise ConfigError(f"weights.store={url}: {one_line(error)}") from error
    return Objects(filesystem, "/".join((parts.netloc, *prefix)), renames=False)


def _s3(request_timeout_s: float, max_attempts: int, options: dict[str, str]) -> Any:
    return fs.S3FileSystem(
        connect_timeout=min(CONNECT_TIMEOUT_S, request_timeout_s),
        request_timeout=request_timeout_s,  # for the S3 client: time without receiving a byte
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=max_attempts),
        **options,
    )


def check_store(url: str, *, writes: bool, need_bytes: int = 0, timeout_s: float = CHECK_TIMEOUT_S) -> None:
    """Check that a store works: write, read back and remove a small object, or only list it.

    Args:
        url: as for `open_objects`.
        writes: whether this process will write; if not, the check only lists publications.
        need_bytes: free space that the first snapshot needs; checked only in a local folder.
        timeout_s: seconds without a byte from S3 after which the check fails.

    Raises:
        ConfigError: the place or the credentials are wrong or missing.
        ClusterError: the store is full, read-only or cannot be reached.
    """
    objects = open_objects(url, request_timeout_s=timeout_s, max_attempts=1)
    try:
        if "://" not in url:
            _check_folder(url, writes, need_bytes)
        if writes:
            objects.write(PROBE, [PROBE.encode()])
            objects.read(PROBE, len(PROBE))
            objects.delete(PROBE)
        else:
            objects.list("publications")
    except (OSError, WeightsError) as error:
        raise _diagnosis(url, one_line(error)) from error


def _check_folder(url: str, writes: bool, need_bytes: int) -> None:
    folder = user_path(url).absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"weights.store={url} is a file: give a folder")
    if not writes:
        if not folder.is_dir():
            raise ConfigError(f"weights.store={url}: there is no such folder; check the path or mount it")
        return
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    free = os.statvfs(nearest).f_bavail * os.statvfs(nearest).f_frsize
    if free < need_bytes:
        raise ClusterError(
            f"weights.store={url}: {free / 1e6:,.0f} MB free, but one full snapshot takes "
            f"{need_bytes / 1e6:,.0f} MB; free some space or choose another folder"
        )


def _diagnosis(url: str, reason: str) -> ConfigError | ClusterError:
    """Return an error for `reason`, with advice for the user."""
    for words, kind, advice in _ADVICE:
        if any(word in reason for word in words):
            return kind(f"weights.store={url}: {reason}; {advice}")
    return ClusterError(
        f"weights.store={url} cannot be used: {reason}; check that it can be reached from here"
    )


def one_line(error: BaseException) -> str:
    """Return an error's first line, without the details that S3 clients append."""
    text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__


def _unread(name: str, error: OSError) -> WeightsError:
    if isinstance(error, FileNotFoundError):
        return WeightsError(f"{name} is missing from the store")
    return StoreUnreachableError(f"{name} cannot be read: {one_line(error)}")
