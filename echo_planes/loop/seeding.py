"""Windows of seeding in a run's steps: when the learner's own engines sample, and when they stop. Pure.

RLBoost section 4.1. The seeders are workers of their own, parked outside the window::

              OpenWindow             T_seed is over, or the batch is whole: CloseWindow
    parked ----------------> sampling ----------------------------------------------> parked
       ^                                              SeedersParked: parts are formed and trained
       +--- no remote worker samples: the window opens again, until one does or the batch is whole

The learner trains nothing while the window is open, because seeders and learner share devices. It forms no
part of a batch then either, unless the batch is whole.

A remote worker counts once it serves the step's version. One that is up and does not (its install hangs) or
that finishes nothing (its engine hangs) does not keep the seeders parked for long: they sample again once the
learner has waited `LATE_S`, or twice the last step, and from then on at once, until a remote worker serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_planes.config.fleet import SeedingConfig
from echo_planes.loop.events import Action, CloseWindow, FormBatch, OpenWindow, Train
from echo_planes.loop.seed_window import SeededStep, SeedWindow
from echo_planes.types import Interval, SeedReport, TrainBatch

ROUNDING_S = 1e-3  # a window with less than this left is over
LOOK_S = 1.0  # longest wait for a batch until the window is looked at again
SERVES_S = 5.0  # within which a seeder serves the version of an open window; remote workers go on without it
LATE_S = 30.0  # least wait after which remote workers count as stuck


@dataclass(frozen=True, slots=True)
class Present:
    """Workers at one moment. A worker serves if its weights are of the present step's version."""

    num_remote: int  # remote workers whose engine is ready
    num_serving: int  # remote workers that serve
    seeders: tuple[str, ...]  # seeders whose engine is ready
    seeder_serves: bool  # whether one of the seeders serves


class Seeding:
    """Seeding of one run, for its controller.

    Args:
        config: the settings; `engines` is at least 1.
    """

    def __init__(self, config: SeedingConfig) -> None:
        self.window = SeedWindow(config.engines, config.first_s, config.eta)
        self._engines = config.engines
        self._opened_s: float | None = None  # when the open window opened; None: it is closed
        self._began_s: float | None = None  # when a seeder of the open window served the step's version
        self._is_planned = False  # the open window is that of the step's begin, T_seed long
        self._held: Train | None = None  # until the seeders are parked
        self._out = False  # remote workers are not waited for: none was up, or none served for a whole step
        self._is_first = True  # step of the run
        self._has_started = False  # an engine serves; what was before is no part of the first step
        self._last_s = 0.0  # seconds of the step before
        self._num_remote = 0
        self._seen_s = 0.0
        self._begin(None)

    def _begin(self, now_s: float | None) -> None:
        """Begin the record of a step; None: with the first look."""
        self._step_s = now_s
        self._was_open = False
        self._has_served = False  # a remote worker served
        self._is_late = False  # the learner waited so long that remote workers count as stuck
        self._intervals: list[Interval] = []
        self._remote_s = 0.0  # integral of the number of remote workers, worker-seconds
        self._waits_since_s: float | None = None  # the learner waits for answers, the window being closed
        self._train_wait_s = 0.0
        self._trains_since_s: float | None = None
        self._complete_s: float | None = None  # when the last answer was accepted

    @property
    def is_open(self) -> bool:
        """Whether the seeders sample, or are about to."""
        return self._opened_s is not None

    def look(self, present: Present, now_s: float) -> None:
        """Note the workers that there are from now on."""
        if self._step_s is not None:
            self._remote_s += self._num_remote * (now_s - self._seen_s)
        if not self._has_started and (present.num_serving or present.seeder_serves):
            self._has_started = True
            if self._step_s is not None:
                self._step_s, self._remote_s = now_s, 0.0
                self._waits_since_s = None if self._waits_since_s is None else now_s
        if present.num_serving:
            self._has_served, self._out = True, False
        elif not present.num_remote:
            self._out = True
        self._num_remote, self._seen_s = 0 if self._out else present.num_remote, now_s
        if self.is_open and self._began_s is None and present.seeder_serves:
            self._began_s = now_s

    def form_batch(self, step: int, now_s: float, present: Present, *, in_parts: bool) -> list[Action]:
        """Return the actions of a learner that waits for the batch of `step`, or for its next part.

        Args:
            step: version that the batch is sampled with.
            now_s: present time, seconds.
            present: workers at this moment.
            in_parts: whether a part of the batch was formed already.
        """
        if self._step_s is None:
            self._step_s = self._seen_s = now_s
        if self._waits_since_s is not None and now_s - self._waits_since_s > max(LATE_S, 2 * self._last_s):
            self._is_late = True
        self.look(present, now_s)
        alone = self._out or self._is_late
        actions: list[Action] = []
        if not self.is_open and present.seeders:
            is_planned = not self._was_open and not in_parts and self.window.seconds > 0
            if is_planned or alone:
                self._stop_waiting(now_s)
                self._opened_s, self._began_s = now_s, None
                self._is_planned, self._was_open = is_planned, True
                self.look(present, now_s)
                actions.append(OpenWindow(present.seeders))
        if self._opened_s is None:
            self._waits_since_s = now_s if self._waits_since_s is None else self._waits_since_s
            return [FormBatch(step, LOOK_S)]
        left_s = self._left_s(self._opened_s, now_s)
        if not present.seeders or (not alone and left_s < ROUNDING_S):
            return [self._close(present.seeders, now_s)]
        wait_s = LOOK_S if alone else min(LOOK_S, left_s)
        return [*actions, FormBatch(step, wait_s, whole=True)]

    def _left_s(self, opened_s: float, now_s: float) -> float:
        """Return the rest of an open window beside remote workers, seconds."""
        if not self._is_planned:
            return 0.0  # it was for want of them
        if self._began_s is not None:
            return self.window.seconds - (now_s - self._began_s)
        # No seeder serves yet. It is not waited for without end while remote workers can.
        return SERVES_S + self.window.seconds - (now_s - opened_s)

    def _stop_waiting(self, now_s: float) -> None:
        """Add the wait that ends now to t_train_wait."""
        if self._waits_since_s is not None:
            self._train_wait_s += now_s - self._waits_since_s
            self._waits_since_s = None

    def batch_ready(self, batch: TrainBatch, train: Train, present: Present, now_s: float) -> list[Action]:
        """Return the actions for a batch, or a part of one: train it, once the seeders are parked."""
        self._stop_waiting(now_s)
        if batch.last:  # a resumed run may begin with answers of its last part
            self._complete_s = max(self._step_s or 0.0, now_s - batch.waited_s)
        if self.is_open:
            self._held = train
            return [self._close(present.seeders, now_s)]
        self._trains_since_s = now_s
        return [train]

    def parked(self, now_s: float) -> list[Action]:
        """Return the training that waited for the seeders to be parked; [] if none did."""
        held, self._held = self._held, None
        if held is None:
            return []
        self._trains_since_s = now_s
        return [held]

    def part_done(self, now_s: float) -> None:
        """Note that the learner has trained a part, the last one too."""
        self._intervals += self._interval("train", self._trains_since_s, now_s)
        self._trains_since_s = None

    def report(self, now_s: float) -> SeedReport:
        """Return the figures of the present step, as if it ended now."""
        begun_s = now_s if self._step_s is None else self._step_s
        complete_s = now_s if self._complete_s is None else self._complete_s
        passed_s = now_s - begun_s
        remote_s = self._remote_s + self._num_remote * (now_s - self._seen_s)
        trained = self._interval("train", self._trains_since_s, now_s)
        waits_s = 0.0 if self._waits_since_s is None else now_s - self._waits_since_s
        return SeedReport(
            t_seed_s=self.window.seconds,
            train_wait_s=self._train_wait_s + waits_s,
            remote_wait_s=max(0.0, now_s - complete_s),
            remote_s=max(0.0, complete_s - begun_s),
            mean_remote=remote_s / passed_s if passed_s > 0 else 0.0,
            num_reserved=self._engines,
            intervals=(*self._intervals, *trained),
        )

    def step_done(self, now_s: float) -> None:
        """Begin the next step, with the window that follows from this one."""
        report = self.report(now_s)
        # A step without its planned seeding, or with remote workers that were stuck, says nothing of T_seed.
        as_planned = any(one.what == "seed" for one in report.intervals) or not self.window.seconds
        if as_planned and not self._is_first and not self._is_late:
            seen = SeededStep(report.train_wait_s, report.remote_wait_s, report.mean_remote, self._num_remote)
            self.window.observe(seen)
        self._out = self._out or not self._has_served
        self._is_first = False
        self._last_s = 0.0 if self._step_s is None else now_s - self._step_s
        self._seen_s = now_s
        self._begin(now_s)

    def _close(self, seeders: tuple[str, ...], now_s: float) -> Action:
        self._intervals += self._interval("seed", self._began_s, now_s)
        self._opened_s = self._began_s = None
        return CloseWindow(seeders)

    def _interval(self, what: str, since_s: float | None, until_s: float) -> list[Interval]:
        """Return an interval of the present step; [] if it has not begun."""
        if since_s is None or self._step_s is None:
            return []
        return [Interval(what, since_s - self._step_s, until_s - self._step_s)]
