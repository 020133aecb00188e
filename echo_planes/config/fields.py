"""Declaration of settings: sections, common types, and the mark whether a resume may change a setting."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

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

_MARK = "on_resume"
_RENAMED = {  # old names of settings of runs, scenarios and plans, with the present ones
    "weights.anchor_every": "weights.snapshot_every",
    "weights.keep_anchors": "weights.keep_snapshots",
    "offers": "instance_types",
    "max_per_offer": "max_per_instance_type",
}


class Section(BaseModel):
    """Base of a settings section. It refuses unknown keys, implicit conversions, NaN and infinity."""

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


def Fixed(default: Any, **field: Any) -> Any:
    """Declare a setting that a resume must not change: recorded and trained data depend on it."""
    return Field(default, json_schema_extra={_MARK: "fixed"}, **field)


def Free(default: Any, **field: Any) -> Any:
    """Declare a setting that a resume may change; the resume reports the change."""
    return Field(default, json_schema_extra={_MARK: "free"}, **field)


def on_resume(field: FieldInfo) -> str:
    """Return "fixed" or "free", or "" for a field without that mark."""
    extra = field.json_schema_extra
    return str(extra.get(_MARK, "")) if isinstance(extra, dict) else ""
