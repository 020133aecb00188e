"""Training runs with an exact lag, in one process: the project's own learner, sampling in torch.

At step t every answer is sampled from the weights of version max(t - lag, 0), as published (bf16). No Ray, no
engine, no timing: a run is a function of its `Setup`, and seeds pair the prompts of runs to compare.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from echo_planes.config.schema import Config
from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.data.tasks.registry import build_adapter, load_tokenizer
from echo_planes.errors import DivergedError
from echo_planes.learning.guard import GuardFigures, figures_of
from echo_planes.learning.learner import Learner
from echo_planes.learning.meeting import alone
from echo_planes.learning.policy_model import load_policy
from echo_planes.types import Episode, Prompt, Span, TrainBatch

LAST = 20  # steps whose mean reward is a run's end
REACHED, WINDOW = 0.9, 5  # mean reward of so many steps that counts as learnt
REFILLS = 4  # batches sampled for one, at most
HOPELESS = 25  # steps in a row with next to no reward after which the rest is filled with zeros
In = TypeVar("In")
Out = TypeVar("Out")


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
    refill_from: int | None = None  # step from which groups of equal rewards are replaced by others
    model: str = "builtin:tiny-math"

    def config(self) -> Config:
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": self.steps, "seed": self.seed},
            "model": {"path": self.model},
            "staleness": {"max_staleness": self.lag},
        }
        if self.task:
            sections["task"] = self.task
        learner = {"lr": self.rate, "dtype": "fp32"}  # on every machine
        for name, values in {"learner": learner, **self.settings}.items():
            sections[name] = {**sections.get(name, {}), **values}
        if "learner" in self.settings:
            sections["learner"] = {**learner, **sections["learner"]}
        return Config.model_validate(sections)


@dataclass(frozen=True, slots=True)
class Trace:
    """Record of a run, step by step."""

    rewards: list[float]  # of all answers sampled, those that a refill left out too
    tokens: list[int]  # trained
    generated: list[int]  # tokens sampled
    drift: list[float | None]
    factor: list[float]
    watched: list[GuardFigures]
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


class Loop:
    """Learner and sampler of a run; `step` turns it once. Close it.

    Args:
        setup: the run.
        folder: for the learner's checkpoints and failures.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        torch.set_num_threads(1)
        config = setup.config()
        tokenizer = load_tokenizer(config.model.folder)
        self._sampler = Sampler(config, build_adapter(config.task, tokenizer, setup.seed))
        torch.manual_seed(setup.seed)
        self.learner = Learner(config, 0, 1, alone(), folder)
        self.learner.start()
        self.lag = setup.lag  # may be lowered while it runs
        self._versions: deque[Weights] = deque(maxlen=setup.lag + 1)

    def sample(self, step: int, *, refills: bool = False) -> tuple[TrainBatch, list[float], int]:
        """The batch of update `step`; rewards and number of tokens of all that was sampled for it."""
        self._versions.append(published(self.learner))
        age = min(self.lag, len(self._versions) - 1)
        self._sampler.install(self._versions[-1 - age])
        return self._sampler.batch(step, step - age, refills=refills)

    def forget(self) -> None:
        """After a rollback: what was published is of another lineage."""
        self._versions.clear()

    def close(self) -> None:
        self.learner.close()


def train(setup: Setup, change: Change | None = None, batch_change: BatchChange | None = None) -> Trace:
    """Run it."""
    began = time.perf_counter()
    rng = np.random.default_rng(setup.seed)
    trace = Trace([], [], [], [], [], [], 0.0)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(setup, Path(folder))
        if change:
            change(loop.learner, setup)
        try:
            for step in range(setup.steps):
                refills = setup.refill_from is not None and step >= setup.refill_from
                batch, rewards, generated = loop.sample(step, refills=refills)
                trace.rewards.append(fmean(rewards))
                trace.tokens.append(batch.num_tokens)
                trace.generated.append(generated)
                batch = batch_change(batch, rng) if batch_change else batch
                stats = loop.learner.train_step(batch)
                trace.watched.append(figures_of(batch, stats))
                trace.drift.append(stats.mismatch_mean)
                trace.factor.append(stats.rate_factor)
                if len(trace.rewards) >= HOPELESS and max(trace.rewards[-HOPELESS:]) < 0.02:
                    break
        except DivergedError:
            pass  # the learner's own end of a run; its rewards are zeros from there on
        finally:
            loop.close()
    trace.rewards.extend([0.0] * (setup.steps - len(trace.rewards)))
    return replace(trace, seconds=time.perf_counter() - began)


def in_processes(function: Callable[[In], Out], jobs: Sequence[In], processes: int) -> Iterator[Out]:
    """`function` of every job, in the order in which they end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in as_completed([pool.submit(function, job) for job in jobs]):
            yield future.result()


def published(learner: Learner) -> Weights:
    """The learner's weights as the workers get them: in bf16, here as fp32 by their Hugging Face names."""
    return {
        name: torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32)).reshape(shape)
        for name, (bits, shape) in learner.state_bits().items()
    }


Answer = tuple[list[int], list[float]]  # token ids, the end token included, and their logprobs


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt's answers and what they earned."""

    prompt: Prompt
    answers: list[Answer]
    rewards: list[float]


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

    def batch(self, step: int, version: int, *, refills: bool = False) -> tuple[TrainBatch, list[float], int]:
        """The batch of update `step`; rewards and number of tokens of all that was sampled for it.

        `refills`: groups of equal rewards are left out, others take their place, up to `REFILLS` batches.
        """
        groups: list[Answered] = []
        sampled: list[Answered] = []
        want = self._prompts_per_step
        while len(groups) < want:
            answered = self._answer(want - len(groups), version)
            sampled += answered
            if refills and len(sampled) < REFILLS * want:
                answered = [one for one in answered if len(set(one.rewards)) > 1]
            groups += answered
        rewards = [reward for one in sampled for reward in one.rewards]
        generated = sum(len(tokens) for one in sampled for tokens, _ in one.answers)
        return self._lay_out(groups, step, version), rewards, generated

    def _answer(self, num_prompts: int, version: int) -> list[Answered]:
        """The next prompts with their answers, scored."""
        prompts = [self._adapter.prompt(self._next + i) for i in range(num_prompts)]
        self._next += num_prompts
        end = self._adapter.tokenizer.eos_token_id
        sampled = self._sample([prompt.token_ids for prompt in prompts])
        return [
            Answered(
                prompt,
                answers,
                [
                    self._adapter.reward(prompt, self._episode(*one, one[0][-1] == end, version)).value
                    for one in answers
                ],
            )
            for prompt, answers in zip(prompts, sampled, strict=True)
        ]

    def _lay_out(self, groups: Sequence[Answered], step: int, version: int) -> TrainBatch:
        """Groups as flat columns."""
        end = self._adapter.tokenizer.eos_token_id
        rows = [(group.prompt.token_ids, *answer) for group in groups for answer in group.answers]
        rewards = np.array([reward for group in groups for reward in group.rewards], np.float32)
        trained = np.concatenate(
            [np.repeat([False, True], [len(prompt), len(tokens)]) for prompt, tokens, _ in rows]
        )
        lengths = [len(prompt) + len(tokens) for prompt, tokens, _ in rows]
        logprobs = [one for prompt, _, scores in rows for one in (*(0.0,) * len(prompt), *scores)]
        return TrainBatch(
            step=step,
            trajectory_ids=tuple(map(str, range(len(rows)))),
            token_ids=np.array([t for prompt, tokens, _ in rows for t in (*prompt, *tokens)], np.int64),
            offsets=np.cumsum([0, *lengths]),
            loss_mask=trained,
            sampler_logprobs=np.array(logprobs, np.float32),
            rewards=rewards,
            advantage_groups=np.repeat(np.arange(len(groups)), self._num_samples),
            advantages=np.full(len(rows), np.nan, np.float32),
            versions=np.full(len(rows), version, np.int64),
            correct=rewards > 0.5,
            token_versions=np.where(trained, version, -1),
            cut_off=np.array([tokens[-1] != end for _, tokens, _ in rows]),
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
    def _sample(self, prompts: Sequence[Sequence[int]]) -> list[list[Answer]]:
        """Per prompt, n answers; a prompt is read once."""
        n, longest = self._num_samples, max(map(len, prompts))
        pads = torch.tensor([longest - len(prompt) for prompt in prompts])
        context = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        places = (torch.arange(longest) - pads[:, None]).clamp(min=0)
        visible = torch.arange(longest) >= pads[:, None]
        cache, done = None, torch.zeros(n * len(prompts), dtype=torch.bool)
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
            logprobs = output.logits[:, -1].log_softmax(-1)
            if cache is None:
                cache = output.past_key_values
                cache.batch_repeat_interleave(n)
                logprobs, places, visible = (
                    one.repeat_interleave(n, 0) for one in (logprobs, places, visible)
                )
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
