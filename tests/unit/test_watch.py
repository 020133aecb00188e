"""Progress of a wait: what renews it, and when it is named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from echo_planes.errors import WorkerGoneError
from echo_planes.loop.watch import ANSWER_S, LOOK_S, SILENT, STALLED_S, Progress, Watch
from echo_planes.testing.virtual_time import VirtualTimeLoop, run_virtual


def test_a_text_that_stays_is_named_once_and_again_after_it_has_moved() -> None:
    progress = Progress(since_s=0.0)
    assert progress.look("1 of 8", 5.0) == "moves"
    assert progress.look("1 of 8", 5.0 + STALLED_S - 0.1) == "stands"
    assert progress.look("1 of 8", 5.0 + STALLED_S) == "stalls"
    assert progress.look("1 of 8", 500.0) == "stands"
    assert progress.look("2 of 8", 501.0) == "moves again"
    assert progress.look("2 of 8", 501.0 + STALLED_S) == "stalls"


def test_nothing_to_do_is_no_stall() -> None:
    progress = Progress(since_s=0.0)
    assert [progress.look("", at_s) for at_s in (0.0, 100.0, 900.0)] == ["moves"] * 3


class Sleeper:
    """A worker that moves until some time, and answers or not from then on."""

    def __init__(self, loop: VirtualTimeLoop, until_s: float, *, answers: bool = True) -> None:
        self.loop, self.until_s, self.answers = loop, until_s, answers

    async def __call__(self, who: str) -> Mapping[str, str]:
        now_s = self.loop.time()
        if now_s > self.until_s and not self.answers:
            await asyncio.get_running_loop().create_future()
        return {"work": f"token {min(now_s, self.until_s):.0f}"}


def ended(
    make_ask: Callable[[VirtualTimeLoop], Callable[[str], Awaitable[Mapping[str, str]]]],
    limit_s: float = 100.0,
) -> tuple[float, list[str]]:
    """Seconds after which a wait without end was ended, and what was told."""
    told: list[str] = []

    async def main(loop: VirtualTimeLoop) -> float:
        watch = Watch(loop, make_ask(loop), lambda text, who: told.append(f"{loop.time():.0f} {who} {text}"))
        looking = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(limit_s) as deadline:
                with watch.over("work", "w0", deadline, limit_s):
                    await loop.create_future()
        except TimeoutError:
            return loop.time()
        finally:
            looking.cancel()
        raise AssertionError("the wait has ended")

    return run_virtual(main), told


def watched(until_s: float, *, answers: bool = True) -> tuple[float, list[str]]:
    """The same of a worker that moves until then."""
    return ended(lambda loop: Sleeper(loop, until_s, answers=answers))


@pytest.mark.parametrize("answers", [True, False])
def test_progress_renews_the_deadline_and_a_stall_is_named_within_a_minute(answers: bool) -> None:
    ended_s, told = watched(1500.0, answers=answers)
    assert 1500.0 + 100.0 - LOOK_S - ANSWER_S <= ended_s <= 1500.0 + 100.0 + LOOK_S + ANSWER_S
    (line,) = told
    assert float(line.split()[0]) <= 1500.0 + 60.0
    assert "w0 work has stood still for" in line
    assert ("and does not answer" in line) is not answers


def test_without_progress_the_limit_is_that_of_the_wait() -> None:
    ended_s, _ = watched(0.0)
    assert ended_s <= 100.0 + LOOK_S + ANSWER_S


def test_a_worker_that_is_gone_does_not_end_the_watch() -> None:
    """The call that is waited for says so; other waits go on."""

    async def main(loop: VirtualTimeLoop) -> bool:
        async def ask(who: str) -> Mapping[str, str]:
            raise WorkerGoneError(f"{who} is gone")

        watch = Watch(loop, ask, lambda *_: None)
        looking = asyncio.create_task(watch.run())
        with watch.over("work", "w0"):
            await asyncio.sleep(5 * LOOK_S)
        alive = not looking.done()
        looking.cancel()
        return alive

    assert run_virtual(main)


def test_somebody_who_answers_now_and_then_does_not_move_by_that() -> None:
    turns = iter(range(10**6))

    async def ask(who: str) -> Mapping[str, str]:
        turn = next(turns)
        if turn % 2:
            raise WorkerGoneError("no word")
        return {"": "micro-batch 3", **({SILENT: "rank 1"} if turn % 4 else {})}

    ended_s, told = ended(lambda _: ask)
    assert ended_s <= 100.0 + LOOK_S + ANSWER_S
    assert next(turns) > 5  # it was asked in all three ways
    assert len(told) == 1
    assert told[0].endswith("micro-batch 3")
