"""Controls: what must not learn, and what refilled batches are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from bench.learning.harness import LAST, BatchChange, Setup, Trace, in_processes, train
from bench.learning.intervals import Interval, interval
from bench.learning.staleness import ONE
from echo_planes.learning.advantages import compute_advantages
from echo_planes.types import TrainBatch

LEARNT = 0.1  # mean reward above the start that would be learning
WARM = 35  # steps until about 90 % of the answers are right
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
    gain: Interval


def controls(seeds: Sequence[int], processes: int) -> list[Outcome]:
    """Every control."""
    gains: dict[str, list[float]] = {name: [] for name in CONTROLS}
    for name, gain in in_processes(
        _control, [(name, seed) for name in CONTROLS for seed in seeds], processes
    ):
        gains[name].append(gain)
    found = [Outcome(name, interval(values)) for name, values in gains.items()]
    for one in found:
        print(f"{one.name:24s} gain {one.gain}", flush=True)
    return found


def _control(job: tuple[str, int], *, lag: int = 3, steps: int = 100) -> tuple[str, float]:
    name, seed = job
    rate, batch_change = CONTROLS[name]
    trace = train(Setup(lag, rate, seed, steps=steps), batch_change=batch_change)
    return name, fmean(trace.rewards[-LAST:]) - fmean(trace.rewards[:5])


def control_verdicts(outcomes: Sequence[Outcome]) -> dict[str, bool]:
    by_name = {one.name: one for one in outcomes}
    told = {
        f"control does not learn: {one.name}": one.gain.high < LEARNT
        for one in outcomes
        if one.name != "trains"
    }
    return {"the same set-up without a control learns": by_name["trains"].gain.low > 3 * LEARNT, **told}


def refill(seeds: Sequence[int], processes: int) -> tuple[dict[str, Any], dict[str, bool]]:
    """Reward gained from about 90 % on per million tokens, with refilled batches and without, by seed."""
    jobs = [(seed, start) for seed in seeds for start in (None, WARM)]
    rows: dict[bool, dict[int, dict[str, float]]] = {False: {}, True: {}}
    for (seed, start), trace in in_processes(_refilled, jobs, processes):
        before, after = fmean(trace.rewards[WARM - 10 : WARM]), fmean(trace.rewards[-10:])
        trained, generated = sum(trace.tokens[WARM:]), sum(trace.generated[WARM:])
        rows[start is not None][seed] = {
            "before": before,
            "after": after,
            "gain_per_million_trained": 1e6 * (after - before) / trained,
            "gain_per_million_generated": 1e6 * (after - before) / generated,
            "generated_per_trained": generated / trained,
        }
    figures: dict[str, Any] = {}
    for name, cell in (("without", rows[False]), ("with", rows[True])):
        figures[name] = {key: interval([row[key] for row in cell.values()]) for key in cell[seeds[0]]}
        print(name, {key: str(found) for key, found in figures[name].items()})
    for key in ("gain_per_million_trained", "gain_per_million_generated"):
        figures[f"difference_{key}"] = interval([rows[True][s][key] - rows[False][s][key] for s in seeds])
        print(f"with - without: {key} {figures[f'difference_{key}']}")
    told = {
        "refill starts at about 90 %": all(0.85 <= row["before"] <= 0.95 for row in rows[True].values()),
    }
    return figures, told


def _refilled(job: tuple[int, int | None], *, lag: int = 1) -> tuple[tuple[int, int | None], Trace]:
    seed, start = job
    # No decay: the rate at the end would be part of what is compared.
    settings = {"learner": {"decay": 0.0}}
    return job, train(Setup(lag, ONE, seed, settings, steps=WARM + MORE, refill_from=start))
