"""The public task interface: write a subclass of `TaskAdapter`, run it with `task=package.module:Class`.

The contract follows ECHO-2 appendix F.1: an adapter (i) makes prompts, (ii) defines the reward, (iii)
materialises the training metadata Omega (masks, normalisation groups, advantages).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from echo_planes.data.batch import train_everything
from echo_planes.types import Episode, Omega, Prompt, Reward, Sample, Trajectory


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that adapters may use."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


class Policy(Protocol):
    """The model under training, as an adapter's rollout sees it."""

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        """Sample one continuation of `token_ids` with the run's sampling settings."""
        ...


class TaskOptions(BaseModel):
    """Base of an adapter's own settings: subclass it; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class TaskAdapter(ABC):
    """One task. Built once in every process that needs it, so keep `__init__` light and deterministic.

    Args:
        options: an instance of `Options`, from the `task.*` settings.
        tokenizer: the policy's tokenizer.
        seed: `run.seed`.
    """

    Options: ClassVar[type[TaskOptions]] = TaskOptions
    max_new_tokens: int | None = None  # a task that knows its answers' length says so; else sampling's
    reward_limit_s: float = 10.0  # deadline of the reward of one answer, seconds

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.seed = seed

    def preflight(self) -> str:
        """Called once, before anything heavy starts: raise `ClusterError` if this machine lacks something.

        Returns:
            A line for the user, if there is anything to say.
        """
        return ""

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """Training prompt number `index` (0, 1, 2, ...): a pure function of (seed, options, index)."""

    @abstractmethod
    def eval_prompt(self, index: int) -> Prompt:
        """Held-out prompt number `index`: never among the training prompts, the same in every run."""

    def prepare(self, prompt: Prompt, episodes: Sequence[Episode]) -> None:  # noqa: B027  optional
        """Called before the rewards of a group: what is better done for all its answers at once.

        Its time counts towards the first answer's deadline. One that raises fails every answer of the group.
        """

    @abstractmethod
    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        """Score a finished answer. Runs beside a worker in a process of its own, one answer at a time.

        One that raises, takes longer than `reward_limit_s`, or returns anything but a `Reward` of finite
        numbers, makes its trajectory a counted failure: its group is not trained, the run goes on.
        """

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Drive the policy through one episode. Single-turn by default; override for several turns."""
        builder = EpisodeBuilder()
        builder.add_sample(await policy.generate(prompt.token_ids))
        return builder.build(self.tokenizer)

    def materialize(self, trajectories: Sequence[Trajectory]) -> list[Omega]:
        """Training metadata for one group's trajectories, in order.

        By default all sampled tokens are trained and the samples of one prompt are normalised together
        by the objective.
        """
        return train_everything(trajectories)


class EpisodeBuilder:
    """Joins policy samples and environment text into one `Episode`, token for token.

    Text is never tokenised twice: what the policy sampled keeps the very ids it sampled.
    """

    def __init__(self) -> None:
        self._episode = Episode((), (), (), (), "stop", num_turns=0)

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Everything so far after the prompt: append it to the prompt for the next turn."""
        return self._episode.response_ids

    def add_sample(self, sample: Sample) -> None:
        """Append what the policy answered. Environment tokens before it join its first span."""
        old = self._episode
        covered = old.spans[-1].stop if old.spans else 0
        base = len(old.response_ids)
        spans = [replace(s, start=s.start + base, stop=s.stop + base) for s in sample.spans]
        if spans:
            spans[0] = replace(spans[0], start=covered)
        tops = old.top_logprobs + ((),) * (base - len(old.top_logprobs)) + sample.top_logprobs
        self._episode = replace(
            old,
            response_ids=old.response_ids + sample.token_ids,
            response_mask=old.response_mask + (True,) * len(sample.token_ids),
            logprobs=old.logprobs + sample.logprobs,
            spans=old.spans + tuple(spans),
            finish_reason=sample.finish_reason,
            top_logprobs=tops if sample.top_logprobs or old.top_logprobs else (),
            num_turns=old.num_turns + 1,
        )

    def add_environment(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the environment wrote: seen by the policy, never trained."""
        old = self._episode
        self._episode = replace(
            old,
            response_ids=old.response_ids + tuple(token_ids),
            response_mask=old.response_mask + (False,) * len(token_ids),
            logprobs=old.logprobs + (0.0,) * len(token_ids),
        )

    def build(self, tokenizer: Tokenizer) -> Episode:
        """The finished episode. Environment tokens after the last sample are left out."""
        old = self._episode
        end = old.spans[-1].stop if old.spans else 0
        ids = old.response_ids[:end]
        return replace(
            old,
            response_ids=ids,
            response_mask=old.response_mask[:end],
            logprobs=old.logprobs[:end],
            top_logprobs=old.top_logprobs[:end],
            text=tokenizer.decode(list(ids), skip_special_tokens=True),
        )
