"""Reading of files that a user names: regular files of limited size; others raise an error of one line.

A pipe or a terminal would block a reader for ever, and a device or a file that has grown would fill the
memory. So this module opens or checks every file that a command line or a configuration names.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from echo_planes.errors import DataError, UserError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SETTINGS_BYTES = 256 * KIB  # limit of a file of settings, and of a run's record of them
MODEL_JSON_BYTES = 256 * MIB  # limit of a JSON file of a model folder; tokenizers have the largest
LOG_BYTES = 2 * GIB  # limit of a file that a run writes line by line

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def user_path(text: str) -> Path:
    """Return the path that a user wrote, with `~` expanded if that home folder exists."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def open_regular(
    path: Path, most_bytes: int, *, error: type[UserError] = DataError, advice: str = "give another file"
) -> BinaryIO:
    """Open a regular file for reading, without ever blocking on another process.

    Args:
        path: as a user named it.
        most_bytes: size limit.
        error: class of the error to raise.
        advice: end of the error message, with what the user can do.

    Raises:
        UserError: of class `error`: the file is missing, unreadable, not a regular file, or too large.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a writer blocks.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as why:
        reason = (why.strerror if isinstance(why, OSError) else None) or str(why)
        raise error(f"{path} cannot be read: {reason}; {advice}") from why
    file = os.fdopen(descriptor, "rb") if _is_regular(descriptor) else None
    if file is None:
        mode = os.fstat(descriptor).st_mode
        os.close(descriptor)
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise error(f"{path} cannot be read: it is {kind}, not a regular file; {advice}")
    if os.fstat(descriptor).st_size > most_bytes:
        file.close()
        raise _too_large(path, most_bytes, error, advice)
    return file


def check_regular(
    path: Path, most_bytes: int, *, error: type[UserError] = DataError, advice: str = "give another file"
) -> None:
    """Check a file as `open_regular` does, for a library that opens it by its name."""
    open_regular(path, most_bytes, error=error, advice=advice).close()


def read_bytes(
    path: Path, most_bytes: int, *, error: type[UserError] = DataError, advice: str = "give another file"
) -> bytes:
    """Return the bytes of a regular file. Arguments and errors are those of `open_regular`."""
    try:
        with open_regular(path, most_bytes, error=error, advice=advice) as file:
            data = file.read(most_bytes + 1)  # the size that `fstat` returns is 0 for files of /proc
    except OSError as why:
        raise error(f"{path} cannot be read: {why.strerror}; {advice}") from why
    if len(data) > most_bytes:
        raise _too_large(path, most_bytes, error, advice)
    return data


def read_text(
    path: Path, most_bytes: int, *, error: type[UserError] = DataError, advice: str = "give another file"
) -> str:
    """Return the UTF-8 text of a regular file, without a byte order mark; otherwise as `read_bytes`."""
    try:
        return read_bytes(path, most_bytes, error=error, advice=advice).decode("utf-8-sig")
    except UnicodeDecodeError as why:
        raise error(f"{path} is not UTF-8 text; {advice}") from why


def read_json(
    path: Path, most_bytes: int, *, error: type[UserError] = DataError, advice: str = "give another file"
) -> Any:
    """Parse the JSON of a regular file; otherwise as `read_bytes`."""
    try:
        text = read_bytes(path, most_bytes, error=error, advice=advice).decode("utf-8-sig")
    except UnicodeDecodeError as why:
        raise error(f"{path} is not JSON: it is no UTF-8 text; {advice}") from why
    return parse_json(text, str(path), error, advice)


def parse_json(text: str, where: str, error: type[UserError] = DataError, advice: str = "") -> Any:
    """Parse a JSON text.

    Raises:
        UserError: of class `error`: the text is not JSON, or has a number too long or nesting too deep.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as why:
        reason = getattr(why, "msg", None) or str(why).partition(";")[0]
        raise error(f"{where} is not JSON: {reason}" + (f"; {advice}" if advice else "")) from why


def in_units(num_bytes: int) -> str:
    """Return a size in its largest fitting unit: 268435456 gives '256 MiB'."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:,.4g} {name}"
    return f"{num_bytes} bytes"


def _is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _too_large(path: Path, most_bytes: int, error: type[UserError], advice: str) -> UserError:
    return error(f"{path} cannot be read: it has more than {in_units(most_bytes)}; {advice}")
