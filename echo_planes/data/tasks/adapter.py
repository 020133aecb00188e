"""The public task interface: write a subclass of `TaskAdapter`, run it with `task=package.module:Class`.

The contract follows ECHO-2 appendix F.1: an adapter (i) makes prompts, (ii) defines the reward, (iii)
materialises the training metadata Omega (masks, normalisation groups, advantages).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

from pydantic import BaseModel, ConfigDict, model_validator

from echo_planes.types import Episode, Omega, Prompt, Reward, Sample, Trajectory

WINDOW_GROUPS = 64  # that `Progress` looks back


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

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False
    )


class RewardWeights(TaskOptions):
    """Base of a composite reward's weights: one field for each part, each from 0 to 1, 1 together."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        weights: dict[str, float] = self.model_dump()
        total = sum(weights.values())
        if abs(total - 1) > 1e-6:
            listed = ", ".join(f"{name}={weight:g}" for name, weight in weights.items())
            raise ValueError(
                f"{listed} add up to {total:g}, but a perfect answer must earn 1; make them add up to 1"
            )
        return self

    def total(self, parts: Mapping[str, float]) -> float:
        """The reward of an answer whose part `name` is `parts[name]`, from 0 to 1, for every field's name."""
        weights: dict[str, float] = self.model_dump()
        return sum(weight * parts[name] for name, weight in weights.items())


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the policy at the present level: what `TaskAdapter.level` decides by."""

    level: int  # that prompts are issued at
    num_groups: int  # of this level, accepted since it began or the run was resumed
    accuracy: float  # share exactly right of the samples of the last WINDOW_GROUPS of these; 0 before any


class TaskAdapter(ABC):
    """One task. Built once in every process that needs it, so keep `__init__` light and deterministic.

    Args:
        options: an instance of `Options`, from the `task.*` settings.
        tokenizer: the policy's tokenizer.
        seed: `run.seed`.
    """

    Options: ClassVar[type[TaskOptions]] = TaskOptions
    num_levels: int = 1  # of a curriculum; 1: none
    named_by: ClassVar[str] = ""  # for a library's tasks: the option that `task=LIBRARY:NAME` sets to NAME
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

    def level(self, progress: Progress) -> int:
        """A curriculum: the level, 0 to `num_levels` - 1, of the prompts that are issued from now on.

        Asked for every few prompts, where `num_levels` is above 1. What it says is recorded before the first
        of them goes out, so that each is the same when it goes out again, after a resume too.

        Args:
            progress: of the groups of the present level; starts anew with each level.
        """
        return progress.level

    def prompt_at(self, index: int, level: int) -> Prompt:
        """Training prompt number `index`, issued at `level`: a pure function of (seed, options) and these.

        A task with a curriculum overrides this and `level`. Its `prompt(index)` is then for those that look
        at a task without training on it: best the prompts of the last level.
        """
        return self.prompt(index)

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
        by the objective. `materialize = by_batch` or `by_initial_state` in a class chooses other companions.
        """
        return train_everything(trajectories)

    def longest_answer(self, max_new_tokens: int) -> int:
        """Most tokens that an answer may have, `sampling.max_new_tokens` given: L of Dr. GRPO."""
        return self.max_new_tokens or max_new_tokens

    def initial_state(self, prompt: Prompt) -> str:
        """For `by_initial_state`: a name for where an episode begins. By default the prompt's tokens.

        Coarser names (a poker hand's class) give more trajectories to compare with.
        """
        return ",".join(map(str, prompt.token_ids))


def train_everything(trajectories: Sequence[Trajectory]) -> list[Omega]:
    """All sampled tokens, normalised by group: `TaskAdapter.materialize` unless a task overrides it."""
    return normalised_by(lambda trajectory: trajectory.group_id, trajectories)


def normalised_by(tag: Callable[[Trajectory], str], trajectories: Sequence[Trajectory]) -> list[Omega]:
    """All sampled tokens, normalised among the trajectories of a step that have equal tags."""
    return [Omega(loss_mask=t.episode.response_mask, advantage_group=tag(t)) for t in trajectories]


def by_group(task: TaskAdapter, trajectories: Sequence[Trajectory]) -> list[Omega]:
    """`materialize = by_group`: the samples of one lease of a prompt are normalised together. The default."""
    return train_everything(trajectories)


def by_batch(task: TaskAdapter, trajectories: Sequence[Trajectory]) -> list[Omega]:
    """`materialize = by_batch`: all trajectories of a step are normalised together.

    For prompts of equal difficulty, and groups of one. Mini-batches are made of what is normalised together,
    so a step then makes one optimizer update, whatever `learner.updates_per_step` says.
    """
    return normalised_by(lambda trajectory: "batch", trajectories)


def by_initial_state(task: TaskAdapter, trajectories: Sequence[Trajectory]) -> list[Omega]:
    """`materialize = by_initial_state`: those of a step that began alike, as `task.initial_state` says.

    ECHO-2 appendix F.5.2. One that began like no other has advantage 0.
    """
    return normalised_by(lambda trajectory: task.initial_state(trajectory.prompt), trajectories)


def last_tagged(text: str, tag: str, start: int = 0) -> tuple[str, int] | None:
    """Text inside the last `<tag></tag>` after `start`, and the index behind that tag; in linear time.

    A tag ends at the first closing one after it, whatever opens in between.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    found = None
    while (at := text.find(opening, start)) >= 0:
        begin = at + len(opening)
        end = text.find(closing, begin)
        if end < 0:
            break
        start = end + len(closing)
        found = text[begin:end], start
    return found


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
