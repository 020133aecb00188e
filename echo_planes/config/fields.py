"""Declaration of settings: sections, common types, and what a setting says of itself.

That is whether a resume may change it, and with which other settings it counts (see `conditions`).
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
OFF = BeforeValidator(lambda value: "off" if value is False else value)  # YAML reads off as false
Day = Annotated[  # text in YAML
    dt.date, BeforeValidator(lambda value: dt.date.fromisoformat(value) if isinstance(value, str) else value)
]
Interval = Annotated[tuple[float, float], Field(strict=False)]  # YAML has lists, but no tuples

_MARK, _COUNTS = "on_resume", "counts"
_RENAMED = {  # old names of settings of runs, scenarios and plans, with the present ones
    "weights.anchor_every": "weights.snapshot_every",
    "weights.keep_anchors": "weights.keep_snapshots",
    "offers": "instance_types",
    "max_per_offer": "max_per_instance_type",
}


@dataclass(frozen=True, slots=True)
class Condition:
    """Other setting with which a setting counts, or does not."""

    key: str  # "sampling.router"; ".cloud" is a sibling, "..resources" one of the section around it
    values: tuple[object, ...]
    counts: bool  # with these values; else with all others
    instead: str  # end of the advice, behind the key


Counts = Condition | tuple[Condition, ...]  # of several, one must hold


def only_with(key: str, *values: object) -> Condition:
    """Return the condition that another setting has one of these values."""
    named = ("null" if value is None else str(value).lower() for value in values)
    return Condition(key, values, True, f"={' or '.join(named)}")


def not_with(key: str, *values: object, instead: str = " above 0") -> Condition:
    """Return the condition that another setting has none of these values; `instead`: what to set it to."""
    return Condition(key, values, False, instead)


class Section(BaseModel):
    """Base of a settings section. It refuses unknown keys, implicit conversions, NaN and infinity.

    `counts` is the condition under which the section counts, besides the key that it names.
    """

    counts: ClassVar[Condition | None] = None

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False
    )


def unknown_key(path: str, hint: str) -> str:
    """Return the message for an unknown key: its present name if it was renamed, else `hint`."""
    return f"this key is called {_RENAMED[path]} now" if path in _RENAMED else f"unknown key{hint}"


def with_present_keys(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return settings that an earlier version recorded, the renamed ones under their present keys."""
    sections = {name: dict(one) if isinstance(one, dict) else one for name, one in recorded.items()}
    for old, present in _RENAMED.items():
        name, _, key = old.partition(".")
        section = sections.get(name)
        if isinstance(section, dict) and key in section:
            section.setdefault(present.partition(".")[2], section.pop(key))
    return sections


def Fixed(default: Any, *, counts: Counts = (), **field: Any) -> Any:
    """Declare a setting that a resume must not change: recorded and trained data depend on it.

    `counts`: conditions of which one must hold, or the setting has no effect; (): it always has one.
    """
    marks: Any = {_MARK: "fixed", _COUNTS: counts}
    return Field(default, json_schema_extra=marks, **field)


def Free(default: Any, *, counts: Counts = (), **field: Any) -> Any:
    """Declare a setting that a resume may change; the resume reports the change. `counts`: as of `Fixed`."""
    marks: Any = {_MARK: "free", _COUNTS: counts}
    return Field(default, json_schema_extra=marks, **field)


def on_resume(field: FieldInfo) -> str:
    """Return "fixed" or "free", or "" for a field without that mark."""
    extra = field.json_schema_extra
    return str(extra.get(_MARK, "")) if isinstance(extra, dict) else ""


def conditions_of(field: FieldInfo) -> tuple[Condition, ...]:
    """Return the conditions of which one must hold for a field to count; (): it always counts."""
    extra: Any = field.json_schema_extra
    counts: Counts = extra.get(_COUNTS, ()) if isinstance(extra, dict) else ()
    return counts if isinstance(counts, tuple) else (counts,)
