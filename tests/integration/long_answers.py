"""A task whose answers are as long as they are allowed to be; half of the even-numbered ones are right."""

from __future__ import annotations

from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.types import Episode, Prompt, Reward


class LongAnswers(TaskAdapter):
    """Asks for nothing in particular."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, tuple(self.tokenizer.encode(f"{index % 90 + 10}+1=")))

    def eval_prompt(self, index: int) -> Prompt:
        return self.prompt(1_000_000 + index)

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        correct = len(episode.response_ids) % 2 == 0
        return Reward(float(correct), correct)
