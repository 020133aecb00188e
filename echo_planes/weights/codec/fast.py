"""Codec `fast`: gap bytes and step nibbles under zstd; a decoder touches the changed cache lines only.

Positions are counted through all tensors of one width in a run. A gap is the number of unchanged elements
before a change: one byte below 255, after one byte of 255 for each full 255. A step is the difference of bit
patterns, new - old modulo 2^16, so that every pair of values is exact. Steps of -7..7 are nibbles, two a
byte. Nibble 8 refers to a list of bytes for steps of -127..127. Byte 128 in that list is followed by two
bytes with the step itself.

Elements of 32 bits use the same gaps; their steps modulo 2^32 are four planes of bytes. `compact` writes them
in the same way, because float32 weights are rare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray
from echo_planes.weights.codec import kernels
from echo_planes.weights.codec.kernels import kernel
from echo_planes.weights.codec.layout import Reader, put_number
from echo_planes.weights.digest import BitArray

_LEVEL = 1  # zstd level: speed matters more than size here
_SKIP = 255  # a gap byte that the next byte continues
_ESCAPE, _LONG = 8, 128  # the nibble, and the byte, that refer to a longer form
_FRAME_SLACK = 1024  # bytes that zstd may add to incompressible data


class Found:
    """Collects the changes of a run of elements of one type, scan by scan."""

    def __init__(self, dtype: np.dtype[Any], expected: int) -> None:
        self._where = np.empty(expected, np.uint32)  # from the first element of the run
        self._steps: BitArray = np.empty(expected, dtype)
        self._seen = 0
        self.count = 0

    def scan(self, old: BitArray, new: BitArray, start: int, stop: int) -> None:
        """Add the changes of [start, stop), which follows the elements scanned before."""
        need = self.count + stop - start
        if need > self._where.size:
            self._where, self._steps = (
                _grown(part, self.count, 2 * need) for part in (self._where, self._steps)
            )
        self.count = kernels.find_changes(
            old, new, start, stop, self._seen - start, self._where, self._steps, self.count
        )
        self._seen += stop - start

    @property
    def where(self) -> Any:
        """Positions from the first element of the run, shape (count,) uint32, rising."""
        return self._where[: self.count]

    @property
    def steps(self) -> BitArray:
        """Steps new - old, shape (count,)."""
        return self._steps[: self.count]


def write_steps(out: bytearray, where: Any, steps: BitArray) -> None:
    """Append changes: their number and, if it is not 0, their gaps and steps as zstd frames."""
    num = where.size
    put_number(out, num)
    if not num:
        return
    gaps = np.empty(num + int(where[-1]) // _SKIP + 1, np.uint8)
    _put_frame(out, gaps[: _pack_gaps(where, gaps)])
    if steps.itemsize == 4:
        planes = np.ascontiguousarray(steps.view(np.uint8).reshape(num, 4).T)
        _put_frame(out, planes.reshape(-1))
        return
    nibbles, escapes = np.zeros((num + 1) // 2, np.uint8), np.empty(3 * num, np.uint8)
    num_escapes = _pack_steps(steps, nibbles, escapes)
    _put_frame(out, nibbles)
    _put_frame(out, escapes[:num_escapes])


def read_steps(reader: Reader, elements: int, dtype: np.dtype[Any]) -> tuple[Any, BitArray]:
    """Return the changes of a run of `elements` elements: positions (uint32, rising, within it) and steps.

    Raises:
        WeightsError: damaged, or more changes than elements.
    """
    num = reader.number(elements, "number of changes")
    room, steps = np.empty(num + 1, np.uint32), np.empty(num, dtype)
    where = room[:num]
    if not num:
        return where, steps
    gaps = _frame(reader, num, num + elements // _SKIP + 1, "gaps")
    if not _unpack_gaps(gaps, elements, room):
        raise WeightsError(f"segment: gaps do not lead to {num} changes among {elements} elements")
    if dtype.itemsize == 4:
        planes = _frame(reader, 4 * num, 4 * num, "steps")
        steps[:] = np.ascontiguousarray(planes.reshape(4, num).T).reshape(-1).view(dtype)
        return where, steps
    nibbles = _frame(reader, (num + 1) // 2, (num + 1) // 2, "steps")
    escapes = _frame(reader, 0, 3 * num, "long steps")
    if not _unpack_steps(nibbles, escapes, steps):
        raise WeightsError("segment: the list of long steps does not fit the short ones")
    return where, steps


def _grown(array: Any, used: int, size: int) -> Any:
    larger = np.empty(size, array.dtype)
    larger[:used] = array[:used]
    return larger


def _put_frame(out: bytearray, data: ByteArray) -> None:
    packed = zstandard.ZstdCompressor(_LEVEL).compress(data.data)
    put_number(out, data.size)
    put_number(out, len(packed))
    out += packed


def _frame(reader: Reader, least: int, most: int, what: str) -> ByteArray:
    """Return the contents of a zstd frame of `least` to `most` bytes, checked before decompression."""
    size = reader.number(most, f"size of {what}")
    packed = reader.take(reader.number(most + _FRAME_SLACK, f"packed size of {what}"), what)
    if size < least:
        raise WeightsError(f"segment: {what} are {size} bytes, at least {least} are needed")
    try:
        # zstd allocates by the size that the frame declares, so check that size first.
        declared = zstandard.frame_content_size(packed)
        if declared != size:
            raise WeightsError(f"segment: {what} do not decompress: a frame of {declared} bytes, not {size}")
        data = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsError(f"segment: {what} do not decompress: {error}") from error
    return np.array(np.frombuffer(data, np.uint8))


@kernel
def _pack_gaps(where: Any, out: Any) -> Any:
    """Write the gaps between positions to `out`. Return the number of bytes used."""
    at, following = 0, np.int64(0)
    for i in range(where.size):
        position = np.int64(where[i])
        gap = position - following
        while gap >= _SKIP:
            out[at] = _SKIP
            at += 1
            gap -= _SKIP
        out[at] = gap
        at += 1
        following = position + 1
    return at


@kernel
def _unpack_gaps(gaps: Any, elements: int, where: Any) -> Any:
    """Fill `where`, whose last place is spare, with the positions that the gaps lead to.

    Return whether they are exactly where.size - 1 positions below `elements`.
    """
    most = where.size - 1
    count, position = np.int64(0), np.int64(0)
    for i in range(gaps.size):
        # Branch-free, because the CPU would mispredict a branch at every byte of 255.
        gap = np.int64(gaps[i])
        position += gap
        where[min(count, most)] = position
        ends = np.int64(gap != _SKIP)
        count += ends
        position += ends
    return count == most and position <= elements and gaps[gaps.size - 1] != _SKIP


@kernel
def _pack_steps(steps: Any, nibbles: Any, escapes: Any) -> Any:
    """Write steps to `nibbles`, which must be zero, and `escapes`. Return the bytes of `escapes` used."""
    at = 0
    for i in range(steps.size):
        step = np.int64(np.int16(steps[i]))
        if -_ESCAPE < step < _ESCAPE:
            code = step & 15
        else:
            code = np.int64(_ESCAPE)
            if -_LONG < step < _LONG:
                escapes[at] = step & 255
                at += 1
            else:
                escapes[at], escapes[at + 1], escapes[at + 2] = _LONG, step & 255, (step >> 8) & 255
                at += 3
        nibbles[i >> 1] |= code << (4 * (i & 1))
    return at


@kernel
def _unpack_steps(nibbles: Any, escapes: Any, steps: Any) -> Any:
    """Fill `steps`. Return whether `escapes` holds exactly the steps that the nibbles refer to."""
    at, num = 0, escapes.size
    for i in range(steps.size):
        code = np.int64((nibbles[i >> 1] >> (4 * (i & 1))) & 15)
        step = code - ((code & _ESCAPE) << 1)
        if code == _ESCAPE:
            if at >= num:
                return False
            code = np.int64(escapes[at])
            at += 1
            step = code - ((code & _LONG) << 1)
            if code == _LONG:
                if at + 2 > num:
                    return False
                step = np.int64(escapes[at]) | (np.int64(escapes[at + 1]) << 8)
                at += 2
        steps[i] = step & 0xFFFF
    return at == num
