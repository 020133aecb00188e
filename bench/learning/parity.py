"""Parity with TRL's GRPOTrainer at S = 0: the gradients of recorded rollouts, and whole runs.

Gradients: TRL trains (`bench/trl_baseline.py --record`) and writes the rollouts, gradient and weights of each
step. The project's own learner replays the rollouts from the same first weights; from there on each side has
the weights that its own optimizer makes.

Whole runs: both sample for themselves, in pairs of a seed that share their prompts.

Either side has the same objective (GRPO, mean over answers of the mean over tokens, one update a batch, ratio
1), AdamW (0.9, 0.98, 1e-8, no decay of weights or rate) and clip at a gradient norm of 1. What is left:

===================  =====================================  =================================================
                     TRL                                    here
===================  =====================================  =================================================
advantage            (R - mean) / (std of n - 1 + 1e-4)     (R - mean) / (std of n + 1e-6): sqrt(8/7) larger
                                                            gradients, which Adam divides out; where we
                                                            replay with our own, the norm is clipped at that
warm-up              update k of 10 at (k - 1) / 10         at k / 10; `trl_baseline.py` makes it k / 10 too
groups of equal R    in the forward pass, gradient 0        left out of it, counted in the denominators
forward              a row an answer, left-padded           answers that share their prompt packed in rows
sampling (runs)      from the fp32 weights                  from the weights as published, bf16
forward weights      fp32                                   the same: bf16 values of fp32 masters
random numbers       its own                                its own: only prompts are shared
===================  =====================================  =================================================
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from bench.learning.harness import Setup, train
from bench.learning.intervals import Interval, interval
from echo_planes.config.schema import Config
from echo_planes.data.tasks.registry import build_adapter, load_tokenizer
from echo_planes.errors import DataError
from echo_planes.learning.learner import Learner
from echo_planes.learning.meeting import alone
from echo_planes.types import FloatArray, IntArray, TrainBatch

BASELINE = Path(__file__).resolve().parents[1] / "trl_baseline.py"
RATE, RECORDED_STEPS, RUN_STEPS, SEEDS = 2.5e-4, 20, 120, (0, 1, 2, 3, 4)
LEAST_COSINE = 0.9999
OWN_CLIP = math.sqrt(8 / 7)  # bites our own advantages' gradients where 1 bites TRL's
OTHER = "dapo"  # differs from grpo, at a ratio of 1, in how tokens are averaged alone
GROUP_PLACE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
TRL_LIMIT_S = 3600.0  # longest run of TRL
SAME: dict[str, dict[str, Any]] = {
    "sampling": {"prompts_per_step": 32, "samples_per_prompt": 8, "temperature": 1.0, "top_p": 1.0},
    "staleness": {"max_staleness": 0},
    "objective": {"name": "grpo", "anchor": "proximal", "tis_level": "none"},
    "learner": {
        "lr": RATE,
        "zero_stage": 0,
        "dtype": "fp32",
        "warmup_steps": 10,
        "decay": 0.0,
        "drift_target": 0.0,
        "beta1": 0.9,
        "beta2": 0.98,
        "grad_clip": 1.0,
    },
}


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded step, trained again."""

    step: int
    cosine: float  # of the two gradients
    norm: float  # of TRL's gradient, before it is clipped
    norm_ratio: float  # ours / TRL's
    logprob_difference: float  # mean over the trained tokens of |ours - TRL's|, before the step; nats
    apart: float  # |ours - TRL's| / |TRL's - first|, of the weights after the step


@dataclass(frozen=True, slots=True)
class Curve:
    """A whole run."""

    rewards: list[float]  # mean of each step
    tokens: list[int]  # trained in each step
    tokens_to_reach: int | None  # until the mean reward of five steps is 0.9

    @property
    def area(self) -> float:
        """Mean reward over all steps: the area under the reward curve."""
        return fmean(self.rewards)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two whole runs on the same prompts."""

    seed: int
    ours: Curve
    theirs: Curve


@dataclass(frozen=True, slots=True)
class Figures:
    """All that was measured. `skipped` says why nothing was."""

    steps: list[Step]  # with our advantages
    steps_given: list[Step]  # with TRL's advantages
    steps_other: list[Step]  # with our advantages and another objective, as a control
    same_prompts: bool  # the recorded prompts are those that our task gives
    pairs: list[Pair]
    skipped: str = ""

    @property
    def tokens(self) -> Interval | None:
        """Trained tokens to a reward of 0.9; None where a run never gets there."""
        reached = [(pair.ours.tokens_to_reach, pair.theirs.tokens_to_reach) for pair in self.pairs]
        differences = [a - b for a, b in reached if a is not None and b is not None]
        return interval(differences) if len(differences) == len(self.pairs) >= 2 else None

    @property
    def area(self) -> Interval:
        return interval([pair.ours.area - pair.theirs.area for pair in self.pairs])


def run(
    trl: Path,
    *,
    recorded_steps: int = RECORDED_STEPS,
    run_steps: int = RUN_STEPS,
    seeds: Sequence[int] = SEEDS,
) -> Figures:
    """Both parts; `trl` is the Python of TRL's environment. About 1 minute and 2 more a seed, on one core."""
    if not trl.exists():
        return Figures([], [], [], False, [], f"there is no {trl}; bench/trl_baseline.py says how it is made")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"[parity] TRL records {recorded_steps} steps", flush=True)
        _trl(trl, "--record", str(folder), "--steps", str(recorded_steps))
        steps, given = list(replay(folder)), list(replay(folder, given_advantages=True))
        other = list(replay(folder, objective=OTHER))
        same_prompts = prompts_agree(folder)
    pairs = []
    for seed in seeds:
        print(f"[parity] TRL and we, seed {seed}", flush=True)
        pairs.append(pair(trl, seed, run_steps))
    return Figures(steps, given, other, same_prompts, pairs)


def pair(trl: Path, seed: int, steps: int = RUN_STEPS) -> Pair:
    """TRL's run and ours."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trl.json"
        _trl(trl, "--json", str(out), "--seed", str(seed), "--steps", str(steps))
        told = json.loads(out.read_text())
    trace = train(Setup(lag=0, rate=RATE, seed=seed, settings=SAME, steps=steps))
    return Pair(
        seed,
        Curve(trace.rewards, trace.tokens, trace.tokens_to_reach),
        Curve(told["rewards"], told["tokens"], told["tokens_trained_to_090"]),
    )


def _trl(trl: Path, *arguments: str) -> None:
    """Run the baseline on one thread, so that a seed is a run."""
    # A learner that ran here has left its place in a process group, which accelerate would join.
    environment = {name: value for name, value in os.environ.items() if name not in GROUP_PLACE}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [str(trl), str(BASELINE), *arguments]
    subprocess.run(command, check=True, timeout=TRL_LIMIT_S, env=environment, stdout=subprocess.DEVNULL)


def replay(recording: Path, *, given_advantages: bool = False, objective: str = "grpo") -> Iterator[Step]:
    """Train our learner on the recorded rollouts, from its own weights, step after step.

    Args:
        given_advantages: take TRL's advantages instead of our own.
        objective: a name; TRL's is grpo.

    Raises DataError where the recorded run began with other weights or other parameters.
    """
    torch.set_num_threads(1)
    files = sorted(recording.glob("step-*.npz"))
    config = Config.model_validate(
        {
            **SAME,
            "run": {"steps": len(files), "seed": 0},
            "objective": {**SAME["objective"], "name": objective},
            "learner": {**SAME["learner"], "grad_clip": 1.0 if given_advantages else OWN_CLIP},
        }
    )
    start = np.load(recording / "start.npz")
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(config, 0, 1, alone(), Path(folder))
        learner.start()
        try:
            tap = _Tap(learner)
            if tap.names != list(start["names"]):
                raise DataError(f"{recording} is of a model with other parameters than {config.model.path}")
            if not np.array_equal(tap.weights(), start["weights"]):
                raise DataError(f"{recording} does not begin with the weights of {config.model.path}")
            for number, file in enumerate(files):
                recorded = dict(np.load(file))
                tap.gradient = np.zeros_like(recorded["gradient"])  # where no group has one
                stats = learner.train_step(recorded_batch(recorded, number, given_advantages))
                ours, theirs, weights = tap.gradient, recorded["gradient"], recorded["weights"]
                yield Step(
                    number,
                    _cosine(ours, theirs),
                    _norm(theirs),
                    _norm(ours) / _norm(theirs),
                    math.nan if stats.mismatch_mean is None else stats.mismatch_mean,
                    _norm(tap.weights() - weights) / _norm(weights - start["weights"]),
                )
        finally:
            learner.close()


class _Tap:
    """Keeps the gradient that each update of a learner is made from, before it is clipped."""

    def __init__(self, learner: Learner) -> None:
        engine = learner._engine
        self._module = engine._engine.module
        self._optimizer = engine._optimizer  # zero_stage=0: ours, as it is
        self.names = [name.removeprefix("model.") for name, _ in self._module.named_parameters()]
        self.gradient: FloatArray = np.zeros(0, np.float32)
        update = engine.step

        def step(learning_rate: float) -> float:
            self.gradient = torch.cat([p.grad.flatten() for p in self._module.parameters()]).numpy()
            return update(learning_rate)

        engine.step = step  # type: ignore[method-assign]

    def weights(self) -> FloatArray:
        """All masters, end to end: TRL's weights are not rounded either."""
        masters = [self._optimizer.state[p].get("master", p) for p in self._module.parameters()]
        flat: FloatArray = torch.cat([one.detach().flatten() for one in masters]).numpy()
        return flat


def recorded_batch(recorded: dict[str, Any], step: int, given_advantages: bool = False) -> TrainBatch:
    """The arrays of a recorded step without their padding, as our columns.

    TRL's logprobs stand for the sampler's; with SAME they change no gradient, and the learner tells how far
    its own are from them.
    """
    prompts, answers = recorded["prompt_mask"].astype(bool), recorded["completion_mask"].astype(bool)
    seen = np.concatenate([prompts, answers], 1)
    ids = np.concatenate([recorded["prompt_ids"], recorded["completion_ids"]], 1)
    trained = np.concatenate([np.zeros_like(prompts), answers], 1)
    logprobs = np.concatenate([np.zeros(prompts.shape, np.float32), recorded["logprobs"]], 1)
    n = len(ids)
    mask = trained[seen]
    return TrainBatch(
        step=step,
        trajectory_ids=tuple(map(str, range(n))),
        token_ids=ids[seen].astype(np.int64),
        offsets=np.concatenate([[0], seen.sum(1).cumsum()]).astype(np.int64),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, logprobs[seen], 0.0).astype(np.float32),
        rewards=recorded["rewards"].astype(np.float32),
        advantage_groups=_groups(n),
        advantages=recorded["advantages"] if given_advantages else np.full(n, np.nan, np.float32),
        versions=np.full(n, step, np.int64),
        correct=recorded["rewards"] == 1.0,
        token_versions=np.where(mask, step, -1),
        cut_off=np.zeros(n, np.bool_),
    )


def prompts_agree(recording: Path) -> bool:
    """Whether the recorded prompts are those of our task, token for token and in its order."""
    config = Config.model_validate(SAME)
    task = build_adapter(config.task, load_tokenizer(config.model.folder), 0)
    samples, next_prompt = config.sampling.samples_per_prompt, 0
    for file in sorted(recording.glob("step-*.npz")):
        recorded = np.load(file)
        rows = zip(recorded["prompt_ids"], recorded["prompt_mask"].astype(bool), strict=True)
        for i, (row, mask) in enumerate(rows):
            if tuple(row[mask]) != tuple(task.prompt(next_prompt + i // samples).token_ids):
                return False
        next_prompt += config.sampling.prompts_per_step
    return True


def verdicts(figures: Figures) -> dict[str, bool]:
    """The claims; none where everything was skipped."""
    if figures.skipped:
        return {}
    many = len(figures.steps)
    return {
        "TRL and we train on the same prompts": figures.same_prompts,
        f"cosine >= {LEAST_COSINE} in each of {many} steps": _close(figures.steps),
        f"cosine >= {LEAST_COSINE} in each of {many} steps, with TRL's advantages": _close(
            figures.steps_given
        ),
        f"control: {OTHER}'s average of tokens is told apart in each step": bool(figures.steps_other)
        and all(one.cosine < LEAST_COSINE for one in figures.steps_other),
        "the interval of the paired difference of tokens to 0.9 contains 0": figures.tokens is not None
        and figures.tokens.holds_zero,
    }


def lines(figures: Figures) -> Iterator[str]:
    """The figures in words, line by line."""
    if figures.skipped:
        yield f"parity with TRL: skipped: {figures.skipped}"
        return
    for title, steps in (
        ("our advantages", figures.steps),
        ("TRL's advantages", figures.steps_given),
        (f"control, {OTHER}", figures.steps_other),
    ):
        yield f"{title}: step, cosine, norm of TRL's gradient, ours / TRL's, |dlogprob|, weights apart"
        for one in steps:
            yield (
                f"{one.step:4} {one.cosine:.8f} {one.norm:8.4f} {one.norm_ratio:.6f} "
                f"{one.logprob_difference:.2e} {one.apart:.2e}"
            )
    yield "seed: tokens to 0.9 ours, TRL's; area ours, TRL's"
    for pair in figures.pairs:
        yield (
            f"{pair.seed:4} {pair.ours.tokens_to_reach} {pair.theirs.tokens_to_reach} "
            f"{pair.ours.area:.4f} {pair.theirs.area:.4f}"
        )
    for name, found in (("tokens to 0.9", figures.tokens), ("area", figures.area)):
        if found is not None:
            yield (
                f"{name}, ours - TRL's: {found.mean:+.4g} ({found.low:+.4g} to {found.high:+.4g}, "
                f"width {2 * found.half:.4g})"
            )


def _close(steps: list[Step]) -> bool:
    return bool(steps) and all(one.cosine >= LEAST_COSINE for one in steps)


def _groups(n: int) -> IntArray:
    return np.arange(n) // int(SAME["sampling"]["samples_per_prompt"])


def _norm(values: FloatArray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def _cosine(a: FloatArray, b: FloatArray) -> float:
    norms = _norm(a) * _norm(b)
    return float(a.astype(np.float64) @ b.astype(np.float64)) / norms if norms else math.nan
