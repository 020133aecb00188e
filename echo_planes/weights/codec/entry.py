"""Entry to all codecs: encode a state, or its difference from another, in segments, and decode them.

The codecs, chosen per publication (`table.py` holds those of patches):

- `compact` (compact.py): gaps within classes of old magnitude and steps, entropy coded. Needs the base.
- `fast` (fast.py): gap bytes and step nibbles under zstd; reads changed cache lines only. Needs the base.
- `overwrite` (dense.py): positions and new bits. Idempotent, and independent of the old bits.
- the run's own codec (codec.py).
- `full` (dense.py): all bits, an ordinary safetensors file.

Encoding is lazy and scans at most `SEGMENT_BYTES` of weights per segment, so that the sender can send a
segment before it scans the next. The same pass digests the new state, slice by slice, while in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, Codec, TensorSpec
from echo_planes.weights.codec.changes import (
    Applied,
    Change,
    EncodedSegment,
    IndexArray,
    apply,
    index_dtype,
    undo,
)
from echo_planes.weights.codec.codec import Changes, OpenSegment
from echo_planes.weights.codec.dense import (
    FullFile,
    decode_full,
    encode_full,
    full_payload,
    overwrite_payload,
)
from echo_planes.weights.codec.layout import Layout, Section
from echo_planes.weights.codec.table import codec_named
from echo_planes.weights.digest import BitArray, BitTensor, StateHasher, state_digest
from echo_planes.weights.wire.manifest import SEGMENT_BYTES

__all__ = [
    "Applied",
    "Change",
    "EncodedSegment",
    "IndexArray",
    "Patcher",
    "apply",
    "decode",
    "encode",
    "full_payload",
    "index_dtype",
    "overwrite_payload",
    "undo",
]


def encode(
    codec: Codec,
    base: Mapping[str, BitTensor] | None,
    tensors: Mapping[str, BitTensor],
    *,
    hasher: StateHasher | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> Iterator[EncodedSegment]:
    """Yield at least one segment that encodes a state, or its difference from `base`.

    Args:
        base: the receiver's state, with the same names, dtypes and shapes. None only for `full`.
        tensors: the new state. It must not change before the last segment is made.
        hasher: digests the whole new state in the same pass; complete after the last segment.
        segment_bytes: dense bytes scanned per segment, at most; below `SEGMENT_BYTES` in tests only.

    Raises:
        WeightsError: no tensors, an unknown codec, or a base that does not fit.
    """
    layout = Layout({name: tensor.spec(name) for name, tensor in tensors.items()})
    if base is not None and {name: t.spec(name) for name, t in base.items()} != {
        spec.name: spec for spec in layout.specs
    }:
        raise WeightsError("a patch needs a base of the same names, dtypes and shapes")
    segment_bytes = min(segment_bytes, SEGMENT_BYTES)
    if codec == "full":
        yield from encode_full(base, tensors, hasher, segment_bytes)
        return
    if base is None:
        raise WeightsError(f"codec {codec!r} writes a difference: it needs a base")
    patch = codec_named(codec)
    for run in layout.runs(segment_bytes):
        yield patch.encode(layout, run, base, tensors, hasher)


def decode(
    codec: Codec,
    segment: ByteArray,
    offset_bytes: int,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], BitArray],
) -> list[Change]:
    """Return the changes in a segment, checked against the model; write nothing.

    Each tensor has at most one change, in order of names (`full`: in file order). The segment's size, and the
    weights that a segment may cover, bound all allocations.

    Args:
        segment: shape (bytes,); changes of `full` and `overwrite` may be views into it.
        offset_bytes: of its first byte in the payload. Only `full` depends on it.
        read: returns the base's bits of a tensor, shape (elements,). `full` and `overwrite` do not call it.

    Raises:
        WeightsError: anything damaged, unknown, out of range or of another model.
    """
    if codec == "full":
        return decode_full(segment, offset_bytes, specs)
    return codec_named(codec).open(segment, Layout(specs)).changes(read)


class Patcher:
    """Writes a payload's segments into a state in place, in order, and digests the new state.

    Codecs that `cover` all elements read, change and digest bits in one pass, while they are in the cache.
    A refused segment leaves the state as it was before that segment; `undo` reverts all segments.

    Args:
        codec: codec of the payload.
        state: the base, whose bits the patcher changes in place. `full` may overwrite any state.
        hasher: a new hasher, fed with the new state by codecs that `cover`; None: no digest in that pass.
    """

    def __init__(
        self, codec: Codec, state: Mapping[str, BitTensor], hasher: StateHasher | None = None
    ) -> None:
        self._patch = None if codec == "full" else codec_named(codec)
        self._state, self._hasher = state, hasher
        self._specs = {name: tensor.spec(name) for name, tensor in state.items()}
        self._layout = Layout(self._specs)
        self._payload_bytes = 0
        self._covered: tuple[int, int] | None = (0, 0)  # next tensor and element; None: the state's end
        self.applied: list[Applied] = []  # in the order of writing

    def apply(self, segment: ByteArray) -> list[Applied]:
        """Write the payload's next segment. Return its changes, and append them to `applied`.

        Raises:
            WeightsError: as `decode`, or the segment does not follow the last one. The state is as before
                the segment, and the caller may then call only `undo`.
        """
        applied: list[Applied] = []
        try:
            opened: OpenSegment
            if self._patch is None:
                opened = Changes(decode_full(segment, self._payload_bytes, self._specs))
            else:
                opened = self._patch.open(segment, self._layout)
                if self._patch.covers:
                    self._covered = self._after(opened.run)
            opened.write(lambda name: self._state[name].bits, self._hasher, applied)
        except BaseException:  # revert this segment's writes, also after a MemoryError
            self._take_back(applied)
            raise
        self._payload_bytes += segment.size
        self.applied += applied
        return applied

    def digest(self, algorithm: str) -> str:
        """Return the digest of the new state, after the last segment.

        Args:
            algorithm: that of the patcher's hasher, if it has one.

        Raises:
            WeightsError: the segments did not cover the whole state.
        """
        if self._patch is not None and self._patch.covers:
            if self._covered is not None:
                raise WeightsError(f"the payload ends before tensor {self._covered[0]} is covered")
            if self._hasher is not None:
                return self._hasher.digest()
        if self._patch is None:
            file = FullFile(self._specs)
            if self._payload_bytes != len(file.header) + file.data_bytes:
                raise WeightsError(f"the full payload ends after {self._payload_bytes} bytes")
        return state_digest(self._state, algorithm)

    def undo(self) -> None:
        """Put back every bit that was replaced."""
        self._take_back(self.applied)

    def _take_back(self, applied: list[Applied]) -> None:
        while applied:
            last = applied.pop()
            undo(last, self._state[last.change.name].bits)

    def _after(self, run: Sequence[Section]) -> tuple[int, int] | None:
        """Return the next place (tensor, element) after a run; None at the state's end.

        Raises:
            WeightsError: the run does not begin where the covered elements end.
        """
        specs, sizes = self._layout.specs, self._layout.sizes
        first = specs.index(run[0].spec)
        if self._covered != (first, run[0].start):
            raise WeightsError(f"a segment begins at ({first}, {run[0].start}), expected {self._covered}")
        last = first + len(run) - 1
        if run[-1].stop < sizes[last]:
            return last, run[-1].stop
        return (last + 1, 0) if last + 1 < len(specs) else None
