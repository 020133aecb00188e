"""Codec `compact`: gaps within classes of old magnitude, and steps, entropy coded by class.

Whether a weight changes depends on its magnitude: in 16 bits, rounding absorbs an update below half a unit in
the last place (PULSE, section 3). Both sides have the old weights, so both split them into up to six classes
of old magnitude. A gap is the number of unchanged weights of a class between two changes in that class. A
step is the difference of bit patterns modulo 2^16, mostly +-1. `rans` codes both, with tables for each class.

All 65,536 x 65,536 pairs of values are exact, whatever numbers the bits encode (zeros, infinities, NaNs): the
classes depend only on old bits, and new = old + (new - old) modulo 2^16.

Layout of the changes of a run's 16-bit elements: num_classes, the thresholds between them, the number of
changes of each class (LEB128). Then, for each class with changes, two streams of `rans` follow: gaps, and
steps as zigzag numbers minus one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from echo_planes.errors import WeightsError
from echo_planes.weights.codec import kernels
from echo_planes.weights.codec.kernels import (
    BLOCK,
    KEY_SHIFT,
    MAGNITUDE,
    MAX_KEY,
    NEVER,
    NO_THRESHOLD,
    NUM_CLASSES,
    kernel,
    prefetch_block,
)
from echo_planes.weights.codec.layout import Reader, Section, put_number
from echo_planes.weights.codec.rans import decode_numbers, encode_numbers
from echo_planes.weights.digest import BitArray, BitTensor

_SAMPLED = 1 << 17  # elements per segment that the classes are fitted on; of a full segment every 128th block
_SAMPLES_AHEAD = 8  # sampled blocks prefetched: they lie too far apart for the hardware prefetcher
_MAX_GROUPS = 96  # groups of neighbouring keys; the fit's time grows with their square
_CLASS_BITS = 800.0  # approximate size of a class's two tables and coder states, bits


class ClassScan:
    """Collects the changes of a run's 16-bit sections, by class."""

    def __init__(
        self, base: Mapping[str, BitTensor], tensors: Mapping[str, BitTensor], run: Sequence[Section]
    ) -> None:
        self._thresholds, room = _fitted(base, tensors, run)
        self._gaps = np.empty((NUM_CLASSES, room), np.uint32)
        self._steps = np.empty((NUM_CLASSES, room), np.uint16)
        self._free = room  # places left even if all elements since the last recount changed in one class
        self._counts = np.zeros(NUM_CLASSES, np.int64)
        self._passed = np.zeros(NUM_CLASSES + 1, np.uint64)
        self._following = np.zeros(NUM_CLASSES + 1, np.uint64)

    @property
    def count(self) -> int:
        """Number of changes so far."""
        return int(self._counts.sum())

    def scan(self, old: BitArray, new: BitArray, start: int, stop: int) -> None:
        """Add the changes of [start, stop), which follows the elements scanned before."""
        self._free -= stop - start
        if self._free < 0:
            # `_free` assumes that every element changed: correct it by the actual counts.
            need = int(self._counts.max()) + stop - start
            if need > self._gaps.shape[1]:
                self._gaps, self._steps = (_wider(part, 2 * need) for part in (self._gaps, self._steps))
            self._free = self._gaps.shape[1] - need
        kernels.scan_classes(
            old,
            new,
            start,
            stop,
            self._thresholds,
            self._passed,
            self._following,
            self._gaps,
            self._steps,
            self._counts,
        )

    def write(self, out: bytearray) -> None:
        """Append the thresholds and all changes to `out`, in the layout above."""
        used = self._thresholds[self._thresholds < NO_THRESHOLD].tolist()
        for number in (len(used) + 1, *used, *self._counts[: len(used) + 1].tolist()):
            put_number(out, number)
        for kind in range(len(used) + 1):
            num = int(self._counts[kind])
            if num:
                out += encode_numbers(self._gaps[kind, :num])
                out += encode_numbers(_zigzag(self._steps[kind, :num]))


class ClassSteps:
    """The changes of a run's 16-bit elements, read from a segment, before their positions are known.

    Raises:
        WeightsError: damaged, or more changes than the run has elements.
    """

    def __init__(self, reader: Reader, elements: int) -> None:
        num_classes = reader.number(NUM_CLASSES, "number of classes")
        if not num_classes:
            raise WeightsError("segment: no classes")
        self._thresholds = np.full(NUM_CLASSES - 1, NO_THRESHOLD, np.uint8)
        for i in range(num_classes - 1):
            self._thresholds[i] = reader.number(NO_THRESHOLD - 1, "class threshold")
            if i and self._thresholds[i] <= self._thresholds[i - 1]:
                raise WeightsError("segment: class thresholds do not rise")
        counts = np.zeros(NUM_CLASSES, np.int64)
        for i in range(num_classes):
            counts[i] = reader.number(elements - int(counts.sum()), "number of changes")
        self.count = int(counts.sum())
        self._ends = np.cumsum(counts)
        self._cursors = self._ends - counts
        self._gaps = np.empty(self.count, np.uint32)
        self._steps = np.empty(self.count, np.uint16)
        self._left = np.full(NUM_CLASSES, NEVER, np.uint64)
        for i in np.flatnonzero(counts).tolist():
            self._read_class(reader, int(self._cursors[i]), int(self._ends[i]), elements)
            self._left[i] = self._gaps[self._cursors[i]]

    def _read_class(self, reader: Reader, first: int, end: int, elements: int) -> None:
        reader.at = decode_numbers(reader.data, reader.at, self._gaps[first:end])
        if int(self._gaps[first:end].sum(dtype=np.uint64)) + end - first > elements:
            raise WeightsError(f"segment: gaps lead beyond the {elements} elements of the run")
        zigzag = np.empty(end - first, np.uint32)
        reader.at = decode_numbers(reader.data, reader.at, zigzag)
        if not _unzigzag(zigzag, self._steps[first:end]):
            raise WeightsError("segment: a step is larger than 16 bits")

    def place(
        self,
        bits: BitArray,
        start: int,
        stop: int,
        indices: Any,
        olds: Any,
        news: Any,
        count: int,
        write: bool,
    ) -> int:
        """Find the changes of the next elements, [start, stop) of `bits`, as `kernels.apply_classes` does.

        Returns:
            The new count of changes in `indices`, `olds` and `news`.
        """
        placed: int = kernels.apply_classes(
            bits,
            start,
            stop,
            self._thresholds,
            self._left,
            self._cursors,
            self._ends,
            self._gaps,
            self._steps,
            indices,
            olds,
            news,
            count,
            write,
        )
        return placed

    def end(self) -> None:
        """Check that every change was placed.

        Raises:
            WeightsError: some class has fewer elements than its gaps need.
        """
        if not np.array_equal(self._cursors, self._ends):
            raise WeightsError("segment: changes lie beyond the last element of their class")


def _fitted(
    base: Mapping[str, BitTensor], tensors: Mapping[str, BitTensor], run: Sequence[Section]
) -> tuple[Any, int]:
    """Fit thresholds, shape (NUM_CLASSES - 1,) uint8, to a sample. Return them, and room for one class."""
    elements = sum(section.size for section in run)
    stride = max(elements // _SAMPLED, 1)
    seen, changed = np.zeros((2, MAX_KEY + 1), np.float64)
    for section in run:
        name = section.spec.name
        _sample(
            base[name].bits,
            tensors[name].bits,
            section.start,
            section.stop,
            stride,
            seen,
            changed,
        )
    groups = np.flatnonzero(seen)
    if groups.size > _MAX_GROUPS:
        groups = groups[:: math.ceil(groups.size / _MAX_GROUPS)]
    thresholds = np.full(NUM_CLASSES - 1, NO_THRESHOLD, np.uint8)
    if groups.size > 1:
        of_group = np.add.reduceat(seen, groups), np.add.reduceat(changed, groups)
        cuts = _cuts(*of_group, _CLASS_BITS / stride)
        thresholds[: cuts.size] = groups[cuts] - 1
    return thresholds, int(changed.sum()) * stride + (1 << 18)


@kernel
def _sample(
    old: BitArray, new: BitArray, start: int, stop: int, stride: int, seen: Any, changed: Any
) -> None:
    """Count elements and changes by key (`kernels.key_mask`) in every `stride`-th block of [start, stop)."""
    for at in range(start, stop, BLOCK * stride):
        prefetch_block(old, at + _SAMPLES_AHEAD * BLOCK * stride)
        prefetch_block(new, at + _SAMPLES_AHEAD * BLOCK * stride)
        for position in range(at, min(at + BLOCK, stop)):
            key = min((old[position] & MAGNITUDE) >> KEY_SHIFT, MAX_KEY)
            seen[key] += 1
            changed[key] += old[position] != new[position]


@kernel
def _entropy(total: float, part: float) -> float:
    """Return the bits needed to tell which `part` of `total` elements changed."""
    bits = 0.0
    if 0.0 < part < total:
        rest = total - part
        bits = total * np.log2(total) - part * np.log2(part) - rest * np.log2(rest)
    return bits


@kernel
def _cuts(seen: Any, changed: Any, class_bits: float) -> Any:
    """Return the groups that begin a class, by dynamic programming for the fewest bits of all classes."""
    num = seen.size
    best = np.full((NUM_CLASSES + 1, num + 1), np.inf)
    origin = np.zeros((NUM_CLASSES + 1, num + 1), np.int64)
    best[0, 0] = 0.0
    for end in range(1, num + 1):
        total = part = 0.0
        for begin in range(end - 1, -1, -1):
            total += seen[begin]
            part += changed[begin]
            bits = _entropy(total, part) + class_bits
            for used in range(NUM_CLASSES):
                if best[used, begin] + bits < best[used + 1, end]:
                    best[used + 1, end] = best[used, begin] + bits
                    origin[used + 1, end] = begin
    classes = np.argmin(best[:, num])
    cuts = np.zeros(classes - 1, np.int64)
    end = num
    for used in range(classes, 1, -1):
        end = origin[used, end]
        cuts[used - 2] = end
    return cuts


@kernel
def _zigzag(steps: Any) -> Any:
    """Map steps 1, -1, 2, -2, ... to 1, 0, 3, 2, ...; a step is never zero."""
    out = np.empty(steps.size, np.uint32)
    for i in range(steps.size):
        step = np.int64(np.int16(steps[i]))
        out[i] = ((step << 1) ^ (step >> 63)) - 1
    return out


@kernel
def _unzigzag(values: Any, out: Any) -> Any:
    """Invert `_zigzag` into `out`. Return whether all values are those of 16-bit steps."""
    fine: Any = True
    for i in range(values.size):
        value = np.int64(values[i]) + 1
        fine &= value < 65536
        out[i] = ((value >> 1) ^ -(value & 1)) & 0xFFFF
    return fine


def _wider(array: Any, room: int) -> Any:
    larger = np.empty((NUM_CLASSES, room), array.dtype)
    larger[:, : array.shape[1]] = array
    return larger
