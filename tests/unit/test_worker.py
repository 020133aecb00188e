"""A rollout worker in virtual time: what it asks of the engine, what it hands in, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest

from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import SamplingConfig
from echo_planes.data.tasks.adapter import EpisodeBuilder, Policy, TaskAdapter, TaskOptions
from echo_planes.errors import ClusterError, WeightsError
from echo_planes.rollout.worker import RolloutWorker
from echo_planes.testing.fakes import FakeTask, FakeTokenizer, FakeWeights, InlineScorer
from echo_planes.testing.virtual_time import run_virtual
from echo_planes.types import (
    Draw,
    Episode,
    Group,
    Lease,
    LeaseTokens,
    Manifest,
    Prompt,
    Publication,
    Receipt,
    Reward,
    RewardFailure,
    Sample,
    Span,
)
from tests.unit.stub_engine import StubEngine

T = TypeVar("T")
LEASE_S = 8.0


def virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        return await coroutine

    return run_virtual(lambda _: main())


class Engine(StubEngine):
    """Answers every request after `seconds`, with a token per second on the way."""

    def __init__(self, seconds: float = 1.0, error: Exception | None = None) -> None:
        super().__init__()
        self.last_pause_s = 0.25
        self.seconds = seconds
        self.error = error
        self.draws: list[Draw | None] = []
        self.refuses = ""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        max_new_tokens: int,
        on_tokens: Callable[[int, Sample], None],
        draw: Draw | None = None,
    ) -> list[Sample]:
        self.draws.append(draw)
        with self.request(prompt_ids, num_samples, max_new_tokens):
            left_s = self.seconds
            while left_s > 0:
                await asyncio.sleep(min(1.0, left_s))
                left_s -= 1.0
                for i in range(num_samples):
                    on_tokens(i, Sample((ord(" "),), (-0.5,), (Span(0, 1, self.version, self.digest),), ""))
            if self.error:
                raise self.error
        span = (Span(0, 2, self.version, self.digest),)
        return [Sample((ord("0") + i, 0), (-0.5, -0.1), span, "stop") for i in range(num_samples)]

    async def install(self, publication: Publication) -> None:
        if self.refuses:
            raise WeightsError(self.refuses)
        await super().install(publication)


class Source:
    """Hands out leases and remembers what comes back."""

    def __init__(self, leases: int, *, num_samples: int = 3, accepts: bool = True) -> None:
        self.left = leases
        self.issued = 0
        self.num_samples = num_samples
        self.accepts = accepts
        self.rooms: list[int] = []
        self.submitted: dict[str, Group] = {}
        self.renewed: list[tuple[float, tuple[str, ...]]] = []
        self.streamed: list[LeaseTokens] = []
        self.handed: list[LeaseTokens] = []
        self.recalls: set[str] = set()
        self.fails: Exception | None = None
        self.renewal_fails: Exception | None = None

    async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]:
        if self.fails:
            raise self.fails
        self.rooms.append(room)
        count = min(room, self.left)
        if not count:
            await asyncio.sleep(wait_s)
        self.left -= count
        first, self.issued = self.issued, self.issued + count
        return [
            Lease(f"l{i}", f"g{i}", epoch, worker_id, prompt(i), self.num_samples, 0, LEASE_S)
            for i in range(first, first + count)
        ]

    async def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
        if self.renewal_fails:
            raise self.renewal_fails
        ids = tuple(message.lease_id for message in messages)
        if ids:
            self.renewed.append((asyncio.get_running_loop().time(), ids))
        for message in messages:
            self.streamed.append(message)
        return tuple(lease_id for lease_id in ids if lease_id in self.recalls)

    async def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
        self.handed += messages
        return len(messages)

    async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]:
        for lease_id, group in groups:
            assert lease_id not in self.submitted, "a lease ends once"
            self.submitted[lease_id] = group
        return [Receipt(lease_id, self.accepts) for lease_id, _ in groups]


def prompt(index: int) -> Prompt:
    return Prompt(index, tuple(FakeTokenizer().encode(f"{index}?")), answer=str(index % 10))


def fake_task(cls: type[TaskAdapter] = FakeTask) -> TaskAdapter:
    return cls(TaskOptions(), FakeTokenizer(), 0)


def make(
    engine: Engine,
    source: Source,
    task: TaskAdapter | None = None,
    *,
    scorer: Any = None,
    weights: Any = None,
    max_groups: int = 4,
    stream_s: float = 1.0,
    lease_s: float = LEASE_S,
    **kind: Any,
) -> RolloutWorker:
    task = task or fake_task()
    return RolloutWorker(
        "w0",
        5,
        "L0",
        engine=engine,
        task=task,
        scorer=scorer or InlineScorer(task),
        source=source,
        weights=weights or FakeWeights(),
        kind=WorkerConfig(max_groups=max_groups, **kind),
        sampling=SamplingConfig(lease_s=lease_s, stream_s=stream_s, max_new_tokens=9),
        clock=LoopClock(),
    )


class LoopClock:
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def end(running: asyncio.Future[None]) -> None:
    """Cancel a worker and let its tasks see it."""
    running.cancel()
    await asyncio.wait([running])
    await asyncio.sleep(0.01)


def work(worker: RolloutWorker, seconds: float) -> None:
    """Let it run for so long, in virtual time; an error that ends it is raised."""

    async def main() -> None:
        running = asyncio.ensure_future(worker.run())
        done, _ = await asyncio.wait([running], timeout=seconds)
        await end(running)
        if done:
            await running

    virtual(main())


# --- the course of a lease -----------------------------------------------------------------------


def test_the_samples_of_a_group_are_one_engine_request() -> None:
    engine, source = Engine(), Source(2)
    work(make(engine, source), 3.0)
    assert engine.requests == [(prompt(0).token_ids, 3, 9), (prompt(1).token_ids, 3, 9)]


def test_what_is_handed_in_is_the_record_of_what_was_sampled() -> None:
    source = Source(1)
    work(make(Engine(), source), 3.0)
    group = source.submitted["l0"]
    assert group.group_id == "g0"
    assert [t.trajectory_id for t in group.trajectories] == ["g0/0", "g0/1", "g0/2"]
    assert [t.episode.text for t in group.trajectories] == ["0", "1", "2"]
    assert [t.reward.correct for t in group.trajectories] == [True, False, False]
    for t in group.trajectories:
        assert (t.prompt, t.worker_id, t.lineage, t.group_id) == (prompt(0), "w0", "L0", "g0")
        assert (t.status, t.error) == ("ok", "")
        assert t.episode.spans == (Span(0, 2, 0, "d0"),)
        assert t.episode.logprobs == (-0.5, -0.1)


def test_a_task_that_knows_its_answers_length_says_so() -> None:
    engine, task = Engine(), fake_task()
    task.max_new_tokens = 2
    work(make(engine, Source(1), task), 3.0)
    assert engine.requests[0][2] == 2


def test_it_never_holds_more_groups_than_it_has_room_for_and_leaves_nothing_undone() -> None:
    engine, source = Engine(), Source(11)
    work(make(engine, source, max_groups=4), 20.0)
    assert engine.most_open == 4
    assert max(source.rooms) == 4
    assert sorted(source.submitted) == sorted(f"l{i}" for i in range(11))


def test_only_accepted_work_is_counted() -> None:
    async def stats(accepts: bool) -> Any:
        worker = make(Engine(seconds=2.0), Source(1, accepts=accepts))
        running = asyncio.ensure_future(worker.run())
        await asyncio.sleep(1.0)
        assert (await worker.stats()).groups_in_flight == 1
        await asyncio.sleep(6.0)
        await end(running)
        return await worker.stats()

    accepted, refused = virtual(stats(True)), virtual(stats(False))
    assert (accepted.trajectories, accepted.tokens) == (3, 6)
    assert (refused.trajectories, refused.tokens) == (0, 0)
    assert accepted.groups_in_flight == refused.groups_in_flight == 0
    assert accepted.busy_s == pytest.approx(2.0)  # waiting for work is not busy


def test_a_slow_worker_pauses_before_each_group() -> None:
    source = Source(1)
    worker = make(Engine(), source, slowdown_s=10.0)
    work(worker, 10.5)
    assert not source.submitted
    source = Source(1)
    work(make(Engine(), source, slowdown_s=10.0), 11.5)
    assert source.submitted


class SlowScorer(InlineScorer):
    """Takes a virtual while."""

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Reward | RewardFailure]:
        await asyncio.sleep(3 * LEASE_S)
        return await super().score(prompt, episodes)


def test_a_lease_is_kept_while_its_answers_are_scored() -> None:
    """Scoring has deadlines of its own; the prompt must not go out again meanwhile."""
    source = Source(1)
    work(make(Engine(seconds=0.0), source, scorer=SlowScorer(fake_task())), 4 * LEASE_S)
    assert "l0" in source.submitted
    times = [0.0, *(at_s for at_s, leases in source.renewed if leases == ("l0",)), 3 * LEASE_S]
    assert max(later - earlier for earlier, later in pairwise(times)) < LEASE_S


def test_streamed_tokens_renew_a_lease_and_silence_does_not() -> None:
    source = Source(1)
    work(make(Engine(seconds=3 * LEASE_S), source), 4 * LEASE_S)
    times = [at_s for at_s, leases in source.renewed if leases == ("l0",)]
    assert len(times) == len(source.renewed)
    assert all(later - earlier < LEASE_S for earlier, later in zip([0.0, *times], times, strict=False))
    assert times[-1] > 2 * LEASE_S

    class Silent(Engine):
        async def generate(self, prompt_ids: Sequence[int], **settings: Any) -> list[Sample]:
            return await super().generate(prompt_ids, **{**settings, "on_tokens": lambda *_: None})

    quiet = Source(1)
    work(make(Silent(seconds=3 * LEASE_S), quiet), 4 * LEASE_S)
    assert quiet.renewed == []

    class Reading(Silent):
        """Its prompts take long."""

        @property
        def progress(self) -> str:
            return f"{asyncio.get_running_loop().time():.0f} tokens computed"

        @progress.setter
        def progress(self, text: str) -> None:
            return None

    read = Source(1)
    work(make(Reading(seconds=3 * LEASE_S), read), 4 * LEASE_S)
    assert read.renewed[-1][0] > 2 * LEASE_S
    asked = Source(1)  # by a task that does not ask the engine, which computes for others
    work(make(Reading(), asked, fake_task(Hanging)), 4 * LEASE_S)
    assert asked.renewed == []


class Hanging(FakeTask):
    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        await asyncio.get_running_loop().create_future()  # never answers
        raise AssertionError


@pytest.mark.parametrize("stream_s", [2.0, 4.0])
def test_tokens_are_sent_in_the_interval_in_which_they_came(stream_s: float) -> None:
    """A killed worker takes with it at most one interval's tokens; the engine gives one a second."""
    source = Source(1, num_samples=1)
    work(make(Engine(seconds=20.5), source, stream_s=stream_s, lease_s=40.0), 30.0)
    sent_at_s = [0.0, *(at_s for at_s, _ in source.renewed)]
    assert [b - a for a, b in pairwise(sent_at_s)] == pytest.approx([stream_s] * int(20 // stream_s))
    sent = [sum(len(part.sample.token_ids) for _, part in message.pieces) for message in source.streamed]
    assert sum(sent) >= 20 - stream_s
    assert max(sent) <= stream_s


# --- several turns -------------------------------------------------------------------------------


class TwoTurns(FakeTask):
    """Answers, is told '!' and answers again."""

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        builder = EpisodeBuilder()
        builder.add_sample(await policy.generate(prompt.token_ids))
        builder.add_environment([ord("!")])
        builder.add_sample(await policy.generate(prompt.token_ids + builder.response_ids))
        return builder.build(self.tokenizer)


def test_turns_that_differ_are_requests_of_their_own_and_equal_ones_are_joined() -> None:
    engine, source = Engine(), Source(1)
    work(make(engine, source, fake_task(TwoTurns)), 5.0)
    first, *second = engine.requests
    assert first == (prompt(0).token_ids, 3, 9)
    assert sorted(second) == [((*prompt(0).token_ids, ord("0") + i, 0, ord("!")), 1, 9) for i in range(3)]
    episode = source.submitted["l0"].trajectories[1].episode
    assert episode.response_mask == (True, True, False, True, True)
    assert episode.num_turns == 2


# --- weights and evaluation ----------------------------------------------------------------------


def manifest(version: int) -> Manifest:
    return Manifest("L0", version, version, "full", -1, "", f"d{version}", "", 0, 0, 0, 0)


class Weights:
    """Has every version, or says why not; remembers how the installs went."""

    def __init__(self, missing: str = "", ahead: int = 0) -> None:
        self.missing = missing
        self.ahead = ahead  # so many versions newer than asked for
        self.asked: list[tuple[int, bool]] = []
        self.outcomes: list[tuple[int, bool]] = []
        self.digest = ""  # of what comes; "": as asked for
        self.full = False  # the machine's disk

    async def staged(self, manifest: Manifest, fresh: bool) -> Publication:
        self.asked.append((manifest.version, fresh))
        if self.missing:
            raise WeightsError(self.missing)
        if self.full:
            raise ClusterError("cannot stage the version: no space left")
        version = manifest.version + self.ahead
        digest = self.digest or (f"d{version}" if self.ahead else manifest.digest)
        staged = replace(manifest, version=version, digest=digest)
        return Publication(staged, np.zeros(0, np.uint8))

    async def settled(self, version: int, ok: bool) -> str:
        self.outcomes.append((version, ok))
        return "v0 full, v2 compact" if self.ahead else ""


def test_an_install_reports_what_serves_now_also_where_it_was_refused() -> None:
    engine, weights = Engine(), Weights()
    worker = make(engine, Source(0), weights=weights)
    good = virtual(worker.install(manifest(2), False))
    assert (good.worker_id, good.version, good.digest, good.ok, good.error) == ("w0", 2, "d2", True, "")
    assert good.pause_s == 0.25
    engine.refuses = "the base is version 1, not 2"
    bad = virtual(worker.install(manifest(4), True))
    assert (bad.version, bad.digest, bad.ok, bad.error) == (2, "d2", False, "the base is version 1, not 2")
    assert weights.asked == [(2, False), (4, True)]
    assert weights.outcomes == [(2, True), (4, False)]


def test_weights_that_do_not_arrive_are_a_refusal_and_the_old_version_serves_on() -> None:
    engine, weights = Engine(), Weights(missing="version 3 did not arrive")
    report = virtual(make(engine, Source(0), weights=weights).install(manifest(3), False))
    assert (report.version, report.ok, report.error) == (0, False, "version 3 did not arrive")
    assert weights.outcomes == []


def test_what_serves_already_is_not_installed_again_unless_it_must_be_rewritten() -> None:
    engine, weights = Engine(), Weights()
    worker = make(engine, Source(0), weights=weights)
    for fresh in (False, False, True):
        report = virtual(worker.install(manifest(2), fresh))
        assert (report.version, report.ok) == (2, True)
    assert weights.asked == [(2, False), (2, True)]


def test_another_digest_under_the_same_version_is_refused() -> None:
    engine, weights = Engine(), Weights()
    other = replace(manifest(3), digest="d-other")
    report = virtual(make(engine, Source(0), weights=weights).install(other, False))
    assert report.ok  # the stand-in stages whatever it is asked for
    weights.digest = "d3"
    report = virtual(make(Engine(), Source(0), weights=weights).install(other, False))
    assert (report.ok, report.version) == (False, 0)
    assert "d-other" in report.error


def test_a_machine_without_room_refuses_and_the_run_goes_on() -> None:
    engine, weights = Engine(), Weights()
    weights.full = True
    report = virtual(make(engine, Source(0), weights=weights).install(manifest(3), False))
    assert (report.version, report.ok) == (0, False)
    assert "no space left" in report.error


def test_a_newer_version_than_asked_for_is_as_good() -> None:
    engine, weights = Engine(), Weights(ahead=2)
    report = virtual(make(engine, Source(0), weights=weights).install(manifest(3), False))
    assert (report.version, report.digest, report.ok) == (5, "d5", True)
    assert report.caught_up == "v0 full, v2 compact"
    assert weights.outcomes == [(5, True)]


def test_an_evaluation_answers_held_out_prompts_as_often_as_asked() -> None:
    engine = Engine()
    worker = make(engine, Source(0))
    trajectories = virtual(worker.evaluate([0, 7], 2, None))
    assert [t.prompt.index for t in trajectories] == [1_000_000] * 2 + [1_000_007] * 2
    assert [samples for _, samples, _ in engine.requests] == [2, 2]
    assert len({t.trajectory_id for t in trajectories}) == 4
    assert virtual(worker.stats()).trajectories == 0  # nothing of it is trained


def test_an_evaluation_draws_its_answers_as_it_is_told_and_training_does_not() -> None:
    engine, draw = Engine(), Draw(0.5, 0.9)
    worker = make(engine, Source(1))

    async def both() -> None:
        running = asyncio.ensure_future(worker.run())
        await worker.evaluate([0], 1, draw)
        await asyncio.sleep(5.0)
        running.cancel()

    virtual(both())
    assert sorted(engine.draws, key=repr) == [replace(draw, dense=True), None]


# --- progress, for whoever waits ------------------------------------------------------------------


def test_progress_tells_tokens_while_it_samples_and_rewards_that_are_waited_for() -> None:
    worker = make(Engine(seconds=4.0), Source(1), scorer=SlowScorer(fake_task()))
    seen = []

    async def main() -> None:
        seen.append((await worker.progress()).get("sampling", ""))
        running = asyncio.ensure_future(worker.run())
        for at_s in (1.5, 2.5, 8.0, 9.0, 5 * LEASE_S):
            await asyncio.sleep(at_s - asyncio.get_running_loop().time())
            seen.append((await worker.progress()).get("sampling", ""))
        await end(running)

    virtual(main())
    nothing, first, second, scoring, still, after = seen
    assert (nothing, after) == ("", "")
    assert first != second  # tokens came
    assert scoring == still
    assert scoring.endswith("1 groups in flight, 1 of them wait for rewards")


def test_progress_of_an_install_is_the_engines_once_it_has_the_bytes() -> None:
    class Slow(Engine):
        async def install(self, publication: Publication) -> None:
            await asyncio.sleep(5.0)
            await super().install(publication)

    worker = make(Slow(), Source(0), weights=Weights())

    async def main() -> list[dict[str, str]]:
        installing = asyncio.ensure_future(worker.install(manifest(2), False))
        await asyncio.sleep(1.0)
        during = await worker.progress()
        await installing
        return [during, await worker.progress()]

    assert virtual(main()) == [{"weight install": "the engine installs version 2"}, {}]
