"""The `task.*` settings of the code task."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from echo_planes.data.tasks.adapter import RewardWeights, TaskOptions

from .problems import Dataset


class CodeWeights(RewardWeights):
    """Shares of the composite reward, PULSE appendix C.3, eq. 21."""

    passed: float = Field(default=0.7, ge=0, le=1, description="share of the hidden tests that pass")
    syntax: float = Field(default=0.1, ge=0, le=1, description="it compiles")
    format: float = Field(default=0.1, ge=0, le=1, description="it stands in a block")
    thinking: float = Field(default=0.1, ge=0, le=1, description="there is a thinking block")


class CodeOptions(TaskOptions):
    """`task.*` settings of the code task."""

    dataset: Dataset = Field(default="functions", description="where problems come from")
    data: str | None = Field(default=None, description="file or folder; default $ECHO_PLANES_DATA/<dataset>")
    template: Literal["plain", "chat"] | None = Field(
        default=None, description="how a problem becomes tokens; default plain for functions, else chat"
    )
    reward: Literal["exact", "composite"] = Field(
        default="exact", description="1 if every test passes, or weighted parts"
    )
    weights: CodeWeights = CodeWeights()
    program_s: float = Field(default=5.0, gt=0, le=600, description="wall and CPU time of one program")
    interpreter: str | None = Field(
        default=None, description="Python of answers and tests, with its packages; default this one, without"
    )
    memory_mib: int = Field(default=256, ge=32, description="memory of one program")
    slots: int = Field(default=2, ge=1, le=64, description="programs at once, for each rewarding process")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dataset == "functions" and self.data:
            raise ValueError("dataset=functions is generated: leave out data")
        if self.reward == "exact" and "weights" in self.model_fields_set:
            raise ValueError(
                "reward=exact uses no weights: set task.reward=composite or leave out task.weights"
            )
        return self
