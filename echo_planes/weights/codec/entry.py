"""The one entry to all codecs: turn a state, or its difference from another, into segments and back.

Four ways to write weights down, chosen per publication:

- `compact` (compact.py): gaps within classes of old magnitude and steps, entropy coded. Needs the base.
- `fast` (fast.py): gap bytes and step nibbles under zstd; decoding reads changed cache lines only. Needs it.
- `overwrite` (dense.py): positions and new bits. Can be applied twice, and to repair.
- `full` (dense.py): all bits, an ordinary safetensors file.

Encoding is lazy and scans at most `SEGMENT_BYTES` of weights per segment, so that a segment can leave before
the next one is scanned; the new state is digested in the same pass, slice by slice, while in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, Codec, TensorSpec
from echo_planes.weights.codec import writes
from echo_planes.weights.codec.changes import (
    Applied,
    Change,
    EncodedSegment,
    IndexArray,
    apply,
    index_dtype,
    undo,
)
from echo_planes.weights.codec.compact import ClassScan, ClassSteps
from echo_planes.weights.codec.dense import (
    FullFile,
    decode_full,
    decode_overwrite,
    encode_full,
    full_payload,
    overwrite_payload,
)
from echo_planes.weights.codec.fast import Found, read_steps, write_steps
from echo_planes.weights.codec.layout import SLICE_BYTES, Layout, Reader, Section, shares
from echo_planes.weights.digest import BIT_DTYPES, BitArray, BitTensor, StateHasher, state_digest
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

_NARROW, _WIDE = BIT_DTYPES["bfloat16"], BIT_DTYPES["float32"]


def encode(
    codec: Codec,
    base: Mapping[str, BitTensor] | None,
    tensors: Mapping[str, BitTensor],
    *,
    hasher: StateHasher | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> Iterator[EncodedSegment]:
    """Encode a state, or its difference from `base`, segment by segment; there is at least one.

    Args:
        base: what the receiver has: the same names, dtypes and shapes. None only for `full`.
        tensors: the new state. It must stay as it is until the last segment came.
        hasher: is fed the whole new state on the way; its digest is ready after the last segment.
        segment_bytes: dense bytes scanned per segment, at most; below `SEGMENT_BYTES` in tests only.

    Raises:
        WeightsError: no tensors, or a base that does not fit.
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
    for run in layout.runs(segment_bytes):
        yield _encode_run(codec, layout, run, base, tensors, hasher)


def _encode_run(
    codec: Codec,
    layout: Layout,
    run: list[Section],
    base: Mapping[str, BitTensor],
    tensors: Mapping[str, BitTensor],
    hasher: StateHasher | None,
) -> EncodedSegment:
    narrow, wide = _by_width(run)
    classes = ClassScan(base, tensors, narrow) if codec == "compact" else None
    found, found_wide = _found([] if classes else narrow, _NARROW), _found(wide, _WIDE)
    changed: dict[str, int] = {}
    for section in run:
        scan = found_wide if section.itemsize == _WIDE.itemsize else classes or found
        old, new, before = base[section.spec.name].bits, tensors[section.spec.name].bits, scan.count
        if hasher is not None and section.start == 0:
            hasher.begin(section.spec.name, section.spec.dtype, section.spec.shape)
        for start, stop in _slices(section):
            scan.scan(old, new, start, stop)
            if hasher is not None:
                hasher.update(new[start:stop])
        if scan.count > before:
            changed[section.spec.name] = scan.count - before
    if codec == "overwrite":
        changes = [*_found_changes(found, narrow, tensors), *_found_changes(found_wide, wide, tensors)]
        return EncodedSegment(overwrite_payload(changes, {s.spec.name: s.spec for s in run}), changed)
    out = bytearray(layout.header(codec, run))
    if narrow and classes:
        classes.write(out)
    elif narrow:
        write_steps(out, found.where, found.steps)
    if wide:
        write_steps(out, found_wide.where, found_wide.steps)
    return EncodedSegment(np.frombuffer(out, np.uint8), changed)


def decode(
    codec: Codec,
    segment: ByteArray,
    offset_bytes: int,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], BitArray],
) -> list[Change]:
    """The changes a segment makes, checked against the model; a tensor comes once, in order of names
    (`full`: of the file). Nothing is written.

    Allocations are bounded by the segment's size and by the weights that a segment may cover.

    Args:
        segment: shape (bytes,); changes of `full` and `overwrite` may be views into it.
        offset_bytes: of its first byte in the payload. Only `full` depends on it.
        read: the base's bits of a tensor, shape (elements,). Only `compact` and `fast` use it.

    Raises:
        WeightsError: anything damaged, unknown, out of range or of another model.
    """
    if codec == "full":
        return decode_full(segment, offset_bytes, specs)
    if codec == "overwrite":
        return decode_overwrite(segment, specs)
    parsed = _Parsed(codec, segment, Layout(specs))
    found: list[Applied] = []
    parsed.place(read, None, found, write=False)
    return [applied.change for applied in found]


class Patcher:
    """Writes a payload's segments into a state in place, in order, and digests the new state on the way.

    The fastest path of a receiver: old bits are read, changed and digested while they are in the cache. A
    segment that is refused leaves the state as it was before it; `undo` takes all segments back.

    Args:
        codec: of the payload.
        state: the base, whose bits are changed in place. `full` may be written over anything.
        hasher: a new one, which is fed the new state; None where nobody asks for the digest.
    """

    def __init__(
        self, codec: Codec, state: Mapping[str, BitTensor], hasher: StateHasher | None = None
    ) -> None:
        self._codec, self._state, self._hasher = codec, state, hasher
        self._specs = {name: tensor.spec(name) for name, tensor in state.items()}
        self._layout = Layout(self._specs)
        self._payload_bytes = 0
        self._covered: tuple[int, int] | None = (0, 0)  # next tensor and element; None: the state's end
        self.applied: list[Applied] = []  # in the order of writing

    def apply(self, segment: ByteArray) -> list[Applied]:
        """Write the payload's next segment; returns what it changed. `applied` has it too.

        Raises:
            WeightsError: as `decode` does, or a segment that does not follow the last one; the state is as
                before, and of this patcher only `undo` may be called.
        """
        applied: list[Applied] = []
        try:
            if self._codec in ("compact", "fast"):
                parsed = _Parsed(self._codec, segment, self._layout)
                self._covered = self._after(parsed.run)
                parsed.place(lambda name: self._state[name].bits, self._hasher, applied, write=True)
            else:
                self._write(segment, applied)
        except BaseException:  # what this segment has written must go, also where memory ran out
            self._take_back(applied)
            raise
        self._payload_bytes += segment.size
        self.applied += applied
        return applied

    def digest(self, algorithm: str) -> str:
        """The digest of the new state, after the last segment.

        Raises:
            WeightsError: the segments did not cover the whole state.
        """
        if self._codec in ("compact", "fast"):
            if self._covered is not None:
                raise WeightsError(f"the payload ends before tensor {self._covered[0]} is covered")
            if self._hasher is not None:
                return self._hasher.digest()
        if self._codec == "full":
            file = FullFile(self._specs)
            if self._payload_bytes != len(file.header) + file.data_bytes:
                raise WeightsError(f"the full payload ends after {self._payload_bytes} bytes")
        return state_digest(self._state, algorithm)

    def undo(self) -> None:
        """Put back every bit that was replaced."""
        self._take_back(self.applied)

    def _write(self, segment: ByteArray, applied: list[Applied]) -> None:
        for change in decode(self._codec, segment, self._payload_bytes, self._specs, self._no_base):
            bits = self._state[change.name].bits
            if not bits.flags.writeable:
                raise WeightsError(f"the bits of tensor {change.name!r} cannot be written to")
            run = slice(change.start, change.start + change.values.size)
            old = bits[run].copy() if change.indices is None else bits[change.indices]
            apply(change, bits)
            applied.append(Applied(change, old))

    def _take_back(self, applied: list[Applied]) -> None:
        while applied:
            last = applied.pop()
            undo(last, self._state[last.change.name].bits)

    def _after(self, run: Sequence[Section]) -> tuple[int, int] | None:
        """Place (tensor, element) after a run, which must itself follow what is covered; None at the end."""
        specs, sizes = self._layout.specs, self._layout.sizes
        first = specs.index(run[0].spec)
        if self._covered != (first, run[0].start):
            raise WeightsError(f"a segment begins at ({first}, {run[0].start}), expected {self._covered}")
        last = first + len(run) - 1
        if run[-1].stop < sizes[last]:
            return last, run[-1].stop
        return (last + 1, 0) if last + 1 < len(specs) else None

    @staticmethod
    def _no_base(name: str) -> BitArray:
        raise WeightsError(f"tensor {name!r} was to be read for a codec that needs no base")


class _Parsed:
    """A segment of `compact` or `fast`, read and checked as far as that goes without the base."""

    def __init__(self, codec: Codec, segment: ByteArray, layout: Layout) -> None:
        if segment.dtype != np.uint8 or segment.ndim != 1:
            raise WeightsError("a segment is a flat array of bytes")
        if codec not in ("compact", "fast"):
            raise WeightsError(f"unknown codec {codec!r}")
        reader = Reader(segment)
        self.run = layout.read_header(codec, reader)
        self._narrow, wide = _by_width(self.run)
        self._classes: ClassSteps | None = None
        self._steps: dict[str, tuple[Any, BitArray, int]] = {}
        if self._narrow and codec == "compact":
            self._classes = ClassSteps(reader, _elements(self._narrow))
        elif self._narrow:
            self._read(reader, self._narrow, _NARROW)
        if wide:
            self._read(reader, wide, _WIDE)
        reader.end()

    def _read(self, reader: Reader, sections: Sequence[Section], dtype: np.dtype[Any]) -> None:
        where, steps = read_steps(reader, _elements(sections), dtype)
        first = 0
        for section, part, shift in shares(where, sections):
            if part.size:
                self._steps[section.spec.name] = (part, steps[first : first + part.size], shift)
            first += part.size

    def place(
        self,
        read: Callable[[str], BitArray],
        hasher: StateHasher | None,
        placed: list[Applied],
        *,
        write: bool,
    ) -> None:
        """Compute the segment's changes to the bits that `read` gives, and write them if asked to.

        Args:
            placed: is given each tensor's changes as they are made, so also what was written before an error.

        Raises:
            WeightsError: the base has fewer elements of a class than the segment counts.
        """
        out = _Room(self._classes.count if self._classes else 0)
        for section in self.run:
            spec, bits = section.spec, read(section.spec.name)
            if BitTensor(bits, spec.dtype, spec.shape).bits.flags.writeable < write:
                raise WeightsError(f"the bits of tensor {spec.name!r} cannot be written to")
            if hasher is not None and section.start == 0:
                hasher.begin(spec.name, spec.dtype, spec.shape)
            if self._classes is not None and section.itemsize == _NARROW.itemsize:
                self._place_classes(self._classes, section, bits, out, hasher, placed, write)
                continue
            if section.spec.name in self._steps:
                placed.append(self._place_steps(section, bits, write))
            if hasher is not None:
                hasher.update(bits[section.start : section.stop])
        if self._classes is not None:
            self._classes.end()

    def _place_classes(
        self,
        classes: ClassSteps,
        section: Section,
        bits: BitArray,
        out: _Room,
        hasher: StateHasher | None,
        placed: list[Applied],
        write: bool,
    ) -> None:
        before = out.count
        indices = out.indices_for(bits.size)
        try:
            # Slice by slice, so that what was just changed is digested from the cache.
            for start, stop in _slices(section):
                out.count = classes.place(bits, start, stop, indices, out.olds, out.news, out.count, write)
                if hasher is not None:
                    hasher.update(bits[start:stop])
        finally:
            if out.count > before:
                part = slice(before, out.count)
                change = Change(section.spec.name, section.start, indices[part], out.news[part])
                placed.append(Applied(change, out.olds[part]))

    def _place_steps(self, section: Section, bits: BitArray, write: bool) -> Applied:
        where, steps, shift = self._steps[section.spec.name]
        indices = np.empty(where.size, index_dtype(bits.size))
        olds, news = np.empty(where.size, bits.dtype), np.empty(where.size, bits.dtype)
        writes.step_at(bits, where, steps, shift, indices, olds, news, write)
        return Applied(Change(section.spec.name, section.start, indices, news), olds)


class _Room:
    """Arrays for all 16-bit changes of a segment, which its tensors' changes become views of."""

    def __init__(self, num: int) -> None:
        self._indices: dict[str, IndexArray] = {}
        self._num = num
        self.olds, self.news = np.empty(num, _NARROW), np.empty(num, _NARROW)
        self.count = 0

    def indices_for(self, elements: int) -> IndexArray:
        dtype = index_dtype(elements)
        if dtype not in self._indices:
            self._indices[dtype] = np.empty(self._num, dtype)
        return self._indices[dtype]


def _by_width(run: Sequence[Section]) -> tuple[list[Section], list[Section]]:
    """The sections with 16-bit and with 32-bit elements; those without any belong to neither."""
    narrow = [section for section in run if section.size and section.itemsize == _NARROW.itemsize]
    return narrow, [section for section in run if section.size and section.itemsize == _WIDE.itemsize]


def _elements(sections: Sequence[Section]) -> int:
    return sum(section.size for section in sections)


def _slices(section: Section) -> Iterator[tuple[int, int]]:
    stride = SLICE_BYTES // section.itemsize
    for start in range(section.start, section.stop, stride):
        yield start, min(start + stride, section.stop)


def _found(sections: Sequence[Section], dtype: np.dtype[Any]) -> Found:
    return Found(dtype, min(_elements(sections), SLICE_BYTES // dtype.itemsize) + _elements(sections) // 32)


def _found_changes(
    found: Found, sections: Sequence[Section], tensors: Mapping[str, BitTensor]
) -> Iterator[Change]:
    for section, part, shift in shares(found.where, sections):
        bits = tensors[section.spec.name].bits
        indices = (part.astype(np.int64) + shift).astype(index_dtype(bits.size), copy=False)
        yield Change(section.spec.name, section.start, indices, bits[indices])
