"""The batch at which throughput levels off, from an engine whose true curve is known."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import ConfigError
from echo_planes.rollout.plateau import MIN_BUCKETS, MIN_SAMPLES, BatchProfile

MAX_BATCH = 256
BATCHES = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LENGTH_S = 5.0


def step_s(batch: float, context_tokens: float) -> float:
    """Of a decode step: reading the weights, or arithmetic where that takes longer; then keys and values."""
    return max(0.010, 0.0002 * batch) + 1e-8 * batch * context_tokens


def true_plateau(context_tokens: float, share: float = 0.9) -> int:
    throughput = [batch / step_s(batch, context_tokens) for batch in range(1, MAX_BATCH + 1)]
    return 1 + next(i for i, value in enumerate(throughput) if value >= share * max(throughput))


def feed(
    profile: BatchProfile,
    batches: tuple[int, ...] = BATCHES,
    *,
    context_tokens: float = 0.0,
    times: int = 8,
    noise: float = 0.0,
    slowed: float = 1.0,
    seed: int = 0,
) -> None:
    rng = random.Random(seed)
    for _ in range(times):
        for batch in batches:
            seconds = step_s(batch, context_tokens) * slowed * (1 + noise * rng.uniform(-1, 1))
            assert profile.observe(batch, round(batch * LENGTH_S / seconds), LENGTH_S, context_tokens)


def test_the_plateau_is_where_the_engine_levels_off() -> None:
    profile = BatchProfile(MAX_BATCH)
    feed(profile)
    assert true_plateau(0.0) == 45
    assert profile.plateau() == pytest.approx(45, abs=1)
    throughput = profile.tokens_per_s()
    assert throughput is not None
    assert throughput.shape == (MAX_BATCH,)
    expected = [batch / step_s(batch, 0.0) for batch in BATCHES]
    assert throughput[np.array(BATCHES) - 1] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_the_share_says_how_much_is_enough(share: float) -> None:
    profile = BatchProfile(MAX_BATCH, share=share)
    feed(profile)
    assert profile.plateau() == pytest.approx(true_plateau(0.0, share), abs=2)


def test_nothing_is_said_until_enough_is_known() -> None:
    profile = BatchProfile(MAX_BATCH)
    assert profile.plateau() is None
    feed(profile, BATCHES[: MIN_BUCKETS - 1], times=100)
    assert profile.plateau() is None
    feed(profile, (64,), times=MIN_SAMPLES - 1)
    assert profile.plateau() is None
    feed(profile, (64,), times=1)
    assert profile.plateau() is not None


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_outliers_do_not_move_it(factor: float) -> None:
    """Two samples in seven were disturbed, and all of those of three batch sizes that were seen but twice."""
    profile = BatchProfile(MAX_BATCH)
    feed(profile, times=5, noise=0.03)
    feed(profile, times=2, slowed=factor)
    feed(profile, (40, 150, 220), times=2, slowed=factor)
    assert profile.plateau() == pytest.approx(45, abs=5)


def test_an_engine_that_still_gains_has_its_plateau_beyond_what_was_seen() -> None:
    """Up to 32 requests cost no time: the best is extrapolated, not 90 % of what was seen."""
    profile = BatchProfile(MAX_BATCH)
    feed(profile, tuple(batch for batch in BATCHES if batch <= 32))
    assert profile.plateau() == math.ceil(0.9 * MAX_BATCH)


def test_growth_beyond_what_was_seen_is_that_of_the_larger_half() -> None:
    profile = BatchProfile(MAX_BATCH)
    feed(profile, tuple(batch for batch in BATCHES if 8 <= batch <= 128))
    throughput = profile.tokens_per_s()
    assert throughput is not None
    # From 50 requests on the true engine makes 5,000 tokens/s, whatever the batch.
    assert throughput[-1] == pytest.approx(5000, rel=0.15)
    assert profile.plateau() == pytest.approx(45, abs=10)


def test_it_is_calibrated_for_the_present_context() -> None:
    """Seen at contexts of 2,000 and 4,000 tokens, two samples in nine of them disturbed."""
    profile = BatchProfile(MAX_BATCH)
    feed(profile, context_tokens=2000.0, times=7, noise=0.03)
    feed(profile, context_tokens=3000.0, times=2, noise=0.03, slowed=20.0)
    feed(profile, context_tokens=4000.0, times=9, noise=0.03, seed=1)
    for context_tokens in (1000.0, 3000.0, 8000.0, 16_000.0):
        throughput = profile.tokens_per_s(context_tokens)
        assert throughput is not None
        expected = [batch / step_s(batch, context_tokens) for batch in BATCHES]
        assert throughput[np.array(BATCHES) - 1] == pytest.approx(expected, rel=0.1)


def test_contexts_that_grow_while_the_batch_shrinks_are_told_from_it() -> None:
    """As a step's rollouts go: the longer the answers, the fewer of them are left."""
    profile = BatchProfile(MAX_BATCH)
    rng = random.Random(3)
    for longest in (1000, 3000, 6000, 2000):
        for tenth in range(2000):
            running = round(MAX_BATCH * (1 - tenth / 2000))
            context_tokens = 300 + longest * tenth / 2000
            seconds = step_s(running, context_tokens) * rng.uniform(0.95, 1.05)
            profile.observe(running, round(1e6 * running / seconds), 1e6, context_tokens)
    for context_tokens in (500.0, 2000.0, 4000.0):
        throughput = profile.tokens_per_s(context_tokens)
        assert throughput is not None
        expected = [batch / step_s(batch, context_tokens) for batch in BATCHES]
        assert throughput[np.array(BATCHES) - 1] == pytest.approx(expected, rel=0.15)
        assert profile.plateau(context_tokens) == pytest.approx(true_plateau(context_tokens), rel=0.15)


def test_longer_contexts_level_off_earlier() -> None:
    def engine(batch: int, context_tokens: float) -> float:
        return 0.010 + 1e-4 * batch + 1e-7 * batch * context_tokens

    profile = BatchProfile(MAX_BATCH)
    for context_tokens in (1000.0, 1500.0):
        for batch in BATCHES * 5:
            seconds = engine(batch, context_tokens)
            profile.observe(batch, round(1e6 * batch / seconds), 1e6, context_tokens)
    found = {}
    for context_tokens in (500.0, 2000.0, 8000.0):
        throughput = [b / engine(b, context_tokens) for b in range(1, MAX_BATCH + 1)]
        expected = 1 + next(i for i, value in enumerate(throughput) if value >= 0.9 * max(throughput))
        found[context_tokens] = profile.plateau(context_tokens)
        assert found[context_tokens] == pytest.approx(expected, rel=0.1)
    assert found[500.0] > found[2000.0] > found[8000.0]  # type: ignore[operator]
    # By default it is that of the recent samples.
    for _ in range(40):
        profile.observe(64, round(1e6 * 64 / engine(64, 2000.0)), 1e6, 2000.0)
    assert profile.plateau() == profile.plateau(2000.0)


def test_the_table_follows_an_engine_that_changes() -> None:
    profile = BatchProfile(MAX_BATCH)
    feed(profile, times=40)
    feed(profile, times=40, slowed=2.0)
    throughput = profile.tokens_per_s()
    assert throughput is not None
    assert throughput[7] == pytest.approx(8 / step_s(8, 0.0) / 2, rel=1e-3)


@pytest.mark.parametrize(
    "sample",
    [
        (0, 100, 1.0, 0.0),
        (0.5, 100, 1.0, 0.0),
        (MAX_BATCH + 1, 100, 1.0, 0.0),
        (8, 0, 1.0, 0.0),
        (8, -100, 1.0, 0.0),
        (8, 100, 0.0, 0.0),
        (8, 100, -1.0, 0.0),
        (8, 100, math.nan, 0.0),
        (math.inf, 100, 1.0, 0.0),
        (8, 100, 1.0, math.nan),
        (8, 100, 1.0, -1.0),
    ],
)
def test_what_says_nothing_is_not_taken_in(sample: tuple[float, int, float, float]) -> None:
    profile = BatchProfile(MAX_BATCH)
    feed(profile)
    before = profile.tokens_per_s()
    for _ in range(100):
        assert not profile.observe(*sample)
    assert np.array_equal(profile.tokens_per_s(), before)  # type: ignore[arg-type]


def test_settings_outside_their_range_are_refused() -> None:
    for max_batch in (0, 2**16 + 1):
        with pytest.raises(ConfigError, match=f"max_batch is {max_batch}"):
            BatchProfile(max_batch)
    for share in (0.0, 1.1, math.nan):
        with pytest.raises(ConfigError, match=f"share is {share}"):
            BatchProfile(8, share=share)


SAMPLES = st.tuples(
    st.integers(1, 64), st.integers(1, 10**6), st.floats(1e-3, 1e3), st.floats(0.0, 1e5, allow_nan=False)
)


@settings(max_examples=200, deadline=None)
@given(samples=st.lists(SAMPLES, min_size=9, max_size=80), share=st.floats(0.1, 1.0))
def test_whatever_was_seen_it_is_the_smallest_batch_that_reaches_the_share(
    samples: list[tuple[int, int, float, float]], share: float
) -> None:
    profile = BatchProfile(64, share=share)
    for sample in samples:
        for _ in range(MIN_SAMPLES):
            assert profile.observe(*sample)
    plateau, throughput = profile.plateau(), profile.tokens_per_s()
    if throughput is None:
        assert plateau is None
        assert len({round(math.log2(running) * 4) for running, *_ in samples}) < MIN_BUCKETS
        return
    assert plateau is not None
    assert np.isfinite(throughput).all()
    assert throughput.min() > 0
    assert throughput[plateau - 1] >= share * throughput.max()
    assert (throughput[: plateau - 1] < share * throughput.max()).all()
