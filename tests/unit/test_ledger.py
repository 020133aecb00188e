"""The ledger in words."""

from __future__ import annotations

from dataclasses import fields

from echo_planes.reporting.ledger import LEDGER_DETAILS, ledger_equation, reward_failures
from echo_planes.types import BufferCounts


def test_only_what_there_is_is_said() -> None:
    books = {"accepted": 1200, "trained": 1000, "dropped_stale": 0, "buffered": 200}
    assert ledger_equation(books) == "1,200 accepted = 1,000 trained + 0 dropped + 200 buffered"
    assert ledger_equation({}) == "- accepted = - trained + - dropped + - buffered"
    books |= {"dropped_stale": 24, "dropped_hard": 16, "dropped_easy": 8, "removed": 4, "reused": 32}
    assert ledger_equation(books) == (
        "1,200 accepted = 1,000 trained + 24 dropped (16 hard, 8 easy) + 4 removed + 200 buffered; "
        "32 trained again"
    )
    refilled = ledger_equation(books | {"uninformative": 16, "reused": 0})
    assert refilled.endswith("+ 4 removed + 16 uninformative + 200 buffered")
    lost = ledger_equation(books | {"unreadable_tokens": 5000})
    spoilt = ledger_equation(books | {"malformed": 3})
    assert spoilt.endswith("32 trained again; 3 malformed messages refused")
    assert lost.endswith("32 trained again; 5,000 tokens of the checkpoint unreadable, sampled again")


def test_the_details_are_fields_of_the_ledger() -> None:
    assert {field.name for field in fields(BufferCounts)} >= set(LEDGER_DETAILS)


def test_answers_without_a_reward_are_told_by_reason_and_not_where_there_were_none() -> None:
    counts = {"reward_timeout": 3, "reward_error": 1200, "reward_invalid": 0}
    assert reward_failures(counts) == "3 timed out, 1,200 raised"
    assert reward_failures({"reward_invalid": 1}) == "1 invalid"
    assert reward_failures({}) == ""
