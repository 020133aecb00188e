"""How much rollout capacity a learner needs so that it never waits (ECHO-2, section 3 and appendix C)."""

from __future__ import annotations


def needed_capacity(kappa: int, per_step: int, t_train_s: float, t_bcast_s: float) -> float | None:
    """mu_min(kappa) = kappa R / (kappa T_train - T_bcast), trajectories/s; None where no fleet is enough.

    While the learner makes kappa steps on one snapshot, the next must have been broadcast and kappa R
    trajectories sampled.

    Args:
        kappa: learner steps between publications.
        per_step: R, trajectories a step.
        t_train_s: T_train, seconds of a learner step.
        t_bcast_s: T_bcast, seconds from a publication until the fraction 1/gamma of the workers serve it.
    """
    window_s = kappa * t_train_s - t_bcast_s
    return kappa * per_step / window_s if window_s > 0 else None
