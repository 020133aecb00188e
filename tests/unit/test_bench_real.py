"""`bench.real`: that its verdicts can be false, and that its control tells nothing."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("torch")

from bench import real
from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.data.tasks.adapter import TaskOptions
from echo_planes.data.tasks.registry import load_tokenizer
from echo_planes.types import Episode, Prompt

SEEDS = (0, 1, 2)


def run(name: str, seed: int, start: float = 0.15, end: float = 0.9) -> real.Run:
    return real.Run(
        name, seed, "done", 100.0, 1.0, 1000, start, end + seed / 100, 0.3, [], [0.5], [0.03], [1.0], 60, None
    )


def runs() -> list[real.Run]:
    learns = [run(name, seed) for name in ("S0", "S3", "S6", "adapters") for seed in SEEDS]
    return learns + [run(name, seed, end=0.16) for name in real.CONTROLS for seed in SEEDS]


@pytest.mark.parametrize(
    ("claim", "name", "changes"),
    [
        ("S0: held-out", "S0", {"end": 0.84}),
        ("adapters: held-out", "adapters", {"end": 0.84}),
        ("rate-0 does not", "rate-0", {"end": 0.31}),
        ("no-signal does not", "no-signal", {"end": 0.31}),
        ("S3: ends within", "S3", {"end": 0.86}),
    ],
)
def test_each_claim_can_fail(claim: str, name: str, changes: dict[str, Any]) -> None:
    assert all(real.learning_verdicts(runs()).values())
    worse = [replace(one, **changes) if one.name == name else one for one in runs()]
    told = real.learning_verdicts(worse)
    assert [one for one, holds in told.items() if not holds and one.startswith(claim)]


@pytest.mark.parametrize("their_seeds", [(1,), SEEDS])
def test_an_end_below_that_of_trl_fails(their_seeds: tuple[int, ...]) -> None:
    theirs, ours = [run("trl", seed) for seed in their_seeds], [run("S0", seed) for seed in SEEDS]
    assert real.trl_verdicts(theirs + ours) == {"S0: ends within the interval of TRL": True}
    worse = [replace(one, end=one.end - 0.06) for one in ours]
    assert real.trl_verdicts(theirs + worse) == {"S0: ends within the interval of TRL": False}
    assert real.trl_verdicts(theirs[:1] + ours[:1]) == {"S0: ends within the interval of TRL": False}


def test_what_it_took_to_reach_an_accuracy() -> None:
    accuracy = [(0, 0.9), (2, 0.5), (4, real.REACHED)]  # what it had before the first step took nothing
    assert real.to_reach(accuracy, [10, 20, 30, 40], [1.0, 2.0, 3.0, 4.0]) == (4, 100, 4.0)
    assert real.to_reach(accuracy[:2], [10, 20], [1.0, 2.0]) is None


def test_rewards_of_the_control_tell_nothing_and_what_is_right_stays_right() -> None:
    tokenizer = load_tokenizer(BUILTIN_MODELS["builtin:tiny-math"])
    tokenizer.chat_template = "{{ messages[0].content }}"
    task = real.RandomRewards(TaskOptions(), tokenizer, 0)
    prompt = Prompt(0, (1,), "56", "What is 7 times 8? Answer with only the number.")
    found = {}
    for text in ("56", "57"):
        answers = [Episode((i, i + 1), (True, True), (0.0, 0.0), (), "stop", text=text) for i in range(600)]
        rewards = [task.reward(replace(prompt, index=i), one) for i, one in enumerate(answers)]
        assert {one.correct for one in rewards} == {text == "56"}
        found[text] = fmean(one.value for one in rewards)
    assert found["56"] == pytest.approx(1 / 6, abs=0.05)
    assert found["56"] == pytest.approx(found["57"], abs=0.05)


def test_the_picture_has_a_line_a_rate() -> None:
    drawn = real.picture({"1e-06": [0.0, 0.1], "1e-05": [0.2, 0.4], "2e-05": [0.3, 0.5], "3e-06": [0.1, 0.2]})
    assert drawn.count("<polyline") == 4
