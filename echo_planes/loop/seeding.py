"""Windows of seeding in a run's steps: when the learner's own engines sample, and when they stop. Pure.

RLBoost section 4.1. The seeders are workers of their own, parked outside the window::

              OpenWindow             T_seed is over, or the batch is whole: CloseWindow
    parked ----------------> sampling ----------------------------------------------> parked
       ^                                              SeedersParked: parts are formed and trained
       +--- no remote worker is up: the window opens again, and lasts until one comes or the batch is whole

The learner trains nothing while the window is open, because seeders and learner share devices. It forms no
part of a batch then either, unless the batch is whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_planes.config.fleet import SeedingConfig
from echo_planes.loop.events import Action, CloseWindow, FormBatch, OpenWindow, Train
from echo_planes.loop.seed_window import SeededStep, SeedWindow
from echo_planes.types import Interval, SeedReport, TrainBatch

ROUNDING_S = 1e-3  # a window with less than this left is over
LOOK_S = 1.0  # longest wait for a batch until the window is looked at again


@dataclass(frozen=True, slots=True)
class Present:
    """Workers at one moment."""

    num_remote: int  # remote workers whose engine is ready
    seeders: tuple[str, ...]  # seeders whose engine is ready
    serving: bool  # whether one of the seeders serves the version of the present step


class Seeding:
    """Seeding of one run, for its controller.

    Args:
        config: the settings; `engines` is at least 1.
    """

    def __init__(self, config: SeedingConfig) -> None:
        self.window = SeedWindow(config.engines, config.first_s, config.eta)
        self._engines = config.engines
        self._is_open = False
        self._was_open = False  # in the present step
        self._began_s: float | None = None  # when a seeder of the open window served the step's version
        self._held: Train | None = None  # until the seeders are parked
        self._is_first = True  # step of the run: it has the start of the engines in it
        self._intervals: list[Interval] = []  # of the present step
        self._step_s: float | None = None  # when the present step began
        self._num_remote = 0
        self._seen_s = 0.0
        self._remote_s = 0.0  # integral of the number of remote workers over the present step, worker-seconds
        self._waits_since_s: float | None = None  # the learner waits for answers, the window being closed
        self._train_wait_s = 0.0
        self._trains_since_s: float | None = None
        self._complete_s: float | None = None  # when the last answer of the step was accepted

    @property
    def is_open(self) -> bool:
        """Whether the seeders sample, or are about to."""
        return self._is_open

    def look(self, present: Present, now_s: float) -> None:
        """Note the workers that there are from now on."""
        if self._step_s is not None:
            self._remote_s += self._num_remote * (now_s - self._seen_s)
        self._num_remote, self._seen_s = present.num_remote, now_s
        if self._is_open and self._began_s is None and present.serving:
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
        alone = not present.num_remote
        actions: list[Action] = []
        if not self._is_open and present.seeders:
            is_due = not self._was_open and not in_parts and self.window.seconds > 0
            if is_due or alone:
                self._is_open = self._was_open = True
                self._began_s = self._waits_since_s = None
                actions.append(OpenWindow(present.seeders))
        if not self._is_open:
            self._waits_since_s = now_s if self._waits_since_s is None else self._waits_since_s
            return [FormBatch(step, LOOK_S)]
        self.look(present, now_s)
        left_s = self.window.seconds - (0.0 if self._began_s is None else now_s - self._began_s)
        if not present.seeders or (not alone and left_s < ROUNDING_S):
            return [self._close(present.seeders, now_s)]
        wait_s = LOOK_S if alone else min(LOOK_S, left_s)
        return [*actions, FormBatch(step, wait_s, whole=True)]

    def batch_ready(self, batch: TrainBatch, train: Train, present: Present, now_s: float) -> list[Action]:
        """Return the actions for a batch, or a part of one: train it, once the seeders are parked."""
        if self._waits_since_s is not None:
            self._train_wait_s += now_s - self._waits_since_s
            self._waits_since_s = None
        if batch.last:  # a resumed run may begin with answers of its last part
            self._complete_s = max(self._step_s or 0.0, now_s - batch.waited_s)
        if self._is_open:
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
        return SeedReport(
            t_seed_s=self.window.seconds,
            train_wait_s=self._train_wait_s,
            remote_wait_s=max(0.0, now_s - complete_s),
            remote_s=max(0.0, complete_s - begun_s),
            mean_remote=remote_s / passed_s if passed_s > 0 else 0.0,
            num_reserved=self._engines,
            intervals=(*self._intervals, *trained),
        )

    def step_done(self, now_s: float) -> None:
        """Begin the next step, with the window that follows from this one."""
        report = self.report(now_s)
        self._trains_since_s = None
        if not self._is_first:
            seen = SeededStep(report.train_wait_s, report.remote_wait_s, report.mean_remote, self._num_remote)
            self.window.observe(seen)
        self._is_first = self._was_open = False
        self._intervals.clear()
        self._step_s = self._seen_s = now_s
        self._remote_s = self._train_wait_s = 0.0
        self._complete_s = None

    def _close(self, seeders: tuple[str, ...], now_s: float) -> Action:
        self._intervals += self._interval("seed", self._began_s, now_s)
        self._is_open, self._began_s = False, None
        return CloseWindow(seeders)

    def _interval(self, what: str, since_s: float | None, until_s: float) -> list[Interval]:
        """Return an interval of the present step; [] if it has not begun."""
        if since_s is None or self._step_s is None:
            return []
        return [Interval(what, since_s - self._step_s, until_s - self._step_s)]
