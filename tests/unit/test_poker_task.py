"""The poker task as the rollout plane sees it: hands as episodes of several turns."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import EchoPlanesError
from echo_planes.tasks.poker.adapter import PokerTask
from echo_planes.tasks.poker.options import PokerOptions
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Prompt, Sample, Span

OPPONENTS = ("calling-station", "tight-aggressive", "maniac", "mixed", "self")
WORDS = ("f", "k", "c", "a", "r4", "r6", "r10", "nonsense", "")


class Drawn:
    """Answers drawn from WORDS; each ends with the end token."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.asked: list[str] = []

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        self.asked.append("".join(map(chr, token_ids)).replace("\0", "."))
        ids = (*(ord(c) for c in self._rng.choice(WORDS)), 0)
        return Sample(ids, (-1.0,) * len(ids), (Span(0, len(ids), 1, "d"),), "stop")


def task(seed: int = 0, **options: object) -> PokerTask:
    return PokerTask(PokerOptions(**options), FakeTokenizer(), seed)


def play(played: PokerTask, prompt: Prompt, seed: int) -> Episode:
    return asyncio.run(played.rollout(prompt, Drawn(seed)))


@pytest.mark.parametrize("opponent", OPPONENTS)
@settings(max_examples=12)
@given(
    seats=st.integers(2, 6), stack=st.integers(2, 40), index=st.integers(0, 10**6), seed=st.integers(0, 99)
)
def test_every_hand_comes_to_its_end(opponent: str, seats: int, stack: int, index: int, seed: int) -> None:
    played = task(seats=seats, stack_bb=stack, opponent=opponent, max_episode_tokens=100_000)
    prompt = played.prompt(index)
    episode = play(played, prompt, seed)
    reward = played.reward(prompt, episode)
    notes = json.loads(episode.notes)
    assert sum(episode.turn_rewards) == pytest.approx(reward.value)
    assert -stack <= reward.value <= (seats - 1) * stack
    assert reward.correct == (reward.value > 0)
    assert len(notes["turns"]) == len(episode.turn_rewards) == episode.num_turns
    if "nonsense" in [turn["action"] for turn in notes["turns"]]:
        assert reward.parts["illegal"] > 0


def test_all_samples_of_a_group_begin_in_the_same_state_and_meet_the_same_luck() -> None:
    played, again = task(opponent="mixed", seats=4), task(opponent="mixed", seats=4)
    for index in range(40):
        prompt = played.prompt(index)
        assert prompt == again.prompt(index)
        assert play(played, prompt, index) == play(again, prompt, index)
    assert task(seed=1).prompt(3) != task(seed=2).prompt(3)


def test_held_out_deals_are_the_same_whatever_the_seed_and_played_from_every_seat() -> None:
    prompts = [task(seed=1, seats=2).eval_prompt(i) for i in range(40)]
    assert prompts == [task(seed=2, seats=2).eval_prompt(i) for i in range(40)]
    assert not {p.answer for p in prompts} & {task(seed=1).prompt(i).answer for i in range(200)}
    assert [p.answer[0] for p in prompts[:4]] == ["0", "1", "0", "1"]
    assert prompts[0].answer.split("/")[1:3] == prompts[1].answer.split("/")[1:3]


def test_the_learner_reads_states_and_answers_them() -> None:
    played, policy = task(opponent="calling-station", stack_bb=20), Drawn(3)
    prompt = played.prompt(0)
    episode = asyncio.run(played.rollout(prompt, policy))
    assert policy.asked[0] == prompt.text
    assert all(asked.endswith(":") for asked in policy.asked)
    own = [i for i, mine in zip(episode.response_ids, episode.response_mask, strict=True) if mine]
    said = "".join(map(chr, own)).split("\0")[:-1]
    assert said == [turn["action"] for turn in json.loads(episode.notes)["turns"]]


def test_in_self_play_the_policy_answers_for_the_others_too() -> None:
    against_rules, against_itself = Drawn(1), Drawn(1)
    for opponent, policy in (("mixed", against_rules), ("self", against_itself)):
        played = task(opponent=opponent, stack_bb=40, seats=3)
        for index in range(20):
            asyncio.run(played.rollout(played.prompt(index), policy))
    turns = [asked.rpartition("\n")[2] for asked in against_itself.asked]
    assert len(against_itself.asked) > len(against_rules.asked)
    assert all(turn.endswith(":") for turn in turns)


def test_the_plain_style_says_the_rules_first() -> None:
    prompt = task(style="plain", max_episode_tokens=5000).prompt(0)
    assert prompt.text.startswith("You play one hand of no-limit Texas hold'em.")
    assert "Allowed:" in prompt.text


def test_options_that_make_no_table_are_refused() -> None:
    with pytest.raises((EchoPlanesError, ValueError), match="even"):
        task(big_blind=3)
