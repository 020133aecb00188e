"""Extensions by name: a setting has a built-in name, or `package.module:NAME` of any importable module."""

from __future__ import annotations

import importlib
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import AfterValidator

from echo_planes.errors import ConfigError, nearest

T = TypeVar("T")
_LIBRARIES = (
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    Path(__file__).parents[1],
)


def one_of(*names: str) -> AfterValidator:
    """Return the validator of a setting that is one of these names, or a `package.module:NAME`."""

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
    """Return the entry of `table` with that name, or the object at `package.module:NAME`.

    Args:
        key: the setting, for messages.
        kind: class that the object must be an instance of; None: any callable.

    Raises:
        ConfigError: the name is neither in the table nor a `package.module:NAME`, its module cannot be
            imported, there is no such object in it, or the object is of another kind.
    """
    if name in table:
        return table[name]
    module_name, separator, attribute = name.partition(":")
    where = f"{key}='{name}'"
    if not (separator and attribute and all(part.isidentifier() for part in module_name.split("."))):
        raise ConfigError(f"{where} is not of the form package.module:NAME")
    module = imported(module_name, where)
    found: Any = getattr(module, attribute, None)
    if found is None:
        own = [one for one in vars(module) if not one.startswith("_")]
        raise ConfigError(f"{where}: there is no '{attribute}' in {module_name}{nearest(attribute, own)}")
    if not (callable(found) if kind is None else isinstance(found, kind)):
        wanted = "a function or a class" if kind is None else f"an instance of {kind.__name__}"
        raise ConfigError(f"{where}: it is a {type(found).__name__}, not {wanted}")
    return found  # type: ignore[no-any-return]


def imported(module_name: str, where: str) -> ModuleType:
    """Import a module that a user named; `where` shows the word that names it in messages.

    Raises:
        ConfigError: the module does not exist, or importing it raises.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        ending = "leave out '.py', and " if module_name.endswith(".py") else ""
        raise ConfigError(
            f"{where}: no module named '{error.name}'; {ending}check the spelling and that it can be "
            "imported from the current folder"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything, including SystemExit
        raise ConfigError(
            f"{where}: importing {module_name} raised {in_words(error)} ({raised_at(error)}); correct it "
            "there"
        ) from error


def raised_at(error: BaseException, folder: Path | None = None) -> str:
    """Return `file:line` of the deepest frame of `error` in a user's code, or of its deepest frame at all.

    A user's code is in `folder`, or in no library. For a SyntaxError it is the place of that.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = [f for f in frames if Path(f.filename).parent == folder or not _is_library(f.filename)]
    deepest = (own or frames)[-1]
    return f"{deepest.filename}:{deepest.lineno}"


def _is_library(filename: str) -> bool:
    """Return whether a frame's file belongs to Python, an installed package or this one."""
    return filename.startswith("<") or any(Path(filename).is_relative_to(folder) for folder in _LIBRARIES)


def in_words(error: BaseException) -> str:
    """Return the type and message of an error, in one line."""
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return lines[0] if lines else type(error).__name__
