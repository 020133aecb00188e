"""One hand as an episode: text decides the learner's actions; rules or a policy play the other seats."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from echo_planes.data.tasks.adapter import Policy, Tokenizer
from echo_planes.data.tasks.answers import text_of
from echo_planes.data.tasks.chat import plain_prompt
from echo_planes.data.tasks.environment import Turn
from echo_planes.types import Reward

from .opponents import Opponent
from .table import Hand, turn_chips
from .text import Answer, Style, action_text, read_answer, state_text
from .view import View


class Game:
    """Environment of one hand for the learner's seat.

    Args:
        hand: hand that is dealt, without any action.
        seat: seat of the learner.
        rules: rule-based player of each seat; that of the learner's seat is not used.
        rng: random generator of the rule-based players.
        tokenizer, style: turn states into text, and text into tokens.
    """

    def __init__(
        self,
        hand: Hand,
        seat: int,
        rules: Sequence[Opponent],
        rng: random.Random,
        tokenizer: Tokenizer,
        style: Style,
    ) -> None:
        self._hand = hand
        self._seat = seat
        self._rules = rules
        self._rng = rng
        self._tokenizer = tokenizer
        self._style = style
        self._stacks: list[int] = []  # of the learner at each of its decisions
        self._illegal = 0
        self._said: list[str] = []  # actions of the others since the learner's last decision
        self.others: Policy | None = None  # plays the other seats from the first decision on; None: rules do
        while self._hand.actor not in (None, seat):
            self._act_by_rules(self._hand.view())

    @property
    def opening(self) -> str | None:
        """State at the learner's first decision, as text; None if there is no such decision."""
        return None if self._hand.actor is None else state_text(self._hand.view(), self._style)

    async def step(self, action: str) -> Turn:
        """Apply the learner's action, then play the others up to its next decision or the end of the hand."""
        view = self._hand.view()
        answer = read_answer(action, view.legal, self._style)
        self._illegal += not answer.is_legal
        self._stacks.append(view.stacks[self._seat])
        before, self._said = self._said, []
        self._hand.apply(answer.action)
        while self._hand.actor not in (None, self._seat):
            await self._act(self._hand.view())
        info = self._info(view, answer, before)
        if self._hand.actor is None:
            return Turn("", self._reward(), done=True, info=info)
        return Turn(f"\n{state_text(self._hand.view(), self._style)}", self._reward(), info=info)

    def result(self) -> Reward:
        """Return the net big blinds; in a hand that was cut off, the learner loses its chips in the pot."""
        net = self._net_chips() / self._hand.rules.big_blind
        parts = {"net_bb": net, "illegal": self._illegal / max(len(self._stacks), 1)}
        return Reward(net, net > 0, parts)

    def close(self) -> None:
        """Do nothing: the game holds no resources."""

    def _net_chips(self) -> int:
        if self._hand.actor is None:
            return self._hand.net_chips[self._seat]
        return self._hand.view().stacks[self._seat] - self._hand.rules.stacks[self._seat]

    def _reward(self) -> float:
        """Return the change of the learner's stack since its last decision, in big blinds (eq. 14)."""
        start = self._hand.rules.stacks[self._seat]
        now = self._hand.view().stacks[self._seat] if self._hand.actor is not None else None
        net = self._net_chips() if now is None else now - start
        return turn_chips(self._stacks, net, start)[-1] / self._hand.rules.big_blind

    async def _act(self, view: View) -> None:
        if self.others is None:
            self._act_by_rules(view)
            return
        text = state_text(view, self._style)
        sample = await self.others.generate(plain_prompt(self._tokenizer, text))
        said = text_of(self._tokenizer, sample.token_ids, ended=sample.finish_reason == "stop")
        self._apply(view, read_answer(said, view.legal, self._style))

    def _act_by_rules(self, view: View) -> None:
        self._apply(view, Answer(self._rules[view.seat].act(view, self._rng)))

    def _apply(self, view: View, answer: Answer) -> None:
        self._said.append(f"seat {view.seat + 1} {action_text(answer.action, 'plain')}")
        self._hand.apply(answer.action)

    def _info(self, view: View, answer: Answer, before: Sequence[str]) -> dict[str, Any]:
        """Return a description of the turn for people who read the hand."""
        return {
            "seat": view.seat + 1,
            "hole": list(view.hole),
            "board": list(view.board),
            "pot": view.pot_chips,
            "before": list(before),
            "did": action_text(answer.action, "plain"),
            "fault": answer.fault,
            "after": list(self._said),
        }
