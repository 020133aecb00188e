"""States to encode, for the tests of codecs and digests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from hypothesis import strategies as st

from echo_planes.types import Codec, TensorSpec
from echo_planes.weights.codec.entry import EncodedSegment, apply, decode
from echo_planes.weights.digest import BIT_DTYPES, BitArray, BitTensor

State = dict[str, BitTensor]
CODECS: tuple[Codec, ...] = ("compact", "fast", "overwrite", "full")
CODED: tuple[Codec, ...] = ("compact", "fast")
# -0.0, infinities and NaNs with payloads, as the upper or only half of an element.
SPECIAL_BITS = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x7C00, 0x0001]
SHAPES = [(0,), (1,), (3,), (2, 5), (4, 0), (8, 3), (5, 13)]


def copied(state: Mapping[str, BitTensor]) -> State:
    return {name: BitTensor(t.bits.copy(), t.dtype, t.shape) for name, t in state.items()}


def same_bits(a: Mapping[str, BitTensor], b: Mapping[str, BitTensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].spec(name) == b[name].spec(name) and np.array_equal(a[name].bits, b[name].bits) for name in a
    )


def specs_of(state: Mapping[str, BitTensor]) -> dict[str, TensorSpec]:
    return {name: tensor.spec(name) for name, tensor in state.items()}


def one(bits: BitArray, dtype: str = "bfloat16") -> State:
    return {"w": BitTensor(bits, dtype, bits.shape)}


def random_bits(draw: st.DrawFn, dtype: str, size: int) -> BitArray:
    kind = BIT_DTYPES[dtype]
    special = st.sampled_from([bits << (8 * kind.itemsize - 16) for bits in SPECIAL_BITS])
    anything = st.integers(0, 2 ** (8 * kind.itemsize) - 1)
    return np.array(draw(st.lists(special | anything, min_size=size, max_size=size)), dtype=kind)


@st.composite
def states(draw: st.DrawFn) -> State:
    state = {}
    for number in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from(sorted(BIT_DTYPES))), draw(st.sampled_from(SHAPES))
        state[f"layer.{number}.weight"] = BitTensor(random_bits(draw, dtype, math.prod(shape)), dtype, shape)
    return state


@st.composite
def successive_states(draw: st.DrawFn) -> tuple[State, State]:
    """A state and the one after an update that changed some of its elements."""
    old = draw(states())
    new = copied(old)
    for tensor in new.values():
        for position in draw(st.sets(st.integers(0, max(tensor.bits.size - 1, 0)), max_size=6)):
            if position < tensor.bits.size:
                tensor.bits[position] = random_bits(draw, tensor.dtype, 1)[0]
    return old, new


def model_state(seed: int = 0) -> State:
    """All dtypes, an empty tensor and one of one element; a few blocks of 64, none of them whole."""
    rng = np.random.default_rng(seed)
    state = {}
    for name, dtype, shape in (
        ("a", "bfloat16", (90, 37)),
        ("b", "float32", (17, 9)),
        ("c", "bfloat16", (0, 4)),
        ("d", "float16", (1,)),
        ("e", "float16", (130,)),
    ):
        weights = rng.normal(0, 0.015, math.prod(shape)).astype(np.float32)
        kind = BIT_DTYPES[dtype]
        bits = weights.view(np.uint32) >> (32 - 8 * kind.itemsize)
        state[name] = BitTensor(bits.astype(kind), dtype, shape)
    return state


def updated(state: Mapping[str, BitTensor], seed: int, share: float = 0.05) -> State:
    """Some elements moved by one unit in the last place, a few by anything."""
    rng = np.random.default_rng(seed)
    new = copied(state)
    for tensor in new.values():
        bits = tensor.bits
        small = rng.random(bits.size) < share
        bits[small] += rng.choice(np.array([1, -1]), int(small.sum())).astype(bits.dtype)
        large = rng.random(bits.size) < share / 10
        bits[large] = rng.integers(0, np.iinfo(bits.dtype).max, int(large.sum()), bits.dtype, endpoint=True)
    return new


def decoded_onto(codec: Codec, base: State, segments: Iterable[EncodedSegment]) -> State:
    """The state that a receiver with this base ends with."""
    state, offset_bytes = copied(base), 0
    for segment in segments:
        changes = decode(codec, segment.payload, offset_bytes, specs_of(state), lambda name: state[name].bits)
        offset_bytes += segment.payload.size
        for change in changes:
            apply(change, state[change.name].bits)
    return state
