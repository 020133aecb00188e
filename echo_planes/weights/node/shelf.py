"""The publications that a node holds, as verified chunks in spool files, and the messages about them.

One event loop owns the shelf. `Transfer` decides which chunks it takes, `Admission` which publications.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray
from echo_planes.weights.node.spool import SpoolFile
from echo_planes.weights.wire.admission import Admission
from echo_planes.weights.wire.frames import ChunkFrame
from echo_planes.weights.wire.limits import TransferLimits
from echo_planes.weights.wire.manifest import (
    PublicationKey,
    SignedManifest,
    SignedSegment,
    key_of,
    key_text,
    parse_key_text,
)
from echo_planes.weights.wire.messages import Message
from echo_planes.weights.wire.transfer import ChunkSet, Transfer, Verdict, Verifies, content_name, ordered

KEPT_PATCHES = 8  # newest complete ones: for children that lag, and for peers that join
KEPT_FULLS = 1
MAX_OPEN = 8  # incomplete publications; one more replaces the oldest
MAX_UNWANTED = 64  # keys remembered as unwanted
MAX_NAMED = 256  # publications that a child may name when it attaches


class Holding:
    """One publication on the shelf: the state of its transfer, and its bytes."""

    def __init__(self, transfer: Transfer, spool: SpoolFile, now_s: float) -> None:
        self.transfer = transfer
        self.spool = spool
        self.arrivals: list[int] = []  # chunk numbers in the order in which they were accepted
        self.opened_s = now_s  # this machine's monotonic clock
        self.completed_s: float | None = None
        self.pins = 0  # readers of its bytes: the spool file stays open while there are any
        self.dropped = False
        self.num_looked_at = 0  # segments of which `maker` has looked whether it can make them
        self.made = False  # some of its chunks were made from the model's files
        self.senders = 0  # children to which it is being sent: the shelf keeps it while there are any
        self.retired = False  # the shelf drops it once `senders` is 0; no further child gets it

    @property
    def key(self) -> PublicationKey:
        return self.transfer.key

    def chunk(self, number: int) -> bytes:
        """Return the bytes of an accepted chunk."""
        span = self.transfer.chunk_span(number)
        return self.spool.read(span.offset_bytes, span.size_bytes)

    def segments(self) -> Iterator[tuple[int, ByteArray]]:
        """Yield (offset in the payload, bytes) of each segment in order. The holding must be complete."""
        for signed in self.transfer.segments:
            header = signed.header
            data = self.spool.read(header.offset_bytes, header.size_bytes)
            yield header.offset_bytes, np.frombuffer(data, dtype=np.uint8)

    def unpin(self) -> None:
        """Remove a reader's pin."""
        self.pins -= 1
        self.release()

    def release(self) -> None:
        """Free the space if the holding is dropped and has no readers."""
        if self.dropped and not self.pins:
            self.spool.close()


class Shelf:
    """All publications of a node, oldest first.

    Args:
        verifier: checks signatures.
        limits: the largest publication taken.
        folder: folder on the file system that holds the bytes.
        lineage: the only lineage taken; "": any.
    """

    def __init__(self, verifier: Verifies, limits: TransferLimits, folder: Path, lineage: str = "") -> None:
        self.holdings: dict[PublicationKey, Holding] = {}
        self.limits = limits
        self.admission = Admission(lineage)
        self.changed = asyncio.Event()  # set at the next change, then replaced
        self.received_bytes = 0  # of sound chunks and of catch-ups, since the node's start
        self.made_bytes = 0  # of chunks that this node made from the model's files
        # Names of the contents of segments that it can make so; a parent does not send them.
        self.makes: frozenset[str] = frozenset()
        self.is_making = False
        self._verifier = verifier
        self._folder = folder
        self.unwanted: dict[PublicationKey, None] = {}  # cancelled, refused by `admission`, or superseded

    def add_segment(self, signed: SignedSegment) -> Holding | None:
        """Take a segment's header; the first one opens the publication. Return None if unwanted or too early.

        A publication that `Admission` refuses is unwanted from now on, which is no error: its sender may not
        know how far this node is.

        Raises:
            WeightsError: forged, too large, or in conflict with the manifest or the other segments.
        """
        header = signed.header
        holding = self.holdings.get(header.key)
        if holding is None:
            if header.key in self.unwanted or header.index > 0:
                return None
            self._verifier.check_segment(signed)
            try:
                self.admission.check(header.key, header.base_digest)
            except WeightsError:
                self._refuse(header.key)
                return None
            holding = self._open(header.key, signed)
        if holding.transfer.add_segment(signed) == "unknown":
            return None
        self._notify()
        return holding

    def add_chunk(self, frame: ChunkFrame) -> Verdict:
        """Judge one chunk, and write it if it is sound. A chunk of an unwanted publication is a "duplicate".

        Raises:
            ClusterError: there is no room for it. It stays missing, and can come again.
        """
        if frame.key in self.unwanted:
            return "duplicate"
        holding = self.holdings.get(frame.key)
        if holding is None:
            return "unknown"
        transfer = holding.transfer
        verdict = transfer.judge(frame.segment_index, frame.chunk_index, frame.data)
        if verdict == "accepted":
            holding.spool.write(
                transfer.span(frame.segment_index, frame.chunk_index).offset_bytes, frame.data
            )
            transfer.keep(frame.segment_index, frame.chunk_index)
            holding.arrivals.append(transfer.chunk_number(frame.segment_index, frame.chunk_index))
            self.received_bytes += len(frame.data)
            self._progressed(holding)
        return verdict

    def keep_made(self, holding: Holding, segment_index: int) -> None:
        """Count a segment as present: this node has made it, compared its hashes, and written it."""
        transfer = holding.transfer
        for index in range(transfer.segments[segment_index].header.num_chunks):
            number = transfer.chunk_number(segment_index, index)
            if number not in transfer.have:
                transfer.keep(segment_index, index)
                holding.arrivals.append(number)
                self.made_bytes += transfer.chunk_span(number).size_bytes
        holding.made = True
        self._progressed(holding)

    def commit(self, signed: SignedManifest) -> Holding | None:
        """Take the manifest. Return None if the publication is unwanted, or no segment of it is known yet.

        Raises:
            WeightsError: forged, or in conflict with the segments.
        """
        key = key_of(signed.manifest)
        holding = self.holdings.get(key)
        if holding is None:
            if signed.manifest.num_segments or key in self.unwanted:
                return None
            self._verifier.check_manifest(signed)
            try:
                self.admission.check_manifest(signed.manifest)
            except WeightsError:
                self._refuse(key)
                return None
            holding = self._hold(key)  # without segments: a patch that changes nothing
        if holding.transfer.manifest is None:
            holding.transfer.commit(signed)
            self._progressed(holding)
        return holding

    def cancel(self, key: PublicationKey) -> None:
        """Drop and from now on refuse `key`, unless it is complete."""
        holding = self.holdings.get(key)
        if holding is not None and holding.completed_s is not None:
            return
        self._refuse(key)
        if holding is not None:
            self._drop(holding)

    def give_up(self, key: PublicationKey) -> None:
        """Drop `key` unless it is complete. It may come again, from another parent."""
        holding = self.holdings.get(key)
        if holding is not None and holding.completed_s is None:
            self._drop(holding)

    def sent(self, holding: Holding) -> None:
        """Note that the sending of a holding to one child has ended."""
        holding.senders -= 1
        self._notify()  # the child's feeds may begin another publication
        if holding.retired and not holding.senders and not holding.dropped:
            self._supersede(holding)

    @property
    def gained_bytes(self) -> int:
        """Bytes of weights that arrived or were made here; they grow while a publication gets on."""
        return self.received_bytes + self.made_bytes

    def incomplete(self) -> list[Holding]:
        """Return the publications that are still arriving, oldest first."""
        return [holding for holding in self.holdings.values() if holding.completed_s is None]

    def complete(self) -> list[Holding]:
        """Return the complete publications, oldest first."""
        return [holding for holding in self.holdings.values() if holding.completed_s is not None]

    def close(self) -> None:
        """Drop all publications and free their space."""
        for holding in list(self.holdings.values()):
            self._drop(holding)

    def _open(self, key: PublicationKey, signed: SignedSegment) -> Holding:
        self.limits.check_header(signed.header)
        still_open = self.incomplete()
        if len(still_open) >= MAX_OPEN:
            self._drop(still_open[0])
        return self._hold(key)

    def _hold(self, key: PublicationKey) -> Holding:
        transfer = Transfer(key, self._verifier, self.limits)
        holding = self.holdings[key] = Holding(transfer, SpoolFile(self._folder), time.monotonic())
        return holding

    def _progressed(self, holding: Holding) -> None:
        if holding.completed_s is None and holding.transfer.complete:
            holding.completed_s = time.monotonic()
            self._retire(holding)
        self._notify()

    def _retire(self, newest: Holding) -> None:
        """Drop publications that are no longer needed: of earlier lineages, and all but the newest ones."""
        lineage = newest.key.lineage
        for holding in self.complete():
            if holding is newest:
                break
            if holding.key.lineage != lineage:
                self._supersede(holding)
        fulls = [h for h in self.complete() if h.key.codec == "full"]
        patches = [h for h in self.complete() if h.key.codec != "full"]
        gone = patches[:-KEPT_PATCHES]
        # A snapshot is of no use once a patch after it is gone.
        first = max((holding.key.version for holding in gone), default=-1)
        stale = [holding for holding in fulls[-KEPT_FULLS:] if holding.key.version < first]
        for holding in fulls[:-KEPT_FULLS] + stale + gone:
            holding.retired = True
            if not holding.senders:  # else a child slower than the publications would never complete one
                self._supersede(holding)

    def _supersede(self, holding: Holding) -> None:
        self._refuse(holding.key)
        self._drop(holding)

    def _refuse(self, key: PublicationKey) -> None:
        self.unwanted[key] = None
        while len(self.unwanted) > MAX_UNWANTED:
            del self.unwanted[next(iter(self.unwanted))]

    def _drop(self, holding: Holding) -> None:
        self.holdings.pop(holding.key, None)
        holding.dropped = True
        holding.release()
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Wanted(Message, frozen=True):
    """Message of a child to its parent, when it attaches: `POST /v1/feed`."""

    # Ranges of chunks that the child has, by key of an incomplete publication.
    have: dict[str, list[tuple[int, int]]] = msgspec.field(default_factory=dict)
    done: tuple[str, ...] = ()  # keys of publications that are complete or unwanted
    newest: Annotated[tuple[str | int, ...], Meta(max_length=2)] = ()  # (lineage, version) staged; (): none
    makes: tuple[str, ...] = ()  # contents (`content_name`) of segments that the child makes itself


class Unwanted(Message, frozen=True):
    """Message of a child to its parent, to send no more of `key`: `POST /v1/unwanted`."""

    key: str


class Wants:
    """Publications and chunks that a child says it has; feeds send it the rest.

    Raises:
        WeightsError: too many publications, a malformed key, or ranges out of order.
    """

    def __init__(self, message: Wanted) -> None:
        if len(message.have) + len(message.done) > MAX_NAMED:
            raise WeightsError(f"a child names at most {MAX_NAMED} publications")
        self.have = {parse_key_text(text): list(ordered(ranges)) for text, ranges in message.have.items()}
        self._makes = frozenset(message.makes)
        self._chunks: dict[PublicationKey, tuple[int, ChunkSet]] = {}  # segments known here, the child's set
        self.done = {parse_key_text(text) for text in message.done}
        match message.newest:
            case (str(lineage), int(version)):
                self._newest = lineage, version
            case _:
                self._newest = "", -1

    def skips(self, key: PublicationKey) -> bool:
        """Return whether the child has no use for a publication: it has or refuses it, or has a later one.

        A full publication of exactly the child's version goes to it all the same: the learner has published
        it again for workers that missed it, and the child may feed them.
        """
        lineage, version = self._newest
        passed = key.version < version if key.codec == "full" else key.version <= version
        return key in self.done or (key.lineage == lineage and passed)

    def chunks(self, transfer: Transfer) -> ChunkSet:
        """Return the known chunks that the child has or makes itself. Other claims take no memory here."""
        key, segments = transfer.key, transfer.segments
        known, chunks = self._chunks.get(key, (0, ChunkSet()))
        for signed in segments[known:]:
            first = transfer.chunk_number(signed.header.index, 0)
            if self._makes and content_name(signed.header.chunk_hashes) in self._makes:
                ranges = [(first, first + signed.header.num_chunks)]
            else:
                ranges = self.have.get(key, [])
            for low, high in ranges:
                for number in range(max(low, first), min(high, first + signed.header.num_chunks)):
                    chunks.add(number)
        self._chunks[key] = (len(segments), chunks)
        return chunks

    def forget(self, key: PublicationKey) -> None:
        """Forget the child's chunks of `key`: the feed has told the child to discard them."""
        self.have.pop(key, None)
        self._chunks.pop(key, None)


def wants_message(shelf: Shelf, newest: tuple[str, int] | None) -> Wanted:
    """Return the message of a node that attaches: what it has, and what it does not want.

    Args:
        newest: (lineage, version) that is staged, or None: the node wants no patch up to that version.
    """
    return Wanted(
        makes=tuple(shelf.makes),
        have={key_text(h.key): h.transfer.have.ranges() for h in shelf.incomplete()},
        done=tuple(key_text(key) for key in (*(h.key for h in shelf.complete()), *shelf.unwanted)),
        newest=newest or (),
    )
