"""Extensions by name: a setting takes a built-in name, or `package.module:NAME` of another package."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import AfterValidator

from echo_planes.errors import ConfigError, nearest

T = TypeVar("T")


def one_of(*names: str) -> AfterValidator:
    """Of a setting: one of these names, or the place of another one."""

    quoted = ", ".join(f"'{name}'" for name in names)

    def check(value: str) -> str:
        if value not in names and ":" not in value:
            raise ValueError(
                f"'{value}' is none of {quoted}, nor the package.module:NAME of one of your own"
                f"{nearest(value, list(names))}"
            )
        return value

    return AfterValidator(check)


def extension(key: str, name: str, table: Mapping[str, T], kind: type[T] | None = None) -> T:
    """The entry of that name, or what stands at `package.module:NAME`.

    Args:
        key: the setting, for messages.
        kind: what it must be an instance of, where that can be asked.

    Raises:
        ConfigError: there is nothing of that name or at that place, or it is something else.
    """
    if name in table:
        return table[name]
    module_name, separator, attribute = name.partition(":")
    where = f"{key}='{name}'"
    if not (separator and attribute and all(part.isidentifier() for part in module_name.split("."))):
        raise ConfigError(f"{where} is not of the form package.module:NAME")
    found: Any = getattr(imported(module_name, where), attribute, None)
    if found is None or (kind is not None and not isinstance(found, kind)):
        wanted = f"{kind.__name__} " if kind is not None else ""
        raise ConfigError(f"{where}: there is no {wanted}'{attribute}' in {module_name}")
    return found  # type: ignore[no-any-return]


def imported(module_name: str, where: str) -> ModuleType:
    """A module that a person named; `where`, for messages: by which word.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: no module named '{error.name}'; check the spelling and that it can be imported from "
            "the current folder"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything, SystemExit too
        raise ConfigError(
            f"{where}: importing {module_name} raised {in_words(error)} ({raised_at(error)}); correct it "
            "there"
        ) from error


def raised_at(error: BaseException, folder: Path | None = None) -> str:
    """`file:line` of the user's code where `error` came from: the deepest frame in `folder`, else of all."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = [frame for frame in frames if folder is not None and Path(frame.filename).parent == folder]
    deepest = (own or frames)[-1]
    return f"{deepest.filename}:{deepest.lineno}"


def in_words(error: BaseException) -> str:
    """The last line of an error's traceback."""
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return lines[0] if lines else type(error).__name__
