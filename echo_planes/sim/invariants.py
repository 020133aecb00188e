"""Invariants of the data plane, checked against a model of it at every call and event.

`WatchedBuffer` is the real replay buffer with a model beside it. The model follows the calls and answers
alone: which workers are present, which leases live and until when, which tokens were streamed of every
prompt, and the place of every prompt. Each answer of the buffer must be the one that the model expects.

A result is *honest* if it is whole, all its tokens were sampled under published versions, and its lease lives
when it arrives. A lease lives if the data plane issued it to this incarnation and knows of no end or
successor of that incarnation, if the worker has not given it up, and if its time has not run out since the
last renewal that arrived. The buffer must accept every honest result and no other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Sequence
from typing import Any, Literal

from echo_planes.data.replay.buffer import MAX_ATTEMPTS, RECENT_BATCHES, ReplayBuffer
from echo_planes.data.replay.buffer_state import Accepted, NotReady
from echo_planes.sim.buffer_model import Call, Held, Tally, is_sound, labels
from echo_planes.sim.log import InvariantError, Log, require
from echo_planes.types import Group, Lease, LeaseTokens, Prompt, Receipt

Place = Literal["pulled", "leased", "buffered", "waiting", "trained", "uninformative", "set aside"]
Incarnation = tuple[str, int]


class WatchedBuffer(ReplayBuffer):
    """Real buffer, checked against the model. Arguments: those of `ReplayBuffer`.

    Raises:
        InvariantError: from any method, if an answer is not the one that the model expects.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.log = Log(lambda: 0.0)
        self.leaving: set[Incarnation] = set()  # told to take no more leases
        self.held: dict[str, Held] = {}
        self.tally = Tally()
        self._place: dict[int, Place] = {}  # of every prompt that was ever handed out
        self._waiting: set[int] = set()  # prompts in `_place` that wait
        self._num_pulled = 0  # prompts in `_place` that were handed out without a lease
        self._digests: dict[int, str] = {}  # of published versions
        self._epoch: dict[str, int] = {}  # of the workers present
        self._serving: dict[str, int] = {}  # version; -1: none yet
        self._standbys: set[str] = set()
        self._kept: dict[int, list[Call]] = {}  # calls of prompts that wait
        self._buffered: dict[str, tuple[int, int]] = {}  # group -> prompt, oldest version
        self._oldest: dict[str, int] = {}  # of every accepted group: version of its oldest token
        self._uses: dict[str, int] = {}
        self._tries: dict[int, int] = {}
        self._names: set[str] = set()
        self._num_replaced = 0  # groups set aside since the last batch
        self._recent_replaced: deque[int] = deque(maxlen=RECENT_BATCHES * self._groups_per_step)
        self._checked = -1  # checksum of the log at the last check

    # --- checks at every event -------------------------------------------------------------------

    def check(self) -> None:
        """Check that the ledger adds up and no prompt is missing; skip the check if the log has not grown."""
        if self._checked == self.log.checksum:
            return
        self._checked = self.log.checksum
        counts, tally, n = self.counts, self.tally, self._samples
        parts = counts.trained + counts.dropped_stale + counts.removed + counts.uninformative
        parts += counts.buffered
        if counts.accepted != parts:
            raise InvariantError(
                f"ledger: {counts.accepted} accepted, but {counts.trained} trained + {counts.dropped_stale} "
                f"dropped + {counts.removed} removed + {counts.uninformative} uninformative + "
                f"{counts.buffered} buffered"
            )
        found = [counts.accepted, counts.trained, counts.dropped_stale, counts.buffered, counts.leased]
        found += [counts.reused, counts.refused, counts.failed, counts.uninformative]
        groups = [tally.accepted, tally.trained, tally.dropped, len(self._buffered), len(self.held)]
        groups += [tally.reused, tally.refused, tally.failed, tally.uninformative]
        expected = [n * number for number in groups]
        if found != expected:
            names = "accepted, trained, dropped, buffered, leased, reused, refused, failed, uninformative"
            raise InvariantError(f"ledger: {names} are {found}, should be {expected}")
        if counts.expired != tally.expired:
            raise InvariantError(f"{counts.expired} leases expired, not {tally.expired}")
        waiting, returned = tuple(sorted(self._waiting)), self._cursor.returned
        if returned != waiting:
            raise InvariantError(f"prompts {returned} wait to go out again, should be {waiting}")
        handed_out, known, pulled = self._cursor.next_index, len(self._place), self._num_pulled
        if pulled or handed_out != known:
            raise InvariantError(f"{handed_out} prompts were handed out, {known - pulled} were leased")

    # --- versions and workers --------------------------------------------------------------------

    def publish(self, version: int, digest: str) -> None:
        super().publish(version, digest)
        self._digests[version] = digest

    def register(self, worker_id: str, epoch: int) -> None:
        self.log.add("register", worker_id, epoch)
        super().register(worker_id, epoch)
        self._end_all(worker_id)
        self._epoch[worker_id], self._serving[worker_id] = epoch, -1

    def lose(self, worker_id: str) -> int:
        self.log.add("lose", worker_id)
        ended = super().lose(worker_id)
        self._epoch.pop(worker_id, None)
        self._serving.pop(worker_id, None)
        expected = self._end_all(worker_id)
        require(ended == expected, f"{worker_id} was lost: {ended} leases ended, it had {expected}")
        return ended

    def installed(self, worker_id: str, version: int) -> None:
        self.log.add("installed", worker_id, version)
        super().installed(worker_id, version)
        if worker_id in self._serving:
            before = self._serving[worker_id]
            require(version >= before, f"{worker_id} serves version {version} after {before}")
            require(version < 0 or version in self._digests, f"{worker_id} serves {version}: unpublished")
            self._serving[worker_id] = version

    def park(self, worker_id: str, parked: bool) -> None:
        self.log.add("park", worker_id, parked)
        super().park(worker_id, parked)
        self._standbys = self._standbys | {worker_id} if parked else self._standbys - {worker_id}

    # --- leases ----------------------------------------------------------------------------------

    def pull(self, worker_id: str, epoch: int, room: int, now_s: float) -> list[int]:
        if not self.is_there(worker_id, epoch):
            super().pull(worker_id, epoch, room, now_s)  # raises
            raise InvariantError(f"{worker_id} epoch {epoch} is fenced, and was given prompts")
        indices = super().pull(worker_id, epoch, room, now_s)
        expected = min(room, self._share(worker_id))
        self.log.add("pull", worker_id, epoch, f"room {room}:", indices)
        if len(indices) != expected:
            raise InvariantError(
                f"{worker_id} at version {self._serving[worker_id]} was given {len(indices)} permits at step "
                f"{self._step}, should be {expected}"
            )
        for index in indices:
            place = self._place.get(index, "waiting")
            require(place == "waiting", f"prompt {index} was handed out, and it is {place}")
            self._move(index, "pulled")
        return indices

    def lease(self, worker_id: str, epoch: int, prompt: Prompt, now_s: float) -> Lease:
        outstanding = self._num_outstanding()
        lease = super().lease(worker_id, epoch, prompt, now_s)
        name, index, version = lease.lease_id, prompt.index, self._serving[worker_id]
        self.log.add("lease", name, f"prompt {index}", worker_id, epoch, f"v{lease.version}")
        require(name not in self._names, f"lease {name} was issued twice")
        require(
            (worker_id, epoch) not in self.leaving, f"{worker_id} epoch {epoch} leaves, and was given {name}"
        )
        calls = self._check_partials(lease, self._kept.pop(index, []), outstanding)
        oldest = min((label[1] for call in calls for label in call.tokens), default=version)
        require(
            lease.version == min(oldest, version),
            f"lease {name} says version {lease.version}; its tokens are of {oldest}, its worker of {version}",
        )
        most = self._ceiling(lease.version)
        require(outstanding < most, f"lease {name} of v{lease.version} is group {outstanding + 1} of {most}")
        ends_s = lease.expires_s
        require(ends_s >= now_s + self.lease_s, f"lease {name} of {now_s} s ends at {ends_s} s: too soon")
        self._names.add(name)
        self._move(index, "leased")
        self.held[name] = Held(lease, calls, now_s, lease.expires_s)
        return lease

    def stream(
        self, worker_id: str, epoch: int, messages: Sequence[LeaseTokens], now_s: float
    ) -> tuple[str, ...]:
        held = self._keep(worker_id, epoch, messages, now_s)
        unwanted = super().stream(worker_id, epoch, messages, now_s)
        names = [message.lease_id for message in messages]
        self.log.add("stream", worker_id, epoch, names, "unwanted", unwanted)
        recalled = [
            n for n, known in self.held.items() if known.recalled and known.lease.worker_id == worker_id
        ]
        wanted_back = sorted(recalled) if self.is_there(worker_id, epoch) else []
        expected = (*(name for name in names if name not in held), *wanted_back)
        require(unwanted == expected, f"{worker_id} epoch {epoch} is to give up {unwanted}, not {expected}")
        for name in held:
            known = self.held[name]
            known.ends_s = max(known.ends_s, now_s + self.lease_s)
        return unwanted

    def recall(self, worker_id: str, num_leases: int, spare: Container[str] = ()) -> list[str]:
        mine = {name: known for name, known in self.held.items() if known.lease.worker_id == worker_id}
        wanted = {name for name, known in mine.items() if not known.recalled and name not in spare}
        found = super().recall(worker_id, num_leases, spare)
        marked = self._leases.recalled_from(worker_id, self._epoch.get(worker_id, -1))
        chosen = sorted(wanted.intersection(marked))
        self.log.add("recall", worker_id, chosen)
        require(sorted(found) == chosen, f"{found} of {worker_id} were recalled, not {chosen}")
        # A lease without a token is never too far advanced for a recall.
        untouched = sum(not any(call.tokens for call in mine[name].calls) for name in wanted)
        fewest, most = min(num_leases, untouched), min(num_leases, len(wanted))
        require(
            fewest <= len(found) <= most,
            f"{len(found)} leases of {worker_id} were recalled: {fewest} to {most}",
        )
        for name in chosen:
            self.held[name].recalled = True
        return found

    def hand_over(self, worker_id: str, epoch: int, messages: Sequence[LeaseTokens], now_s: float) -> int:
        held = self._keep(worker_id, epoch, messages, now_s)
        given = super().hand_over(worker_id, epoch, messages, now_s)
        self.log.add("hand over", worker_id, epoch, [message.lease_id for message in messages], given)
        require(given == len(held), f"{worker_id} epoch {epoch} gave up {given} leases, it had {len(held)}")
        for name in held:
            self._end(name)
        return given

    def submit(self, worker_id: str, epoch: int, lease_id: str, group: Group, now_s: float) -> Receipt:
        known = self.held.get(lease_id)
        lives = known is not None and self._lives(known, worker_id, epoch, now_s)
        honest = known is not None and lives and is_sound(known.lease, group, self._digests)
        receipt = super().submit(worker_id, epoch, lease_id, group, now_s)
        self.log.add("submit", worker_id, epoch, lease_id, receipt.reason or "accepted", f"v{group.version}")
        said = f"{lease_id} of {worker_id} epoch {epoch}"
        require(receipt.accepted or not honest, f"an honest result was refused: {said}: {receipt.reason}")
        require(honest or not receipt.accepted, f"a result that is not honest was accepted: {said}")
        if not receipt.accepted:
            self.tally.refused += 1
        if known is not None and lives:
            if honest:
                del self.held[lease_id]
                self._accepted(group, known.lease.prompt.index)
            else:
                self._failed(group, lease_id)
        return receipt

    def expire(self, now_s: float) -> int:
        over = [name for name, known in self.held.items() if known.ends_s <= now_s]
        ended = super().expire(now_s)
        require(ended == len(over), f"{ended} leases expired, should be {over}")
        if over:
            self.log.add("expired", over)
        for name in over:
            self.tally.expired += 1
            self._end(name)
        return ended

    # --- batches ---------------------------------------------------------------------------------

    def next_batch(self, step: int, now_s: float, *, whole: bool = False) -> list[Accepted] | NotReady:
        found = super().next_batch(step, now_s, whole=whole)
        budget, size = self._staleness.max_staleness, self._groups_per_step
        for name, (index, version) in list(self._buffered.items()):
            if step - version > budget:
                self._too_old(name, index)
        if isinstance(found, NotReady):
            self._check_excuse(found, step)
            return found
        self.log.add("batch", step, [group.group_id for group in found])
        names = {group.group_id for group in found}
        self._num_replaced = 0
        require(
            len(found) == len(names) == size, f"the batch of step {step} has {len(names)} of {size} groups"
        )
        for name in sorted(names):
            self._train(name, step)
        if self._staleness.policy == "wait":
            for name, known in self.held.items():
                version = known.lease.version
                require(
                    step - version != budget,
                    f"the batch of step {step} was formed, and lease {name} of version {version} still lived",
                )
        return found

    # --- the model -------------------------------------------------------------------------------

    def is_there(self, worker_id: str, epoch: int) -> bool:
        """Return whether this incarnation is the newest that was registered and is not lost."""
        return self._epoch.get(worker_id) == epoch

    def _move(self, index: int, place: Place) -> None:
        """Set the place of a prompt from now on."""
        before, self._place[index] = self._place.get(index), place
        if before == "waiting":
            self._waiting.remove(index)
        if place == "waiting":
            self._waiting.add(index)
        self._num_pulled += (place == "pulled") - (before == "pulled")

    def _lives(self, known: Held, worker_id: str, epoch: int, now_s: float) -> bool:
        mine = (known.lease.worker_id, known.lease.epoch) == (worker_id, epoch)
        return mine and self.is_there(worker_id, epoch) and known.ends_s > now_s

    def _keep(self, worker_id: str, epoch: int, messages: Sequence[LeaseTokens], now_s: float) -> list[str]:
        """Enter the tokens of live leases unless earlier ones are missing; return the leases' names."""
        held = []
        for message in messages:
            known = self.held.get(message.lease_id)
            if known is None or not self._lives(known, worker_id, epoch, now_s):
                continue
            held.append(message.lease_id)
            for number, piece in message.pieces:
                if number == len(known.calls) and piece.first == 0 and piece.context:
                    known.calls.append(Call(piece.context))
                if number < len(known.calls) and piece.first == len(known.calls[number].tokens):
                    known.calls[number].tokens += labels(piece)
        return held

    def _end_all(self, worker_id: str) -> int:
        names = [name for name, known in self.held.items() if known.lease.worker_id == worker_id]
        for name in names:
            self._end(name)
        return len(names)

    def _end(self, name: str) -> None:
        """End a lease without a result: its prompt waits with its streamed tokens."""
        known = self.held.pop(name)
        index = known.lease.prompt.index
        self._move(index, "waiting")
        calls = [call for call in known.calls if call.tokens and self._is_published(call)]
        if calls:
            self._kept[index] = calls

    def _is_published(self, call: Call) -> bool:
        return all(self._digests.get(version) == digest for _, version, digest in call.tokens)

    def _check_partials(self, lease: Lease, kept: list[Call], outstanding: int) -> list[Call]:
        """Check that a lease's partial rollouts equal the streamed tokens, or are absent if too old."""
        given = [(partial.context, labels(partial)) for partial in lease.partials]
        oldest = min((label[1] for call in kept for label in call.tokens), default=0)
        expected = kept if kept and outstanding < self._ceiling(oldest) else []
        require(
            given == [(call.context, call.tokens) for call in expected],
            f"lease {lease.lease_id} of prompt {lease.prompt.index}: its {len(given)} partial "
            f"rollouts are not the {len(expected)} that were streamed",
        )
        return expected

    def _accepted(self, group: Group, index: int) -> None:
        name = group.group_id
        version = min(span.version for t in group.trajectories for span in t.episode.spans)
        self.tally.accepted += 1
        self._tries.pop(index, None)
        self._oldest[name] = version
        if self._step - version <= self._staleness.max_staleness and self._says_nothing(group):
            self.log.add("uninformative", name)
            self._move(index, "uninformative")
            self.tally.uninformative += 1
            self._num_replaced += 1
            self._recent_replaced.append(1)
            return
        self._move(index, "buffered")
        self._buffered[name] = index, version
        if self._step - version > self._staleness.max_staleness:
            self._too_old(name, index)
        else:
            self._recent_replaced.append(0)

    def _says_nothing(self, group: Group) -> bool:
        """Return whether refill sets a group aside: equal rewards, and not too many such groups yet."""
        if self._refill is None or self._num_replaced >= self._refill.max_groups:
            return False
        rewards = [trajectory.reward for trajectory in group.trajectories]
        return all(reward == rewards[0] for reward in rewards)

    def _failed(self, group: Group, name: str) -> None:
        """Enter a refused result. Unless the task failed, other workers go on from the streamed tokens."""
        index = self.held[name].lease.prompt.index
        failed = any(t.status != "ok" for t in group.trajectories)
        self._tries[index] = self._tries.get(index, 0) + 1
        self.tally.failed += failed
        if self._tries[index] < MAX_ATTEMPTS and not failed:
            self._end(name)
            return
        del self.held[name]
        self._move(index, "waiting" if self._tries[index] < MAX_ATTEMPTS else "set aside")

    def _too_old(self, name: str, index: int) -> None:
        """Drop a group as too old: its prompt waits again."""
        self.log.add("dropped", name)
        del self._buffered[name]
        self._move(index, "waiting")
        self.tally.dropped += 1

    def _train(self, name: str, step: int) -> None:
        oldest, budget = self._oldest[name], self._staleness.max_staleness
        require(step - oldest <= budget, f"group {name} of v{oldest} is in the batch of step {step}")
        uses = self._uses[name] = self._uses.get(name, 0) + 1
        require(uses <= self._staleness.reuse, f"group {name} was trained {uses} times")
        if name in self._buffered:
            index, _ = self._buffered.pop(name)
            self._move(index, "trained")
            self.tally.trained += 1
        else:
            require(uses > 1, f"group {name} was dropped, and is in the batch of step {step}")
            self.tally.reused += 1

    def _check_excuse(self, found: NotReady, step: int) -> None:
        """Check that the buffer's reason for giving no batch is true."""
        budget, enough = self._staleness.max_staleness, len(self._buffered) >= self._groups_per_step
        leased = [known for known in self.held.values() if step - known.lease.version <= budget]
        said = f"step {step}: no batch ({found.reason}) with {len(self._buffered)} groups buffered"
        holds = self._staleness.policy == "wait" and bool(leased)
        require(found.reason != "holding" or holds, f"{said} and {len(leased)} leases that could be held for")
        require(found.reason == "holding" or not enough, said)
        if found.reason == "starved":
            require(not any(step - v <= budget for v in self._leasing()), f"{said}, not so")

    def _num_outstanding(self) -> int:
        budget = self._staleness.max_staleness
        leased = sum(self._step - known.lease.version <= budget for known in self.held.values())
        return len(self._buffered) + leased

    def _ceiling(self, version: int) -> int:
        """Return the limit on outstanding groups for one more of `version`: (v + S - t + 1) batches.

        The queue's length is a second limit, which assumes that refill replaces the recent share of the
        leased groups.
        """
        batches = version + self._staleness.max_staleness - self._step + 1
        outstanding, replaced = self._num_outstanding(), self._recent_replaced
        u = sum(replaced) / (len(replaced) + 1)
        leased = outstanding - len(self._buffered)
        free = (self._staleness.queue_batches * self._groups_per_step - outstanding + u * leased) / (1 - u)
        return min(max(batches, 0) * self._groups_per_step, outstanding + math.floor(free + 1e-9))

    def _leasing(self) -> list[int]:
        """Return the versions of the serving workers that are not standbys."""
        return [v for name, v in self._serving.items() if v >= 0 and name not in self._standbys]

    def _share(self, worker_id: str) -> int:
        """Return the permits of one worker."""
        version = self._serving[worker_id]
        if version < 0 or worker_id in self._standbys:
            return 0
        permits = max(0, self._ceiling(version) - self._num_outstanding())
        return -(-permits // len(self._leasing()))
