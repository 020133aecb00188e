"""Seeding window: how long engines on the learner's devices sample at the start of a synchronous step. Pure.

RLBoost section 4.1, Algorithm 1. With N_resv such engines, n remote workers and a step that takes W
engine-seconds of sampling, the window T ends with (W - T N_resv) / n seconds of sampling in all, and the
learner is ready at T + t_train. Line 9 of the algorithm moves T by the difference of the two waits over eta:

    T += (t_train_wait - t_remote_wait) / eta,  T >= 0        fixed point T* = (W - n t_train) / (n + N_resv)

Each step multiplies the distance to T* by 1 - (1 + N_resv / n) / eta. With the paper's eta alone this
diverges where eta <= (1 + N_resv / n) / 2 (at n = 1, N_resv = 4: eta = 2.5). So eta is at least
1 + N_resv / n here, at which the distance is gone in one step where all engines are equally fast. Where
seeders are faster, T swings about T*: each change of direction doubles the divisor, each step that goes on in
the same direction halves it again. Both are ours, not the paper's.

A memory of the best T for each number of remote workers (lines 11 to 14) spares the search when one is lost
or comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo_planes.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SeededStep:
    """Measurements of one step, seconds since its start, and remote workers."""

    train_wait_s: float  # t_train_wait: the learner waited for answers after the window
    remote_wait_s: float  # t_remote_wait: from the step's last answer until its end
    mean_remote: float  # remote workers, mean over the step
    num_remote: int  # remote workers now, for the next step


MOST_DAMPING = 16.0


class SeedWindow:
    """Length of the next step's window.

    Args:
        engines: N_resv, engines on the learner's devices.
        first_s: T of the first step, seconds.
        eta: least divisor of a change.

    Raises:
        ConfigError: no engine, a negative window, or an eta that is not positive.
    """

    def __init__(self, engines: int, first_s: float, eta: float) -> None:
        if engines < 1 or first_s < 0 or eta <= 0:
            raise ConfigError(
                f"seeding.engines={engines}, first_s={first_s:g}, eta={eta:g}: a window needs an engine, a "
                "length of at least 0 and a positive eta"
            )
        self._engines = engines
        self._eta = eta
        self.seconds = first_s
        self.memory: dict[int, float] = {}  # T by number of remote workers
        self._damping = 1.0
        self._rises = 0.0  # sign of the last change
        self._num_remote = -1  # remote workers of the last step

    def observe(self, step: SeededStep) -> float:
        """Return T of the next step, seconds.

        Without remote workers there is nothing to balance: the window of such a step lasts until its batch is
        whole, and T stays as it is.
        """
        if step.num_remote != self._num_remote:  # which has another T*
            self._damping, self._rises, self._num_remote = 1.0, 0.0, step.num_remote
        if step.mean_remote > 0:
            difference_s = step.train_wait_s - step.remote_wait_s
            self._damp(math.copysign(1.0, difference_s) if difference_s else 0.0)
            self.seconds = max(0.0, self.seconds + difference_s / self.divisor(step.mean_remote))
            if math.isclose(step.mean_remote, step.num_remote):  # none came or went: T is that of this number
                self.memory[step.num_remote] = self.seconds
        self.seconds = self.memory.get(step.num_remote, self.seconds)
        return self.seconds

    def divisor(self, mean_remote: float) -> float:
        """Return the divisor of the difference of the waits, with so many remote workers (more than 0)."""
        return self._damping * max(self._eta, 1.0 + self._engines / mean_remote)

    def _damp(self, rises: float) -> None:
        """Damp the next change, whose sign is `rises`, by whether it goes back on the last one."""
        if rises * self._rises < 0:
            self._damping = min(2.0 * self._damping, MOST_DAMPING)
        elif rises * self._rises > 0:
            self._damping = max(0.5 * self._damping, 1.0)
        self._rises = rises
