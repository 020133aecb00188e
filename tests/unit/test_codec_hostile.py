"""Refusal, by type, of anything that is no segment, without a write or a large allocation.

Random bytes, valid segments with bytes changed, cut or inserted, and headers that lie.
"""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, Codec, TensorSpec
from echo_planes.weights.codec.entry import Patcher, decode, encode
from echo_planes.weights.codec.layout import put_number
from echo_planes.weights.digest import BIT_DTYPES
from tests.thorough import examples
from tests.unit.codec_states import CODECS, CODED, copied, model_state, one, same_bits, specs_of, updated

BASE, NEW = model_state(), updated(model_state(), 1, 0.2)
SPECS = specs_of(BASE)
SEGMENTS = {codec: [s.payload for s in encode(codec, BASE, NEW, segment_bytes=2500)] for codec in CODECS}


def refused_or_within_the_model(codec: Codec, segment: ByteArray, offset_bytes: int) -> None:
    try:
        changes = decode(codec, segment, offset_bytes, SPECS, lambda name: BASE[name].bits)
    except WeightsError:
        return
    for change in changes:
        spec = SPECS[change.name]
        elements, num = math.prod(spec.shape), change.values.size
        assert change.values.dtype == BIT_DTYPES[spec.dtype]
        if change.indices is None:
            assert 0 <= change.start <= change.start + num <= elements
        else:
            assert change.indices.size == num <= elements
            assert bool((np.diff(change.indices) > 0).all())
            assert num == 0 or (change.indices[0] >= 0 and change.indices[-1] < elements)


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None)
@given(data=st.binary(max_size=200), lead=st.integers(0, 40), offset_bytes=st.sampled_from([0, 1, 900, 5000]))
def test_random_bytes(codec: Codec, data: bytes, lead: int, offset_bytes: int) -> None:
    """After some bytes of a real segment, so that checks beyond the first are reached."""
    start = SEGMENTS[codec][0][:lead]
    segment = np.concatenate([start, np.frombuffer(data, np.uint8)])
    refused_or_within_the_model(codec, segment, offset_bytes)


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    kinds = st.sampled_from(["set", "flip", "cut", "insert", "truncate"])
    return draw(
        st.lists(st.tuples(kinds, st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)
    )


def damaged(segment: ByteArray, damage: Sequence[tuple[str, int, int]]) -> ByteArray:
    data = bytearray(segment.tobytes())
    for kind, where, value in damage:
        at = where % max(len(data), 1)
        if kind == "insert":
            data.insert(at, value)
        elif kind == "truncate":
            del data[at:]
        elif data and kind == "cut":
            del data[at]
        elif data:
            data[at] = value if kind == "set" else data[at] ^ (1 << value % 8)
    return np.frombuffer(bytes(data), np.uint8)


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None, max_examples=examples(300))
@given(damage=damages(), number=st.integers(0, 2), near_the_start=st.booleans())
def test_mutated_segments(
    codec: Codec, damage: list[tuple[str, int, int]], number: int, near_the_start: bool
) -> None:
    if near_the_start:
        damage = [(kind, where % 80, value) for kind, where, value in damage]
    segments = SEGMENTS[codec]
    offset_bytes = sum(segment.size for segment in segments[:number])
    refused_or_within_the_model(codec, damaged(segments[number], damage), offset_bytes)


@pytest.mark.parametrize("codec", CODED)
@settings(deadline=None)
@given(damage=damages())
def test_a_mutated_segment_that_is_refused_writes_nothing(
    codec: Codec, damage: list[tuple[str, int, int]]
) -> None:
    state = copied(BASE)
    patcher = Patcher(codec, state)
    try:
        patcher.apply(damaged(SEGMENTS[codec][0], damage))
    except WeightsError:
        assert same_bits(state, BASE)
    patcher.undo()
    assert same_bits(state, BASE)


@pytest.mark.parametrize("codec", CODED)
def test_every_truncation_is_refused(codec: Codec) -> None:
    segment = SEGMENTS[codec][0]
    for size in range(0, segment.size, 7):
        with pytest.raises(WeightsError):
            decode(codec, segment[:size], 0, SPECS, lambda name: BASE[name].bits)
    with pytest.raises(WeightsError, match="bytes too many"):
        decode(codec, np.append(segment, np.uint8(0)), 0, SPECS, lambda name: BASE[name].bits)


def coded(codec: Codec, *numbers: int, rest: bytes = b"") -> ByteArray:
    """A segment of the model `a` (10 elements) and `b` (0 elements), written by hand."""
    out = bytearray(b"EP\x01" + bytes(({"compact": 1, "fast": 2}[codec],)))
    for number in numbers:
        put_number(out, number)
    return np.frombuffer(bytes(out) + rest, np.uint8)


BOMB = zstandard.ZstdCompressor().compress(bytes(2**20))
TWICE = 2 * zstandard.ZstdCompressor().compress(b"ab")  # a second frame behind the one that is read
SMALL = {"a": TensorSpec("a", "bfloat16", (10,)), "b": TensorSpec("b", "bfloat16", (0,))}
RUN = (0, 0, 0, 10)  # first tensor and element, last tensor and end


@pytest.mark.parametrize(
    ("codec", "segment", "why"),
    [
        ("compact", coded("fast", *RUN, 0), "no compact segment"),
        ("fast", coded("fast", 2, 0, 2, 0), "first tensor is 2"),
        ("fast", coded("fast", 0, 11, 0, 11), "first element is 11"),
        ("fast", coded("fast", 0, 0, 0, 11), "end element is 11"),
        ("fast", coded("fast", 1, 0, 0, 0), "runs backwards"),
        ("fast", coded("fast", 0, 5, 0, 4), "runs backwards"),
        ("fast", coded("fast", 0, 10, 1, 0), "covers nothing"),
        ("fast", coded("fast", *RUN, rest=b"\xff" * 12), "cut short or too long"),
        ("fast", coded("fast", *RUN, 11), "number of changes is 11"),
        ("fast", coded("fast", *RUN, 2, 2**40), "size of gaps"),
        ("fast", coded("fast", *RUN, 2, 1, 3, rest=b"abc"), "at least 2 are needed"),
        ("fast", coded("fast", *RUN, 2, 2, 3, rest=b"abc"), "do not decompress"),
        ("fast", coded("fast", *RUN, 2, 2, len(BOMB), rest=BOMB), "a frame of 1048576 bytes, not 2"),
        ("fast", coded("fast", *RUN, 2, 2, len(TWICE), rest=TWICE), "do not decompress"),
        ("fast", coded("fast", *RUN, 2, 2, 500), "is cut short"),
        ("compact", coded("compact", *RUN, 0), "no classes"),
        ("compact", coded("compact", *RUN, 7), "number of classes is 7"),
        ("compact", coded("compact", *RUN, 2, 255), "class threshold is 255"),
        ("compact", coded("compact", *RUN, 3, 9, 9), "do not rise"),
        ("compact", coded("compact", *RUN, 1, 11), "number of changes is 11"),
        ("compact", coded("compact", *RUN, 2, 9, 6, 5), "number of changes is 5"),
        ("compact", coded("compact", *RUN, 1, 1, rest=b"\0\1"), "cut short"),
        ("compact", coded("compact", *RUN, 1, 1, rest=b"\3\1\1" + bytes(40)), "parameters"),
        ("compact", coded("compact", *RUN, 1, 1, rest=b"\0\1\1\3" + bytes(40)), "damaged table"),
        ("compact", coded("compact", *RUN, 1, 1, rest=b"\0\0\1\1" + b"\xff" * 40), "more bytes than"),
        ("compact", coded("compact", *RUN, 1, 1, rest=b"\0\0\1\1" + bytes(40)), "end where it should"),
    ],
)  # fmt: skip
def test_lies_are_refused_one_by_one(codec: Codec, segment: ByteArray, why: str) -> None:
    with pytest.raises(WeightsError, match=why):
        decode(codec, segment, 0, SMALL, lambda name: np.zeros(10, np.uint16)[: math.prod(SMALL[name].shape)])


def test_a_segment_covers_no_more_than_segments_do() -> None:
    huge = {"a": TensorSpec("a", "bfloat16", (2**40,))}
    with pytest.raises(WeightsError, match="dense bytes"):
        decode("fast", coded("fast", 0, 0, 0, 2**40, 0), 0, huge, lambda name: np.zeros(0, np.uint16))


def test_a_base_of_another_size_is_refused() -> None:
    base = one(np.zeros(100, np.uint16))
    payload = next(encode("compact", base, base)).payload
    with pytest.raises(WeightsError):
        decode("compact", payload, 0, specs_of(base), lambda name: np.zeros(99, np.uint16))


def raw_payload(header: object, data_bytes: int = 0) -> ByteArray:
    text = json.dumps(header).encode()
    return np.frombuffer(len(text).to_bytes(8, "little") + text + bytes(data_bytes), dtype=np.uint8)


HUGE = {"a": {"dtype": "BF16", "shape": [2**40], "data_offsets": [0, 2**41]}}


@pytest.mark.parametrize(
    "payload",
    [
        np.zeros(3, np.uint8),
        np.full(16, 0xFF, np.uint8),  # a header of 2^64 - 1 bytes
        raw_payload([]),
        np.frombuffer((3).to_bytes(8, "little") + b"{ab", np.uint8),
        raw_payload(HUGE),
        raw_payload({"a": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 0]}}),
        raw_payload({"a": {"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]}}, 2),
        raw_payload({"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}}, 2),
        raw_payload({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [1, 3]}}, 3),  # a gap
        raw_payload({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}, 4),  # a rest
        raw_payload({"a": 1}),
        np.zeros((2, 8), np.uint8),
        np.zeros(16, np.uint16),
    ],
    ids=str,
)
def test_malformed_payloads_are_refused(payload: ByteArray) -> None:
    for codec in CODECS:
        with pytest.raises(WeightsError):
            decode(
                codec,
                payload,
                0,
                {"a": TensorSpec("a", "bfloat16", (1,))},
                lambda name: np.zeros(1, np.uint16),
            )


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_allocated_for_a_lie(codec: Codec) -> None:
    run = (0, 0, 0, 2**24)
    lie = {"compact": coded("compact", *run, 1, 2**24), "fast": coded("fast", *run, 2**20, 2**20, 100)}
    payload = lie.get(codec, raw_payload(HUGE))
    specs = {"a": TensorSpec("a", "bfloat16", (2**40,))}
    tracemalloc.start()
    with pytest.raises(WeightsError):
        decode(codec, payload, 0, specs, lambda name: np.zeros(0, np.uint16))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 * 2**24  # what a segment may cover, and no terabytes


def test_full_payload_must_match_the_model() -> None:
    payload = SEGMENTS["full"][0]
    for wrong in (
        {name: spec for name, spec in SPECS.items() if name != "d"},
        SPECS | {"f": TensorSpec("f", "bfloat16", (1,))},
        SPECS | {"a": TensorSpec("a", "float16", (90, 37))},
        SPECS | {"a": TensorSpec("a", "bfloat16", (37, 90))},
    ):
        with pytest.raises(WeightsError):
            decode("full", payload, 0, wrong, lambda name: BASE[name].bits)


def test_full_segments_split_no_element_and_lie_within_the_file() -> None:
    whole = np.concatenate(SEGMENTS["full"])
    header = whole.size - sum(tensor.nbytes for tensor in BASE.values())
    for start, stop in ((header + 1, header + 9), (header, header + 3), (4, 100)):
        with pytest.raises(WeightsError):
            decode("full", whole[start:stop], start, SPECS, lambda name: BASE[name].bits)
    with pytest.raises(WeightsError, match="no piece"):
        decode("full", whole[-8:], whole.size, SPECS, lambda name: BASE[name].bits)


@pytest.mark.parametrize("indices", [[-1, 2], [2, 4], [2, 2], [3, 1]], ids=str)
def test_overwrite_indices_must_increase_within_the_tensor(indices: list[int]) -> None:
    header = {
        "a:indices": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]},
        "a:values": {"dtype": "BF16", "shape": [2], "data_offsets": [8, 12]},
    }
    payload = raw_payload(header, 12).copy()
    payload[-12:-4] = np.array(indices, dtype="<i4").view(np.uint8)
    with pytest.raises(WeightsError, match="increase strictly"):
        decode(
            "overwrite",
            payload,
            0,
            {"a": TensorSpec("a", "bfloat16", (4,))},
            lambda name: np.zeros(4, np.uint16),
        )


def test_overwrite_needs_known_tensors_and_pairs() -> None:
    entry = {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}
    values = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    specs = {"a": TensorSpec("a", "bfloat16", (4,))}
    for header in ({"a:indices": entry}, {"b:indices": entry, "b:values": values}, {"a": values}):
        with pytest.raises(WeightsError):
            decode("overwrite", raw_payload(header), 0, specs, lambda name: np.zeros(4, np.uint16))
