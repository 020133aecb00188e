"""A worker that holds a short queue: what it begins, what it says of itself, and what it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from echo_planes.config.fleet import EngineConfig, WorkerConfig
from echo_planes.config.schema import SamplingConfig
from echo_planes.rollout.work import places
from echo_planes.rollout.worker import RolloutWorker
from echo_planes.testing.fakes import FakeWeights, InlineScorer
from echo_planes.types import LeaseTokens, WorkerStats
from tests.unit.test_worker import Engine, Source, fake_task, virtual

SLOTS, THETA, ANSWER_S = 2, 3, 4.0


class Plane(Source):
    """Remembers what it is told, and recalls what it is asked to."""

    def __init__(self, leases: int) -> None:
        super().__init__(leases)
        self.told: list[WorkerStats] = []
        self.held: list[LeaseTokens] = []

    async def tell(self, epoch: int, stats: WorkerStats) -> None:
        self.told.append(stats)


def play(
    router: str, engine: Engine, plane: Plane, script: Callable[[RolloutWorker], Coroutine[Any, Any, None]]
) -> None:
    task = fake_task()
    sampling = {"lease_s": 8.0, "max_new_tokens": 9, "router": router, "theta": THETA}
    worker = RolloutWorker(
        "w0",
        5,
        "L0",
        engine=engine,
        task=task,
        scorer=InlineScorer(task),
        source=plane,
        weights=FakeWeights(),
        kind=WorkerConfig(max_groups=SLOTS),
        sampling=SamplingConfig.model_validate(sampling),
        clock=_LoopClock(),
    )

    async def main() -> None:
        running = asyncio.create_task(worker.run())
        await script(worker)
        running.cancel()
        await asyncio.wait([running])
        await asyncio.sleep(0.01)  # what it had asked of its engine ends too

    virtual(main())


class _LoopClock:
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


def test_it_takes_a_queue_more_than_it_begins_and_goes_on_in_order() -> None:
    engine, plane = Engine(seconds=ANSWER_S), Plane(7)

    async def script(worker: RolloutWorker) -> None:
        await asyncio.sleep(1.5)
        assert plane.issued == SLOTS + THETA
        assert engine.open == SLOTS
        await asyncio.sleep(20.0)

    play("jsq", engine, plane, script)
    assert plane.rooms[0] == SLOTS + THETA
    assert engine.most_open == SLOTS
    assert list(plane.submitted) == [f"l{number}" for number in range(7)]


def test_queued_leases_are_kept_alive() -> None:
    plane = Plane(5)

    async def script(worker: RolloutWorker) -> None:
        await asyncio.sleep(1.5)
        assert plane.renewed[0][1] == ("l2", "l3", "l4")  # nothing has come of the others yet

    play("jsq", Engine(seconds=ANSWER_S), plane, script)


def test_it_says_how_full_it_is() -> None:
    plane = Plane(5)

    async def script(worker: RolloutWorker) -> None:
        await asyncio.sleep(9.5)

    play("jsq", Engine(seconds=ANSWER_S), plane, script)
    assert (plane.told[0].groups_in_flight, plane.told[0].slots) == (0, SLOTS)  # before it asks for anything
    assert (plane.told[1].groups_in_flight, plane.told[-1].groups_in_flight) == (5, 1)
    assert plane.told[-1].tokens > 0


def test_a_worker_that_pulls_says_nothing_and_queues_nothing() -> None:
    plane = Plane(5)

    async def script(worker: RolloutWorker) -> None:
        await asyncio.sleep(1.5)
        assert plane.issued == SLOTS

    play("pull", Engine(seconds=ANSWER_S), plane, script)
    assert plane.told == []


def test_a_recalled_lease_that_waits_is_given_up_and_never_begun() -> None:
    engine, plane = Engine(seconds=ANSWER_S), Plane(5)

    async def script(worker: RolloutWorker) -> None:
        plane.recalls = {"l2", "l4"}
        await asyncio.sleep(30.0)

    play("jsq", engine, plane, script)
    assert sorted(one.lease_id for one in plane.handed) == ["l2", "l4"]
    assert list(plane.submitted) == ["l0", "l1", "l3"]
    assert len(engine.requests) == 3


def test_one_that_leaves_hands_its_queue_over_too() -> None:
    engine, plane = Engine(seconds=ANSWER_S), Plane(5)

    async def script(worker: RolloutWorker) -> None:
        await asyncio.sleep(1.5)
        assert await worker.leave(10.0) == 5
        await asyncio.sleep(20.0)

    play("jsq", engine, plane, script)
    assert [one.lease_id for one in plane.handed] == [f"l{number}" for number in range(5)]
    assert len(engine.requests) == SLOTS


def test_a_slot_is_room_in_the_engine_for_a_whole_group() -> None:
    kind = WorkerConfig(max_groups=16, engine=EngineConfig(max_num_seqs=20))
    settings = {"samples_per_prompt": 8, "theta": 5}
    assert places(kind, SamplingConfig(router="jsq", **settings)) == (2, 5)
    assert places(kind, SamplingConfig(router="pull", **settings)) == (16, 0)
    assert places(kind, SamplingConfig(router="proportional", **settings)) == (16, 0)
