"""The task interface: episodes joined from turns, and an adapter written the way newcomers do."""

from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from echo_planes.config.schema import TaskConfig
from echo_planes.data.tasks.adapter import EpisodeBuilder
from echo_planes.data.tasks.check import ScriptedPolicy, Setting, TaskCheck
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Prompt, Reward, Sample, Span, Trajectory
from examples.own_task import OwnOptions, OwnTask

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_task.py"


def sample(text: str, *versions: int, reason: Any = "stop", tops: bool = False) -> Sample:
    """`text` sampled under `versions`, one token (byte) per version, the last one for all that is left."""
    ids = tuple(text.encode())
    cuts = [*range(len(versions)), len(ids)]
    spans = tuple(
        Span(start, stop, version, f"digest{version}")
        for start, stop, version in zip(cuts, cuts[1:], versions, strict=False)
    )
    top = tuple(((token, -0.5),) for token in ids) if tops else ()
    return Sample(ids, tuple(-1.0 - i for i in range(len(ids))), spans, reason, top)


def build(*pieces: Sample | str) -> Episode:
    builder = EpisodeBuilder()
    for piece in pieces:
        if isinstance(piece, str):
            builder.add_environment(list(piece.encode()))
        else:
            builder.add_sample(piece)
    return builder.build(FakeTokenizer())


def test_single_turn_keeps_everything_the_policy_said() -> None:
    answer = sample("199", 3, 4)
    episode = build(answer)
    assert episode.response_ids == answer.token_ids
    assert episode.logprobs == answer.logprobs
    assert episode.spans == answer.spans
    assert episode.response_mask == (True, True, True)
    assert (episode.text, episode.finish_reason, episode.num_turns) == ("199", "stop", 1)


def test_turns_join_token_for_token_and_spans_cover_them_once() -> None:
    episode = build(sample("ab", 1), "XYZ", sample("cde", 2, 3, reason="length"))
    assert episode.text == "abXYZcde"
    assert episode.response_mask == (True,) * 2 + (False,) * 3 + (True,) * 3
    assert episode.logprobs == (-1.0, -2.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0)
    # Environment tokens belong to the span of the token after them.
    assert episode.spans == (
        Span(0, 2, 1, "digest1"),
        Span(2, 6, 2, "digest2"),
        Span(6, 8, 3, "digest3"),
    )
    assert (episode.finish_reason, episode.num_turns) == ("length", 2)


@pytest.mark.parametrize(
    "pieces", [("go", sample("ab", 5)), (sample("ab", 5), "bye"), ("a", "b", sample("c", 7))]
)
def test_spans_always_tile_the_response(pieces: tuple[Sample | str, ...]) -> None:
    episode = build(*pieces)
    edges = [0, *(span.stop for span in episode.spans)]
    assert [span.start for span in episode.spans] == edges[:-1]
    assert edges[-1] == len(episode.response_ids) == len(episode.response_mask) == len(episode.logprobs)


def test_environment_tokens_after_the_last_sample_are_left_out() -> None:
    episode = build(sample("ab", 1), "trailing")
    assert episode.text == "ab"
    assert episode.response_mask == (True, True)


def test_top_logprobs_stay_aligned_with_their_tokens() -> None:
    episode = build(sample("ab", 1), "X", sample("c", 1, tops=True))
    assert episode.top_logprobs == ((), (), (), ((ord("c"), -0.5),))


def test_an_episode_without_samples_is_empty() -> None:
    episode = build("only the environment")
    assert episode.response_ids == ()
    assert episode.num_turns == 0


class TwoTurns(OwnTask):
    """Asks once more when the first answer was too small."""

    async def rollout(self, prompt: Prompt, policy: Any) -> Episode:
        builder = EpisodeBuilder()
        builder.add_sample(await policy.generate(prompt.token_ids))
        builder.add_environment(self.tokenizer.encode("more!", add_special_tokens=False))
        builder.add_sample(await policy.generate((*prompt.token_ids, *builder.response_ids)))
        return builder.build(self.tokenizer)


class Recording:
    """A policy that keeps what it was shown."""

    def __init__(self, answers: Sequence[Sample]) -> None:
        self.answers = list(answers)
        self.shown: list[bytes] = []

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        self.shown.append(bytes(token_ids))
        return self.answers.pop(0)


def test_a_two_turn_rollout_shows_the_policy_its_own_tokens() -> None:
    task = TwoTurns(OwnOptions(), FakeTokenizer(), seed=0)
    policy = Recording([sample("1", 1), sample("99", 2)])
    episode = asyncio.run(task.rollout(Prompt(0, tuple(b"5+0="), "5"), policy))
    assert policy.shown == [b"5+0=", b"5+0=1more!"]
    assert episode.text == "1more!99"


def test_default_omega_trains_sampled_tokens_and_groups_by_prompt() -> None:
    task = OwnTask(OwnOptions(), FakeTokenizer(), seed=0)
    prompt = task.prompt(0)
    group = [
        Trajectory(
            f"g7/{i}", "g7", prompt, build(sample("1", 1), "no", sample("2", 1)), Reward(0.0, False), "w", "l"
        )
        for i in range(2)
    ]
    omegas = task.materialize(group)
    assert [omega.loss_mask for omega in omegas] == [(True, False, False, True)] * 2
    assert {omega.advantage_group for omega in omegas} == {"g7"}
    assert all(omega.advantage is None for omega in omegas)


def test_the_example_is_a_whole_task_in_under_forty_lines() -> None:
    """Played from the prompt to the reward; it imports the task interface, pydantic and nothing else."""
    task = OwnTask(OwnOptions(), FakeTokenizer(), seed=0)
    policy = ScriptedPolicy(task.tokenizer, ["0", "199", "many", ""])
    rewards = []
    for index in range(4):
        prompt = task.prompt(index)
        rewards.append(task.reward(prompt, asyncio.run(task.rollout(prompt, policy))))
    assert [reward.value for reward in rewards] == [0.0, 1.0, 0.0, 0.0]
    assert [reward.parts["is_number"] for reward in rewards] == [1.0, 1.0, 0.0, 0.0]
    text = EXAMPLE.read_text()
    assert text.count("\n") < 40
    used = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert used == {"typing", "pydantic", "echo_planes"}


def test_the_example_keeps_the_contract() -> None:
    setting = Setting(
        task=TaskConfig(name="own", adapter="examples.own_task:OwnTask"),
        tokenizer=FakeTokenizer(),
        vocabulary=sys.maxunicode + 1,
        seed=0,
        max_model_len=64,
        max_new_tokens=16,
    )
    check = TaskCheck(setting)
    findings = [finding for probe in check.probes for finding in check.run(probe)]
    assert len(findings) == len(check.probes)
    assert [finding for finding in findings if finding.level != "ok"] == []


def test_the_example_holds_its_eval_prompts_out() -> None:
    task = OwnTask(OwnOptions(), FakeTokenizer(), seed=3)
    training = {task.prompt(index).text for index in range(2000)}
    assert len(training) == 90
    assert training.isdisjoint(task.eval_prompt(index).text for index in range(20))


def test_unknown_or_mistyped_options_are_refused() -> None:
    for wrong in ({"limt": 50}, {"limit": "50"}):
        with pytest.raises(ValidationError):
            OwnOptions.model_validate(wrong)
