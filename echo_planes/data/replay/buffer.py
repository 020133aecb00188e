"""The replay buffer's core: versioned groups, strict admission, permits, and a ledger that adds up.

No clock, no I/O, no Ray: `service.py` is its shell, and the replay store holds the rows. The buffer decides
over the store's index. The shell makes accepted groups and their fates durable before it reports them.

Invariants (kept by property tests):

- a group is in the batch formed at t only if every span of every sample is of version >= t - S;
- accepted = trained + dropped + removed + uninformative + buffered, in trajectories, at every moment;
- a group is trained at most `reuse` times, and more than once only if too few new groups are buffered;
- a lease ends exactly once;
- the learner never waits for permits while an admissible worker is alive: a lease takes the permit of a whole
  group, which returns when the lease ends or its group is set aside, and one batch is always allowed;
- at most `refill.max_groups` groups are set aside for a batch;
- the parts of a step have `groups_per_step` groups together; until the last one is formed, those taken count
  as outstanding, so no further group of the step is leased in their place.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from echo_planes.config.schema import StalenessConfig
from echo_planes.data.claims import Fault, Rules, group_fault, stats_fault, tokens_fault
from echo_planes.data.replay.buffer_state import Accepted, BufferState, NotReady
from echo_planes.data.replay.dispatch import DispatchPolicy
from echo_planes.data.replay.dispatcher import Dispatcher, EvenShares, Ground
from echo_planes.data.replay.leases import LeaseTable
from echo_planes.data.replay.lineage import KEPT_VERSIONS, Lineage
from echo_planes.data.replay.partial_rollouts import Partials, made_under, num_tokens, oldest_version
from echo_planes.data.replay.prompts import PromptCursor
from echo_planes.data.replay.refill import Refill
from echo_planes.data.replay.staleness import is_admissible, num_permits, num_urgent, oldest_admissible
from echo_planes.data.replay.worker_registry import WorkerRegistry
from echo_planes.data.store.choose import choose
from echo_planes.data.store.index import Fate, GroupIndex
from echo_planes.errors import LeaseError
from echo_planes.types import (
    BufferCounts,
    Complaint,
    Group,
    Lease,
    LeaseTokens,
    PartialRollout,
    Prompt,
    Receipt,
    WorkerStats,
    sampled_tokens,
)

RECENT_BATCHES = 4  # batches over which the share of set-aside groups is estimated
MAX_ATTEMPTS = 3  # refused groups of a prompt, after which it is not issued again
MAX_MALFORMED = 4  # malformed messages since its last accepted group that fence a worker; > MAX_ATTEMPTS


class ReplayBuffer:
    """Versioned groups between rollout and learning.

    Args:
        staleness: S, kappa, policy, selector and queue length.
        groups_per_step: groups in a batch.
        samples_per_prompt: samples in a group.
        lease_s: longest lease, seconds.
        shortest_lease_s: shortest lease, seconds.
        lineage: name of this run's line of versions.
        seed: seed of the selectors that draw.
        index: index of the store that holds the rows. Before the next batch is formed, the caller enters
            accepted groups there, and settles groups that were chosen, dropped or set aside.
        state: state of the checkpoint to continue from.
        refill: rule by which groups are set aside as uninformative; None: none is.
        rules: bounds on every message; None: a simulation, whose messages carry no real tokens.
        dispatch: decides which worker gets which prompts; None: even shares of the permits.
        tick_s: shortest time between two moves of leases, seconds.
        part_groups: fewest groups of a part of a step (the last one may have fewer), where S = 0; None: a
            step comes as one batch.
    """

    def __init__(
        self,
        staleness: StalenessConfig,
        *,
        groups_per_step: int,
        samples_per_prompt: int,
        lease_s: float,
        shortest_lease_s: float,
        lineage: str,
        seed: int,
        index: GroupIndex,
        state: BufferState | None = None,
        refill: Refill | None = None,
        rules: Rules | None = None,
        dispatch: DispatchPolicy | None = None,
        tick_s: float = 0.0,
        part_groups: int | None = None,
    ) -> None:
        self._rules = rules
        self._malformed: Counter[str] = Counter()  # messages of each worker since its last accepted group
        self._complaints: dict[tuple[str, int], Complaint] = {}
        self._settings = self._staleness = staleness  # as configured, and in force
        self._refill = refill
        self._groups_per_step = groups_per_step
        self._part_groups = part_groups
        self._taken = 0  # groups of the present step, in parts that were formed
        self.accepted_s = 0.0  # when the youngest buffered group was accepted
        # Accepted groups, and messages with tokens. After a batch of leases in a row that came to nothing,
        # tokens count no more: without that, a run whose every answer is refused would never end.
        self.moves = 0
        self._ended_in_vain = 0  # leases since the last accepted group
        self._samples = samples_per_prompt
        self._lineage = lineage
        self._rng = np.random.default_rng(seed)
        self._index = index
        self._leases = LeaseTable(lease_s, shortest_lease_s)
        self._partials = Partials(state.partials if state else {})
        self._workers = WorkerRegistry()
        self._attempts: dict[int, int] = {}
        self._dropped: list[Accepted] = []
        self._uninformative: list[Accepted] = []
        self._replaced = state.replaced if state else 0  # groups set aside for the next batch
        # Of recently accepted groups: whether each was set aside.
        self._recent: deque[bool] = deque(maxlen=RECENT_BATCHES * groups_per_step)
        self._again: dict[Accepted, int] = {}  # trained groups that may be trained again -> times trained
        self.last_failure = ""
        self._step = state.step if state else 0
        self._issued = state.issued if state else 0
        self._tally = asdict(state.counts if state else BufferCounts())
        self._cursor = PromptCursor(state.next_index, state.returned) if state else PromptCursor()
        self._versions = Lineage(
            lineage,
            state.published if state else (),
            self._step,
            kept=KEPT_VERSIONS + staleness.max_staleness,
        )
        self._groups: dict[str, Accepted] = {g.group_id: g for g in state.groups} if state else {}
        ground = Ground(
            workers=self._workers,
            leases=self._leases,
            cursor=self._cursor,
            permits=self._permits,
            admits=lambda version: is_admissible(version, self._step, self._staleness.max_staleness),
            recall=self.recall,
        )
        self.dispatcher = Dispatcher(ground, dispatch, tick_s) if dispatch else EvenShares(ground)

    # --- state -----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """t: batches formed so far, which is the updates completed when the next one is formed."""
        return self._step

    @property
    def lease_s(self) -> float:
        """Present duration of a lease, counted from its last tokens, seconds."""
        return self._leases.lease_s

    @property
    def counts(self) -> BufferCounts:
        now = {"buffered": len(self._groups) * self._samples, "leased": len(self._leases) * self._samples}
        return BufferCounts(**{**self._tally, **now})

    def state(self) -> BufferState:
        """Return the state to save. Leased prompts count as returned, with their streamed tokens.

        Raises:
            LeaseError: a part of the present step was formed, and not its last one.
        """
        if self._taken:
            raise LeaseError(
                f"{self._taken} groups of step {self._step} are in its update, the others not yet"
            )
        live = self._leases.live
        leased = tuple(lease.prompt.index for lease in live)
        oldest = oldest_admissible(self._step, self._staleness.max_staleness)
        partials, left_out = self._partials.state(live, self._versions.digests, oldest)
        counts = self.counts
        return BufferState(
            step=self._step,
            next_index=self._cursor.next_index,
            returned=tuple(sorted(self._cursor.returned + leased)),
            issued=self._issued,
            groups=tuple(self._groups.values()),
            counts=replace(counts, leased=0, discarded_tokens=counts.discarded_tokens + left_out),
            published=self._versions.published,
            partials=partials,
            replaced=self._replaced,
        )

    def limit_staleness(self, max_staleness: int) -> None:
        """Apply another S, at most the configured one. Groups that are too old for it are dropped, and
        counted: buffered groups when the next batch is formed, groups of live leases when they are accepted.
        """
        self._staleness = self._settings.limited(min(max_staleness, self._settings.max_staleness))

    # --- versions and workers --------------------------------------------------------------------

    def publish(self, version: int, digest: str) -> None:
        """Record a published version, so that work sampled under it can be accepted."""
        self._versions.publish(version, digest)
        self.dispatcher.published(version)

    def register(self, worker_id: str, epoch: int) -> None:
        """Register a new incarnation of a worker, which serves no version yet."""
        self._give_back(self._leases.forget(worker_id))
        self._leases.register(worker_id, epoch)
        self._workers.serves(worker_id, -1)
        self._malformed.pop(worker_id, None)
        self.dispatcher.registered(worker_id, epoch)

    def lose(self, worker_id: str) -> int:
        """End the leases of a worker that is gone, and return how many. Its prompts go to others."""
        self.dispatcher.lost(worker_id)
        self._workers.remove(worker_id)
        ended = self._leases.forget(worker_id)
        self._give_back(ended)
        return len(ended)

    def installed(self, worker_id: str, version: int) -> None:
        """Record that a worker serves `version`."""
        if worker_id in self._workers:
            self.dispatcher.serves(worker_id, version)
            self._workers.serves(worker_id, version)

    def believes(self, epoch: int, stats: WorkerStats) -> bool:
        """Return whether counters come from the current incarnation and can be true; record a complaint if
        the current incarnation sent impossible ones.
        """
        if not self._leases.is_current(stats.worker_id, epoch):
            return False
        fault = stats_fault(stats, stats.worker_id) if self._rules else None
        if fault is not None:
            self._complain(stats.worker_id, epoch, fault)
        return fault is None

    def park(self, worker_id: str, parked: bool) -> None:
        """Park or unpark a worker, known or not. A parked one gets no new leases and keeps those it has."""
        self._workers.park(worker_id, parked)
        self.dispatcher.parked(worker_id)

    def tell(self, epoch: int, stats: WorkerStats) -> None:
        """Pass a worker's counters to dispatch, unless they are impossible or of an old incarnation."""
        if self.believes(epoch, stats):
            self.dispatcher.tell(stats)

    # --- leases ----------------------------------------------------------------------------------

    def ask(self, rooms: Mapping[str, int], now_s: float) -> None:
        """Tell dispatch the waiting workers, longest wait first, with their rooms; `pull` takes prompts."""
        if self.dispatcher.plans:
            self.expire(now_s)
            self.dispatcher.ask(rooms, now_s)

    def tick(self, now_s: float) -> list[str]:
        """Recall leases that are to move to another worker. Return the workers that must give some up."""
        return self.dispatcher.tick(now_s)

    def pull(self, worker_id: str, epoch: int, room: int, now_s: float) -> list[int]:
        """Take the prompt indices that a worker may lease now. The caller must call `lease` for each."""
        if not self._leases.is_current(worker_id, epoch):
            raise LeaseError(f"worker {worker_id} epoch {epoch} is fenced")
        self.expire(now_s)
        return self.dispatcher.grant(worker_id, room)

    def lease(self, worker_id: str, epoch: int, prompt: Prompt, now_s: float) -> Lease:
        """Issue the lease of one pulled prompt, with the partial rollouts that wait for it."""
        name = f"{self._lineage}.{self._issued}"
        self._issued += 1
        partials = self._take_partials(prompt.index)
        version = self._workers.version(worker_id)
        lease = Lease(
            lease_id=name,
            group_id=name,
            epoch=epoch,
            worker_id=worker_id,
            prompt=prompt,
            num_samples=self._samples,
            version=min(version, oldest_version(partials)) if partials else version,
            expires_s=now_s + self._leases.lasts_s(prompt.index),
            partials=partials,
        )
        self._partials.open(lease)
        issued = self._leases.issue(lease, now_s)
        self.dispatcher.leased(issued)
        return issued

    def stream(
        self, worker_id: str, epoch: int, messages: Sequence[LeaseTokens], now_s: float
    ) -> tuple[str, ...]:
        """Keep streamed tokens and renew their leases. Return the leases that the worker must give up: those
        it no longer holds, and those recalled for another worker.
        """
        self.tick(now_s)
        held = self._keep_tokens(worker_id, epoch, messages, now_s)
        self._leases.renew(worker_id, epoch, held, now_s)
        lost = [message.lease_id for message in messages if message.lease_id not in held]
        return (*lost, *self._leases.recalled_from(worker_id, epoch))

    def recall(self, worker_id: str, num_leases: int, spare: Container[str] = ()) -> list[str]:
        """Recall up to `num_leases` leases of a worker, none of `spare`. Return their ids.

        The worker learns of it when it streams next.
        """
        shelf = self._partials
        return self._leases.recall(worker_id, num_leases, shelf.prefill_tokens, shelf.is_far, spare)

    def hand_over(self, worker_id: str, epoch: int, messages: Sequence[LeaseTokens], now_s: float) -> int:
        """End leases that a worker gives up, keeping their last tokens for other workers. Return how many."""
        prompts = {lease.lease_id: lease.prompt.index for lease in self._leases.of_worker(worker_id)}
        held = self._keep_tokens(worker_id, epoch, messages, now_s)
        self._give_back([self._leases.give_up(lease_id) for lease_id in held])
        for lease in self._leases.of_worker(worker_id):
            del prompts[lease.lease_id]
        self.dispatcher.handed_over(prompts, now_s)
        return len(held)

    def _keep_tokens(
        self, worker_id: str, epoch: int, messages: Sequence[LeaseTokens], now_s: float
    ) -> list[str]:
        """Enter the tokens of leases that this incarnation still holds; return the ids of these leases.

        A malformed message ends its lease without a change to the partial rollouts.
        """
        kept = {}
        for message in messages:
            if not self._leases.holds(message.lease_id, worker_id, epoch, now_s):
                continue
            fault = tokens_fault(message, self._rules) if self._rules else None
            try:
                if fault is None:
                    self._partials.add(message)
            except LeaseError as why:
                fault = Fault("unspanned", f"lease {message.lease_id}: {why}")
            if fault is None:
                self.moves += bool(message.pieces) and self._ended_in_vain < self._groups_per_step
                kept[message.lease_id] = message  # a lease may have several messages, and counts once
            else:
                self._give_back([self._leases.give_up(message.lease_id)])
                self._complain(worker_id, epoch, fault)
        # A malformed message may have fenced the worker, which ended all its leases.
        return [lease_id for lease_id in kept if self._leases.holds(lease_id, worker_id, epoch, now_s)]

    def submit(self, worker_id: str, epoch: int, lease_id: str, group: Group, now_s: float) -> Receipt:
        """Accept or refuse a finished group. A lease that this incarnation holds ends either way."""
        try:
            lease = self._leases.close(lease_id, worker_id, epoch, now_s)
        except LeaseError as why:
            reason = "duplicate" if lease_id in self._groups else str(why)
            self._count(refused=self._samples)
            return Receipt(lease_id, accepted=False, reason=reason)
        fault = group_fault(lease, group, self._versions.has_made, self._rules)
        if fault is not None:
            self._attempt_failed(lease, group, fault)
            if fault.is_malformed:
                self._complain(worker_id, epoch, fault)
            return Receipt(lease_id, accepted=False, reason=fault.reason, detail=fault.detail)
        self._partials.close(lease_id)
        self._malformed.pop(worker_id, None)
        self._attempts.pop(lease.prompt.index, None)
        sampled = sampled_tokens(group)
        self._count(accepted=self._samples, accepted_tokens=sampled)
        self._partials.finished(sampled)
        taken = Accepted.of(group)
        admissible = is_admissible(taken.version, self._step, self._staleness.max_staleness)
        self.moves += admissible
        self._ended_in_vain = 0 if admissible else self._ended_in_vain + 1
        if not admissible:
            self._drop(taken)
        elif self._is_to_be_replaced(group):
            self._count(uninformative=self._samples, uninformative_tokens=sampled)
            self._replaced += 1
            self._recent.append(True)
            self._uninformative.append(taken)
        else:
            self._recent.append(False)
            self._groups[group.group_id] = taken
            self.accepted_s = now_s
        return Receipt(lease_id, accepted=True)

    def expire(self, now_s: float) -> int:
        """End the leases whose time is up, so that their prompts go to others. Return how many ended."""
        ended = self._leases.expire(now_s)
        if ended:
            self._count(expired=len(ended))
            self._ended_in_vain += len(ended)
            self._give_back(ended)
        return len(ended)

    # --- batches ---------------------------------------------------------------------------------

    def next_batch(self, step: int, now_s: float, *, whole: bool = False) -> list[Accepted] | NotReady:
        """Form the batch of update `step` (t) from whole groups, or return why it cannot be formed.

        With `part_groups`, form a part of it from all that is buffered, once that is enough; with `whole`,
        once that makes the batch whole. `step` is the number of batches formed until the last part is.

        If too few new groups are buffered and `reuse` allows it, trained groups fill up the batch: those
        trained least often first, then the newest. At least 1 in `reuse` groups is new, so that the mean
        number of times a group is trained stays within `reuse`.

        Raises:
            LeaseError: `step` is not the number of batches formed so far.
        """
        if step != self._step:
            raise LeaseError(f"batch {step} was asked for, but {self._step} batches were formed")
        self.expire(now_s)
        oldest = oldest_admissible(step, self._staleness.max_staleness)
        for group in [g for g in self._groups.values() if g.version < oldest]:
            self._drop(self._groups.pop(group.group_id))
        self._again = {g: uses for g, uses in self._again.items() if g.version >= oldest}
        wanted = self._groups_per_step - self._taken
        num_new = min(len(self._groups), wanted)
        if self._part_groups is not None and not whole and num_new >= min(self._part_groups, wanted):
            wanted = num_new
        num_again = wanted - num_new
        if num_new * self._staleness.reuse < wanted or num_again > len(self._again):
            return self._what_is_missing()
        # No other step is formed before the leased groups of this one are in it, so none can become too old.
        waiting = self._staleness.policy == "wait" and self._part_groups is None
        urgent = num_urgent(
            buffered_versions=[group.version for group in self._groups.values()],
            leased_versions=[lease.version for lease in self._admissible_leases()] if waiting else [],
            step=step,
            max_staleness=self._staleness.max_staleness,
            groups_per_step=self._groups_per_step,
        )
        if urgent is None:
            held = min(self._admissible_leases(), key=lambda lease: lease.version)
            detail = f"for version {held.version} on worker {held.worker_id}"
            return NotReady("holding", detail, self.moves)
        sequences = choose(
            self._index,
            num_new,
            selector=self._staleness.selector,
            min_version=oldest,
            urgent=urgent,
            rng=self._rng,
        )
        new = [self._groups.pop(self._index.ids[sequence]) for sequence in sequences.tolist()]
        used = sorted(self._again, key=lambda group: (self._again[group], -group.version))[:num_again]
        for group in new + used:
            uses = self._again.pop(group, 0) + 1
            if uses < self._staleness.reuse:
                self._again[group] = uses
        self._count(trained=num_new * self._samples, reused=num_again * self._samples)
        self._taken = (self._taken + wanted) % self._groups_per_step
        if not self._taken:
            self._step += 1
            self._replaced = 0
            self.dispatcher.batch_formed()
        # In the order of their prompts, so that the update does not depend on which worker finished first.
        return sorted(new + used, key=lambda group: group.prompt_index)

    def take_dropped(self) -> list[Accepted]:
        """Return and clear the groups dropped as stale since the last call, for the store."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_uninformative(self) -> list[Accepted]:
        """Return and clear the groups set aside since the last call. Their prompts do not go out again."""
        uninformative, self._uninformative = self._uninformative, []
        return uninformative

    def forget_removed(self) -> None:
        """Forget the groups whose rows the store removed or lost; prompts of untrained ones go out again."""
        groups = self._index.groups
        gone = groups["erased"] | (groups["fate"] == Fate.LOST)
        for group in [g for g in self._groups.values() if gone[self._index.ids.sequence(g.group_id)]]:
            self._count(removed=self._samples)
            self._cursor.give_back(self._groups.pop(group.group_id).prompt_index)
        self._again = {g: n for g, n in self._again.items() if not gone[self._index.ids.sequence(g.group_id)]}

    def take_complaints(self) -> list[Complaint]:
        """Return and clear the complaints since the last call, one per incarnation."""
        complaints, self._complaints = list(self._complaints.values()), {}
        return complaints

    # --- inside ----------------------------------------------------------------------------------

    def _is_to_be_replaced(self, group: Group) -> bool:
        refill = self._refill
        return refill is not None and self._replaced < refill.max_groups and not refill.carries_signal(group)

    def _outstanding(self) -> int:
        """Return how many groups are in the parts of the present step, buffered, or of admissible leases."""
        oldest = oldest_admissible(self._step, self._staleness.max_staleness)
        leased = sum(count for version, count in self._leases.versions.items() if version >= oldest)
        return self._taken + len(self._groups) + leased

    def _permits(self, version: int, ended: int = 0) -> int:
        """Return how many groups of oldest version `version` may be leased after `ended` leases end."""
        outstanding = self._outstanding() - ended
        return num_permits(
            worker_version=version,
            step=self._step,
            max_staleness=self._staleness.max_staleness,
            groups_per_step=self._groups_per_step,
            outstanding_groups=outstanding,
            queue_batches=self._staleness.queue_batches,
            leased_groups=outstanding - self._taken - len(self._groups),
            uninformative=sum(self._recent) / (len(self._recent) + 1),
        )

    def _take_partials(self, prompt_index: int) -> tuple[PartialRollout, ...]:
        """Take the waiting partial rollouts of a prompt; discard them if their version has no permit left."""
        if not (waiting := self._partials.take(prompt_index)):
            return ()
        partials = made_under(waiting, self._versions.digests)
        if partials and self._permits(oldest_version(partials)) < 1:
            partials = ()
        self._count(discarded_tokens=num_tokens(waiting) - num_tokens(partials))
        if partials:
            self._count(continued=1, continued_tokens=num_tokens(partials))
        return partials

    def _admissible_leases(self) -> list[Lease]:
        oldest = oldest_admissible(self._step, self._staleness.max_staleness)
        return [lease for lease in self._leases.live if lease.version >= oldest]

    def _what_is_missing(self) -> NotReady:
        have = f"{len(self._groups)} of {self._groups_per_step - self._taken} groups buffered"
        newest = max(self._workers.versions, default=-1)
        serving = newest >= 0 and is_admissible(newest, self._step, self._staleness.max_staleness)
        if not serving and self._outstanding() < self._groups_per_step:
            detail = f"{have}; newest version any worker serves is {newest}"
            return NotReady("starved", detail, self.moves)
        detail = f"{have}; {len(self._leases)} leased to {len(self._workers)} workers"
        return NotReady("filling", detail, self.moves)

    def _attempt_failed(self, lease: Lease, group: Group, fault: Fault) -> None:
        """Count a refused group, and return its prompt unless this was the last attempt.

        Partial rollouts go back with the prompt if the group was malformed; otherwise they are discarded.
        """
        self.last_failure = fault.detail
        self._count(refused=self._samples)
        self._ended_in_vain += 1
        attempts = self._attempts.get(lease.prompt.index, 0) + 1
        self._attempts[lease.prompt.index] = attempts
        is_last = attempts >= MAX_ATTEMPTS
        if fault.is_malformed and not is_last:
            self._give_back([lease])
            return
        self._count(discarded_tokens=self._partials.close(lease.lease_id))
        if not is_last:
            self._cursor.give_back(lease.prompt.index)
        if not fault.is_malformed:
            self._count(failed=self._samples)
            for trajectory in group.trajectories:
                if trajectory.status not in ("ok", "failed"):
                    self._count(**{trajectory.status: 1})

    def _complain(self, worker_id: str, epoch: int, fault: Fault) -> None:
        """Record a malformed message; fence the worker at `MAX_MALFORMED` since its last accepted group."""
        self._count(malformed=1)
        if self._rules is None:
            return
        self._malformed[worker_id] += 1
        is_fenced = self._malformed[worker_id] >= MAX_MALFORMED
        known = self._complaints.get((worker_id, epoch))
        count = 1 + (known.count if known else 0)
        self._complaints[worker_id, epoch] = Complaint(
            worker_id, epoch, count, fault.reason, fault.detail, is_fenced
        )
        if is_fenced:
            self.lose(worker_id)

    def _give_back(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._count(discarded_tokens=self._partials.shelve(lease, self._versions.digests))
            self._cursor.give_back(lease.prompt.index)

    def _drop(self, group: Accepted) -> None:
        """Drop a group that is too old to train. Its prompt goes out again, so slow prompts are not lost."""
        share = group.share_correct
        kind = "dropped_hard" if share == 0 else "dropped_easy" if share == 1 else "dropped_middling"
        self._count(dropped_stale=self._samples, **{kind: self._samples})
        self._cursor.give_back(group.prompt_index)
        self._dropped.append(group)

    def _count(self, **more: int) -> None:
        for key, value in more.items():
            self._tally[key] += value
