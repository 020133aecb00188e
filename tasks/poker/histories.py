"""Poker logs as canonical records, ECHO-2 appendix F.3-F.5: hand histories and rule-based play.

Records are offline: a log has states, actions and results, but no policy version and no logprobs. Records
therefore lack those fields, and belong in a separate table, never among trajectories.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from .opponents import Opponent
from .phh import Replay
from .table import Hand, TableRules, play, shuffled_deck, turn_chips
from .text import SYSTEM_PROMPT, Style, action_text, state_text
from .view import RANKS, Decision


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision of the record's seat."""

    state: str  # its view, as text
    action: str
    chips: int  # r_t: change of its stack until its next decision or the end, see `turn_chips`
    is_legal: bool = True  # False: the table would refuse the action (a fold where checking is free)


@dataclass(frozen=True, slots=True)
class OfflineRecord:
    """One hand from one seat."""

    source: str  # file and hand, or the players
    seat: int
    big_blind: int  # chips
    turns: tuple[Turn, ...]
    group: str  # starting hand such as "AKs": similar hands are normalised together
    net_chips: int  # R, eq. 20: the sum of the turns' chips

    def messages(self) -> list[dict[str, str]]:
        """Return the hand as a chat, eq. 15 and 16: the rules, then states and actions alternately."""
        chat = [{"role": "system", "content": SYSTEM_PROMPT}]
        for turn in self.turns:
            chat.append({"role": "user", "content": f"State: {turn.state}"})
            chat.append({"role": "assistant", "content": turn.action})
        return chat


def starting_hand(hole: Sequence[str]) -> str:
    """Return the class of hole cards: "AKs", "AKo", "77". `hole` is high to low, as in a view."""
    high, low = hole
    return high[0] + low[0] + ("" if high[0] == low[0] else "s" if high[1] == low[1] else "o")


def records_of_replay(replay: Replay, style: Style) -> list[OfflineRecord]:
    """Return a record for each seat that made a decision and whose hole cards are in the log."""
    return _records(
        replay.source, replay.decisions, replay.big_blind, replay.start_chips, replay.net_chips, style
    )


def records_of_play(
    players: Sequence[Opponent], rules: TableRules, style: Style, rng: random.Random, *, hands: int
) -> Iterator[OfflineRecord]:
    """Yield records over `hands` hands of rule-based play, one per deciding seat, with `players` by seat."""
    source = "/".join(player.name for player in players)
    for number in range(hands):
        hand = Hand(rules, shuffled_deck(rng))
        decisions = play(hand, [partial(player.act, rng=rng) for player in players])
        yield from _records(
            f"{source} hand {number}", decisions, rules.big_blind, rules.stacks, hand.net_chips, style
        )


def _records(
    source: str,
    decisions: Sequence[Decision],
    big_blind: int,
    start_chips: Sequence[int],
    net_chips: Sequence[int],
    style: Style,
) -> list[OfflineRecord]:
    records = []
    for seat in range(len(start_chips)):
        own = [decision for decision in decisions if decision.view.seat == seat]
        if not own or any(card[0] not in RANKS for card in own[0].view.hole):
            continue
        behind = [decision.view.stacks[seat] for decision in own]
        chips = turn_chips(behind, net_chips[seat], start_chips[seat])
        turns = tuple(
            Turn(
                state_text(decision.view, style),
                action_text(decision.action, style),
                change,
                decision.view.legal.allows(decision.action),
            )
            for decision, change in zip(own, chips, strict=True)
        )
        group = starting_hand(own[0].view.hole)
        records.append(OfflineRecord(source, seat, big_blind, turns, group, net_chips[seat]))
    return records
