"""Dispatch over the replay buffer: who gets what, what moves, and that nothing is lost, doubled or stuck."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from echo_planes.config.schema import StalenessConfig
from echo_planes.data.replay.dispatch import PolicyName, policy_named
from echo_planes.data.replay.dispatcher import KEEP_TICKS, LAPSE_TICKS
from echo_planes.errors import LeaseError
from echo_planes.types import Lease, LeaseTokens, Prompt, WorkerStats
from tests.unit.test_buffer import Buffer, answer
from tests.unit.test_partial_rollouts import message, piece

THETA = 2


class Plane:
    """The data plane on a clock of its own, with workers that only hold what they are given."""

    def __init__(
        self, router: PolicyName, groups: int = 12, *, max_staleness: int = 3, queue: float = 1.0
    ) -> None:
        made = policy_named(router, THETA)
        self.buffer = Buffer(
            StalenessConfig(max_staleness=max_staleness, queue_batches=queue),
            groups_per_step=groups,
            samples_per_prompt=2,
            lease_s=100.0,
            lineage="L0",
            seed=0,
            dispatch=made,
            tick_s=1.0,
        )
        self.buffer.publish(0, "d0")
        self.now_s = 0.0
        self.slots: dict[str, int] = {}
        self.epochs: Counter[str] = Counter()
        self.work: dict[str, dict[str, Lease]] = {}

    def join(self, worker: str, slots: int = 4, version: int = 0, plateau: int = 0) -> None:
        self.epochs[worker] += 1
        self.slots[worker], self.work[worker] = slots, {}
        self.buffer.register(worker, self.epochs[worker])
        self.buffer.installed(worker, version)
        self.tell(worker, plateau=plateau)

    def tell(
        self, worker: str, *, scoring: int = 0, plateau: int = 0, tokens: int = 0, busy_s: float = 0.0
    ) -> None:
        stats = WorkerStats(
            worker, 0, "", 0, 0, tokens, busy_s, slots=self.slots[worker], scoring=scoring, plateau=plateau
        )
        self.buffer.tell(self.epochs[worker], stats)

    def room(self, worker: str) -> int:
        return self.slots[worker] + THETA - len(self.work[worker])

    def ask(self, *workers: str) -> dict[str, int]:
        """They wait, in that order, and are served once; how many leases each got."""
        rooms = {worker: self.room(worker) for worker in workers if self.room(worker) > 0}
        self.buffer.ask(rooms, self.now_s)
        got = {}
        for worker, room in rooms.items():
            indices = self.buffer.pull(worker, self.epochs[worker], room, self.now_s)
            for index in indices:
                one = self.buffer.lease(worker, self.epochs[worker], Prompt(index, (index,)), self.now_s)
                self.work[worker][one.lease_id] = one
            got[worker] = len(indices)
        return got

    def wait(self, *workers: str) -> None:
        """They wait, and there is nothing: until they have what there is."""
        while any(self.ask(*workers).values()):
            pass

    def counts(self) -> dict[str, int]:
        return {worker: len(work) for worker, work in self.work.items()}

    def begin(self, worker: str, lease_id: str, *tokens: int) -> None:
        """Tokens of a lease's first call arrive."""
        context = self.work[worker][lease_id].prompt.token_ids
        messages = [message(lease_id, (0, context, piece(*tokens), 0))]
        self.buffer.stream(worker, self.epochs[worker], messages, self.now_s)

    def stream(self, worker: str, seconds: float = 1.0) -> list[int]:
        """A worker streams after so long, and gives up what it must; prompts of that."""
        self.now_s += seconds
        epoch, mine = self.epochs[worker], self.work[worker]
        messages = [LeaseTokens(lease_id, ()) for lease_id in mine]
        lost = self.buffer.stream(worker, epoch, messages, self.now_s)
        given = [LeaseTokens(lease_id, ()) for lease_id in lost]
        self.buffer.hand_over(worker, epoch, given, self.now_s)
        return [mine.pop(lease_id).prompt.index for lease_id in lost]

    def finish(self, worker: str, count: int = 1) -> None:
        for lease_id, one in list(self.work[worker].items())[:count]:
            receipt = self.buffer.submit(
                worker, self.epochs[worker], lease_id, answer(one, (0, "d0")), self.now_s
            )
            assert receipt.accepted, receipt.reason
            del self.work[worker][lease_id]


# --- the shortest queue ------------------------------------------------------------------------------


def test_free_slots_are_filled_alike_before_any_queue() -> None:
    plane = Plane("jsq", 12)
    plane.join("w0", slots=8)
    assert plane.ask("w0") == {"w0": 10}  # eight, and Theta
    plane.join("w1")
    plane.join("w2")
    plane.finish("w0", 10)
    assert plane.ask("w0", "w1", "w2") == {"w0": 1, "w1": 1, "w2": 0}  # two more make a batch
    plane = Plane("jsq", 12)
    for worker in ("w0", "w1", "w2"):
        plane.join(worker, slots=4)
    assert plane.ask("w0", "w1", "w2") == {"w0": 4, "w1": 4, "w2": 4}
    plane = Plane("jsq", 16)
    plane.join("w0", slots=8)
    plane.join("w1", slots=2)
    assert plane.ask("w0") == {"w0": 10}
    plane.finish("w0", 3)
    assert plane.ask("w0", "w1") == {"w0": 3, "w1": 3}  # 1 and 2 slots; then queues


def test_nothing_is_queued_while_another_has_a_free_slot() -> None:
    plane = Plane("jsq", 6)
    plane.join("w0", slots=2)
    assert plane.ask("w0") == {"w0": 4}
    plane.finish("w0", 2)  # full, with an empty queue
    plane.join("w1", slots=4)
    assert plane.ask("w0", "w1") == {"w0": 0, "w1": 2}


def test_those_being_scored_take_no_slot() -> None:
    plane = Plane("jsq", 100)
    plane.join("w0")
    assert plane.ask("w0") == {"w0": 6}
    plane.tell("w0", scoring=3)
    plane.slots["w0"] += 3  # it asks for as many more
    assert plane.ask("w0") == {"w0": 3}


def test_queued_prompts_move_to_a_newcomer_and_are_kept_for_it() -> None:
    plane = Plane("jsq", 6)
    plane.join("w0")
    plane.wait("w0")
    assert plane.counts() == {"w0": 6}
    plane.join("w1")
    plane.join("w2")
    plane.wait("w2", "w1")
    given = plane.stream("w0")
    assert len(given) == 2  # one for each that has nothing, whatever its queue
    assert plane.ask("w2", "w1") == {"w2": 1, "w1": 1}
    assert plane.counts() == {"w0": 4, "w1": 1, "w2": 1}
    # Nothing is queued any more, and nothing moves back or on.
    for _ in range(5):
        plane.wait("w0", "w1", "w2")
        assert [plane.stream(worker, 1.1) for worker in ("w0", "w1", "w2")] == [[], [], []]


def with_one_that_moves() -> tuple[Plane, int]:
    """w0 handed over a prompt, which is kept for w1; w2 came later and has nothing. With its index."""
    plane = Plane("jsq", 6)
    plane.join("w0")
    plane.wait("w0")
    plane.join("w1")
    plane.wait("w1")
    (index,) = plane.stream("w0")
    plane.join("w2")
    return plane, index


def test_who_waits_longer_does_not_get_what_moves_to_another() -> None:
    plane, index = with_one_that_moves()
    assert plane.ask("w2") == {"w2": 0}
    assert plane.ask("w2", "w1") == {"w2": 0, "w1": 1}
    assert [one.prompt.index for one in plane.work["w1"].values()] == [index]


def test_what_is_kept_goes_to_anybody_after_a_moment() -> None:
    plane, index = with_one_that_moves()
    assert index in plane.buffer.state().returned  # a resume would do it again
    plane.now_s += KEEP_TICKS - 0.1
    assert plane.ask("w2") == {"w2": 0}
    plane.now_s += 0.2
    assert plane.ask("w2") == {"w2": 1}
    assert [one.prompt.index for one in plane.work["w2"].values()] == [index]


@pytest.mark.parametrize("when", ["before it is handed over", "while it is kept"])
def test_what_moves_to_a_worker_that_is_lost_goes_to_another(when: str) -> None:
    plane = Plane("jsq", 6)
    plane.join("w0")
    plane.wait("w0")
    plane.join("w1")
    plane.join("w2")
    plane.wait("w1")
    plane.buffer.tick(1.0)
    if when == "while it is kept":
        assert len(plane.stream("w0")) == 1
        plane.buffer.lose("w1")
    else:
        plane.buffer.lose("w1")
        assert len(plane.stream("w0")) == 1
    assert plane.ask("w2") == {"w2": 1}
    assert plane.buffer.counts.lost == 0


def test_a_silent_source_is_not_asked_for_more_and_more() -> None:
    plane = Plane("jsq", 6)
    plane.join("w0")
    plane.wait("w0")
    plane.join("w1")
    for second in range(1, 20):
        plane.now_s = float(second)
        plane.wait("w1")
        plane.buffer.tick(plane.now_s)
    assert len(plane.stream("w0")) == 2  # what was queued, and nothing that executes


def test_executing_prompts_beyond_the_plateau_go_on_from_their_tokens() -> None:
    plane = Plane("jsq", 4)
    plane.join("w0", slots=4, plateau=2)
    plane.wait("w0")
    for number, lease_id in enumerate(plane.work["w0"]):
        plane.begin("w0", lease_id, 10 + number, 20 + number)
    plane.join("w1")
    plane.wait("w1")
    given = plane.stream("w0", 5.0)
    assert len(given) == 2
    plane.wait("w1")
    moved = {one.prompt.index: one.partials[0].sample for one in plane.work["w1"].values()}
    assert {index: sample.token_ids for index, sample in moved.items()} == {
        index: (10 + index, 20 + index) for index in given
    }
    assert plane.buffer.counts.continued_tokens == 4
    assert plane.buffer.counts.discarded_tokens == 0


def test_what_nobody_could_go_on_with_stays() -> None:
    plane = Plane("jsq", 4, max_staleness=1, queue=2.0)
    plane.join("w0", slots=4, plateau=2)
    plane.join("w1", slots=8)
    assert plane.ask("w1") == {"w1": 8}
    plane.finish("w1", 4)
    assert isinstance(plane.buffer.next_batch(0, 0.0), list)
    assert plane.ask("w0") == {"w0": 0}  # of version 0 no more than one batch can be trained
    plane.buffer.publish(1, "d1")
    plane.buffer.installed("w0", 1)
    assert plane.ask("w0") == {"w0": 4}
    plane.tell("w1", plateau=1)  # executes four, of version 0
    plane.join("w2", version=1)
    plane.wait("w2")
    assert plane.stream("w1") == []
    assert plane.buffer.counts.discarded_tokens == 0


# --- the split by speed ------------------------------------------------------------------------------


def measured(plane: Plane, **speeds: int) -> None:
    """Each worker has one group of the first batch, and makes so many tokens a second of it."""
    for worker in speeds:
        plane.join(worker, slots=40)
    plane.wait(*speeds)
    for worker, speed in speeds.items():
        plane.tell(worker, tokens=10 * speed, busy_s=10.0)
        plane.finish(worker, 100)


def test_a_batch_is_split_by_measured_speed_whoever_asks_first() -> None:
    plane = Plane("proportional", 12)
    measured(plane, w0=300, w1=100)
    assert isinstance(plane.buffer.next_batch(0, 0.0), list)
    assert plane.ask("w1") == {"w1": 3}
    assert plane.ask("w1") == {"w1": 0}
    assert plane.ask("w0", "w1") == {"w0": 9, "w1": 0}


def test_without_a_measurement_the_split_is_even() -> None:
    plane = Plane("proportional", 12)
    for worker in ("w0", "w1", "w2"):
        plane.join(worker, slots=40)
    assert plane.ask("w0") == {"w0": 4}
    assert plane.ask("w2", "w1") == {"w2": 4, "w1": 4}


def test_the_newest_publication_comes_before_the_share() -> None:
    plane = Plane("proportional", 12)
    measured(plane, w0=100, w1=100)
    assert isinstance(plane.buffer.next_batch(0, 0.0), list)
    plane.buffer.publish(7, "d7")  # versions need not be consecutive
    plane.buffer.installed("w0", 7)
    assert plane.ask("w0", "w1") == {"w0": 6, "w1": 0}
    plane.buffer.installed("w1", 7)
    assert plane.ask("w1") == {"w1": 6}


def test_a_share_that_an_idle_worker_does_not_take_goes_to_others() -> None:
    plane = Plane("proportional", 12)
    measured(plane, w0=100, w1=100)
    assert isinstance(plane.buffer.next_batch(0, 0.0), list)
    assert plane.ask("w0") == {"w0": 6}
    plane.now_s = LAPSE_TICKS - 0.5
    assert plane.ask("w0") == {"w0": 0}
    plane.now_s = LAPSE_TICKS + 0.5
    assert plane.ask("w0") == {"w0": 6}


def test_what_comes_back_within_a_batch_goes_to_whoever_waits() -> None:
    plane = Plane("proportional", 12)
    for worker in ("w0", "w1"):
        plane.join(worker, slots=40)
    plane.wait("w0", "w1")
    assert plane.counts() == {"w0": 6, "w1": 6}
    messages = [LeaseTokens(lease_id, ()) for lease_id in list(plane.work["w0"])[:3]]
    assert plane.buffer.hand_over("w0", 1, messages, 0.0) == 3
    assert plane.ask("w1") == {"w1": 3}


def test_who_comes_or_goes_changes_the_shares_that_are_left() -> None:
    plane = Plane("proportional", 12)
    plane.join("w0", slots=2)
    assert plane.ask("w0") == {"w0": 4}  # its room
    plane.join("w1", slots=40, version=-1)
    plane.finish("w0", 2)
    assert plane.ask("w0") == {"w0": 2}
    plane.buffer.installed("w1", 0)
    assert plane.ask("w1") == {"w1": 3}  # half of the other six
    plane.buffer.lose("w0")
    plane.wait("w1")
    assert len(plane.work["w1"]) == 10  # two are done


# --- whatever happens --------------------------------------------------------------------------------


def places(plane: Plane) -> Counter[int]:
    """Count each prompt over all places where it may be."""
    buffer = plane.buffer
    state = buffer.state()  # leased ones count as returned there
    return Counter(state.returned) + Counter(group.prompt_index for group in state.groups)


@pytest.mark.parametrize("router", ["jsq", "proportional"])
@pytest.mark.parametrize("seed", range(15))
def test_no_prompt_is_lost_or_in_two_places(router: PolicyName, seed: int) -> None:
    rng = random.Random(seed)
    plane = Plane(router, 8, max_staleness=rng.choice([0, 1, 3]), queue=rng.choice([1.0, 2.0]))
    names = [f"w{number}" for number in range(4)]
    trained: Counter[int] = Counter()
    version = 0
    for _ in range(400):
        plane.now_s += rng.choice([0.0, 0.3, 1.0])
        worker = rng.choice(names)
        match rng.randrange(8):
            case 0:
                plane.join(worker, rng.choice([1, 2, 6]), version, rng.choice([0, 1]))
            case 1 if worker in plane.work:
                plane.buffer.lose(worker)
                plane.work[worker].clear()
                with pytest.raises(LeaseError):
                    plane.ask(worker)
                plane.join(worker, plane.slots[worker], version)
            case 2 if worker in plane.work:
                plane.stream(worker)
            case 3 if worker in plane.work:
                for lease_id, one in list(plane.work[worker].items())[: rng.randrange(4)]:
                    spans = (one.version, f"d{one.version}")
                    plane.buffer.submit(
                        worker, plane.epochs[worker], lease_id, answer(one, spans), plane.now_s
                    )
                    del plane.work[worker][lease_id]
            case 4:
                batch = plane.buffer.next_batch(plane.buffer.step, plane.now_s)
                if isinstance(batch, list):
                    trained += Counter(group.prompt_index for group in batch)
                    version = plane.buffer.step
                    plane.buffer.publish(version, f"d{version}")
            case 5 if worker in plane.work:
                plane.buffer.installed(worker, version)
            case _:
                plane.ask(*(name for name in rng.sample(names, 4) if name in plane.work))
        every = places(plane) + trained
        assert sorted(every) == list(range(plane.buffer.state().next_index))
        assert set(every.values()) <= {1}
    assert plane.buffer.counts.lost == 0
    # And the learner gets its next batch from whoever is alive.
    for name in names:
        plane.join(name, 4, version)
    for _ in range(20):
        plane.now_s += LAPSE_TICKS / 4
        plane.wait(*names)
    assert sum(plane.counts().values()) + plane.buffer.counts.buffered // 2 >= 8
