"""Doors: what somebody adds from a module of their own, without a change of this package."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from echo_planes.cluster.clock import ManualClock
from echo_planes.config.extensions import extension
from echo_planes.config.schema import ObjectiveConfig, SamplingConfig
from echo_planes.data.replay.dispatch import POLICIES, Workers, policy_named
from echo_planes.errors import ConfigError
from echo_planes.learning.objectives import OBJECTIVES, Objective, Tokens, policy_loss
from echo_planes.loop.launch import make_actuator
from echo_planes.loop.loading import load_config
from echo_planes.run import main

MODULE = """
from dataclasses import replace

from echo_planes.data.replay.dispatch import ShortestQueue
from echo_planes.learning.objectives import OBJECTIVES

GRPO = OBJECTIVES["grpo"]


def half(ratio, advantages, logprobs, clip):
    surrogate, clipped = GRPO.surrogate(ratio, advantages, logprobs, clip)
    return 0.5 * surrogate, clipped


HALVED = replace(GRPO, name="halved", surrogate=half)


class FirstOnly(ShortestQueue):
    def assign(self, num_requests, workers):
        given = super().assign(num_requests, workers)
        given.counts[1:] = 0
        return given


class Cloud:
    def __init__(self, gamma):
        self.gamma = gamma


async def my_cloud(config, clock):
    return Cloud(config.fleet.gamma)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module outside the package."""
    (tmp_path / "own_doors.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_doors"


def test_an_objective(own: str) -> None:
    config = ObjectiveConfig(name=f"{own}:HALVED")
    tokens = Tokens(
        logprobs=torch.tensor([-1.0, -2.0], requires_grad=True),
        old_logprobs=torch.tensor([-1.5, -2.0]),
        sampler_logprobs=torch.tensor([-1.5, -2.0]),
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.tensor([0.7, 0.5]),
        trajectory=torch.tensor([0, 1]),
        num_trajectories=2,
    )
    ours = extension("objective.name", config.name, OBJECTIVES, Objective)
    theirs = policy_loss(tokens, ObjectiveConfig(), OBJECTIVES["grpo"]).loss.item()
    assert theirs != 0
    assert policy_loss(tokens, config, ours).loss.item() == pytest.approx(theirs / 2)


def test_a_dispatch_policy(own: str) -> None:
    policy = policy_named(SamplingConfig(router=f"{own}:FirstOnly").router, 8)
    assert policy is not None
    workers = Workers.named("a", "b")
    workers.version[:], workers.room[:] = 0, 5
    assert policy.assign(4, workers).counts.tolist() == [2, 0]
    assert POLICIES["jsq"](8).assign(4, workers).counts.tolist() == [2, 2]


def test_an_actuator(own: str) -> None:
    config = load_config([f"fleet.scale={own}:my_cloud", "fleet.gamma=1.25"])
    assert config.fleet.brings_nodes
    assert asyncio.run(make_actuator(config, ManualClock())).gamma == 1.25  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("objective.name=grppo", "'grppo' is none of 'grpo', 'dapo', 'dr_grpo', 'rloo', 'gspo', 'cispo'"),
        ("sampling.router=jqs", "'jqs' is none of 'pull', 'jsq', 'proportional'"),
        ("fleet.scale=rays", "'rays' is none of 'fixed', 'static', 'ray'"),
    ],
)
def test_a_name_that_is_none_is_one_line_with_the_nearest(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_config([word])
    assert said in str(told.value)
    assert "did you mean" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere_at_all:THING", "no module named 'nowhere_at_all'"),
        ("own_doors:MISSING", "there is no Objective 'MISSING' in own_doors"),
        ("own_doors:FirstOnly", "there is no Objective 'FirstOnly' in own_doors"),
        ("own_doors:", "not of the form package.module:NAME"),
    ],
)
def test_a_place_that_holds_none_is_one_line(own: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        extension("objective.name", name, OBJECTIVES, Objective)


@pytest.mark.parametrize("key", ["objective.name", "sampling.router", "fleet.scale"])
def test_a_place_that_holds_nothing_is_told_before_anything_starts(
    own: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{key}={own}:MISSING", f"run.dir={tmp_path / 'run'}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {key}='{own}:MISSING': there is no 'MISSING' in {own}\n"
    assert not (tmp_path / "run").exists()
