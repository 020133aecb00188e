"""Samples: put together of the pieces in which they arrive, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from echo_planes.types import Group, Sample, Span


def joined(pieces: Sequence[Sample]) -> Sample:
    """One sample of its pieces, in order. Each counts its spans from its own first token."""
    spans: list[Span] = []
    start = 0
    for piece in pieces:
        for span in piece.spans:
            if spans and (spans[-1].version, spans[-1].digest) == (span.version, span.digest):
                spans[-1] = Span(spans[-1].start, start + span.stop, span.version, span.digest)
            else:
                spans.append(Span(start + span.start, start + span.stop, span.version, span.digest))
        start += len(piece.token_ids)
    return Sample(
        token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        spans=tuple(spans),
        finish_reason=pieces[-1].finish_reason if pieces else "",
        top_logprobs=tuple(chain.from_iterable(piece.top_logprobs for piece in pieces)),
    )


def is_whole(sample: Sample) -> bool:
    """Whether every token has its logprob, and belongs to exactly one span, in order."""
    length = len(sample.token_ids)
    return length == len(sample.logprobs) and cover(sample.spans, length)


def sampled_tokens(group: Group) -> int:
    """Tokens of a group that the policy sampled."""
    return sum(sum(trajectory.episode.response_mask) for trajectory in group.trajectories)


def cover(spans: Sequence[Span], length: int) -> bool:
    """Whether spans cover [0, length) exactly, in order."""
    end = 0
    for span in spans:
        if span.start != end or span.stop <= span.start:
            return False
        end = span.stop
    return end == length
