"""Weights in shards on several ranks: installed on all or on none, proven by the digest of whole tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import RunError, WeightsError
from echo_planes.types import ByteArray, Publication, TensorSpec
from echo_planes.weights.codec.entry import Applied, Change
from echo_planes.weights.digest import BitTensor, state_digest
from echo_planes.weights.receiver import digest_of_replaced
from echo_planes.weights.shards import Shard, ShardedTensors, ShardReceiver, check_cover
from tests.unit.test_receiver import MemoryTarget, State, bumped, copied, publication, replacing, specs_of

WAIT_S = 20.0

# --- where shards lie ------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Shard]]:
    """A shape, and the shards that a dimension of it is cut into; some of them empty, some held twice."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    inside = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=4)))
    bounds = [0, *inside, shape[dim]]
    shards = [Shard.along(shape, dim, a, b) for a, b in itertools.pairwise(bounds)]
    copies = draw(st.lists(st.sampled_from(shards), max_size=2))
    return shape, draw(st.permutations(shards + copies))


@given(cuts())
def test_shards_put_together_are_the_tensor(cut: tuple[tuple[int, ...], list[Shard]]) -> None:
    shape, shards = cut
    check_cover("w", shards)
    whole = np.arange(math.prod(shape), dtype=np.uint16)
    again = np.full_like(whole, 0xFFFF)
    for shard in shards:
        part = shard.cut(whole)
        assert part.size == shard.size
        shard.paste(part, again)
    assert again.tolist() == whole.tolist()


@given(cuts(), st.data())
def test_positions_are_found_in_the_shard_that_holds_them(
    cut: tuple[tuple[int, ...], list[Shard]], data: st.DataObject
) -> None:
    shape, shards = cut
    elements = math.prod(shape)
    chosen = data.draw(st.sets(st.integers(0, elements - 1))) if elements else set()
    positions = np.array(sorted(chosen), np.int32)
    whole = np.arange(elements, dtype=np.uint16)
    found: set[int] = set()
    for shard in shards:
        here = positions[shard.select(positions)]
        local = shard.local(here)
        assert local.dtype == positions.dtype
        assert (np.diff(local) > 0).all()
        assert shard.cut(whole)[local].tolist() == here.tolist()
        assert set(here.tolist()) == chosen & set(shard.cut(whole).tolist())
        found |= set(here.tolist())
    assert found == chosen


@pytest.mark.parametrize(
    "shards",
    [
        [Shard.along((4, 6), 1, 0, 2), Shard.along((4, 6), 1, 3, 6)],
        [Shard.along((4, 6), 1, 0, 4), Shard.along((4, 6), 1, 3, 6)],
        [Shard.along((4, 6), 0, 0, 3)],
        [Shard.along((4, 6), 0, 1, 4)],
        [Shard.along((4, 6), 0, 0, 2), Shard.along((4, 6), 1, 3, 6)],
        [Shard.whole((4, 6)), Shard.along((4, 6), 0, 0, 2)],
    ],
    ids=["gap", "overlap", "end", "beginning", "both ways", "whole and part"],
)
def test_shards_that_do_not_make_up_a_tensor_are_refused(shards: list[Shard]) -> None:
    with pytest.raises(WeightsError, match="gaps or overlap"):
        check_cover("w", shards)


def test_a_shard_outside_its_tensor_is_refused() -> None:
    with pytest.raises(WeightsError, match="outside dimension 1"):
        Shard.along((4, 6), 1, 3, 7)


# --- ranks that are threads ------------------------------------------------------------------------


class Meeting:
    """Exchange that the ranks of one engine share; a rank that waits for longer than a limit breaks it."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        try:
            self.slots[rank] = value
            self.barrier.wait(WAIT_S)
            seen = list(self.slots)
            self.barrier.wait(WAIT_S)
        except threading.BrokenBarrierError:
            raise RunError(f"rank {rank}: another rank does not answer") from None
        return seen


class ThreadRanks:
    """`Ranks` of which each is a thread."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self._meeting = meeting

    def tell(self, message: str) -> list[str]:
        return self._answers("tell", message)

    def collect(self, part: ByteArray, sizes_bytes: Sequence[int]) -> list[ByteArray]:
        parts = self._answers("collect", part.copy())
        if self.rank:
            return []
        assert [part.size for part in parts] == list(sizes_bytes)
        return parts

    def _answers(self, kind: str, value: Any) -> list[Any]:
        seen = self._meeting.exchange(self.rank, (kind, value))
        assert {called for called, _ in seen} == {kind}, "the ranks are out of step"
        return [value for _, value in seen]


SHAPES = {
    "embed.weight": (11, 4),
    "k.weight": (4, 8),
    "norm.weight": (8,),
    "o.weight": (8, 8),
    "q.weight": (8, 8),
}


def layout(rank: int) -> dict[str, Shard]:
    """Four ranks, as of tensor parallelism over two heads of keys: rows, columns, copies, an uneven table."""
    rows = [0, 3, 6, 9, 11]
    return {
        "embed.weight": Shard.along((11, 4), 0, rows[rank], rows[rank + 1]),
        "k.weight": Shard.along((4, 8), 0, rank // 2 * 2, rank // 2 * 2 + 2),
        "norm.weight": Shard.whole((8,)),
        "o.weight": Shard.along((8, 8), 1, 2 * rank, 2 * rank + 2),
        "q.weight": Shard.along((8, 8), 0, 2 * rank, 2 * rank + 2),
    }


def stages(rank: int) -> dict[str, Shard]:
    """Two ranks, as of pipeline parallelism; the table is tied to the head, so both have it."""
    names = (
        ("embed.weight", "k.weight", "q.weight") if rank == 0 else ("embed.weight", "o.weight", "norm.weight")
    )
    return {name: Shard.whole(SHAPES[name]) for name in names}


LAYOUTS: dict[str, tuple[int, Callable[[int], dict[str, Shard]]]] = {
    "tensor": (4, layout),
    "pipeline": (2, stages),
}


def model_state(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {
        name: BitTensor(rng.integers(0, 2**16, math.prod(shape), dtype=np.uint16), "bfloat16", shape)
        for name, shape in SHAPES.items()
    }


class Engine:
    """All ranks of one engine, and the shards that compute."""

    def __init__(self, state: Mapping[str, BitTensor], kind: str) -> None:
        self.size, place = LAYOUTS[kind]
        self.layouts = [place(rank) for rank in range(self.size)]
        self.specs = specs_of(state)
        self.locals = [
            MemoryTarget({name: _local(state[name], shard) for name, shard in held.items()})
            for held in self.layouts
        ]
        self.meeting = Meeting(self.size)
        self.complaints = [""] * self.size
        self.receivers: list[ShardReceiver] = self.all(self._start)

    def _start(self, rank: int) -> ShardReceiver:
        placed = {name: (self.specs[name], shard) for name, shard in self.layouts[rank].items()}
        tensors = ShardedTensors(self.locals[rank], placed, ThreadRanks(rank, self.meeting))

        def probe() -> None:
            if self.complaints[rank]:
                raise WeightsError(self.complaints[rank])

        return ShardReceiver(tensors, probe)

    def all(self, step: Callable[[int], Any]) -> list[Any]:
        """Have every rank do it at once; what each returned or raised, which must be alike in kind."""
        answers: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            try:
                answers[rank] = step(rank)
            except Exception as error:  # noqa: BLE001  looked at by the test
                answers[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive()
        assert len({(type(answer), str(answer)) for answer in answers if isinstance(answer, Exception)}) <= 1
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            assert len(errors) == self.size, "some ranks failed, some did not"
            raise errors[0]
        return answers

    def install(self, version: Publication) -> None:
        self.all(lambda rank: self.receivers[rank].install(version))

    def digest(self) -> str:
        (digest,) = set(self.all(lambda rank: self.receivers[rank].live_digest()))
        return str(digest)

    def standing(self) -> str:
        (standing,) = {receiver.standing for receiver in self.receivers}
        return standing

    def mismatches(self) -> int:
        (count,) = {receiver.digest_mismatches for receiver in self.receivers}
        return count

    def holds(self, state: Mapping[str, BitTensor]) -> bool:
        return all(
            np.array_equal(target.state[name].bits, shard.cut(state[name].bits))
            for target, held in zip(self.locals, self.layouts, strict=True)
            for name, shard in held.items()
        )


def _local(whole: BitTensor, shard: Shard) -> BitTensor:
    bits = shard.cut(whole.bits).copy()
    return BitTensor(bits, whole.dtype, (bits.size,))


@pytest.fixture(params=sorted(LAYOUTS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(kind: str) -> Engine:
    """Version 0 serves."""
    engine = Engine(model_state(9), kind)
    engine.install(publication(0, model_state(0)))
    return engine


def changed(state: State, seed: int, share: float = 0.2) -> State:
    rng = np.random.default_rng(seed)
    new = copied(state)
    for tensor in new.values():
        tensor.bits[rng.random(tensor.bits.size) < share] ^= 0x0101
    return new


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.02, 0.3, 1.0]), st.sampled_from(sorted(LAYOUTS)))
def test_every_rank_ends_with_its_shard_of_what_was_published(seed: int, share: float, kind: str) -> None:
    old = model_state(seed)
    engine = Engine(model_state(1), kind)
    engine.install(publication(0, old))
    assert engine.holds(old)
    assert engine.digest() == state_digest(old)
    new = changed(old, seed, share)
    engine.install(replacing(publication(1, new, old), old))
    assert engine.holds(new)
    assert engine.digest() == state_digest(new)
    assert (engine.standing(), engine.mismatches()) == ("sound", 0)


def test_what_fails_on_one_rank_is_undone_on_all(engine: Engine) -> None:
    old = model_state(0)
    new = changed(old, 3)
    target = engine.locals[1]
    target.fail_at = target.writes + 2
    with pytest.raises(WeightsError, match="rank 1: OSError: the device went away"):
        engine.install(publication(1, new, old))
    assert engine.standing() == "sound"
    assert engine.holds(old)
    engine.install(publication(1, new, old))
    assert engine.holds(new)


def test_a_rank_that_cannot_take_its_old_bits_breaks_the_engine(engine: Engine) -> None:
    target = engine.locals[1]
    target.fail_from = target.writes + 2
    with pytest.raises(RunError, match="could not be put back"):
        engine.install(publication(1, changed(model_state(0), 3), model_state(0)))
    assert engine.standing() == "broken"


def test_a_rank_that_silently_keeps_the_new_bits_breaks_the_engine(engine: Engine) -> None:
    old, target = model_state(0), engine.locals[1]
    write, num_writes = target.exchange, len(target.state)

    def exchange(change: Change) -> Applied:
        if target.writes < first + num_writes:
            return write(change)
        return Applied(change, change.values)

    first = target.writes
    target.exchange = exchange  # type: ignore[method-assign]
    engine.complaints[0] = "not finite"
    with pytest.raises(RunError, match=r"rank 1: RunError: tensor .* did not take its old bits"):
        engine.install(publication(1, changed(old, 3, 0.5), old))
    assert engine.standing() == "broken"


def test_a_rank_that_cannot_be_read_makes_the_digest_fail_everywhere(engine: Engine) -> None:
    def gone(name: str) -> BitTensor:
        raise OSError("no such device")

    engine.locals[1].read = gone  # type: ignore[method-assign]
    with pytest.raises(WeightsError, match="rank 1: OSError: no such device"):
        engine.digest()


def test_a_wrong_digest_and_a_failing_probe_are_taken_back(engine: Engine) -> None:
    old, new = model_state(0), changed(model_state(0), 4)
    wrong = publication(1, new, old)
    wrong = dataclasses.replace(
        wrong, manifest=dataclasses.replace(wrong.manifest, digest=f"xxh3:{'0' * 32}")
    )
    with pytest.raises(WeightsError, match="must have digest"):
        engine.install(wrong)
    assert engine.holds(old)
    engine.complaints[1] = "not finite"
    with pytest.raises(WeightsError, match="rank 1: not finite"):
        engine.install(publication(1, new))
    assert engine.holds(old)
    assert engine.standing() == "sound"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["embed.weight", "norm.weight"])
def test_a_flipped_bit_of_any_copy_is_found_and_mended(engine: Engine, rank: int, name: str) -> None:
    old = model_state(0)
    if name not in engine.layouts[rank]:
        rank = 1 - rank
    engine.locals[rank].state[name].bits[3] ^= 0x40
    assert engine.digest() != state_digest(old)
    new = bumped(old, {"q.weight": 7})
    with pytest.raises(WeightsError, match="damaged since their last install"):
        engine.install(publication(1, new, old))
    assert (engine.standing(), engine.mismatches()) == ("damaged", 1)
    engine.install(publication(1, new))
    assert (engine.standing(), engine.mismatches()) == ("sound", 2)
    assert engine.holds(new)


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_a_patch_covers_is_counted(engine: Engine, rank: int) -> None:
    old = model_state(0)
    engine.locals[rank].state["embed.weight"].bits[3] ^= 0x40
    positions = engine.layouts[rank]["embed.weight"].cut(np.arange(44, dtype=np.uint16))
    new = bumped(old, {"embed.weight": int(positions[3])})
    engine.install(replacing(publication(1, new, old), old))
    assert (engine.standing(), engine.mismatches()) == ("sound", 1)
    assert engine.holds(new)


def test_part_of_a_tensor_without_positions_is_written_and_put_back(engine: Engine) -> None:
    old = model_state(0)
    change = Change("q.weight", 5, None, np.arange(20, dtype=np.uint16))

    def there_and_back(rank: int) -> None:
        tensors = engine.receivers[rank].tensors
        applied: Applied = tensors.exchange(change)
        whole = [old["q.weight"].bits[5:25]]
        assert tensors.digest_of_replaced([applied]) == digest_of_replaced(whole)
        tensors.put_back([applied])

    engine.all(there_and_back)
    assert engine.holds(old)


def test_ranks_that_differ_in_a_tensor_are_refused() -> None:
    meeting = Meeting(2)
    errors: list[str] = []

    def start(rank: int) -> None:
        shape = (4, 2 + rank)
        spec = TensorSpec("w", "bfloat16", shape)
        with pytest.raises(WeightsError) as caught:
            ShardedTensors(
                MemoryTarget({}),
                {"w": (spec, Shard.along(shape, 0, 2 * rank, 2 * rank + 2))},
                ThreadRanks(rank, meeting),
            )
        errors.append(str(caught.value))

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert len(errors) == 2
    assert all("ranks differ in tensor 'w'" in error for error in errors)
