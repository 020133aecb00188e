"""Choice of the codec that a patch is written in."""

from __future__ import annotations

import numpy as np
import pytest

from echo_planes.cluster.clock import MonotonicClock
from echo_planes.types import Codec
from echo_planes.weights.codec.choice import CodecChoice, CodecCost, measure, quickest
from echo_planes.weights.digest import BIT_DTYPES, BitTensor

DENSE_BYTES = 10**9
COSTS: dict[Codec, CodecCost] = {  # seconds per dense byte to encode and decode, bytes per dense byte
    "compact": CodecCost(4e-10, 4e-10, 0.005),
    "fast": CodecCost(3e-10, 1e-10, 0.007),
    "overwrite": CodecCost(1e-10, 0.5e-10, 0.030),
}


@pytest.mark.parametrize(("rate_bytes_per_s", "codec"), [(1e6, "compact"), (2e7, "fast"), (1e9, "overwrite")])
def test_slow_links_want_few_bytes_and_quick_ones_little_work(rate_bytes_per_s: float, codec: Codec) -> None:
    assert quickest(COSTS, DENSE_BYTES, rate_bytes_per_s) == codec
    chosen = COSTS[codec].seconds(DENSE_BYTES, rate_bytes_per_s)
    assert chosen == min(cost.seconds(DENSE_BYTES, rate_bytes_per_s) for cost in COSTS.values())


def test_a_patch_larger_than_the_weights_is_no_patch() -> None:
    costs: dict[Codec, CodecCost] = {"overwrite": CodecCost(0.0, 0.0, 2.7)}
    assert quickest(costs, DENSE_BYTES, 1e6) == "full"
    assert quickest(COSTS | costs, DENSE_BYTES, 1e9) == "fast"


def tensors(changed: float, seed: int = 0) -> tuple[dict[str, BitTensor], dict[str, BitTensor]]:
    """A state of 60,000 bfloat16 elements, and one with a share of them moved by one ulp."""
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for name, elements in (("big", 50_000), ("small", 10_000)):
        floats = rng.normal(0.0, 0.02, elements).astype(np.float32)
        bits = (floats.view(np.uint32) >> 16).astype(BIT_DTYPES["bfloat16"])
        old[name] = BitTensor(bits, "bfloat16", (elements,))
        moved = bits + (rng.random(elements) < changed).astype(bits.dtype)
        new[name] = BitTensor(moved, "bfloat16", (elements,))
    return old, new


def test_what_a_codec_costs_is_measured_on_the_weights_themselves() -> None:
    old, new = tensors(changed=0.01)
    compact = measure("compact", old, new, MonotonicClock())
    overwrite = measure("overwrite", old, new, MonotonicClock())
    assert 0 < compact.payload_bytes < overwrite.payload_bytes / 2
    assert compact.encode_s > 0
    assert compact.decode_s > 0


def test_one_codec_by_name_and_full_where_everything_changed() -> None:
    choice = CodecChoice("overwrite", MonotonicClock())
    assert choice.codec(*tensors(changed=0.01)) == "overwrite"
    # An index and a value cost three times what the value alone does.
    assert CodecChoice("overwrite", MonotonicClock()).codec(*tensors(changed=0.9)) == "full"


def test_the_rate_of_the_links_decides() -> None:
    old, new = tensors(changed=0.01)
    choice = CodecChoice("auto", MonotonicClock())
    choice.rate_bytes_per_s = 1e3
    assert choice.codec(old, new) == "compact"
