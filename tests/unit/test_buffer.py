"""The replay buffer's core: admission, leases, ledger, cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_planes.config.schema import Config, ReplayConfig, StalenessConfig
from echo_planes.data.replay.buffer import ReplayBuffer
from echo_planes.data.replay.buffer_state import Accepted, NotReady
from echo_planes.data.replay.refill import Refill
from echo_planes.data.store.index import Fate, GroupIndex
from echo_planes.data.store.segment import GROUP_ENTRY
from echo_planes.data.store.sidecar import MESSAGE_ENTRY
from echo_planes.errors import LeaseError
from echo_planes.types import (
    Episode,
    Group,
    IntArray,
    Lease,
    LeaseTokens,
    PartialRollout,
    Prompt,
    Receipt,
    Reward,
    Sample,
    Span,
    Trajectory,
)

R = 2  # groups per step
N = 2  # samples per group


class Buffer(ReplayBuffer):
    """A buffer and what its shell does, on an index in memory: groups are entered, then settled."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.index = settings.setdefault("index", GroupIndex())
        settings.setdefault("shortest_lease_s", settings["lease_s"])
        super().__init__(*arguments, **settings)

    def submit(self, *arguments: Any) -> Receipt:
        receipt = super().submit(*arguments)
        group = arguments[3]
        if receipt.accepted:
            enter(self.index, group)
            self.settle_dropped()
            set_aside = sequences(self.index, self.take_uninformative())
            self.index.settle(set_aside, Fate.UNINFORMATIVE, self.step)
        return receipt

    def next_batch(self, step: int, now_s: float, *, whole: bool = False) -> list[Accepted] | NotReady:
        batch = super().next_batch(step, now_s, whole=whole)
        self.settle_dropped()
        if isinstance(batch, list):
            self.index.settle(sequences(self.index, batch), Fate.TRAINED, step)
        return batch

    def settle_dropped(self) -> None:
        self.index.settle(sequences(self.index, self.take_dropped()), Fate.DROPPED, -1)


def sequences(index: GroupIndex, groups: list[Accepted]) -> IntArray:
    return np.array([index.ids.sequence(group.group_id) for group in groups], np.int64)


def enter(index: GroupIndex, group: Group) -> None:
    rewards = [t.reward.value for t in group.trajectories]
    entry = (group.version, sum(rewards) / len(rewards), 0.0, len(rewards), 0, len(group.group_id), 0)
    message = (0, 0, index.groups.length, 1)
    index.add_new(0, np.array([message], MESSAGE_ENTRY), np.array([entry], GROUP_ENTRY), [group.group_id])


def make_buffer(max_staleness: int = 3, refill: Refill | None = None, **settings: Any) -> Buffer:
    staleness = StalenessConfig(max_staleness=max_staleness, **{"queue_batches": 100.0, **settings})
    buffer = Buffer(
        staleness,
        groups_per_step=R,
        samples_per_prompt=N,
        lease_s=10.0,
        lineage="L0",
        seed=0,
        refill=refill,
    )
    buffer.publish(0, "d0")
    buffer.register("w0", 0)
    buffer.installed("w0", 0)
    return buffer


def lease(buffer: ReplayBuffer, count: int = 1, *, worker: str = "w0", now_s: float = 0.0) -> list[Lease]:
    indices = buffer.pull(worker, 0, count, now_s)
    return [buffer.lease(worker, 0, Prompt(i, (i,)), now_s) for i in indices]


def answer(
    lease: Lease, *spans: tuple[int, str], status: str = "ok", rewards: Sequence[float] = (1.0,)
) -> Group:
    """A finished group whose samples have one token per span, and in turn these rewards; 1 is right."""
    spans = spans or ((lease.version, f"d{lease.version}"),)
    episode = Episode(
        response_ids=tuple(range(len(spans))),
        response_mask=(True,) * len(spans),
        logprobs=(-1.0,) * len(spans),
        spans=tuple(Span(i, i + 1, v, d) for i, (v, d) in enumerate(spans)),
        finish_reason="stop",
    )
    return Group(
        lease.group_id,
        tuple(
            Trajectory(
                trajectory_id=f"{lease.group_id}/{i}",
                group_id=lease.group_id,
                prompt=lease.prompt,
                episode=episode,
                reward=Reward(rewards[i % len(rewards)], rewards[i % len(rewards)] == 1.0),
                worker_id=lease.worker_id,
                lineage="L0",
                status=status,  # type: ignore[arg-type]
                error="it broke" if status != "ok" else "",
            )
            for i in range(lease.num_samples)
        ),
    )


def tokens(lease: Lease) -> LeaseTokens:
    """One new token of a lease, with the context of its call."""
    span = Span(0, 1, lease.version, f"d{lease.version}")
    piece = PartialRollout(lease.prompt.token_ids, Sample((1,), (-1.0,), (span,), ""))
    return LeaseTokens(lease.lease_id, ((0, piece),))


def submit(buffer: ReplayBuffer, lease: Lease, group: Group, *, epoch: int = 0, now_s: float = 0.0) -> str:
    receipt = buffer.submit(lease.worker_id, epoch, lease.lease_id, group, now_s)
    return "accepted" if receipt.accepted else receipt.reason


def form(buffer: ReplayBuffer) -> list[Accepted]:
    for one in lease(buffer, R):
        assert submit(buffer, one, answer(one)) == "accepted"
    batch = buffer.next_batch(buffer.step, 0.0)
    assert isinstance(batch, list)
    return batch


def test_a_batch_is_whole_groups_and_moves_t() -> None:
    buffer = make_buffer()
    first, second = lease(buffer, 2)
    assert submit(buffer, first, answer(first)) == "accepted"
    assert isinstance(buffer.next_batch(0, 0.0), NotReady)
    assert submit(buffer, second, answer(second)) == "accepted"
    batch = buffer.next_batch(0, 0.0)
    assert isinstance(batch, list)
    assert [g.group_id for g in batch] == [first.group_id, second.group_id]
    assert buffer.step == 1
    assert buffer.counts.trained == R * N


def test_no_permits_before_the_first_install() -> None:
    buffer = make_buffer()
    buffer.register("w1", 0)
    assert lease(buffer, 5, worker="w1") == []


def test_a_parked_worker_is_leased_nothing_and_takes_no_share() -> None:
    buffer = make_buffer()
    alone = len(buffer.pull("w0", 0, 99, 0.0))
    buffer = make_buffer()
    buffer.park("w1", True)  # before it is there
    buffer.lose("w1")  # as before every start
    buffer.register("w1", 0)
    buffer.installed("w1", 0)
    assert buffer.pull("w1", 0, 99, 0.0) == []
    assert len(buffer.pull("w0", 0, 99, 0.0)) == alone
    buffer = make_buffer()
    buffer.park("w1", True)
    buffer.register("w1", 0)
    buffer.installed("w1", 0)
    buffer.lose("w0")
    found = buffer.next_batch(0, 0.0)
    assert isinstance(found, NotReady)
    assert found.reason == "starved"  # nobody who may answer serves
    buffer.park("w1", False)
    assert len(buffer.pull("w1", 0, 99, 0.0)) == alone


def test_who_is_parked_while_it_works_keeps_what_it_has() -> None:
    buffer = make_buffer()
    (held,) = lease(buffer)
    buffer.park("w0", True)
    assert buffer.pull("w0", 0, 1, 0.0) == []
    assert submit(buffer, held, answer(held, (0, "d0"))) == "accepted"
    buffer.lose("w0")
    buffer.register("w0", 1)  # a lost one is parked no longer
    buffer.installed("w0", 0)
    assert buffer.pull("w0", 1, 1, 0.0)


def test_permits_are_whole_groups_and_come_back() -> None:
    buffer = make_buffer(max_staleness=0)
    leases = lease(buffer, 10)
    assert len(leases) == R  # (p + S - t + 1) R with p = t, S = 0
    assert lease(buffer, 10) == []
    assert buffer.expire(now_s=11.0) == R
    again = lease(buffer, 10, now_s=11.0)
    assert [one.prompt.index for one in again] == [one.prompt.index for one in leases]


def test_the_oldest_span_counts() -> None:
    buffer = make_buffer(max_staleness=1)
    (old,) = lease(buffer, 1)
    form(buffer)
    buffer.publish(1, "d1")
    buffer.installed("w0", 1)
    assert submit(buffer, old, answer(old, (0, "d0"), (1, "d1"))) == "accepted"
    form(buffer)  # t = 1: version 0 is admissible for the last time, so the spanning group went
    assert buffer.step == 2
    assert buffer.counts.dropped_stale == 0


def test_stale_groups_are_dropped_counted_and_their_prompts_go_out_again() -> None:
    buffer = make_buffer(max_staleness=0, policy="drop", publish_every=1)
    (old,) = lease(buffer, 1)
    buffer.lose("w0")
    buffer.register("w0", 1)
    buffer.installed("w0", 0)
    receipt = buffer.submit("w0", 0, old.lease_id, answer(old), 0.0)
    assert not receipt.accepted
    assert receipt.reason == "unknown"  # the lease ended with the worker
    indices = buffer.pull("w0", 1, 1, 0.0)
    assert indices == [old.prompt.index]


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        (((0, "forged"),), "unpublished"),
        (((7, "d7"),), "unpublished"),
        (((0, "d0"), (1, "d1")), "unpublished"),
    ],
)
def test_every_span_must_be_published(spans: tuple[tuple[int, str], ...], reason: str) -> None:
    buffer = make_buffer()
    (one,) = lease(buffer)
    assert submit(buffer, one, answer(one, *spans)) == reason
    assert buffer.counts.accepted == 0


def test_an_absent_field_is_a_refusal() -> None:
    buffer = make_buffer()
    leases = lease(buffer, 3)
    no_spans = answer(leases[0])
    bare = replace(no_spans.trajectories[0].episode, spans=())
    stripped = Group(no_spans.group_id, tuple(replace(t, episode=bare) for t in no_spans.trajectories))
    assert submit(buffer, leases[0], stripped) == "unspanned"
    partial = answer(leases[1])
    assert submit(buffer, leases[1], Group(partial.group_id, partial.trajectories[:1])) == "incomplete"
    other = replace(answer(leases[2]).trajectories[0], prompt=Prompt(99, (99,)))
    assert submit(buffer, leases[2], Group(leases[2].group_id, (other, other))) == "mismatched"


def test_a_result_is_taken_once_and_only_from_the_current_incarnation() -> None:
    buffer = make_buffer()
    first, second = lease(buffer, 2)
    assert submit(buffer, first, answer(first)) == "accepted"
    assert submit(buffer, first, answer(first)) == "duplicate"
    assert submit(buffer, second, answer(second), epoch=1) == "fenced"
    assert submit(buffer, second, answer(second), now_s=10.0) == "expired"
    assert buffer.counts.accepted == N


def test_a_worker_that_is_taken_for_lost_is_refused_until_it_registers_anew() -> None:
    buffer = make_buffer()
    (one,) = lease(buffer)
    assert buffer.lose("w0") == 1
    with pytest.raises(LeaseError, match="w0 epoch 0 is fenced"):
        buffer.pull("w0", 0, 1, 0.0)
    buffer.installed("w0", 0)  # it lives, and goes on as if nothing had been
    with pytest.raises(LeaseError, match="w0 epoch 0 is fenced"):
        buffer.pull("w0", 0, 1, 0.0)
    assert buffer.stream("w0", 0, [LeaseTokens(one.lease_id, ())], 0.0) == (one.lease_id,)
    assert submit(buffer, one, answer(one)) == "unknown"
    assert buffer.counts.accepted == 0
    buffer.register("w0", 1)
    buffer.installed("w0", 0)
    assert buffer.pull("w0", 1, 1, 0.0) == [one.prompt.index]
    with pytest.raises(LeaseError, match="w0 epoch 0 is fenced"):
        buffer.pull("w0", 0, 1, 0.0)


def test_streamed_tokens_renew_a_lease() -> None:
    buffer = make_buffer()
    (one,) = lease(buffer)
    assert buffer.stream("w0", 0, [LeaseTokens(one.lease_id, ())], now_s=9.0) == ()
    assert submit(buffer, one, answer(one), now_s=15.0) == "accepted"


def moved(buffer: Buffer) -> int:
    missing = buffer.next_batch(buffer.step, 0.0)
    assert isinstance(missing, NotReady)
    return missing.moves


def test_tokens_and_accepted_groups_are_progress_and_empty_messages_are_none() -> None:
    buffer = make_buffer()
    one, other = lease(buffer, 2)
    before = moved(buffer)
    buffer.stream("w0", 0, [LeaseTokens(one.lease_id, ())], 1.0)
    assert moved(buffer) == before
    buffer.stream("w0", 0, [tokens(one)], 1.0)
    assert moved(buffer) == before + 1
    assert submit(buffer, other, answer(other), now_s=1.0) == "accepted"
    assert moved(buffer) == before + 2


def test_tokens_are_no_progress_once_as_many_leases_as_a_batch_has_came_to_nothing() -> None:
    """Else a run whose every answer is refused would never end; an accepted group makes them count again."""
    buffer = make_buffer()
    for failures in range(R):
        (one,) = lease(buffer)
        before = moved(buffer)
        buffer.stream("w0", 0, [tokens(one)], 1.0)
        assert moved(buffer) == before + 1, failures
        assert submit(buffer, one, answer(one, status="failed"), now_s=1.0) == "failed"
    one, other = lease(buffer, 2)
    before = moved(buffer)
    buffer.stream("w0", 0, [tokens(one)], 1.0)
    assert moved(buffer) == before
    assert submit(buffer, one, answer(one), now_s=1.0) == "accepted"
    assert moved(buffer) == before + 1
    buffer.stream("w0", 0, [tokens(other)], 1.0)
    assert moved(buffer) == before + 2


def test_a_failing_prompt_is_set_aside_after_three_attempts() -> None:
    buffer = make_buffer()
    for _ in range(3):
        (one,) = lease(buffer)
        assert one.prompt.index == 0
        assert submit(buffer, one, answer(one, status="failed")) == "failed"
    (after,) = lease(buffer)
    assert after.prompt.index == 1
    assert buffer.counts.failed == 3 * N
    assert buffer.last_failure == "it broke"


def test_wait_holds_for_a_lease_that_would_become_too_old() -> None:
    buffer = make_buffer(max_staleness=0, policy="wait", publish_every=1)
    buffer.register("w1", 0)
    buffer.installed("w1", 0)
    (slow,) = lease(buffer, 1, worker="w1")
    (fast,) = lease(buffer, 5)
    assert submit(buffer, fast, answer(fast)) == "accepted"
    assert isinstance(buffer.next_batch(0, 0.0), NotReady)
    assert submit(buffer, slow, answer(slow)) == "accepted"
    assert isinstance(buffer.next_batch(0, 0.0), list)


def test_wait_holds_although_enough_is_buffered_and_the_lease_then_makes_it() -> None:
    """Three groups of version 0 and two batches left for them at S = 1: the third may not slip."""
    buffer = make_buffer(max_staleness=1, policy="wait", publish_every=1)
    leases = lease(buffer, 4)
    for one in leases[:2]:
        submit(buffer, one, answer(one))
    assert isinstance(buffer.next_batch(0, 0.0), list)
    buffer.publish(1, "d1")
    buffer.installed("w0", 1)
    newer = lease(buffer, 2)
    for one in newer:
        submit(buffer, one, answer(one))
    held = buffer.next_batch(1, 0.0)
    assert isinstance(held, NotReady)
    assert held.reason == "holding"
    for one in leases[2:]:
        submit(buffer, one, answer(one))
    batch = buffer.next_batch(1, 0.0)
    assert isinstance(batch, list)
    assert [g.version for g in batch] == [0, 0]
    assert buffer.counts.dropped_stale == 0


def test_drop_does_not_hold() -> None:
    buffer = make_buffer(max_staleness=1, policy="drop", publish_every=1)
    leases = lease(buffer, 4)
    for one in leases[:2]:
        submit(buffer, one, answer(one))
    buffer.next_batch(0, 0.0)
    buffer.publish(1, "d1")
    buffer.installed("w0", 1)
    for one in lease(buffer, 2):
        submit(buffer, one, answer(one))
    assert isinstance(buffer.next_batch(1, 0.0), list)
    assert submit(buffer, leases[2], answer(leases[2])) == "accepted"
    assert buffer.counts.dropped_stale == N  # t is 2 now: version 0 came too late


def test_starved_when_nobody_serves_a_version_that_is_new_enough() -> None:
    buffer = make_buffer(max_staleness=0, publish_every=1)
    form(buffer)
    missing = buffer.next_batch(1, 0.0)
    assert isinstance(missing, NotReady)
    assert missing.reason == "starved"
    buffer.publish(1, "d1")
    buffer.installed("w0", 1)
    missing = buffer.next_batch(1, 0.0)
    assert isinstance(missing, NotReady)
    assert missing.reason == "filling"


def test_a_step_asked_for_out_of_turn_is_refused() -> None:
    with pytest.raises(LeaseError, match="batch 3"):
        make_buffer().next_batch(3, 0.0)


def test_the_cut_restores_groups_prompts_and_ledger() -> None:
    buffer = make_buffer()
    done, _leased = lease(buffer, 2)
    submit(buffer, done, answer(done))
    state = buffer.state()
    restored = Buffer(
        StalenessConfig(),
        groups_per_step=R,
        samples_per_prompt=N,
        lease_s=10.0,
        lineage="L1",
        seed=0,
        index=buffer.index,
        state=state,
    )
    restored.publish(0, "e0")
    restored.register("w0", 1)
    restored.installed("w0", 0)
    assert restored.pull("w0", 1, 2, 0.0) == [1, 2]  # the leased prompt first, none skipped
    counts = restored.counts
    assert (counts.accepted, counts.buffered, counts.lost) == (N, N, 0)


def test_a_group_is_used_again_only_where_too_few_new_ones_are_there() -> None:
    buffer = make_buffer(max_staleness=3, reuse=2)
    first = form(buffer)
    assert isinstance(buffer.next_batch(1, 0.0), NotReady)  # at least one in two is new
    (one,) = lease(buffer)
    submit(buffer, one, answer(one))
    batch = buffer.next_batch(1, 0.0)
    assert isinstance(batch, list)
    once = one.group_id
    assert {g.group_id for g in batch} == {once, first[0].group_id}
    counts = buffer.counts
    assert (counts.trained, counts.reused, counts.lost) == (3 * N, N, 0)
    again = form(buffer)  # enough new ones: nothing old is taken
    assert not {g.group_id for g in again} & {g.group_id for g in first + batch}
    (one,) = lease(buffer)
    submit(buffer, one, answer(one))
    last = buffer.next_batch(3, 0.0)
    assert isinstance(last, list)
    (old,) = {g.group_id for g in last} - {one.group_id}
    assert old in {g.group_id for g in [first[1], *again]} | {once}


def test_what_is_used_again_keeps_the_bound() -> None:
    buffer = make_buffer(max_staleness=1, reuse=2)
    form(buffer)
    buffer.publish(1, "d1")
    buffer.installed("w0", 1)
    form(buffer)
    buffer.publish(2, "d2")
    buffer.installed("w0", 2)
    (one,) = lease(buffer)
    submit(buffer, one, answer(one))
    batch = buffer.next_batch(2, 0.0)  # t = 2: version 0 is too old to be used again
    assert isinstance(batch, list)
    assert sorted(g.version for g in batch) == [1, 2]


def test_what_is_dropped_is_counted_by_difficulty() -> None:
    buffer = make_buffer(max_staleness=0, policy="drop", publish_every=1)
    for share_correct in (1.0, 0.0, 0.5):
        buffer._drop(Accepted("g", 0, version=0, share_correct=share_correct))
    counts = buffer.counts
    assert (counts.dropped_easy, counts.dropped_hard, counts.dropped_middling) == (N, N, N)
    assert counts.dropped_stale == 3 * N


def test_more_uses_than_versions_are_a_deadlock_and_named() -> None:
    with pytest.raises(ValueError, match=r"reuse=3 is larger than max_staleness \+ 1 = 2.*never come"):
        StalenessConfig(max_staleness=1, reuse=3)


def test_rows_that_go_before_they_are_trained_are_named() -> None:
    with pytest.raises(ValueError, match="max_versions=3 does not keep the 4 versions"):
        Config(replay=ReplayConfig(max_versions=3), staleness=StalenessConfig(max_staleness=3))


def test_groups_that_the_store_lost_are_counted_and_their_prompts_go_out_again() -> None:
    buffer = make_buffer()
    lost, kept = lease(buffer, 2)
    for one in (lost, kept):
        submit(buffer, one, answer(one))
    buffer.index.settle(np.array([0]), Fate.LOST, -1)
    buffer.forget_removed()
    assert (buffer.counts.removed, buffer.counts.buffered, buffer.counts.lost) == (N, N, 0)
    (again,) = lease(buffer)
    assert again.prompt.index == lost.prompt.index
    submit(buffer, again, answer(again))
    assert isinstance(buffer.next_batch(0, 0.0), list)


# --- groups without a signal ---------------------------------------------------------------------

ALIKE = (1.0,)
APART = (1.0, 0.0)


def hand_in(buffer: Buffer, lease: Lease, rewards: Sequence[float]) -> None:
    assert submit(buffer, lease, answer(lease, rewards=rewards)) == "accepted"


def test_a_group_without_a_signal_is_set_aside_and_another_takes_its_place() -> None:
    buffer = make_buffer(0, Refill("reward", max_groups=8))
    first, second = lease(buffer, 5)  # S = 0: permits for one batch of this version
    hand_in(buffer, first, ALIKE)
    assert (buffer.counts.uninformative, buffer.counts.buffered) == (N, 0)
    hand_in(buffer, second, APART)
    assert isinstance(buffer.next_batch(0, 0.0), NotReady)
    (third,) = lease(buffer, 5)  # its permit came back, for a prompt of its own
    assert third.prompt.index == 2
    hand_in(buffer, third, APART)
    batch = buffer.next_batch(0, 0.0)
    assert isinstance(batch, list)
    assert [group.group_id for group in batch] == [second.group_id, third.group_id]
    counts = buffer.counts
    assert (counts.accepted, counts.trained, counts.uninformative, counts.lost) == (3 * N, 2 * N, N, 0)
    assert (counts.accepted_tokens, counts.uninformative_tokens) == (3 * N, N)
    assert buffer.index.groups["fate"].tolist() == [Fate.UNINFORMATIVE, Fate.TRAINED, Fate.TRAINED]
    assert buffer.index.groups["step"].tolist() == [0, 0, 0]
    assert buffer.state().returned == ()  # its prompt is done


def test_beyond_the_limit_such_groups_count_until_the_batch_is_formed() -> None:
    buffer = make_buffer(0, Refill("reward", max_groups=3))
    for step in range(3):  # all is right, for ever: the run goes on
        for _ in range(3):
            hand_in(buffer, lease(buffer)[0], ALIKE)
            assert isinstance(buffer.next_batch(step, 0.0), NotReady)
        for one in lease(buffer, 5):
            hand_in(buffer, one, ALIKE)
        assert isinstance(buffer.next_batch(step, 0.0), list)
        assert buffer.counts.uninformative == 3 * N * (step + 1)
        buffer.publish(step + 1, f"d{step + 1}")
        buffer.installed("w0", step + 1)


def test_a_group_of_a_hold_that_is_set_aside_ends_it() -> None:
    buffer = make_buffer(1, Refill("reward", max_groups=8), policy="wait")
    old = lease(buffer, 3)
    hand_in(buffer, old[0], APART)
    hand_in(buffer, old[1], APART)
    assert isinstance(buffer.next_batch(0, 0.0), list)
    buffer.publish(1, "d1")
    buffer.installed("w0", 1)
    for one in lease(buffer, 2):
        hand_in(buffer, one, APART)
    held = buffer.next_batch(1, 0.0)
    assert isinstance(held, NotReady)
    assert held.reason == "holding"  # version 0 has its last chance at t = 1
    hand_in(buffer, old[2], ALIKE)
    assert isinstance(buffer.next_batch(1, 0.0), list)
    assert (buffer.counts.uninformative, buffer.counts.dropped_stale) == (N, 0)


def test_what_is_too_old_is_dropped_and_its_prompt_goes_out_again_whatever_it_says() -> None:
    buffer = make_buffer(0, Refill("reward", max_groups=8), policy="drop")
    late = lease(buffer, 2)[0]
    buffer.expire(11.0)
    late = buffer.lease("w0", 0, Prompt(7, (7,)), 11.0)
    batch = [buffer.lease("w0", 0, Prompt(i, (i,)), 11.0) for i in (8, 9)]
    for one in batch:
        assert submit(buffer, one, answer(one, rewards=APART), now_s=11.0) == "accepted"
    assert isinstance(buffer.next_batch(0, 11.0), list)
    assert submit(buffer, late, answer(late, rewards=ALIKE), now_s=11.0) == "accepted"
    assert (buffer.counts.dropped_stale, buffer.counts.uninformative) == (N, 0)
    assert 7 in buffer.state().returned


def test_a_cut_remembers_how_many_groups_were_set_aside_for_its_batch() -> None:
    buffer = make_buffer(0, Refill("reward", max_groups=2))
    hand_in(buffer, lease(buffer)[0], ALIKE)
    state = buffer.state()
    assert (state.replaced, state.counts.uninformative) == (1, N)
    again = Buffer(
        StalenessConfig(max_staleness=0),
        groups_per_step=R,
        samples_per_prompt=N,
        lease_s=10.0,
        lineage="L1",
        seed=0,
        index=buffer.index,
        state=state,
        refill=Refill("reward", max_groups=2),
    )
    again.publish(0, "d0")
    again.register("w0", 0)
    again.installed("w0", 0)
    for _ in range(2):
        one = lease(again)[0]
        group = answer(one)
        group = replace(group, trajectories=tuple(replace(t, lineage="L1") for t in group.trajectories))
        assert submit(again, one, group) == "accepted"
    assert (again.counts.uninformative, again.counts.buffered) == (2 * N, N)


# --- another S while it runs ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_a_lowered_bound_drops_what_is_too_old_for_it_and_counts_it(policy: Any) -> None:
    buffer = make_buffer(max_staleness=3, policy=policy)
    for _ in range(3):
        form(buffer)  # of version 0, at t = 0, 1, 2
    (late, *_) = lease(buffer, R)
    buffer.publish(3, "d3")
    buffer.installed("w0", 3)
    buffer.limit_staleness(1)
    assert submit(buffer, late, answer(late)) == "accepted"  # and too old at once: t = 3, v = 0
    assert buffer.counts.dropped_stale == N
    assert isinstance(buffer.next_batch(3, 0.0), NotReady)
    batch = form(buffer)
    assert {group.version for group in batch} == {3}
    assert buffer.counts.lost == 0


def test_a_lowered_bound_hands_out_fewer_permits_and_the_old_one_comes_back() -> None:
    buffer = make_buffer(max_staleness=3)
    buffer.limit_staleness(1)
    assert len(lease(buffer, 99)) == 2 * R  # (p + S - t + 1) R
    buffer.limit_staleness(3)
    assert len(lease(buffer, 99)) == 2 * R


def test_the_bound_is_never_above_the_configured_one() -> None:
    buffer = make_buffer(max_staleness=1)
    buffer.limit_staleness(9)
    assert len(lease(buffer, 99)) == 2 * R


def test_settings_at_another_bound_take_along_what_it_bounds() -> None:
    given = StalenessConfig(max_staleness=6, publish_every=5, reuse=4, policy="drop")
    limited = given.limited(2)
    assert (limited.max_staleness, limited.kappa, limited.reuse, limited.policy) == (2, 3, 3, "drop")
    assert StalenessConfig(max_staleness=6).limited(3).kappa == 2  # as by default
    assert StalenessConfig(max_staleness=1).limited(0).kappa == 1


def test_a_batch_lies_in_the_order_of_its_prompts_whoever_answered_first() -> None:
    buffer = make_buffer(max_staleness=0)
    leases = [lease(buffer)[0], lease(buffer)[0]]
    for one in reversed(leases):
        submit(buffer, one, answer(one))
    batch = buffer.next_batch(0, 0.0)
    assert isinstance(batch, list)
    assert [g.prompt_index for g in batch] == [one.prompt.index for one in leases]
