"""The `task.*` settings of the poker task."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from echo_planes.data.tasks.environment import EpisodeOptions

from .frozen import PREFIX
from .table import MAX_SEATS
from .text import Style

NamedOpponent = Literal["calling-station", "tight-aggressive", "maniac", "mixed", "self"]
FrozenOpponent = Annotated[str, StringConstraints(pattern=f"^{PREFIX}.+")]


class PokerOptions(EpisodeOptions):
    """`task.*` settings of the poker task."""

    seats: int = Field(default=2, ge=2, le=MAX_SEATS, description="players at the table")
    stack_bb: int = Field(default=5, ge=2, le=1000, description="chips of each player, in big blinds")
    big_blind: int = Field(default=2, ge=2, le=1000, description="in chips; the small blind is half of it")
    opponent: NamedOpponent | FrozenOpponent = Field(
        default="calling-station",
        description="in the other seats; mixed: any of the three; self: the policy itself as it is now; "
        "frozen:FOLDER: a small model that never changes, on the worker's CPU",
    )
    style: Style = Field(default="compact", description="how a state is written: one line of signs, or words")
    max_turns: int = Field(default=16, ge=1, le=256, description="decisions of one hand; then it is cut off")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.big_blind % 2:
            raise ValueError(f"big_blind={self.big_blind} must be even: the small blind is half of it")
        return self
