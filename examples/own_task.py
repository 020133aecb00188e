"""Your own task in one class: answer `n+0=` with any number larger than n.

    python -m examples.own_task                                          # play a few episodes, no engine
    python -m echo_planes.run task=examples.own_task:OwnTask             # train the tiny model on it
    python -m echo_planes.run task=examples.own_task:OwnTask task.limit=50

The embedded tiny model can only add, so it starts by answering n itself, which earns nothing; the lucky
samples that come out larger are what it learns from.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, cast

from pydantic import Field

from echo_planes.data.task import TaskAdapter, TaskOptions
from echo_planes.types import Episode, Prompt, Reward, Sample, Span


class OwnOptions(TaskOptions):
    """Settings of the task. Each becomes a key: `task.limit=50`. A wrong type or name is refused."""

    limit: int = Field(default=100, ge=20, le=100, description="n is below this")


class OwnTask(TaskAdapter):
    """Three methods make a task: training prompts, held-out prompts, and a reward."""

    Options = OwnOptions
    max_new_tokens = 4  # answers are short: three digits and the end token

    def prompt(self, index: int) -> Prompt:
        # The same index must give the same prompt in every process: draw from (seed, index) and nothing else.
        # Numbers ending in 7 are held out, so training never sees them.
        trained = [n for n in range(self._limit) if n % 10 != 7]
        return self._ask(index, random.Random(f"{self.seed}/{index}").choice(trained))

    def eval_prompt(self, index: int) -> Prompt:
        # These do not depend on the seed: that is what makes accuracies comparable between runs.
        held_out = [n for n in range(self._limit) if n % 10 == 7]
        return self._ask(index, held_out[index % len(held_out)])

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        # `episode.text` is the answer without special tokens. "stop" means the policy ended it by itself;
        # "length" would mean that it was cut off.
        text = episode.text.strip()
        is_number = episode.finish_reason == "stop" and text.isascii() and text.isdigit()
        correct = is_number and int(text) > int(prompt.answer)
        # `value` is trained on, `correct` is what accuracy counts, `parts` shows up in the reports.
        return Reward(value=float(correct), correct=correct, parts={"is_number": float(is_number)})

    @property
    def _limit(self) -> int:
        return cast(OwnOptions, self.options).limit

    def _ask(self, index: int, n: int) -> Prompt:
        text = f"{n}+0="
        # Tokenise once, here. `answer` carries whatever the reward needs to know.
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Prompt(index=index, token_ids=tuple(ids), answer=str(n), text=text)

    # For several turns override `rollout` as well: call `policy.generate` as often as needed and join the
    # pieces with `EpisodeBuilder`, which keeps track of which tokens the policy wrote.


class ByteTokenizer:
    """One token per byte, enough to try a task out. In a run it is the model's own tokenizer."""

    eos_token_id: int | None = 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        raise NotImplementedError("this task does not use a chat template")


class ScriptedPolicy:
    """Stands in for the model: gives the answers it was told to give, in order."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = iter(answers)

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        ids = (*next(self._answers).encode(), 256)
        # A sample says with which probability, and by which published policy, each token was made.
        return Sample(ids, (-0.5,) * len(ids), (Span(0, len(ids), version=0, digest="scripted"),), "stop")


async def play() -> list[Reward]:
    """Play four episodes and print what each one earned."""
    task = OwnTask(OwnOptions(), ByteTokenizer(), seed=0)
    policy = ScriptedPolicy(["0", "42", "199", "many"])
    rewards = []
    for index in range(4):
        prompt = task.prompt(index)
        episode = await task.rollout(prompt, policy)
        rewards.append(task.reward(prompt, episode))
        print(f"{prompt.text:>6} -> {episode.text:<5} reward {rewards[-1].value}")
    return rewards


if __name__ == "__main__":
    asyncio.run(play())
