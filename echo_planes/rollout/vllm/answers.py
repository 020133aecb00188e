"""Pieces of one sample as they arrive from vLLM, and the weights that sampled their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from echo_planes.errors import RunError
from echo_planes.types import Sample, Span

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

DENSE = "echo_planes_dense"  # in a request's extra arguments: dense attention, whatever the schedule
_FINISH_REASONS: dict[str | None, Literal["stop", "length", "abort"]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


@dataclass(slots=True)
class Answer:
    """One sample as its pieces arrive.

    Args:
        top_logprobs: number of top log-probabilities to keep per token.
        dense: the tokens are dense, whatever schedule the engine's labels name.
    """

    top_logprobs: int
    dense: bool = False
    num_tokens: int = 0

    def piece(self, completion: CompletionOutput, starts: Sequence[tuple[str, int]]) -> Sample:
        """Return the tokens that came with one output.

        Args:
            completion: vLLM's output for this sample.
            starts: for each set of weights, in order, its label and the first token that it sampled.

        Raises:
            RunError: vLLM ended the request with an error, or left out log-probabilities or versions.
        """
        tokens, positions = completion.token_ids, completion.logprobs or ()
        reason = completion.finish_reason
        if reason is not None and reason not in _FINISH_REASONS:
            raise RunError(f"the vLLM engine ended a request without a usable result: {completion}")
        if len(positions) != len(tokens):
            raise RunError(f"{len(tokens)} tokens came with {len(positions)} log-probabilities")
        first, self.num_tokens = self.num_tokens, self.num_tokens + len(tokens)
        return Sample(
            token_ids=tuple(tokens),
            logprobs=tuple(p[token].logprob for token, p in zip(tokens, positions, strict=True)),
            spans=_spans(starts, first, self.num_tokens, self.dense),
            finish_reason=_FINISH_REASONS[reason] if reason else "",
            top_logprobs=tuple(_top(position, self.top_logprobs) for position in positions)
            if self.top_logprobs
            else (),
        )


class Origins:
    """Origins of the tokens of one request: the weights that sampled them.

    vLLM 0.32 reports them only with a sample's last output. A partial rollout needs them earlier, so this
    class reads them from the state that vLLM's output processor keeps of the sample.

    Args:
        processor: output processor of the engine.
        request_id: id that was passed to `generate`.
    """

    def __init__(self, processor: OutputProcessor, request_id: str) -> None:
        self._processor = processor
        self._request_id = request_id
        self._states: dict[int, RequestState] = {}  # by sample

    def starts(self, completion: CompletionOutput) -> Sequence[tuple[str, int]]:
        """Return, for each set of weights in order, its label and the first token that it sampled."""
        if completion.weight_versions is not None:
            return [(run.version, run.start) for run in completion.weight_versions]
        if completion.index not in self._states:
            for internal_id in self._processor.external_req_ids.get(self._request_id, ()):
                state = self._processor.request_states[internal_id]
                self._states[state.request_index] = state
        state = self._states.get(completion.index)
        return state.weight_version_starts if state else ()


def _spans(starts: Sequence[tuple[str, int]], first: int, stop: int, dense: bool) -> tuple[Span, ...]:
    """Return the spans of tokens [first, stop) of a sample by their weights; positions count from `first`.

    Raises:
        RunError: the weights of some of these tokens are unknown.
    """
    ends = [start for _, start in starts[1:]] + [stop]
    spans = []
    for (name, start), end in zip(starts, ends, strict=True):
        if max(start, first) < min(end, stop):
            version, digest, schedule = name.split(" ")
            spans.append(
                Span(
                    max(start, first) - first,
                    min(end, stop) - first,
                    int(version),
                    digest,
                    -1 if dense else int(schedule),
                )
            )
    if sum(span.stop - span.start for span in spans) != stop - first:
        raise RunError(f"the vLLM engine does not say what weights made tokens {first} to {stop}: {starts}")
    return tuple(spans)


def _top(position: dict[int, Logprob], count: int) -> tuple[tuple[int, float], ...]:
    # vLLM adds the sampled token even where it is not among the top ones; its rank shows that.
    ranked = sorted((entry.rank or math.inf, token) for token, entry in position.items())
    return tuple((token, position[token].logprob) for rank, token in ranked[:count])


def label(version: int, digest: str, schedule: int = -1) -> str:
    """Return the label that vLLM marks tokens with: their weights, and their schedule's number."""
    return f"{version} {digest} {schedule}"
