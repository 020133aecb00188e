"""The benchmark's harness: exact lags, and runs that are functions of their set-up."""

from __future__ import annotations

from pathlib import Path

from bench.learning.harness import Loop, Setup, train


def test_answers_are_of_the_version_that_the_lag_says(tmp_path: Path) -> None:
    loop = Loop(Setup(2, 2.5e-4, 0, steps=5), tmp_path)
    try:
        ages = []
        for step in range(5):
            batch, rewards, generated = loop.sample(step)
            stats = loop.learner.train_step(batch)
            assert len(rewards) == len(batch.rewards)
            assert generated == batch.num_tokens
            ages.append({step - int(version) for version in batch.versions})
        assert ages == [{0}, {1}, {2}, {2}, {2}]
        assert [lag.lag for lag in stats.lags] == [2]
    finally:
        loop.close()


def test_a_run_is_a_function_of_its_set_up() -> None:
    one, other, third = (train(Setup(1, 1e-3, seed, steps=3)) for seed in (0, 0, 1))
    assert (one.rewards, one.tokens, one.drift) == (other.rewards, other.tokens, other.drift)
    assert one.tokens != third.tokens
    assert len(one.watched) == 3
    assert all(figures.k3 is not None for figures in one.watched)


def test_a_run_without_hope_ends_early_with_zeros() -> None:
    settings = {"objective": {"anchor": "proximal"}, "learner": {"drift_target": 0.0, "warmup_steps": 0}}
    trace = train(Setup(0, 0.1, 0, settings, steps=60))
    assert len(trace.rewards) == 60
    assert len(trace.watched) < 60
    assert trace.final == 0.0
