"""Incarnation of a rollout worker: a modelled engine, and the real worker's handling of leases around it.

It takes leases, goes on from other workers' partial rollouts, streams its tokens, finishes groups and hands
leases over. Only numbers of tokens matter: all ids are zero, and a finished answer has one token for each
version that it was sampled under.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo_planes.sim.engine_model import Engine
from echo_planes.sim.lengths import LengthModel, mix, uniform
from echo_planes.sim.scenario import InstanceTypeModel, SamplingModel
from echo_planes.types import (
    Episode,
    Group,
    Lease,
    LeaseTokens,
    PartialRollout,
    Reward,
    Sample,
    Span,
    Trajectory,
)

Versions = tuple[int, ...]
_SAME_TOKENS = 1e-6  # tolerance for rounding of marks
_RIGHT, _WRONG = Reward(1.0, True), Reward(0.0, False)


@dataclass(slots=True)
class Work:
    """Lease in progress. Counts of a sample's tokens include those of other workers."""

    lease: Lease
    lengths: Sequence[int]
    begun: float  # mark of the engine at the begin
    have: tuple[int, ...]  # tokens of each sample that other workers made
    versions: tuple[Versions, ...]  # versions under which they made them
    calls: dict[int, int]  # sample -> number of its call, as the data plane counts them
    sent: list[int]  # tokens of each sample that the data plane has
    paid: dict[str, int]  # tokens that the data plane has, by the machine that made them
    made: int = 0  # tokens that this worker made, set at the end of the lease

    @property
    def num_sent(self) -> int:
        """Tokens of this worker that the data plane has."""
        return sum(self.sent) - sum(self.have)


class Answers:
    """Maker of finished answers for the data plane; equal episodes are one object."""

    def __init__(self, lineage: str) -> None:
        self._lineage = lineage
        self._episodes: dict[Versions, Episode] = {}

    def digest(self, version: int) -> str:
        """Return a stand-in for a version's digest."""
        return f"sim:{version:08x}"

    def span(self, start: int, stop: int, version: int) -> Span:
        return Span(start, stop, version, self.digest(version))

    def episode(self, versions: Versions) -> Episode:
        episode = self._episodes.get(versions)
        if episode is None:
            spans = tuple(self.span(i, i + 1, version) for i, version in enumerate(versions))
            episode = Episode((0,) * len(spans), (True,) * len(spans), (0.0,) * len(spans), spans, "stop")
            self._episodes[versions] = episode
        return episode

    def trajectory(self, lease: Lease, sample: int, versions: Versions, right: bool) -> Trajectory:
        return Trajectory(
            f"{lease.group_id}/{sample}",
            lease.group_id,
            lease.prompt,
            self.episode(versions),
            _RIGHT if right else _WRONG,
            lease.worker_id,
            self._lineage,
        )


def is_solved(prompt_index: int, share: float) -> bool:
    """Return whether a prompt belongs to the share of prompts whose every answer is right."""
    return share > 0 and float(uniform(mix(np.array([prompt_index], np.uint64)))[0]) < share


class SimWorker:
    """Incarnation of a worker.

    Args:
        worker_id: its name.
        epoch: its incarnation.
        instance_type: its hardware.
        lengths: lengths of the answers.
        answers: makes the answers.
        now_s: time at which its engine is ready.
        prompt_tokens: of every prompt, where prefills take time.
    """

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        instance_type: InstanceTypeModel,
        *,
        lengths: LengthModel,
        answers: Answers,
        now_s: float,
        prompt_tokens: int = 0,
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self.worker_id = worker_id
        self.epoch = epoch
        self.engine = Engine(instance_type.engine, instance_type.max_groups, now_s)
        self.version = -1
        self.work: dict[str, Work] = {}  # by lease
        self._lengths = lengths
        self._answers = answers
        self._since: list[float] = []  # marks at which ...
        self._served: list[int] = []  # ... these versions began to serve

    # --- leases ----------------------------------------------------------------------------------

    def begin(self, lease: Lease, paid: dict[str, int]) -> None:
        """Begin a lease where other workers left it. The engine must be up to date.

        Args:
            lease: with its partial rollouts.
            paid: tokens of the partial rollouts, by the machine that made them.
        """
        lengths = self._lengths.tokens(lease.prompt.index)
        have = [0] * len(lengths)
        versions: list[Versions] = [()] * len(lengths)
        calls: dict[int, int] = {}
        for call, partial in enumerate(lease.partials):
            sample = partial.context[0]
            have[sample], calls[sample] = len(partial.sample.token_ids), call
            versions[sample] = tuple(span.version for span in partial.sample.spans)
        work = Work(lease, lengths, self.engine.mark, tuple(have), tuple(versions), calls, have, paid)
        self.work[lease.lease_id] = work
        self.engine.add(lease.lease_id, lengths, work.have, self._prompt_tokens)

    def take_ended(self) -> list[Work]:
        """Remove and return the leases whose samples have all ended. The engine must be up to date."""
        ended = [self.work.pop(lease_id) for lease_id in self.engine.take_ended()]
        for work in ended:
            work.made = sum(work.lengths) - sum(work.have)
        return ended

    def group(self, work: Work, sampling: SamplingModel) -> Group:
        """Return the result of an ended lease, with the share of right answers in `sampling`.

        Samples that differ only in their number are one object, the first of them.
        """
        lease, size = work.lease, len(work.lengths)
        shift = lease.prompt.index
        num_right = size if is_solved(shift, sampling.solved) else round(sampling.accuracy * size)
        # Which samples are right depends on the prompt; their number does not.
        rights = [(sample + shift) % size < num_right for sample in range(size)]
        if not work.calls and self._since[-1] <= work.begun:
            # The usual case: the group began here, and no version was installed since.
            newest, make = (self.version,), self._answers.trajectory
            made = {right: make(lease, rights.index(right), newest, right) for right in set(rights)}
            return Group(lease.group_id, tuple([made[right] for right in rights]))
        first: dict[tuple[Versions, bool], Trajectory] = {}
        trajectories = []
        for sample, right in enumerate(rights):
            kind = self._versions_of(work, sample), right
            if kind not in first:
                first[kind] = self._answers.trajectory(lease, sample, *kind)
            trajectories.append(first[kind])
        return Group(lease.group_id, tuple(trajectories))

    def drop(self, lease_id: str) -> Work:
        """Remove and return a lease that has not ended. The engine must be up to date."""
        work = self.work.pop(lease_id)
        work.made = sum(self.engine.remove(lease_id)) - sum(work.have)
        return work

    def unsent(self, work: Work) -> LeaseTokens:
        """Return the tokens of a running lease that the data plane lacks, and count them as sent."""
        pieces = []
        for sample, (length, had) in enumerate(zip(work.lengths, work.have, strict=True)):
            total = had + min(math.floor(self.engine.mark - work.begun + _SAME_TOKENS), length - had)
            start, work.sent[sample] = work.sent[sample], max(total, work.sent[sample])
            if total <= start:
                continue
            known = sample in work.calls
            number = work.calls.setdefault(sample, len(work.calls))
            spans = self._spans(work.begun + start - had, total - start)
            ids, logprobs = (0,) * (total - start), (0.0,) * (total - start)
            piece = Sample(ids, logprobs, spans, "stop" if total == length else "")
            pieces.append((number, PartialRollout(() if known else (sample,), piece, start)))
            work.paid[self.worker_id] = work.paid.get(self.worker_id, 0) + total - start
        return LeaseTokens(work.lease.lease_id, tuple(pieces))

    # --- versions --------------------------------------------------------------------------------

    def serve(self, version: int) -> None:
        """Serve a version from now on. The engine must be up to date."""
        self.version = version
        oldest = min((work.begun for work in self.work.values()), default=self.engine.mark)
        keep = max(bisect_right(self._since, oldest) - 1, 0)
        self._since = [*self._since[keep:], self.engine.mark]
        self._served = [*self._served[keep:], version]

    def _versions_of(self, work: Work, sample: int) -> Versions:
        """Return the versions under which all workers made an ended sample."""
        versions, made = work.versions[sample], work.lengths[sample] - work.have[sample]
        return versions + self._between(work.begun, work.begun + made) if made > 0 else versions

    def _between(self, start: float, stop: float) -> Versions:
        """Return the versions under which the tokens between two marks were made, oldest first."""
        first = max(bisect_right(self._since, start + _SAME_TOKENS) - 1, 0)
        last = first + 1
        while last < len(self._since) and self._since[last] < stop - _SAME_TOKENS:
            last += 1
        return tuple(self._served[first:last])

    def _spans(self, start: float, num_tokens: int) -> tuple[Span, ...]:
        """Return the spans of `num_tokens` tokens of a sample, of which the first begins at mark `start`."""
        place = max(bisect_right(self._since, start + _SAME_TOKENS) - 1, 0)
        spans: list[Span] = []
        done = 0
        while done < num_tokens:
            stop = num_tokens
            if place + 1 < len(self._since):
                stop = min(math.ceil(self._since[place + 1] - start - _SAME_TOKENS), num_tokens)
            if stop > done:
                spans.append(self._answers.span(done, stop, self._served[place]))
                done = stop
            place += 1
        return tuple(spans)
