"""Watch over the long waits of a run: progress renews a wait's deadline, and what stands still is named.

Every `LOOK_S` the watch asks whom a wait is for. The answer is a text that changes as the work moves: tokens,
bytes, micro-batches. A wait whose text has not changed for `STALLED_S` is named once, so within a minute; one
whose text has not changed for its limit is over. The time that a wait takes in all has no limit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from echo_planes.cluster.clock import Clock
from echo_planes.errors import RunError

LOOK_S = 10.0
ANSWER_S = 5.0  # longest wait for word of a worker's progress, or the learner's
STALLED_S = 30.0
SILENT = "silent"  # key under which an answer names a part that does not answer itself
UNKNOWN = "progress unknown"


@dataclass
class Progress:
    """Progress of one wait. Pure.

    Attributes:
        since_s: when the text last changed, seconds.
        stalled_s: time without a change after which the wait is named.
        seen: the last text; "" before the first one, and while there is nothing to do.
    """

    since_s: float
    stalled_s: float = STALLED_S
    seen: str = ""
    is_told: bool = False

    def look(self, text: str, now_s: float) -> Literal["moves", "stands", "stalls", "moves again"]:
        """Enter the present text; "stalls" and "moves again" are to be told."""
        if text == self.seen and text:
            stalls = now_s - self.since_s >= self.stalled_s and not self.is_told
            self.is_told = self.is_told or stalls
            return "stalls" if stalls else "stands"
        was_told, self.is_told = self.is_told, False
        self.seen, self.since_s = text, now_s
        return "moves again" if was_told else "moves"


@dataclass(eq=False)
class _Wait:
    what: str
    who: str
    progress: Progress
    deadline: asyncio.Timeout | None
    limit_s: float


class Watch:
    """The watched waits of one run.

    Args:
        clock: seconds.
        ask: returns the progress of the learner ("") or of a worker, by id: texts by what is waited for, or
            one for all (""), and under `SILENT` a part that does not answer.
        tell: called with (text, worker id) when a wait stalls, and when it moves again.
        look_s: time between two looks, seconds.
        stalled_s: time without a change after which a wait is named, seconds.
    """

    def __init__(
        self,
        clock: Clock,
        ask: Callable[[str], Awaitable[Mapping[str, str]]],
        tell: Callable[[str, str], None],
        look_s: float = LOOK_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._clock = clock
        self._ask = ask
        self._tell = tell
        self._look_s = look_s
        self._stalled_s = stalled_s
        self._waits: list[_Wait] = []

    @contextmanager
    def over(
        self,
        what: str,
        who: str,
        deadline: asyncio.Timeout | None = None,
        limit_s: float = math.inf,
        *,
        named: bool = True,
    ) -> Iterator[Progress]:
        """Watch a wait for `who`; progress moves `deadline` to `limit_s` seconds later.

        `named`: tell it if the wait stalls.
        """
        stalled_s = self._stalled_s if named else math.inf
        wait = _Wait(what, who, Progress(self._clock.now_s(), stalled_s), deadline, limit_s)
        self._waits.append(wait)
        try:
            yield wait.progress
        finally:
            self._waits.remove(wait)

    async def run(self) -> None:
        """Look at all waits, again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._look_s)
            await asyncio.gather(*map(self._look_at, dict.fromkeys(wait.who for wait in self._waits)))

    async def _look_at(self, who: str) -> None:
        texts: Mapping[str, str] | None = None
        try:
            async with asyncio.timeout(ANSWER_S):
                texts = await self._ask(who)
        except (RunError, TimeoutError):
            pass  # told below, by those who wait for it; a process that is gone ends the wait itself
        now_s = self._clock.now_s()
        for wait in [one for one in self._waits if one.who == who]:
            # Silence changes no text: somebody who answers only now and then does not move by that.
            last = wait.progress.seen or UNKNOWN
            if texts is None:
                text, silent = last, " and does not answer"
            else:
                # A wait that must end has something to do, though it may be unknown how far it is.
                text = texts.get(wait.what, texts.get("", last if wait.deadline else ""))
                silent = f" ({texts[SILENT]} does not answer)" if SILENT in texts else ""
            stood_s = now_s - wait.progress.since_s
            match wait.progress.look(text, now_s):
                case "stalls":
                    self._tell(f"{wait.what} has stood still for {stood_s:.0f} s{silent}: {text}", who)
                case "moves again":
                    self._tell(f"{wait.what} moves again after {stood_s:.0f} s", who)
                    self._renew(wait)
                case "moves":
                    self._renew(wait)

    def _renew(self, wait: _Wait) -> None:
        if wait.deadline is not None and not wait.deadline.expired():
            wait.deadline.reschedule(asyncio.get_running_loop().time() + wait.limit_s)
