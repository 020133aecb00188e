"""Faults in a run of the fault campaign, as its plan (`draws.py`) lists them.

The plan adds these faults to those of a scenario (`faults.py`):

- workers that are cut off, given up, and come back with results of an old epoch;
- messages that are lost, late or duplicated, and results that are invalid;
- worker clocks that run slow or fast: the worker streams and renews too rarely or too often and measures
  itself wrongly (only the rate matters, because no time of a worker's clock reaches the data plane);
- recalled leases, installs that never happen, and late installs of an old publication;
- instance types of which no machine comes, and a full disk.

After `calm_s` no new fault begins, so that every run can end. Ends of workers may still be reported late or
twice, and a missing install still ends its worker.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from echo_planes.errors import ClusterError, LeaseError
from echo_planes.sim.data_plane import SimDataPlane
from echo_planes.sim.draws import Plan
from echo_planes.sim.invariants import WatchedBuffer
from echo_planes.sim.kernel import Kernel
from echo_planes.sim.log import InvariantError, Log
from echo_planes.sim.market import Market, Tenant
from echo_planes.sim.scenario import InstanceTypeModel
from echo_planes.sim.worker import Work
from echo_planes.types import Group, Lease, LeaseTokens, PartialRollout, Receipt, Sample, Span

LATE_S = 40.0  # longest delay of a late message


# --- messages ------------------------------------------------------------------------------------


class ChaosDataPlane(SimDataPlane):
    """Data plane behind a bad network, with a buffer that is checked against its model.

    It gives every streamed token its own number, so that the model can distinguish all tokens.
    """

    buffer_type = WatchedBuffer
    plan: Plan
    rng: random.Random

    def begin(self, plan: Plan, rng: random.Random) -> None:
        """Set the plan of faults before the run begins."""
        self.plan, self.rng = plan, rng
        self._num_tokens = 0
        self.watched.log = Log(lambda: self._kernel.now_s)

    @property
    def watched(self) -> WatchedBuffer:
        """Buffer with its model.

        Raises:
            InvariantError: the buffer has no model.
        """
        if not isinstance(self._buffer, WatchedBuffer):
            raise InvariantError("the data plane has a buffer without a watcher")
        return self._buffer

    @property
    def now_s(self) -> float:
        return self._kernel.now_s

    def submit(self, worker_id: str, epoch: int, lease: Lease, group: Group) -> Receipt:
        plan = self.plan
        if self._happens(plan.spoilt):
            group = self._spoilt(group)
        if self._happens(plan.lost):
            return Receipt(lease.lease_id, accepted=False, reason="lost on the way")
        if self._happens(plan.late):
            handed_in = partial(self._submit, worker_id, epoch, lease, group)
            self._kernel.after(self.rng.uniform(0.0, LATE_S), handed_in)
            return Receipt(lease.lease_id, accepted=False, reason="on the way")
        receipt = self._submit(worker_id, epoch, lease, group)
        if self._happens(plan.twice):
            self._submit(worker_id, epoch, lease, group)
        return receipt

    def _submit(self, worker_id: str, epoch: int, lease: Lease, group: Group) -> Receipt:
        return super().submit(worker_id, epoch, lease, group)

    def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
        plan, numbered = self.plan, [self._numbered(message) for message in messages]
        if self._happens(plan.lost):
            return ()
        if self._happens(plan.late):
            sent = partial(super().stream, worker_id, epoch, numbered)
            self._kernel.after(self.rng.uniform(0.0, LATE_S), sent)
            return ()
        if self._happens(plan.twice):
            super().stream(worker_id, epoch, numbered)
        return super().stream(worker_id, epoch, numbered)

    def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
        numbered = [self._numbered(message) for message in messages]
        given = super().hand_over(worker_id, epoch, numbered)
        if self._happens(self.plan.twice):
            super().hand_over(worker_id, epoch, numbered)
        return given

    def installed(self, worker_id: str, version: int) -> None:
        super().installed(worker_id, version)
        if self._happens(self.plan.twice):
            super().installed(worker_id, version)

    def _enter(self, group: Group, version: int) -> None:
        if self._kernel.now_s >= self.plan.disk_full_s:
            raise ClusterError(
                f"group {group.group_id} cannot be written: no space left on the disk; make room and resume"
            )
        super()._enter(group, version)

    def _happens(self, share: float) -> bool:
        return share > 0 and self._kernel.now_s < self.plan.calm_s and self.rng.random() < share

    def _numbered(self, message: LeaseTokens) -> LeaseTokens:
        pieces = []
        for number, piece in message.pieces:
            first, self._num_tokens = self._num_tokens, self._num_tokens + len(piece.sample.token_ids)
            sample = replace(piece.sample, token_ids=tuple(range(first, self._num_tokens)))
            pieces.append((number, replace(piece, sample=sample)))
        return LeaseTokens(message.lease_id, tuple(pieces))

    def _spoilt(self, group: Group) -> Group:
        """Return a spoilt copy of a result, which the data plane must refuse."""
        first, others = group.trajectories[0], group.trajectories[1:]
        match self.rng.randrange(4):
            case 0:
                return Group(group.group_id, others)
            case 1:
                failed = replace(first, status="failed", error="it broke")
                return Group(group.group_id, (failed, *others))
            case 2:
                version = first.episode.spans[0].version + 1000
            case _:
                version = first.episode.spans[0].version
        span = Span(0, len(first.episode.response_ids), version, "forged")
        forged = replace(first, episode=replace(first.episode, spans=(span,)))
        return Group(group.group_id, (forged, *others))


class ChaosMarket(Market):
    """Market that can run dry, and that counts the cost of its machines itself.

    Arguments: those of `Market` without traces.
    """

    def __init__(
        self,
        instance_types: Mapping[str, InstanceTypeModel],
        kernel: Kernel,
        tenant: Tenant,
        rng: random.Random,
    ) -> None:
        super().__init__(instance_types, {}, kernel, tenant, rng)
        self._none_until_s: dict[str, float] = {}
        self._since_s: dict[str, float] = {}
        self._spent_usd = 0.0

    def spent_usd(self) -> float:
        """Return the cost of the machines up to now, in dollars."""
        running = sum(self._usd(worker_id) for worker_id in self._held)
        return self._spent_usd + running

    def held(self) -> Mapping[str, int]:
        """Return the number of held machines of each instance type."""
        return self._counts

    def dry_up(self, instance_type: str, lasts_s: float) -> None:
        """Grant no machine of an instance type for `lasts_s` seconds."""
        self._none_until_s[instance_type] = self._kernel.now_s + lasts_s
        self._kernel.after(lasts_s, partial(self._grant, instance_type))

    def available(self, instance_type: str) -> float:
        dry = self._kernel.now_s < self._none_until_s.get(instance_type, 0.0)
        return 0.0 if dry else super().available(instance_type)

    def _usd(self, worker_id: str) -> float:
        price = self._instance_types[self._held[worker_id].instance_type].usd_per_hour
        return price * (self._kernel.now_s - self._since_s[worker_id]) / 3600.0

    def _grant(self, instance_type: str) -> None:
        waiting = list(self._waiting[instance_type])
        super()._grant(instance_type)
        self._since_s |= {w: self._kernel.now_s for w in waiting if w in self._held}

    def _remove(self, worker_id: str, machine: Any) -> None:
        self._spent_usd += self._usd(worker_id)
        super()._remove(worker_id, machine)


# --- a worker that was given up ------------------------------------------------------------------


@dataclass(slots=True)
class Ghost:
    """Incarnation that was cut off and sends late messages."""

    worker_id: str
    epoch: int
    works: list[tuple[Work, Group]]  # its leases at the cut, each with its result
    span: Span  # span of one token under the version that it serves

    def speak(self, data: ChaosDataPlane, rng: random.Random) -> None:
        """Send a random message under the old epoch, sometimes about a lease that the ghost never had.

        Raises:
            InvariantError: the data plane accepted the message.
        """
        watched = data.watched
        now_s = data.now_s
        match rng.choice(("stream", "submit", "submit", "hand over", "pull", "claim")):
            case "pull" if not watched.is_there(self.worker_id, self.epoch):
                try:
                    watched.pull(self.worker_id, self.epoch, 1, now_s)
                except LeaseError:
                    return
            case "claim":  # claims the leases of the incarnation that replaced it
                theirs = [n for n, held in watched.held.items() if held.lease.worker_id == self.worker_id]
                messages = [LeaseTokens(name, ()) for name in theirs]
                if rng.random() < 0.5:
                    data.stream(self.worker_id, self.epoch, messages)
                else:
                    data.hand_over(self.worker_id, self.epoch, messages)
            case "submit" if self.works:
                work, group = self.works.pop(rng.randrange(len(self.works)))
                data.submit(self.worker_id, self.epoch, work.lease, group)
            case "stream" if self.works:
                work, _ = rng.choice(self.works)
                data.stream(self.worker_id, self.epoch, [self._more(work)])
            case "hand over" if self.works:
                work, _ = self.works.pop(rng.randrange(len(self.works)))
                data.hand_over(self.worker_id, self.epoch, [self._more(work)])

    def _more(self, work: Work) -> LeaseTokens:
        """Return a message with one more token of the first unfinished sample."""
        for sample, length in enumerate(work.lengths):
            if work.sent[sample] < length:
                known = sample in work.calls
                number = work.calls.setdefault(sample, len(work.calls))
                one = Sample((0,), (0.0,), (self.span,), "")
                piece = PartialRollout(() if known else (sample,), one, first=work.sent[sample])
                work.sent[sample] += 1
                return LeaseTokens(work.lease.lease_id, ((number, piece),))
        return LeaseTokens(work.lease.lease_id, ())
