"""A run that never reaches the bar is no match for one that does, and none for another that does not."""

from __future__ import annotations

import json
from pathlib import Path

from bench.proof import REWARD_BAR, _tokens_to_bar, tokens_claim


def test_a_run_that_never_reaches_the_bar_needs_no_number_of_tokens(tmp_path: Path) -> None:
    rewards = [0.0, *[REWARD_BAR] * 5]
    rows = [{"step": step, "tokens": 10, "reward_mean": reward} for step, reward in enumerate(rewards, 1)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    assert _tokens_to_bar(tmp_path) is None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _tokens_to_bar(tmp_path) == 60


def test_the_verdict_on_tokens_is_of_a_run_that_reached_the_bar() -> None:
    assert [tokens_claim(*pair).holds for pair in ((5, 5), (5, None), (6, 5), (None, 5), (None, None))] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert tokens_claim(5000, None).figure == "5,000 / never"
