"""Publications become one file for the engine, or leave the shadow as it was: `weights/node/stager.py`."""

from __future__ import annotations

import dataclasses
import math
import os
import tracemalloc
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import ClusterError, WeightsError
from echo_planes.types import ByteArray, Codec, Manifest, TensorSpec
from echo_planes.weights.codec.entry import Change, decode, encode, overwrite_payload
from echo_planes.weights.digest import BitTensor, bytes_digest, state_digest
from echo_planes.weights.node.stager import Staged, Stager
from echo_planes.weights.node.staging_steps import Touched, merge
from echo_planes.weights.receiver import Receiver, check_payload
from tests.unit.test_receiver import MemoryTarget, State, bumped, copied, model_state, same_bits, specs_of

Segments = list[tuple[int, ByteArray]]


class Learner:
    """Publishes successive states of the model in a given codec."""

    def __init__(self, state: State, lineage: str = "run-1", segment_bytes: int = 256) -> None:
        self.lineage = lineage
        self.segment_bytes = segment_bytes
        self.state = state
        self.version = -1
        self._last: State | None = None

    def publish(self, codec: Codec, state: State | None = None) -> tuple[Manifest, Segments]:
        """The next version: `state`, or the present one."""
        self.state = state or self.state
        base = None if codec == "full" else self._last
        segments: Segments = []
        size = 0
        for segment in encode(codec, base, self.state, segment_bytes=self.segment_bytes):
            segments.append((size, segment.payload))
            size += segment.payload.size
        self.version += 1
        manifest = Manifest(
            lineage=self.lineage,
            version=self.version,
            num_updates=self.version,
            codec=codec,
            base_version=self.version - 1 if base else -1,
            base_digest=state_digest(base) if base else "",
            digest=state_digest(self.state),
            payload_digest=bytes_digest(np.concatenate([np.zeros(0, np.uint8), *(s for _, s in segments)])),
            payload_bytes=size,
            dense_bytes=sum(tensor.nbytes for tensor in self.state.values()),
            changed_elements=0,
            total_elements=sum(tensor.bits.size for tensor in self.state.values()),
            num_segments=len(segments),
        )
        self._last = copied(self.state)
        return manifest, segments

    def step(self, rng: np.random.Generator, share: float) -> State:
        """The state after an update that changes a share of the elements by a few units in the last place."""
        new = copied(self.state)
        for tensor in new.values():
            hit = rng.random(tensor.bits.size) < share
            tensor.bits[hit] += rng.integers(1, 4, int(hit.sum())).astype(tensor.bits.dtype)
        return new


class Worker:
    """A stager and an engine that never saw any weights."""

    def __init__(self, folder: Path, like: Mapping[str, BitTensor], **options: Any) -> None:
        self.folder = folder
        self.stager = Stager(options.get("specs"), folder)
        self.target = MemoryTarget(
            {n: BitTensor(np.zeros_like(t.bits), t.dtype, t.shape) for n, t in like.items()}
        )
        self.receiver = Receiver(self.target)

    def install(self, staged: Staged) -> None:
        publication = staged.publication()
        check_payload(publication)
        self.receiver.install(publication)
        self.stager.settled(staged.manifest.version, ok=True)

    def files(self) -> list[str]:
        return sorted(os.listdir(self.folder))


@pytest.fixture
def learner() -> Learner:
    return Learner(model_state())


@pytest.fixture
def worker(tmp_path: Path, learner: Learner) -> Worker:
    """A worker that has version 0."""
    worker = Worker(tmp_path / "staged", learner.state)
    worker.install(worker.stager.stage(*learner.publish("full")))
    return worker


def refused(worker: Worker, manifest: Manifest, segments: Any, why: str) -> None:
    """The publication is refused for this reason, and shadow, engine and files stay as they are."""
    shadow, live, files = copied(worker.stager.bits()), copied(worker.target.state), worker.files()
    held = worker.stager.manifest
    with pytest.raises(WeightsError, match=why):
        worker.stager.stage(manifest, segments)
    assert same_bits(worker.stager.bits(), shadow)
    assert same_bits(worker.target.state, live)
    assert worker.files() == files
    assert worker.stager.manifest == held


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), late=st.lists(st.booleans(), min_size=20, max_size=20))
def test_chains_of_patches_end_with_the_learners_bits(
    tmp_path_factory: pytest.TempPathFactory, seed: int, late: list[bool]
) -> None:
    """20 updates in every codec; sometimes the engine is late and takes several at once."""
    rng = np.random.default_rng(seed)
    learner = Learner(model_state(seed % 97))
    worker = Worker(tmp_path_factory.mktemp("staged"), learner.state)
    worker.install(worker.stager.stage(*learner.publish("full")))
    for is_late in late:
        codec: Codec = rng.choice(["compact", "fast", "overwrite", "full"])
        share = rng.choice([0.0, 0.01, 0.3, 0.9])
        staged = worker.stager.stage(*learner.publish(codec, learner.step(rng, share)))
        assert same_bits(worker.stager.bits(), learner.state)
        if not is_late:
            worker.install(staged)
            assert same_bits(worker.target.state, learner.state)
    worker.install(worker.stager.current())
    assert worker.receiver.live_digest() == state_digest(learner.state)
    assert worker.receiver.digest_mismatches == 0


def test_the_file_says_what_it_is(worker: Worker, learner: Learner) -> None:
    base = state_digest(learner.state)
    manifest, segments = learner.publish("compact", bumped(learner.state, {"a": 5, "c": 0}))
    staged = worker.stager.stage(manifest, segments)
    assert (staged.manifest.codec, staged.manifest.base_version) == ("overwrite", 0)
    assert staged.manifest.base_digest == base
    assert staged.manifest.num_segments == 1
    assert staged.publication().payload.size == staged.manifest.payload_bytes
    kept = {"lineage", "version", "num_updates", "digest", "dense_bytes", "changed_elements"}
    assert all(getattr(staged.manifest, name) == getattr(manifest, name) for name in kept)


def test_a_late_engine_takes_three_versions_in_one_install(worker: Worker, learner: Learner) -> None:
    for positions in ({"a": 5}, {"a": 5, "b": 1}, {"a": 4}):
        staged = worker.stager.stage(*learner.publish("compact", bumped(learner.state, positions)))
    assert (staged.manifest.codec, staged.manifest.base_version, staged.manifest.version) == (
        "overwrite",
        0,
        3,
    )
    worker.install(staged)
    assert same_bits(worker.target.state, learner.state)


@pytest.mark.parametrize("num_later", [1, 2, 5])
def test_an_install_that_ends_while_later_versions_are_staged(
    worker: Worker, learner: Learner, num_later: int
) -> None:
    worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    first = worker.stager.current()
    for number in range(num_later):
        newest = worker.stager.stage(*learner.publish("fast", bumped(learner.state, {"b": number})))
        assert worker.files() == sorted((first.path.name, newest.path.name))
    worker.install(first)  # its file is still there
    assert newest.manifest.base_version == 0
    current = worker.stager.current()
    assert (current.manifest.base_version, current.manifest.version) == (1, 1 + num_later)
    assert worker.stager.current() == current
    assert (
        current.manifest.payload_bytes < newest.manifest.payload_bytes
    )  # what is installed is not sent again
    worker.install(current)
    assert same_bits(worker.target.state, learner.state)


def test_an_engine_that_refused_gets_a_full_file(worker: Worker, learner: Learner) -> None:
    worker.target.state["b"].bits[7] ^= 0x0100  # its live weights are damaged
    staged = worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    with pytest.raises(WeightsError, match="damaged"):
        worker.receiver.install(staged.publication())
    worker.stager.settled(1, ok=False)
    assert same_bits(worker.stager.bits(), learner.state)  # the shadow goes on
    mended = worker.stager.current()
    assert (mended.manifest.codec, mended.manifest.version) == ("full", 1)
    worker.install(mended)
    assert same_bits(worker.target.state, learner.state)
    worker.install(worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"b": 5}))))
    assert same_bits(worker.target.state, learner.state)


def test_an_engine_that_refuses_what_it_has_gets_a_full_file(worker: Worker, learner: Learner) -> None:
    worker.stager.settled(0, ok=False)
    staged = worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    assert staged.manifest.codec == "full"


def wide_and_narrow(seed: int = 0) -> State:
    """`model_state` and tensors of float32."""
    rng = np.random.default_rng(seed)
    wide = {"ab": (40, 4), "d": (3,)}
    return model_state(seed) | {
        name: BitTensor(rng.integers(0, 2**32, math.prod(shape), dtype=np.uint32), "float32", shape)
        for name, shape in wide.items()
    }


Place = tuple[str, int]  # tensor and flat position


def overwritten(staged: Staged, specs: Mapping[str, TensorSpec]) -> set[Place]:
    """The elements that a staged file writes to."""
    payload = staged.publication().payload
    changes = decode(staged.manifest.codec, payload, 0, specs, lambda name: np.zeros(0, np.uint16))
    if staged.manifest.codec == "full":
        return {(change.name, i) for change in changes for i in range(change.values.size)}
    return {(c.name, int(i)) for c in changes if c.indices is not None for i in c.indices}


def flip(worker: Worker, places: Iterable[Place], rng: np.random.Generator) -> None:
    for name, position in places:
        bits = worker.target.state[name].bits
        bits[position] ^= bits.dtype.type(1 << int(rng.integers(8 * bits.itemsize)))


@pytest.mark.parametrize("place", [("a", 5), ("ab", 3)])  # bfloat16, float32
@pytest.mark.parametrize("codec", ["compact", "fast", "overwrite", "full"])
def test_a_flip_that_the_next_patch_covers_is_counted_once(
    tmp_path: Path, codec: Codec, place: Place
) -> None:
    learner = Learner(wide_and_narrow())
    worker = Worker(tmp_path / "staged", learner.state)
    worker.install(worker.stager.stage(*learner.publish("full")))
    flip(worker, [place], np.random.default_rng(0))
    staged = worker.stager.stage(*learner.publish(codec, bumped(learner.state, dict([place, ("c", 0)]))))
    assert staged.manifest.codec == "overwrite"
    worker.install(staged)
    assert same_bits(worker.target.state, learner.state)
    assert (worker.receiver.standing, worker.receiver.digest_mismatches) == ("sound", 1)
    worker.install(worker.stager.stage(*learner.publish(codec, bumped(learner.state, dict([place])))))
    assert worker.receiver.digest_mismatches == 1


@pytest.mark.parametrize("position", [4, 5, 6])  # changed by the second, by all, by the third
def test_a_flip_that_several_versions_cover_is_counted(
    worker: Worker, learner: Learner, position: int
) -> None:
    """The bits expected are those of the engine's version, not of a version between."""
    for step in ([5], [5, 4], [6, 5]):
        new = copied(learner.state)
        new["a"].bits[step] += 1
        staged = worker.stager.stage(*learner.publish("compact", new))
    worker.target.state["a"].bits[position] ^= 0x0100
    worker.install(staged)
    assert same_bits(worker.target.state, learner.state)
    assert worker.receiver.digest_mismatches == 1


def test_several_versions_without_a_flip_raise_no_alarm(worker: Worker, learner: Learner) -> None:
    """Also where an element went back to what it was."""
    for positions in ({"a": 5}, {"a": 4, "b": 1}, {"a": 5}):
        staged = worker.stager.stage(*learner.publish("fast", bumped(learner.state, positions)))
    assert ("a", 5) in overwritten(staged, specs_of(learner.state))
    worker.install(staged)
    assert worker.receiver.digest_mismatches == 0


def test_a_full_file_after_a_patch_that_covered_a_flip(worker: Worker, learner: Learner) -> None:
    worker.target.state["a"].bits[5] ^= 0x0100
    worker.install(worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5}))))
    assert worker.receiver.digest_mismatches == 1
    worker.install(worker.stager.current(fresh=True))
    assert worker.receiver.digest_mismatches == 1  # it is gone
    worker.target.state["a"].bits[5] ^= 0x0100
    worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    worker.install(worker.stager.current(fresh=True))
    assert worker.receiver.digest_mismatches == 2
    assert same_bits(worker.target.state, learner.state)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rounds=st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.sampled_from(["compact", "fast", "overwrite", "full"]),
                    st.sampled_from([0.0, 0.01, 0.1, 0.15, 0.9]),
                ),
                min_size=1,
                max_size=3,
            ),
            st.sampled_from([0, 0, 0, 1, 3]),  # flips among what the next file writes to
            st.sampled_from([0, 0, 0, 2]),  # flips elsewhere
            st.booleans(),  # the engine takes the first version's file, though others are staged meanwhile
        ),
        min_size=5,
        max_size=10,
    ),
)
def test_no_false_alarm_and_every_damage_counted_once(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    rounds: list[tuple[list[tuple[Codec, float]], int, int, bool]],
) -> None:
    """Several publications, flips, an install; again and again, in every codec."""
    rng = np.random.default_rng(seed)
    learner = Learner(wide_and_narrow(seed % 97))
    specs = specs_of(learner.state)
    everything = {(name, i) for name, t in learner.state.items() for i in range(t.bits.size)}
    worker = Worker(tmp_path_factory.mktemp("staged"), learner.state)
    worker.install(worker.stager.stage(*learner.publish("full")))
    counted = 0
    for steps, num_covered, num_elsewhere, is_late in rounds:
        for number, (codec, share) in enumerate(steps):
            worker.stager.stage(*learner.publish(codec, learner.step(rng, share)))
            if number == 0 or not is_late:
                staged, state = worker.stager.current(), copied(learner.state)
        covered = overwritten(staged, specs)
        flipped = [
            places[i]
            for places, num in (
                (sorted(covered), num_covered),
                (sorted(everything - covered), num_elsewhere),
            )
            for i in rng.choice(len(places), min(num, len(places)), replace=False)
        ]
        flip(worker, flipped, rng)
        counted += bool(flipped)
        if set(flipped) <= covered:
            worker.install(staged)
        else:
            with pytest.raises(WeightsError, match="damaged since their last install"):
                worker.install(staged)
            assert worker.receiver.digest_mismatches == counted
            worker.stager.settled(staged.manifest.version, ok=False)
            worker.install(worker.stager.current())
            counted, state = counted + 1, learner.state  # it was still there, and is gone now
        assert same_bits(worker.target.state, state)
        assert (worker.receiver.standing, worker.receiver.digest_mismatches) == ("sound", counted)


def test_a_damaged_trailer_is_no_damage_to_live_weights(worker: Worker, learner: Learner) -> None:
    staged = worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    damage(staged.path, "flipped")
    with pytest.raises(WeightsError, match="stage it again"):
        worker.install(staged)
    assert worker.receiver.digest_mismatches == 0
    worker.stager.settled(1, ok=False)
    worker.install(worker.stager.current())
    assert same_bits(worker.target.state, learner.state)
    assert worker.receiver.digest_mismatches == 0


def test_a_full_file_when_asked(worker: Worker, learner: Learner) -> None:
    patch = worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    fresh = worker.stager.current(fresh=True)
    assert (patch.manifest.codec, fresh.manifest.codec) == ("overwrite", "full")
    worker.install(fresh)
    assert same_bits(worker.target.state, learner.state)


def test_a_full_file_where_new_bits_would_be_more(worker: Worker, learner: Learner) -> None:
    staged = worker.stager.stage(*learner.publish("compact", learner.step(np.random.default_rng(0), 0.5)))
    assert staged.manifest.codec == "full"
    worker.install(staged)
    worker.install(worker.stager.stage(*learner.publish("fast", bumped(learner.state, {"a": 5}))))
    assert same_bits(worker.target.state, learner.state)


def test_memory_for_an_engine_that_never_settles_is_bounded(worker: Worker, learner: Learner) -> None:
    rng = np.random.default_rng(0)
    for _ in range(8):
        staged = worker.stager.stage(*learner.publish("compact", learner.step(rng, 0.3)))
    dense_bytes = staged.manifest.dense_bytes
    assert sum(step.nbytes for step in worker.stager._steps) <= dense_bytes
    assert staged.manifest.codec == "full"
    assert len(worker.files()) <= 2
    worker.install(staged)
    assert same_bits(worker.target.state, learner.state)


@given(
    st.lists(st.dictionaries(st.integers(0, 10**6), st.integers(0, 9), min_size=1), min_size=1, max_size=6)
)
def test_merged_positions_are_those_of_a_set_with_the_oldest_bits(oldest_first: list[dict[int, int]]) -> None:
    """Some lie in one block, some do not."""
    parts = [
        Touched(
            np.array(sorted(old), np.int32), np.array([old[position] for position in sorted(old)], np.uint16)
        )
        for old in oldest_first
    ]
    merged = merge(parts)
    expected: dict[int, int] = {}
    for old in reversed(oldest_first):
        expected.update(old)
    assert merged.indices.tolist() == sorted(expected)
    assert merged.old.tolist() == [expected[position] for position in sorted(expected)]
    assert merged.indices.dtype == np.int32
    assert merged.old.dtype == np.uint16


def large_state() -> State:
    """8 MiB in one tensor, and a small one."""
    rng = np.random.default_rng(0)
    shapes = {"large": (1 << 22,), "small": (100,)}
    return {
        name: BitTensor(rng.integers(0, 2**15, shape[0], dtype=np.uint16), "bfloat16", shape)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("codec", "share"),
    [("full", 0.3), ("full", 0.5), ("full", 1.0), ("compact", 0.3), ("compact", 1.0), ("overwrite", 0.3)],
)
def test_memory_is_what_the_stager_says(tmp_path: Path, codec: Codec, share: float) -> None:
    """Beside the shadow: at most one dense copy kept, at most another on the way, and some segments."""
    learner = Learner(large_state(), segment_bytes=1 << 18)
    stager = Stager(None, tmp_path)
    stager.settled(stager.stage(*learner.publish("full")).manifest.version, ok=True)
    new = copied(learner.state)
    new["large"].bits[: int(share * (1 << 22))] ^= 1  # a part that is dense
    rng = np.random.default_rng(1)
    sparser = rng.permutation(1 << 22)[: int(share * (1 << 21))]
    dense_bytes = sum(tensor.nbytes for tensor in new.values())
    first = learner.publish(codec, new)
    new = copied(new)
    new["large"].bits[sparser] ^= 1
    second = learner.publish(codec, new)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for manifest, segments in (first, second):
            stager.stage(manifest, ((offset_bytes, segment.copy()) for offset_bytes, segment in segments))
        kept, peak = (used - before for used in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert same_bits(stager.bits(), new)
    assert kept <= 1.05 * dense_bytes
    assert peak <= 2.15 * dense_bytes


def test_a_step_too_large_for_a_patch_is_forgotten(worker: Worker, learner: Learner) -> None:
    """The engine then gets a full file once, and small ones again."""
    staged = worker.stager.stage(*learner.publish("compact", learner.step(np.random.default_rng(0), 0.9)))
    assert staged.manifest.codec == "full"
    assert sum(step.nbytes for step in worker.stager._steps) == 0
    worker.install(staged)
    staged = worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    assert (staged.manifest.codec, staged.manifest.base_version) == ("overwrite", 1)
    worker.install(staged)
    assert same_bits(worker.target.state, learner.state)


def test_a_patch_file_is_the_codecs_payload(tmp_path: Path) -> None:
    """Tensors of both widths."""
    rng = np.random.default_rng(0)
    wide = BitTensor(rng.integers(0, 2**32, 50, dtype=np.uint32), "float32", (50,))
    learner = Learner(model_state() | {"ab": wide})
    worker = Worker(tmp_path / "staged", learner.state)
    worker.install(worker.stager.stage(*learner.publish("full")))
    staged = worker.stager.stage(
        *learner.publish("overwrite", bumped(learner.state, {"a": 5, "ab": 3, "c": 0}))
    )
    changes = [
        Change(name, 0, np.array([position]), learner.state[name].bits[[position]])
        for name, position in {"a": 5, "ab": 3, "c": 0}.items()
    ]
    assert (
        staged.publication().payload.tobytes()
        == overwrite_payload(changes, specs_of(learner.state)).tobytes()
    )
    worker.install(staged)
    assert same_bits(worker.target.state, learner.state)


def damage(path: Path, how: str) -> None:
    payload = path.read_bytes()
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes(payload[:-1] + (b"" if how == "truncated" else bytes([payload[-1] ^ 1])))


@pytest.mark.parametrize("how", ["deleted", "truncated", "flipped"])
def test_a_damaged_full_file_is_not_handed_out_again(worker: Worker, learner: Learner, how: str) -> None:
    worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    full = worker.stager.current(fresh=True)
    damage(full.path, how)
    again = worker.stager.current(fresh=True)
    assert again.path != full.path
    damage(again.path, how)
    with pytest.raises(WeightsError):
        worker.install(again)
    worker.stager.settled(1, ok=False)
    assert worker.files() == []
    worker.install(worker.stager.current())
    assert same_bits(worker.target.state, learner.state)


def test_a_damaged_shadow_starts_again_from_an_earlier_full_version(worker: Worker, learner: Learner) -> None:
    v0 = copied(learner.state)
    snapshot = Learner(v0).publish("full")
    v1 = learner.publish("compact", bumped(v0, {"a": 5}))
    v2 = learner.publish("fast", bumped(learner.state, {"b": 5}))
    worker.stager.stage(*v1)
    worker.stager.read("a")[7] ^= 1
    with pytest.raises(WeightsError, match="must have digest"):
        worker.stager.stage(*v2)
    worker.stager.reset()
    assert (worker.stager.manifest, worker.files()) == (None, [])
    with pytest.raises(WeightsError, match="nothing was staged"):
        worker.stager.current()
    with pytest.raises(WeightsError, match="staged is nothing"):
        worker.stager.stage(*v2)
    with pytest.raises(WeightsError, match="'a'"):  # the model is still known
        worker.stager.stage(*Learner(other_model()).publish("full"))
    for publication in (snapshot, v1, v2):
        staged = worker.stager.stage(*publication)
    assert staged.manifest.codec == "full"
    worker.install(staged)
    assert same_bits(worker.target.state, learner.state)


def test_a_reset_does_not_bring_back_a_replaced_lineage(worker: Worker, learner: Learner) -> None:
    worker.stager.stage(*Learner(learner.state, "run-2").publish("full"))
    worker.stager.reset()
    with pytest.raises(WeightsError, match="was replaced"):
        worker.stager.stage(*learner.publish("full"))
    Stager(None, worker.folder).reset()  # nothing to forget


def test_superseded_files_go(worker: Worker, learner: Learner) -> None:
    assert worker.files() == []
    for position in range(5):
        staged = worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": position})))
        assert len(worker.files()) <= 2
        assert staged.path.exists()
    worker.install(staged)
    assert worker.files() == []


@pytest.mark.parametrize("codec", ["compact", "fast", "overwrite", "full"])
def test_damage_in_any_segment_leaves_no_trace(tmp_path: Path, learner: Learner, codec: Codec) -> None:
    """Here nobody hashed the bytes; a flip that is not refused has no effect (an unused bit of a table)."""
    first, base = learner.publish("full"), copied(learner.state)
    manifest, segments = learner.publish(codec, learner.step(np.random.default_rng(1), 0.05))
    rng, num_refused = np.random.default_rng(2), 0
    for number, (offset_bytes, segment) in enumerate(segments):
        for position in rng.integers(0, segment.size, 20):
            damaged = segment.copy()
            damaged[position] ^= np.uint8(1 << rng.integers(8))
            stager = Stager(None, tmp_path)
            stager.stage(*first)
            try:
                stager.stage(manifest, [*segments[:number], (offset_bytes, damaged), *segments[number + 1 :]])
                assert same_bits(stager.bits(), learner.state)
            except WeightsError:
                assert same_bits(stager.bits(), base)
                assert stager.manifest == first[0]
                stager.stage(manifest, segments)
                num_refused += 1
    assert num_refused > 10 * len(segments)


def test_a_source_that_breaks_off_leaves_no_trace(worker: Worker, learner: Learner) -> None:
    manifest, segments = learner.publish("compact", learner.step(np.random.default_rng(1), 0.05))

    def broken() -> Iterator[tuple[int, ByteArray]]:
        yield segments[0]
        raise OSError("the spool is gone")

    shadow = copied(worker.stager.bits())
    with pytest.raises(OSError, match="spool"):
        worker.stager.stage(manifest, broken())
    assert same_bits(worker.stager.bits(), shadow)
    worker.stager.stage(manifest, segments)
    assert same_bits(worker.stager.bits(), learner.state)


def test_wrong_base_order_digest_and_lengths_are_refused(worker: Worker, learner: Learner) -> None:
    v0 = copied(learner.state)
    first = learner.publish("compact", bumped(v0, {"a": 5}))
    manifest, segments = learner.publish("compact", bumped(learner.state, {"b": 5}))
    refused(worker, manifest, segments, "patches version 1")
    worker.stager.stage(*first)
    refused(worker, dataclasses.replace(manifest, digest=first[0].digest), segments, "must have digest")
    refused(worker, dataclasses.replace(manifest, digest="b3:" + "0" * 64), segments, "xxh3")
    refused(worker, dataclasses.replace(manifest, num_segments=99), segments, "segments")
    longer = dataclasses.replace(manifest, payload_bytes=manifest.payload_bytes + 1)
    refused(worker, longer, segments, "bytes")
    refused(worker, dataclasses.replace(manifest, payload_bytes=1), segments, "does not follow")
    worker.stager.stage(manifest, segments)
    refused(worker, *first, "older")
    worker.stager.stage(*Learner(v0, "run-2").publish("full"))
    refused(worker, *learner.publish("full"), "was replaced")


def test_a_resumed_run_goes_on_with_small_files(worker: Worker, learner: Learner) -> None:
    resumed = Learner(bumped(learner.state, {"a": 5}), "run-2")
    staged = worker.stager.stage(*resumed.publish("full"))
    assert (staged.manifest.codec, staged.manifest.lineage) == ("overwrite", "run-2")
    worker.install(staged)
    assert same_bits(worker.target.state, resumed.state)


def other_model() -> State:
    return model_state() | {"a": BitTensor(np.zeros(512, np.uint16), "bfloat16", (16, 32))}


def test_another_models_shapes_are_refused_by_name(tmp_path: Path, learner: Learner) -> None:
    worker = Worker(tmp_path, learner.state, specs=specs_of(other_model()))
    refused(worker, *learner.publish("full"), r"'a'.*\(32, 16\).*\(16, 32\)")
    with pytest.raises(WeightsError, match="nothing was staged"):
        worker.stager.current()
    worker.stager.stage(*Learner(other_model()).publish("full"))
    assert same_bits(worker.stager.bits(), other_model())


def test_a_model_does_not_change_its_shapes(worker: Worker) -> None:
    refused(worker, *Learner(other_model(), "run-2").publish("full"), "'a'")


def test_a_bad_first_publication_teaches_nothing(tmp_path: Path, learner: Learner) -> None:
    worker = Worker(tmp_path, learner.state)
    manifest, segments = Learner(other_model()).publish("full")
    refused(worker, dataclasses.replace(manifest, digest=state_digest(model_state())), segments, "digest")
    worker.install(worker.stager.stage(*learner.publish("full")))
    assert same_bits(worker.target.state, learner.state)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"a":{"dtype":"BF16","shape":[1099511627776],"data_offsets":[0,2199023255552]}}',
        b'{"a":{"dtype":"BF16","shape":[-1],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"BF16","shape":["1"],"data_offsets":[0,2]}}',
        b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":1}',
    ],
)
def test_a_first_publication_without_a_sound_header_is_refused(tmp_path: Path, header: bytes) -> None:
    worker = Worker(tmp_path, {})
    segment = np.frombuffer(len(header).to_bytes(8, "little") + header, dtype=np.uint8)
    manifest, _ = Learner(model_state()).publish("full")
    manifest = dataclasses.replace(manifest, payload_bytes=segment.size, num_segments=1)
    refused(worker, manifest, [(0, segment)], "full publication")


def test_a_snapshot_serves_somebody_else(worker: Worker, learner: Learner, tmp_path: Path) -> None:
    worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    snapshot = worker.stager.snapshot()
    check_payload(snapshot)
    other = Worker(tmp_path / "other", learner.state)
    other.install(other.stager.stage(snapshot.manifest, [(0, snapshot.payload)]))
    assert same_bits(other.target.state, learner.state)
    with pytest.raises(WeightsError, match="nothing was staged"):
        Stager(None, tmp_path).snapshot()


def test_a_folder_that_cannot_be_written_loses_nothing(worker: Worker, learner: Learner) -> None:
    worker.folder.rmdir()
    worker.folder.write_text("a file in its place")
    with pytest.raises(ClusterError, match="room"):
        worker.stager.stage(*learner.publish("compact", bumped(learner.state, {"a": 5})))
    worker.folder.unlink()
    worker.install(worker.stager.current())
    assert same_bits(worker.target.state, learner.state)
