"""Coverage of a segment: a run of elements in canonical order (tensors by name, elements in C order).

A segment of a codec other than `overwrite` and `full` begins with a header that names its run, so that it can
be read by itself: b"EP", format version, codec (u8 each), then first tensor, first element, last tensor, end
element (LEB128 numbers; tensors counted in order of names). The run covers tensors in between wholly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, TensorSpec
from echo_planes.weights.digest import BIT_DTYPES
from echo_planes.weights.wire.manifest import SEGMENT_BYTES

SLICE_BYTES = 256 * 1024  # fits the cache, so that a slice is scanned and digested in one pass over memory
_MAGIC = b"EP"
_FORMAT = 1
_CUT = 64  # runs cut a tensor at multiples of the scans' block, in elements


@dataclass(frozen=True, slots=True)
class Section:
    """Elements [start, stop) of one tensor; empty only if the tensor is."""

    spec: TensorSpec
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def itemsize(self) -> int:
        return BIT_DTYPES[self.spec.dtype].itemsize


class Layout:
    """A model's tensors in canonical order."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        if not specs:
            raise WeightsError("a state has at least one tensor")
        self.specs = [specs[name] for name in sorted(specs)]
        self.sizes = [math.prod(spec.shape) for spec in self.specs]

    def runs(self, segment_bytes: int) -> Iterator[list[Section]]:
        """Cut the state into runs of at most `segment_bytes` dense bytes, or one block of 64 elements."""
        run: list[Section] = []
        room = segment_bytes
        for spec, size in zip(self.specs, self.sizes, strict=True):
            itemsize, start = BIT_DTYPES[spec.dtype].itemsize, 0
            while True:
                part = size - start
                if part * itemsize > room:
                    part = max(room // itemsize // _CUT, 0 if run else 1) * _CUT
                    part = min(part, size - start)
                if part or not size:
                    run.append(Section(spec, start, start + part))
                start, room = start + part, room - part * itemsize
                if start == size:
                    break
                yield run
                run, room = [], segment_bytes
        yield run

    def header(self, number: int, run: list[Section]) -> bytes:
        """Return the header of a segment that covers `run`, for the codec with this number."""
        first = self.specs.index(run[0].spec)
        out = bytearray(_MAGIC + bytes((_FORMAT, number)))
        for number in (first, run[0].start, first + len(run) - 1, run[-1].stop):
            put_number(out, number)
        return bytes(out)

    def read_header(self, codec: str, number: int, reader: Reader) -> list[Section]:
        """Return the run that a segment covers, checked against the model.

        Raises:
            WeightsError: another format or codec, or a run that the model does not have.
        """
        if reader.take(4, "header") != _MAGIC + bytes((_FORMAT, number)):
            raise WeightsError(f"this is no {codec} segment of format {_FORMAT}")
        first = reader.number(len(self.specs) - 1, "first tensor")
        start = reader.number(self.sizes[first], "first element")
        last = reader.number(len(self.specs) - 1, "last tensor")
        stop = reader.number(self.sizes[last], "end element")
        if last < first or (first == last and stop < start):
            raise WeightsError(f"a segment runs backwards: ({first}, {start}) to ({last}, {stop})")
        run = []
        for i in range(first, last + 1):
            begin, end = (start if i == first else 0), (stop if i == last else self.sizes[i])
            if begin == end and self.sizes[i]:
                raise WeightsError(f"a segment covers nothing of tensor {self.specs[i].name!r}")
            run.append(Section(self.specs[i], begin, end))
        dense_bytes = sum(section.size * section.itemsize for section in run)
        if dense_bytes > SEGMENT_BYTES:
            raise WeightsError(f"a segment covers {dense_bytes} dense bytes; {SEGMENT_BYTES} are the most")
        return run


def shares(where: Any, sections: Iterable[Section]) -> Iterator[tuple[Section, Any, int]]:
    """Split positions, rising and counted through all sections, by section.

    Yield the section, its part of `where` (a view), and the offset that makes them positions in the tensor.
    """
    first = low = 0
    for section in sections:
        # The bound has the type of `where`: otherwise numpy converts all of `where` for each section.
        high = int(np.searchsorted(where, where.dtype.type(first + section.size)))
        yield section, where[low:high], section.start - first
        first, low = first + section.size, high


def put_number(out: bytearray, number: int) -> None:
    """Append a count as LEB128: seven bits a byte, lowest first."""
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


class Reader:
    """Reads a segment front to back; raises a WeightsError that names the field which is wrong."""

    def __init__(self, data: ByteArray) -> None:
        if data.dtype != np.uint8 or data.ndim != 1:
            raise WeightsError("a segment is a flat array of bytes")
        self.data = np.array(data, dtype=np.uint8)  # a copy: aligned, writable, and small beside the weights
        self.at = 0

    def number(self, most: int, what: str) -> int:
        """Read a LEB128 number of at most `most`; `what` names it in errors."""
        number = shift = 0
        while shift < 64 and self.at < self.data.size:
            byte = int(self.data[self.at])
            self.at += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                if number > most:
                    raise WeightsError(f"segment: {what} is {number}, at most {most} is possible")
                return number
        raise WeightsError(f"segment: {what} is cut short or too long")

    def take(self, num: int, what: str) -> bytes:
        """Read the next `num` bytes; `what` names them in errors."""
        if num > self.data.size - self.at:
            raise WeightsError(f"segment: {what} of {num} bytes is cut short")
        self.at += num
        return self.data[self.at - num : self.at].tobytes()

    def end(self) -> None:
        """Check that no bytes are left."""
        if self.at != self.data.size:
            raise WeightsError(f"segment: {self.data.size - self.at} bytes too many")
