"""Controls: what must not learn, and what refilled batches are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from bench.learning.harness import LAST, BatchChange, Setup, train
from bench.learning.staleness import ONE, interval
from echo_planes.learning.advantages import compute_advantages
from echo_planes.types import TrainBatch

LEARNT = 0.1  # mean reward above the start that would be learning
WARM = 60  # steps until about 90 % of the answers are right
MORE = 40  # steps after that


def random_rewards(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
    """Rewards that have nothing to do with the answers."""
    return replace(batch, rewards=rng.integers(0, 2, len(batch.rewards)).astype(np.float32))


def shuffled_advantages(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
    """The right advantages at the wrong answers."""
    none = np.full(len(batch.rewards), np.nan, np.float32)
    own = compute_advantages("standardised", batch.rewards, batch.advantage_groups, none)
    return replace(batch, advantages=rng.permutation(own))


def wrong_logprobs(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
    """Sampler logprobs that are off by up to 8 nats."""
    noise = rng.uniform(-8.0, 8.0, len(batch.token_ids)) * batch.loss_mask
    return replace(batch, sampler_logprobs=(batch.sampler_logprobs + noise).astype(np.float32))


CONTROLS: dict[str, tuple[float, BatchChange | None]] = {
    "trains": (ONE, None),
    "rate 0": (0.0, None),
    "random rewards": (ONE, random_rewards),
    "shuffled advantages": (ONE, shuffled_advantages),
    "wrong sampler logprobs": (ONE, wrong_logprobs),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A control's gain over its seeds: mean reward of the last steps less that of the first five."""

    name: str
    gain: float
    width: float  # of the 95 % interval, half


def controls(seeds: Sequence[int], *, lag: int = 3, steps: int = 100) -> list[Outcome]:
    """Every control."""
    found = []
    for name, (rate, batch_change) in CONTROLS.items():
        gains = []
        for seed in seeds:
            trace = train(Setup(lag, rate, seed, steps=steps), batch_change=batch_change)
            gains.append(fmean(trace.rewards[-LAST:]) - fmean(trace.rewards[:5]))
        found.append(Outcome(name, *interval(gains)))
        print(f"{name:24s} gain {found[-1].gain:+.3f} +- {found[-1].width:.3f}", flush=True)
    return found


def control_verdicts(outcomes: Sequence[Outcome]) -> dict[str, bool]:
    by_name = {one.name: one for one in outcomes}
    told = {
        f"control does not learn: {one.name}": one.gain + one.width < LEARNT
        for one in outcomes
        if one.name != "trains"
    }
    return {"the same set-up without a control learns": by_name["trains"].gain > 3 * LEARNT, **told}


def refill(seeds: Sequence[int], *, lag: int = 1) -> dict[str, Any]:
    """Reward gained from about 90 % on per million tokens, with refilled batches and without."""
    rows: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for seed in seeds:
        for name, start in (("without", None), ("with", WARM)):
            # No decay: the rate at the end would be part of what is compared.
            settings = {"learner": {"decay": 0.0}}
            trace = train(Setup(lag, ONE, seed, settings, steps=WARM + MORE, refill_from=start))
            before, after = fmean(trace.rewards[WARM - 10 : WARM]), fmean(trace.rewards[-10:])
            trained, generated = sum(trace.tokens[WARM:]), sum(trace.generated[WARM:])
            rows[name].append(
                {
                    "before": before,
                    "after": after,
                    "gain_per_million_trained": 1e6 * (after - before) / trained,
                    "gain_per_million_generated": 1e6 * (after - before) / generated,
                    "generated_per_trained": generated / trained,
                }
            )
    figures: dict[str, Any] = {}
    for name, cell in rows.items():
        figures[name] = {key: interval([row[key] for row in cell]) for key in cell[0]}
        print(name, {key: f"{mean:.3f} +- {width:.3f}" for key, (mean, width) in figures[name].items()})
    for key in ("gain_per_million_trained", "gain_per_million_generated"):
        pairs = zip(rows["with"], rows["without"], strict=True)
        figures[f"difference_{key}"] = interval([a[key] - b[key] for a, b in pairs])
    return figures
