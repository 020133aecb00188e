"""State of one publication on its way into one node: verified headers, present and missing chunks. Sans-I/O.

A chunk counts only if its BLAKE3 is the one in a segment header that the learner signed. A node may write to
its spool, at the offset that `span` returns, and forward only such chunks. A `Transfer` holds no payload
bytes.

Chunk numbers count from 0 through the publication, over its segments in order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

from blake3 import blake3

from echo_planes.errors import WeightsError
from echo_planes.types import Manifest
from echo_planes.weights.wire.limits import TransferLimits
from echo_planes.weights.wire.manifest import (
    HASH_BYTES,
    Buffer,
    PublicationKey,
    SegmentHeader,
    SignedManifest,
    SignedSegment,
    key_of,
)

CONTENT_NAME_BYTES = 16
# accepted: write and forward it. duplicate: the node has it already. damaged: it is not what was signed;
# request it again. unknown: its segment's header is not known (yet); request it later.
Verdict = Literal["accepted", "duplicate", "damaged", "unknown"]


class Verifies(Protocol):
    """Interface of a verifier of signatures, such as `signing.Verifier`."""

    def check_segment(self, signed: SignedSegment) -> None: ...

    def check_manifest(self, signed: SignedManifest) -> None: ...


def chunk_hashes(data: Buffer, chunk_bytes: int) -> bytes:
    """Return the hash of each chunk of a segment, as `SegmentHeader.chunk_hashes` has them."""
    view = memoryview(data)
    chunks = (view[start : start + chunk_bytes] for start in range(0, len(view), chunk_bytes))
    return b"".join(blake3(chunk).digest() for chunk in chunks)


def content_name(hashes: bytes) -> str:
    """Return a short name of what a segment holds, from the hashes of its chunks: 32 hex digits."""
    return blake3(hashes).hexdigest(CONTENT_NAME_BYTES)


class ChunkSpan(NamedTuple):
    """Place of one chunk."""

    segment_index: int
    chunk_index: int
    offset_bytes: int  # in the payload
    size_bytes: int


class ChunkSet:
    """Set of chunk numbers, with one byte for each number up to the largest; sent as ranges."""

    def __init__(self) -> None:
        self._flags = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        return 0 <= number < len(self._flags) and self._flags[number] == 1

    def add(self, number: int) -> None:
        """Add one number, at least 0. The caller limits it, since memory grows with the largest."""
        short = number + 1 - len(self._flags)
        if short > 0:
            self._flags.extend(bytes(short))
        self._count += not self._flags[number]
        self._flags[number] = 1

    def missing(self, stop: int, start: int = 0) -> Iterator[int]:
        """Yield the numbers in [start, stop) that are not in the set, in order."""
        inside = min(stop, len(self._flags))
        number = self._flags.find(0, start, inside)
        while number >= 0:
            yield number
            number = self._flags.find(0, number + 1, inside)
        yield from range(max(start, len(self._flags)), stop)

    def first_missing(self, start: int = 0) -> int:
        """Return the smallest number from `start` on that is not in the set."""
        number = self._flags.find(0, start)
        return number if number >= 0 else max(start, len(self._flags))

    def ranges(self) -> list[tuple[int, int]]:
        """Return the set as ranges [start, stop), in order, with a gap between any two."""
        ranges = []
        start = self._flags.find(1)
        while start >= 0:
            stop = self.first_missing(start)
            ranges.append((start, stop))
            start = self._flags.find(1, stop)
        return ranges

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]], max_chunks: int) -> ChunkSet:
        """Return the set with these ranges, which come from a peer's `ranges`.

        Args:
            max_chunks: exclusive limit of the numbers (`TransferLimits.max_chunks`), and so of the memory.

        Raises:
            WeightsError: a range is empty, out of order, touches the one before, or ends beyond the limit.
        """
        chunks = cls()
        for start, stop in ordered(ranges):
            if stop > max_chunks:
                raise WeightsError(f"range of chunks [{start}, {stop}) is too high: {max_chunks} is the end")
            chunks._flags.extend(bytes(start - len(chunks._flags)))
            chunks._flags.extend(b"\1" * (stop - start))
            chunks._count += stop - start
        return chunks


def ordered(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield a peer's ranges [start, stop) of any height, checked to be such as `ChunkSet.ranges` returns.

    Raises:
        WeightsError: a range is empty, out of order, or touches the one before.
    """
    last = -1
    for start, stop in ranges:
        if not last < start < stop:
            raise WeightsError(f"range of chunks [{start}, {stop}) is empty or disordered")
        yield start, stop
        last = stop


class Transfer:
    """State of one publication at one node. Not thread-safe: one event loop owns it.

    Args:
        key: the publication.
        verifier: checks the learner's signatures.
        limits: largest publication that the model can need.
    """

    def __init__(self, key: PublicationKey, verifier: Verifies, limits: TransferLimits) -> None:
        self.key = key
        self.have = ChunkSet()
        self.segments: list[SignedSegment] = []  # verified, in order
        self.signed_manifest: SignedManifest | None = None  # verified
        self.bytes_have = 0  # payload bytes in accepted chunks
        self.num_damaged = 0
        self._verifier = verifier
        self._limits = limits
        self._first: list[int] = []  # number of each segment's first chunk
        self._num_chunks = 0
        self._num_bytes = 0

    @property
    def num_chunks(self) -> int:
        """Chunks in the segments known so far."""
        return self._num_chunks

    @property
    def num_bytes(self) -> int:
        """Payload bytes in the segments known so far."""
        return self._num_bytes

    @property
    def manifest(self) -> Manifest | None:
        """The verified manifest; None before it has come."""
        return self.signed_manifest.manifest if self.signed_manifest else None

    @property
    def complete(self) -> bool:
        """Whether manifest, segments and chunks are all present and verified.

        The manifest also names the BLAKE3 of the whole payload. A reader of the spool that installs or stores
        the payload checks it, since memory or disk may have altered bytes after their chunk was verified.
        """
        return (
            self.signed_manifest is not None
            and len(self.segments) == self.signed_manifest.manifest.num_segments
            and len(self.have) == self._num_chunks
        )

    def add_segment(self, signed: SignedSegment) -> Literal["accepted", "duplicate", "unknown"]:
        """Add a segment's header. Headers must come in the order of their index.

        Returns:
            "accepted"; "duplicate" if it is known; "unknown" if one before it is missing: the header is not
            kept then, and must come again.

        Raises:
            WeightsError: the header is forged, of another publication, beyond the limits, does not begin
                where the one before it ends, differs from the one known under its index, or is one too many.
        """
        header = signed.header
        if header.key != self.key:
            raise WeightsError(f"segment of {header.key} within {self.key}")
        if 0 <= header.index < len(self.segments):
            if header == self.segments[header.index].header:
                return "duplicate"
            self._verifier.check_segment(signed)
            raise WeightsError(f"segment {header.index} of {self.key} was signed twice, with other contents")
        self._verifier.check_segment(signed)
        self._limits.check_header(header)
        if header.index > len(self.segments):
            return "unknown"
        self._check_joins(header)
        num_bytes = self._num_bytes + header.size_bytes
        if self.signed_manifest:
            _check_total(self.signed_manifest.manifest, len(self.segments) + 1, num_bytes)
        self._first.append(self._num_chunks)
        self.segments.append(signed)
        self._num_chunks += header.num_chunks
        self._num_bytes = num_bytes
        return "accepted"

    def add_chunk(self, segment_index: int, chunk_index: int, data: Buffer) -> Verdict:
        """Judge one chunk, and count it as present if it is accepted."""
        verdict = self.judge(segment_index, chunk_index, data)
        if verdict == "accepted":
            self.keep(segment_index, chunk_index)
        return verdict

    def judge(self, segment_index: int, chunk_index: int, data: Buffer) -> Verdict:
        """Judge one chunk. The caller writes it only if the verdict is "accepted", and then calls `keep`.

        A chunk that is present already is a "duplicate", without a look at its bytes.
        """
        if not 0 <= segment_index < len(self.segments):
            return "unknown"
        header = self.segments[segment_index].header
        number = self._first[segment_index] + chunk_index
        if not 0 <= chunk_index < header.num_chunks:
            self.num_damaged += 1
            return "damaged"
        if number in self.have:
            return "duplicate"
        size = len(data)
        expected = min(header.chunk_bytes, header.size_bytes - chunk_index * header.chunk_bytes)
        start = chunk_index * HASH_BYTES
        if size != expected or blake3(data).digest() != header.chunk_hashes[start : start + HASH_BYTES]:
            self.num_damaged += 1
            return "damaged"
        return "accepted"

    def keep(self, segment_index: int, chunk_index: int) -> None:
        """Record that the node has written an accepted chunk: it is present and may be forwarded now."""
        self.have.add(self.chunk_number(segment_index, chunk_index))
        self.bytes_have += self.span(segment_index, chunk_index).size_bytes

    def commit(self, signed: SignedManifest) -> None:
        """Add the manifest, which may come before the last segments. The same one again is no error.

        Raises:
            WeightsError: it is forged, of another publication or model, does not fit the segments, or differs
                from the one known. The transfer is unchanged then.
        """
        manifest = signed.manifest
        if key_of(manifest) != self.key:
            raise WeightsError(f"manifest of {key_of(manifest)} for {self.key}")
        if self.manifest == manifest:
            return
        self._verifier.check_manifest(signed)
        if self.signed_manifest:
            raise WeightsError(f"two manifests were signed for {self.key}")
        self._limits.check_manifest(manifest)
        if self.segments and manifest.base_digest != self.segments[0].header.base_digest:
            raise WeightsError(f"manifest and segments of {self.key} name other bases")
        _check_total(manifest, len(self.segments), self._num_bytes)
        self.signed_manifest = signed

    def missing(self) -> list[tuple[int, int]]:
        """Return (segment_index, chunk_index) of each missing chunk of the known segments, in order."""
        return [self.chunk_span(number)[:2] for number in self.have.missing(self._num_chunks)]

    def chunk_number(self, segment_index: int, chunk_index: int) -> int:
        """Return the number of a chunk of a known segment."""
        return self._first[segment_index] + chunk_index

    def chunk_span(self, number: int) -> ChunkSpan:
        """Return the place of chunk `number`, which is below `num_chunks`."""
        segment_index = bisect_right(self._first, number) - 1
        return self.span(segment_index, number - self._first[segment_index])

    def span(self, segment_index: int, chunk_index: int) -> ChunkSpan:
        """Return the place of a chunk of a known segment."""
        header = self.segments[segment_index].header
        start = chunk_index * header.chunk_bytes
        size = min(header.chunk_bytes, header.size_bytes - start)
        return ChunkSpan(segment_index, chunk_index, header.offset_bytes + start, size)

    def verified_end(self, offset_bytes: int) -> int:
        """Return the end of the run of verified bytes that begins at `offset_bytes` of the payload.

        It equals `offset_bytes` if that byte is missing. Range requests use it.
        """
        number = self._chunk_at(offset_bytes)
        if number is None:
            return offset_bytes
        stop = min(self.have.first_missing(number), self._num_chunks)
        if stop == number:
            return offset_bytes
        last = self.chunk_span(stop - 1)
        return last.offset_bytes + last.size_bytes

    def _chunk_at(self, offset_bytes: int) -> int | None:
        if not 0 <= offset_bytes < self._num_bytes:
            return None
        # The last segment that begins at or before the offset holds it; an empty one comes before such a one.
        index = bisect_right(self.segments, offset_bytes, key=lambda s: s.header.offset_bytes) - 1
        header = self.segments[index].header
        return self._first[index] + (offset_bytes - header.offset_bytes) // header.chunk_bytes

    def _check_joins(self, header: SegmentHeader) -> None:
        if header.offset_bytes != self._num_bytes:
            raise WeightsError(
                f"segment {header.index} begins at byte {header.offset_bytes}; "
                f"the one before it ends at {self._num_bytes}"
            )
        if self.segments:
            known = self.segments[0].header.base_digest
        elif self.signed_manifest:
            known = self.signed_manifest.manifest.base_digest
        else:
            return
        if header.base_digest != known:
            raise WeightsError(f"segments of {self.key} name other bases")


def _check_total(manifest: Manifest, num_segments: int, num_bytes: int) -> None:
    """Check that `num_segments` with `num_bytes` in all can be the payload of the manifest, or begin it."""
    left = manifest.num_segments - num_segments
    if left < 0 or num_bytes > manifest.payload_bytes or (left == 0 and num_bytes != manifest.payload_bytes):
        raise WeightsError(
            f"version {manifest.version} has {manifest.num_segments} segments and {manifest.payload_bytes} "
            f"bytes by its manifest; {num_segments} segments with {num_bytes} bytes are here"
        )
