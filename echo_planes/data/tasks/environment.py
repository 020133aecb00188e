"""Tasks of several turns: an environment that is driven by `step`, and the adapter that drives it.

    observation -> policy.generate -> action -> Environment.step -> observation, reward ... until done

The policy's tokens keep the very ids it sampled; what the environment says stands between them, and is never
trained.
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
from echo_planes.data.tasks.chat import Chat
from echo_planes.errors import TaskError
from echo_planes.types import Episode, Prompt, Reward


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer of an environment to an action."""

    observation: str  # what the policy reads next; of no use after the last turn
    reward: float = 0.0  # for this action
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)  # for people, as JSON takes it


class Environment(Protocol):
    """One episode. Made anew for each sample; the same prompt makes the same environment."""

    async def step(self, action: str) -> Turn:
        """The policy's answer to the last observation, special tokens left out. Any text must be answered."""
        ...

    def result(self) -> Reward:
        """Reward of the whole episode; asked once it is over, or was cut off."""
        ...

    def close(self) -> None:
        """Let go of what it holds; called however the episode ended."""
        ...


class EpisodeOptions(TaskOptions):
    """Settings that every task of several turns has."""

    template: Literal["plain", "chat"] = Field(
        default="plain", description="how observations become tokens: as they are, or as chat messages"
    )
    max_turns: int = Field(default=16, ge=1, le=1024, description="then the episode is cut off")
    max_episode_tokens: int = Field(
        default=384, ge=8, description="prompt and response; an episode that has no room left is cut off"
    )


class EpisodeTask(TaskAdapter):
    """Base of tasks whose environment answers the policy: subclasses say how an episode begins.

    `Episode.turn_rewards` holds the reward of every turn, `Episode.notes` the result and what the environment
    told of its turns.
    """

    Options: ClassVar[type[TaskOptions]] = EpisodeOptions
    turn_limit_s: float = 120.0  # for the environment's answer to one action, other players' included

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        if not isinstance(options, EpisodeOptions):
            raise TypeError(f"Options of {type(self).__name__} must be a subclass of EpisodeOptions")
        self._settings = options
        self._chat = Chat(tokenizer) if options.template == "chat" else None

    @abstractmethod
    def environment(self, prompt: Prompt, policy: Policy) -> Environment:
        """The episode that belongs to a prompt, at its beginning; `prompt.text` is its first observation.

        Args:
            policy: for environments in which the policy also plays another part (self-play). What it answers
                there is not trained.
        """

    def opening(
        self, index: int, text: str, answer: str = "", messages: Sequence[dict[str, str]] = ()
    ) -> Prompt:
        """A prompt out of the first observation; as a chat, `messages` stand for it where it was several."""
        if self._chat:
            ids = self._chat.prompt(messages or [{"role": "user", "content": text}])
        else:
            ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return Prompt(index, ids, answer, text)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Play one episode. It ends when the environment says so, or turns or tokens run out.

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
            action = self.tokenizer.decode(list(sample.token_ids), skip_special_tokens=True)
            turn = await self._step(environment, action, prompt)
            rewards.append(turn.reward)
            infos.append({"action": action, **turn.info})
            if turn.done:
                cut_off = False
                break
            # It stops at any end token of the model's, of which the tokenizer knows one.
            builder.add_environment(self._reply(turn.observation, ended=sample.finish_reason == "stop"))
        result = environment.result()
        notes = {
            "value": result.value,
            "correct": result.correct,
            "parts": dict(result.parts) | {"cut_off": float(cut_off)},
            "turns": infos,
        }
        episode = builder.build(self.tokenizer)
        return replace(episode, turn_rewards=tuple(rewards), notes=json.dumps(notes))

    async def _step(self, environment: Environment, action: str, prompt: Prompt) -> Turn:
        stepping = asyncio.ensure_future(environment.step(action))
        try:
            # Not wait_for: its TimeoutError could not be told from one that the environment raised.
            await asyncio.wait([stepping], timeout=self.turn_limit_s)
            if not stepping.done():
                raise TaskError(
                    f"prompt {prompt.index}: the environment's step took longer than {self.turn_limit_s:g} s"
                )
            return stepping.result()
        finally:
            stepping.cancel()

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        """Reward that the environment gave at the end."""
        notes = json.loads(episode.notes)
        return Reward(notes["value"], notes["correct"], notes["parts"])

    def longest_answer(self, max_new_tokens: int) -> int:
        """Of all its turns together."""
        turns = self._settings.max_turns * super().longest_answer(max_new_tokens)
        return min(turns, self._settings.max_episode_tokens)

    def _has_room(self, prompt: Prompt, builder: EpisodeBuilder) -> bool:
        used = len(prompt.token_ids) + len(builder.response_ids)
        return used + (self.max_new_tokens or 1) <= self._settings.max_episode_tokens

    def _reply(self, observation: str, *, ended: bool) -> tuple[int, ...]:
        if self._chat:
            return self._chat.reply({"role": "user", "content": observation}, ended=ended)
        return tuple(self.tokenizer.encode(observation, add_special_tokens=False))
