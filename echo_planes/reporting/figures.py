"""Figures of a learner step for metrics.jsonl: the learner's measurements and the batch's composition.

A figure that was not measured is None, never 0.0: a step without a gradient has no entropy of zero.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from echo_planes.types import StepStats, TrainBatch

_LOG_WEIGHT = ("log_weight_p50", "log_weight_p99", "log_weight_p999", "log_weight_max")


def learner_figures(stats: StepStats) -> dict[str, Any]:
    """Return the figures of a `StepStats` as a flat record; `lags` is a list of objects."""
    return {
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "learning_rate": stats.learning_rate,
        "rate_factor": stats.rate_factor,
        "mismatch_mean": stats.mismatch_mean,
        "mismatch_p99": stats.mismatch_p99,
        **dict(zip(_LOG_WEIGHT, stats.log_weight or (None,) * 4, strict=True)),
        "k3": stats.k3,
        "effective_samples": stats.effective_samples,
        "clip_fraction": stats.clip_fraction,
        "masked_fraction": stats.masked_fraction,
        "truncated_fraction": stats.truncated_fraction,
        "tis_mean": stats.tis_mean,
        "entropy": stats.entropy,
        "kl_reference": stats.kl_reference,
        "groups_skipped": stats.groups_skipped,
        "tokens_scored": stats.tokens_scored,
        "num_updates": stats.num_updates,
        "updates_skipped": stats.updates_skipped,
        "lags": [asdict(lag) for lag in stats.lags],
    }


def batch_figures(batch: TrainBatch) -> dict[str, float]:
    """Return the length of the answers, and shares of the answers and of their groups.

    - `response_tokens_mean`, `response_tokens_p95`: tokens of an answer, trained or not, including those
      that an environment wrote.
    - `cut_off_share`: answers that ended at their token limit.
    - `groups_all_right`, `groups_all_wrong`, `groups_mixed`: groups whose answers are all correct, none, or
      some; they add up to 1.
    """
    so_far = np.concatenate([[0], np.cumsum(batch.token_versions >= 0)])
    lengths = np.diff(so_far[batch.offsets])
    names = [trajectory_id.rpartition("/")[0] for trajectory_id in batch.trajectory_ids]
    _, group = np.unique(names, return_inverse=True)
    right = np.bincount(group, weights=batch.correct) / np.bincount(group)
    return {
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_p95": float(np.quantile(lengths, 0.95)),
        "cut_off_share": float(batch.cut_off.mean()),
        "groups_all_right": float((right == 1).mean()),
        "groups_all_wrong": float((right == 0).mean()),
        "groups_mixed": float(((right > 0) & (right < 1)).mean()),
    }
