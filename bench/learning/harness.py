"""Training runs with an exact lag, in one process: the project's own learner, sampling in torch.

At step t every answer is sampled from the weights of version max(t - lag, 0), as published (bf16). No Ray, no
engine, no timing: a run is a function of its `Setup`, and seeds pair the prompts of runs to compare.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo_planes.config import Config
from echo_planes.data.registry import build_adapter, load_tokenizer
from echo_planes.data.task import TaskAdapter
from echo_planes.learning.learner import Learner
from echo_planes.learning.policy_model import load_policy
from echo_planes.process import free_port
from echo_planes.types import Episode, Prompt, Span, StepStats, TrainBatch

LAST = 20  # steps whose mean reward is a run's end
REACHED, WINDOW = 0.9, 5  # mean reward of so many steps that counts as learnt
HOPELESS = 25  # steps in a row with next to no reward after which the rest is filled with zeros


@dataclass(frozen=True, slots=True)
class Setup:
    """One run. `settings` are sections of a `Config`; `variant` is a change that no setting makes."""

    lag: int
    rate: float  # learning rate
    seed: int
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    variant: str = ""
    steps: int = 120
    task: dict[str, Any] = field(default_factory=dict)
    model: str = "builtin:tiny-math"

    def config(self) -> Config:
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": self.steps, "seed": self.seed},
            "model": {"path": self.model},
            "staleness": {"max_staleness": self.lag},
        }
        if self.task:
            sections["task"] = self.task
        for name, values in {"learner": {"lr": self.rate}, **self.settings}.items():
            sections[name] = {**sections.get(name, {}), **values}
        if "learner" in self.settings:
            sections["learner"].setdefault("lr", self.rate)
        return Config.model_validate(sections)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run did, step by step."""

    rewards: list[float]
    tokens: list[int]  # trained
    drift: list[float | None]
    factor: list[float]
    stats: list[dict[str, Any]]  # of every step, where asked for
    seconds: float

    @property
    def area(self) -> float:
        """Mean reward over all steps: the area under the reward curve."""
        return fmean(self.rewards)

    @property
    def final(self) -> float:
        return fmean(self.rewards[-LAST:])

    @property
    def lowest_late(self) -> float:
        return min(self.rewards[-LAST:])

    @property
    def tokens_to_reach(self) -> int | None:
        """Trained tokens until the mean reward of `WINDOW` steps is `REACHED`."""
        for step in range(WINDOW, len(self.rewards) + 1):
            if fmean(self.rewards[step - WINDOW : step]) >= REACHED:
                return sum(self.tokens[:step])
        return None


Weights = dict[str, Tensor]
Change = Callable[[Learner, Setup], None]  # what a variant does to a learner that has started
BatchChange = Callable[[TrainBatch, np.random.Generator], TrainBatch]  # what a control does to a batch


def train(
    setup: Setup,
    change: Change | None = None,
    batch_change: BatchChange | None = None,
    *,
    keep_stats: bool = False,
) -> Trace:
    """Run it."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    config = setup.config()
    tokenizer = load_tokenizer(config.model.folder)
    adapter = build_adapter(config.task, tokenizer, setup.seed)
    sampler = Sampler(config, adapter)
    rng = np.random.default_rng(setup.seed)
    torch.manual_seed(setup.seed)
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(config, 0, 1, free_port(), Path(folder))
        learner.start()
        if change:
            change(learner, setup)
        trace = Trace([], [], [], [], [], 0.0)
        versions: deque[Weights] = deque(maxlen=setup.lag + 1)
        try:
            for step in range(setup.steps):
                versions.append(published(learner))
                sampler.install(versions[0])
                batch = sampler.batch(step, step - len(versions) + 1)
                trace.rewards.append(float(batch.rewards.mean()))
                trace.tokens.append(batch.num_tokens)
                if batch_change:
                    batch = batch_change(batch, rng)
                stats = learner.train_step(batch)
                _note(trace, stats, keep_stats)
                if len(trace.rewards) >= HOPELESS and max(trace.rewards[-HOPELESS:]) < 0.02:
                    trace.rewards.extend([0.0] * (setup.steps - step - 1))
                    break
        finally:
            learner.close()
    return Trace(
        trace.rewards, trace.tokens, trace.drift, trace.factor, trace.stats, time.perf_counter() - began
    )


def _note(trace: Trace, stats: StepStats, keep_stats: bool) -> None:
    trace.drift.append(stats.mismatch_mean)
    trace.factor.append(stats.rate_factor)
    if keep_stats:
        trace.stats.append(asdict(stats))


def published(learner: Learner) -> Weights:
    """The learner's weights as the workers get them: in bf16, here as fp32 by their Hugging Face names."""
    return {
        name: torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32)).reshape(shape)
        for name, (bits, shape) in learner.state_bits().items()
    }


class Sampler:
    """Samples a task's answers in torch from whatever weights it holds."""

    def __init__(self, config: Config, adapter: TaskAdapter) -> None:
        sampling = config.sampling
        policy = load_policy(config.model.folder, torch.float32, sampling.temperature, sampling.top_p)
        self._model = policy.model.eval()
        self._adapter = adapter
        self._num_samples = sampling.samples_per_prompt
        self._prompts_per_step = sampling.prompts_per_step
        self._limit = adapter.max_new_tokens or sampling.max_new_tokens
        self._next = 0

    @torch.no_grad()
    def install(self, weights: Weights) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name])

    def batch(self, step: int, version: int) -> TrainBatch:
        """The next prompts' answers, as the batch of update `step`."""
        prompts = [self._adapter.prompt(self._next + i) for i in range(self._prompts_per_step)]
        self._next += len(prompts)
        return self.answer(prompts, step, version)

    def answer(self, prompts: Sequence[Prompt], step: int, version: int) -> TrainBatch:
        """Sample, score and lay out as columns."""
        answers = self._sample([prompt.token_ids for prompt in prompts])
        ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        offsets = [0]
        rewards: list[float] = []
        correct: list[bool] = []
        cut_off: list[bool] = []
        groups: list[int] = []
        end = self._adapter.tokenizer.eos_token_id
        for number, prompt in enumerate(prompts):
            for tokens, scores in answers[number]:
                ended = tokens[-1] == end
                reward = self._adapter.reward(prompt, self._episode(tokens, scores, ended, version))
                ids += [*prompt.token_ids, *tokens]
                mask += [False] * len(prompt.token_ids) + [True] * len(tokens)
                logprobs += [0.0] * len(prompt.token_ids) + scores
                offsets.append(len(ids))
                rewards.append(reward.value)
                correct.append(reward.correct)
                cut_off.append(not ended)
                groups.append(number)
        trained = np.array(mask, np.bool_)
        n = len(rewards)
        return TrainBatch(
            step=step,
            trajectory_ids=tuple(map(str, range(n))),
            token_ids=np.array(ids, np.int64),
            offsets=np.array(offsets, np.int64),
            loss_mask=trained,
            sampler_logprobs=np.array(logprobs, np.float32),
            rewards=np.array(rewards, np.float32),
            advantage_groups=np.array(groups, np.int64),
            advantages=np.full(n, np.nan, np.float32),
            versions=np.full(n, version, np.int64),
            correct=np.array(correct, np.bool_),
            token_versions=np.where(trained, version, -1),
            cut_off=np.array(cut_off, np.bool_),
        )

    def _episode(self, tokens: list[int], scores: list[float], ended: bool, version: int) -> Episode:
        return Episode(
            response_ids=tuple(tokens),
            response_mask=(True,) * len(tokens),
            logprobs=tuple(scores),
            spans=(Span(0, len(tokens), version, ""),),
            finish_reason="stop" if ended else "length",
            text=self._adapter.tokenizer.decode(tokens, skip_special_tokens=True),
        )

    @torch.no_grad()
    def _sample(self, prompts: Sequence[Sequence[int]]) -> list[list[tuple[list[int], list[float]]]]:
        """Per prompt, n answers: token ids (the end token included) and their logprobs."""
        n, longest = self._num_samples, max(map(len, prompts))
        pads = torch.tensor([longest - len(prompt) for prompt in prompts]).repeat_interleave(n)
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        context = torch.tensor(rows).repeat_interleave(n, 0)
        places = (torch.arange(longest) - pads[:, None]).clamp(min=0)
        visible = torch.arange(longest) >= pads[:, None]
        cache, done = None, torch.zeros(len(context), dtype=torch.bool)
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        end = self._adapter.tokenizer.eos_token_id
        for _ in range(self._limit):
            output = self._model(
                input_ids=context,
                position_ids=places,
                attention_mask=visible.long(),
                past_key_values=cache,
                use_cache=True,
            )
            cache = output.past_key_values
            logprobs = output.logits[:, -1].log_softmax(-1)
            chosen = torch.multinomial(logprobs.exp(), 1)
            tokens.append(torch.where(done, -1, chosen[:, 0]))
            scores.append(logprobs.gather(1, chosen)[:, 0])
            done = done | (chosen[:, 0] == end)
            if done.all():
                break
            context, places = chosen, places[:, -1:] + 1
            visible = torch.cat([visible, torch.ones(len(visible), 1, dtype=torch.bool)], 1)
        table, values = torch.stack(tokens, 1).tolist(), torch.stack(scores, 1).tolist()
        answers = []
        for row, scored in zip(table, values, strict=True):
            own = [token for token in row if token >= 0]
            answers.append((own, scored[: len(own)]))
        return [answers[i * n : (i + 1) * n] for i in range(len(prompts))]
