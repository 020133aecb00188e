"""Flow between the workers' engines and the data plane: leases, tokens, finished groups."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from echo_planes.sim.data_plane import SimDataPlane
from echo_planes.sim.kernel import Kernel, Timer
from echo_planes.sim.scenario import InstanceTypeModel, SamplingModel
from echo_planes.sim.trace import Trace
from echo_planes.sim.worker import SimWorker, Work
from echo_planes.types import Lease, LeaseTokens, Manifest, WorkerStats

PLATEAU_SHARE = 0.9  # the plateau reaches this share of the throughput with all places taken
RENEW_SHARE = 0.4  # interval of renewals, as a share of a lease's length


@dataclass(slots=True, eq=False)
class SimMember:
    """Worker of a simulated run, from the request for it until it is forgotten."""

    name: str
    instance_type: InstanceTypeModel
    epoch: int = -1
    starting: bool = False  # the controller waits for its engine
    engine: SimWorker | None = None
    leaving: bool = False
    parked: bool = False  # a standby, or a seeder outside the window, which gets no leases
    busy: bool = False
    slowed: list[float] = field(default_factory=list)  # factors of the faults that slow its engine now
    slowed_link: list[float] = field(default_factory=list)  # the same of its link
    silent_until_s: float = 0.0
    refuses: bool = False  # its next install fails
    wanted: Manifest | None = None  # publication that is being installed
    cause: str = ""  # of its end
    ending: Timer | None = None  # next end of a group
    renewal: Timer | None = None
    renews_s: float = 0.0  # time of `renewal`
    install: Timer | None = None
    queue: deque[tuple[Lease, dict[str, int]]] = field(default_factory=deque)  # (waiting lease, `Work.paid`)
    finished: list[Work] = field(default_factory=list)  # ended while the worker was silent, not submitted
    accepted: int = 0  # trajectories
    accepted_tokens: int = 0

    @property
    def speed(self) -> float:
        """Speed of its engine, as a share of the usual one. Of faults that overlap, the slowest counts."""
        return min(self.slowed, default=1.0)


class Flow:
    """Flow of leases, tokens and groups of all workers.

    Args:
        sampling: settings of the scenario.
        kernel: the clock.
        trace: the accounting.
        data: the data plane.
    """

    def __init__(self, sampling: SamplingModel, kernel: Kernel, trace: Trace, data: SimDataPlane) -> None:
        self._sampling = sampling
        self._kernel = kernel
        self._trace = trace
        self._data = data
        self._partials: dict[int, dict[str, int]] = {}  # prompt -> tokens of its partial rollouts, by machine
        self._theta = sampling.theta if sampling.router == "jsq" else 0

    def ask(self, member: SimMember) -> None:
        """Ask for work if the worker has room and a version."""
        engine = member.engine
        if engine is None or engine.version < 0 or member.leaving or self._is_silent(member):
            return
        room = engine.engine.room + self._theta - len(member.queue) - len(member.finished)
        if room > 0:
            self._data.ask(member.name, member.epoch, room)

    def begin(self, member: SimMember, leases: Sequence[Lease]) -> None:
        """Take in leases that were issued to a worker."""
        engine = member.engine
        if engine is None:
            return
        self.advance(member)
        for lease in leases:
            paid = self._partials.pop(lease.prompt.index, {})
            if not lease.partials:
                for machine, tokens in paid.items():
                    self._trace.lost(machine, tokens, "lost")
                paid = {}
            member.queue.append((lease, paid))
        self._begin_queued(member, engine)
        self._plan_renewal(member, engine)
        self.plan(member)
        self.ask(member)

    def plan(self, member: SimMember) -> None:
        """Set the timer of the next end of a group after a change of an engine that is up to date."""
        if member.ending is not None:
            member.ending.cancel()
            member.ending = None
        engine = member.engine
        if engine is None:
            return
        when_s = engine.engine.next_end_s()
        if when_s < math.inf:
            member.ending = self._kernel.at(when_s, partial(self._ended, member))
        busy = engine.engine.num_groups > 0
        if busy != member.busy:
            member.busy = busy
            self._trace.money.mark(member.name, "busy" if busy else "idle", self._kernel.now_s)

    def hand_over(self, member: SimMember) -> int:
        """Hand over all leases of a worker with their last tokens; return the number handed over."""
        engine = member.engine
        if engine is None:
            return 0
        self.advance(member)
        self._data.withdraw(member.name)
        given = sum(self._give_up_queued(member, lease.lease_id) for lease, _ in list(member.queue))
        return given + sum(self._give_up(member, engine, lease_id) for lease_id in list(engine.work))

    def renew_now(self, member: SimMember) -> None:
        """Renew a worker's leases at once, so that it learns which of them to give up."""
        if member.renewal is not None:
            member.renewal.cancel()
        self._renew(member)

    def stats(self, member: SimMember, engine: SimWorker) -> WorkerStats:
        """Return the stats that a worker reports."""
        self.advance(member)
        slots, size = member.instance_type.max_groups, self._sampling.samples_per_prompt
        speeds = [member.instance_type.engine.tokens_per_s(groups * size) for groups in range(1, slots + 1)]
        return WorkerStats(
            worker_id=member.name,
            version=engine.version,
            digest="",
            groups_in_flight=engine.engine.num_groups,
            trajectories=member.accepted,
            tokens=member.accepted_tokens,
            busy_s=engine.engine.busy_s,
            slots=slots,
            plateau=1 + next(i for i, speed in enumerate(speeds) if speed >= PLATEAU_SHARE * speeds[-1]),
        )

    def die(self, member: SimMember, engine: SimWorker) -> None:
        """End a worker's process without notice. Other workers go on from its last stream."""
        now_s = self._kernel.now_s
        if not self._is_silent(member):
            engine.engine.advance(now_s - now_s % self._sampling.stream_s)
            for work in engine.work.values():
                self._stream(member, engine, work)
        engine.engine.advance(now_s)
        for work in [*(engine.drop(lease_id) for lease_id in list(engine.work)), *member.finished]:
            self._trace.money.made(member.name, work.made)
            self._trace.lost(member.name, work.made - work.num_sent, "lost")
        member.finished.clear()
        for lease, paid in member.queue:
            self._partials[lease.prompt.index] = paid
        member.queue.clear()
        for timer in (member.ending, member.renewal, member.install):
            if timer is not None:
                timer.cancel()
        member.ending = member.renewal = member.install = None
        member.busy = False

    def stream(self, member: SimMember) -> None:
        """Send the tokens that a worker has by now."""
        engine = member.engine
        if engine is not None:
            self.advance(member)
            for work in engine.work.values():
                self._stream(member, engine, work)

    def silence(self, member: SimMember, until_s: float) -> None:
        """Block all messages from and to a worker until `until_s`."""
        engine = member.engine
        if engine is None:
            return
        if not self._is_silent(member):
            self.stream(member)
        self._data.withdraw(member.name)
        member.silent_until_s = max(member.silent_until_s, until_s)
        self._kernel.at(until_s, partial(self._heard_again, member, engine))

    # --- inside ----------------------------------------------------------------------------------

    def _is_silent(self, member: SimMember) -> bool:
        return self._kernel.now_s < member.silent_until_s

    def advance(self, member: SimMember) -> None:
        """Bring a worker's engine up to date."""
        if member.engine is not None:
            member.engine.engine.advance(self._kernel.now_s)

    def _ended(self, member: SimMember) -> None:
        engine = member.engine
        member.ending = None
        if engine is None:
            return
        self.advance(member)
        ended = engine.take_ended()
        if self._is_silent(member):
            member.finished += ended
        else:
            for work in ended:
                self._submit(member, engine, work)
        if member.engine is engine:
            self._begin_queued(member, engine)
            self.ask(member)
            if member.ending is None:  # otherwise leases issued by `ask` have set it
                self.plan(member)

    def _begin_queued(self, member: SimMember, engine: SimWorker) -> None:
        """Begin waiting leases in free places. The engine must be up to date."""
        while member.queue and engine.engine.room > 0:
            engine.begin(*member.queue.popleft())

    def _submit(self, member: SimMember, engine: SimWorker, work: Work) -> None:
        unsent = work.made - work.num_sent
        self._trace.money.made(member.name, work.made)
        paid = dict(work.paid)
        paid[member.name] = paid.get(member.name, 0) + unsent
        group = engine.group(work, self._sampling)
        self._trace.accepted(group.group_id, paid)
        receipt = self._data.submit(member.name, member.epoch, work.lease, group)
        if receipt.accepted:
            self._partials.pop(work.lease.prompt.index, None)
            member.accepted += len(group.trajectories)
            member.accepted_tokens += sum(work.lengths)
        else:
            # Only the unsent tokens are lost: another worker goes on from the streamed ones.
            self._trace.refused(group.group_id, member.name, unsent)

    def _plan_renewal(self, member: SimMember, engine: SimWorker) -> None:
        """Plan the next renewal well before the leases end, provided that the worker's clock is right."""
        when_s = self._kernel.now_s + RENEW_SHARE * self._data.lease_s / engine.engine.clock_rate
        if member.renewal is not None:
            if member.renews_s <= when_s:
                return
            member.renewal.cancel()
        member.renews_s = when_s
        member.renewal = self._kernel.at(when_s, partial(self._renew, member))

    def _renew(self, member: SimMember) -> None:
        """Renew leases by a stream without tokens; the model sends tokens only when they are needed."""
        member.renewal = None
        engine = member.engine
        if engine is None or not engine.work:
            return
        self._plan_renewal(member, engine)
        if self._is_silent(member):
            return
        queued = [lease.lease_id for lease, _ in member.queue]
        messages = [LeaseTokens(lease_id, ()) for lease_id in [*engine.work, *queued]]
        unwanted = self._data.stream(member.name, member.epoch, messages)
        if unwanted:
            self.advance(member)
            for lease_id in unwanted:
                if lease_id in engine.work:
                    self._give_up(member, engine, lease_id)
                else:
                    self._give_up_queued(member, lease_id)
            self._begin_queued(member, engine)
            self.plan(member)
            self.ask(member)

    def _give_up(self, member: SimMember, engine: SimWorker, lease_id: str) -> int:
        """Hand one lease over; return 1, or 0 if the worker no longer held it."""
        message = engine.unsent(engine.work[lease_id])
        work = engine.drop(lease_id)
        self._trace.money.made(member.name, work.made)
        index, before = work.lease.prompt.index, self._partials.get(work.lease.prompt.index)
        self._partials[index] = dict(work.paid)  # set first: `hand_over` may lease the prompt again at once
        held = self._data.hand_over(member.name, member.epoch, [message])
        if not held:
            self._partials.pop(index, None)  # absent if that call leased the prompt again
            if before is not None:
                self._partials[index] = before
            self._trace.lost(member.name, _num_tokens(message), "refused")
        return held

    def _give_up_queued(self, member: SimMember, lease_id: str) -> int:
        """Hand over a lease that still waits; return 1, or 0 if the worker no longer holds it."""
        for place, (lease, paid) in enumerate(member.queue):
            if lease.lease_id == lease_id:
                del member.queue[place]
                self._partials[lease.prompt.index] = paid
                held = self._data.hand_over(member.name, member.epoch, [LeaseTokens(lease_id, ())])
                if not held:
                    self._partials.pop(lease.prompt.index, None)
                return held
        return 0

    def _stream(self, member: SimMember, engine: SimWorker, work: Work) -> None:
        """Send the tokens that a lease has by now."""
        message = self._so_far(engine, work)
        if not message.pieces:
            return
        if self._data.stream(member.name, member.epoch, [message]):
            self._trace.lost(member.name, _num_tokens(message), "refused")
        else:
            self._partials[work.lease.prompt.index] = dict(work.paid)

    def _so_far(self, engine: SimWorker, work: Work) -> LeaseTokens:
        """Return the tokens of an unfinished lease that are not sent yet."""
        return engine.unsent(work)

    def _heard_again(self, member: SimMember, engine: SimWorker) -> None:
        if member.engine is not engine or self._is_silent(member):
            return
        finished, member.finished = member.finished, []
        for work in finished:
            self._submit(member, engine, work)
        self.renew_now(member)
        self.ask(member)


def _num_tokens(message: LeaseTokens) -> int:
    return sum(len(piece.sample.token_ids) for _, piece in message.pieces)
