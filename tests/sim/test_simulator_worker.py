"""A simulated worker's leases, tokens and versions, against the real books of partial rollouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.data.replay.partial_rollouts import LeasePartials
from echo_planes.sim.lengths import LengthModel
from echo_planes.sim.scenario import InstanceTypeModel, SamplingModel
from echo_planes.sim.worker import Answers, SimWorker
from echo_planes.types import Lease, PartialRollout, Prompt

N = 4
PUBLISHED = {version: Answers("sim").digest(version) for version in range(20)}
LENGTHS = LengthModel(0, num_samples=N, median_tokens=100.0, sigma=0.7, max_tokens=1000)


def worker(name: str, now_s: float = 0.0) -> SimWorker:
    instance_type = InstanceTypeModel(
        name="gpu", count=1, peak_tokens_per_s=100.0, half_batch=2.0, max_groups=4
    )
    return SimWorker(name, 0, instance_type, lengths=LENGTHS, answers=Answers("sim"), now_s=now_s)


def lease(name: str, index: int = 7, partials: tuple[PartialRollout, ...] = ()) -> Lease:
    return Lease(name, name, 0, "a", Prompt(index, (index,)), N, 0, 1e9, partials)


def handed_on(book: LeasePartials, name: str) -> Lease:
    """The lease that the next worker gets."""
    return lease(name, partials=book.partials(PUBLISHED))


def finish(one: SimWorker) -> None:
    one.engine.advance(one.engine.next_end_s())


def test_versions_of_an_answer_are_those_that_served_while_it_was_made() -> None:
    one = worker("a")
    one.serve(0)
    one.begin(lease("l0"), {})
    shortest, longest = min(LENGTHS.tokens(7)), max(LENGTHS.tokens(7))
    while one.engine.mark < (shortest + longest) / 2:
        one.engine.advance(one.engine._now_s + 0.01)
    one.serve(1)
    finish(one)
    (work,) = one.take_ended()
    group = one.group(work, SamplingModel(accuracy=0.5))
    for length, trajectory in zip(LENGTHS.tokens(7), group.trajectories, strict=True):
        spans = [span.version for span in trajectory.episode.spans]
        assert spans == ([0, 1] if length > (shortest + longest) / 2 else [0])
    assert group.version == 0
    assert sum(t.reward.correct for t in group.trajectories) == 2
    assert work.made == sum(LENGTHS.tokens(7))


def test_what_was_sent_goes_on_elsewhere_and_is_paid_once() -> None:
    first, second = worker("a"), worker("b")
    first.serve(3)
    first.begin(lease("l0"), {})
    first.engine.advance(2.0)
    book = LeasePartials()
    work = first.work["l0"]
    book.add(first.unsent(work))
    assert first.unsent(work).pieces == ()
    first.engine.advance(3.0)
    first.serve(4)
    first.engine.advance(5.0)
    message = first.unsent(work)
    book.add(message)
    longest = max(message.pieces, key=lambda piece: len(piece[1].sample.token_ids))[1].sample
    assert [span.version for span in longest.spans] == [3, 4]
    assert longest.spans[0].stop == pytest.approx(len(longest.token_ids) / 3, abs=2)
    gone = first.drop("l0")
    assert gone.made == gone.num_sent == gone.paid["a"] == book.num_tokens
    second.serve(5)
    second.begin(handed_on(book, "l1"), dict(gone.paid))
    finish(second)
    (done,) = second.take_ended()
    assert done.made + gone.made == sum(LENGTHS.tokens(7))
    oldest = {
        t.episode.spans[0].version for t in second.group(done, SamplingModel(accuracy=1.0)).trajectories
    }
    assert oldest == {3}
    newest = {
        t.episode.spans[-1].version for t in second.group(done, SamplingModel(accuracy=1.0)).trajectories
    }
    assert newest <= {3, 4, 5}
    assert 5 in newest


@settings(deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.floats(0.01, 3.0), st.sampled_from(["version", "send", "hand over"])), max_size=12
    )
)
def test_however_often_it_moves_no_token_is_missing_or_made_twice(moves: list[tuple[float, str]]) -> None:
    """The real book of partial rollouts takes every message, and the lengths come out at the end."""
    now_s, version, made, epoch = 0.0, 0, 0, 0
    one, book = worker("w0"), LeasePartials()
    one.serve(version)
    one.begin(lease("l0"), {})
    key = "l0"
    for delay_s, move in moves:
        if one.engine.next_end_s() <= now_s + delay_s:
            break
        now_s += delay_s
        one.engine.advance(now_s)
        version += move == "version"
        if move == "version":
            one.serve(version)
        elif move == "send":
            book.add(one.unsent(one.work[key]))
        else:
            book.add(one.unsent(one.work[key]))
            gone = one.drop(key)
            made += gone.made
            assert gone.made == gone.num_sent
            partials = book.partials(PUBLISHED)
            epoch += 1
            key, one, book = f"l{epoch}", worker(f"w{epoch}", now_s), LeasePartials(partials)
            one.serve(version)
            one.begin(lease(key, partials=partials), dict(gone.paid))
    finish(one)
    (work,) = one.take_ended()
    assert made + work.made == sum(LENGTHS.tokens(7))
    for trajectory in one.group(work, SamplingModel(accuracy=1.0)).trajectories:
        versions = [span.version for span in trajectory.episode.spans]
        assert all(a <= b for a, b in pairwise(versions))
        assert versions[-1] <= version
        assert all(span.digest == PUBLISHED[span.version] for span in trajectory.episode.spans)


def test_a_partial_that_was_complete_is_not_made_again() -> None:
    first, second = worker("a"), worker("b")
    first.serve(0)
    first.begin(lease("l0"), {})
    while first.engine.mark < min(LENGTHS.tokens(7)) + 1:
        first.engine.advance(first.engine._now_s + 0.05)
    book = LeasePartials()
    book.add(first.unsent(first.work["l0"]))
    partials = book.partials(PUBLISHED)
    assert [partial.sample.finish_reason for partial in partials].count("stop") == 1
    second.serve(1)
    second.begin(replace(lease("l1"), partials=partials), {})
    finish(second)
    (work,) = second.take_ended()
    versions = [
        [s.version for s in t.episode.spans]
        for t in second.group(work, SamplingModel(accuracy=1.0)).trajectories
    ]
    assert versions.count([0]) == 1
    assert versions.count([0, 1]) == N - 1
    assert work.made == pytest.approx(sum(LENGTHS.tokens(7)) - book.num_tokens)
