"""A worker that was given up comes back with results: none of them counts, and no honest one is refused.

First the buffer's core alone, then real workers on a real data plane, behind a network that holds calls back,
loses answers and delivers some calls twice. All in virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import StalenessConfig
from echo_planes.data.claims import Rules
from echo_planes.data.service import DataService
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.errors import LeaseError
from echo_planes.rollout.worker import RolloutWorker
from echo_planes.testing.fakes import FakeWeights, InlineScorer
from echo_planes.testing.simulation import replace_section, tiny_config
from echo_planes.testing.virtual_time import VirtualTimeLoop, run_virtual
from echo_planes.types import (
    Group,
    Lease,
    LeaseTokens,
    PartialRollout,
    Prompt,
    Receipt,
    Sample,
    Span,
    TrainBatch,
)
from tests.thorough import THOROUGH
from tests.unit.test_buffer import Buffer, answer
from tests.unit.test_group_policy import Engine
from tests.unit.test_worker import fake_task

T = TypeVar("T")
CUT_S = (10.0, 90.0)  # how long a worker is away
NOTICED_S = 8.0  # after so long at most it is replaced
CORES, FLEETS = (20, 4) if THOROUGH else (10, 3)
LATE_RESULTS = 1000  # of old epochs, in all, in each of the two tests

# --- the core ------------------------------------------------------------------------------------


class Core:
    """A buffer and honest workers; now and then one is cut off, replaced, and heard of again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.buffer = Buffer(
            StalenessConfig(max_staleness=6, queue_batches=4.0),
            groups_per_step=4,
            samples_per_prompt=2,
            lease_s=20.0,
            lineage="L0",
            seed=seed,
        )
        self.buffer.publish(0, "d0")
        self.step = 0
        self.token = 0
        self.calls: dict[str, int] = {}  # number of the last call of each lease
        self.epochs: dict[str, int] = {}
        self.in_hand: dict[str, list[tuple[float, Lease]]] = {}  # when they are finished
        self.away: list[tuple[float, Lease]] = []  # when they are heard of again
        self.lost_tokens: set[int] = set()  # sampled by those who were cut off
        self.late = self.honest = 0
        for i in range(4):
            self.replace(f"w{i}")

    def replace(self, worker: str) -> None:
        if self.rng.random() < 0.5:
            self.buffer.lose(worker)
        self.epochs[worker] = self.epochs.get(worker, -1) + 1
        self.in_hand[worker] = []
        self.buffer.register(worker, self.epochs[worker])
        self.buffer.installed(worker, self.step)

    def tokens(self, lease: Lease) -> tuple[LeaseTokens, int]:
        """A message that begins another call: it never contradicts what came before it."""
        self.token += 1
        sample = Sample((self.token,), (-0.5,), (Span(0, 1, lease.version, f"d{lease.version}"),), "stop")
        number = self.calls[lease.lease_id] = self.calls.get(lease.lease_id, len(lease.partials) - 1) + 1
        return LeaseTokens(lease.lease_id, ((number, PartialRollout((1, self.token), sample)),)), self.token

    def run(self, seconds: int) -> None:
        for second in range(seconds):
            now_s = float(second)
            for worker in self.epochs:
                self.work(worker, now_s)
            if self.rng.random() < 0.1:
                self.cut(self.rng.choice(list(self.epochs)), now_s)
            back = [lease for at_s, lease in self.away if at_s <= now_s]
            self.away = [(at_s, lease) for at_s, lease in self.away if at_s > now_s]
            for lease in back:
                self.comes_back(lease, now_s)
            if isinstance(self.buffer.next_batch(self.step, now_s), list):
                self.step += 1
                self.buffer.publish(self.step, f"d{self.step}")
                for worker in self.epochs:
                    self.buffer.installed(worker, self.step)

    def work(self, worker: str, now_s: float) -> None:
        epoch = self.epochs[worker]
        for at_s, lease in list(self.in_hand[worker]):
            if at_s <= now_s:
                self.in_hand[worker].remove((at_s, lease))
                receipt = self.buffer.submit(worker, epoch, lease.lease_id, answer(lease), now_s)
                assert receipt.accepted, f"an honest result was refused: {receipt.reason}"
                self.honest += 1
            elif self.rng.random() < 0.5:
                message, _ = self.tokens(lease)
                assert self.buffer.stream(worker, epoch, [message], now_s) == ()
        for index in self.buffer.pull(worker, epoch, 3 - len(self.in_hand[worker]), now_s):
            lease = self.buffer.lease(worker, epoch, Prompt(index, (index,)), now_s)
            words = {token for partial in lease.partials for token in partial.sample.token_ids}
            assert words.isdisjoint(self.lost_tokens), "tokens of an old epoch were kept"
            self.in_hand[worker].append((now_s + self.rng.uniform(2.0, 8.0), lease))

    def cut(self, worker: str, now_s: float) -> None:
        self.away += [(now_s + self.rng.uniform(*CUT_S), lease) for _, lease in self.in_hand[worker]]
        self.replace(worker)

    def comes_back(self, lease: Lease, now_s: float) -> None:
        worker, epoch = lease.worker_id, lease.epoch
        assert epoch < self.epochs[worker]
        before = self.buffer.counts
        for send in self.rng.sample(["stream", "hand over", "submit", "submit", "pull"], 5):
            message, token = self.tokens(lease)
            self.lost_tokens.add(token)
            if send == "stream":
                assert self.buffer.stream(worker, epoch, [message], now_s) == (lease.lease_id,)
            elif send == "hand over":
                assert self.buffer.hand_over(worker, epoch, [message], now_s) == 0
            elif send == "submit":
                receipt = self.buffer.submit(worker, epoch, lease.lease_id, answer(lease), now_s)
                assert not receipt.accepted
                assert receipt.reason in ("unknown", "fenced")
                self.late += 1
            else:
                with pytest.raises(LeaseError, match="is fenced"):
                    self.buffer.pull(worker, epoch, 1, now_s)
        after = self.buffer.counts
        assert (after.accepted, after.leased, after.discarded_tokens) == (
            before.accepted,
            before.leased,
            before.discarded_tokens,
        )


def test_results_of_old_epochs_change_nothing() -> None:
    late = honest = 0
    for seed in range(CORES):
        core = Core(seed)
        core.run(300)
        assert core.buffer.counts.lost == 0
        assert core.buffer.counts.accepted == 2 * core.honest
        assert core.buffer.counts.refused == 2 * core.late
        late, honest = late + core.late, honest + core.honest
    assert late >= LATE_RESULTS
    assert honest >= LATE_RESULTS


# --- real workers, a real data plane, and a bad network between them -----------------------------


class LoggedEngine(Engine):
    """Remembers when each of its tokens was sampled."""

    new_tokens = count(0x10000)

    def __init__(self) -> None:
        super().__init__(length=8)
        self.sampled_s: dict[int, float] = {}

    async def generate(
        self, prompt_ids: Sequence[int], *, on_tokens: Callable[[int, Sample], None], **settings: Any
    ) -> list[Sample]:
        def logged(index: int, piece: Sample) -> None:
            now_s = asyncio.get_running_loop().time()
            self.sampled_s.update(dict.fromkeys(piece.token_ids, now_s))
            on_tokens(index, piece)

        return await super().generate(prompt_ids, on_tokens=logged, **settings)


class Network:
    """The way from one incarnation to the data plane.

    Calls take up to two seconds, and so do answers. One submission in eight is delivered twice, and so are
    leases that are handed over; the second answer is lost. While it is cut, whatever is under way waits.
    """

    def __init__(self, data: DataService, seed: str, is_current: Callable[[], bool]) -> None:
        self.data = data
        self.rng = random.Random(seed)
        self.is_current = is_current
        self.open_s = 0.0  # cut until then
        self.late = self.honest = self.doubled = 0
        self.accepted: list[Group] = []

    async def pass_on(
        self, call: Callable[[], Coroutine[Any, Any, T]], *, twice: bool, extra_s: float = 0
    ) -> T:
        await self.hold(extra_s)
        result = await call()
        if twice and self.rng.random() < 0.125:
            self.doubled += 1
            await call()
        await self.hold(0.0)
        return result

    async def hold(self, extra_s: float) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 2.0))
        while (left_s := self.open_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left_s + extra_s)

    async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]:
        # The last that comes through after a cut: it is what tells a worker that it was replaced.
        return await self.pass_on(
            lambda: self.data.pull(worker_id, epoch, room, wait_s), twice=False, extra_s=9.0
        )

    async def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
        return await self.pass_on(lambda: self.data.stream(worker_id, epoch, messages), twice=False)

    async def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
        async def call() -> int:
            given = await self.data.hand_over(worker_id, epoch, messages)
            assert given == 0  # nobody is asked to give anything up, but by being replaced
            return given

        return await self.pass_on(call, twice=True)

    async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]:
        seen: set[str] = set()

        async def call() -> list[Receipt]:
            receipts = await self.data.submit(worker_id, epoch, groups)
            for receipt, (lease_id, group) in zip(receipts, groups, strict=True):
                honest = self.is_current() and lease_id not in seen
                assert receipt.accepted == honest, f"{worker_id}.{epoch} {lease_id}: {receipt}"
                self.late += not self.is_current()
                if honest:
                    self.honest += 1
                    self.accepted.append(group)
                    seen.add(lease_id)
            return receipts

        return await self.pass_on(call, twice=True)


class Fleet:
    """Three workers; each is cut off again and again, replaced, and comes back."""

    def __init__(self, folder: Path, seed: int, loop: VirtualTimeLoop) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        config = tiny_config(max_staleness=6, queue_batches=2.0)
        self.config = replace_section(
            config,
            sampling={**config.sampling.model_dump(), "prompts_per_step": 16, "max_new_tokens": 9},
        )
        self.data = DataService(
            self.config,
            "L0",
            folder / REPLAY_FOLDER,
            adapter=fake_task(),
            clock=loop,
            rules=Rules(vocabulary=2**31, max_tokens=512),  # no token of any engine is that of another
        )
        self.epochs = dict.fromkeys(("w0", "w1", "w2"), -1)
        self.engines: dict[tuple[str, int], LoggedEngine] = {}
        self.networks: dict[tuple[str, int], Network] = {}
        self.running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.cut_s: dict[tuple[str, int], float] = {}
        self.step = 0

    async def start(self, worker: str) -> None:
        self.epochs[worker] += 1
        me = (worker, self.epochs[worker])
        await self.data.register(*me)
        engine = self.engines[me] = LoggedEngine()
        engine.version, engine.digest = self.step, f"d{self.step}"
        await self.data.installed(worker, self.step)
        self.networks[me] = Network(
            self.data, f"{me}/{self.rng.random()}", lambda: self.epochs[worker] == me[1]
        )
        rollout = RolloutWorker(
            *me,
            "L0",
            engine=engine,
            task=fake_task(),
            scorer=InlineScorer(fake_task()),
            source=self.networks[me],
            weights=FakeWeights(),
            kind=WorkerConfig(max_groups=8),
            sampling=self.config.sampling,
            clock=self.loop,
        )
        self.running[me] = asyncio.create_task(rollout.run())

    async def learn(self) -> None:
        while True:
            if isinstance(await self.data.next_batch(self.step, 1.0), TrainBatch):
                self.step += 1
                await self.data.publish(self.step, f"d{self.step}")
                for worker, epoch in self.epochs.items():
                    engine = self.engines[(worker, epoch)]
                    engine.version, engine.digest = self.step, f"d{self.step}"
                    await self.data.installed(worker, self.step)

    async def disturb(self, worker: str, until_s: float) -> None:
        while self.loop.time() < until_s:
            await asyncio.sleep(self.rng.uniform(12.0, 25.0))
            me = (worker, self.epochs[worker])
            self.cut_s[me] = self.loop.time()
            self.networks[me].open_s = self.loop.time() + self.rng.uniform(*CUT_S)
            await asyncio.sleep(self.rng.uniform(0.0, NOTICED_S))
            if self.rng.random() < 0.5:
                await self.data.lose(worker)
            await self.start(worker)

    async def run(self, seconds: float) -> None:
        await self.data.publish(0, "d0")
        for worker in self.epochs:
            await self.start(worker)
        learning = asyncio.create_task(self.learn())
        await asyncio.gather(*(self.disturb(worker, seconds) for worker in self.epochs))
        await asyncio.sleep(CUT_S[1] + 30.0)  # until everybody has come back
        for (worker, epoch), running in self.running.items():
            if epoch == self.epochs[worker]:
                if running.done():
                    running.result()
                running.cancel()
            else:  # it was told, and ended
                assert isinstance(running.exception(), LeaseError), running
        learning.cancel()
        await asyncio.wait([learning, *self.running.values()])
        await asyncio.sleep(0.01)  # what they had asked of their engines ends too
        await self.data.close()


def test_workers_that_come_back_after_they_were_replaced_hand_in_nothing(tmp_path: Path) -> None:
    late = honest = doubled = 0
    for seed in range(FLEETS):
        folder = tmp_path / str(seed)

        async def play(loop: VirtualTimeLoop, folder: Path = folder, seed: int = seed) -> Fleet:
            fleet = Fleet(folder, seed, loop)
            await fleet.run(600.0)
            assert (await fleet.data.counts()).lost == 0
            return fleet

        fleet = run_virtual(play)
        made = {
            token: (me, at_s)
            for me, engine in fleet.engines.items()
            for token, at_s in engine.sampled_s.items()
        }
        groups = [group for network in fleet.networks.values() for group in network.accepted]
        tokens = [token for group in groups for t in group.trajectories for token in t.episode.response_ids]
        assert len(tokens) == len(set(tokens))
        for token in tokens:
            me, at_s = made[token]
            assert at_s <= fleet.cut_s.get(me, at_s), f"seed {seed}: {me} sampled it after it was cut off"
        rows = StoreSnapshot(folder / REPLAY_FOLDER).table().to_pylist()
        assert sorted({row["group_id"] for row in rows}) == sorted(group.group_id for group in groups)
        late += sum(network.late for network in fleet.networks.values())
        honest += sum(network.honest for network in fleet.networks.values())
        doubled += sum(network.doubled for network in fleet.networks.values())
    assert late >= LATE_RESULTS
    assert honest >= LATE_RESULTS
    assert doubled > 25 * FLEETS


# --- messages that come twice, or in another order -----------------------------------------------


@pytest.mark.parametrize("arrivals", [(0, 1, 1), (0, 0, 1), (0, 2, 1)])
def test_tokens_that_come_twice_or_out_of_order_leave_no_partial_that_was_not_sampled(
    arrivals: tuple[int, ...],
) -> None:
    buffer = Core(0).buffer
    (index, *_) = buffer.pull("w0", 0, 1, 0.0)
    lease = buffer.lease("w0", 0, Prompt(index, (index,)), 0.0)
    span = (Span(0, 1, 0, "d0"),)
    words = [Sample((token,), (-0.5,), span, "") for token in (5, 6, 7)]
    messages = [
        LeaseTokens(lease.lease_id, ((0, PartialRollout((1,) if place == 0 else (), word, place)),))
        for place, word in enumerate(words)
    ]
    for place in arrivals:
        buffer.stream("w0", 0, [messages[place]], 0.0)
    buffer.lose("w0")
    buffer.expire(0.0)
    indices = buffer.pull("w1", 0, 1, 0.0)
    again = buffer.lease("w1", 0, Prompt(indices[0], (indices[0],)), 0.0)
    assert again.prompt.index == index
    tokens = again.partials[0].sample.token_ids if again.partials else ()
    assert tokens == (5, 6, 7)[: len(tokens)]
