"""Requests of a group's samples to the engine, and continuation of calls that another worker had begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any

import pytest

from echo_planes.data.replay.partial_rollouts import LeasePartials
from echo_planes.data.tasks.adapter import EpisodeBuilder, Policy, TaskAdapter, TaskOptions
from echo_planes.errors import RunError, WorkerGoneError
from echo_planes.rollout.episodes import Player
from echo_planes.rollout.group_policy import GroupPolicy
from echo_planes.rollout.work import Work
from echo_planes.testing.fakes import FakeTask, FakeTokenizer, InlineScorer
from echo_planes.testing.virtual_time import run_virtual
from echo_planes.types import Draw, Episode, Group, Lease, PartialRollout, Prompt, Sample, Span, joined
from tests.unit.stub_engine import StubEngine

LONGEST = 9  # tokens of one call
CONTEXT = (1, 2)


class Engine(StubEngine):
    """A token per second for every sample, each a new one; answers are `length` tokens long."""

    new_tokens = count(1000)  # no two are equal: equal words can only be kept ones

    def __init__(self, *, length: int = 4, version: int = 0, limit: int = LONGEST) -> None:
        super().__init__(version)
        self.length = length
        self.limit = limit
        self.refuses: tuple[int, ...] = ()  # contexts that end with these tokens, after a second
        self.sampled = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        max_new_tokens: int,
        on_tokens: Callable[[int, Sample], None],
        draw: Draw | None = None,
    ) -> list[Sample]:
        context = tuple(prompt_ids)
        done = self.limit - max_new_tokens
        pieces: list[list[Sample]] = [[] for _ in range(num_samples)]
        with self.request(context, num_samples, max_new_tokens):
            for position in range(done, min(self.length, self.limit)):
                await asyncio.sleep(1.0)
                if self.refuses and context[-len(self.refuses) :] == self.refuses:
                    raise ValueError("prompt too long")
                ends = position + 1 == min(self.length, self.limit)
                for i in range(num_samples):
                    span = Span(0, 1, self.version, self.digest)
                    reason = "stop" if ends and self.length <= self.limit else "length" if ends else ""
                    piece = Sample((next(self.new_tokens),), (-0.5,), (span,), reason)  # type: ignore[arg-type]
                    pieces[i].append(piece)
                    self.sampled += 1
                    on_tokens(i, piece)
        return [joined(sample) for sample in pieces]


def partial(context: tuple[int, ...], *tokens: int, finish: str = "", version: int = 0) -> PartialRollout:
    spans = (Span(0, len(tokens), version, f"d{version}"),)
    return PartialRollout(context, Sample(tokens, (-0.7,) * len(tokens), spans, finish))  # type: ignore[arg-type]


class Streamed:
    """Group's calls as the data plane has them: messages as a worker sends them, in real `LeasePartials`."""

    def __init__(self, partials: Sequence[PartialRollout] = ()) -> None:
        self.work = Work(Lease("l0", "g0", 0, "w0", Prompt(0, CONTEXT), 3, 0, 0.0, tuple(partials)))
        self.book = LeasePartials(tuple(partials))
        self.numbers: set[int] = set()

    def on_piece(self, number: int, context: tuple[int, ...], piece: Sample) -> None:
        self.work.add(number, context, piece)
        self.numbers.add(number)
        if number % 2:  # some at once, others with the next message
            self.book.add(self.work.take_tokens())

    def partials(self) -> tuple[PartialRollout, ...]:
        self.book.add(self.work.take_tokens())
        return self.book.partials({version: f"d{version}" for version in range(10)})

    def whole(self) -> list[PartialRollout]:
        return [one for one in self.partials() if one.sample.finish_reason]


def run(play: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, float]:
    """Run it; return its result, and the seconds of virtual time that it took."""

    async def main() -> tuple[Any, float]:
        result = await play()
        await asyncio.sleep(0)
        return result, asyncio.get_running_loop().time()

    return run_virtual(lambda _: main())


def ask(
    engine: Engine, contexts: Sequence[tuple[int, ...]], partials: Sequence[PartialRollout] = ()
) -> tuple[list[Any], Streamed, float]:
    """All contexts at once, as the samples of a group do. Errors stand in the place of answers."""
    streamed = Streamed(partials)

    async def play() -> list[Any]:
        policy = GroupPolicy(engine, LONGEST, streamed.on_piece, partials)
        return await asyncio.gather(*(policy.generate(c) for c in contexts), return_exceptions=True)

    answers, seconds = run(play)
    return answers, streamed, seconds


def test_what_is_streamed_is_what_was_answered() -> None:
    answers, streamed, _ = ask(Engine(), [CONTEXT, (3,), CONTEXT, CONTEXT])
    assert sorted((one.context, one.sample.token_ids) for one in streamed.whole()) == sorted(
        zip([CONTEXT, (3,), CONTEXT, CONTEXT], [answer.token_ids for answer in answers], strict=True)
    )
    assert streamed.numbers == {0, 1, 2, 3}


def test_a_finished_partial_is_answered_at_once_as_it_was() -> None:
    engine, whole = Engine(), partial(CONTEXT, 5, 6, finish="stop")
    (answer,), streamed, seconds = ask(engine, [CONTEXT], [whole])
    assert answer == whole.sample
    assert (engine.requests, seconds) == ([], 0.0)
    assert streamed.partials() == (whole,)


def test_half_a_partial_goes_on_with_one_prefill_and_what_is_left_of_its_length() -> None:
    engine, half = Engine(version=2), partial(CONTEXT, 5, 6, version=1)
    (answer,), streamed, seconds = ask(engine, [CONTEXT], [half])
    assert engine.requests == [((*CONTEXT, 5, 6), 1, LONGEST - 2)]
    assert answer.token_ids[:2] == (5, 6)
    assert answer.logprobs == (-0.7, -0.7, -0.5, -0.5)
    assert answer.spans == (Span(0, 2, 1, "d1"), Span(2, 4, 2, "d2"))
    assert (answer.finish_reason, seconds) == ("stop", 2.0)
    assert streamed.partials() == (PartialRollout(CONTEXT, answer),)
    assert streamed.numbers == {0}


def test_a_partial_longer_than_a_call_may_be_now_is_begun_anew() -> None:
    engine = Engine()
    too_long, whole = partial(CONTEXT, *range(5, 5 + LONGEST)), partial(CONTEXT, *range(12), finish="stop")
    answers, _, _ = ask(engine, [CONTEXT, CONTEXT], [too_long, whole])
    assert engine.requests == [(CONTEXT, 1, LONGEST)]
    assert whole.sample in answers  # it was finished when more was allowed


def test_an_answer_of_two_workers_is_no_longer_than_one_of_one() -> None:
    engine = Engine(length=100)
    (answer,), _, _ = ask(engine, [CONTEXT], [partial(CONTEXT, *range(5, 5 + LONGEST - 1))])
    assert len(answer.token_ids) == LONGEST
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("num_half", [0, 1, 2])
@pytest.mark.parametrize("num_whole", [0, 1, 2])
def test_samples_with_equal_contexts_take_the_partials_and_the_rest_is_one_request(
    num_half: int, num_whole: int
) -> None:
    half = [partial(CONTEXT, 10 * i, 5) for i in range(num_half)]
    whole = [partial(CONTEXT, 10 * i, 6, 7, finish="stop") for i in range(num_whole)]
    engine = Engine()
    answers, streamed, _ = ask(engine, [CONTEXT] * 5, [*half, *whole])
    begun = 5 - num_half - num_whole
    assert sorted(engine.requests) == sorted(
        [((*CONTEXT, *one.sample.token_ids), 1, LONGEST - 2) for one in half] + [(CONTEXT, begun, LONGEST)]
    )
    assert len({answer.token_ids for answer in answers}) == 5
    assert [answer for answer in answers if answer in [one.sample for one in whole]] == [
        one.sample for one in whole
    ]
    for one in half:
        assert [a.token_ids[:2] for a in answers].count(one.sample.token_ids) == 1
    assert sorted(one.sample.token_ids for one in streamed.whole()) == sorted(a.token_ids for a in answers)
    assert streamed.numbers == {*range(num_half), *range(num_half + num_whole, 5)}


def test_partials_that_are_more_than_those_who_ask_wait_for_the_next_call() -> None:
    engine, partials = Engine(), [partial(CONTEXT, i, finish="stop") for i in (5, 6)]

    async def play() -> list[Sample]:
        policy = GroupPolicy(engine, LONGEST, Streamed(partials).on_piece, partials)
        return [await policy.generate(CONTEXT) for _ in range(3)]

    first, second, third = run(play)[0]
    assert (first.token_ids, second.token_ids) == ((5,), (6,))
    assert engine.requests == [(CONTEXT, 1, LONGEST)]
    assert third.token_ids[0] >= 1000


def test_a_partial_that_is_never_asked_for_is_harmless() -> None:
    engine, other = Engine(), partial((8, 8), 5, 6)
    (answer,), streamed, _ = ask(engine, [CONTEXT], [other])
    assert engine.requests == [(CONTEXT, 1, LONGEST)]
    assert streamed.partials() == (other, PartialRollout(CONTEXT, answer))  # and its number stays its own


# --- failures and ends ---------------------------------------------------------------------------


def test_one_continuation_that_fails_fails_all_who_asked_for_it_and_nobody_else() -> None:
    engine = Engine(length=6)
    engine.refuses = (5, 6)
    partials = [partial(CONTEXT, 5, 6), partial(CONTEXT, 7, 8), partial((3,), 9)]
    streamed = Streamed(partials)

    async def play() -> list[Any]:
        policy = GroupPolicy(engine, LONGEST, streamed.on_piece, partials)
        asked = [asyncio.ensure_future(policy.generate(c)) for c in (CONTEXT, CONTEXT, CONTEXT, (3,))]
        await asyncio.wait(asked[:3])
        await asyncio.sleep(0)
        assert engine.open == 1  # of the failed ones none is left
        return await asyncio.gather(*asked, return_exceptions=True)

    *failed, other = run(play)[0]
    assert [str(why) for why in failed] == ["prompt too long"] * 3
    assert other.token_ids[0] == 9
    assert len(other.token_ids) == 6
    assert engine.open == 0


@pytest.mark.parametrize("passes", range(4))
@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_a_group_that_is_over_leaves_nothing_running(seconds: float, passes: int) -> None:
    engine = Engine(length=50, limit=LONGEST)
    partials = [partial(CONTEXT, 5, 6), partial(CONTEXT, 7)]

    async def play() -> None:
        policy = GroupPolicy(engine, LONGEST, Streamed(partials).on_piece, partials)
        asked = [asyncio.ensure_future(policy.generate(CONTEXT)) for _ in range(3)]
        await asyncio.sleep(seconds)
        for _ in range(passes):
            await asyncio.sleep(0)
        for one in asked:
            one.cancel()
        policy.close()
        await asyncio.wait(asked)
        for _ in range(5):  # passes of the event loop, for the requests to end
            await asyncio.sleep(0)
        assert engine.open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(play)


def test_a_sample_that_gives_up_leaves_the_continuations_to_the_others() -> None:
    engine, partials = Engine(), [partial(CONTEXT, 5), partial(CONTEXT, 6)]

    async def play() -> Sample:
        policy = GroupPolicy(engine, LONGEST, Streamed(partials).on_piece, partials)
        first, second = (asyncio.ensure_future(policy.generate(CONTEXT)) for _ in range(2))
        await asyncio.sleep(1.5)
        first.cancel()
        return await second

    answer, _ = run(play)
    assert answer.token_ids[0] == 6


# --- whole groups --------------------------------------------------------------------------------


class ThreeTurns(FakeTask):
    """Answers, is told '!', answers again, and once more."""

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        builder = EpisodeBuilder()
        for turn in range(3):
            if turn:
                builder.add_environment([ord("!")])
            builder.add_sample(await policy.generate(prompt.token_ids + builder.response_ids))
        return builder.build(self.tokenizer)


def play_group(
    task: TaskAdapter, engine: Engine, streamed: Streamed, partials: Sequence[PartialRollout], limit_s: float
) -> Group | None:
    """A group of three on one worker; None where it was cut off after `limit_s`."""
    player = Player("w0", "L0", engine, task, InlineScorer(task), LONGEST)

    async def play() -> Group | None:
        playing = player.group("g0", task.prompt(7), 3, streamed.on_piece, lambda: None, partials)
        try:
            async with asyncio.timeout(limit_s):
                return await playing
        except TimeoutError:
            return None

    group: Group | None = run(play)[0]
    assert engine.open == 0
    return group


@pytest.mark.parametrize("cut_s", [0.5, 1.5, 3.5, 4.5, 6.5, 8.5, 10.5, 11.5])
def test_an_episode_of_several_turns_is_replayed_word_for_word(cut_s: float) -> None:
    task = ThreeTurns(TaskOptions(), FakeTokenizer(), 0)
    partials: tuple[PartialRollout, ...] = ()
    kept = 0
    for worker, limit_s in enumerate([cut_s, 2.5, 100.0]):
        engine, streamed = Engine(version=worker), Streamed(partials)
        group = play_group(task, engine, streamed, partials, limit_s)
        before, partials = partials, streamed.partials()
        kept += engine.sampled
        assert sum(len(one.sample.token_ids) for one in partials) == kept  # nothing twice, nothing lost
        for old, new in zip(before, partials, strict=False):
            assert old.context == new.context
            assert new.sample.token_ids[: len(old.sample.token_ids)] == old.sample.token_ids
        if group is not None:
            break
    assert group is not None
    assert kept == 3 * 3 * 4
    words = {token for one in partials for token in one.sample.token_ids}
    for trajectory in group.trajectories:
        episode = trajectory.episode
        assert trajectory.status == "ok"
        assert episode.num_turns == 3
        sampled = [t for t, own in zip(episode.response_ids, episode.response_mask, strict=True) if own]
        assert len(sampled) == 3 * 4
        assert words.issuperset(sampled)
        words.difference_update(sampled)
        assert [span.version for span in episode.spans] == sorted(span.version for span in episode.spans)
    assert not words


def test_an_engine_that_died_in_a_continuation_ends_the_worker() -> None:
    class Dies(Engine):
        async def generate(self, prompt_ids: Sequence[int], **settings: Any) -> list[Sample]:
            await asyncio.sleep(1.0)
            raise RunError("the engine hangs")

    task = FakeTask(TaskOptions(), FakeTokenizer(), 0)
    partials = [partial(task.prompt(7).token_ids, 5)]
    with pytest.raises(RunError, match="the engine hangs"):
        play_group(task, Dies(), Streamed(partials), partials, 100.0)


@pytest.mark.parametrize("more", [-1, 1])
def test_an_engine_that_answers_for_too_few_or_too_many_ends_the_worker(more: int) -> None:
    """Else those that it left out would wait until their lease ends."""

    class Miscounts(Engine):
        async def generate(self, prompt_ids: Sequence[int], **settings: Any) -> list[Sample]:
            answers = await super().generate(prompt_ids, **settings)
            return answers[1:] if more < 0 else [*answers, answers[0]]

    task = FakeTask(TaskOptions(), FakeTokenizer(), 0)
    with pytest.raises(WorkerGoneError, match="samples where"):
        play_group(task, Miscounts(), Streamed([]), [], 100.0)
