"""The learning rate's shape: warm-up, plateau, decay."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the learner needs torch")

from echo_planes.config import LearnerConfig
from echo_planes.learning.learner import learning_rate


def rates(**settings: float) -> list[float]:
    config = LearnerConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate(1.0, config, n, total_updates=100) for n in range(100)]


def test_warm_up_plateau_decay() -> None:
    found = rates(warmup_steps=10, decay=0.2)
    assert found[0] == pytest.approx(0.1)
    assert found[9:80] == [1.0] * 71
    assert found[90] == pytest.approx(0.5)
    assert found[99] == pytest.approx(0.05)


def test_no_decay_stays_constant() -> None:
    assert rates(warmup_steps=0, decay=0.0) == [1.0] * 100


def test_never_zero_or_above_the_peak() -> None:
    assert all(0 < rate <= 1.0 for rate in rates(warmup_steps=50, decay=1.0))
