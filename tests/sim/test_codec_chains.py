"""Chains of patches end with the learner's digest, whatever codec each link is written in."""

from __future__ import annotations

import numpy as np
import pytest

from echo_planes.types import Codec
from echo_planes.weights.codec.entry import Patcher, apply, decode, encode
from echo_planes.weights.digest import BIT_DTYPES, BitTensor, StateHasher, state_digest
from tests.unit.codec_states import State, copied, specs_of

NUM_CHAINS, NUM_PATCHES = 200, 50
SHAPES = (("embed", "bfloat16", (37, 8)), ("norm", "float32", (9,)), ("proj", "float16", (70,)))
SHARES = (0.0, 0.003, 0.02, 0.3, 1.0)
PATCHES: tuple[Codec, ...] = ("compact", "fast", "overwrite", "compact", "fast")


def first_state(rng: np.random.Generator) -> State:
    state = {}
    for name, dtype, shape in SHAPES:
        kind = BIT_DTYPES[dtype]
        bits = rng.integers(0, np.iinfo(kind).max, int(np.prod(shape)), kind, endpoint=True)
        state[name] = BitTensor(bits, dtype, shape)
    return state


def step(state: State, rng: np.random.Generator) -> None:
    """One update in place: mostly small steps; sometimes any pattern becomes any other."""
    for tensor in state.values():
        bits = tensor.bits
        where = np.flatnonzero(rng.random(bits.size) < rng.choice(SHARES))
        if rng.random() < 0.2:
            bits[where] = rng.integers(0, np.iinfo(bits.dtype).max, where.size, bits.dtype, endpoint=True)
        else:
            bits[where] += rng.integers(-3, 4, where.size).astype(bits.dtype)


@pytest.mark.parametrize("part", range(4))
def test_random_chains_end_with_the_learners_digest(part: int) -> None:
    """Half of the chains through `decode` and `apply`, half through a `Patcher`."""
    for chain in range(part, NUM_CHAINS, 4):
        rng = np.random.default_rng(chain)
        learner = first_state(rng)
        worker, specs = copied(learner), specs_of(learner)
        for _ in range(NUM_PATCHES):
            base = copied(learner)
            step(learner, rng)
            codec = PATCHES[rng.integers(len(PATCHES))]
            hasher = StateHasher()
            segments = [segment.payload for segment in encode(codec, base, learner, hasher=hasher)]
            if chain % 8 < 4:
                for segment in segments:
                    for change in decode(codec, segment, 0, specs, lambda name: worker[name].bits):  # noqa: B023
                        apply(change, worker[change.name].bits)
            else:
                patcher = Patcher(codec, worker, StateHasher())
                for segment in segments:
                    patcher.apply(segment)
                assert patcher.digest("xxh3") == hasher.digest()
        assert state_digest(worker) == state_digest(learner)
