"""Thousands of random schedules of the pure core: the bound holds, nothing is lost, and it never gets stuck.

The schedule is adversarial: workers are slow, die, come back, miss publications; leases expire; the
learner trains whenever it may. Every draw comes from one seed, which a failure names.
"""

from __future__ import annotations

import random

import pytest

from echo_planes.config import StalenessConfig
from echo_planes.data.buffer_state import Accepted, NotReady
from echo_planes.types import Group, Lease, Prompt
from tests.unit.test_buffer import Buffer, answer

STEPS = 12
SEEDS_PER_SETTING = 50
LEASE_S = 40.0
SELECTORS = ("fifo", "freshest", "uniform", "staleness", "reward")


class Schedule:
    """One random run of buffer, learner and workers."""

    def __init__(self, seed: int, max_staleness: int, policy: str, selector: str) -> None:
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
        self.buffer = Buffer(
            self.staleness,
            groups_per_step=self.groups_per_step,
            samples_per_prompt=2,
            lease_s=LEASE_S,
            lineage="L0",
            seed=seed,
        )
        self.now_s = 0.0
        self.trained = 0
        self.newest = 0
        self.expired = 0
        self.answers: dict[str, Group] = {}
        self.uses: dict[str, int] = {}
        self.taken = 0
        self.training = False
        self.leases: list[Lease] = []
        self.epochs = {f"w{i}": 0 for i in range(self.rng.randint(1, 3))}
        self.serves = dict.fromkeys(self.epochs, -1)
        self.buffer.publish(0, "d0")
        for worker in self.epochs:
            self.buffer.register(worker, 0)

    def run(self) -> None:
        for _ in range(20_000):
            if self.trained >= STEPS:
                return
            self.now_s += self.rng.expovariate(1.0)
            moves = [self.pull, self.finish, self.finish, self.install, self.learn, self.learn]
            if self.rng.random() < 0.02:
                moves = [self.die]
            self.rng.choice(moves)()
            self.check()
        raise AssertionError(f"stuck at step {self.trained}")

    def check(self) -> None:
        counts = self.buffer.counts
        assert counts.lost == 0
        assert counts.accepted == counts.trained + counts.dropped_stale + counts.buffered

    def pull(self) -> None:
        worker = self.rng.choice(list(self.epochs))
        epoch = self.epochs[worker]
        for index in self.buffer.pull(worker, epoch, self.rng.randint(1, 6), self.now_s):
            self.leases.append(self.buffer.lease(worker, epoch, Prompt(index, (index,)), self.now_s))

    def finish(self) -> None:
        """Some lease ends: in time or long after, under the worker's newest version or an older one."""
        if not self.leases:
            return
        lease = self.leases.pop(self.rng.randrange(len(self.leases)))
        if self.rng.random() < 0.05:
            return  # never answered: it will expire
        newest = max(lease.version, self.serves[lease.worker_id])
        spans = [(lease.version, f"d{lease.version}")]
        if newest != lease.version and self.rng.random() < 0.5:
            spans.append((newest, f"d{newest}"))
        group = answer(lease, *spans)
        self.answers[group.group_id] = group
        self.buffer.submit(lease.worker_id, lease.epoch, lease.lease_id, group, self.now_s)

    def install(self) -> None:
        """A worker gets the newest version; sometimes the message is lost."""
        worker = self.rng.choice(list(self.epochs))
        if self.rng.random() < 0.7:
            self.serves[worker] = self.newest
            self.buffer.installed(worker, self.newest)

    def die(self) -> None:
        worker = self.rng.choice(list(self.epochs))
        self.buffer.lose(worker)
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
        self.training = True
        self.inspect(batch)

    def publish(self) -> None:
        self.newest = self.trained
        self.buffer.publish(self.newest, f"d{self.newest}")

    def inspect(self, batch: list[Accepted]) -> None:
        assert len(batch) == self.groups_per_step
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
    for seed in range(SEEDS_PER_SETTING * len(SELECTORS)):
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
