"""Faults in a run of the fault campaign, as its plan (`draws.py`) says.

Besides the faults of a scenario (`faults.py`) there are: workers that are cut off, given up, and
come back with results of an old epoch; messages that are lost, come late or twice; workers whose clock runs
slow or fast, so that they stream and renew too rarely or too often, and measure themselves wrongly (only its
rate matters: no moment of a worker's clock ever reaches the data plane); results that are no results; leases
that are recalled; installs that never happen, and ones of an old publication that come late; offers of which
no machine comes; a disk that is full. After `calm_s` nothing new goes wrong, so that every run can end; ends
of workers may still be told late or twice, and an install that never came ends its worker.
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
from echo_planes.sim.scenario import OfferModel
from echo_planes.sim.worker import Work
from echo_planes.types import Group, Lease, LeaseTokens, PartialRollout, Receipt, Sample, Span

LATE_S = 40.0  # so late a message comes at most


# --- messages ------------------------------------------------------------------------------------


class ChaosDataPlane(SimDataPlane):
    """A data plane behind a bad network, with the buffer held against its model.

    It numbers the tokens that are streamed, so that each can be told from all others.
    """

    buffer_type = WatchedBuffer
    plan: Plan
    rng: random.Random

    def begin(self, plan: Plan, rng: random.Random) -> None:
        """Set the plan of faults, before anything happens."""
        self.plan, self.rng = plan, rng
        self._num_tokens = 0
        self.watched.log = Log(lambda: self._kernel.now_s)

    @property
    def watched(self) -> WatchedBuffer:
        """The buffer with its model.

        Raises:
            InvariantError: there is none.
        """
        if not isinstance(self._buffer, WatchedBuffer):
            raise InvariantError("the data plane has a buffer that nobody watches")
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
        """A result that must be refused."""
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
    """A market of which no machine comes for a while, and that says what it has held at what price.

    Arguments: those of `Market`.
    """

    def __init__(
        self,
        offers: Mapping[str, OfferModel],
        kernel: Kernel,
        tenant: Tenant,
        rng: random.Random,
    ) -> None:
        super().__init__(offers, {}, kernel, tenant, rng)
        self._none_until_s: dict[str, float] = {}
        self._since_s: dict[str, float] = {}
        self._spent_usd = 0.0

    def spent_usd(self) -> float:
        """Cost of the machines up to now."""
        running = sum(self._usd(worker_id) for worker_id in self._held)
        return self._spent_usd + running

    def held(self) -> Mapping[str, int]:
        """Machines that are held of each offer."""
        return self._counts

    def dry_up(self, offer: str, lasts_s: float) -> None:
        """No machine of an offer comes for so long."""
        self._none_until_s[offer] = self._kernel.now_s + lasts_s
        self._kernel.after(lasts_s, partial(self._grant, offer))

    def available(self, offer: str) -> float:
        dry = self._kernel.now_s < self._none_until_s.get(offer, 0.0)
        return 0.0 if dry else super().available(offer)

    def _usd(self, worker_id: str) -> float:
        price = self._offers[self._held[worker_id].offer].usd_per_hour
        return price * (self._kernel.now_s - self._since_s[worker_id]) / 3600.0

    def _grant(self, offer: str) -> None:
        waiting = list(self._waiting[offer])
        super()._grant(offer)
        self._since_s |= {w: self._kernel.now_s for w in waiting if w in self._held}

    def _remove(self, worker_id: str, machine: Any) -> None:
        self._spent_usd += self._usd(worker_id)
        super()._remove(worker_id, machine)


# --- a worker that was given up ------------------------------------------------------------------


@dataclass(slots=True)
class Ghost:
    """An incarnation that was cut off, and goes on: what it says comes late.

    `works` are its leases as they were, with the result of each.
    """

    worker_id: str
    epoch: int
    works: list[tuple[Work, Group]]
    span: Span  # one token's, of the version it serves

    def speak(self, data: ChaosDataPlane, rng: random.Random) -> None:
        """Send something under the old epoch, as often as not a lease that it never had.

        Raises:
            InvariantError: it was believed.
        """
        watched = data.watched
        now_s = data.now_s
        match rng.choice(("stream", "submit", "submit", "hand over", "pull", "claim")):
            case "pull" if not watched.is_there(self.worker_id, self.epoch):
                try:
                    watched.pull(self.worker_id, self.epoch, 1, now_s)
                except LeaseError:
                    return
            case "claim":  # of whoever took its place
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
        """One token more of the first sample that lacks some."""
        for sample, length in enumerate(work.lengths):
            if work.sent[sample] < length:
                known = sample in work.calls
                number = work.calls.setdefault(sample, len(work.calls))
                one = Sample((0,), (0.0,), (self.span,), "")
                piece = PartialRollout(() if known else (sample,), one, first=work.sent[sample])
                work.sent[sample] += 1
                return LeaseTokens(work.lease.lease_id, ((number, piece),))
        return LeaseTokens(work.lease.lease_id, ())
