"""Thousands of random schedules of the pure core: the bound holds, nothing is lost, and it never gets stuck.

The schedule is adversarial: workers are slow, die, come back, miss publications; they stream tokens, hand
leases over, are recalled, and go on for a while after they were replaced; leases expire; the learner trains
whenever it may; the run is saved, dies and is resumed. Every draw comes from one seed, which a failure names.

Beside the buffer runs a model of it that knows only what was sent and what was answered: which leases live,
and which tokens were kept of every prompt. The ledger of tokens that holds at every moment:

    streamed = in accepted groups + discarded + of prompts that are leased or wait
    continued = the sum over all leases of the tokens they began with
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pytest

from echo_planes.config.schema import StalenessConfig
from echo_planes.data.replay.buffer import MAX_ATTEMPTS
from echo_planes.data.replay.buffer_state import Accepted, BufferState, NotReady
from echo_planes.data.replay.checkpoint_state import STATE_NAME, load_checkpoint_state, write_checkpoint_state
from echo_planes.data.replay.refill import Refill
from echo_planes.data.store.index import GroupIndex
from echo_planes.errors import LeaseError
from echo_planes.types import Group, Lease, LeaseTokens, PartialRollout, Prompt, Sample, Span
from tests.thorough import THOROUGH
from tests.unit.test_buffer import Buffer, answer
from tests.unit.test_checkpoint import of_lineage

STEPS = 12
SEEDS_PER_SETTING = 40 if THOROUGH else 6
REFILL_SCHEDULES = 1000 if THOROUGH else 20  # of each of ten settings
PART_SCHEDULES = 2500 if THOROUGH else 20  # of each of four settings
LEASE_S = 40.0
SELECTORS = ("fifo", "freshest", "uniform", "staleness", "reward")

Label = tuple[int, str]  # version and digest of what made a token


@dataclass
class Call:
    """One call of the policy, as its tokens were kept."""

    context: tuple[int, ...]
    tokens: list[tuple[int, Label]] = field(default_factory=list)
    ended: bool = False


@dataclass(eq=False)
class Held:
    """A lease in a worker's hands."""

    lease: Lease
    calls: list[Call]
    issued_s: float
    ends_s: float
    lives: bool = True
    recalled: bool = False
    hangs: bool = False  # nothing is heard of it any more


class Schedule:
    """One random run of buffer, learner and workers."""

    def __init__(
        self,
        seed: int,
        max_staleness: int,
        policy: str,
        selector: str,
        refill: bool = False,
        parts: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        kappa = self.rng.randint(1, max_staleness + 1)
        self.staleness = StalenessConfig(
            max_staleness=max_staleness,
            publish_every=kappa,
            policy=policy,  # type: ignore[arg-type]
            selector=selector,  # type: ignore[arg-type]
            queue_batches=self.rng.choice([1.0, 1.5, 100.0]),
            reuse=self.rng.randint(1, max_staleness + 1) if self.rng.random() < 0.5 else 1,
        )
        self.groups_per_step = self.rng.randint(1, 4)
        # All groups are without a signal in some: the run goes on because there is a limit.
        self.alike = self.rng.choice([0.1, 0.5, 0.9, 1.0]) if refill else 0.0
        limit = self.rng.randint(0, 3 * self.groups_per_step)
        self.refill = Refill("reward", limit) if refill else None
        self.replaced = 0  # groups, for the batch to come
        self.recent: deque[bool] = deque(maxlen=4 * self.groups_per_step)
        self.set_aside: set[int] = set()  # their prompts, of all batches
        self.part_groups = self.rng.randint(1, self.groups_per_step) if parts else None
        self.in_step = 0  # groups of the step that is being made, in its parts
        self.num_parts = 0
        self.seed = seed
        self.resumes = 0
        self.finished: list[int] = []  # tokens of accepted groups
        self.buffer = self.build(GroupIndex())
        self.now_s = 0.0
        self.trained = 0
        self.newest = 0
        self.expired = 0
        self.answers: dict[str, Group] = {}
        self.uses: dict[str, int] = {}
        self.taken = 0
        self.training = False
        self.leases: list[Held] = []  # that some incarnation believes to have
        self.kept: dict[int, list[Call]] = {}  # tokens of unfinished prompts, by prompt index
        self.next_token = 0
        self.tries: dict[int, int] = {}  # results of a prompt that were refused
        self.streamed = self.in_accepted = self.continued = self.continued_tokens = 0
        self.epochs = {f"w{i}": 0 for i in range(self.rng.randint(1, 3))}
        self.serves = dict.fromkeys(self.epochs, -1)
        self.buffer.publish(0, "d0")
        for worker in self.epochs:
            self.buffer.register(worker, 0)

    def build(self, index: GroupIndex, state: BufferState | None = None) -> Buffer:
        return Buffer(
            self.staleness,
            groups_per_step=self.groups_per_step,
            samples_per_prompt=2,
            lease_s=LEASE_S,
            lineage=f"L{self.resumes}",
            seed=self.seed,
            index=index,
            state=state,
            refill=self.refill,
            part_groups=self.part_groups,
        )

    def run(self) -> None:
        for _ in range(20_000):
            if self.trained >= STEPS:
                return
            self.now_s += self.rng.expovariate(1.0)
            moves = [self.pull, self.finish, self.finish, self.install, self.learn, self.learn]
            moves += [self.stream, self.stream]
            if self.rng.random() < 0.1:
                moves = [self.hand_over, self.recall]
            if self.rng.random() < 0.02:
                moves = [self.die]
            if self.rng.random() < 0.005 and not self.training:
                moves = [self.resume]
            self.rng.choice(moves)()
            self.check()
        raise AssertionError(f"stuck at step {self.trained}")

    def check(self) -> None:
        self.buffer.expire(self.now_s)
        self.expire()
        counts = self.buffer.counts
        assert counts.lost == 0
        parts = counts.trained + counts.dropped_stale + counts.uninformative + counts.buffered
        assert counts.accepted == parts
        assert counts.uninformative == 2 * len(self.set_aside)
        assert counts.leased == 2 * len(self.live())
        if self.staleness.max_staleness == 0:
            admissible = sum(held.lease.version >= self.buffer.step for held in self.live())
            assert self.in_step + counts.buffered // 2 + admissible <= self.groups_per_step
        open_tokens = sum(len(call.tokens) for calls in self.kept.values() for call in calls)
        assert self.streamed == self.in_accepted + counts.discarded_tokens + open_tokens
        assert (counts.continued, counts.continued_tokens) == (self.continued, self.continued_tokens)

    # --- the model: which leases live, and what is kept of them ----------------------------------

    def talking(self) -> list[Held]:
        return [held for held in self.leases if not held.hangs]

    def live(self) -> list[Held]:
        return [held for held in self.leases if held.lives]

    def holds(self, held: Held) -> bool:
        """Whether its lease is still its worker's."""
        return held.lives and held.ends_s > self.now_s

    def expire(self) -> None:
        for held in self.live():
            if held.ends_s <= self.now_s:
                self.ended(held)

    def ended(self, held: Held) -> None:
        """A lease ended without a result: what is of a published version waits for somebody."""
        held.lives = False
        index = held.lease.prompt.index
        self.kept[index] = [
            call for call in held.calls if all(digest == f"d{v}" for _, (v, digest) in call.tokens)
        ]

    def may_go_on(self, oldest: int) -> bool:
        """Whether a group whose oldest token is of that version may be begun now."""
        step, budget = self.buffer.step, self.staleness.max_staleness
        buffered = self.buffer.counts.buffered // 2 + self.in_step
        leased = sum(held.lease.version >= step - budget for held in self.live())
        within = buffered + leased < max(0, oldest + budget - step + 1) * self.groups_per_step
        u = sum(self.recent) / (len(self.recent) + 1)  # of the leased ones so many fill no queue
        expected = buffered + leased * (1 - u)
        return within and expected + (1 - u) <= self.staleness.queue_batches * self.groups_per_step + 1e-9

    def serving(self, held: Held) -> Label:
        """Version and digest that make a lease's next tokens; once in a while the digest is a wrong one."""
        lease = held.lease
        current = self.epochs[lease.worker_id] == lease.epoch
        version = max(self.serves[lease.worker_id], lease.version) if current else lease.version
        return version, f"d{version}" if self.rng.random() < 0.99 else "damaged"

    def sampled(self, held: Held) -> tuple[LeaseTokens, list[Call]]:
        """A message with some new tokens, and what is kept after it."""
        calls = [Call(call.context, list(call.tokens), call.ended) for call in held.calls]
        label, pieces = self.serving(held), []
        for number in range(len(calls) + self.rng.randint(0, 1)):
            is_new = number == len(calls)
            if is_new:
                calls.append(Call((held.lease.prompt.index, number)))
            call = calls[number]
            if call.ended or not (is_new or self.rng.random() < 0.7):
                continue
            first = len(call.tokens)
            tokens = tuple(range(self.next_token, self.next_token + self.rng.randint(1, 3)))
            self.next_token += len(tokens)
            call.tokens += [(token, label) for token in tokens]
            call.ended = self.rng.random() < 0.2
            span = Span(0, len(tokens), *label)
            sample = Sample(tokens, (-0.5,) * len(tokens), (span,), "stop" if call.ended else "")
            pieces.append((number, PartialRollout(call.context if is_new else (), sample, first)))
        return LeaseTokens(held.lease.lease_id, tuple(pieces)), calls

    def keep(self, held: Held, calls: list[Call]) -> None:
        self.streamed += sum(len(call.tokens) for call in calls)
        self.streamed -= sum(len(call.tokens) for call in held.calls)
        held.calls = self.kept[held.lease.prompt.index] = calls

    # --- what workers do -------------------------------------------------------------------------

    def pull(self) -> None:
        worker = self.rng.choice(list(self.epochs))
        epoch = self.epochs[worker]
        indices = self.buffer.pull(worker, epoch, self.rng.randint(1, 6), self.now_s)
        self.expire()
        for index in indices:
            assert index not in self.set_aside, "a prompt that is done went out again"
            waiting = self.kept.pop(index, [])
            versions = [version for call in waiting for _, (version, _) in call.tokens]
            if versions and not self.may_go_on(min(versions)):
                assert min(versions) < self.serves[worker]  # else it is no older than what is begun anew
                waiting, versions = [], []
            lease = self.buffer.lease(worker, epoch, Prompt(index, (index,)), self.now_s)
            self.begins_with(lease, waiting)
            assert lease.version == min([self.serves[worker], *versions])
            self.continued += bool(waiting)
            self.continued_tokens += len(versions)
            self.kept[index] = waiting
            self.leases.append(Held(lease, waiting, self.now_s, self.now_s + LEASE_S))

    def begins_with(self, lease: Lease, calls: list[Call]) -> None:
        """Check that a lease gets of others exactly what they streamed, token by token with its version."""
        assert len(lease.partials) == len(calls)
        for partial, call in zip(lease.partials, calls, strict=True):
            assert partial.context == call.context
            labels = [(s.version, s.digest) for s in partial.sample.spans for _ in range(s.start, s.stop)]
            assert list(zip(partial.sample.token_ids, labels, strict=True)) == call.tokens
            assert bool(partial.sample.finish_reason) == call.ended

    def stream(self) -> None:
        """Some lease's worker sends tokens; what it is told to give up, it hands over at once or ignores."""
        if not self.talking():
            return
        held = self.rng.choice(self.talking())
        lease = held.lease
        message, calls = self.sampled(held)
        refused = self.buffer.stream(lease.worker_id, lease.epoch, [message], self.now_s)
        expected = set() if self.holds(held) else {lease.lease_id}
        if self.epochs[lease.worker_id] == lease.epoch:
            mine = [other for other in self.live() if other.lease.worker_id == lease.worker_id]
            expected |= {other.lease.lease_id for other in mine if other.recalled}
        assert set(refused) == expected
        if self.holds(held):
            self.keep(held, calls)
            held.ends_s = self.now_s + LEASE_S
        if refused and self.rng.random() < 0.7:
            self.give_up([held])

    def hand_over(self) -> None:
        """A worker gives up some of its leases, or all."""
        if self.talking():
            one = self.rng.choice(self.talking()).lease
            name = (one.worker_id, one.epoch)
            mine = [held for held in self.talking() if (held.lease.worker_id, held.lease.epoch) == name]
            self.give_up(self.rng.sample(mine, self.rng.randint(1, len(mine))))

    def give_up(self, chosen: list[Held]) -> None:
        sent = [(held, *self.sampled(held)) for held in chosen]
        lease = chosen[0].lease
        messages = [message for _, message, _ in sent]
        given = self.buffer.hand_over(lease.worker_id, lease.epoch, messages, self.now_s)
        assert given == sum(map(self.holds, chosen))
        for held, _, calls in sent:
            if self.holds(held):
                self.keep(held, calls)
                self.ended(held)
                self.leases.remove(held)

    def recall(self) -> None:
        worker = self.rng.choice(list(self.epochs))
        wanted = self.rng.randint(1, 3)
        mine = [held for held in self.live() if held.lease.worker_id == worker]
        done = self.finished[-64:]
        half = median(done) / 2 if len(done) >= 16 else math.inf
        near = [held for held in mine if sum(len(call.tokens) for call in held.calls) <= half]
        newest = sorted(near or mine, key=lambda held: (held.issued_s, held.lease.lease_id), reverse=True)
        cheapest = sorted((held for held in newest if not held.recalled), key=self.prefill_tokens)[:wanted]
        assert self.buffer.recall(worker, wanted) == [held.lease.lease_id for held in cheapest]
        for held in cheapest:
            held.recalled = True

    def prefill_tokens(self, held: Held) -> int:
        """Tokens that another worker would prefill before it goes on."""
        unfinished = [len(call.context) + len(call.tokens) for call in held.calls if not call.ended]
        longest = max((len(call.context) + len(call.tokens) for call in held.calls), default=1)
        return sum(unfinished) or longest

    def finish(self) -> None:
        """Some lease ends: in time or long after, with whatever versions its tokens are of."""
        if not self.talking():
            return
        held = self.rng.choice(self.talking())
        living = [one for one in self.talking() if one.lives]
        # Refill needs many groups for a step: they must not come to an end later than leases run out.
        if self.refill and living and self.rng.random() < 0.5:
            held = self.rng.choice(living)
        if self.rng.random() < 0.05:
            held.hangs = True  # never answered: it will expire
            return
        self.leases.remove(held)
        lease = held.lease
        spans = [(lease.version, f"d{lease.version}"), *(label for c in held.calls for _, label in c.tokens)]
        if self.rng.random() < 0.5:
            spans.append(self.serving(held))
        rewards = (1.0, float(self.rng.random() < self.alike)) if self.refill else (1.0,)
        group = of_lineage(f"L{self.resumes}", answer(lease, *dict.fromkeys(spans), rewards=rewards))
        self.answers[group.group_id] = group
        receipt = self.buffer.submit(lease.worker_id, lease.epoch, lease.lease_id, group, self.now_s)
        damaged = any(digest == "damaged" for _, digest in spans)
        assert receipt.accepted == (self.holds(held) and not damaged)
        if receipt.accepted:
            self.taken_in(group, says_nothing=rewards[0] == rewards[-1])
            self.finished.append(sum(len(one.episode.response_ids) for one in group.trajectories))
        index = lease.prompt.index
        if self.holds(held):
            self.tries[index] = 0 if receipt.accepted else self.tries.get(index, 0) + 1
            if receipt.accepted or self.tries[index] == MAX_ATTEMPTS:
                tokens = sum(len(call.tokens) for call in self.kept.pop(index))
                self.in_accepted += tokens if receipt.accepted else 0
            else:  # others go on with what there was
                self.ended(held)
        elif held.lives:  # its time was up, and nobody had looked
            self.leases.append(held)

    def taken_in(self, group: Group, *, says_nothing: bool) -> None:
        """Whether an accepted group is set aside: as long as fewer are than the limit of this batch says."""
        too_old = group.version < self.buffer.step - self.staleness.max_staleness
        if too_old:
            return
        goes = bool(self.refill) and says_nothing and self.replaced < self.refill.max_groups
        self.recent.append(goes)
        if goes:
            self.replaced += 1
            self.set_aside.add(group.trajectories[0].prompt.index)
            del self.answers[group.group_id]  # were it trained, its answer would be missed

    def install(self) -> None:
        """A worker gets the newest version; sometimes the message is lost."""
        worker = self.rng.choice(list(self.epochs))
        if self.rng.random() < 0.7:
            self.serves[worker] = self.newest
            self.buffer.installed(worker, self.newest)

    def die(self) -> None:
        """A worker is replaced; what it had in hand it goes on with, not knowing of it."""
        worker = self.rng.choice(list(self.epochs))
        mine = [held for held in self.live() if held.lease.worker_id == worker]
        if self.rng.random() < 0.5:
            assert self.buffer.lose(worker) == len(mine)
        self.epochs[worker] += 1
        self.serves[worker] = -1
        self.buffer.register(worker, self.epochs[worker])
        for held in mine:
            self.ended(held)

    def resume(self) -> None:
        """The run is saved and dies at once; another lineage goes on, with new incarnations of workers.

        Between two parts of a step it cannot be saved.
        """
        if self.in_step:
            with pytest.raises(LeaseError, match="not yet"):
                self.buffer.state()
            return
        for held in self.live():
            self.ended(held)
        oldest = self.buffer.step - self.staleness.max_staleness
        for index, calls in self.kept.items():
            if any(version < oldest for call in calls for _, (version, _) in call.tokens):
                self.kept[index] = []
        with TemporaryDirectory() as folder:
            write_checkpoint_state(Path(folder), self.buffer.state(), num_groups=0)
            state, _ = load_checkpoint_state(Path(folder) / STATE_NAME)
        self.resumes += 1
        self.recent.clear()
        self.tries.clear()
        self.buffer = self.build(self.buffer.index, state)
        self.finished = []
        self.publish()
        for worker in self.epochs:
            self.epochs[worker] += 1
            self.serves[worker] = -1
            self.buffer.register(worker, self.epochs[worker])

    def learn(self) -> None:
        """Finish the step in hand, or form the next batch."""
        if self.training:
            self.training = False
            self.trained += 1
            if self.trained % self.staleness.kappa == 0:
                self.publish()
            return
        batch = self.buffer.next_batch(self.trained, self.now_s)
        if isinstance(batch, NotReady):
            if batch.reason == "starved":
                self.publish()  # a starved learner publishes its current version, again if need be
            return
        self.inspect(batch)
        if self.buffer.step == self.trained:
            return  # the other parts of this step are still to come
        self.in_step = self.replaced = 0
        self.training = True
        budget = self.staleness.max_staleness
        for held in self.live() if self.staleness.policy == "wait" else []:
            if self.holds(held) and held.lease.version >= self.trained - budget:
                assert held.lease.version >= self.buffer.step - budget, "the batch condemned a live lease"

    def publish(self) -> None:
        self.newest = self.trained
        self.buffer.publish(self.newest, f"d{self.newest}")

    def inspect(self, batch: list[Accepted]) -> None:
        self.num_parts += 1
        self.in_step += len(batch)
        if self.part_groups is None:
            assert len(batch) == self.groups_per_step
        elif self.buffer.step == self.trained:
            assert self.part_groups <= len(batch)
            assert self.in_step < self.groups_per_step
        else:
            assert self.in_step == self.groups_per_step
        assert len({group.group_id for group in batch}) == len(batch)
        self.taken += len(batch)
        for group in batch:
            uses = self.uses[group.group_id] = self.uses.get(group.group_id, 0) + 1
            assert uses <= self.staleness.reuse
            for trajectory in self.answers[group.group_id].trajectories:
                for span in trajectory.episode.spans:
                    assert self.trained - span.version <= self.staleness.max_staleness
        # The ratio of what is sampled to what came in.
        assert self.taken <= self.staleness.reuse * len(self.uses)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_bound_ledger_and_liveness(max_staleness: int, policy: str) -> None:
    seen = {"accepted": 0, "refused": 0, "expired": 0, "continued": 0, "discarded_tokens": 0}
    resumes = 0
    schedules = SEEDS_PER_SETTING * len(SELECTORS)
    for seed in range(schedules):
        selector = SELECTORS[seed % len(SELECTORS)]
        schedule = Schedule(seed, max_staleness, policy, selector)
        try:
            schedule.run()
        except AssertionError as failure:
            raise AssertionError(
                f"seed {seed}, S={max_staleness}, {policy}, {selector}: {failure}"
            ) from failure
        if policy == "wait":
            assert schedule.buffer.counts.dropped_stale == 0, f"seed {seed}: wait dropped work"
        for name in seen:
            seen[name] += getattr(schedule.buffer.counts, name)
        resumes += schedule.resumes
    assert min(*seen.values(), resumes) > 0.4 * schedules, (
        f"the schedules do not try enough: {seen}, {resumes} resumes"
    )


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_bound_ledger_and_liveness_where_groups_without_a_signal_are_replaced(
    max_staleness: int, policy: str
) -> None:
    seen = {"uninformative": 0, "expired": 0, "continued": 0}
    at_limit = resumes = 0
    for seed in range(REFILL_SCHEDULES):
        schedule = Schedule(seed, max_staleness, policy, SELECTORS[seed % len(SELECTORS)], refill=True)
        try:
            schedule.run()
        except AssertionError as failure:
            raise AssertionError(f"seed {seed}, S={max_staleness}, {policy}: {failure}") from failure
        if policy == "wait":
            assert schedule.buffer.counts.dropped_stale == 0, f"seed {seed}: wait dropped work"
        for name in seen:
            seen[name] += getattr(schedule.buffer.counts, name)
        at_limit += schedule.alike == 1.0
        resumes += schedule.resumes
    assert seen["uninformative"] > 20 * REFILL_SCHEDULES
    assert min(seen["expired"], seen["continued"], at_limit, resumes) > 0.15 * REFILL_SCHEDULES, seen


@pytest.mark.parametrize("policy", ["drop", "wait"])
@pytest.mark.parametrize("refill", [False, True])
def test_steps_in_parts_train_exactly_their_groups_and_one_version(policy: str, refill: bool) -> None:
    """S = 0, as `learner.micro_batch_groups` asks: no group too many is leased, whatever the parts are."""
    seen = {"accepted": 0, "expired": 0, "continued": 0}
    parts = steps = resumes = 0
    for seed in range(PART_SCHEDULES):
        schedule = Schedule(seed, 0, policy, "fifo", refill, parts=True)
        try:
            schedule.run()
        except AssertionError as failure:
            raise AssertionError(f"seed {seed}, {policy}, refill {refill}: {failure}") from failure
        assert schedule.buffer.counts.trained == 2 * STEPS * schedule.groups_per_step
        for name in seen:
            seen[name] += getattr(schedule.buffer.counts, name)
        parts, steps, resumes = parts + schedule.num_parts, steps + STEPS, resumes + schedule.resumes
    assert parts > 1.3 * steps
    assert min(*seen.values(), resumes) > 0.15 * PART_SCHEDULES, (seen, resumes)
