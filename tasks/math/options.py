"""The `task.*` settings of the math task."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from echo_planes.data.tasks.adapter import RewardWeights, TaskOptions

from .grade import AnswerForm

SMALLEST_STEP = 8  # smallest step of operand size between two levels
Weight = Annotated[float, Field(ge=0, le=1)]


class CompositeWeights(RewardWeights):
    """Shares of the composite reward, PULSE appendix C.3, eq. 20."""

    correct: Weight = Field(default=0.7, description="share of the right answer")
    format: Weight = Field(default=0.15, description="share of the answer's form")
    thinking: Weight = Field(default=0.10, description="share of the thinking block")
    no_trailing: Weight = Field(default=0.05, description="share of ending with the answer")


class MathOptions(TaskOptions):
    """`task.*` settings of the math task."""

    dataset: Literal["addition", "gsm8k", "math500"] = Field(
        default="addition", description="where questions come from"
    )
    data: str | None = Field(
        default=None,
        description="file, or folder with train and test files; default $ECHO_PLANES_DATA/<dataset>",
    )
    eval_data: str | None = Field(default=None, description="held-out file or folder; default beside data")
    template: Literal["plain", "chat"] | None = Field(
        default=None,
        description="how a question becomes tokens; default plain for addition, chat for the others",
    )
    reward: Literal["exact", "composite"] = Field(
        default="exact", description="1 or 0, or PULSE's weighted parts"
    )
    weights: CompositeWeights = CompositeWeights()
    answer_form: AnswerForm = Field(
        default="boxed", description="where the answer stands: \\boxed{} or <answer> tags"
    )
    max_operand: int = Field(default=100, ge=8, le=1000, description="addition: operands are below this")
    level: Literal["any", "carry"] = Field(
        default="any", description="addition: any operands, or those whose ones digits add up to ten or more"
    )
    levels: int = Field(
        default=1, ge=1, le=100, description="addition: steps of operand size, a curriculum; 1: none"
    )
    next_level_at: float = Field(default=0.8, gt=0, le=1, description="addition: accuracy that ends a level")
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, description="longer prompts are passed over; null: none"
    )
    max_answer_chars: int = Field(default=256, ge=1, le=4096, description="longer answers are not verified")
    verifier_timeout_s: float = Field(default=3.0, gt=0, le=600, description="time to verify one answer")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dataset == "addition" and (self.reward != "exact" or self.data or self.eval_data):
            raise ValueError(
                "dataset=addition is generated and scored exactly: leave out reward, data, eval_data"
            )
        generated = {"max_operand", "levels", "next_level_at", "level"}
        if self.dataset != "addition" and self.model_fields_set & generated:
            raise ValueError(
                f"dataset={self.dataset} comes from files: leave out max_operand, levels, "
                "next_level_at and level, which are of dataset=addition"
            )
        if self.levels > 1 and self.max_operand < SMALLEST_STEP * self.levels:
            raise ValueError(
                f"levels={self.levels} of max_operand={self.max_operand} are too small to tell apart; lower "
                f"levels to {self.max_operand // SMALLEST_STEP} or raise max_operand"
            )
        if self.reward == "exact" and "weights" in self.model_fields_set:
            raise ValueError(
                "reward=exact uses no weights: set task.reward=composite or leave out task.weights"
            )
        return self
