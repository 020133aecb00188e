"""Every codec carries every bit: `weights/codec/entry.py` and the codecs behind it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import WeightsError
from echo_planes.types import Codec
from echo_planes.weights.codec import kernels
from echo_planes.weights.codec.changes import Change
from echo_planes.weights.codec.entry import (
    Patcher,
    apply,
    decode,
    encode,
    full_payload,
    index_dtype,
    overwrite_payload,
)
from echo_planes.weights.codec.rans import decode_numbers, encode_numbers
from echo_planes.weights.digest import BitArray, StateHasher, state_digest
from tests.unit.codec_states import (
    CODECS,
    CODED,
    State,
    copied,
    decoded_onto,
    model_state,
    one,
    same_bits,
    specs_of,
    successive_states,
    updated,
)


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None)  # the first example may compile
@given(pair=successive_states(), segment_bytes=st.sampled_from([1, 150, 1 << 25]))
def test_codecs_carry_bits_exactly(codec: Codec, pair: tuple[State, State], segment_bytes: int) -> None:
    old, new = pair
    hasher = StateHasher()
    segments = list(encode(codec, old, new, hasher=hasher, segment_bytes=segment_bytes))
    assert same_bits(decoded_onto(codec, old, segments), new)
    assert hasher.digest() == state_digest(new)
    for name, tensor in new.items():
        counted = sum(segment.changed.get(name, 0) for segment in segments)
        assert counted == np.count_nonzero(tensor.bits != old[name].bits)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.6, 1.0])
@pytest.mark.parametrize("segment_bytes", [1000, 1 << 25])
def test_codecs_carry_updates_of_every_dtype(codec: Codec, share: float, segment_bytes: int) -> None:
    old = model_state()
    new = updated(old, 1, share) if share else copied(old)
    segments = list(encode(codec, old, new, segment_bytes=segment_bytes))
    assert same_bits(decoded_onto(codec, old, segments), new)
    assert (len(segments) > 5) == (segment_bytes == 1000)


def special_and_random_pairs() -> tuple[BitArray, BitArray]:
    """Every special pattern against every 16-bit pattern, both ways round, and random pairs."""
    rng = np.random.default_rng(3)
    every = np.arange(65536, dtype=np.uint16)
    nans = rng.choice(every[(every & 0x7FFF) > 0x7F80], 8)
    special = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F7F, 0xFF7F, 0x7FFF, 0xFFFF, *nans]
    olds = [np.full(65536, bits, np.uint16) for bits in special]
    sampled = rng.integers(0, 65536, (2, 500_000), dtype=np.uint16)
    old = np.concatenate([*olds, *([every] * len(olds)), sampled[0]])
    new = np.concatenate([*([every] * len(olds)), *olds, sampled[1]])
    return old, new


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_pattern_becomes_any_other(codec: Codec, dtype: str) -> None:
    """The sampled side of the proof in compact.py: zeros, infinities, NaNs and everything between."""
    old, new = special_and_random_pairs()
    segments = list(encode(codec, one(old, dtype), one(new, dtype)))
    assert same_bits(decoded_onto(codec, one(old, dtype), segments), one(new, dtype))


@pytest.mark.parametrize("codec", CODED)
def test_all_steps_of_one_pattern(codec: Codec) -> None:
    """A step of every size, so that each of them takes the branch it must."""
    old = np.full(65536, 0x3C8A, np.uint16)
    new = old + np.arange(65536, dtype=np.uint16)
    assert same_bits(decoded_onto(codec, one(old), encode(codec, one(old), one(new))), one(new))


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("gap", [0, 1, 62, 63, 64, 253, 254, 255, 256, 509, 510, 511, 70_000])
def test_gaps_of_every_size(codec: Codec, gap: int) -> None:
    old = np.full(3 * gap + 200, 0x3C8A, np.uint16)
    new = old.copy()
    new[gap :: gap + 1] += 1
    assert same_bits(decoded_onto(codec, one(old), encode(codec, one(old), one(new))), one(new))


@pytest.mark.parametrize("codec", CODECS)
def test_a_patch_may_span_many_versions(codec: Codec) -> None:
    states = [model_state()]
    for seed in range(12):
        states.append(updated(states[-1], seed))
    segments = encode(codec, states[0], states[-1])
    assert same_bits(decoded_onto(codec, states[0], segments), states[-1])


@pytest.mark.parametrize("codec", ["compact", "fast", "overwrite"])
def test_a_patch_without_a_change_is_small(codec: Codec) -> None:
    state = model_state()
    segments = list(encode(codec, state, copied(state)))
    assert len(segments) == 1
    assert segments[0].payload.size < 32
    assert segments[0].changed == {}


def test_segments_are_made_one_by_one() -> None:
    """A later segment is scanned only when asked for: what it covers may still be written before that."""
    old = one(np.zeros(10_000, np.uint16))
    new = copied(old)
    segments = encode("compact", old, new, segment_bytes=4096)
    list(islice(segments, 2))
    new["w"].bits[9_000] = 7
    assert [segment.changed for segment in segments][-1] == {"w": 1}


@pytest.mark.parametrize("codec", CODED)
def test_small_updates_are_written_small(codec: Codec) -> None:
    """1 % of steps of +-1: 9.1 bits of information a change."""
    rng = np.random.default_rng(0)
    old = (rng.normal(0, 0.015, 2_000_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    where = np.unique(rng.integers(0, old.size, old.size // 100))
    new[where] += rng.choice(np.array([1, 65535], np.uint16), where.size)
    size = sum(segment.payload.size for segment in encode(codec, one(old), one(new)))
    assert size / where.size < {"compact": 1.16, "fast": 1.22}[codec]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("hashed", [True, False])
def test_a_patcher_ends_with_the_new_state_and_can_take_it_back(codec: Codec, hashed: bool) -> None:
    old, new = model_state(), updated(model_state(), 5)
    state = copied(old)
    patcher = Patcher(codec, state, StateHasher() if hashed else None)
    for segment in encode(codec, old, new, segment_bytes=2000):
        for applied in patcher.apply(segment.payload):
            where = applied.change.indices
            stop = applied.change.start + applied.old.size
            part = slice(applied.change.start, stop) if where is None else where
            assert np.array_equal(old[applied.change.name].bits[part], applied.old)
    assert patcher.digest("xxh3") == state_digest(new)
    assert same_bits(state, new)
    patcher.undo()
    assert same_bits(state, old)


@pytest.mark.parametrize("codec", ["compact", "fast", "full"])
def test_a_patcher_needs_the_whole_payload(codec: Codec) -> None:
    old, new = model_state(), updated(model_state(), 5)
    patcher = Patcher(codec, copied(old))
    patcher.apply(next(encode(codec, old, new, segment_bytes=2000)).payload)
    with pytest.raises(WeightsError, match="ends"):
        patcher.digest("xxh3")


@pytest.mark.parametrize("codec", CODED)
def test_a_patcher_takes_segments_in_order(codec: Codec) -> None:
    old, new = model_state(), updated(model_state(), 5)
    segments = [segment.payload for segment in encode(codec, old, new, segment_bytes=2000)]
    for first, second in ((0, 0), (0, 2)):
        state = copied(old)
        patcher = Patcher(codec, state)
        patcher.apply(segments[first])
        with pytest.raises(WeightsError, match="a segment begins at"):
            patcher.apply(segments[second])
        patcher.undo()
        assert same_bits(state, old)


@pytest.mark.parametrize("codec", CODECS)
def test_a_segment_that_cannot_be_written_to_its_end_leaves_the_state_as_it_was(codec: Codec) -> None:
    old, new = model_state(), updated(model_state(), 5)
    state = copied(old)
    state["e"].bits.flags.writeable = False  # the last that is written
    patcher = Patcher(codec, state)
    with pytest.raises(WeightsError, match="tensor 'e' cannot be written to"):
        patcher.apply(next(encode(codec, old, new)).payload)
    assert same_bits(state, old)


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("slices", [0, 1, 2])
def test_a_segment_breaks_off_between_writing_and_digesting(codec: Codec, slices: int) -> None:
    class Full(StateHasher):
        num = 0

        def update(self, bits: BitArray) -> None:
            self.num += 1
            if self.num > slices:
                raise MemoryError
            super().update(bits)

    old, new = model_state(), updated(model_state(), 5)
    state = copied(old)
    patcher = Patcher(codec, state, Full())
    with pytest.raises(MemoryError):
        patcher.apply(next(encode(codec, old, new)).payload)
    assert same_bits(state, old)


def test_a_patch_whose_classes_the_base_lacks_leaves_nothing_behind() -> None:
    """Small weights all changed, large ones hardly: two classes. A base of large ones has one of them."""
    old = np.repeat(np.array([0x2000, 0x3C00], np.uint16), 1000)
    new = old.copy()
    new[:1001] += 1
    payload = next(encode("compact", one(old), one(new))).payload
    other = one(np.full(2000, 0x3C00, np.uint16))
    before = copied(other)
    with pytest.raises(WeightsError, match="beyond the last element of their class"):
        Patcher("compact", other).apply(payload)
    assert same_bits(other, before)


def test_full_payload_is_a_safetensors_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    state = model_state()
    pieces = [segment.payload for segment in encode("full", None, state, segment_bytes=1000)]
    assert np.array_equal(np.concatenate(pieces), full_payload(state))
    full_payload(state).tofile(tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {
        name: tensor.shape for name, tensor in state.items()
    }
    for name, tensor in state.items():
        kind = torch.uint32 if tensor.dtype == "float32" else torch.uint16
        assert np.array_equal(loaded[name].reshape(-1).view(kind).numpy(), tensor.bits)


def test_full_counts_everything_where_there_is_no_base() -> None:
    state = model_state()
    changed = next(encode("full", None, state)).changed
    assert changed == {name: t.bits.size for name, t in state.items() if t.bits.size}


def test_changes_of_any_kind_become_one_overwrite() -> None:
    base = one(np.arange(200, dtype=np.uint16))
    values = np.arange(3, dtype=np.uint16)
    changes = [
        Change("w", 5, None, values),
        Change("w", 70, np.array([70, 75], np.int32), values[:2] + np.uint16(9)),
        Change("w", 80, None, values[:0]),
    ]
    payload = overwrite_payload(changes, specs_of(base))
    found = decode("overwrite", payload, 0, specs_of(base), lambda name: base[name].bits)
    assert [change.name for change in found] == ["w"]
    assert found[0].indices is not None
    assert found[0].indices.tolist() == [5, 6, 7, 70, 75]
    assert found[0].values.tolist() == [0, 1, 2, 9, 10]


@pytest.mark.parametrize(
    "change",
    [
        Change("w", 9, None, np.zeros(2, np.uint16)),
        Change("w", -1, None, np.zeros(2, np.uint16)),
        Change("w", 0, None, np.zeros(2, np.uint32)),
        Change("w", 0, np.array([0, 10]), np.zeros(2, np.uint16)),
        Change("w", 0, np.array([3, 3]), np.zeros(2, np.uint16)),
        Change("w", 0, np.array([-1, 3]), np.zeros(2, np.uint16)),
        Change("w", 0, np.array([1]), np.zeros(2, np.uint16)),
    ],
)
def test_a_change_that_does_not_fit_is_not_written(change: Change) -> None:
    bits = np.full(10, 7, np.uint16)
    with pytest.raises(WeightsError):
        apply(change, bits)
    assert (bits == 7).all()


def test_a_base_must_have_the_same_tensors() -> None:
    state = model_state()
    for base in ({}, {name: t for name, t in state.items() if name != "c"}, one(np.zeros(3, np.uint16))):
        with pytest.raises(WeightsError):
            next(encode("compact", base, state))
    with pytest.raises(WeightsError, match="needs a base"):
        next(encode("fast", None, state))
    with pytest.raises(WeightsError, match="at least one tensor"):
        next(encode("full", None, {}))


def test_indices_are_as_wide_as_they_must_be() -> None:
    assert (index_dtype(2**31 - 1), index_dtype(2**31)) == ("int32", "int64")


@settings(deadline=None)  # the first example may compile
@given(st.integers(1, 2**64 - 1), st.data())
def test_the_portable_search_finds_the_same_bit(mask: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, mask.bit_count() - 1))
    bits = [bit for bit in range(64) if mask >> bit & 1]
    expected = 1 << bits[n]
    for search in {kernels.nth_bit, kernels.nth_bit_portable}:
        assert int(search(np.uint64(mask), np.uint64(n))) == expected


@settings(deadline=None)  # the first example may compile
@given(st.lists(st.integers(0, 2**28 - 1) | st.integers(0, 9), min_size=1, max_size=50), st.integers(0, 5))
def test_numbers_are_entropy_coded_exactly(numbers: list[int], lead: int) -> None:
    values = np.array(numbers, np.uint32)
    data = np.frombuffer(bytes(lead) + encode_numbers(values) + b"rest", np.uint8).copy()
    out = np.empty_like(values)
    assert decode_numbers(data, lead, out) == data.size - 4
    assert np.array_equal(out, values)


def test_numbers_that_lack_bits_are_refused() -> None:
    """The last word of raw bits taken away, and the count of words with it."""
    values = np.full(100, 1000, np.uint32)  # one token, which takes no words; 9 raw bits each
    data = bytearray(encode_numbers(values))
    num_extra = -(-100 * 9 // 32)
    at = data.index(num_extra.to_bytes(4, "little"))
    data[at : at + 4] = (num_extra - 1).to_bytes(4, "little")
    with pytest.raises(WeightsError, match="too many or too few bits"):
        decode_numbers(np.frombuffer(data[:-4], np.uint8), 0, np.empty_like(values))


@pytest.mark.parametrize("size", [2047, 2048, 16_384])
def test_entropy_coding_comes_near_the_entropy(size: int) -> None:
    """Each alphabet, at the number of symbols where it begins to be used."""
    share = 0.01
    values = (np.random.default_rng(0).geometric(share, size) - 1).astype(np.uint32)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    assert 8 * len(encode_numbers(values)) / size < 1.04 * entropy
