"""Segments of `compact` and `fast`: the header of the run, then its 16-bit and then its 32-bit changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray
from echo_planes.weights.codec import writes
from echo_planes.weights.codec.changes import (
    Applied,
    Change,
    EncodedSegment,
    IndexArray,
    index_dtype,
)
from echo_planes.weights.codec.codec import Changes, PatchCodec, Read
from echo_planes.weights.codec.compact import ClassScan, ClassSteps
from echo_planes.weights.codec.dense import decode_overwrite, overwrite_payload
from echo_planes.weights.codec.fast import Found, read_steps, write_steps
from echo_planes.weights.codec.layout import SLICE_BYTES, Layout, Reader, Section, shares
from echo_planes.weights.digest import BIT_DTYPES, BitArray, BitTensor, StateHasher

_NARROW, _WIDE = BIT_DTYPES["bfloat16"], BIT_DTYPES["float32"]


class Coded(PatchCodec):
    """`compact` or `fast`: they differ in the encoding of changes of 16-bit elements.

    Args:
        name: name of the codec.
        number: number of the codec in a segment's header.
        by_class: whether gaps are counted within classes of old magnitude (`compact`).
    """

    def __init__(self, name: str, number: int, *, by_class: bool) -> None:
        self.name, self._number, self._by_class = name, number, by_class

    def encode(
        self,
        layout: Layout,
        run: list[Section],
        base: Mapping[str, BitTensor],
        tensors: Mapping[str, BitTensor],
        hasher: StateHasher | None,
    ) -> EncodedSegment:
        narrow, wide = _by_width(run)
        classes = ClassScan(base, tensors, narrow) if self._by_class else None
        found, found_wide = _found([] if classes else narrow, _NARROW), _found(wide, _WIDE)
        changed = _scan(run, base, tensors, hasher, classes or found, found_wide)
        out = bytearray(layout.header(self._number, run))
        if narrow and classes:
            classes.write(out)
        elif narrow:
            write_steps(out, found.where, found.steps)
        if wide:
            write_steps(out, found_wide.where, found_wide.steps)
        return EncodedSegment(np.frombuffer(out, np.uint8), changed)

    def open(self, segment: ByteArray, layout: Layout) -> _Parsed:
        reader = Reader(segment)
        return _Parsed(reader, layout.read_header(self.name, self._number, reader), by_class=self._by_class)


class Overwrite(PatchCodec):
    """`overwrite`: positions and new bits (`dense.py`) of the changed elements alone."""

    name = "overwrite"
    covers = False

    def encode(
        self,
        layout: Layout,
        run: list[Section],
        base: Mapping[str, BitTensor],
        tensors: Mapping[str, BitTensor],
        hasher: StateHasher | None,
    ) -> EncodedSegment:
        narrow, wide = _by_width(run)
        found, found_wide = _found(narrow, _NARROW), _found(wide, _WIDE)
        changed = _scan(run, base, tensors, hasher, found, found_wide)
        changes = [*_found_changes(found, narrow, tensors), *_found_changes(found_wide, wide, tensors)]
        return EncodedSegment(overwrite_payload(changes, {s.spec.name: s.spec for s in run}), changed)

    def open(self, segment: ByteArray, layout: Layout) -> Changes:
        return Changes(decode_overwrite(segment, {spec.name: spec for spec in layout.specs}))


def _scan(
    run: Sequence[Section],
    base: Mapping[str, BitTensor],
    tensors: Mapping[str, BitTensor],
    hasher: StateHasher | None,
    narrow: ClassScan | Found,
    wide: Found,
) -> dict[str, int]:
    """Find a run's changes, and digest each slice while it is in the cache. Return their number by tensor."""
    changed: dict[str, int] = {}
    for section in run:
        scan = wide if section.itemsize == _WIDE.itemsize else narrow
        old, new, before = base[section.spec.name].bits, tensors[section.spec.name].bits, scan.count
        if hasher is not None and section.start == 0:
            hasher.begin(section.spec.name, section.spec.dtype, section.spec.shape)
        for start, stop in _slices(section):
            scan.scan(old, new, start, stop)
            if hasher is not None:
                hasher.update(new[start:stop])
        if scan.count > before:
            changed[section.spec.name] = scan.count - before
    return changed


class _Parsed:
    """A segment of `compact` or `fast`, read and checked as far as possible without the base."""

    def __init__(self, reader: Reader, run: list[Section], *, by_class: bool) -> None:
        self.run = run
        self._narrow, wide = _by_width(run)
        self._classes: ClassSteps | None = None
        self._steps: dict[str, tuple[Any, BitArray, int]] = {}
        if self._narrow and by_class:
            self._classes = ClassSteps(reader, _elements(self._narrow))
        elif self._narrow:
            self._read(reader, self._narrow, _NARROW)
        if wide:
            self._read(reader, wide, _WIDE)
        reader.end()

    def changes(self, read: Read) -> list[Change]:
        found: list[Applied] = []
        self._place(read, None, found, write=False)
        return [applied.change for applied in found]

    def write(self, read: Read, hasher: StateHasher | None, applied: list[Applied]) -> None:
        self._place(read, hasher, applied, write=True)

    def _read(self, reader: Reader, sections: Sequence[Section], dtype: np.dtype[Any]) -> None:
        where, steps = read_steps(reader, _elements(sections), dtype)
        first = 0
        for section, part, shift in shares(where, sections):
            if part.size:
                self._steps[section.spec.name] = (part, steps[first : first + part.size], shift)
            first += part.size

    def _place(
        self,
        read: Read,
        hasher: StateHasher | None,
        placed: list[Applied],
        *,
        write: bool,
    ) -> None:
        """Compute the segment's changes to the bits that `read` returns, and write them if `write`.

        Args:
            placed: receives each tensor's changes once they are made, also those before an error.

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
            # Slice by slice, so that the hasher finds the changed bits in the cache.
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
    """Arrays for all 16-bit changes of a segment. Each tensor's changes are views of them."""

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
    """Return the non-empty sections of 16-bit elements, and those of 32-bit elements."""
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
