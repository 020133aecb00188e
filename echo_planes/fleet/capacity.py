"""Capacity model: the rollout capacity with which a learner never waits, and the cost of having less.

Sources: ECHO-2, section 3.3 and appendix B; RLBoost, section 4.1, for S = 0.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from echo_planes.errors import ConfigError

RECENT_STEPS = 16
_ROUNDING = 1e-9  # a quotient this close above a whole number is that number


def needed_capacity(
    kappa: int, per_step: int, t_train_s: float, t_bcast_s: float, *, uninformative: float = 0.0
) -> float | None:
    """mu_min(kappa) = kappa R / (kappa T_train - T_bcast), trajectories/s; None where no fleet is enough.

    While the learner makes kappa steps on one snapshot, the next must have been broadcast and kappa R
    trajectories sampled; kappa R / (1 - u) where refill replaces a share u of them.

    Args:
        kappa: learner steps between publications.
        per_step: R, trajectories a step.
        t_train_s: T_train, seconds of a learner step.
        t_bcast_s: T_bcast, seconds from a publication until enough workers serve it: one in gamma.
        uninformative: u, below 1.
    """
    window_s = kappa * t_train_s - t_bcast_s
    return kappa * per_step / (1.0 - uninformative) / window_s if window_s > 0 else None


@dataclass(frozen=True, slots=True)
class Need:
    """Need of the learner, to be met by the fleet (ECHO-2 section 3.3)."""

    max_staleness: int  # S
    kappa: int  # learner steps between publications
    per_step: int  # R, trajectories a step
    t_train_s: float  # of a learner step
    t_bcast_s: float  # from a publication until enough workers serve it: one in 1.1 (`broadcasts.GAMMA`)
    gamma: float = 1.1  # redundancy: mu_target = gamma mu_min
    assumed: bool = False  # T_bcast was not measured yet: it stands for the first fleet, as it was chosen
    uninformative: float = 0.0  # u, share of what is sampled that refill replaces
    rate_factor: float = 1.0  # of drift control at this staleness: what is older drifts as much more

    @property
    def sampled(self) -> float:
        """R / (1 - u), trajectories that are sampled for a step."""
        return self.per_step / (1.0 - self.uninformative)

    @property
    def mu_min(self) -> float | None:
        """Trajectories/s below which the learner waits; None where no fleet is enough."""
        return needed_capacity(
            self.kappa, self.per_step, self.t_train_s, self.t_bcast_s, uninformative=self.uninformative
        )

    @property
    def mu_target(self) -> float | None:
        mu_min = self.mu_min
        return None if mu_min is None else self.gamma * mu_min


class UninformativeShare:
    """u: of the trajectories that are sampled for a step, the share that refill replaces; of recent steps.

    Args:
        per_step: R, trajectories a step.
    """

    def __init__(self, per_step: int) -> None:
        self._per_step = per_step
        self._counts: deque[int] = deque(maxlen=RECENT_STEPS + 1)

    def observe(self, uninformative: int) -> None:
        """A step has ended; so many trajectories were replaced so far."""
        self._counts.append(uninformative)

    @property
    def share(self) -> float:
        """0 until two steps were seen."""
        if len(self._counts) < 2:
            return 0.0
        replaced = (self._counts[-1] - self._counts[0]) / (len(self._counts) - 1)
        return replaced / (replaced + self._per_step)


def staleness_bound(need: Need, mu_pool: float) -> int | None:
    """Delta_max <= kappa + ceil((T_bcast + R / mu_pool) / T_train) - 1 learner steps (ECHO-2, eq. 7).

    It assumes that nothing is sampled from a snapshot before the broadcast is complete, so it is seldom met.

    Args:
        mu_pool: trajectories/s of all workers together. None is returned where there are none.
    """
    if need.max_staleness == 0:
        return 0  # strictly synchronous: batches are of the newest snapshot by construction
    if mu_pool <= 0:
        return None
    steps = (need.t_bcast_s + need.sampled / mu_pool) / need.t_train_s
    return need.kappa + math.ceil(steps - _ROUNDING) - 1


def predicted_bubble(need: Need, mu: float) -> float:
    """T_idle / (T_idle + T_train) of the learner, 0 to 1, with `mu` trajectories/s.

    A period of kappa steps takes the longer of training and of broadcast + sampling (ECHO-2, eq. 1). At S = 0
    nothing overlaps: they take their times one after the other.
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
    """N_prem = (t_remote n_mean + T_seed N_resv) / t_train, rounded up (RLBoost, algorithm 1, line 10).

    The work of a step in worker-seconds over the time the learner takes for one: with more workers, sampling
    is faster than training, which gains nothing. It is the rule for S = 0, where the overlap rule is not.

    Args:
        t_remote_s: seconds that remote workers spent on sampling in the last step.
        mean_instances: remote workers, averaged over that step.
        t_seed_s: seconds that the learner's own machines sampled first (0.0 where they do not).
        num_reserved: engines these machines make.
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
