"""Interface of a patch codec, which encodes the difference of two states, segment by segment.

`table.py` lists the codecs. A run can bring its own: a `TensorCodec`, which is two functions of bits, or a
`PatchCodec` where that is not enough. `weights.codec=my_codec:NAME` names an instance of it.

The learner signs segments, but decoders do not trust their contents. `open` reads the run of elements that a
segment covers, at most `SEGMENT_BYTES` of weights, before it allocates memory of that size. Anything damaged,
out of range or left over is a WeightsError. The new state's digest proves the result afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from echo_planes.config.extensions import in_words
from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray
from echo_planes.weights.codec.changes import Applied, Change, EncodedSegment, exchange, index_dtype
from echo_planes.weights.codec.layout import Layout, Reader, Section, put_number
from echo_planes.weights.digest import BitArray, BitTensor, StateHasher

Read = Callable[[str], BitArray]  # returns the base's bits of a tensor, shape (elements,)
TENSOR_CODEC = 255  # number of every `TensorCodec` in segment headers; the manifest holds the codec's name


class OpenSegment(Protocol):
    """A segment, read and checked as far as possible without the base."""

    @property
    def run(self) -> Sequence[Section]:
        """Elements that it covers, in canonical order; meaningless if the codec's `covers` is False."""
        ...

    def changes(self, read: Read) -> list[Change]:
        """Return its changes, each tensor once, in order of names. Write nothing."""
        ...

    def write(self, read: Read, hasher: StateHasher | None, applied: list[Applied]) -> None:
        """Change the bits that `read` returns, in place, and digest the run's new bits.

        Args:
            applied: receives each change once it is made, also those before an error.
        """
        ...


class Changes:
    """An open segment whose changes do not depend on the base."""

    run: Sequence[Section] = ()

    def __init__(self, changes: list[Change]) -> None:
        self._changes = changes

    def changes(self, read: Read) -> list[Change]:
        return self._changes

    def write(self, read: Read, hasher: StateHasher | None, applied: list[Applied]) -> None:
        """Change the bits, without a digest: the segment does not cover the elements that stay."""
        for change in self._changes:
            bits = read(change.name)
            _check_writable(change.name, bits)
            applied.append(exchange(change, bits))


class PatchCodec(ABC):
    """A codec of patches. It must be stateless, because several callers use one instance concurrently."""

    name: str  # 1 to 32 of a-z, 0-9 and _, a letter first; used in manifests, file names and reports
    covers = True  # its segments together cover every element in order, so that a missing part is found

    @abstractmethod
    def encode(
        self,
        layout: Layout,
        run: list[Section],
        base: Mapping[str, BitTensor],
        tensors: Mapping[str, BitTensor],
        hasher: StateHasher | None,
    ) -> EncodedSegment:
        """Encode one run as a segment. If the codec `covers`, the segment must begin with `layout.header`.

        Args:
            base, tensors: old and new bits of all tensors.
            hasher: `begin` it at each section that starts its tensor; `update` it with the run's new bits.
        """

    @abstractmethod
    def open(self, segment: ByteArray, layout: Layout) -> OpenSegment:
        """Read a segment, shape (bytes,).

        Raises:
            WeightsError: damaged, of another format, or larger than the run can need.
        """


class TensorCodec(PatchCodec):
    """A codec that encodes each tensor's part of a run by itself, and only the parts that changed.

    A segment is the header of its run, then for each section the number of its changes. If there are any, the
    length of the bytes from `pack`, and these bytes, follow. Numbers are LEB128.
    """

    @abstractmethod
    def pack(self, old: BitArray, new: BitArray) -> bytes:
        """Return bytes from which `unpack` restores `new`; both of shape (elements,), uint16 or uint32.

        Nodes may refuse a publication larger than the weights plus 8 bytes per element.
        """

    @abstractmethod
    def unpack(self, data: bytes, old: BitArray) -> BitArray:
        """Return the new bits, of `old`'s shape and type. Any exception refuses the segment.

        `data` is untrusted: bound allocations by `old.nbytes`, never by a size read from `data`.
        """

    def encode(
        self,
        layout: Layout,
        run: list[Section],
        base: Mapping[str, BitTensor],
        tensors: Mapping[str, BitTensor],
        hasher: StateHasher | None,
    ) -> EncodedSegment:
        out, changed = bytearray(layout.header(TENSOR_CODEC, run)), dict[str, int]()
        for section in run:
            part, name = slice(section.start, section.stop), section.spec.name
            old, new = base[name].bits[part], tensors[name].bits[part]
            num = int(np.count_nonzero(old != new))
            put_number(out, num)
            if num:
                changed[name] = num
                data = self.pack(_frozen(old), _frozen(new))
                put_number(out, len(data))
                out += data
            _digest(section, new, hasher)
        return EncodedSegment(np.frombuffer(out, np.uint8), changed)

    def open(self, segment: ByteArray, layout: Layout) -> OpenSegment:
        reader = Reader(segment)
        return _Parts(self, reader, layout.read_header(self.name, TENSOR_CODEC, reader))


class _Parts:
    """A segment of a `TensorCodec`."""

    def __init__(self, codec: TensorCodec, reader: Reader, run: list[Section]) -> None:
        self.run = run
        self._codec = codec
        self._packed: list[tuple[int, bytes]] = []  # number of changes and their bytes, by section
        for section in run:
            num = reader.number(section.size, "number of changes")
            size = reader.number(reader.data.size, "packed size") if num else 0
            self._packed.append((num, reader.take(size, "a tensor's changes")))
        reader.end()

    def changes(self, read: Read) -> list[Change]:
        found = [self._change(i, read(section.spec.name)) for i, section in enumerate(self.run)]
        return [change for change in found if change is not None]

    def write(self, read: Read, hasher: StateHasher | None, applied: list[Applied]) -> None:
        for i, section in enumerate(self.run):
            bits = read(section.spec.name)
            _check_writable(section.spec.name, bits)
            if (change := self._change(i, bits)) is not None:
                applied.append(exchange(change, bits))
            _digest(section, bits[section.start : section.stop], hasher)

    def _change(self, i: int, bits: BitArray) -> Change | None:
        section, (num, data) = self.run[i], self._packed[i]
        if not num:
            return None
        where = f"codec {self._codec.name}, tensor {section.spec.name!r}"
        old = bits[section.start : section.stop]
        try:
            new = self._codec.unpack(data, _frozen(old))
        except Exception as error:  # the run's own codec reads untrusted bytes: it may raise anything
            raise WeightsError(f"{where}: the changes cannot be read: {in_words(error)}") from error
        if not isinstance(new, np.ndarray) or new.shape != old.shape or new.dtype != old.dtype:
            raise WeightsError(f"{where}: what was read is no array of {old.size} {old.dtype}")
        at = np.flatnonzero(new != old)
        if at.size != num:
            raise WeightsError(f"{where}: {at.size} changes were read, {num} were announced")
        return Change(
            section.spec.name,
            section.start,
            (at + section.start).astype(index_dtype(bits.size), copy=False),
            new[at],
        )


def _frozen(bits: BitArray) -> BitArray:
    """Return a read-only view."""
    view = bits.view()
    view.flags.writeable = False
    return view


def _check_writable(name: str, bits: BitArray) -> None:
    if not bits.flags.writeable:
        raise WeightsError(f"the bits of tensor {name!r} cannot be written to")


def _digest(section: Section, new: BitArray, hasher: StateHasher | None) -> None:
    if hasher is not None:
        if section.start == 0:
            hasher.begin(section.spec.name, section.spec.dtype, section.spec.shape)
        hasher.update(new)
