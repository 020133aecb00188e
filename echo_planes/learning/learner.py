"""The learner: one step per batch, from flat columns to updated weights.

    advantages -> leave out zero groups -> mini-batches -> pack -> forward, loss, backward -> update

One plain object per data-parallel rank; `actor.py` and tests drive it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from echo_planes.config import Config, LearnerConfig
from echo_planes.errors import ConfigError, DivergedError
from echo_planes.learning import packing
from echo_planes.learning.advantages import compute_advantages, zero_groups
from echo_planes.learning.deepspeed_engine import DeepSpeedEngine, StateBits, pick_device, pick_dtype
from echo_planes.learning.objectives import Loss, Tokens, policy_loss, token_weights
from echo_planes.learning.packing import Inputs, MicroBatch
from echo_planes.learning.policy_model import PolicyModel, load_policy
from echo_planes.types import Adjustment, BoolArray, FloatArray, IntArray, StepStats, TrainBatch

# Longest unit of samples that share their prompt: beyond it the dense mask costs more than the prompts.
SHARED_TOKENS = 1024


@dataclass(slots=True)
class _Step:
    """What one step has done so far; sums are over tokens put through a training forward."""

    advantages: Tensor  # (N,)
    sampler_logprobs: Tensor  # (T,)
    seen: Tensor  # (T,) logprobs at the start of the step, 0 where not computed
    old: Tensor | None  # the same, all ranks together, once a first pass made them
    tokens_forward: int = 0
    losses: list[float] = field(default_factory=list)  # per update
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    tis: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0


class Learner:
    """One rank. All ranks get the same batch, each trains its share; every method is collective.

    Args:
        config: the whole run.
        rank, world_size: data-parallel place.
        master_port: torch.distributed port, the same on all ranks.
        failure_dir: where a batch that made the loss or gradient non-finite is kept.
    """

    def __init__(
        self, config: Config, rank: int, world_size: int, master_port: int, failure_dir: Path
    ) -> None:
        budget = config.learner.micro_batch_tokens
        if budget < config.model.max_model_len:
            raise ConfigError(
                f"learner.micro_batch_tokens={budget} is less than "
                f"model.max_model_len={config.model.max_model_len}: the longest answer would not fit"
            )
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._master_port = master_port
        self._failure_dir = failure_dir
        self._engine_or_none: DeepSpeedEngine | None = None
        self._reference: PolicyModel | None = None
        self._num_updates = 0
        self._diverged = ""
        self._adjustment = Adjustment()

    @property
    def num_updates(self) -> int:
        """Optimizer updates made so far."""
        return self._num_updates

    def start(self) -> None:
        """Load the model and join the other ranks. Slow (seconds)."""
        config = self._config
        torch.set_num_threads(config.learner.threads)
        torch.manual_seed(config.run.seed)
        device = pick_device(self._rank)
        dtype = pick_dtype(config.learner.dtype, device)
        sampling = config.sampling
        model = load_policy(config.model.folder, dtype, sampling.temperature, sampling.top_p).train()
        if config.objective.kl_beta > 0:
            reference = load_policy(config.model.folder, dtype, sampling.temperature, sampling.top_p)
            self._reference = reference.eval().requires_grad_(False).to(device)
        self._engine_or_none = DeepSpeedEngine(
            model,
            config.learner,
            device=device,
            dtype=dtype,
            rank=self._rank,
            world_size=self._world_size,
            master_port=self._master_port,
            timeout_s=config.run.wait_limit_s,
        )

    def train_step(self, batch: TrainBatch) -> StepStats:
        """Train on one batch, `updates_per_step` optimizer updates.

        With one update the step's own forward gives the old logprobs and the ratio is exactly 1. With K, a
        first pass gives them for the whole batch, which is then split into K mini-batches of whole groups in
        their order (`packing.split_groups`), one update each, with its own denominators.

        Groups whose advantages are all 0 are not put through the model (when `skip_zero_advantage` and
        kl_beta = 0). They still count in the denominators, so the gradient is that of the whole batch. The
        token means in the stats are over the tokens that were put through; loss and grad_norm are means over
        the updates. A mini-batch with nothing to train makes no update.

        Raises DivergedError when a column, the loss or the gradient norm is not finite; the batch is then
        saved under `failure_dir`. The learner is of no more use afterwards.
        """
        began = time.perf_counter()
        self._refuse_if_diverged()
        config = self._config.objective
        self._check_columns(batch)
        advantages = compute_advantages(config.name, batch.rewards, batch.advantage_groups, batch.advantages)
        empty = zero_groups(advantages, batch.advantage_groups)
        skip = empty & (config.skip_zero_advantage and config.kl_beta == 0)
        inputs = packing.find_inputs(batch, ~skip)

        device = self._engine.device
        step = _Step(
            torch.from_numpy(advantages).to(device),
            torch.tensor(batch.sampler_logprobs, device=device),  # a copy: what came through Ray is read-only
            torch.zeros(len(batch.token_ids), device=device),
            None,
        )
        parts = packing.split_groups(batch.advantage_groups, self._config.learner.updates_per_step)
        if len(parts) > 1 and inputs.lengths.any():
            step.seen, forwarded = self._score(batch, inputs)
            step.old = step.seen
            step.tokens_forward += forwarded
        for part in parts:
            self._update(batch, inputs, part, step)
        if step.old is None:
            self._engine.sum_over_ranks(step.seen)
        return self._stats(batch, inputs, empty, step, began)

    def adjust(self, adjustment: Adjustment) -> None:
        """What the guard asks for, from the next step on."""
        self._adjustment = adjustment

    def logprobs(self, batch: TrainBatch) -> FloatArray:
        """Logprobs (T,) of the current weights on the trained tokens, after temperature and top-p; else 0."""
        values, _ = self._score(batch, packing.find_inputs(batch, np.ones(batch.num_trajectories, np.bool_)))
        return values.cpu().numpy()

    def state_bits(self) -> StateBits:
        """`DeepSpeedEngine.state_bits`: bf16 bits under Hugging Face names on rank 0, {} elsewhere.

        The next call may write to the same arrays.
        """
        self._refuse_if_diverged()
        return self._engine.state_bits()

    def save(self, folder: Path) -> None:
        """Write a checkpoint into an empty folder. Making it durable and final is the caller's."""
        self._refuse_if_diverged()
        self._engine.save(folder, {"num_updates": self._num_updates})

    def load(self, folder: Path) -> None:
        """Continue from `save`, bit for bit. Call right after `start`. Raises DataError, ConfigError."""
        self._num_updates = self._engine.load(folder)["num_updates"]

    def close(self) -> None:
        """Leave the process group. Nothing can be called afterwards."""
        self._engine.close()
        self._engine_or_none = None

    @property
    def _engine(self) -> DeepSpeedEngine:
        if self._engine_or_none is None:
            raise RuntimeError("Learner.start() was not called")
        return self._engine_or_none

    def _micro_batches(self, batch: TrainBatch, inputs: Inputs) -> tuple[list[MicroBatch], int]:
        """This rank's micro-batches (all ranks get equally many), and the tokens in those of all ranks."""
        budget = self._config.learner.micro_batch_tokens
        units = packing.make_units(batch, inputs, min(budget, SHARED_TOKENS))
        lengths = np.array([unit.length for unit in units], np.int64)
        layouts = packing.plan(lengths, budget, self._world_size)[self._rank]
        return [packing.build(layout, units, batch, inputs) for layout in layouts], int(lengths.sum())

    def _inputs(self, micro: MicroBatch) -> dict[str, Tensor | None]:
        device = self._engine.device
        mask = micro.attention_mask()
        return {
            "token_ids": torch.from_numpy(micro.token_ids).to(device),
            "position_ids": None if mask is None else torch.from_numpy(micro.position_ids).to(device),
            "attention_mask": None if mask is None else torch.from_numpy(mask).to(device),
            "predictors": torch.from_numpy(micro.predictors).to(device),
            "targets": torch.from_numpy(micro.targets).to(device),
        }

    @torch.no_grad()
    def _score(self, batch: TrainBatch, inputs: Inputs) -> tuple[Tensor, int]:
        """Logprobs (T,) of all ranks together, and the tokens all put through the model."""
        values = torch.zeros(len(batch.token_ids), device=self._engine.device)
        micro_batches, forwarded = self._micro_batches(batch, inputs)
        for micro in micro_batches:
            logprobs, _ = self._engine.forward(**self._inputs(micro))
            values[torch.from_numpy(micro.columns).to(values.device)] = logprobs
        return self._engine.sum_over_ranks(values), forwarded

    def _update(self, batch: TrainBatch, inputs: Inputs, part: IntArray, step: _Step) -> None:
        """One optimizer update on the trajectories in `part`."""
        lengths = np.zeros_like(inputs.lengths)
        lengths[part] = inputs.lengths[part]
        if not lengths.any():
            return
        counts = np.diff(inputs.bounds)
        weights = np.zeros(len(lengths), np.float32)
        weights[part] = token_weights(
            self._config.objective.name, counts[part], self._config.sampling.max_new_tokens
        )
        weight = torch.from_numpy(weights).to(self._engine.device)
        sums = torch.zeros(5, device=self._engine.device)
        micro_batches, forwarded = self._micro_batches(batch, replace(inputs, lengths=lengths))
        for number, micro in enumerate(micro_batches, start=1):
            arguments = self._inputs(micro)
            logprobs, entropy = self._engine.forward(**arguments)
            loss = self._loss(micro, arguments, logprobs, weight, step)
            self._engine.backward(loss.loss, last=number == len(micro_batches))
            terms = (loss.tis.sum(), loss.clipped.sum(), entropy.sum(), loss.kl.sum())
            sums += torch.stack([loss.loss.detach(), *terms])
        value, tis, clipped, entropy_sum, kl = self._engine.sum_over_ranks(sums).tolist()
        if not np.isfinite(value):
            self._diverge(batch, f"loss {value}")
        step.learning_rate = self._learning_rate()
        norm = self._engine.step(step.learning_rate)
        if not np.isfinite(norm):
            self._diverge(batch, f"gradient norm {norm}")
        self._num_updates += 1
        step.losses.append(value)
        step.grad_norms.append(norm)
        step.tokens_forward += forwarded
        step.tis += tis
        step.clipped += clipped
        step.entropy += entropy_sum
        step.kl += kl

    def _loss(
        self,
        micro: MicroBatch,
        arguments: dict[str, Tensor | None],
        logprobs: Tensor,
        weight: Tensor,
        step: _Step,
    ) -> Loss:
        columns = torch.from_numpy(micro.columns).to(logprobs.device)
        trajectories = torch.from_numpy(micro.trajectories).to(logprobs.device)
        if step.old is None:
            old = logprobs.detach()
            step.seen[columns] = old
        else:
            old = step.old[columns]
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference(**arguments)
        tokens = Tokens(
            logprobs=logprobs,
            old_logprobs=old,
            sampler_logprobs=step.sampler_logprobs[columns],
            advantages=step.advantages[trajectories],
            weights=weight[trajectories],
            trajectory=trajectories,
            num_trajectories=len(step.advantages),
            reference_logprobs=reference,
        )
        return policy_loss(tokens, self._config.objective)

    def _learning_rate(self) -> float:
        """Linear warm-up, constant, then linear to 0 over the last `decay` of the run, in updates."""
        config = self._config.learner
        return learning_rate(
            self._config.lr,
            config,
            self._num_updates,
            total_updates=self._config.run.steps * config.updates_per_step,
        )

    def _stats(
        self, batch: TrainBatch, inputs: Inputs, empty: BoolArray, step: _Step, began: float
    ) -> StepStats:
        forwarded = np.repeat(inputs.lengths > 0, np.diff(batch.offsets)) & batch.loss_mask
        seen = step.seen.cpu().numpy()
        mismatch = np.abs(seen[forwarded] - batch.sampler_logprobs[forwarded])
        tokens = max(len(mismatch), 1)
        updates = max(len(step.losses), 1)
        return StepStats(
            step=batch.step,
            loss=sum(step.losses) / updates,
            grad_norm=sum(step.grad_norms) / updates,
            learning_rate=step.learning_rate,
            t_train_s=time.perf_counter() - began,
            tokens=batch.num_tokens,
            tokens_forward=step.tokens_forward,
            mismatch_mean=float(mismatch.mean()) if len(mismatch) else 0.0,
            mismatch_p99=float(np.quantile(mismatch, 0.99)) if len(mismatch) else 0.0,
            clip_fraction=step.clipped / tokens,
            tis_mean=step.tis / tokens,
            entropy=step.entropy / tokens,
            kl_reference=step.kl / tokens,
            groups_skipped=len(np.unique(batch.advantage_groups[empty])),
            num_updates=self._num_updates,
        )

    def _check_columns(self, batch: TrainBatch) -> None:
        columns = {
            "rewards": batch.rewards,
            "advantages": batch.advantages[~np.isnan(batch.advantages)],
            "sampler_logprobs": batch.sampler_logprobs[batch.loss_mask],
        }
        for name, values in columns.items():
            if not np.isfinite(values).all():
                self._diverge(batch, name)

    def _diverge(self, batch: TrainBatch, what: str) -> None:
        """Keep the batch as an .npz (readable without pickle) and raise."""
        path = self._failure_dir / f"diverged-step-{batch.step}.npz"
        if self._rank == 0:
            self._failure_dir.mkdir(parents=True, exist_ok=True)
            columns = {name: np.asarray(value) for name, value in asdict(batch).items()}
            np.savez_compressed(path, allow_pickle=False, **columns)
        self._diverged = f"step {batch.step} is not finite ({what}); its batch was saved as {path}"
        raise DivergedError(self._diverged)

    def _refuse_if_diverged(self) -> None:
        if self._diverged:
            raise DivergedError(self._diverged)


def learning_rate(peak: float, config: LearnerConfig, num_updates: int, *, total_updates: int) -> float:
    """The rate of the update after `num_updates`: warm-up, plateau, decay (never 0 within the run)."""
    warm = min(1.0, (num_updates + 1) / max(config.warmup_steps, 1))
    decay_updates = config.decay * total_updates
    left = max(total_updates - num_updates, 1)
    return peak * min(warm, left / decay_updates if decay_updates else 1.0, 1.0)
