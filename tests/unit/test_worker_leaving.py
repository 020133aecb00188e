"""Leases that a rollout worker gives up: when it leaves, and when the data plane asks one back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import SamplingConfig
from echo_planes.data.replay.partial_rollouts import LeasePartials
from echo_planes.rollout.worker import RolloutWorker
from echo_planes.testing.fakes import FakeWeights, InlineScorer
from echo_planes.types import (
    Episode,
    Group,
    Lease,
    LeaseTokens,
    PartialRollout,
    Prompt,
    Receipt,
    Reward,
    RewardFailure,
)
from tests.unit.test_group_policy import Engine as TokenEngine
from tests.unit.test_worker import LEASE_S, LoopClock, Source, end, fake_task, prompt, virtual

SAMPLES = 3
ANSWER_S = 6.0  # one token per second


class Engine(TokenEngine):
    """Answers of six tokens, one a second."""

    def __init__(self) -> None:
        super().__init__(length=int(ANSWER_S))


class Plane(Source):
    """A data plane that keeps tokens as the real one does, and whose answers may take their time."""

    def __init__(self, leases: int) -> None:
        super().__init__(leases, num_samples=SAMPLES)
        self.books: dict[str, LeasePartials] = {}
        self.given: list[str] = []  # leases handed over, in order
        self.submit_s = 0.0
        self.stream_s = 0.0
        self.late: asyncio.Future[int] | None = None  # so many leases come of a pull that is under way

    async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]:
        if not self.left and self.late is not None and not self.late.done():
            self.left += await self.late
        leases = await super().pull(worker_id, epoch, room, wait_s)
        self.books.update({lease.lease_id: LeasePartials() for lease in leases})
        return leases

    def keep(self, messages: Sequence[LeaseTokens]) -> None:
        for message in messages:
            if message.lease_id not in self.given:  # else it comes too late: the lease is another worker's
                self.books[message.lease_id].add(message)

    async def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
        self.keep(messages)
        refused = await super().stream(worker_id, epoch, messages)
        await asyncio.sleep(self.stream_s)
        return refused

    async def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
        self.keep(messages)
        self.given += [message.lease_id for message in messages]
        return await super().hand_over(worker_id, epoch, messages)

    async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]:
        await asyncio.sleep(self.submit_s)
        return await super().submit(worker_id, epoch, groups)

    def partials(self, lease_id: str) -> tuple[PartialRollout, ...]:
        return self.books[lease_id].partials({0: "d0"})


class SlowScorer(InlineScorer):
    """Takes three virtual seconds."""

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Reward | RewardFailure]:
        await asyncio.sleep(3.0)
        return await super().score(prompt, episodes)


def make(engine: Engine, plane: Plane, *, slow: bool = False, max_groups: int = 4) -> RolloutWorker:
    task = fake_task()
    return RolloutWorker(
        "w0",
        5,
        "L0",
        engine=engine,
        task=task,
        scorer=SlowScorer(task) if slow else InlineScorer(task),
        source=plane,
        weights=FakeWeights(),
        kind=WorkerConfig(max_groups=max_groups),
        sampling=SamplingConfig(lease_s=LEASE_S, max_new_tokens=9, stream_s=1.0),
        clock=LoopClock(),
    )


def play(worker: RolloutWorker, script: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a script beside a worker; an error that ends the worker is raised."""

    async def main() -> Any:
        running = asyncio.ensure_future(worker.run())
        result = await script()
        if running.done():
            await running
        await end(running)
        return result

    return virtual(main())


def leaving(worker: RolloutWorker, at_s: float, limit_s: float, then_s: float = 0.0) -> tuple[int, float]:
    """Have it leave at a time. How many it handed over, and how long that took."""

    async def script() -> tuple[int, float]:
        await asyncio.sleep(at_s)
        handed = await worker.leave(limit_s)
        took_s = asyncio.get_running_loop().time() - at_s
        await asyncio.sleep(then_s)
        return handed, took_s

    result: tuple[int, float] = play(worker, script)
    return result


def test_what_is_still_sampled_is_handed_over_at_once_with_its_last_tokens() -> None:
    engine, plane = Engine(), Plane(2)
    handed, took_s = leaving(make(engine, plane), 3.5, 100.0, then_s=20.0)
    assert (handed, took_s, plane.submitted) == (2, 0.0, {})
    assert plane.given == ["l0", "l1"]
    for index, lease_id in enumerate(plane.given):
        partials = plane.partials(lease_id)
        assert [one.context for one in partials] == [prompt(index).token_ids] * SAMPLES
        assert [len(one.sample.token_ids) for one in partials] == [3] * SAMPLES
        assert {one.sample.finish_reason for one in partials} == {""}
    assert engine.sampled == 2 * SAMPLES * 3  # and no more afterwards
    assert engine.open == 0


def test_what_is_scored_is_handed_in_first_where_the_time_allows() -> None:
    plane = Plane(1)
    handed, took_s = leaving(make(Engine(), plane, slow=True), ANSWER_S + 1.0, 10.0)
    assert (handed, took_s, plane.given) == (0, 2.0, [])
    assert list(plane.submitted) == ["l0"]


def test_what_is_not_scored_in_time_is_handed_over_whole() -> None:
    engine, plane = Engine(), Plane(1)
    handed, took_s = leaving(make(engine, plane, slow=True), ANSWER_S + 0.5, 1.0, then_s=20.0)
    assert (handed, took_s, plane.given, plane.submitted) == (1, 1.0, ["l0"], {})
    partials = plane.partials("l0")
    assert [one.sample.finish_reason for one in partials] == ["stop"] * SAMPLES
    assert [len(one.sample.token_ids) for one in partials] == [int(ANSWER_S)] * SAMPLES


def test_a_submission_under_way_is_waited_for_and_not_handed_over() -> None:
    plane = Plane(1)
    plane.submit_s = 2.0
    handed, took_s = leaving(make(Engine(), plane), ANSWER_S + 0.5, 10.0)
    assert (handed, took_s, plane.given) == (0, 1.5, [])
    assert list(plane.submitted) == ["l0"]


def test_a_worker_without_work_leaves_at_once_and_takes_nothing_more() -> None:
    plane = Plane(0)
    worker = make(Engine(), plane)

    async def script() -> tuple[int, int]:
        await asyncio.sleep(1.0)
        handed = await worker.leave(10.0)
        asked = len(plane.rooms)
        plane.left = 3
        await asyncio.sleep(30.0)
        return handed, len(plane.rooms) - asked

    assert play(worker, script) == (0, 0)
    assert plane.left == 3


def test_a_worker_that_has_left_ends_when_it_is_stopped() -> None:
    worker = make(Engine(), Plane(0))

    async def main() -> None:
        running = asyncio.ensure_future(worker.run())
        await asyncio.sleep(1.0)
        await worker.leave(10.0)
        await asyncio.sleep(10.0)
        await worker.stop()
        async with asyncio.timeout(10.0):
            await running

    virtual(main())


def test_leases_of_a_pull_under_way_are_handed_over_and_never_begun() -> None:
    engine, plane = Engine(), Plane(1)
    worker = make(engine, plane)

    async def script() -> int:
        plane.late = asyncio.get_running_loop().create_future()
        await asyncio.sleep(2.5)
        handed = await worker.leave(10.0)
        plane.late.set_result(2)
        await asyncio.sleep(20.0)
        return handed

    assert play(worker, script) == 1
    assert plane.given == ["l0", "l1", "l2"]
    assert len(engine.requests) == 1
    assert plane.partials("l1") == plane.partials("l2") == ()
    assert plane.submitted == {}


@pytest.mark.parametrize("submit_s", [0.0, 0.7])
@pytest.mark.parametrize(
    "at_s", [0.0, 0.5, 2.1, 4.75, 6.1, 6.3, 7.1, 8.25, 9.1, 9.5, 12.1, 18.25, 21.1, 24.1]
)
def test_whenever_it_leaves_each_lease_ends_once(at_s: float, submit_s: float) -> None:
    """Seven leases on two places: finished, being scored or handed in, sampled, not begun."""
    engine, plane = Engine(), Plane(7)
    plane.submit_s = submit_s
    handed, _ = leaving(make(engine, plane, slow=True, max_groups=2), at_s, 2.0, then_s=30.0)
    assert sorted([*plane.submitted, *plane.given]) == sorted(plane.books)
    assert handed == len(plane.given)
    assert engine.open == 0
    kept = sum(len(one.sample.token_ids) for name in plane.books for one in plane.partials(name))
    finished = sum(len(t.episode.response_ids) for g in plane.submitted.values() for t in g.trajectories)
    streamed = sum(len(one.sample.token_ids) for name in plane.submitted for one in plane.partials(name))
    assert kept - streamed + finished == engine.sampled  # of what it sampled, nothing is missing


def test_a_second_worker_goes_on_where_the_first_one_left() -> None:
    first, plane = Engine(), Plane(1)
    leaving(make(first, plane), 3.5, 1.0)
    partials = plane.partials("l0")

    class Next(Plane):
        async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]:
            leases = await super().pull(worker_id, epoch, room, wait_s)
            self.books.update({lease.lease_id: LeasePartials(partials) for lease in leases})
            return [
                Lease("l0", "g0", epoch, worker_id, one.prompt, SAMPLES, 0, LEASE_S, partials)
                for one in leases
            ]

    second, other = Engine(), Next(1)
    leaving(make(second, other), ANSWER_S, 1.0)
    assert first.sampled + second.sampled == SAMPLES * int(ANSWER_S)
    answers = [t.episode.response_ids for t in other.submitted["l0"].trajectories]
    assert [answer[:3] for answer in answers] == [one.sample.token_ids for one in partials]


def test_a_message_under_way_is_not_overtaken_by_the_hand_over() -> None:
    class Slow(Plane):
        async def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
            if asyncio.get_running_loop().time() > 2.0:
                await asyncio.sleep(0.8)  # a large one
            return await super().stream(worker_id, epoch, messages)

    engine, plane = Engine(), Slow(1)
    leaving(make(engine, plane), 3.5, 1.0, then_s=5.0)
    assert plane.given == ["l0"]
    for one in plane.partials("l0"):
        assert list(one.sample.token_ids) == sorted(one.sample.token_ids)  # as they were sampled
    assert sum(len(one.sample.token_ids) for one in plane.partials("l0")) == engine.sampled


# --- recalled leases -----------------------------------------------------------------------------


def test_a_recalled_lease_ends_here_and_its_last_tokens_are_handed_over() -> None:
    engine, plane = Engine(), Plane(2)
    plane.stream_s = 0.5  # tokens go on arriving until the answer comes
    worker = make(engine, plane)

    async def script() -> list[int]:
        await asyncio.sleep(1.6)
        plane.recalls.add("l1")
        open_now = [engine.open]
        await asyncio.sleep(2.5)
        open_now.append(engine.open)
        await asyncio.sleep(10.0)
        return open_now

    assert play(worker, script) == [2, 1]
    assert plane.given == ["l1"]
    assert list(plane.submitted) == ["l0"]
    lengths = {len(one.sample.token_ids) for one in plane.partials("l1")}
    assert engine.sampled == SAMPLES * (int(ANSWER_S) + lengths.pop())
    assert not lengths


def test_the_place_of_a_recalled_lease_is_free_again() -> None:
    plane = Plane(2)
    worker = make(Engine(), plane, max_groups=1)

    async def script() -> None:
        plane.recalls.add("l0")
        await asyncio.sleep(4.0 + ANSWER_S)

    play(worker, script)
    assert plane.given == ["l0"]
    assert list(plane.submitted) == ["l1"]


def test_a_recalled_lease_that_is_being_scored_is_handed_over_whole() -> None:
    plane = Plane(1)
    worker = make(Engine(), plane, slow=True)

    async def script() -> None:
        await asyncio.sleep(ANSWER_S + 0.5)
        plane.recalls.add("l0")
        await asyncio.sleep(20.0)

    play(worker, script)
    assert (plane.given, plane.submitted) == (["l0"], {})
    assert {one.sample.finish_reason for one in plane.partials("l0")} == {"stop"}


def test_a_lease_that_was_finished_before_the_recall_was_heard_is_handed_in() -> None:
    plane = Plane(1)
    plane.stream_s = 3.0
    worker = make(Engine(), plane)

    async def script() -> None:
        await asyncio.sleep(ANSWER_S - 1.5)
        plane.recalls.add("l0")
        await asyncio.sleep(20.0)

    play(worker, script)
    assert plane.given == []
    assert list(plane.submitted) == ["l0"]


def test_a_lease_that_was_never_ours_changes_nothing() -> None:
    plane = Plane(1)
    plane.recalls.add("l9")
    worker = make(Engine(), plane)
    assert leaving(worker, ANSWER_S + 2.0, 1.0) == (0, 0.0)
    assert list(plane.submitted) == ["l0"]
