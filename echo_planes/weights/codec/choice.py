"""Choice of the codec of a patch: the one with the least encode + bytes / rate + decode, each measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo_planes.cluster.clock import Clock
from echo_planes.types import Codec
from echo_planes.weights.codec.entry import Patcher, encode
from echo_planes.weights.codec.table import BUNDLED
from echo_planes.weights.digest import BitTensor

SAMPLE_BYTES = 4 * 1024**2
MEASURE_EVERY = 50  # publications
DEFAULT_RATE_BYTES_PER_S = 100e6 / 8  # assumed for a worker's wide-area link before the first measurement
ROUNDS = 2  # the first round also compiles or loads the kernels


@dataclass(frozen=True, slots=True)
class CodecCost:
    """Cost of one codec on a sample of the weights, per dense byte."""

    encode_s: float
    decode_s: float
    payload_bytes: float

    def seconds(self, dense_bytes: int, rate_bytes_per_s: float) -> float:
        """Return the seconds to encode, send at this rate and decode `dense_bytes` of weights."""
        per_byte_s = self.encode_s + self.payload_bytes / rate_bytes_per_s + self.decode_s
        return dense_bytes * per_byte_s


def quickest(costs: Mapping[Codec, CodecCost], dense_bytes: int, rate_bytes_per_s: float) -> Codec:
    """Return the codec with the least total time; `full` if no patch would be smaller than the weights."""
    worth = {codec: cost for codec, cost in costs.items() if cost.payload_bytes < 1.0}
    if not worth:
        return "full"
    return min(worth, key=lambda codec: worth[codec].seconds(dense_bytes, rate_bytes_per_s))


def measure(
    codec: Codec, base: Mapping[str, BitTensor], tensors: Mapping[str, BitTensor], clock: Clock
) -> CodecCost:
    """Return the cost of encoding and decoding a sample with one codec: the least of `ROUNDS` rounds."""
    old, new = _sample(base), _sample(tensors)
    dense_bytes = max(1, sum(tensor.nbytes for tensor in new.values()))
    rounds = []
    for _ in range(ROUNDS):
        shadow = {name: BitTensor(t.bits.copy(), t.dtype, t.shape) for name, t in old.items()}
        begun_s = clock.now_s()
        segments = [segment.payload for segment in encode(codec, old, new)]
        encoded_s = clock.now_s()
        patcher = Patcher(codec, shadow)
        for payload in segments:
            patcher.apply(payload)
        rounds.append((encoded_s - begun_s, clock.now_s() - encoded_s))
    encode_s, decode_s = (min(column) for column in zip(*rounds, strict=True))
    payload_bytes = sum(payload.size for payload in segments)
    return CodecCost(encode_s / dense_bytes, decode_s / dense_bytes, payload_bytes / dense_bytes)


class CodecChoice:
    """Chooses the codec of each patch of one publisher.

    Args:
        wanted: name of a codec in the table, or "auto" for the quickest of the bundled ones.
        clock: measures the costs.
    """

    def __init__(self, wanted: str, clock: Clock) -> None:
        self._wanted = wanted
        self._clock = clock
        self._costs: dict[Codec, CodecCost] = {}
        self._asked = 0
        self.rate_bytes_per_s = DEFAULT_RATE_BYTES_PER_S  # of the slowest link; the learner sets it

    def codec(self, base: Mapping[str, BitTensor], tensors: Mapping[str, BitTensor]) -> Codec:
        """Return the codec for the patch from `base` to `tensors`; measure every `MEASURE_EVERY` patches."""
        candidates = BUNDLED if self._wanted == "auto" else (self._wanted,)
        if self._asked % MEASURE_EVERY == 0:
            self._costs = {codec: measure(codec, base, tensors, self._clock) for codec in candidates}
        self._asked += 1
        dense_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return quickest(self._costs, dense_bytes, self.rate_bytes_per_s)


def _sample(tensors: Mapping[str, BitTensor]) -> dict[str, BitTensor]:
    """Return the first elements of every tensor, at least 16 of each: about `SAMPLE_BYTES` in all."""
    share = min(1.0, SAMPLE_BYTES / max(1, sum(tensor.nbytes for tensor in tensors.values())))
    sample = {}
    for name, tensor in tensors.items():
        elements = min(tensor.bits.size, max(16, int(tensor.bits.size * share)))
        sample[name] = BitTensor(tensor.bits[:elements], tensor.dtype, (elements,))
    return sample
