"""Choice of the codec of a patch: the one with the least encode + bytes / rate + decode, each measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from echo_planes.cluster.clock import Clock
from echo_planes.types import Codec
from echo_planes.weights.codec.entry import Patcher, encode
from echo_planes.weights.digest import BitTensor

PATCH_CODECS: tuple[Codec, ...] = ("compact", "fast", "overwrite")
SAMPLE_BYTES = 4 * 1024**2
MEASURE_EVERY = 50  # publications
DEFAULT_RATE_BYTES_PER_S = 100e6 / 8  # a worker's wide-area link, until one was measured
ROUNDS = 2  # the first compiles or loads what the second measures


@dataclass(frozen=True, slots=True)
class CodecCost:
    """Cost of one codec on a sample of the weights, per dense byte."""

    encode_s: float
    decode_s: float
    payload_bytes: float

    def seconds(self, dense_bytes: int, rate_bytes_per_s: float) -> float:
        """Encode, send over the slowest link, decode."""
        per_byte_s = self.encode_s + self.payload_bytes / rate_bytes_per_s + self.decode_s
        return dense_bytes * per_byte_s


def quickest(costs: Mapping[Codec, CodecCost], dense_bytes: int, rate_bytes_per_s: float) -> Codec:
    """The codec with the least total time; `full` where no patch would be smaller than the weights."""
    worth = {codec: cost for codec, cost in costs.items() if cost.payload_bytes < 1.0}
    if not worth:
        return "full"
    return min(worth, key=lambda codec: worth[codec].seconds(dense_bytes, rate_bytes_per_s))


def measure(
    codec: Codec, base: Mapping[str, BitTensor], tensors: Mapping[str, BitTensor], clock: Clock
) -> CodecCost:
    """Encode and decode a sample with one codec; the quicker of two rounds."""
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
    """Decides, for one publisher.

    Args:
        wanted: a codec by name, or auto.
        clock: seconds.
    """

    def __init__(self, wanted: Literal["auto", "compact", "fast", "overwrite"], clock: Clock) -> None:
        self._wanted = wanted
        self._clock = clock
        self._costs: dict[Codec, CodecCost] = {}
        self._asked = 0
        self.rate_bytes_per_s = DEFAULT_RATE_BYTES_PER_S  # of the slowest link; whoever measures it sets it

    def codec(self, base: Mapping[str, BitTensor], tensors: Mapping[str, BitTensor]) -> Codec:
        """For the patch from `base` to `tensors`. Samples the codecs anew every `MEASURE_EVERY` patches."""
        candidates = PATCH_CODECS if self._wanted == "auto" else (self._wanted,)
        if self._asked % MEASURE_EVERY == 0:
            self._costs = {codec: measure(codec, base, tensors, self._clock) for codec in candidates}
        self._asked += 1
        dense_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return quickest(self._costs, dense_bytes, self.rate_bytes_per_s)


def _sample(tensors: Mapping[str, BitTensor]) -> dict[str, BitTensor]:
    """The head of every tensor, `SAMPLE_BYTES` in all, or a few elements of each where they are many."""
    share = min(1.0, SAMPLE_BYTES / max(1, sum(tensor.nbytes for tensor in tensors.values())))
    sample = {}
    for name, tensor in tensors.items():
        elements = min(tensor.bits.size, max(16, int(tensor.bits.size * share)))
        sample[name] = BitTensor(tensor.bits[:elements], tensor.dtype, (elements,))
    return sample
