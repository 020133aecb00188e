"""Failures of a rollout worker: a task's mistake is a status, a dead engine ends it, nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import SamplingConfig
from echo_planes.data.replay.buffer_state import NotReady
from echo_planes.data.service import DataService
from echo_planes.data.tasks.adapter import EpisodeBuilder, Policy, TaskOptions
from echo_planes.errors import DataError, LeaseError, RunError, TaskError, WorkerGoneError
from echo_planes.rollout.worker import EVAL_RETRIES_S, RolloutWorker
from echo_planes.testing.fakes import FakeTask, FakeTokenizer, FakeWeights, InlineScorer
from echo_planes.testing.simulation import replace_section, tiny_config
from echo_planes.types import (
    BufferCounts,
    Episode,
    Lease,
    Omega,
    Prompt,
    Reward,
    Sample,
    Span,
    TrainBatch,
    Trajectory,
)
from tests.unit.test_worker import (
    LEASE_S,
    Engine,
    LoopClock,
    Source,
    end,
    fake_task,
    make,
    prompt,
    virtual,
    work,
)

# --- failures ------------------------------------------------------------------------------------


class RewardFails(FakeTask):
    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        raise ZeroDivisionError("no samples to divide by")


class RolloutFails(FakeTask):
    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        await policy.generate(prompt.token_ids)
        raise KeyError("environment")


class RolloutTimesOut(FakeTask):
    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        await policy.generate(prompt.token_ids)
        raise TimeoutError("the sandbox did not answer")


class Cancels(FakeTask):
    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        await policy.generate(prompt.token_ids)
        raise asyncio.CancelledError


class WrongLogic(FakeTask):
    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        raise TaskError("the gold answer is empty")


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        (RewardFails, ["ZeroDivisionError", "prompt 0", "no samples to divide by"]),
        (WrongLogic, ["TaskError", "prompt 0", "the gold answer is empty"]),
    ],
)
def test_a_failing_reward_is_a_status_on_its_answer_and_the_worker_goes_on(
    task: type[FakeTask], parts: list[str]
) -> None:
    source = Source(2)
    work(make(Engine(), source, fake_task(task)), 10.0)
    assert sorted(source.submitted) == ["l0", "l1"]
    for trajectory in source.submitted["l0"].trajectories:
        assert trajectory.status == "reward_error"
        assert all(part in trajectory.error for part in parts)
        assert trajectory.episode.response_ids
        assert trajectory.reward == Reward(0.0, False)


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        (RolloutFails, ["KeyError", "prompt 0", "environment"]),
        (RolloutTimesOut, ["prompt 0", "the sandbox did not answer"]),
        (Cancels, ["prompt 0", "ancel"]),
    ],
)
def test_a_failing_task_is_a_status_on_the_whole_group_and_the_worker_goes_on(
    task: type[FakeTask], parts: list[str]
) -> None:
    source = Source(2)
    work(make(Engine(), source, fake_task(task)), 10.0)
    assert sorted(source.submitted) == ["l0", "l1"]
    group = source.submitted["l0"]
    assert len(group.trajectories) == 3
    for trajectory in group.trajectories:
        assert trajectory.status == "failed"
        for part in parts:
            assert part in trajectory.error
        assert trajectory.episode.response_ids == ()
        assert trajectory.prompt == prompt(0)


class Recovers(FakeTask):
    """Its environment fails the first `failures` times at prompt 1,000,007."""

    def __init__(self, failures: int) -> None:
        super().__init__(TaskOptions(), FakeTokenizer(), 0)
        self.failures = failures

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        if prompt.index == 1_000_007 and self.failures:
            self.failures -= 1
            raise ConnectionError("the environment is down")
        return await super().rollout(prompt, policy)


@pytest.mark.parametrize(("failures", "status"), [(1, "ok"), (len(EVAL_RETRIES_S), "ok"), (99, "failed")])
def test_a_held_out_prompt_whose_rollout_fails_is_tried_again_and_then_counted(
    failures: int, status: str
) -> None:
    task = Recovers(failures)
    answers = virtual(make(Engine(), Source(0), task).evaluate([3, 7], 1, None))
    assert [(t.trajectory_id, t.status) for t in answers] == [("eval-3/0", "ok"), ("eval-7/0", status)]
    assert answers[1].error == ("" if status == "ok" else answers[1].error)
    assert task.failures == (0 if status == "ok" else 99 - 1 - len(EVAL_RETRIES_S))


class OneOfThreeFails(FakeTask):
    """The second sample fails at once; the others would go on for several turns."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun = self.ended = 0

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        self.begun += 1
        if self.begun == 2:
            raise ValueError("broken")
        tokens = prompt.token_ids
        try:
            for _ in range(5):
                tokens += (await policy.generate(tokens)).token_ids
        finally:
            self.ended += 1
        raise AssertionError("its group failed long ago")


def test_the_other_samples_of_a_failed_group_end_with_it() -> None:
    engine, source, task = Engine(), Source(1), OneOfThreeFails(TaskOptions(), FakeTokenizer(), 0)
    work(make(engine, source, task), 20.0)
    assert source.submitted["l0"].trajectories[0].status == "failed"
    assert (task.begun, task.ended) == (3, 2)
    assert len(engine.requests) <= 1
    assert engine.open == 0


@pytest.mark.parametrize("error", [WorkerGoneError("the engine died"), RunError("the engine hangs")])
def test_an_engine_that_died_ends_the_worker(error: RunError) -> None:
    source = Source(1)
    with pytest.raises(type(error), match="the engine"):
        work(make(Engine(error=error), source), 60.0)
    assert not source.submitted


def test_an_engine_that_refuses_one_request_fails_that_group_only() -> None:
    source = Source(2)
    work(make(Engine(error=ValueError("prompt too long")), source), 10.0)
    assert {g.trajectories[0].status for g in source.submitted.values()} == {"failed"}
    assert "prompt too long" in source.submitted["l1"].trajectories[2].error


@pytest.mark.parametrize("error", [LeaseError("worker w0 epoch 5 is fenced"), WorkerGoneError("cut off")])
def test_a_lost_data_plane_ends_the_worker(error: Exception) -> None:
    source = Source(1)
    source.fails = error
    with pytest.raises(type(error)):
        work(make(Engine(), source), 60.0)
    source = Source(1)
    source.renewal_fails = error
    with pytest.raises(type(error)):
        work(make(Engine(seconds=100.0), source), 60.0)


class Impatient(FakeTask):
    """Gives every call of the policy its own limit, staggered, and goes on without the answer."""

    limits_s: tuple[float, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waits = iter(self.limits_s)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        builder = EpisodeBuilder()
        try:
            builder.add_sample(await asyncio.wait_for(policy.generate(prompt.token_ids), next(self.waits)))
        except TimeoutError:
            span = (Span(0, 1, 0, "d0"),)
            builder.add_sample(Sample((ord("x"),), (-1.0,), span, "abort"))
        return builder.build(self.tokenizer)


@pytest.mark.parametrize("limits_s", [(0.5, 9.0, 9.0), (9.0, 0.5, 9.0), (9.0, 9.0, 0.5)])
def test_a_sample_that_gives_up_does_not_take_the_others_along(limits_s: tuple[float, ...]) -> None:
    class Task(Impatient):
        pass

    Task.limits_s = limits_s
    source = Source(1)
    work(make(Engine(), source, fake_task(Task)), 10.0)
    trajectories = source.submitted["l0"].trajectories
    assert [t.status for t in trajectories] == ["ok"] * 3
    assert [t.episode.text == "x" for t in trajectories] == [limit < 1.0 for limit in limits_s]


def test_an_engine_s_refusal_reaches_those_who_still_wait() -> None:
    class Task(Impatient):
        limits_s = (0.5, 9.0, 9.0)

    source = Source(1)
    work(make(Engine(error=ValueError("prompt too long")), source, fake_task(Task)), 10.0)
    assert "prompt too long" in source.submitted["l0"].trajectories[0].error


def test_a_cancelled_worker_leaves_no_request_behind() -> None:
    engine = Engine(seconds=50.0)
    work(make(engine, Source(3)), 5.0)
    assert engine.open == 0


# --- with the real data plane --------------------------------------------------------------------


async def data_plane(folder: Path, **settings: Any) -> DataService:
    """With version 0 published and worker w0 registered, serving nothing yet."""
    service = DataService(tiny_config(**settings), "L0", folder, adapter=fake_task(), clock=LoopClock())
    await service.publish(0, "d0")
    await service.register("w0", 5)
    return service


@pytest.mark.parametrize("passes", [0, 1, 2, 3])
def test_a_pull_that_is_cancelled_just_as_work_comes_ends(tmp_path: Path, passes: int) -> None:
    async def main() -> bool:
        data = await data_plane(tmp_path)
        pulling = asyncio.ensure_future(data.pull("w0", 5, 1, 100.0))
        await asyncio.sleep(0.5)
        await data.lose("w1")  # something changed, but nothing for w0
        for _ in range(passes):
            await asyncio.sleep(0)
        pulling.cancel()
        await asyncio.wait([pulling], timeout=50.0)
        return pulling.cancelled()

    assert virtual(main())


@pytest.mark.parametrize("passes", range(5))
def test_a_pull_that_is_cancelled_just_as_its_leases_come_ends(tmp_path: Path, passes: int) -> None:
    async def main() -> bool:
        data = await data_plane(tmp_path)
        pulling = asyncio.ensure_future(data.pull("w0", 5, 1, 100.0))
        await asyncio.sleep(0.5)
        await data.installed("w0", 0)
        for _ in range(passes):
            await asyncio.sleep(0)
        came_too_late = pulling.done()
        pulling.cancel()
        await asyncio.wait([pulling], timeout=50.0)
        return pulling.cancelled() or came_too_late

    assert virtual(main())


@pytest.mark.parametrize("passes", range(5))
def test_leases_that_come_just_as_a_pull_times_out_are_handed_over_or_not_issued(
    tmp_path: Path, passes: int
) -> None:
    async def main() -> tuple[int, int]:
        data = await data_plane(tmp_path)
        pulling = asyncio.ensure_future(data.pull("w0", 5, 3, 1.0))
        await asyncio.sleep(0)  # its time runs from here
        await asyncio.sleep(1.0)
        for _ in range(passes):
            await asyncio.sleep(0)
        await data.installed("w0", 0)
        leases = await pulling
        return len(leases), (await data.counts()).leased // 2

    handed_over, issued = virtual(main())
    assert handed_over == issued


@pytest.mark.timeout(20)
def test_a_wait_that_is_all_but_over_ends(tmp_path: Path) -> None:
    """The rest of a deadline can be a rounding error: shorter than the event loop's resolution."""

    async def main() -> list[Lease]:
        data = await data_plane(tmp_path)
        await asyncio.sleep(100.0)
        return await data.pull("w0", 5, 1, 5e-10)

    assert virtual(main()) == []


def test_leases_that_stream_are_kept_and_their_work_is_trained(tmp_path: Path) -> None:
    config = tiny_config(max_staleness=0)
    slow_s = 2.5 * config.sampling.lease_s

    async def main() -> tuple[Any, Any]:
        data = await data_plane(tmp_path, max_staleness=0)
        await data.installed("w0", 0)
        worker = RolloutWorker(
            "w0",
            5,
            "L0",
            engine=Engine(seconds=slow_s),
            task=fake_task(),
            scorer=InlineScorer(fake_task()),
            source=data,
            weights=FakeWeights(),
            kind=WorkerConfig(max_groups=4),
            sampling=config.sampling,
            clock=LoopClock(),
        )
        running = asyncio.ensure_future(worker.run())
        batch = await data.next_batch(0, 2 * slow_s)
        await end(running)
        return batch, await data.counts()

    batch, counts = virtual(main())
    assert isinstance(batch, TrainBatch)
    assert batch.num_trajectories == config.sampling.trajectories_per_step
    assert (counts.expired, counts.refused, counts.trained) == (0, 0, batch.num_trajectories)


def test_a_task_of_which_every_group_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    async def main() -> None:
        data = await data_plane(tmp_path)
        await data.installed("w0", 0)
        worker = RolloutWorker(
            "w0",
            5,
            "L0",
            engine=Engine(),
            task=fake_task(RewardFails),
            scorer=InlineScorer(fake_task(RewardFails)),
            source=data,
            weights=FakeWeights(),
            kind=WorkerConfig(max_groups=4),
            sampling=SamplingConfig(lease_s=LEASE_S),
            clock=LoopClock(),
        )
        running = asyncio.ensure_future(worker.run())
        try:
            await data.next_batch(0, 1000.0)
        finally:
            await end(running)

    with pytest.raises(TaskError, match="no samples to divide by"):
        virtual(main())


class GivesAdvantages(FakeTask):
    def materialize(self, trajectories: Sequence[Trajectory]) -> list[Omega]:
        return [Omega(one.episode.response_mask, one.group_id, 1.0) for one in trajectories]


class CannotMaterialize(FakeTask):
    def materialize(self, trajectories: Sequence[Trajectory]) -> list[Omega]:
        raise KeyError("half")


async def refilled(folder: Path, task: FakeTask) -> tuple[TrainBatch | NotReady, BufferCounts]:
    """A first batch of a run that sets aside groups of equal rewards, of a worker whose answers are wrong."""
    config = tiny_config(max_staleness=0)
    config = replace_section(config, sampling={**config.sampling.model_dump(), "refill": "reward"})
    data = DataService(config, "L0", folder, adapter=task, clock=LoopClock())
    await data.publish(0, "d0")
    await data.register("w0", 5)
    await data.installed("w0", 0)
    worker = RolloutWorker(
        "w0",
        5,
        "L0",
        engine=Engine(),
        task=task,
        scorer=InlineScorer(task),
        source=data,
        weights=FakeWeights(),
        kind=WorkerConfig(max_groups=4),
        sampling=config.sampling,
        clock=LoopClock(),
    )
    running = asyncio.ensure_future(worker.run())
    try:
        return await data.next_batch(0, 100.0), await data.counts()
    finally:
        await end(running)


def test_groups_are_set_aside_by_the_advantages_that_the_task_gives(tmp_path: Path) -> None:
    batch, counts = virtual(refilled(tmp_path / "own", fake_task(GivesAdvantages)))
    assert isinstance(batch, TrainBatch)
    assert counts.uninformative == 0
    _, counts = virtual(refilled(tmp_path / "default", fake_task()))
    assert counts.uninformative > 0


def test_a_task_that_cannot_tell_what_a_group_trains_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"what group .* trains cannot be told: KeyError: 'half'"):
        virtual(refilled(tmp_path, fake_task(CannotMaterialize)))
