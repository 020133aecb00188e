"""The guessing game: `task=guess`. The smallest task of several turns, a template for your own."""

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
    """Environment with one secret number."""

    def __init__(self, secret: int, max_turns: int) -> None:
        self._secret = secret
        self._max_turns = max_turns
        self._guesses = 0
        self._found = False

    async def step(self, action: str) -> Turn:
        """Take a guess. Text that is no number also costs a guess."""
        self._guesses += 1
        text = action.strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
        if guess == self._secret:
            self._found = True
            return Turn("", 1.0, done=True, info={"said": "found"})
        said = "no number" if guess is None else "higher" if guess < self._secret else "lower"
        return Turn(f"{said}:", info={"said": said})

    def result(self) -> Reward:
        """Return 1 for a hit at the first guess, falling evenly to 1/max_turns at the last; 0 for no hit."""
        value = (self._max_turns - self._guesses + 1) / self._max_turns if self._found else 0.0
        return Reward(value, self._found, {"guesses": float(self._guesses)})

    def close(self) -> None:
        """Do nothing: the game holds no resources."""


class GuessTask(EpisodeTask):
    """Task to find a secret number by guesses."""

    Options: ClassVar[type[TaskOptions]] = GuessOptions
    max_new_tokens = 4  # three digits and the end token

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        self._guess_options = cast(GuessOptions, options)

    def prompt(self, index: int) -> Prompt:
        return self._game(index, f"{self.seed}/{index}")

    def eval_prompt(self, index: int) -> Prompt:
        # There are too few secrets to hold some out, so evaluation uses a separate sequence of them.
        return self._game(index, f"held out/{index}")

    def environment(self, prompt: Prompt, policy: Policy) -> Environment:
        return Game(int(prompt.answer), self._guess_options.max_turns)

    def _game(self, index: int, seed: str) -> Prompt:
        numbers = self._guess_options.numbers
        secret = random.Random(seed).randrange(numbers)
        return self.make_prompt(index, f"0-{numbers - 1}:", str(secret))
