"""End of a run's workers and of its learner, whose last uploads to the store of weights come first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from echo_planes.cluster.clock import Clock
from echo_planes.errors import RunError
from echo_planes.loop.planes import LearnerPlane, Observer, Worker
from echo_planes.loop.watch import ANSWER_S, Progress
from echo_planes.reporting.formats import ranges
from echo_planes.types import Uploads

CLOSE_S = 20.0  # longest wait for workers and learner to end
POLL_S = 1.0  # between two looks at the uploads


async def end_planes(
    workers: Iterable[Worker],
    gone: Iterable[Callable[[], None]],
    learner: LearnerPlane,
    clock: Clock,
    upload_limit_s: float | None,
    observer: Observer,
) -> tuple[int, ...]:
    """Stop the workers, wait for the learner's uploads as `drain` does (None: not at all), and close it.

    `gone`: called if there is a wait, one for each worker, which costs nothing from then on.
    """
    closing = [asyncio.ensure_future(worker.stop()) for worker in workers]

    def tell(text: str) -> None:
        observer.on_event("store", text)

    def on_wait() -> None:
        for mark in gone:
            mark()

    try:
        if upload_limit_s is None:
            return ()
        return await drain(learner.uploads, clock, upload_limit_s, tell, on_wait)
    finally:
        closing.append(asyncio.ensure_future(learner.close()))
        await asyncio.wait(closing, timeout=CLOSE_S)


async def drain(
    ask: Callable[[], Awaitable[Uploads]],
    clock: Clock,
    limit_s: float,
    tell: Callable[[str], None],
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[int, ...]:
    """Wait until the store holds what was published, as long as the uploads advance.

    Args:
        ask: returns the state of the uploads.
        clock: seconds.
        limit_s: longest wait without progress; 0: only look.
        tell: called with one line: what is waited for, a wait that stalls, and the versions that are missing.
        on_wait: called once, where there is a wait.

    Returns:
        The published versions that have never been in the store; () if the learner does not say.
    """
    progress, is_told = Progress(clock.now_s()), False
    while True:
        try:
            async with asyncio.timeout(max(ANSWER_S, limit_s)):
                uploads = await ask()
        except (RunError, TimeoutError) as why:
            tell(f"which versions it holds is not known: {str(why) or 'the learner does not answer'}")
            return ()
        verdict = progress.look(uploads.seen, clock.now_s())
        stood_s = clock.now_s() - progress.since_s
        if uploads.is_over or stood_s >= limit_s:
            break
        if not is_told:
            on_wait()
            tell(f"the run ends once the last versions are there: {uploads.seen} (Ctrl-C twice: at once)")
        elif verdict == "stalls":
            why_not = f"; {uploads.error}" if uploads.error else ""
            tell(f"nothing has moved for {stood_s:.0f} of {limit_s:.0f} s: {uploads.seen}{why_not}")
        is_told = True
        await asyncio.sleep(POLL_S)
    if uploads.unstored:
        reason = uploads.error or "it is slower than the run"
        if not uploads.is_over:
            reason = f"nothing moved for {stood_s:.0f} s; {uploads.error or uploads.seen}"
        tell(f"it lacks of the published versions {ranges(uploads.unstored)}: {reason}")
    return uploads.unstored
