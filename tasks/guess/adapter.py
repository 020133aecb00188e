"""The guessing game: `task=guess`. The smallest task of several turns; start from it for one of your own."""

from __future__ import annotations

import random
from typing import ClassVar, cast

from pydantic import Field

from echo_planes.data.tasks.adapter import Policy, TaskOptions, Tokenizer
from echo_planes.data.tasks.environment import Environment, EpisodeOptions, EpisodeTask, Turn
from echo_planes.types import Prompt, Reward


class GuessOptions(EpisodeOptions):
    """`task.*` settings of the guessing game."""

    numbers: int = Field(default=20, ge=2, le=1000, description="the secret is one of 0 .. numbers - 1")
    max_turns: int = Field(default=5, ge=1, le=64, description="guesses")


class Game:
    """One secret."""

    def __init__(self, secret: int, max_turns: int) -> None:
        self._secret = secret
        self._max_turns = max_turns
        self._guesses = 0
        self._found = False

    async def step(self, action: str) -> Turn:
        """Takes a guess. What is no number costs a guess too."""
        self._guesses += 1
        text = action.strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
        if guess == self._secret:
            self._found = True
            return Turn("", 1.0, done=True, info={"said": "found"})
        said = "no number" if guess is None else "higher" if guess < self._secret else "lower"
        return Turn(f"{said}:", info={"said": said})

    def result(self) -> Reward:
        """1 for the first guess, falling evenly to 1/max_turns for the last; 0 if it was not found."""
        value = (self._max_turns - self._guesses + 1) / self._max_turns if self._found else 0.0
        return Reward(value, self._found, {"guesses": float(self._guesses)})

    def close(self) -> None:
        """It holds nothing."""


class GuessTask(EpisodeTask):
    """Find a secret number by asking."""

    Options: ClassVar[type[TaskOptions]] = GuessOptions
    max_new_tokens = 4  # three digits and the end token

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        self._guess_options = cast(GuessOptions, options)

    def prompt(self, index: int) -> Prompt:
        return self._game(index, f"{self.seed}/{index}")

    def eval_prompt(self, index: int) -> Prompt:
        # There are few secrets, so none can be held out: what is held out is the sequence of them.
        return self._game(index, f"held out/{index}")

    def environment(self, prompt: Prompt, policy: Policy) -> Environment:
        return Game(int(prompt.answer), self._guess_options.max_turns)

    def _game(self, index: int, seed: str) -> Prompt:
        numbers = self._guess_options.numbers
        secret = random.Random(seed).randrange(numbers)
        return self.opening(index, f"0-{numbers - 1}:", str(secret))
