"""The policy is what is served: a forward computes with weights that are bf16 values, in any arithmetic.

An update at the rates of real models is far below a weight's bf16 step. Workers get weights in bf16, so a
learner that computed with its fp32 masters would train a policy that nobody serves (`docs/learning.md`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echo_planes.errors import ModelError

PUBLISHED = torch.bfloat16  # type of the weights that workers get


def as_published(name: str, weight: Tensor) -> Tensor:
    """Return a weight of a model's files as it is published: in bf16, to nearest even.

    Raises:
        ModelError: a finite weight is beyond the largest bf16 value.
    """
    values = weight.to(PUBLISHED)
    if torch.isfinite(weight).ne(torch.isfinite(values)).any():
        raise ModelError(
            f"weight {name!r} is up to {weight[torch.isfinite(weight)].abs().max():.4g}, beyond what bf16 "
            "holds, in which weights are published; scale it down"
        )
    return values


class MasterAdamW(torch.optim.AdamW):
    """AdamW over fp32 masters, which it keeps; the parameters hold their published values.

    For parameters in fp32. Gradients at the rounded weights go to the masters unchanged ("straight through").
    Masters are state of the optimizer ("master"), so checkpoints hold them.

    Example: a master 1.0 that moves by 1e-5 a step leaves its parameter at 1.0 for the first 390 steps, since
    the next bf16 value is 1.0078; then the parameter becomes 1.0078.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update masters, and write their published values to the parameters."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        shown = [p.data for p in parameters]
        for parameter in parameters:
            # Taken out of the state while AdamW looks whether it has any.
            master = self.state[parameter].pop("master", None)
            parameter.data = parameter.data.clone() if master is None else master
        try:
            return super().step(closure)
        finally:
            for parameter, values in zip(parameters, shown, strict=True):
                self.state[parameter]["master"] = parameter.data
                values.copy_(parameter.data.to(PUBLISHED))
                parameter.data = values
