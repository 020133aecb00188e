"""Virtual time: one heap of (time, sequence number, event). Equal inputs give equal orders of events."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from echo_planes.errors import RunError


class Timer:
    """Future event, which can be cancelled. The kernel ignores the return value of its action."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action

    def cancel(self) -> None:
        """Cancel the event; no effect if it has already happened."""
        self.action = None


class Kernel:
    """Clock and event queue of one simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self.after_each: Callable[[], None] | None = None  # called after every event
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = 0
        self._stopped = False

    def at(self, when_s: float, action: Callable[[], object]) -> Timer:
        """Call `action` at `when_s`; actions at the same time run in the order of their requests.

        Raises:
            RunError: the time is in the past, infinite or not a number.
        """
        if not self.now_s <= when_s < math.inf:
            raise RunError(
                f"an event was set for {when_s} s at {self.now_s} s of virtual time: events lie ahead; "
                "check the scenario's times"
            )
        timer = Timer(action)
        heapq.heappush(self._heap, (when_s, self._sequence, timer))
        self._sequence += 1
        return timer

    def after(self, delay_s: float, action: Callable[[], object]) -> Timer:
        """Call `action` in `delay_s` seconds."""
        return self.at(self.now_s + delay_s, action)

    def stop(self) -> None:
        """End `run` after the current event."""
        self._stopped = True

    def run(self, until_s: float) -> None:
        """Run events until none is left, one calls `stop`, or the next is later than `until_s`."""
        heap = self._heap
        while heap and not self._stopped and heap[0][0] <= until_s:
            when_s, _, timer = heapq.heappop(heap)
            action, timer.action = timer.action, None
            if action is not None:
                self.now_s = when_s
                self.num_events += 1
                action()
                if self.after_each is not None:
                    self.after_each()
        if not self._stopped and until_s < math.inf:
            self.now_s = max(self.now_s, until_s)
