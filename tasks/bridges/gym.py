"""Environment class in the style of skyrl-gym: `task=gym task.env=module:Class task.data=FILE`.

::

    class MyEnv:
        def __init__(self, row): ...
        def init(self, messages): ...  # optional: called with the prompt
        def step(self, action): ...    # -> {"observations": [message, ...], "reward": 0.5, "done": False}
        def close(self): ...           # optional

`step` may also return an object with these attributes. It runs in the rollout plane, each turn in a thread.
The episode's reward is the sum of the turns' rewards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from pydantic import Field

from echo_planes.config.extensions import extension
from echo_planes.data.tasks.adapter import Policy, TaskOptions, Tokenizer
from echo_planes.data.tasks.environment import Environment, EpisodeOptions, EpisodeTask, Turn
from echo_planes.errors import TaskError
from echo_planes.types import Prompt, Reward

from .rows import RowOptions, Rows


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
        self._rows = Rows(settings, seed)

    def prompt(self, index: int) -> Prompt:
        return self._begin(index, self._rows.training(index))

    def eval_prompt(self, index: int) -> Prompt:
        return self._begin(index, self._rows.held_out(index))

    def environment(self, prompt: Prompt, policy: Policy) -> Environment:
        env = self._make(json.loads(prompt.answer))
        if hasattr(env, "init"):
            env.init(self._rows.messages(json.loads(prompt.answer)))
        return _Stepped(env)

    def right_answer(self, prompt: Prompt) -> str:
        return self._rows.right_answer(json.loads(prompt.answer))

    def _begin(self, index: int, row: dict[str, Any]) -> Prompt:
        return self.make_prompt(index, self._rows.text(row), json.dumps(row), self._rows.messages(row))


class _Stepped:
    """Adapter from the user's environment to `Environment`."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._total = 0.0

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
        text = "\n".join(str(message["content"]) for message in said["observations"] or ())
        return Turn(text, reward, done, {"observed": text})

    def result(self) -> Reward:
        return Reward(self._total, self._total >= 1)

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()
