"""Settings of sparse attention in rollouts (Sparrow): budgets, their audit and the guard on them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from echo_planes.config.fields import OFF, Free, PositiveInt, Section, not_with

Pages = Annotated[int, Field(ge=0)]


class SparseConfig(Section):
    """Block-sparse decoding by a schedule of KV budgets, as `echo_planes.sparsity calibrate` writes it."""

    counts = not_with("sparse.schedule", [], instead=" (sparse=FILE.yaml)")

    schedule: list[Pages] = Free(
        [],
        description="pages that a sampled token reads, by bin of its sequence's length, the last for all "
        "longer ones; 0: all of them; []: dense attention, and the other keys say nothing",
    )
    target: float = Free(
        0.86, gt=0, lt=1, description="least acceptance of a bin's tokens, but for a share of `tail_share`"
    )
    tail_share: float = Free(
        0.05,
        gt=0,
        lt=1,
        description="largest share of a bin's tokens below target; 0.05: the 5th percentile keeps it",
    )
    guard: Annotated[Literal["act", "warn", "off"], OFF] = Free(
        "act", description="raise the budget of a bin whose acceptance is below target; only tell; neither"
    )
    audit_share: float = Free(
        0.02, ge=0, le=1, description="share of answers that are compared with dense attention"
    )
    page_tokens: Literal[16, 32] = Free(
        16, description="tokens of a page of the KV cache; 32 is faster on CPUs with AMX"
    )
    bin_tokens: PositiveInt = Free(2000, description="sequence lengths in a bin")
    first_pages: int = Free(1, ge=0, description="first pages, always read")
    last_pages: PositiveInt = Free(2, description="last pages, always read")
    dense_layers: int = Free(2, ge=0, description="first layers, which read everything")
    distill_rank: int = Free(
        0,
        ge=0,
        description="rank of an adapter that sparse attention alone computes with, trained towards "
        "dense attention beside the policy (DistillSparse); 0: none",
    )
    distill_lr: float = Free(
        1e-4, counts=not_with("sparse.distill_rank", 0), gt=0, description="learning rate of that adapter"
    )
    distill_share: float = Free(
        0.25,
        counts=not_with("sparse.distill_rank", 0),
        gt=0,
        le=1,
        description="share of a step's answers that it is trained on",
    )
    model: str | None = Free(None, description="shape of the model that the schedule was calibrated for")

    @model_validator(mode="after")
    def _reads_enough(self) -> SparseConfig:
        kept = self.first_pages + self.last_pages
        for place, pages in enumerate(self.schedule):
            if 0 < pages < kept:
                raise ValueError(
                    f"schedule: bin {place} reads {pages} pages, but the first {self.first_pages} and the "
                    f"last {self.last_pages} are always read; give at least {kept}, or 0 for all"
                )
        if self.schedule and self.guard != "off" and not self.audit_share:
            raise ValueError(
                f"guard={self.guard} goes by audited answers, and audit_share=0 audits none; raise it, or "
                "set guard=off"
            )
        return self
