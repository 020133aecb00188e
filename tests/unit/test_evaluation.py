"""Results of the answers to held-out prompts: pass@k against counting, versions, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from echo_planes.config.schema import Config, EvalConfig
from echo_planes.errors import RunError
from echo_planes.loop.evaluation import comparable, eval_draw, in_words, pass_at, report_of
from echo_planes.testing.simulation import replace_section
from echo_planes.types import Draw, Episode, Prompt, Reward, Span, Status, Trajectory


def answer(prompt: int, correct: bool, *versions: int, status: Status = "ok", number: int = 0) -> Trajectory:
    """One answer to a held-out prompt, a token under each version."""
    spans = tuple(Span(i, i + 1, version, f"d{version}") for i, version in enumerate(versions))
    n = len(versions)
    episode = Episode((1,) * n, (True,) * n, (-0.5,) * n, spans, "stop")
    reward = Reward(float(correct), correct)
    return Trajectory(
        f"e{prompt}/{number}", f"e{prompt}", Prompt(prompt, (1,)), episode, reward, "w0", "L", status
    )


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (4, 4), (7, 2)])
def test_pass_at_k_is_the_share_of_k_answers_that_hold_a_right_one(n: int, c: int) -> None:
    answers = [i < c for i in range(n)]
    counted = []
    for k in range(1, n + 1):
        chosen = list(combinations(answers, k))
        counted.append(sum(any(some) for some in chosen) / len(chosen))
    assert pass_at([(n, c)]) == pytest.approx(counted)


def test_pass_at_k_is_averaged_over_prompts_and_exact_where_binomials_overflow() -> None:
    assert pass_at([(2, 0), (2, 1), (2, 2)]) == pytest.approx((0.5, 2 / 3))
    (*_, half) = pass_at([(4000, 1)])[:2000]
    assert half == pytest.approx(0.5)
    assert pass_at([]) == ()


def test_a_prompt_with_fewer_scored_answers_than_k_says_nothing_of_k() -> None:
    assert pass_at([(3, 3), (2, 0)]) == pytest.approx((0.5, 0.5, 1.0))


def test_a_report_counts_scored_answers_by_prompt() -> None:
    answers = [
        answer(5, True, 3),
        answer(5, False, 3),
        answer(2, True, 3),
        answer(2, True, 3, status="reward_timeout"),
    ]
    report = report_of(40, EvalConfig(num_prompts=2, samples_per_prompt=2), answers)
    assert (report.step, report.version, report.newest_version) == (40, 3, None)
    assert (report.accuracy, report.num_unscored) == (pytest.approx(2 / 3), 1)
    assert report.prompt_rewards == ((2, 1.0), (5, 0.5))
    assert report.pass_at == pytest.approx(((1.0 + 0.5) / 2, 1.0))


def test_a_report_of_several_versions_says_the_oldest_and_the_newest_token_s() -> None:
    answers = [answer(0, True, 4, 4), answer(1, True, 4, 6)]  # no answer is of the newest alone
    report = report_of(4, EvalConfig(), answers)
    assert (report.version, report.newest_version) == (4, 6)


def test_a_failed_rollout_is_left_out_and_told_and_only_a_lack_of_all_ends_the_run() -> None:
    failed = replace(answer(0, False, status="failed"), error="no room")
    settings = EvalConfig(num_prompts=2, samples_per_prompt=1)
    report = report_of(0, settings, [answer(1, True, 0), failed])
    assert (report.accuracy, report.num_unscored, report.prompt_rewards) == (1.0, 1, ((1, 1.0),))
    assert "1 answer of 2 without a reward left out, the first for: no room" in in_words(report)
    assert "left out" not in in_words(report_of(0, settings, [answer(0, True, 0), answer(1, True, 0)]))
    with pytest.raises(RunError, match="not one of 2 evaluation samples has a reward: no room"):
        report_of(0, settings, [failed, failed])


def test_the_learner_compares_answers_that_have_tokens_of_its_own_version() -> None:
    config = replace_section(Config(), run={"steps": 4})
    failed, good = replace(answer(0, False, status="failed"), error="no room"), answer(1, True, 4)
    report = report_of(4, EvalConfig(num_prompts=2, samples_per_prompt=1), [failed, good])
    assert comparable(config, report, [failed, good], 4) == [good]
    assert comparable(config, report, [failed, good], 5) == []  # an update has begun
    assert comparable(replace_section(config, run={"steps": 8}), report, [good], 4) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"temperature": 0.8, "top_p": 0.9}, None),  # what is trained on, by name
        ({"temperature": 0.0, "samples_per_prompt": 1}, Draw(0.0, 0.9)),
        ({"top_p": 1.0}, Draw(0.8, 1.0)),
    ],
)
def test_answers_are_drawn_as_in_training_unless_it_is_said_otherwise(
    settings: dict[str, float], expected: Draw | None
) -> None:
    config = replace_section(Config(), sampling={"temperature": 0.8, "top_p": 0.9}, eval=settings)
    assert eval_draw(config) == expected


def test_the_likeliest_answer_is_asked_for_once() -> None:
    with pytest.raises(ValueError, match="temperature=0 gives one answer, 4 times: set samples_per_prompt=1"):
        EvalConfig(temperature=0.0)
