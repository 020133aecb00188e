"""Capacity model: the rollout capacity with which a learner never waits, and its bubble with less.

Sources: ECHO-2, section 3.3 and appendix B; RLBoost, section 4.1, for S = 0.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from echo_planes.errors import ConfigError

RECENT_STEPS = 16
_ROUNDING = 1e-9  # a quotient this close above a whole number is that number


def needed_capacity(
    kappa: int, per_step: int, t_train_s: float, t_bcast_s: float, *, uninformative: float = 0.0
) -> float | None:
    """Return mu_min = kappa R / (kappa T_train - T_bcast), trajectories/s; None if no fleet is enough.

    While the learner makes kappa steps on one snapshot, the fleet must receive the next one and sample
    kappa R trajectories, or kappa R / (1 - u) if refill replaces a share u of them.

    Args:
        kappa: learner steps between publications.
        per_step: R, trajectories a step.
        t_train_s: T_train, seconds of a learner step.
        t_bcast_s: T_bcast, seconds from a publication until the fraction 1/gamma of the workers serves it.
        uninformative: u, in [0, 1).
    """
    window_s = kappa * t_train_s - t_bcast_s
    return kappa * per_step / (1.0 - uninformative) / window_s if window_s > 0 else None


@dataclass(frozen=True, slots=True)
class Need:
    """Rollout capacity that the learner needs (ECHO-2 section 3.3)."""

    max_staleness: int  # S
    kappa: int  # learner steps between publications
    per_step: int  # R, trajectories a step
    t_train_s: float  # seconds of a learner step
    t_bcast_s: float  # seconds from a publication until enough workers serve it (`broadcasts.GAMMA`)
    gamma: float = 1.1  # redundancy: mu_target = gamma mu_min
    assumed: bool = False  # no broadcast was measured yet: T_bcast is derived from the first fleet
    uninformative: float = 0.0  # u, share of the sampled trajectories that refill replaces
    rate_factor: float = 1.0  # share of the learning rate that drift control leaves at this staleness

    @property
    def sampled(self) -> float:
        """R / (1 - u), trajectories that the fleet samples for a step."""
        return self.per_step / (1.0 - self.uninformative)

    @property
    def mu_min(self) -> float | None:
        """Trajectories/s below which the learner waits; None if no fleet is enough."""
        return needed_capacity(
            self.kappa, self.per_step, self.t_train_s, self.t_bcast_s, uninformative=self.uninformative
        )

    @property
    def mu_target(self) -> float | None:
        mu_min = self.mu_min
        return None if mu_min is None else self.gamma * mu_min


class Pace:
    """Estimate of a run's remaining seconds from its recent steps.

    Args:
        steps: learner steps of the whole run.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._step_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._completed = 0
        self._newest_s = 0.0

    def observe(self, completed: int, step_s: float, now_s: float) -> None:
        """Record a finished step.

        Args:
            completed: steps finished so far.
            step_s: seconds of this step, the learner's waiting included.
            now_s: the time.
        """
        self._step_s.append(step_s)
        self._completed, self._newest_s = completed, now_s

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds left: steps left times the median recent step; None before the first step.

        If the current step has already lasted longer than the median, its duration so far counts instead.
        """
        if not self._step_s:
            return None
        return (self._steps - self._completed) * max(median(self._step_s), now_s - self._newest_s)


class UninformativeShare:
    """u of recent steps: the share of the sampled trajectories that refill replaces.

    Args:
        per_step: R, trajectories a step.
    """

    def __init__(self, per_step: int) -> None:
        self._per_step = per_step
        self._counts: deque[int] = deque(maxlen=RECENT_STEPS + 1)

    def observe(self, uninformative: int) -> None:
        """Record the end of a step; `uninformative` is the total of replaced trajectories so far."""
        self._counts.append(uninformative)

    @property
    def share(self) -> float:
        """Share in [0, 1); 0 until two steps are recorded."""
        if len(self._counts) < 2:
            return 0.0
        replaced = (self._counts[-1] - self._counts[0]) / (len(self._counts) - 1)
        return replaced / (replaced + self._per_step)


def staleness_bound(need: Need, mu_pool: float) -> int | None:
    """Return kappa + ceil((T_bcast + R / mu_pool) / T_train) - 1, the bound on staleness (ECHO-2, eq. 7).

    With refill, R / (1 - u) takes the place of R. The bound assumes that no worker samples from a snapshot
    before the broadcast is complete, so the observed staleness is usually lower.

    Args:
        need: times and sizes of the run.
        mu_pool: trajectories/s of all workers together; at 0 the function returns None.
    """
    if need.max_staleness == 0:
        return 0  # strictly synchronous: batches are of the newest snapshot by construction
    if mu_pool <= 0:
        return None
    steps = (need.t_bcast_s + need.sampled / mu_pool) / need.t_train_s
    return need.kappa + math.ceil(steps - _ROUNDING) - 1


def predicted_bubble(need: Need, mu: float) -> float:
    """Return the learner's T_idle / (T_idle + T_train), 0 to 1, with `mu` trajectories/s.

    A period of kappa steps takes the longer of training and of broadcast + sampling (ECHO-2, eq. 1). At S = 0
    nothing overlaps: broadcast, sampling and training run one after the other.
    """
    if mu <= 0:
        return 1.0
    if need.max_staleness == 0:
        idle_s = need.t_bcast_s + need.sampled / mu
        return idle_s / (idle_s + need.t_train_s)
    training_s = need.kappa * need.t_train_s
    period_s = max(training_s, need.t_bcast_s + need.kappa * need.sampled / mu)
    return 1 - training_s / period_s


def useful_instances(
    t_remote_s: float, mean_instances: float, t_seed_s: float, num_reserved: int, t_train_s: float
) -> int:
    """Return N_prem = ceil((t_remote n_mean + T_seed N_resv) / t_train) (RLBoost, algorithm 1, line 10).

    The numerator is the sampling work of a step in worker-seconds. With more than N_prem workers, sampling
    takes less time than training, which gains nothing. The rule applies at S = 0, where the overlap rule
    does not.

    Args:
        t_remote_s: seconds that remote workers spent on sampling in the last step.
        mean_instances: mean number of remote workers during that step.
        t_seed_s: seconds that the learner's own machines sampled first; 0.0 if they do not sample.
        num_reserved: engines on the learner's own machines.
        t_train_s: seconds of training alone in a step, waiting excluded.

    Raises:
        ConfigError: t_train_s is not positive, or another value is negative or not finite.
    """
    values = (t_remote_s, mean_instances, t_seed_s, num_reserved, t_train_s)
    if not all(math.isfinite(value) and value >= 0 for value in values) or t_train_s == 0:
        raise ConfigError(
            f"useful_instances{values}: t_train_s must be above 0 and the others at least 0; "
            "give what a whole step measured"
        )
    return math.ceil((t_remote_s * mean_instances + t_seed_s * num_reserved) / t_train_s - _ROUNDING)
