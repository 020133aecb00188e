"""The last uploads of a run: waited for while they advance, told where they don't, in virtual time."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from echo_planes.errors import RunError
from echo_planes.loop.ending import CLOSE_S, drain, end_planes
from echo_planes.loop.observers import QuietObserver
from echo_planes.loop.planes import LearnerPlane, Worker
from echo_planes.testing.virtual_time import VirtualTimeLoop, run_virtual
from echo_planes.types import Uploads

LIMIT_S = 100.0


class Store:
    """Takes the versions 0 to 5 at these times; `progress_s`: a byte arrives so often, for ever."""

    def __init__(self, *taken_at_s: float, progress_s: float = 0.0, error: str = "") -> None:
        self.taken_at_s = (*taken_at_s, *[float("inf")] * (6 - len(taken_at_s)))
        self.progress_s = progress_s
        self.error = error
        self.closed_at_s = -1.0

    async def uploads(self) -> Uploads:
        now_s = asyncio.get_running_loop().time()
        unstored = tuple(v for v, at_s in enumerate(self.taken_at_s) if now_s < at_s)
        seen = f"{int(now_s / self.progress_s) if self.progress_s else 0} bytes, {len(unstored)} to come"
        return Uploads(unstored, not unstored, seen, self.error)

    async def close(self) -> None:
        self.closed_at_s = asyncio.get_running_loop().time()


def drained(store: Store, limit_s: float = LIMIT_S) -> tuple[tuple[int, ...], float, list[str]]:
    """The versions that are missing, when the wait ended, and what was told."""
    told: list[str] = []

    async def main(loop: VirtualTimeLoop) -> tuple[tuple[int, ...], float, list[str]]:
        missing = await drain(store.uploads, loop, limit_s, told.append)
        return missing, loop.time(), told

    return run_virtual(main)


def test_a_slow_store_is_waited_for_as_long_as_it_takes_one_version_after_the_other() -> None:
    missing, end_s, told = drained(Store(*(0.9 * LIMIT_S * n for n in range(1, 7))))
    assert missing == ()
    assert end_s > 5 * LIMIT_S
    assert "6 to come" in told[0]
    assert sum("nothing has moved" in line for line in told) == 6  # each is named once


def test_bytes_of_one_large_version_are_progress() -> None:
    missing, end_s, told = drained(Store(*[20 * LIMIT_S] * 6, progress_s=10.0))
    assert (missing, len(told)) == ((), 1)
    assert end_s >= 20 * LIMIT_S


def test_a_store_that_stands_still_is_left_after_the_limit_and_what_it_lacks_is_told() -> None:
    missing, end_s, told = drained(Store(3.0, 5.0, error="status 503"))
    assert missing == (2, 3, 4, 5)
    assert end_s == pytest.approx(5.0 + LIMIT_S, abs=2.0)
    assert "2-5" in told[-1]
    assert "status 503" in told[-1]


def test_a_quick_store_is_not_mentioned_and_a_run_that_failed_only_looks() -> None:
    assert drained(Store(*[0.0] * 6)) == ((), 0.0, [])
    missing, end_s, (told,) = drained(Store(0.0), limit_s=0.0)
    assert (missing, end_s) == ((1, 2, 3, 4, 5), 0.0)
    assert "1-5" in told


def test_versions_that_a_slow_store_passed_over_are_told_too() -> None:
    class Passed(Store):
        async def uploads(self) -> Uploads:
            return Uploads((1, 2, 4), True, "0 to come", "")

    told = "it lacks of the published versions 1-2, 4: it is slower than the run"
    assert drained(Passed()) == ((1, 2, 4), 0.0, [told])


@pytest.mark.parametrize("way", ["gone", "silent"])
def test_a_learner_that_does_not_answer_is_told(way: str) -> None:
    class Lost(Store):
        async def uploads(self) -> Uploads:
            if way == "gone":
                raise RunError("its process is gone")
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    missing, end_s, (told,) = drained(Lost())
    assert (missing, end_s) == ((), 0.0 if way == "gone" else LIMIT_S)
    assert ("its process is gone" if way == "gone" else "does not answer") in told


def test_workers_stop_at_once_and_the_learner_closes_after_its_uploads_or_a_second_ctrl_c() -> None:
    stopped_at_s: list[float] = []
    marked_at_s: list[float] = []

    class Stops:
        async def stop(self) -> None:
            stopped_at_s.append(asyncio.get_running_loop().time())

    async def main(loop: VirtualTimeLoop) -> None:
        for is_hurried in (False, True):
            store, begun_s = Store(*[loop.time() + 50.0] * 6), loop.time()
            workers, learner = [cast(Worker, Stops())] * 2, cast(LearnerPlane, store)
            gone = [lambda: marked_at_s.append(loop.time())] * 2
            ending = asyncio.ensure_future(end_planes(workers, gone, learner, loop, LIMIT_S, QuietObserver()))
            if is_hurried:
                loop.call_later(7.0, ending.cancel)
            assert await asyncio.wait([ending], timeout=LIMIT_S)
            assert ending.cancelled() == is_hurried
            assert store.closed_at_s - begun_s == pytest.approx(7.0 if is_hurried else 50.0, abs=1.0)
            assert stopped_at_s[-2:] == marked_at_s[-2:] == [begun_s, begun_s]
            assert loop.time() - begun_s < 50.0 + CLOSE_S

    run_virtual(main)
