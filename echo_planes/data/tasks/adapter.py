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

from echo_planes.data.tasks.answers import text_of
from echo_planes.types import Episode, Omega, Prompt, Reward, Sample, Trajectory

WINDOW_GROUPS = 64  # groups that `Progress.accuracy` covers


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
    """Base class of an adapter's own settings; unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False
    )


class RewardWeights(TaskOptions):
    """Base class of a composite reward's weights: one field per part, 0 to 1 each, with the sum 1."""

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
        """Return the weighted sum of an answer's parts. `parts`: 0 to 1 each, one for every field."""
        weights: dict[str, float] = self.model_dump()
        return sum(weight * parts[name] for name, weight in weights.items())


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the policy at the present level, the input of `TaskAdapter.level`."""

    level: int  # present level of new prompts
    num_groups: int  # groups of this level accepted since the level began or the run was resumed
    accuracy: float  # share of correct samples in the last WINDOW_GROUPS of these groups; 0 before the first


class TaskAdapter(ABC):
    """One task. Every process that needs it builds its own, so keep `__init__` light and deterministic.

    Args:
        options: an instance of `Options`, from the `task.*` settings.
        tokenizer: the policy's tokenizer.
        seed: `run.seed`.
    """

    Options: ClassVar[type[TaskOptions]] = TaskOptions
    num_levels: int = 1  # levels of a curriculum; 1: no curriculum
    named_by: ClassVar[str] = ""  # for a library's tasks: the option that `task=LIBRARY:NAME` sets to NAME
    max_new_tokens: int | None = None  # longest answer, tokens; None: `sampling.max_new_tokens`
    reward_limit_s: float = 10.0  # deadline of the reward of one answer, seconds

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.seed = seed

    def preflight(self) -> str:
        """Check that this machine has what the task needs. Called once, before anything heavy starts.

        Returns:
            A line for the user, or "".

        Raises:
            ClusterError: the machine lacks something.
        """
        return ""

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """Return training prompt number `index` (0, 1, 2, ...): a pure function of (seed, options, index)."""

    @abstractmethod
    def eval_prompt(self, index: int) -> Prompt:
        """Return held-out prompt number `index`: never a training prompt, and the same in every run."""

    def sources(self) -> tuple[Sequence[str], Sequence[str]]:
        """Return where prompts from a file come from, in words ("train.jsonl: row 7"): a text for each
        training prompt of the first epoch, in order, and a text for each held-out prompt.

        A run makes and checks all these prompts before it starts an engine. Both are empty for prompts that
        are generated without end.
        """
        return (), ()

    def level(self, progress: Progress) -> int:
        """Return the level, 0 to `num_levels` - 1, of the next prompts of a curriculum.

        Called when a new block of prompts begins, if `num_levels` is above 1. The level is recorded before
        the first prompt of the block goes out. So each prompt stays the same, also after a resume.

        Args:
            progress: progress at the present level; starts anew with each level.
        """
        return progress.level

    def prompt_at(self, index: int, level: int) -> Prompt:
        """Return training prompt `index` at `level`: a pure function of (seed, options, index, level).

        A task with a curriculum overrides `prompt_at` and `level`. Then only code that inspects a task, but
        does not train on it, calls `prompt(index)`, which best returns prompts of the last level.
        """
        return self.prompt(index)

    def prepare(self, prompt: Prompt, episodes: Sequence[Episode]) -> None:  # noqa: B027  optional
        """Do work that is better done for all answers of a group at once; called before their rewards.

        Its time counts towards the first answer's deadline. If it raises, every answer of the group fails.
        """

    @abstractmethod
    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        """Score a finished answer. Runs beside a worker in a separate process, one answer at a time.

        If it raises, takes longer than `reward_limit_s`, or does not return a `Reward` of finite numbers, its
        trajectory is a counted failure: the group is not trained, and the run continues.
        """

    def right_answer(self, prompt: Prompt) -> str:
        """Return the text of an answer that earns the whole reward, in the form that the prompt asks for.

        `task check` scores it beside wrong answers. By default `Prompt.answer`.
        """
        return prompt.answer

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Drive the policy through one episode. Single-turn by default; override for several turns."""
        builder = EpisodeBuilder()
        builder.add_sample(await policy.generate(prompt.token_ids))
        return builder.build(self.tokenizer)

    def materialize(self, trajectories: Sequence[Trajectory]) -> list[Omega]:
        """Return the training metadata of one group's trajectories, in order.

        By default all sampled tokens are trained, and the objective normalises the samples of one prompt
        together. `materialize = by_batch` or `by_initial_state` in a class chooses other companions.
        """
        return train_everything(trajectories)

    def longest_answer(self, max_new_tokens: int) -> int:
        """Return the most tokens that an answer may have: L of Dr. GRPO.

        Args:
            max_new_tokens: `sampling.max_new_tokens`.
        """
        return self.max_new_tokens or max_new_tokens

    def initial_state(self, prompt: Prompt) -> str:
        """Return a name of the state in which an episode begins, for `by_initial_state`.

        By default the prompt's tokens. Coarser names (a poker hand's class) give more companions.
        """
        return ",".join(map(str, prompt.token_ids))


def train_everything(trajectories: Sequence[Trajectory]) -> list[Omega]:
    """Return metadata that trains all sampled tokens, normalised by group: the default `materialize`."""
    return normalised_by(lambda trajectory: trajectory.group_id, trajectories)


def normalised_by(tag: Callable[[Trajectory], str], trajectories: Sequence[Trajectory]) -> list[Omega]:
    """Return metadata that trains all sampled tokens, normalised among trajectories with equal tags."""
    return [Omega(loss_mask=t.episode.response_mask, advantage_group=tag(t)) for t in trajectories]


def by_group(task: TaskAdapter, trajectories: Sequence[Trajectory]) -> list[Omega]:
    """Put the samples of one lease into one advantage group: `materialize = by_group`, the default."""
    return train_everything(trajectories)


def by_batch(task: TaskAdapter, trajectories: Sequence[Trajectory]) -> list[Omega]:
    """Put all trajectories of a step into one advantage group: `materialize = by_batch`.

    For prompts of equal difficulty, and for groups of one. A mini-batch contains whole advantage groups, so a
    step then makes one optimizer update, whatever `learner.updates_per_step` says.
    """
    return normalised_by(lambda trajectory: "batch", trajectories)


def by_initial_state(task: TaskAdapter, trajectories: Sequence[Trajectory]) -> list[Omega]:
    """Put trajectories of equal `task.initial_state` together: `materialize = by_initial_state`.

    ECHO-2 appendix F.5.2. A trajectory whose initial state no other has gets advantage 0.
    """
    return normalised_by(lambda trajectory: task.initial_state(trajectory.prompt), trajectories)


class EpisodeBuilder:
    """Builder that joins policy samples and environment tokens into one `Episode`.

    Text is never tokenised twice: sampled text keeps the token ids that the policy sampled.
    """

    def __init__(self) -> None:
        self._episode = Episode((), (), (), (), "stop", num_turns=0)

    @property
    def response_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt so far; prompt plus these is the context of the next turn."""
        return self._episode.response_ids

    def add_sample(self, sample: Sample) -> None:
        """Append an answer of the policy. Environment tokens before it join its first span."""
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
        """Return the finished episode, without the environment tokens after the last sample."""
        old = self._episode
        end = old.spans[-1].stop if old.spans else 0
        ids = old.response_ids[:end]
        return replace(
            old,
            response_ids=ids,
            response_mask=old.response_mask[:end],
            logprobs=old.logprobs[:end],
            top_logprobs=old.top_logprobs[:end],
            text=text_of(tokenizer, ids, ended=old.finish_reason == "stop", mask=old.response_mask[:end]),
        )
