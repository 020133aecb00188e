"""Tokens of unfinished prompts: kept as they arrive, and continued elsewhere."""

from __future__ import annotations

import pytest

from echo_planes.config.schema import StalenessConfig
from echo_planes.data.replay.leases import ENOUGH_COMPLETIONS, RECENT_COMPLETIONS, LeaseTable
from echo_planes.data.replay.partial_rollouts import LeasePartials, Partials
from echo_planes.errors import LeaseError
from echo_planes.types import Lease, LeaseTokens, PartialRollout, Prompt, Sample, Span, is_whole, joined
from tests.unit.test_buffer import Buffer, answer, lease, make_buffer, submit

CONTEXT = (1, 2)
Piece = tuple[int, tuple[int, ...], Sample, int]  # call, context, tokens, where in the answer they begin


def piece(*tokens: int, version: int = 0, finish: str = "") -> Sample:
    spans = (Span(0, len(tokens), version, f"d{version}"),) if tokens else ()
    return Sample(tokens, (-0.5,) * len(tokens), spans, finish)  # type: ignore[arg-type]


def message(lease_id: str, *pieces: Piece) -> LeaseTokens:
    return LeaseTokens(
        lease_id, tuple((n, PartialRollout(context, p, first)) for n, context, p, first in pieces)
    )


def stream(buffer: Buffer, one: Lease, *pieces: Piece, now_s: float = 0.0) -> tuple[str, ...]:
    return buffer.stream(one.worker_id, one.epoch, [message(one.lease_id, *pieces)], now_s)


def second_worker(buffer: Buffer, version: int = 0) -> None:
    buffer.register("w1", 0)
    buffer.installed("w1", version)


def test_joined_pieces_are_the_sample_with_its_versions() -> None:
    whole = joined([piece(5, 6), piece(7, version=0), piece(8, 9, version=2, finish="stop")])
    assert whole.token_ids == (5, 6, 7, 8, 9)
    assert whole.spans == (Span(0, 3, 0, "d0"), Span(3, 5, 2, "d2"))
    assert whole.finish_reason == "stop"
    assert is_whole(whole)


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, CONTEXT, piece(5, finish="stop"), 0), (0, (), piece(6), 1)],  # goes on after its end
        [(0, CONTEXT, Sample((5, 6), (-0.5,), (Span(0, 2, 0, "d0"),), ""), 0)],  # a logprob is missing
        [(0, CONTEXT, Sample((5, 6), (-0.5, -0.5), (Span(0, 1, 0, "d0"),), ""), 0)],  # of no version
        [(-1, CONTEXT, piece(5), 0)],
    ],
)
def test_what_no_worker_can_have_sampled_is_refused(pieces: list[Piece]) -> None:
    with pytest.raises(LeaseError, match="malformed"):
        LeasePartials().add(message("l", *pieces))


@pytest.mark.parametrize(
    "pieces",
    [
        [(1, CONTEXT, piece(9), 0)],  # the call before it is not known
        [(0, CONTEXT, piece(9), 0)],  # a second time
        [(0, (), piece(7), 1)],
        [(0, (), piece(9), 3)],  # something before it is missing
        [(2, (), piece(9), 0)],  # its context did not come
    ],
)
def test_what_does_not_continue_what_is_there_is_left_out(pieces: list[Piece]) -> None:
    book = LeasePartials()
    if pieces[0][0] != 1:
        book.add(message("l", (0, CONTEXT, piece(5), 0), (0, (), piece(6), 1)))
    before = book.partials({0: "d0"})
    book.add(message("l", *pieces))
    assert book.partials({0: "d0"}) == before


@pytest.mark.parametrize("wrong", [(1, CONTEXT, piece(9), 1), (1, (), piece(9), 0)])
def test_a_next_call_begins_with_its_context_and_its_first_token(wrong: Piece) -> None:
    book = LeasePartials()
    book.add(message("l", (0, CONTEXT, piece(5), 0), wrong, (0, (), piece(6), 1)))
    assert [partial.sample.token_ids for partial in book.partials({0: "d0"})] == [(5, 6)]


def test_a_lease_without_tokens_costs_its_successor_the_prompt() -> None:
    buffer = make_buffer()
    (one,) = lease(buffer)
    partials = Partials({})
    partials.open(one)
    assert partials.prefill_tokens(one) == len(one.prompt.token_ids) > 0


@pytest.mark.parametrize("how", ["lost", "expired", "handed over", "replaced"])
def test_a_prompt_goes_on_elsewhere_from_its_tokens(how: str) -> None:
    buffer = make_buffer()
    second_worker(buffer)
    (one,) = lease(buffer)
    stream(buffer, one, (0, CONTEXT, piece(5, 6), 0), (1, CONTEXT, piece(7), 0))
    stream(buffer, one, (1, (), piece(8, finish="stop"), 1))
    now_s = 0.0
    if how == "lost":
        buffer.lose("w0")
    elif how == "expired":
        now_s = 100.0
    elif how == "replaced":
        buffer.register("w0", 1)
    else:
        assert buffer.hand_over("w0", 0, [message(one.lease_id, (0, (), piece(9), 2))], 0.0) == 1
    (again,) = lease(buffer, worker="w1", now_s=now_s)
    assert again.prompt == one.prompt
    kept = (5, 6, 9) if how == "handed over" else (5, 6)
    assert [partial.sample.token_ids for partial in again.partials] == [kept, (7, 8)]
    assert [partial.sample.finish_reason for partial in again.partials] == ["", "stop"]
    assert buffer.counts.continued == 1
    assert buffer.counts.continued_tokens == len(kept) + 2
    assert buffer.counts.discarded_tokens == 0
    # What the next one adds is added to what there was.
    stream(buffer, again, (0, (), piece(10), len(kept)), now_s=now_s)
    buffer.lose("w1")
    buffer.register("w0", 1)
    buffer.installed("w0", 0)
    (third,) = [buffer.lease("w0", 1, again.prompt, now_s) for _ in buffer.pull("w0", 1, 1, now_s)]
    assert third.partials[0].sample.token_ids == (*kept, 10)


def test_an_older_incarnation_or_another_worker_can_neither_stream_nor_hand_over() -> None:
    buffer = make_buffer()
    (one,) = lease(buffer)
    for worker, epoch in (("w0", 1), ("w1", 0)):
        tokens = [message(one.lease_id, (0, CONTEXT, piece(5), 0))]
        assert buffer.stream(worker, epoch, tokens, 0.0) == (one.lease_id,)  # give it up: it is not yours
        assert buffer.hand_over(worker, epoch, tokens, 0.0) == 0
    assert submit(buffer, one, answer(one)) == "accepted"


def test_a_lease_is_as_old_as_its_oldest_token_and_is_not_begun_where_that_is_too_old() -> None:
    buffer = make_buffer(max_staleness=1, policy="drop")
    second_worker(buffer)
    (one,) = lease(buffer)
    stream(buffer, one, (0, CONTEXT, piece(5), 0))
    buffer.lose("w0")
    buffer.publish(1, "d1")
    buffer.installed("w1", 1)
    (again,) = lease(buffer, worker="w1")
    assert again.version == 0
    assert again.partials
    for step in (0, 1):  # two batches later a token of version 0 cannot be trained any more
        for other in lease(buffer, 2, worker="w1"):
            submit(buffer, other, answer(other, (1, "d1")))
        assert isinstance(buffer.next_batch(step, 0.0), list)
    buffer.lose("w1")
    second_worker(buffer, 1)
    (fresh,) = lease(buffer, worker="w1")
    assert fresh.prompt == one.prompt
    assert fresh.partials == ()
    assert buffer.counts.discarded_tokens == 1


def test_tokens_of_an_unpublished_version_are_not_gone_on_from() -> None:
    buffer = make_buffer()
    second_worker(buffer)
    (one,) = lease(buffer)
    stream(buffer, one, (0, CONTEXT, piece(5), 0), (1, CONTEXT, piece(6, version=7), 0))
    buffer.lose("w0")
    (again,) = lease(buffer, worker="w1")
    assert [partial.sample.token_ids for partial in again.partials] == [(5,)]
    assert buffer.counts.discarded_tokens == 1


def test_a_recalled_lease_is_asked_back_when_its_worker_streams_next() -> None:
    buffer = make_buffer()
    one, two = lease(buffer, 2)
    assert buffer.recall("w0", 1) == [two.lease_id]
    assert stream(buffer, one, (0, CONTEXT, piece(5), 0)) == (two.lease_id,)  # it has no tokens yet
    assert buffer.stream("w0", 1, [], 0.0) == ()  # not of this incarnation
    assert buffer.recall("w0", 5) == [one.lease_id]
    assert buffer.hand_over("w0", 0, [message(two.lease_id)], 0.0) == 1
    assert stream(buffer, one) == (one.lease_id,)
    assert submit(buffer, one, answer(one)) == "accepted"  # it was finished meanwhile


def recalled(buffer: Buffer, count: int) -> list[str]:
    """Leases that a recall adds to those to be given up, by name."""
    before = set(buffer.stream("w0", 0, [], 0.0))
    found = buffer.recall("w0", count)
    added = sorted(set(buffer.stream("w0", 0, [], 0.0)) - before)
    assert sorted(found) == added
    return added


def test_what_is_recalled_is_what_costs_least_to_compute_again() -> None:
    buffer = make_buffer()
    long, short, done, between, fresh, newest = (one for one in lease(buffer, 6))
    stream(buffer, long, (0, CONTEXT, piece(*range(20)), 0))
    stream(buffer, short, (0, CONTEXT, piece(5), 0), (1, CONTEXT, piece(6), 0))  # two times three tokens
    # One sample is finished, and is answered at once wherever the other one goes on.
    stream(buffer, done, (0, CONTEXT, piece(*range(30), finish="stop"), 0), (1, CONTEXT, piece(7), 0))
    # Between two turns: what comes next begins with the longer call.
    turns = [(0, CONTEXT, piece(8, finish="stop"), 0), (1, (*CONTEXT, 8, 9), piece(4, 4, finish="stop"), 0)]
    stream(buffer, between, *turns)
    order = [newest, fresh, done, between, short, long]  # 1, 1, 3, 6, 6, 22 tokens: the newest among equals
    assert [recalled(buffer, 1) for _ in order] == [[one.lease_id] for one in order]
    assert recalled(buffer, 1) == []


def test_a_call_is_finished_where_its_last_piece_is() -> None:
    book = LeasePartials()
    assert book.prefill_tokens == 0
    book.add(message("l", (0, CONTEXT, piece(5), 0), (0, (), piece(6, finish="stop"), 1)))
    assert book.prefill_tokens == 4  # what comes next begins with all of it
    book.add(message("l", (1, CONTEXT, piece(7), 0)))
    assert book.prefill_tokens == 3  # that one alone is sampled on


def finish(buffer: Buffer, count: int) -> None:
    """So many groups of four tokens each."""
    for _ in range(count):
        (one,) = lease(buffer)
        assert submit(buffer, one, answer(one, (0, "d0"), (0, "d0"))) == "accepted"


def test_what_is_far_stays_with_its_worker_unless_all_is() -> None:
    buffer = make_buffer(max_staleness=30)
    finish(buffer, 16)
    far, half, one, two = lease(buffer, 4)
    stream(buffer, far, (0, CONTEXT, piece(5, 6, 7), 0))
    stream(buffer, half, (0, CONTEXT, piece(5, 6), 0))  # half of the median is not past it
    assert recalled(buffer, 4) == sorted(each.lease_id for each in (half, one, two))
    assert recalled(buffer, 4) == []  # while others are there, however often it is asked
    buffer.hand_over("w0", 0, [message(each.lease_id) for each in (half, one, two)], 0.0)
    assert recalled(buffer, 4) == [far.lease_id]


def test_nothing_is_far_before_enough_groups_are_finished() -> None:
    buffer = make_buffer(max_staleness=30)
    finish(buffer, 15)
    far, other = lease(buffer, 2)
    stream(buffer, far, (0, CONTEXT, piece(*range(50)), 0))
    assert recalled(buffer, 2) == sorted([far.lease_id, other.lease_id])


def test_far_is_past_half_of_the_median_of_the_recent_groups() -> None:
    shelf, one = Partials({}), Lease("l", "l", 0, "w0", Prompt(0, (1,)), 2, 0, 9.0)
    shelf.open(one)
    shelf.add(message("l", (0, CONTEXT, piece(5, 6, 7), 0)))
    for tokens in [4] * (ENOUGH_COMPLETIONS - 1):
        shelf.finished(tokens)
        assert not shelf.is_far(one)
    shelf.finished(1000)
    assert shelf.is_far(one)  # 3 tokens; half of the median is 2
    for _ in range(RECENT_COMPLETIONS):
        shelf.finished(6)
    assert not shelf.is_far(one)  # not past 3, and what was before no longer counts


def test_whoever_is_slow_to_begin_is_given_time_in_the_end() -> None:
    """Else a lone worker that takes 35 s to its first token would be leased the same prompt for ever."""
    book = LeaseTable(longest_s=60.0, shortest_s=10.0)
    book.register("w0", 0)
    prompt = Prompt(0, (1,))

    def issue(name: str, now_s: float) -> Lease:
        return book.issue(Lease(name, name, 0, "w0", prompt, 2, 0, now_s + book.lasts_s(0)), now_s)

    for i in range(ENOUGH_COMPLETIONS):
        issue(f"quick{i}", 0.0)
        book.close(f"quick{i}", "w0", 0, 1.0)
    lasted_s = []
    now_s = 1000.0
    for name in ("first", "second", "third", "fourth"):
        lasted_s.append(issue(name, now_s).expires_s - now_s)
        now_s += lasted_s[-1]
        if lasted_s[-1] <= 35.0:
            assert [lease.lease_id for lease in book.expire(now_s)] == [name]
            continue
        book.renew("w0", 0, [name], now_s - 1.0)  # from its tokens on, it lasts as long as any other
        assert book.holds(name, "w0", 0, now_s + 8.9)
        assert not book.holds(name, "w0", 0, now_s + 9.1)
        book.close(name, "w0", 0, now_s)
        break
    assert lasted_s == [10.0, 20.0, 40.0]
    assert issue("again", now_s).expires_s == now_s + 10.0  # once handed in, it is a prompt like others


def test_the_buffer_leases_a_prompt_for_longer_each_time_it_expired() -> None:
    staleness = StalenessConfig(max_staleness=30, queue_batches=100.0)
    buffer = Buffer(
        staleness,
        groups_per_step=2,
        samples_per_prompt=2,
        lease_s=60.0,
        shortest_lease_s=10.0,
        lineage="L0",
        seed=0,
    )
    buffer.publish(0, "d0")
    buffer.register("w0", 0)
    buffer.installed("w0", 0)
    finish(buffer, ENOUGH_COMPLETIONS)
    now_s, prompts, lasted_s = 0.0, set(), []
    for _ in range(5):
        (one,) = lease(buffer, now_s=now_s)
        prompts.add(one.prompt.index)
        lasted_s.append(one.expires_s - now_s)
        now_s = one.expires_s
        assert buffer.expire(now_s) == 1
    assert prompts == {ENOUGH_COMPLETIONS}
    assert lasted_s == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_no_lease_is_longer_than_the_longest() -> None:
    book = LeaseTable(longest_s=60.0, shortest_s=10.0)
    book.register("w0", 0)
    now_s = 0.0
    for i in range(2000):
        ends_s = now_s + book.lasts_s(0)
        lease = book.issue(Lease(f"l{i}", f"l{i}", 0, "w0", Prompt(0, (1,)), 2, 0, ends_s), now_s)
        assert lease.expires_s == now_s + 60.0
        now_s = lease.expires_s
        assert book.expire(now_s)


def test_leases_follow_the_median_completion_between_their_bounds() -> None:
    book = LeaseTable(longest_s=60.0, shortest_s=10.0)
    book.register("w0", 0)
    lengths = []
    for i, took_s in enumerate([1.0] * 30 + [8.0] * 100 + [100.0] * 100):
        now_s = 1000.0 * i
        ends_s = now_s + book.lasts_s(i)
        one = book.issue(Lease(f"l{i}", f"l{i}", 0, "w0", Prompt(i, (1,)), 2, 0, ends_s), now_s)
        lengths.append(one.expires_s - now_s)
        while not book.holds(one.lease_id, "w0", 0, now_s + took_s):  # tokens arrive
            took_s -= 5.0
            now_s += 5.0
            book.renew("w0", 0, [one.lease_id], now_s)
        book.close(one.lease_id, "w0", 0, now_s + took_s)
    assert lengths[0] == 60.0  # nothing is known yet
    assert lengths[29] == 10.0
    assert lengths[129] == 20.0
    assert lengths[-1] == 60.0
