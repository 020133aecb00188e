"""Episodes of several turns: whose tokens are whose, how they end, and what a chat template puts between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.data.tasks.chat import Chat
from echo_planes.data.tasks.environment import EpisodeTask
from echo_planes.errors import ModelError
from echo_planes.tasks.guess.adapter import GuessOptions, GuessTask
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Prompt, Reward, Sample, Span

END = 0  # FakeTokenizer's


class Scripted:
    """Gives its answers in order, and remembers what it was asked. It stops at tokens in `ends`."""

    def __init__(self, answers: Sequence[tuple[int, ...]], ends: Sequence[int] = (END,)) -> None:
        self._answers = iter(answers)
        self._ends = ends
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        self.asked.append(tuple(token_ids))
        ids = next(self._answers)
        finish = "stop" if ids and ids[-1] in self._ends else "length"
        spans = (Span(0, len(ids), len(self.asked), f"d{len(self.asked)}"),)
        return Sample(ids, tuple(-0.5 - i for i in range(len(ids))), spans, finish)  # type: ignore[arg-type]


def text(words: str, *, ended: bool = True) -> tuple[int, ...]:
    return (*(ord(c) for c in words), *((END,) if ended else ()))


def play(task: EpisodeTask, prompt: Prompt, policy: Scripted) -> tuple[Episode, Reward]:
    episode = asyncio.run(task.rollout(prompt, policy))
    return episode, task.reward(prompt, episode)


def guess(tokenizer: Any = None, **options: Any) -> GuessTask:
    return GuessTask(GuessOptions(**options), tokenizer or FakeTokenizer(), 0)


def test_a_game_is_played_turn_by_turn() -> None:
    task = guess()
    prompt = task.make_prompt(0, "0-19:", "12")
    policy = Scripted([text("5"), text("15"), text("12")])
    episode, reward = play(task, prompt, policy)
    assert policy.asked[0] == text("0-19:", ended=False)
    assert policy.asked[2] == prompt.token_ids + text("5") + text("higher:", ended=False) + text("15") + text(
        "lower:", ended=False
    )
    assert reward == Reward(0.6, True, {"guesses": 3.0, "cut_off": 0.0})
    assert episode.num_turns == 3
    assert episode.turn_rewards == (0.0, 0.0, 1.0)
    assert [turn["said"] for turn in json.loads(episode.notes)["turns"]] == ["higher", "lower", "found"]


def test_an_episode_is_cut_off_when_turns_or_tokens_run_out() -> None:
    task = guess(max_turns=2)
    episode, reward = play(task, task.make_prompt(0, "0-19:", "12"), Scripted([text("x"), text("3")]))
    assert reward == Reward(0.0, False, {"guesses": 2.0, "cut_off": 1.0})
    assert episode.response_ids[-1] == END  # nothing of the environment after the last answer
    tight = guess(max_episode_tokens=5 + 2 + 7 + 3)  # a second answer of up to 4 tokens has no room
    episode, reward = play(tight, tight.make_prompt(0, "0-19:", "12"), Scripted([text("5")]))
    assert episode.num_turns == 1
    assert reward.parts["cut_off"] == 1.0


@given(st.lists(st.text("0123456789x ", max_size=4), min_size=1, max_size=5), st.integers(0, 19))
def test_the_mask_covers_exactly_what_the_policy_sampled(words: list[str], secret: int) -> None:
    task = guess()
    answers = [text(word) for word in words] + [text(str(secret))] * 5
    policy = Scripted(answers)
    episode, _ = play(task, task.make_prompt(0, "0-19:", str(secret)), policy)
    sampled = [i for i, own in zip(episode.response_ids, episode.response_mask, strict=True) if own]
    assert tuple(sampled) == sum(answers[: episode.num_turns], ())
    assert all(p == 0.0 for p, own in zip(episode.logprobs, episode.response_mask, strict=True) if not own)
    assert [span.start for span in episode.spans] == [0, *(span.stop for span in episode.spans[:-1])]
    assert episode.spans[-1].stop == len(episode.response_ids)


# --- chat templates ------------------------------------------------------------------------------

# Forms of chat templates: how a message begins and ends, and what opens an answer.
FORMS = {
    "qwen-like": ("<{role}\n", ">\n", "<assistant\n", "<assistant\n"),
    "llama-like": ("#{role}#\n\n", ">", "#assistant#\n\n", "#assistant#\n\n"),
    "thinking": ("<{role}\n", ">\n", "<assistant\n", "<assistant\n[]\n\n"),  # old answers lose their thinking
    "made-up": ("({role}: ", ">\n--\n", "(assistant: ", "(assistant: "),
}


class Templated:
    """A tokenizer with one token per character; ">" ends an answer, "@" is another special token."""

    eos_token_id: int | None = ord(">")
    chat_template = "there is one"

    all_special_ids = (ord(">"), ord("@"))

    def __init__(self, form: str) -> None:
        self._begin, self._end, self._old, self._new = FORMS[form]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        special = (ord(">"), ord("@")) if skip_special_tokens else ()
        return "".join(chr(i) for i in token_ids if i not in special)

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> str:
        out = ""
        for message in messages:
            begin = self._old if message["role"] == "assistant" else self._begin.format(**message)
            out += begin + message["content"] + self._end
        return out + (self._new if add_generation_prompt else "")

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        return self.encode(self.render(conversation, options["add_generation_prompt"]))


@pytest.mark.parametrize("form", FORMS)
@given(st.lists(st.text("abc 12\n", min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_turns_are_joined_as_the_template_writes_them(
    form: str, words: list[str], data: st.DataObject
) -> None:
    tokenizer = Templated(form)
    chat = Chat(tokenizer)
    messages = [{"role": "user", "content": "begin"}]
    ids = chat.prompt(messages)
    mask = [False] * len(ids)
    new, old = FORMS[form][3], FORMS[form][2]
    for word in words:
        ended = data.draw(st.booleans())
        answer = tuple(tokenizer.encode(word + (">" if ended else "")))
        observation = {"role": "user", "content": data.draw(st.text("xyz", max_size=4))}
        reply = chat.reply(observation, ended=ended)
        ids, mask = ids + answer + reply, mask + [True] * len(answer) + [False] * len(reply)
        messages += [{"role": "assistant", "content": word}, observation]
    # As the template writes the whole, but that answers stay as they were sampled, their opening included.
    assert tokenizer.decode(ids) == tokenizer.render(messages, True).replace(old, new).replace(
        new + "[]\n\n", new
    )
    assert tokenizer.decode([i for i, own in zip(ids, mask, strict=True) if own]).replace(">", "") == "".join(
        words
    )


def test_a_template_without_an_end_is_refused() -> None:
    tokenizer = Templated("made-up")
    tokenizer.eos_token_id = ord("@")
    with pytest.raises(ModelError, match="ends no answer"):
        Chat(tokenizer).reply({"role": "user", "content": "x"}, ended=True)
    del Templated.chat_template
    try:
        with pytest.raises(ModelError, match="no chat template"):
            Chat(tokenizer)
    finally:
        Templated.chat_template = "there is one"


def test_a_task_of_several_turns_whose_turns_have_no_end_is_refused_when_it_is_built() -> None:
    """As Gemma's, whose turns end with another token than the tokenizer's end token."""
    tokenizer = Templated("llama-like")
    tokenizer.eos_token_id = ord("@")
    with pytest.raises(ModelError, match=r"ends no answer.*set 'eos_token'"):
        guess(tokenizer, template="chat")
    assert guess(tokenizer, template="chat", max_turns=1).prompt(0).token_ids
    assert guess(tokenizer).prompt(0).token_ids


def test_a_game_in_a_chat_template() -> None:
    tokenizer = Templated("llama-like")
    task = guess(tokenizer, template="chat")
    policy = Scripted([tuple(tokenizer.encode("5>")), tuple(tokenizer.encode("12>"))], ends=[ord(">")])
    episode, reward = play(task, task.make_prompt(0, "0-19:", "12"), policy)
    assert tokenizer.decode(policy.asked[1]) == (
        "#user#\n\n0-19:>#assistant#\n\n5>#user#\n\nhigher:>#assistant#\n\n"
    )
    assert reward.correct
    assert episode.response_mask[:2] == (True, True)
    assert episode.response_mask[-3:] == (True, True, True)


def test_an_answer_that_stopped_at_another_end_token_gets_no_second_one() -> None:
    tokenizer = Templated("llama-like")
    task = guess(tokenizer, template="chat")
    # The model's generation settings name two end tokens; "5" stops at the tokenizer's, "7" at the other,
    # and "9" at its limit.
    answers = [tuple(tokenizer.encode(answer)) for answer in ("5>", "7@", "9", "12>")]
    policy = Scripted(answers, ends=[ord(">"), ord("@")])
    play(task, task.make_prompt(0, "0-19:", "12"), policy)
    turn = "#user#\n\nhigher:>#assistant#\n\n"
    assert tokenizer.decode(policy.asked[3]) == f"#user#\n\n0-19:>#assistant#\n\n5>{turn}7@{turn}9>{turn}"


def test_the_longest_answer_is_of_all_turns_together() -> None:
    task = guess(max_turns=3, max_episode_tokens=400)
    each = task.max_new_tokens or 64
    assert task.longest_answer(64) == 3 * each
    assert guess(max_turns=60, max_episode_tokens=40).longest_answer(64) == 40
