"""Tasks of several turns: the interface of an environment, and the adapter that calls its `step`.

    observation -> policy.generate -> action -> Environment.step -> observation, reward ... until done

The policy's tokens keep their sampled ids. The environment's text stands between them, and is never trained.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from echo_planes.data.tasks.adapter import EpisodeBuilder, Policy, TaskAdapter, TaskOptions, Tokenizer
from echo_planes.data.tasks.answers import text_of
from echo_planes.data.tasks.chat import Chat, plain_prompt
from echo_planes.errors import TaskError
from echo_planes.types import Episode, Prompt, Reward


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer of an environment to an action."""

    observation: str  # text that the policy reads next; not used after the last turn
    reward: float = 0.0  # for this action
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)  # for people; must be serialisable as JSON


class Environment(Protocol):
    """One episode. Each sample gets a new environment; equal prompts give equal environments."""

    async def step(self, action: str) -> Turn:
        """Take the policy's answer, without special tokens, and return the turn. It must accept any text."""
        ...

    def result(self) -> Reward:
        """Return the reward of the whole episode; called when it is over or was cut off."""
        ...

    def close(self) -> None:
        """Release all resources; called however the episode ended."""
        ...


class EpisodeOptions(TaskOptions):
    """Settings of every task of several turns."""

    template: Literal["plain", "chat"] = Field(
        default="plain", description="how observations become tokens: as they are, or as chat messages"
    )
    max_turns: int = Field(default=16, ge=1, le=1024, description="then the episode is cut off")
    max_episode_tokens: int = Field(
        default=384, ge=8, description="prompt and response; an episode that has no room left is cut off"
    )


class EpisodeTask(TaskAdapter):
    """Base class of tasks of several turns: a subclass makes the environment of a prompt.

    `Episode.turn_rewards` holds the reward of every turn, `Episode.notes` the result and every turn's action
    and `info`.

    Raises:
        ModelError: template=chat and the tokenizer has no chat template, or one that ends no answer with the
            tokenizer's end token.
    """

    Options: ClassVar[type[TaskOptions]] = EpisodeOptions
    turn_limit_s: float = 120.0  # limit of one `step`, seconds; includes the moves of other players

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        if not isinstance(options, EpisodeOptions):
            raise TypeError(f"Options of {type(self).__name__} must be a subclass of EpisodeOptions")
        self._settings = options
        self._chat = Chat(tokenizer) if options.template == "chat" else None
        if self._chat and options.max_turns > 1:
            # Refuses a template that cannot tell turns apart now, not when engines have been paid for.
            self._reply("", ended=True)

    @abstractmethod
    def environment(self, prompt: Prompt, policy: Policy) -> Environment:
        """Make the environment of a prompt, at its beginning; `prompt.text` is its first observation.

        Args:
            prompt: the prompt.
            policy: for environments in which the policy also plays another part (self-play). Its answers
                there are not trained.
        """

    def make_prompt(
        self, index: int, text: str, answer: str = "", messages: Sequence[dict[str, str]] = ()
    ) -> Prompt:
        """Make a prompt from the first observation. With a chat template, `messages` replace the one message
        of `text` if the observation consists of several.
        """
        if self._chat:
            ids = self._chat.prompt(messages or [{"role": "user", "content": text}])
        else:
            ids = plain_prompt(self.tokenizer, text)
        return Prompt(index, ids, answer, text)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Play one episode. It ends when the environment is done, or turns or tokens run out.

        Raises:
            TaskError: there is no room for a single answer, or the environment took too long.
        """
        builder = EpisodeBuilder()
        if not self._has_room(prompt, builder):
            raise TaskError(
                f"prompt {prompt.index} has {len(prompt.token_ids)} tokens, which leaves no room for an "
                f"answer in task.max_episode_tokens={self._settings.max_episode_tokens}; raise it"
            )
        environment = self.environment(prompt, policy)
        try:
            return await self._play(prompt, policy, environment, builder)
        finally:
            environment.close()

    async def _play(
        self, prompt: Prompt, policy: Policy, environment: Environment, builder: EpisodeBuilder
    ) -> Episode:
        rewards: list[float] = []
        infos: list[dict[str, Any]] = []
        cut_off = True
        while len(rewards) < self._settings.max_turns and self._has_room(prompt, builder):
            sample = await policy.generate(prompt.token_ids + builder.response_ids)
            builder.add_sample(sample)
            ended = sample.finish_reason == "stop"
            action = text_of(self.tokenizer, sample.token_ids, ended=ended)
            turn = await self._step(environment, action, prompt)
            rewards.append(turn.reward)
            infos.append({"action": action, **turn.info})
            if turn.done:
                cut_off = False
                break
            # "stop" means any of the model's end tokens, of which the tokenizer knows only one.
            builder.add_environment(self._reply(turn.observation, ended=ended))
        result = environment.result()
        notes = {
            "value": result.value,
            "correct": result.correct,
            "parts": dict(result.parts) | {"cut_off": float(cut_off)},
            "turns": infos,
        }
        episode = builder.build(self.tokenizer)
        reason = "length" if cut_off else episode.finish_reason
        return replace(episode, finish_reason=reason, turn_rewards=tuple(rewards), notes=json.dumps(notes))

    async def _step(self, environment: Environment, action: str, prompt: Prompt) -> Turn:
        stepping = asyncio.ensure_future(environment.step(action))
        try:
            # Not wait_for: its TimeoutError would look like one that the environment raised.
            await asyncio.wait([stepping], timeout=self.turn_limit_s)
            if not stepping.done():
                raise TaskError(
                    f"prompt {prompt.index}: the environment's step took longer than {self.turn_limit_s:g} s"
                )
            return stepping.result()
        finally:
            stepping.cancel()

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        """Return the reward that the environment gave at the end."""
        notes = json.loads(episode.notes)
        return Reward(notes["value"], notes["correct"], notes["parts"])

    def longest_answer(self, max_new_tokens: int) -> int:
        """Return the most tokens of all turns together, `max_episode_tokens` at most."""
        turns = self._settings.max_turns * super().longest_answer(max_new_tokens)
        return min(turns, self._settings.max_episode_tokens)

    def _has_room(self, prompt: Prompt, builder: EpisodeBuilder) -> bool:
        used = len(prompt.token_ids) + len(builder.response_ids)
        return used + (self.max_new_tokens or 1) <= self._settings.max_episode_tokens

    def _reply(self, observation: str, *, ended: bool) -> tuple[int, ...]:
        if self._chat:
            return self._chat.reply({"role": "user", "content": observation}, ended=ended)
        return tuple(self.tokenizer.encode(observation, add_special_tokens=False))
