"""Environment class in the style of skyrl-gym: `task=gym task.env=module:Class task.data=FILE`.

::

    class MyEnv:
        def __init__(self, row): ...
        def init(self, messages): ...  # optional: called with the prompt; may return (messages, info)
        def step(self, action): ...    # -> {"observations": [message, ...], "reward": 0.5, "done": False}
        def close(self): ...           # optional

`step` may also return an object with these attributes. It runs in the rollout plane, each turn in a thread.
The episode's reward is the sum of the turns' rewards. The messages that `init` returns replace the prompt,
and must be a function of the row: it is called once for the prompt and once for each episode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from pydantic import Field

from echo_planes.config.extensions import extension
from echo_planes.data.tasks.adapter import Policy, TaskOptions, Tokenizer
from echo_planes.data.tasks.environment import Environment, EpisodeOptions, EpisodeTask, Turn
from echo_planes.errors import TaskError, shown
from echo_planes.types import Prompt, Reward

from .rows import PlacedRow, RowOptions, Rows, joined, messages_of, text_of


class GymOptions(EpisodeOptions, RowOptions):
    """`task.*` settings of an environment with `step`."""

    env: str = Field(description="package.module:Class of the environment, built from a row")


class GymTask(EpisodeTask):
    """Episodes of the environment class that `task.env` names.

    Raises:
        ConfigError: `task.env` names no class that can be imported.
    """

    Options: ClassVar[type[TaskOptions]] = GymOptions

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        settings = cast(GymOptions, options)
        self._make: Callable[..., Any] = extension("task.env", settings.env, {})
        # Whole rows: many games may open with the same words.
        self._rows = Rows(settings, seed, lambda fields: json.dumps(fields, sort_keys=True))

    def sources(self) -> tuple[Sequence[str], Sequence[str]]:
        return self._rows.sources()

    def prompt(self, index: int) -> Prompt:
        return self._begin(index, self._rows.training(index))

    def eval_prompt(self, index: int) -> Prompt:
        return self._begin(index, self._rows.held_out(index))

    def environment(self, prompt: Prompt, policy: Policy) -> Environment:
        fields = json.loads(prompt.answer)
        env = _Stepped(self._make(fields))
        try:
            text = text_of(env.opened(self._rows.messages(fields)))
            if text != prompt.text:
                raise TaskError(
                    f"prompt {prompt.index}: init returned {shown(text)} for an episode and "
                    f"{shown(prompt.text)} for its prompt; make it a function of the row"
                )
        except BaseException:
            env.close()
            raise
        return env

    def right_answer(self, prompt: Prompt) -> str:
        return self._rows.right_answer(json.loads(prompt.answer))

    def _begin(self, index: int, row: PlacedRow) -> Prompt:
        messages = self._rows.messages(row.fields)
        with row.named():
            if not isinstance(self._make, type) or hasattr(self._make, "init"):
                env = _Stepped(self._make(row.fields))
                try:
                    messages = env.opened(messages)
                finally:
                    env.close()
            return self.make_prompt(index, text_of(messages), json.dumps(row.fields), messages)


class _Stepped:
    """Adapter from the user's environment to `Environment`."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._total = 0.0

    def opened(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the messages that begin the episode: those of `init` if it returns some, else `messages`.

        Raises:
            TaskError: it returned something else.
        """
        if not hasattr(self._env, "init"):
            return messages
        returned = self._env.init(messages)
        try:
            said = returned[0] if isinstance(returned, tuple) else returned
            return messages if said is None else messages_of(said)
        except (IndexError, ValueError) as error:
            raise TaskError(f"what init of {type(self._env).__name__} returned {error}") from error

    async def step(self, action: str) -> Turn:
        out = await asyncio.to_thread(self._env.step, action)
        keys = ("done", "observations", "reward")
        said = (
            out if isinstance(out, Mapping) else {key: getattr(out, key) for key in keys if hasattr(out, key)}
        )
        missing = [key for key in keys if key not in said]
        if missing:
            raise TaskError(f"step of {type(self._env).__name__} returned no {', '.join(missing)}")
        reward, done = float(said["reward"]), bool(said["done"])
        self._total += reward
        try:
            text = "\n".join(joined(message["content"]) for message in said["observations"] or ())
        except (KeyError, TypeError, ValueError) as error:
            raise TaskError(
                f"step of {type(self._env).__name__} returned observations={shown(said['observations'])}; "
                'each must be a message with "content", of text only'
            ) from error
        return Turn(text, reward, done, {"observed": text})

    def result(self) -> Reward:
        return Reward(self._total, self._total >= 1)

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()
