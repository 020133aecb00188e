"""What vLLM says of one sample, collected until it is whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from echo_planes.errors import RunError
from echo_planes.types import Sample, Span

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, WeightVersionSpan

_FINISH_REASONS: dict[str | None, Literal["stop", "length", "abort"]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


@dataclass(slots=True)
class Answer:
    """One sample as its chunks arrive."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[dict[int, Logprob]] = field(default_factory=list)
    last: CompletionOutput | None = None

    def add(self, completion: CompletionOutput) -> None:
        self.token_ids.extend(completion.token_ids)
        self.positions.extend(completion.logprobs or ())
        self.last = completion

    def sample(self, top_logprobs: int) -> Sample:
        """The finished sample.

        Raises:
            RunError: vLLM ended the request with an error, or said too little about its tokens.
        """
        last = self.last
        reason = _FINISH_REASONS.get(last.finish_reason) if last else None
        if last is None or reason is None or last.weight_versions is None:
            raise RunError(f"the vLLM engine ended a request without a usable result: {last}")
        if len(self.positions) != len(self.token_ids):
            raise RunError(f"{len(self.token_ids)} tokens came with {len(self.positions)} log-probabilities")
        return Sample(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(
                position[token].logprob
                for token, position in zip(self.token_ids, self.positions, strict=True)
            ),
            spans=tuple(_span(run) for run in last.weight_versions),
            finish_reason=reason,
            top_logprobs=tuple(_top(position, top_logprobs) for position in self.positions)
            if top_logprobs
            else (),
        )


def _top(position: dict[int, Logprob], count: int) -> tuple[tuple[int, float], ...]:
    # The sampled token comes along even where it is not among the top ones; its rank tells.
    ranked = sorted((entry.rank or math.inf, token) for token, entry in position.items())
    return tuple((token, position[token].logprob) for rank, token in ranked[:count])


def label(version: int, digest: str) -> str:
    """What vLLM calls the weights: it stamps every token with it."""
    return f"{version} {digest}"


def _span(run: WeightVersionSpan) -> Span:
    version, _, digest = run.version.partition(" ")
    return Span(run.start, run.end, int(version), digest)
