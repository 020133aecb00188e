"""Refusal of settings without an effect: those that another setting makes the run ignore.

`fields` declares with which other settings a setting counts. Only what a command line gives is refused. A
default may be without effect, and so may what a resumed run has recorded, or a file other than its own group
suggests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from echo_planes.config.fields import Condition, Section, conditions_of
from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError, shown

COMES_TO: Mapping[str, Callable[[Config], Any]] = {  # settings whose default depends on other settings
    "learner.lr": lambda config: config.lr,
    "sampling.refill": lambda config: config.refill,
    "sampling.overlong": lambda config: config.overlong,
    "staleness.publish_every": lambda config: config.staleness.kappa,
    "objective.anchor": lambda config: config.objective.ratio_anchor,
}


def check_counted(config: Config, words: Container[str], files: Container[str]) -> None:
    """Check that every setting which is given counts.

    Args:
        config: the run's settings.
        words: dotted keys that the command line gives.
        files: those that files give which it names; their values count as given unless they are defaults.

    Raises:
        ConfigError: one does not count with the others.
    """
    for path, value, default, conditions in _settings(config, "", ()):
        is_given = path in words or (path in files and value != default)
        if value is None or not is_given:
            continue
        for some in conditions:
            found = {_absolute(one.key, path): one for one in some}
            values = {key: _value_at(config, key) for key in found}
            if path in found or any((values[key] in one.values) == one.counts for key, one in found.items()):
                continue
            others = " and ".join(f"{key}={_as_word(values[key])}" for key in found)
            instead = " or ".join(f"{key}{one.instead}" for key, one in found.items())
            raise ConfigError(
                f"{path}={_as_word(value)} has no effect with {others}; leave it out, or set {instead}"
            )


def paths_of(key: str, value: object) -> set[str]:
    """Return the dotted keys that `key=value` gives: of the sections around it, and of all in it."""
    parts = key.split(".")
    found = {".".join(parts[: n + 1]) for n in range(len(parts))}
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, inner in value.items():
            found |= paths_of(f"{key}.{name}", inner)
    return found


def _settings(
    section: BaseModel, path: str, around: tuple[tuple[Condition, ...], ...]
) -> Iterator[tuple[str, Any, Any, tuple[tuple[Condition, ...], ...]]]:
    """Yield path, value, default and conditions of every setting; one of each group of these must hold."""
    if isinstance(section, Section) and section.counts is not None:
        around = (*around, (section.counts,))
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), f"{path}.{name}" if path else name
        inner = dict(enumerate(value)) if isinstance(value, list) else {}
        if isinstance(value, BaseModel):
            yield from _settings(value, here, around)
        elif inner and isinstance(inner[0], BaseModel):
            for number, one in inner.items():
                yield from _settings(one, f"{here}.{number}", around)
        else:
            own = conditions_of(field)
            yield here, value, field.get_default(), (*around, own) if own else around


def _absolute(key: str, path: str) -> str:
    """Return the key of a condition of the setting at `path` from the root of the configuration."""
    outward = len(key) - len(key.lstrip("."))
    return ".".join([*path.split(".")[:-outward], key[outward:]]) if outward else key


def _value_at(config: Config, key: str) -> Any:
    """Return the value that a setting comes to; None for an entry that a mapping lacks."""
    if key in COMES_TO:
        return COMES_TO[key](config)
    node: Any = config
    for part in key.split("."):
        if isinstance(node, dict):
            node = node.get(part)
        else:
            node = node[int(part)] if isinstance(node, list) else getattr(node, part)
    return node


def _as_word(value: Any) -> str:
    """Return a value as a command line has it."""
    return value if isinstance(value, str) else shown(value) if isinstance(value, dict) else json.dumps(value)
