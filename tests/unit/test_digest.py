"""Digests count every bit, name, dtype and shape, whole or in pieces: `weights/digest.py`."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import WeightsError
from echo_planes.weights.digest import BitArray, BitTensor, StateHasher, bytes_digest, state_digest
from tests.unit.codec_states import SPECIAL_BITS, model_state, states


@settings(deadline=None)  # a busy machine is no failure
@given(states(), st.data())
def test_digest_depends_on_every_bit_and_not_on_order(
    state: dict[str, BitTensor], data: st.DataObject
) -> None:
    before = state_digest(state)
    assert before == state_digest(dict(reversed(state.items())))
    filled = [name for name, tensor in state.items() if tensor.bits.size]
    if not filled:
        return
    tensor = state[data.draw(st.sampled_from(filled))]
    position = data.draw(st.integers(0, tensor.bits.size - 1))
    bit = data.draw(st.integers(0, 8 * tensor.bits.itemsize - 1))
    tensor.bits[position] ^= tensor.bits.dtype.type(1 << bit)
    assert state_digest(state) != before


def test_digest_tells_name_dtype_shape_and_special_values_apart() -> None:
    bits = np.zeros(4, dtype=np.uint16)
    variants = [
        *({"a": BitTensor(np.full(4, value, np.uint16), "bfloat16", (4,))} for value in SPECIAL_BITS[1:]),
        {"a": BitTensor(bits, "bfloat16", (4,))},
        {"b": BitTensor(bits, "bfloat16", (4,))},
        {"a": BitTensor(bits, "float16", (4,))},
        {"a": BitTensor(bits, "bfloat16", (2, 2))},
        {"a": BitTensor(bits, "bfloat16", (4,)), "e": BitTensor(bits[:0], "bfloat16", (0,))},
    ]
    assert len({state_digest(variant) for variant in variants}) == len(variants)


@pytest.mark.parametrize(
    ("bits", "dtype", "shape"),
    [
        (np.zeros(3, np.uint16), "bfloat16", (4,)),
        (np.zeros(4, np.uint32), "bfloat16", (4,)),
        (np.zeros((2, 2), np.uint16), "bfloat16", (2, 2)),
        (np.zeros(8, np.uint16)[::2], "bfloat16", (4,)),
        (np.zeros(4, np.uint16), "int16", (4,)),
    ],
)
def test_bits_must_fit_dtype_and_shape(bits: BitArray, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightsError):
        BitTensor(bits, dtype, shape)


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3", "sha256"])
@settings(deadline=None)  # a busy machine is no failure
@given(state=states(), cut=st.integers(0, 30))
def test_a_state_digested_in_pieces_has_the_same_digest(
    algorithm: str, state: dict[str, BitTensor], cut: int
) -> None:
    hasher = StateHasher(algorithm)
    for name in sorted(state):
        tensor = state[name]
        hasher.begin(name, tensor.dtype, tensor.shape)
        hasher.update(tensor.bits[:cut])
        hasher.update(tensor.bits[cut:])
    assert hasher.digest() == state_digest(state, algorithm)


def test_a_hasher_refuses_what_is_no_state() -> None:
    one = np.zeros(1, np.uint16)
    with pytest.raises(WeightsError, match="not one of"):
        StateHasher("md5")
    missing = StateHasher()
    missing.begin("a", "bfloat16", (2,))
    missing.update(one)
    with pytest.raises(WeightsError, match="1 elements of tensor 'a' were not"):
        missing.digest()
    with pytest.raises(WeightsError, match="were not"):
        missing.begin("b", "bfloat16", (1,))
    missing.update(one)
    with pytest.raises(WeightsError, match="too many"):
        missing.update(one)
    with pytest.raises(WeightsError, match="cannot be digested after"):
        missing.begin("a", "bfloat16", (1,))


def test_algorithms_are_the_known_ones() -> None:
    """A state of one tensor by hand, and raw bytes."""
    text = b'["a", "bfloat16", [2]]\0' + bytes((1, 0, 2, 0))
    state = {"a": BitTensor(np.array([1, 2], np.uint16), "bfloat16", (2,))}
    assert state_digest(state, "sha256") == f"sha256:{hashlib.sha256(text).hexdigest()}"
    assert state_digest(state, "blake3") == f"b3:{blake3(text).hexdigest()}"
    assert state_digest(model_state()).startswith("xxh3:")
    assert bytes_digest(np.array([1, 2], np.uint8)) == f"b3:{blake3(bytes((1, 2))).hexdigest()}"
