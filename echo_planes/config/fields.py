"""Declaration of settings: sections, common types, and whether a resume may change it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
OFF = BeforeValidator(lambda value: "off" if value is False else value)  # YAML reads off as false
Interval = Annotated[tuple[float, float], Field(strict=False)]  # YAML has lists only

_MARK = "on_resume"


class Section(BaseModel):
    """A settings section: unknown keys, silent coercions and numbers that are none are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False
    )


def Fixed(default: Any, **field: Any) -> Any:
    """A setting of the run for good: what was recorded or trained under it would be something else."""
    return Field(default, json_schema_extra={_MARK: "fixed"}, **field)


def Free(default: Any, **field: Any) -> Any:
    """A setting that a resume may change, and tells."""
    return Field(default, json_schema_extra={_MARK: "free"}, **field)


def on_resume(field: FieldInfo) -> str:
    """ "fixed" or "free"; "" where the field does not say."""
    extra = field.json_schema_extra
    return str(extra.get(_MARK, "")) if isinstance(extra, dict) else ""
