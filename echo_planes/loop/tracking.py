"""Tracker of a run beside its own files (`run.tracker`). The run waits for it only at the end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from echo_planes.config.extensions import extension, in_words
from echo_planes.config.schema import Config
from echo_planes.loop.observers import QuietObserver
from echo_planes.loop.planes import Observer
from echo_planes.loop.trackers import tensorboard, trackio, wandb
from echo_planes.reporting.metrics import METRICS_FILE, Record
from echo_planes.types import BufferCounts, StepStats, TrainBatch

MAX_WAITING = 1000  # queued records; further ones are dropped
CLOSE_S = 10.0  # to process the queue, and to close


class Tracker(Protocol):
    """Destination of a run's numbers. One thread makes it and makes all its calls."""

    def step(self, numbers: Mapping[str, Any]) -> None:
        """Take a learner step: its line of metrics.jsonl (`reporting.metrics.GAUGES`). None: not known.

        After a rollback a step's number repeats.
        """
        ...

    def event(self, record: Mapping[str, Any]) -> None:
        """Take an event: its line of events.jsonl, with `time_s`, `kind` and `text` at least."""
        ...

    def close(self) -> None:
        """Finish at the end of the run, within `CLOSE_S` seconds."""
        ...


MakeTracker = Callable[[Config, Path], Tracker]  # takes the run's settings and its folder
TRACKERS: dict[str, MakeTracker] = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


class Tracking:
    """Passes records to a tracker in a thread of its own. A tracker that raises is off from then on.

    Args:
        config: the run's settings.
        folder: the run folder.

    Raises:
        ConfigError: there is no such tracker.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._name = f"run.tracker={config.run.tracker}"
        make = extension("run.tracker", config.run.tracker, TRACKERS)
        self._waiting: queue.Queue[tuple[str, Record] | None] = queue.Queue(MAX_WAITING)
        self._error = ""  # why the tracker is off
        self._told_error = self._told_dropped = self._closed = False
        self._num_dropped = 0
        self._thread = threading.Thread(
            target=self._work, args=(lambda: make(config, folder),), daemon=True, name="tracker"
        )
        self._thread.start()

    def offer(self, name: str, record: Record) -> None:
        """Queue a line of one of the run's files for the tracker; drop and count it if the queue is full."""
        if self._error or self._closed:
            return
        try:
            self._waiting.put_nowait((name, record))
        except queue.Full:
            self._num_dropped += 1

    def news(self) -> list[str]:
        """Return messages about trouble that was not reported yet."""
        found = []
        if self._error and not self._told_error:
            self._told_error = True
            found.append(f"{self._name} is off: {self._error}")
        if self._num_dropped and not self._told_dropped:
            self._told_dropped = True
            found.append(f"{self._name} is behind by {MAX_WAITING} records: newer ones are dropped meanwhile")
        return found

    def close(self, limit_s: float = CLOSE_S) -> list[str]:
        """Have the tracker process its queue and close, within `limit_s` seconds; return the last news."""
        if self._closed:
            return []
        self._closed = True
        if self._waiting.full():  # makes room for the end mark: nothing else is queued from now on
            with suppress(queue.Empty):
                self._waiting.get_nowait()
                self._num_dropped += 1
        self._waiting.put_nowait(None)
        self._thread.join(limit_s)
        found = self.news()
        if self._thread.is_alive() and not self._error:
            found.append(f"{self._name} did not close within its limit: its newest records may be missing")
        if self._num_dropped:
            found.append(f"{self._name}: {self._num_dropped} records were dropped in all")
        return found

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (record := self._waiting.get()) is not None:
                (tracker.step if record[0] == METRICS_FILE else tracker.event)(record[1])
            tracker.close()
        except BaseException as error:  # noqa: BLE001  user code may raise anything; it becomes an event
            self._error = in_words(error)


class TrackingNews(QuietObserver):
    """Observer that reports trouble of the tracker to a journal, after each step."""

    def __init__(self, tracking: Tracking, journal: Observer) -> None:
        self._tracking = tracking
        self._journal = journal

    def on_step(self, batch: TrainBatch, stats: StepStats, idle_s: float, counts: BufferCounts) -> None:
        for text in self._tracking.news():
            self._journal.on_event("tracker", text)


def open_tracking(config: Config, folder: Path) -> Tracking | None:
    """Start the tracker of a run; None: the run has none."""
    return None if config.run.tracker == "none" else Tracking(config, folder)
