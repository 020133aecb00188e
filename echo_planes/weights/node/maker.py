"""Weights that a worker's node makes from the model's own files, instead of receiving them.

The learner has loaded the same files, so a publication before its first update holds what they hold, in
bf16. The node cuts the files' weights as the learner cuts a full publication, and tells its parent which
segments it can make. The parent sends only their signed headers. A segment that is made here counts only if
the hash of each of its chunks is the one that the learner signed; it then goes on to children as any other. A
segment of other weights arrives as always. So do all of them where names or shapes differ from the files'.

A late node makes the first version so, too, where that and later patches are the shortest way to the newest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from echo_planes.errors import ClusterError, DataError, WeightsError
from echo_planes.types import ByteArray, Manifest, TensorSpec
from echo_planes.weights.digest import BitArray, StateHasher
from echo_planes.weights.node.shelf import Holding, Shelf
from echo_planes.weights.node.transport import happens
from echo_planes.weights.tensor_files import Place, places_in
from echo_planes.weights.wire.manifest import SEGMENT_BYTES, SegmentHeader
from echo_planes.weights.wire.transfer import chunk_hashes, content_name

_HEAD = "lm_head.weight"  # published under this name unless it is the embedding
_READ_ELEMENTS = 1 << 20  # of a file, at once


class ModelSegments:
    """Segments of the full publication of a model's files. Safe to call from several threads.

    Args:
        folder: model folder with safetensors files. They are read once here, and again for each `make`.
        chunk_bytes: size of the learner's chunks.
        algorithm: of the run's state digests.

    Raises:
        DataError: a file cannot be read.
    """

    def __init__(
        self, folder: Path, chunk_bytes: int, algorithm: str = "xxh3", segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        from echo_planes.weights.codec.dense import FullFile  # loads numba: not for nodes that only relay

        self._places = _published(folder)
        self._file = FullFile(
            {name: TensorSpec(name, "bfloat16", place.spec.shape) for name, place in self._places.items()}
        )
        self._chunk_bytes = chunk_bytes
        self._cuts: dict[str, tuple[int, int]] = {}
        hasher = StateHasher(algorithm)
        for first, last in self._file.cuts(segment_bytes):
            segment = self._made(first, last)
            self._cuts[content_name(chunk_hashes(segment.data, chunk_bytes))] = first, last
            for piece in self._file.pieces(first, last):
                if piece.start == 0:
                    hasher.begin(piece.spec.name, piece.spec.dtype, piece.spec.shape)
                hasher.update(piece.of(segment[first - last :]))
        self.digest = hasher.digest()  # of the files' state

    @property
    def names(self) -> frozenset[str]:
        """Names (`content_name`) of the segments' contents."""
        return frozenset(self._cuts)

    def make(self, header: SegmentHeader) -> ByteArray | None:
        """Return the segment with this header, equal to what was signed; None: the files do not hold it.

        Raises:
            DataError: a file cannot be read, or has changed.
        """
        cut = self._cuts.get(content_name(header.chunk_hashes))
        if cut is None:
            return None
        segment = self._made(*cut)
        if segment.size != header.size_bytes or chunk_hashes(segment.data, self._chunk_bytes) != (
            header.chunk_hashes
        ):
            raise DataError("the model's files have changed since this node read them")
        return segment

    def _made(self, first: int, last: int) -> ByteArray:
        segment, data = self._file.segment(first, last)
        for piece in self._file.pieces(first, last):
            place, out = self._places[piece.spec.name], piece.of(data)
            for low in range(piece.start, piece.stop, _READ_ELEMENTS):
                high = min(low + _READ_ELEMENTS, piece.stop)
                bits = as_bfloat16(place.read(low, high), place.spec.dtype)
                out[low - piece.start : high - piece.start] = bits
        return segment


class Maker:
    """Makes what arrives at the shelf as headers only. `open` it, then `run` it as a task.

    Args:
        folder: the model's folder.
        chunk_bytes, algorithm: as of `ModelSegments`.
        notify: called with one line for people when files cannot be used: their weights are then received.
    """

    def __init__(
        self, shelf: Shelf, folder: Path, chunk_bytes: int, algorithm: str, notify: Callable[[str], None]
    ) -> None:
        self._shelf = shelf
        self._folder = folder
        self._options = (chunk_bytes, algorithm)
        self._notify = notify
        self._segments: ModelSegments | None = None

    async def open(self) -> None:
        """Read the files. From then on the shelf tells parents what this node makes."""
        try:
            self._segments = await asyncio.to_thread(ModelSegments, self._folder, *self._options)
        except (DataError, WeightsError) as error:
            self._give_up(error)
        else:
            self._shelf.makes = self._segments.names

    async def run(self) -> None:
        """Make segments as their headers come, one at a time, until cancelled or a file fails."""
        while self._segments is not None:
            changed = self._shelf.changed
            found = self._next()
            if found is None:
                await happens(changed, None)
            else:
                await self._take(*found)

    def holds(self, manifest: Manifest) -> bool:
        """Return whether a publication is, in full, the state that the files hold."""
        segments = self._segments
        return segments is not None and manifest.codec == "full" and manifest.digest == segments.digest

    def make(self, header: SegmentHeader) -> ByteArray | None:
        """Return `ModelSegments.make`; also None where the files cannot be used. Blocking: for threads."""
        try:
            return self._segments.make(header) if self._segments else None
        except DataError as error:
            self._give_up(error)
            return None

    def _next(self) -> tuple[Holding, SegmentHeader] | None:
        for holding in self._shelf.incomplete():
            segments = holding.transfer.segments
            while holding.key.codec == "full" and holding.num_looked_at < len(segments):
                header = segments[holding.num_looked_at].header
                holding.num_looked_at += 1
                if content_name(header.chunk_hashes) in self._shelf.makes:
                    return holding, header
        return None

    async def _take(self, holding: Holding, header: SegmentHeader) -> None:
        self._shelf.is_making = True
        try:
            segment = await asyncio.to_thread(self.make, header)
            if segment is not None and not holding.dropped:
                holding.spool.write(header.offset_bytes, segment.data)
                self._shelf.keep_made(holding, header.index)
        except ClusterError as error:
            self._give_up(error)
        finally:
            self._shelf.is_making = False

    def _give_up(self, error: Exception) -> None:
        """Make nothing more: the parent is told at the next request, and sends what is missing."""
        self._segments, self._shelf.makes = None, frozenset()
        self._notify(f"the model's weights are received, not made from {self._folder}: {error}")


def as_bfloat16(bits: BitArray, dtype: str) -> BitArray:
    """Return the bits of elements rounded to bfloat16, to nearest even; shape (elements,), as given.

    NaN become other bits than torch's. What is made of them then has another hash, and is not used.
    """
    if dtype == "bfloat16":
        return bits
    wide = bits if dtype == "float32" else bits.view(np.float16).astype(np.float32).view(np.uint32)
    odd = (wide >> 16) & 1
    return ((wide + 0x7FFF + odd) >> 16).astype(np.uint16)


def _published(folder: Path) -> Mapping[str, Place]:
    """Return the places of the tensors that a learner publishes: a tied lm_head appears once."""
    places = places_in(folder)
    try:
        settings = json.loads((folder / "config.json").read_bytes())
        tied = settings.get("text_config", settings).get("tie_word_embeddings", False)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{folder}/config.json cannot be read: {error}") from error
    return {name: place for name, place in places.items() if not (tied and name == _HEAD)}
