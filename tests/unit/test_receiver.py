"""An install ends with exactly the published bits, or leaves no trace: `weights/receiver.py`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import RunError, WeightsError
from echo_planes.types import Codec, Manifest, Publication, TensorSpec
from echo_planes.weights.codec.changes import exchange
from echo_planes.weights.codec.entry import Applied, Change, decode, encode, full_payload, overwrite_payload
from echo_planes.weights.digest import BIT_DTYPES, BitTensor, bytes_digest, run_of, state_digest
from echo_planes.weights.receiver import Receiver, check_payload, digest_of_replaced, open_staged, trailer

State = dict[str, BitTensor]
# Sign, exponent and mantissa of special values, as the upper or only half of an element.
SPECIAL_BITS = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x7C00, 0x0001]
SHAPES = [(0,), (1,), (3,), (2, 5), (4, 0), (8, 3)]


class MemoryTarget:
    """Tensors in memory; `fail_at` makes the n-th exchange fail, `fail_from` also all later ones."""

    def __init__(self, state: Mapping[str, BitTensor]) -> None:
        self.state = copied(state)
        self.writes = 0
        self.reads = 0
        self.fail_at = self.fail_from = 0

    def specs(self) -> dict[str, TensorSpec]:
        return specs_of(self.state)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> BitTensor:
        self.reads += 1
        return run_of(self.state[name], start, stop)

    def exchange(self, change: Change) -> Applied:
        self.writes += 1
        if self.writes == self.fail_at or 0 < self.fail_from <= self.writes:
            raise OSError("the device went away")
        return exchange(change, self.state[change.name].bits)


def copied(state: Mapping[str, BitTensor]) -> State:
    return {name: BitTensor(t.bits.copy(), t.dtype, t.shape) for name, t in state.items()}


def specs_of(state: Mapping[str, BitTensor]) -> dict[str, TensorSpec]:
    return {name: tensor.spec(name) for name, tensor in state.items()}


def same_bits(a: Mapping[str, BitTensor], b: Mapping[str, BitTensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].spec(name) == b[name].spec(name) and np.array_equal(a[name].bits, b[name].bits) for name in a
    )


def model_state(seed: int = 0) -> State:
    """A state large enough that a small change travels as a patch."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (32, 16), "b": (64,), "c": (1,)}
    return {
        name: BitTensor(rng.integers(0, 2**16, math.prod(shape), dtype=np.uint16), "bfloat16", shape)
        for name, shape in shapes.items()
    }


def bumped(state: Mapping[str, BitTensor], positions: Mapping[str, int]) -> State:
    new = copied(state)
    for name, position in positions.items():
        new[name].bits[position] ^= 1
    return new


def publication(
    version: int,
    tensors: Mapping[str, BitTensor],
    base: Mapping[str, BitTensor] | None = None,
    *,
    lineage: str = "run-1",
    algorithm: str = "xxh3",
) -> Publication:
    """A version in full, or as new bits relative to `base`, the version before."""
    if base is None:
        payload, codec = full_payload(tensors), "full"
    else:
        changes = []
        for name, tensor in tensors.items():
            found = np.flatnonzero(base[name].bits != tensor.bits)
            changes.append(Change(name, 0, found, tensor.bits[found]))
        payload, codec = overwrite_payload(changes, specs_of(tensors)), "overwrite"
    manifest = Manifest(
        lineage=lineage,
        version=version,
        num_updates=version,
        codec=codec,  # type: ignore[arg-type]
        base_version=version - 1 if base else -1,
        base_digest=state_digest(base, algorithm) if base else "",
        digest=state_digest(tensors, algorithm),
        payload_digest=bytes_digest(payload),
        payload_bytes=payload.size,
        dense_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        changed_elements=0,
        total_elements=sum(tensor.bits.size for tensor in tensors.values()),
    )
    return Publication(manifest, payload)


def with_manifest(publication: Publication, **fields: Any) -> Publication:
    return dataclasses.replace(publication, manifest=dataclasses.replace(publication.manifest, **fields))


def replacing(patch: Publication, base: Mapping[str, BitTensor]) -> Publication:
    """The same patch, which says what it replaces."""
    changes = decode("overwrite", patch.payload, 0, specs_of(base), lambda name: base[name].bits)
    replaced = digest_of_replaced(base[change.name].bits[change.indices] for change in changes)
    return dataclasses.replace(patch, replaced_digest=replaced)


@st.composite
def successive_states(draw: st.DrawFn) -> tuple[State, State]:
    """A state and the one after an update that changed some of its elements."""
    old: State = {}
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    for number in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from(sorted(BIT_DTYPES))), draw(st.sampled_from(SHAPES))
        kind = BIT_DTYPES[dtype]
        high = rng.choice(np.array(SPECIAL_BITS), math.prod(shape)).astype(np.uint64)
        bits = (high << np.uint64(8 * kind.itemsize - 16)).astype(kind)
        old[f"layer.{number}.weight"] = BitTensor(bits, dtype, shape)
    new = copied(old)
    for tensor in new.values():
        hit = rng.random(tensor.bits.size) < draw(st.sampled_from([0.0, 0.2, 1.0]))
        flips = rng.integers(0, 2 ** (8 * tensor.bits.itemsize), tensor.bits.size, dtype=np.uint64)
        tensor.bits[hit] ^= flips.astype(tensor.bits.dtype)[hit]
    return old, new


@settings(deadline=None)
@given(successive_states(), st.sampled_from(["xxh3", "blake3", "sha256"]))
def test_an_install_ends_with_the_published_bits(pair: tuple[State, State], algorithm: str) -> None:
    old, new = pair
    blank = {name: BitTensor(np.zeros_like(t.bits), t.dtype, t.shape) for name, t in old.items()}
    target = MemoryTarget(blank)
    receiver = Receiver(target)
    receiver.install(publication(0, old, algorithm=algorithm))
    assert same_bits(target.state, old)
    installed = receiver.install(replacing(publication(1, new, old, algorithm=algorithm), old))
    assert same_bits(target.state, new)
    assert installed.digest == state_digest(new, algorithm) == receiver.live_digest()
    assert (installed.lineage, installed.version) == ("run-1", 1)
    assert receiver.digest_mismatches == 0


def serving() -> tuple[MemoryTarget, Receiver]:
    """A receiver that has version 0 of `model_state()`."""
    target = MemoryTarget(model_state(seed=9))
    receiver = Receiver(target)
    receiver.install(publication(0, model_state()))
    return target, receiver


def refused(receiver: Receiver, target: MemoryTarget, publication: Publication, why: str) -> None:
    """The install fails for this reason and changes nothing."""
    before, installed = copied(target.state), receiver.installed
    with pytest.raises(WeightsError, match=why):
        receiver.install(publication)
    assert same_bits(target.state, before)
    assert receiver.installed == installed


def test_a_patch_costs_one_digest_of_the_live_tensors() -> None:
    target, receiver = serving()
    names = len(target.state)
    patch = publication(1, bumped(model_state(), {"a": 5}), model_state())
    target.reads = 0
    receiver.install(patch)
    assert target.reads == names


def test_a_first_version_that_the_engine_has_loaded_is_not_written() -> None:
    state = model_state()
    target = MemoryTarget(copied(state))
    target.fail_at = 1  # the first write would fail
    receiver = Receiver(target)
    assert receiver.install(publication(0, state)).version == 0
    assert receiver.standing == "sound"


def test_every_flipped_payload_byte_is_found() -> None:
    patch = publication(1, bumped(model_state(), {"a": 5}), model_state())
    check_payload(patch)
    for position in range(patch.payload.size):
        damaged = patch.payload.copy()
        damaged[position] ^= 0x10
        with pytest.raises(WeightsError, match="damaged"):
            check_payload(Publication(patch.manifest, damaged))
    with pytest.raises(WeightsError, match="damaged"):
        check_payload(Publication(patch.manifest, patch.payload[:-1]))


def test_an_update_that_does_not_make_its_digest_is_undone() -> None:
    target, receiver = serving()
    patch = publication(1, bumped(model_state(), {"a": 5, "b": 1}), model_state())
    damaged = patch.payload.copy()
    damaged[-1] ^= 0x10  # the last byte of the new values
    refused(receiver, target, Publication(patch.manifest, damaged), "must have digest")
    assert receiver.digest_mismatches == 1
    receiver.install(patch)
    assert receiver.digest_mismatches == 1


def test_a_patch_needs_its_base() -> None:
    target, receiver = serving()
    v1, v2 = bumped(model_state(), {"a": 5}), bumped(model_state(), {"a": 6})
    refused(receiver, target, publication(2, v2, v1), "patches version 1")


@pytest.mark.parametrize("codec", ["compact", "fast"])
def test_what_was_not_staged_is_refused(codec: Codec) -> None:
    target, receiver = serving()
    (segment, *_) = encode(codec, model_state(), bumped(model_state(), {"a": 5}))
    patch = publication(1, bumped(model_state(), {"a": 5}), model_state())
    raw = with_manifest(Publication(patch.manifest, segment.payload), codec=codec)
    refused(receiver, target, raw, "must be staged")


def test_tensors_of_another_model_are_refused() -> None:
    target, receiver = serving()
    other = model_state() | {"a": BitTensor(np.zeros(512, np.uint16), "bfloat16", (16, 32))}
    refused(receiver, target, publication(1, other), "must hold the model's 3 tensors")


def test_a_flipped_live_bit_is_found_by_a_patch_and_mended_by_a_full_publication() -> None:
    target, receiver = serving()
    target.state["b"].bits[2] ^= 0x0100
    v1 = bumped(model_state(), {"a": 5})
    refused(receiver, target, publication(1, v1, model_state()), "live weights were damaged")
    assert receiver.digest_mismatches == 1
    receiver.install(publication(1, v1))
    assert same_bits(target.state, v1)
    assert receiver.digest_mismatches == 2  # it was still there, and is gone now
    receiver.install(publication(2, bumped(v1, {"a": 1}), v1))
    assert receiver.digest_mismatches == 2


def test_flips_that_a_patch_covers_are_counted_and_no_error() -> None:
    target, receiver = serving()
    v1, v2 = bumped(model_state(), {"a": 5, "b": 1}), bumped(model_state(), {"a": 7})
    target.state["a"].bits[5] ^= 0x0100
    target.state["b"].bits[1] ^= 0x0200
    names, target.reads = len(target.state), 0
    receiver.install(replacing(publication(1, v1, model_state()), model_state()))
    assert target.reads == names  # no second pass over the live tensors
    assert same_bits(target.state, v1)
    assert (receiver.standing, receiver.digest_mismatches) == ("sound", 1)
    receiver.install(replacing(publication(2, v2, v1), v1))
    assert receiver.digest_mismatches == 1


def test_a_flip_elsewhere_refuses_the_patch_and_is_counted_once() -> None:
    """Also beside one that the patch covers."""
    for covered in (False, True):
        target, receiver = serving()
        target.state["b"].bits[2] ^= 0x0100
        target.state["a"].bits[5] ^= 0x0100 * covered
        patch = replacing(publication(1, bumped(model_state(), {"a": 5}), model_state()), model_state())
        refused(receiver, target, patch, "live weights were damaged")
        assert (receiver.standing, receiver.digest_mismatches) == ("damaged", 1)


def test_a_patch_need_not_say_what_it_replaces() -> None:
    target, receiver = serving()
    target.state["a"].bits[5] ^= 0x0100
    v1 = bumped(model_state(), {"a": 5})
    receiver.install(publication(1, v1, model_state()))
    assert same_bits(target.state, v1)
    assert receiver.digest_mismatches == 0


@pytest.mark.parametrize("digest", ["xxh3:", "xxh3:" + "g" * 32, "b3:" + "0" * 64, "xxh3:" + "0" * 33])
def test_a_malformed_digest_of_what_is_replaced_is_refused(digest: str) -> None:
    target, receiver = serving()
    patch = publication(1, bumped(model_state(), {"a": 5}), model_state())
    refused(receiver, target, dataclasses.replace(patch, replaced_digest=digest), "says that it replaces")
    full = dataclasses.replace(publication(1, model_state()), replaced_digest="xxh3:" + "0" * 32)
    refused(receiver, target, full, "says that it replaces")
    assert (receiver.standing, receiver.digest_mismatches) == ("sound", 0)


def test_a_covered_flip_under_an_install_that_is_undone_is_told_as_damage() -> None:
    serves = True

    def probe() -> None:
        if not serves:
            raise WeightsError("not finite")

    target = MemoryTarget(model_state(seed=9))
    receiver = Receiver(target, probe)
    receiver.install(publication(0, model_state()))
    target.state["a"].bits[5] ^= 0x0100
    serves = False
    patch = replacing(publication(1, bumped(model_state(), {"a": 5}), model_state()), model_state())
    refused(receiver, target, patch, "live weights were damaged")
    assert (receiver.standing, receiver.digest_mismatches) == ("damaged", 0)


def test_versions_do_not_go_back_but_may_come_again() -> None:
    target, receiver = serving()
    v1 = bumped(model_state(), {"a": 5})
    receiver.install(publication(1, v1, model_state()))
    refused(receiver, target, publication(0, model_state()), "older than the present version")
    receiver.install(publication(1, v1))


def test_a_replaced_lineage_is_void() -> None:
    target, receiver = serving()
    late = publication(7, model_state(seed=3))
    receiver.install(publication(0, model_state(seed=4), lineage="run-2"))
    refused(receiver, target, late, "was replaced")


def test_a_patch_may_lead_to_another_lineage_and_another_digest_algorithm() -> None:
    target, receiver = serving()
    new = bumped(model_state(), {"a": 5})
    receiver.install(publication(0, new, model_state(), lineage="run-2", algorithm="blake3"))
    assert same_bits(target.state, new)
    assert receiver.live_digest() == state_digest(new, "blake3")
    assert receiver.digest_mismatches == 0


@pytest.mark.parametrize("fail_at", [1, 2, 3])
@pytest.mark.parametrize("full", [True, False])
def test_an_install_that_breaks_off_is_rolled_back(fail_at: int, full: bool) -> None:
    target, receiver = serving()
    v1 = bumped(model_state(), {"a": 5, "b": 1, "c": 0})
    update = publication(1, v1, None if full else model_state())
    before = copied(target.state)
    target.writes, target.fail_at = 0, fail_at
    with pytest.raises(OSError, match="went away"):
        receiver.install(update)
    assert same_bits(target.state, before)
    target.fail_at = 0
    receiver.install(update)
    assert same_bits(target.state, v1)


def test_old_weights_that_do_not_come_back_are_told() -> None:
    target, receiver = serving()
    target.writes = 0
    good = target.exchange

    def stuck(change: Change) -> Applied:
        return good(change) if target.writes < 2 else Applied(change, change.values)

    target.exchange = stuck  # type: ignore[method-assign]
    update = publication(1, bumped(model_state(), {"a": 5, "b": 1}), model_state())
    with pytest.raises(RunError, match="restart this engine"):
        receiver.install(with_manifest(update, digest=state_digest(model_state(seed=5))))
    assert receiver.standing == "broken"


@pytest.mark.parametrize("full", [True, False])
def test_a_device_that_fails_for_good_breaks_the_receiver(full: bool) -> None:
    """Putting the old bits back fails too: half the new version is in place, and nothing mends that."""
    target, receiver = serving()
    v1 = bumped(model_state(), {"a": 5, "b": 1, "c": 0})
    target.writes, target.fail_from = 0, 2
    with pytest.raises(RunError, match=r"could not be put back \(the device went away\)"):
        receiver.install(publication(1, v1, None if full else model_state()))
    assert receiver.standing == "broken"
    target.fail_from = 0
    with pytest.raises(RunError, match="restart this engine"):
        receiver.install(publication(1, v1))


def test_damaged_weights_take_a_full_publication_only() -> None:
    target, receiver = serving()
    assert receiver.standing == "sound"
    target.state["b"].bits[2] ^= 0x0100
    v1 = bumped(model_state(), {"a": 5})
    patch = publication(1, v1, model_state())
    refused(receiver, target, patch, "live weights were damaged")
    assert receiver.standing == "damaged"
    writes = target.writes
    refused(receiver, target, patch, "a full publication mends them")
    assert target.writes == writes
    assert receiver.digest_mismatches == 1  # counted once
    target.writes, target.fail_at = 0, 2
    with pytest.raises(OSError, match="went away"):
        receiver.install(publication(1, v1))
    assert receiver.standing == "damaged"  # what was put back is the damage
    receiver.install(publication(1, v1))
    assert receiver.standing == "sound"


def test_damage_found_by_a_refused_full_publication_is_told() -> None:
    target, receiver = serving()
    target.state["b"].bits[2] ^= 0x0100
    other = model_state() | {"a": BitTensor(np.zeros(512, np.uint16), "bfloat16", (16, 32))}
    refused(receiver, target, publication(1, other), "must hold the model's 3 tensors")
    assert receiver.standing == "damaged"


def test_a_refused_publication_leaves_sound_weights_sound() -> None:
    target, receiver = serving()
    patch = publication(1, bumped(model_state(), {"a": 5}), model_state())
    refused(receiver, target, with_manifest(patch, digest=state_digest(model_state(1))), "must have digest")
    assert receiver.standing == "sound"


def test_an_exchange_keeps_what_it_replaces_or_touches_nothing() -> None:
    bits = np.arange(10, dtype=np.uint16)
    where, new = np.array([1, 9], np.int32), np.array([70, 71], np.uint16)
    applied = exchange(Change("a", 0, where, new), bits)
    assert (applied.old.tolist(), bits[[1, 9]].tolist()) == ([1, 9], [70, 71])
    assert exchange(Change("a", 4, None, new), bits).old.tolist() == [4, 5]
    assert bits[4:6].tolist() == [70, 71]
    before = bits.copy()
    for wrong in (
        Change("a", 0, np.array([1, 10], np.int32), new),
        Change("a", 0, np.array([-1, 2], np.int32), new),
        Change("a", 0, np.array([2, 2], np.int32), new),
        Change("a", 0, where[:1], new),
        Change("a", 0, where, new.astype(np.uint32)),
        Change("a", 9, None, new),
        Change("a", -1, None, new[:1]),
    ):
        with pytest.raises(WeightsError, match="'a'"):
            exchange(wrong, bits)
    assert np.array_equal(bits, before)


@pytest.mark.parametrize("full", [True, False])
def test_a_failed_probe_restores_the_last_version(full: bool) -> None:
    target = MemoryTarget(model_state(seed=9))
    probed: list[bool] = []
    serves = True

    def probe() -> None:
        probed.append(same_bits(target.state, model_state()))
        if not serves:
            raise WeightsError("not finite")

    receiver = Receiver(target, probe)
    receiver.install(publication(0, model_state()))
    assert probed == [True]  # the probe sees the new weights
    serves = False
    v1 = bumped(model_state(), {"a": 5})
    refused(receiver, target, publication(1, v1, None if full else model_state()), "not finite")
    assert receiver.digest_mismatches == 0
    serves = True
    receiver.install(publication(1, v1, model_state()))
    assert same_bits(target.state, v1)


def test_a_staged_file_is_mapped_and_checked(tmp_path: Path) -> None:
    update = publication(1, bumped(model_state(), {"a": 5}), model_state())
    path = tmp_path / "v1.safetensors"
    update.payload.tofile(path)
    staged = open_staged(update.manifest, path)
    assert isinstance(staged.payload, np.memmap)
    target, receiver = serving()
    receiver.install(staged)
    assert same_bits(target.state, bumped(model_state(), {"a": 5}))
    with pytest.raises(WeightsError, match="bytes"):
        open_staged(dataclasses.replace(update.manifest, payload_bytes=1), path)
    with pytest.raises(WeightsError, match="cannot open"):
        open_staged(update.manifest, tmp_path / "none")
    path.write_bytes(b"")
    with pytest.raises(WeightsError, match="cannot open"):
        open_staged(update.manifest, path)


def test_what_a_staged_file_replaces_stands_behind_its_payload(tmp_path: Path) -> None:
    v1 = bumped(model_state(), {"a": 5})
    update = replacing(publication(1, v1, model_state()), model_state())
    path = tmp_path / "v1.safetensors"
    payload, behind = update.payload.tobytes(), trailer(update.replaced_digest)
    path.write_bytes(payload + behind)
    staged = open_staged(update.manifest, path)
    check_payload(staged)
    assert staged.replaced_digest == update.replaced_digest
    assert isinstance(staged.payload, np.memmap)
    target, receiver = serving()
    target.state["a"].bits[5] ^= 0x0100
    receiver.install(staged)
    assert same_bits(target.state, v1)
    assert receiver.digest_mismatches == 1

    for position in range(len(behind)):
        damaged = bytearray(behind)
        damaged[position] ^= 1
        path.write_bytes(payload + damaged)
        with pytest.raises(WeightsError, match="stage it again"):
            open_staged(update.manifest, path)
    for wrong in (behind[:-1], behind + b"0", behind + behind, b"0"):
        path.write_bytes(payload + wrong)
        with pytest.raises(WeightsError, match="its manifest says"):
            open_staged(update.manifest, path)
    full = publication(1, v1)
    path.write_bytes(full.payload.tobytes() + behind)
    with pytest.raises(WeightsError, match="its manifest says"):
        open_staged(full.manifest, path)
