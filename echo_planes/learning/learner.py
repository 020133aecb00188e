"""The learner: one step per batch, from flat columns to updated weights.

    advantages -> leave out zero groups -> mini-batches -> pack -> forward, loss, backward -> update
                                                            drift -> the next step's learning rate

One plain object per data-parallel rank; `actor.py` and tests drive it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from echo_planes.cluster.processor import bf16_is_faster
from echo_planes.config.extensions import extension
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import Config
from echo_planes.errors import DivergedError
from echo_planes.learning import deepspeed_engine, packing
from echo_planes.learning.adapters import Adapters
from echo_planes.learning.advantages import compute_advantages, zero_groups
from echo_planes.learning.deepspeed_engine import DeepSpeedEngine, Frozen, StateBits, joined, keeping_shares
from echo_planes.learning.distillation import Distiller
from echo_planes.learning.footprint import compute_dtype, free_threads
from echo_planes.learning.layer_count import LayerCount
from echo_planes.learning.memory import recomputes
from echo_planes.learning.objectives import (
    OBJECTIVES,
    Loss,
    Objective,
    Tokens,
    outlier_masks,
    policy_loss,
    token_weights,
)
from echo_planes.learning.packing import Inputs, Layout, MicroBatch
from echo_planes.learning.policy_model import load_policy
from echo_planes.learning.probe import settle_layout
from echo_planes.learning.rate import DriftControl, RateSchedule, warm_up
from echo_planes.learning.sequence import SequenceGroup
from echo_planes.learning.statistics import lag_stats, noise_of, weight_stats
from echo_planes.learning.step_state import Part, Step, joined_parts
from echo_planes.types import (
    Adjustment,
    BoolArray,
    FloatArray,
    IntArray,
    LagStats,
    Noise,
    StepStats,
    TrainBatch,
)
from echo_planes.weights.sparse_adapter import Distilled

OWN_PART = 8  # one in OWN_PART trajectories is scored again to measure how far a step moved the policy


class Learner:
    """One rank. All ranks get the same batch, each trains its share; every method is collective.

    Args:
        config: the run's settings.
        rank, world_size: place among the data-parallel ranks, and their number.
        store: store at which the ranks meet (`meeting`).
        failure_dir: folder for a batch that made the loss or gradient non-finite.
    """

    def __init__(self, config: Config, rank: int, world_size: int, store: Store, failure_dir: Path) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._failure_dir = failure_dir
        self._engine_or_none: DeepSpeedEngine | None = None
        self._reference: Frozen | None = None  # unless it is the policy without its adapters
        self._adapters: Adapters | None = None
        self._sequence: SequenceGroup | None = None
        self._dtype_name: Literal["bf16", "fp32"] = "fp32"
        self._num_updates = 0
        self._skipped_in_a_row = 0
        self._schedule = RateSchedule()
        self._resumed = ""  # part of `about`
        self._adjustment = Adjustment()
        self._diverged = ""
        self.doing = "starting"  # changes as the rank moves on; other threads read it
        self.layers = LayerCount()  # within a micro-batch, too
        self._parts: list[Part] = []  # of the present step, in the gradient already
        self._distiller: Distiller | None = None  # unless rollouts have a sparse adapter
        self._newest: TrainBatch | None = None  # trained on; only where there is a distiller
        self._objective = extension("objective.name", config.objective.name, OBJECTIVES, Objective)
        self.drift = DriftControl(config.learner.drift_target, config.learner.drift_floor)
        self.loss: Callable[[Tokens], Loss] = self._policy_loss

    def adjust(self, adjustment: Adjustment) -> None:
        """Train with these changes from the next step on; they replace earlier ones."""
        self._adjustment = adjustment

    @property
    def num_updates(self) -> int:
        """Optimizer updates made so far."""
        return self._num_updates

    @property
    def about(self) -> str:
        """Line on how this rank computes."""
        device, apart = self._engine.device.type, self._engine.apart
        rows = f"a row for each trajectory ({apart})" if apart else "each prompt once"
        how = f"computes in {self._dtype_name} on {device}, threads: {torch.get_num_threads()}"
        return f"{how}; {rows}{self._resumed}"

    def start(self, saved_dtype: Literal["bf16", "fp32"] | None = None) -> None:
        """Load the model, join the other ranks and check the layout of batches. Slow (seconds).

        Args:
            saved_dtype: of the checkpoint that will be loaded; `learner.dtype=auto` then means it.
        """
        config = self._config
        device = deepspeed_engine.pick_device(self._rank)
        cores = len(os.sched_getaffinity(0)) if device.type == "cpu" else 1
        torch.set_num_threads(config.learner.threads or free_threads(config, cores))
        torch.manual_seed(config.run.seed)
        self.doing = "meeting the other ranks"
        with joined(device, self._rank, self._world_size, self._store):
            self._load(device, saved_dtype)

    def _load(self, device: torch.device, saved_dtype: Literal["bf16", "fp32"] | None) -> None:
        config = self._config
        found = compute_dtype(config, on_gpu=device.type == "cuda", bf16_is_faster=bf16_is_faster)
        self._dtype_name = saved_dtype if saved_dtype and config.learner.dtype == "auto" else found
        dtype = torch.bfloat16 if self._dtype_name == "bf16" else torch.float32
        self._sequence = SequenceGroup.joined(self._rank, self._world_size, config.learner.sequence_ranks)
        load = partial(
            load_policy,
            config.model.folder,
            dtype,
            config.sampling.temperature,
            config.sampling.top_p,
            place=keeping_shares(config.learner, dtype),
            dropout=config.learner.dropout,
            longest=config.model.max_model_len,
            sequence=self._sequence,
        )
        self.doing = "loading the model"
        model = load(recompute=partial(recomputes, config.learner))
        self.layers.watch(model.model)
        models = [model]
        if rank := config.learner.lora_rank:
            targets, alpha = config.learner.lora_targets, config.learner.lora_alpha
            self._adapters = Adapters(model.model, rank, alpha, targets, config.run.seed, config.model.path)
        elif config.objective.kl_beta > 0:
            self.doing = "loading the reference"
            reference = load()
            models.append(reference)
            self.layers.watch(reference.model)
            self._reference = Frozen(reference, config.learner, device, dtype)
        self.doing = "starting DeepSpeed"
        self._engine_or_none = DeepSpeedEngine(
            model,
            config.learner,
            device=device,
            dtype=dtype,
            rank=self._rank,
            world_size=self._world_size,
            adapters=self._adapters,
        )
        if config.sparse.distill_rank and config.sparse.schedule:
            self._distiller = Distiller(model, config.sparse, config.run.seed, self._rank, self._world_size)
        self.doing = "probing the layout of batches"
        settle_layout(
            models,
            lambda micro: self._engine.forward(**self._inputs(micro))[0],
            longest=config.model.max_model_len,
        )

    def train_step(self, batch: TrainBatch) -> StepStats:
        """Train on one batch, or the last part of one, with at most `updates_per_step` optimizer updates.

        With one update the step's own forward gives the old logprobs. With K, a first pass gives them for the
        whole batch, which is then split into K mini-batches of whole groups in their order
        (`packing.split_groups`), one update each, with its own denominators.

        With `skip_zero_advantage` and kl_beta = 0, groups whose advantages are all 0 do not go through the
        model, or only to be scored (`score_skipped`). They still count in the denominators, so the gradient
        is that of the whole batch. A mini-batch with nothing to train makes no update. One whose gradient is
        not finite is left out, at most `max_skipped_updates` in a row.

        Raises:
            DivergedError: a column or a loss is not finite, or too many gradients in a row are not. The batch
                is saved under `failure_dir`, and the learner cannot be used afterwards.
        """
        began = time.perf_counter()
        if batch.step_trajectories:
            self.train_part(batch)
            whole, self._parts = joined_parts(self._parts), []
            began = time.perf_counter() - whole.seconds
            step = whole.step
            if step.tokens_trained:
                self._finish_update(whole, done=batch.step)
        else:
            whole = self._prepare(batch)
            inputs, step = whole.inputs, whole.step
            mini = packing.split_groups(batch.advantage_groups, self._config.learner.updates_per_step)
            if len(mini) > 1 and inputs.lengths.any():
                self._see(batch, inputs, step)
                step.old = step.seen[0]
            for number, some in enumerate(mini):
                if self._accumulate(whole, inputs, some):
                    self._finish_update(whole, done=batch.step + number / len(mini))
        self.drift.stepped(step.factor if step.losses and step.factor else 0.0)
        if step.losses and self.drift.target and (self._config.sparse.schedule or not step.lags.any()):
            self._watch_own_step(whole.batch, whole.scored, step)
        self._newest = whole.batch if self._distiller is not None else None
        self._schedule.steps_done = batch.step + 1
        return self._stats(whole, began)

    def distil(self, schedule: Schedule, version: int) -> Distilled | None:
        """Train the sparse adapter on the newest step's answers (`Distiller.distil`); None: there is none.

        A later call without a step between finds no answers: weights may be published again.
        """
        if self._distiller is None:
            return None

        def tell(text: str) -> None:
            self.doing = f"step {self._num_updates}: {text}"

        batch, self._newest = self._newest, None
        return self._distiller.distil(batch, schedule, version, tell)

    def train_part(self, batch: TrainBatch) -> None:
        """Add a part of a step to the gradient of its update (RLBoost section 4.1).

        `train_step`, called with the last part, makes the update. It is that of `train_step` with the joined
        batch, up to the order of the sums.

        Raises:
            DivergedError: as `train_step`.
        """
        began = time.perf_counter()
        part = self._prepare(batch)
        # The engine learns from a backward pass that the update is complete, even if that adds nothing.
        closes = batch.last and any(one.step.tokens_trained for one in self._parts)
        self._accumulate(part, part.inputs, np.arange(batch.num_trajectories), closes=closes)
        self._parts.append(replace(part, seconds=time.perf_counter() - began))

    def _prepare(self, batch: TrainBatch) -> Part:
        """Check a batch, find its advantages, and score those of its groups that are only scored."""
        self._refuse_if_diverged()
        config = self._config.objective
        self._check_columns(batch)
        advantages = compute_advantages(
            self._objective.advantage, batch.rewards, batch.advantage_groups, batch.advantages
        )
        empty = zero_groups(advantages, batch.advantage_groups)
        skip = empty & (config.skip_zero_advantage and config.kl_beta == 0)
        step = self._begin(batch, advantages)
        scored = ~skip
        if config.score_skipped and skip.any():
            self._see(batch, packing.find_inputs(batch, skip), step)
            scored[:] = True
        return Part(batch, step, ~skip, scored, empty)

    def logprobs(self, batch: TrainBatch) -> FloatArray:
        """Return the trained tokens' logprobs (T,), after temperature and top-p; 0 on other tokens."""
        everything = np.ones(batch.num_trajectories, np.bool_)
        return self._score(batch, packing.find_inputs(batch, everything))[0][0].cpu().numpy()

    def state_bits(self) -> StateBits:
        """Return `DeepSpeedEngine.state_bits`: bf16 bits by Hugging Face name on rank 0, {} elsewhere.

        The next call may write to the same arrays.
        """
        self._refuse_if_diverged()

        def tell(name: str) -> None:
            self.doing = f"collecting {name} of update {self._num_updates}"

        return self._engine.state_bits(tell)

    def save(self, folder: Path) -> None:
        """Write a checkpoint into an empty folder. The caller makes it durable and final."""
        self._refuse_if_diverged()
        self.doing = f"saving the state of update {self._num_updates}"
        counters = {
            "num_updates": self._num_updates,
            "schedule": asdict(self._schedule),
            "drift_at_full_rate": self.drift.at_full_rate,
            "drift_noise": asdict(self.drift.noise) if self.drift.noise else None,
            "drift_history": self.drift.history,
        }
        self._engine.save(folder, counters)
        if self._distiller is not None and self._rank == 0:
            self._distiller.save(folder)

    def load(self, folder: Path) -> None:
        """Continue from `save`, bit for bit. Call right after `start`; raises as `DeepSpeedEngine.load`."""
        self.doing = "loading the checkpoint"
        counters = self._engine.load(folder)
        self._num_updates = int(counters["num_updates"])
        self._schedule = RateSchedule(**counters.get("schedule", {}))
        if 0 < (done := self._schedule.steps_done) < self._config.run.steps:
            rate = self._scheduled_rate(done)
            self._resumed = f"; goes on at a learning rate of {rate:.3g} (peak {self._config.lr:.3g})"
        self.drift.at_full_rate = counters.get("drift_at_full_rate", 0.0)
        self.drift.history = counters.get("drift_history", [])
        self.drift.noise = Noise(**noise) if (noise := counters.get("drift_noise")) else None
        if self._distiller is not None:
            self._distiller.load(folder)

    def close(self) -> None:
        """Leave the process group, if `start` has joined it. The learner cannot be used afterwards."""
        if self._reference is not None:
            self._reference.close()
        self._reference = None
        if self._sequence is not None:
            self._sequence.leave()
        if self._engine_or_none is not None:
            self._engine_or_none.close()
        self._engine_or_none = None

    @property
    def _engine(self) -> DeepSpeedEngine:
        if self._engine_or_none is None:
            raise RuntimeError("Learner.start() was not called")
        return self._engine_or_none

    def _micro_batches(self, batch: TrainBatch, inputs: Inputs) -> tuple[list[MicroBatch], int]:
        """Return this rank's micro-batches (equally many on all ranks), and the tokens in all ranks' ones.

        Ranks that share sequences have the same ones. Without any input there is one, which is empty.
        """
        budget, sharing = self._config.learner.micro_batch_tokens, self._config.learner.sequence_ranks
        packs, num_shards = not self._engine.apart, self._world_size // sharing
        units = packing.make_units(batch, inputs, budget if packs else 0, num_shards)
        lengths = np.array([unit.length for unit in units], np.int64)
        plans = packing.plan(lengths, budget, num_shards, several=packs, multiple=sharing)
        layouts = plans[self._rank // sharing] or [Layout(sharing, ())]
        return [packing.build(layout, units, batch, inputs) for layout in layouts], int(lengths.sum())

    def _inputs(self, micro: MicroBatch) -> dict[str, Any]:
        device = self._engine.device
        return {
            "token_ids": torch.from_numpy(micro.token_ids).to(device),
            "position_ids": torch.from_numpy(micro.position_ids).to(device),
            "segments": micro.segments,
            "predictors": torch.from_numpy(micro.predictors).to(device),
            "targets": torch.from_numpy(micro.targets).to(device),
        }

    def _begin(self, batch: TrainBatch, advantages: FloatArray) -> Step:
        device, num_tokens = self._engine.device, len(batch.token_ids)
        lags = np.where(batch.token_versions < 0, 0, batch.step - batch.token_versions)
        return Step(
            advantages=torch.from_numpy(advantages).to(device),
            # A copy, because arrays that came through Ray are read-only.
            sampler_logprobs=torch.tensor(batch.sampler_logprobs, device=device),
            lags=torch.tensor(lags, device=device),
            seen=torch.zeros(2, num_tokens, device=device),
            mine=torch.zeros(2, num_tokens, device=device),
            old=None,
            per_lag=torch.zeros(int(lags.max(initial=0)) + 1, 4, device=device),
            sums=torch.zeros(4, device=device),
        )

    @torch.no_grad()
    def _score(self, batch: TrainBatch, inputs: Inputs) -> tuple[Tensor, int]:
        """Return logprobs and entropies (2, T), summed over ranks, and the tokens put through the model."""
        values = torch.zeros(2, len(batch.token_ids), device=self._engine.device)
        micro_batches, forwarded = self._micro_batches(batch, inputs)
        for number, micro in enumerate(micro_batches, start=1):
            self.doing = f"step {batch.step + 1}: scoring micro-batch {number} of {len(micro_batches)}"
            columns = torch.from_numpy(micro.columns).to(values.device)
            values[0, columns], values[1, columns] = self._engine.forward(**self._inputs(micro))
        return self._engine.sum_over_ranks(values), forwarded

    def _see(self, batch: TrainBatch, inputs: Inputs, step: Step) -> None:
        """Score trajectories that no training forward of this step has scored."""
        values, forwarded = self._score(batch, inputs)
        step.seen = step.seen + values
        step.tokens_forward += forwarded

    def _accumulate(self, part: Part, inputs: Inputs, chosen: IntArray, *, closes: bool = False) -> bool:
        """Add the gradient of the trajectories in `chosen`; return whether there was anything to add.

        `closes`: complete the update even if there is nothing to add.
        """
        batch, step = part.batch, part.step
        lengths = np.zeros_like(inputs.lengths)
        lengths[chosen] = inputs.lengths[chosen]
        if not lengths.any() and not closes:
            return False
        counts = np.diff(inputs.bounds)
        weights = np.zeros(len(lengths), np.float32)
        weights[chosen] = token_weights(
            self._objective,
            counts[chosen],
            batch.longest_answer or self._config.sampling.max_new_tokens,
            batch.step_trajectories,
        )
        weight = torch.from_numpy(weights).to(self._engine.device)
        micro_batches, forwarded = self._micro_batches(batch, replace(inputs, lengths=lengths))
        for number, micro in enumerate(micro_batches, start=1):
            self.doing = f"step {batch.step + 1}: training micro-batch {number} of {len(micro_batches)}"
            loss = self._micro_loss(micro, weight, step)
            self._engine.backward(loss.loss, last=batch.last and number == len(micro_batches))
            step.sums += torch.stack([loss.loss.detach(), loss.tis.sum(), loss.kl.sum(), loss.num_tokens])
        step.tokens_forward += forwarded
        step.tokens_trained += forwarded
        return True

    def _finish_update(self, whole: Part, *, done: float) -> None:
        """Make the update whose gradient is complete. `done`: steps of the run before it."""
        step = whole.step
        self.doing = f"step {whole.batch.step + 1}: update {self._num_updates + 1}"
        value, tis, kl, tokens = self._engine.sum_over_ranks(step.sums).tolist()
        step.sums.zero_()
        if step.factor is None:
            step.factor = self._factor(whole)
        rate = self._scheduled_rate(done) * step.factor
        norm = self._engine.step(rate)
        if not (np.isfinite(value) and np.isfinite(norm)):
            self._skipped_in_a_row += 1
            if np.isfinite(norm) or self._skipped_in_a_row > self._config.learner.max_skipped_updates:
                self._diverge(whole.batch, f"loss {value}, gradient norm {norm}")
            step.skipped += 1
            return
        self._skipped_in_a_row = 0
        self._num_updates += 1
        step.losses.append(value)
        step.grad_norms.append(norm)
        step.learning_rate = rate
        step.tis += tis
        step.kl += kl
        step.tokens_updated += tokens

    def _micro_loss(self, micro: MicroBatch, weight: Tensor, step: Step) -> Loss:
        """Return the loss of a micro-batch; count its tokens, and enter their logprobs, in `step`."""
        arguments = self._inputs(micro)
        logprobs, entropy = self._engine.forward(**arguments)
        columns = torch.from_numpy(micro.columns).to(logprobs.device)
        trajectories = torch.from_numpy(micro.trajectories).to(logprobs.device)
        if step.old is None:
            old = logprobs.detach()
            step.mine[0, columns], step.mine[1, columns] = old, entropy
        else:
            old = step.old[columns]
        loss = self.loss(
            Tokens(
                logprobs=logprobs,
                old_logprobs=old,
                sampler_logprobs=step.sampler_logprobs[columns],
                advantages=step.advantages[trajectories],
                weights=weight[trajectories],
                trajectory=trajectories,
                num_trajectories=len(step.advantages),
                reference_logprobs=self._reference_logprobs(arguments),
            )
        )
        one = torch.ones_like(loss.tis)
        step.per_lag.index_add_(
            0, step.lags[columns], torch.stack([one, loss.truncated, loss.masked, loss.clipped], 1).float()
        )
        return loss

    @torch.no_grad()
    def _reference_logprobs(self, arguments: dict[str, Any]) -> Tensor | None:
        """Return the logprobs of the model that the run began with, if the objective has a KL term."""
        if self._config.objective.kl_beta == 0:
            return None
        if self._adapters is not None:
            with self._adapters.off():
                return self._engine.forward(**arguments)[0]
        return None if self._reference is None else self._reference.logprobs(**arguments)

    def _policy_loss(self, tokens: Tokens) -> Loss:
        config = self._config.objective
        if self._adjustment.mask_outliers:
            config = config.model_copy(update=outlier_masks(config))
        return policy_loss(tokens, config, self._objective)

    def _factor(self, whole: Part) -> float:
        """Return the share of the scheduled rate that drift control and guard allow, from scored tokens."""
        batch, step = whole.batch, whole.step
        if step.old is None:
            step.seen = step.seen + self._engine.sum_over_ranks(step.mine)
        if not self._config.sparse.schedule:
            scored = np.repeat(whole.inputs.lengths > 0, np.diff(batch.offsets)) & batch.loss_mask
            per_lag = self._engine.sum_over_ranks(step.per_lag.clone()).cpu().numpy()
            self.drift.observe(*self._measured(batch, step, scored, per_lag))
        step.drift_factor = self.drift.factor
        return step.drift_factor * self._adjustment.rate_scale

    def _watch_own_step(self, batch: TrainBatch, scored: BoolArray, step: Step) -> None:
        """Give drift control the distance that this step moved the policy, where tokens do not tell it.

        They do not where none is stale, nor where they were sampled sparsely: a lower rate would not bring
        sparse attention nearer to dense. One in `OWN_PART` of the scored trajectories is scored again, now
        with lag 1. The drift of older tokens is taken to be that times their mean lag, as if all steps since
        had moved the policy as far and the same way.
        """
        part = scored & (np.cumsum(scored) % OWN_PART == 1)
        values, forwarded = self._score(batch, packing.find_inputs(batch, part))
        step.tokens_forward += forwarded
        chosen = np.repeat(part, np.diff(batch.offsets)) & batch.loss_mask
        moved = np.abs((values[0] - step.seen[0]).cpu().numpy()[chosen])
        if len(moved):
            lag = step.lags.cpu().numpy()[batch.loss_mask].mean()
            self.drift.observe_own_step(float(moved.mean() * max(1.0, lag)))

    def _measured(
        self, batch: TrainBatch, step: Step, scored: BoolArray, per_lag: FloatArray
    ) -> tuple[tuple[LagStats, ...], Noise | None]:
        """Return the figures of the tokens in `scored` (T,) by lag, and the noise, if some tell it."""
        log_weight = (step.seen[0].cpu().numpy() - batch.sampler_logprobs)[scored]
        lags = step.lags.cpu().numpy()[scored]
        still = [lag for lag in np.unique(lags).tolist() if self.drift.is_still(lag)]
        return lag_stats(log_weight, lags, per_lag), noise_of(log_weight, lags, per_lag, still)

    def _scheduled_rate(self, done: float) -> float:
        """Return the learning rate after `done` steps, by warm-up, plateau and decay."""
        config = self._config.learner
        left = self._schedule.left(config.decay, done, self._config.run.steps)
        return self._config.lr * min(warm_up(config.warmup_steps, self._num_updates), left)

    def _stats(self, whole: Part, began: float) -> StepStats:
        """Return the figures of the step, which began at `began` and was worked on since."""
        batch, step = whole.batch, whole.step
        scored = np.repeat(whole.scored, np.diff(batch.offsets))
        chosen = scored & batch.loss_mask
        logprobs, entropies = step.seen.cpu().numpy()
        log_weight = (logprobs - batch.sampler_logprobs)[chosen]
        entropy = entropies[chosen]
        per_lag = self._engine.sum_over_ranks(step.per_lag).cpu().numpy()
        trained, truncated, masked, clipped = per_lag.sum(0).tolist()
        weights = weight_stats(log_weight)
        updates = len(step.losses)
        return StepStats(
            step=batch.step,
            loss=sum(step.losses) / updates if updates else None,
            grad_norm=sum(step.grad_norms) / updates if updates else None,
            learning_rate=step.learning_rate,
            t_train_s=time.perf_counter() - began,
            tokens=batch.num_tokens,
            tokens_forward=step.tokens_forward,
            tokens_scored=len(log_weight),
            mismatch_mean=weights.mean,
            mismatch_p99=weights.p99,
            effective_samples=weights.effective,
            log_weight=weights.quantiles,
            k3=weights.k3,
            clip_fraction=clipped / trained if trained else None,
            masked_fraction=masked / trained if trained else None,
            truncated_fraction=truncated / trained if trained else None,
            tis_mean=step.tis / step.tokens_updated if updates else None,
            entropy=float(entropy.mean()) if len(entropy) else None,
            kl_reference=step.kl / step.tokens_updated
            if updates and self._config.objective.kl_beta
            else None,
            groups_skipped=len(np.unique(batch.advantage_groups[whole.empty])),
            num_updates=self._num_updates,
            updates_skipped=step.skipped,
            rate_factor=step.drift_factor if step.factor is not None else self.drift.factor,
            lags=lag_stats(log_weight, step.lags.cpu().numpy()[chosen], per_lag),
            noise=self.drift.noise,
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
        """Save the batch as an .npz (readable without pickle) and raise DivergedError."""
        path = self._failure_dir / f"diverged-step-{batch.step + 1}.npz"
        if self._rank == 0:
            self._failure_dir.mkdir(parents=True, exist_ok=True)
            columns = {name: np.asarray(value) for name, value in asdict(batch).items()}
            np.savez_compressed(path, allow_pickle=False, **columns)
        self._diverged = f"step {batch.step + 1} is not finite ({what}); its batch was saved as {path}"
        raise DivergedError(self._diverged)

    def _refuse_if_diverged(self) -> None:
        if self._diverged:
            raise DivergedError(self._diverged)
