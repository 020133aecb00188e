"""The poker task: `task=poker`; each episode is one hand of no-limit hold'em.

Prompt `index` fixes the deal, the learner's seat and the opponents' random draws. All samples of a group
therefore begin in the same state and are normalised together (ECHO-2, appendix F.4). The return is the
learner's net chips, in big blinds; the reward of a turn is the change of its stack.
"""

from __future__ import annotations

import random
from typing import ClassVar, cast

from echo_planes.data.tasks.adapter import Policy, TaskOptions, Tokenizer
from echo_planes.data.tasks.environment import Environment, EpisodeTask
from echo_planes.types import Prompt

from .frozen import PREFIX, FrozenModel, check_tokenizer, model_folder
from .game import Game
from .opponents import all_opponents
from .options import PokerOptions
from .table import Hand, TableRules, shuffled_deck
from .text import SYSTEM_PROMPT

COMPACT_MAX_NEW_TOKENS = 6  # "r1000" and the end token
PLAIN_MAX_NEW_TOKENS = 16  # of a frozen opponent, which has no sampling settings


class PokerTask(EpisodeTask):
    """Task to win chips from rule-based opponents, a frozen model, or the policy itself."""

    Options: ClassVar[type[TaskOptions]] = PokerOptions

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        self._options = cast(PokerOptions, options)
        if self._options.style == "compact":
            self.max_new_tokens = COMPACT_MAX_NEW_TOKENS
        stack = self._options.stack_bb * self._options.big_blind
        big = self._options.big_blind
        self._rules = TableRules((stack,) * self._options.seats, big // 2, big)
        self._opponents = {opponent.name: opponent for opponent in all_opponents()}
        self._frozen: FrozenModel | None = None
        if self._options.opponent.startswith(PREFIX):
            folder = model_folder(self._options.opponent.removeprefix(PREFIX))
            limit = self.max_new_tokens or PLAIN_MAX_NEW_TOKENS
            self._frozen = FrozenModel(folder, tokenizer.eos_token_id, max_new_tokens=limit)

    def preflight(self) -> str:
        if self._frozen:
            check_tokenizer(self._frozen.folder, self.tokenizer)
        return super().preflight()

    def prompt(self, index: int) -> Prompt:
        return self._deal(index, f"{self.seed}/{index}")

    def eval_prompt(self, index: int) -> Prompt:
        """Return held-out prompt `index`; each deal comes once for every seat before the next deal."""
        return self._deal(index, f"held out/{index // self._options.seats}")

    def environment(self, prompt: Prompt, policy: Policy) -> Environment:
        seat, key = prompt.answer.split("/", 1)
        game = self._game(int(seat), key)
        if self._options.opponent == "self":
            game.others = policy
        elif self._frozen:
            game.others = self._frozen.player(prompt.answer)
        return game

    def _deal(self, index: int, key: str) -> Prompt:
        """Return the prompt for the first deal of a key in which every seat would have a decision as learner.

        A hand may end before the learner's first decision, and all seats must get the same deals.
        """
        seats, draw = range(self._options.seats), 0
        while None in (openings := [self._game(seat, f"{key}/{draw}").opening for seat in seats]):
            draw += 1
        seat = index % len(seats)
        text = openings[seat] or ""
        if self._options.style == "plain":
            text = f"{SYSTEM_PROMPT}\n\n{text}\n"
        return self.make_prompt(index, text, f"{seat}/{key}/{draw}")

    def _game(self, seat: int, key: str) -> Game:
        """Return the game of a key, played up to the learner's first decision.

        Until then the other seats act by rules, so that all samples begin in the same state.
        """
        name = self._options.opponent
        names = sorted(self._opponents) if name not in self._opponents else [name]
        drawn = random.Random(f"players/{key}")
        rules = [self._opponents[drawn.choice(names)] for _ in range(self._options.seats)]
        hand = Hand(self._rules, shuffled_deck(random.Random(f"deal/{key}")))
        return Game(hand, seat, rules, random.Random(f"opponents/{key}"), self.tokenizer, self._options.style)
