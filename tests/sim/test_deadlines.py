"""Deadlines of a run in virtual time: slow but honest work has none, what stands still is named and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.errors import WaitTimeoutError
from echo_planes.loop.watch import STALLED_S
from echo_planes.testing import simulation as simulations
from echo_planes.testing.fakes import FakeEngine, FakeLearner, FakeWeights, InlineScorer
from echo_planes.testing.simulation import Faults, Simulation, Trace, replace_section, tiny_config
from echo_planes.types import (
    Draw,
    Episode,
    Manifest,
    Prompt,
    Publication,
    Reward,
    RewardFailure,
    Sample,
    Span,
    StepStats,
    TrainBatch,
    joined,
)

LIMIT_S = 300.0  # tiny_config's run.wait_limit_s
SLOW_S = 1500.0  # of a step's training, of a group's sampling
ANSWER_TOKENS = 60
TRANSFER_S = 1310.0  # 16 GB at 100 Mbit/s


def stalls(trace: Trace) -> list[str]:
    return [line for line in trace.lines if line.startswith("stalled ")]


def test_a_step_of_1500_s_is_trained(tmp_path: Path) -> None:
    outcome, trace = Simulation(tiny_config(steps=3), tmp_path, t_train_s=SLOW_S).run()
    assert (outcome.status, len(trace.batches), stalls(trace)) == ("done", 3, [])


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_answers_of_1500_s_are_waited_for(
    tmp_path: Path, max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulations, "FakeEngine", Steady)
    config = tiny_config(steps=3, max_staleness=max_staleness)
    outcome, trace = Simulation(config, tmp_path, seconds_per_token=(SLOW_S / ANSWER_TOKENS, 20.0)).run()
    assert (outcome.status, len(trace.batches)) == ("done", 3)


class Steady(FakeEngine):
    """An engine whose answers have 60 tokens; one that another worker began goes on where that one ended."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        max_new_tokens: int,
        on_tokens: Callable[[int, Sample], None],
        draw: Draw | None = None,
    ) -> list[Sample]:
        pieces: list[list[Sample]] = [[] for _ in range(num_samples)]
        begun = list(prompt_ids).count(ord("x"))
        for position in range(begun, ANSWER_TOKENS):
            await asyncio.sleep(self._seconds_per_token)
            last = "stop" if position == ANSWER_TOKENS - 1 else ""
            spans = (Span(0, 1, self.version, self.digest),)
            for number in range(num_samples):
                piece = Sample((ord("x"),), (-0.5,), spans, last)
                pieces[number].append(piece)
                on_tokens(number, piece)
        return [joined(sample) for sample in pieces]


class Slow(FakeWeights):
    """Weights that take as long as 16 GB at 100 Mbit/s."""

    begun_s: float | None = None

    async def staged(self, manifest: Manifest, fresh: bool) -> Publication:
        Slow.begun_s = asyncio.get_running_loop().time()
        await asyncio.sleep(TRANSFER_S)
        return await super().staged(manifest, fresh)


@pytest.mark.parametrize("moves", [True, False])
def test_weights_that_arrive_for_1310_s_are_waited_for_as_long_as_bytes_come(
    tmp_path: Path, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Receiving(simulations._LossyWorker):
        async def progress(self) -> dict[str, str]:
            now_s = asyncio.get_running_loop().time() if moves else 0.0
            return {**await super().progress(), "weight install": f"{now_s:.0f} MB"}

    monkeypatch.setattr(simulations, "FakeWeights", Slow)
    monkeypatch.setattr(simulations, "_LossyWorker", Receiving)
    config = tiny_config(steps=2, max_staleness=1)
    outcome, trace = Simulation(config, tmp_path).run()
    if moves:
        assert (outcome.status, len(trace.batches)) == ("done", 2)
    else:
        assert outcome.status == "failed"
        assert "without progress" in outcome.error
        assert any("weight install has stood still" in line for line in stalls(trace))


def test_an_engine_that_hangs_in_an_install_is_replaced_though_later_versions_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(FakeEngine):
        async def install(self, publication: Publication) -> None:
            if (self._id, self._epoch, publication.manifest.version) == ("w1", 0, 2):
                await asyncio.get_running_loop().create_future()  # never answers
            await super().install(publication)

        def __init__(self, worker_id: str, epoch: int, *others: Any) -> None:
            super().__init__(worker_id, epoch, *others)
            self._epoch = epoch

    class Receiving(simulations._LossyWorker):
        async def progress(self) -> dict[str, str]:
            now_s = asyncio.get_running_loop().time()
            return {"weight install": f"{now_s:.0f} MB", **await super().progress()}

    monkeypatch.setattr(simulations, "FakeEngine", Hanging)
    monkeypatch.setattr(simulations, "_LossyWorker", Receiving)
    outcome, trace = Simulation(tiny_config(steps=60), tmp_path, t_train_s=20.0).run()
    assert outcome.status == "done"
    (line,) = [line for line in trace.lines if line.startswith("worker lost w1")]
    assert "without progress (the engine installs version 2)" in line
    assert any("weight install has stood still" in line for line in stalls(trace))


def test_a_learner_that_stands_still_is_named_within_a_minute_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(tiny_config(), tmp_path, faults=Faults(learner_stands_still_at_step=2))
    stood_s: list[float] = []
    told_s: list[float] = []
    train, tell = FakeLearner.train_step, Trace.on_event

    async def train_step(self: FakeLearner, batch: TrainBatch) -> StepStats:
        if batch.step == 2:
            stood_s.append(asyncio.get_running_loop().time())
        return await train(self, batch)

    def on_event(self: Trace, kind: str, text: str, **where: Any) -> None:
        if kind == "stalled":
            assert "learner step has stood still for" in text
            assert text.endswith("micro-batch 1 of 2")
            told_s.append(asyncio.get_running_loop().time())
        tell(self, kind, text, **where)

    monkeypatch.setattr(FakeLearner, "train_step", train_step)
    monkeypatch.setattr(Trace, "on_event", on_event)
    with pytest.raises(WaitTimeoutError, match=r"without progress \(micro-batch 1 of 2\).*'learner step'"):
        simulation.run()
    assert len(told_s) == len(stood_s) == 1
    assert STALLED_S <= told_s[0] - stood_s[0] <= 60.0


def test_a_worker_that_samples_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> list[Sample]:
            if self._id == "w1" and self.version >= 2:
                await asyncio.sleep(200.0)
            return await super().generate(prompt_ids, **asked)

    monkeypatch.setattr(simulations, "FakeEngine", Hanging)
    outcome, trace = Simulation(tiny_config(steps=30), tmp_path, t_train_s=20.0).run()
    assert outcome.status == "done"
    lines = stalls(trace)
    assert all(line.startswith("stalled w1 None sampling ") for line in lines)
    assert "sampling has stood still for" in lines[0]
    assert "groups in flight" in lines[0]


@pytest.mark.parametrize("reads", [True, False])
def test_a_prompt_that_takes_minutes_to_read_is_no_stall(
    tmp_path: Path, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first token only the engine knows that it moves; the control's stands still."""

    class Reading(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> list[Sample]:
            for computed in range(10):
                await asyncio.sleep(20.0)
                if reads:
                    self.progress = f"{asyncio.get_running_loop().time()}: {2048 * computed} tokens computed"
            return await super().generate(prompt_ids, **asked)

    monkeypatch.setattr(simulations, "FakeEngine", Reading)
    config = tiny_config(steps=2)
    config = config.model_copy(update={"eval": replace_section(config.eval, every=1)})
    outcome, trace = Simulation(config, tmp_path).run()
    if reads:
        assert (outcome.status, stalls(trace)) == ("done", [])
    else:
        assert {"sampling", "evaluation"} <= {line.split()[3] for line in stalls(trace)}


def test_a_reward_that_hangs_is_named_within_a_minute_though_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung: list[tuple[int, float]] = []
    told_s: list[float] = []
    tell = Trace.on_event

    class Hanging(InlineScorer):
        def __init__(self, task: TaskAdapter) -> None:
            super().__init__(task)
            self.scoring: list[int] = []  # prompts, the oldest first

        async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Reward | RewardFailure]:
            is_first = not hung
            if is_first:
                hung.append((prompt.index, asyncio.get_running_loop().time()))
            self.scoring.append(prompt.index)
            await asyncio.sleep(100.0 if is_first else 1.0)
            self.scoring.remove(prompt.index)
            return await super().score(prompt, episodes)

        def longest(self) -> str:
            return f"answer 1 of 2 to prompt {self.scoring[0]}" if self.scoring else ""

    def on_event(self: Trace, kind: str, text: str, **where: Any) -> None:
        if kind == "stalled" and text.startswith("reward has stood still"):
            assert text.endswith(f"answer 1 of 2 to prompt {hung[0][0]}")
            told_s.append(asyncio.get_running_loop().time())
        tell(self, kind, text, **where)

    monkeypatch.setattr(simulations, "InlineScorer", Hanging)
    monkeypatch.setattr(Trace, "on_event", on_event)
    outcome, _ = Simulation(tiny_config(steps=30), tmp_path, t_train_s=20.0).run()
    assert outcome.status == "done"
    assert len(told_s) == 1
    assert STALLED_S <= told_s[0] - hung[0][1] <= 60.0
