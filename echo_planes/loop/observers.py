"""Observers of a run: a base class that ignores every call, and one that forwards calls to several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from echo_planes.loop.planes import Accepted, Observer
from echo_planes.types import (
    BroadcastStats,
    BufferCounts,
    EvalReport,
    GuardReport,
    InstallReport,
    Manifest,
    SeedReport,
    StepStats,
    TrainBatch,
    WorkerInfo,
    WorkerStats,
)


class QuietObserver:
    """`Observer` that ignores every call; base class of observers that need only some."""

    def on_event(self, kind: str, text: str, *, worker: str = "", version: int | None = None) -> None:
        return None

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def on_worker(self, info: WorkerInfo, *, alive: bool) -> None:
        return None

    def on_stats(self, epoch: int, stats: WorkerStats) -> None:
        return None

    def on_accepted(self, accepted: Accepted) -> None:
        return None

    def on_published(self, manifest: Manifest, seconds: float) -> None:
        return None

    def on_broadcasts(self, stats: Sequence[BroadcastStats]) -> None:
        return None

    def on_installed(self, report: InstallReport) -> None:
        return None

    def on_step(self, batch: TrainBatch, stats: StepStats, idle_s: float, counts: BufferCounts) -> None:
        return None

    def on_eval(self, report: EvalReport, mismatch: float | None) -> None:
        return None

    def on_guard(self, report: GuardReport) -> None:
        return None

    def on_audited(self, drift: float) -> None:
        return None

    def on_seeding(self, report: SeedReport) -> None:
        return None


class Observers:
    """`Observer` that forwards calls to several, in order. Phases go to the first one only."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def on_event(self, kind: str, text: str, *, worker: str = "", version: int | None = None) -> None:
        for one in self._observers:
            one.on_event(kind, text, worker=worker, version=version)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._observers[0].phase(name)

    def on_worker(self, info: WorkerInfo, *, alive: bool) -> None:
        for one in self._observers:
            one.on_worker(info, alive=alive)

    def on_stats(self, epoch: int, stats: WorkerStats) -> None:
        for one in self._observers:
            one.on_stats(epoch, stats)

    def on_accepted(self, accepted: Accepted) -> None:
        for one in self._observers:
            one.on_accepted(accepted)

    def on_published(self, manifest: Manifest, seconds: float) -> None:
        for one in self._observers:
            one.on_published(manifest, seconds)

    def on_broadcasts(self, stats: Sequence[BroadcastStats]) -> None:
        for one in self._observers:
            one.on_broadcasts(stats)

    def on_installed(self, report: InstallReport) -> None:
        for one in self._observers:
            one.on_installed(report)

    def on_step(self, batch: TrainBatch, stats: StepStats, idle_s: float, counts: BufferCounts) -> None:
        for one in self._observers:
            one.on_step(batch, stats, idle_s, counts)

    def on_eval(self, report: EvalReport, mismatch: float | None) -> None:
        for one in self._observers:
            one.on_eval(report, mismatch)

    def on_guard(self, report: GuardReport) -> None:
        for one in self._observers:
            one.on_guard(report)

    def on_audited(self, drift: float) -> None:
        for one in self._observers:
            one.on_audited(drift)

    def on_seeding(self, report: SeedReport) -> None:
        for one in self._observers:
            one.on_seeding(report)
