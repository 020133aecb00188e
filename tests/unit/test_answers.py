"""Text of answers: turn marks are left out, and what the policy said is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from echo_planes.data.tasks.adapter import EpisodeBuilder
from echo_planes.data.tasks.answers import after_thought, has_thought, opens_thought, text_of
from echo_planes.reporting.sections.rollouts import aligned
from echo_planes.types import Sample, Span

WORDS = ["<bos>", "<eos>", "<pad>", "<turn>", "<think>", "</think>", "a", "b"]
BOS, EOS, PAD, TURN, OPEN, CLOSE, A, B = range(8)


class SpecialTokenizer:
    """All marks are special tokens, as `<think>` is in some models; it knows one of two end tokens."""

    bos_token_id, eos_token_id, pad_token_id = BOS, EOS, PAD
    all_special_ids = (BOS, EOS, PAD, TURN, OPEN, CLOSE)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [WORDS.index(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i in self.all_special_ids)]
        return "".join(WORDS[i] for i in kept)

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("ids", "ended", "text"),
    [
        ([OPEN, A, CLOSE, B, EOS], True, "<think>a</think>b"),
        ([OPEN, A, CLOSE, B, TURN], True, "<think>a</think>b"),  # the model's other end token
        ([OPEN, A], False, "<think>a"),  # cut off
        ([OPEN, A, CLOSE], False, "<think>a</think>"),
        ([BOS, A, PAD], False, "a"),
        ([], True, ""),
    ],
)
def test_only_marks_of_a_turn_are_left_out(ids: list[int], ended: bool, text: str) -> None:
    assert text_of(SpecialTokenizer(), ids, ended=ended) == text


def test_of_an_environment_no_special_token_is_shown() -> None:
    builder = EpisodeBuilder()
    for said in ([OPEN, A, CLOSE, TURN], [B, EOS]):
        count = len(said)
        builder.add_sample(Sample(tuple(said), (0.0,) * count, (Span(0, count, 0, "d"),), "stop"))
        builder.add_environment([TURN, A])
    assert builder.build(SpecialTokenizer()).text == "<think>a</think><turn>ab"


@pytest.mark.parametrize(
    ("text", "opened", "rest"),
    [
        ("42", False, "42"),
        ("<think>1</think>42", False, "42"),
        ("1</think>42", True, "42"),
        ("42", True, None),
        ("<think>42", False, None),
        ("<think>1</think>42<think>or 43", False, None),
        ("<think>1</think>no<think>2</think>42", False, "42"),
    ],
)
def test_an_answer_begins_behind_the_last_thought(text: str, opened: bool, rest: str | None) -> None:
    start = after_thought(text, opened=opened)
    assert (None if start is None else text[start:]) == rest
    assert has_thought(text) is ("</think>" in text)


def test_a_prompt_may_open_a_thought() -> None:
    assert opens_thought(SpecialTokenizer(), [A, B, TURN, OPEN])
    assert not opens_thought(SpecialTokenizer(), [A, OPEN, CLOSE])
    assert not opens_thought(SpecialTokenizer(), [A])


def test_the_pieces_of_a_text_are_found_among_those_of_its_tokens() -> None:
    assert aligned(["<think>", "a", "<eos>"], "<think>a") == ["<think>", "a", ""]
    assert aligned(["a", "<eos>"], "b") is None
