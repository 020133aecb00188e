"""The publications a node holds: verified chunks in spool files, and whoever waits for more of them.

One event loop owns it. What may come in is decided by `Transfer` (chunks) and `Admission` (publications).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
from echo_planes.weights.wire.transfer import ChunkSet, Transfer, Verdict, Verifies, chunk_ranges

KEPT_PATCHES = 8  # newest complete ones: for children that lag, and for peers that join
KEPT_FULLS = 1
MAX_OPEN = 8  # incomplete ones; beyond it the oldest is given up
MAX_UNWANTED = 64  # keys remembered as such


class Holding:
    """One publication: what is known of it, and its bytes."""

    def __init__(self, transfer: Transfer, spool: SpoolFile, now_s: float) -> None:
        self.transfer = transfer
        self.spool = spool
        self.arrivals: list[int] = []  # chunk numbers in the order in which they were accepted
        self.opened_s = now_s  # this machine's monotonic clock
        self.completed_s: float | None = None
        self.pins = 0  # readers in other threads: it is not closed while there are any
        self.dropped = False
        self.senders = 0  # children that are being sent it: it is not retired while there are any
        self.retired = False  # it goes as soon as `senders` is 0; nobody is begun to be sent it

    @property
    def key(self) -> PublicationKey:
        return self.transfer.key

    def chunk(self, number: int) -> bytes:
        """The bytes of an accepted chunk."""
        span = self.transfer.chunk_span(number)
        return self.spool.read(span.offset_bytes, span.size_bytes)

    def segments(self) -> Iterator[tuple[int, ByteArray]]:
        """(offset in the payload, bytes) of each segment in order. The holding must be complete."""
        for signed in self.transfer.segments:
            header = signed.header
            data = self.spool.read(header.offset_bytes, header.size_bytes)
            yield header.offset_bytes, np.frombuffer(data, dtype=np.uint8)

    def unpin(self) -> None:
        """A reader is done."""
        self.pins -= 1
        self.release()

    def release(self) -> None:
        """Give the space back if nobody needs it."""
        if self.dropped and not self.pins:
            self.spool.close()


class Shelf:
    """All publications of a node, oldest first.

    Args:
        verifier: whose signatures count.
        limits: the largest publication taken.
        folder: on whose file system the bytes are kept.
        lineage: the only one that is taken; "": any.
    """

    def __init__(self, verifier: Verifies, limits: TransferLimits, folder: Path, lineage: str = "") -> None:
        self.holdings: dict[PublicationKey, Holding] = {}
        self.limits = limits
        self.admission = Admission(lineage)
        self.changed = asyncio.Event()  # set at the next change, then replaced
        self._verifier = verifier
        self._folder = folder
        self.unwanted: dict[PublicationKey, None] = {}  # cancelled, or complete before and superseded

    def add_segment(self, signed: SignedSegment) -> Holding | None:
        """Take a segment's header; the first one opens the publication. None: not wanted, or out of order.

        A publication that may not come in (`Admission`) is not wanted from now on: whoever sends it does no
        wrong, it only does not know how far this node is.

        Raises:
            WeightsError: forged, too large, or not fitting what is known.
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
        """Judge one chunk, and keep it if it is what was signed. One that is not wanted is a "duplicate".

        Raises:
            ClusterError: there is no room for it. It counts as missing, and can come again.
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
            self._progressed(holding)
        return verdict

    def commit(self, signed: SignedManifest) -> Holding | None:
        """Take the manifest. None: the publication is not wanted, or none of its segments is known yet.

        Raises:
            WeightsError: forged, or not fitting the segments.
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
            holding = self._hold(key)  # of nothing: a patch without a change
        if holding.transfer.manifest is None:
            holding.transfer.commit(signed)
            self._progressed(holding)
        return holding

    def cancel(self, key: PublicationKey) -> None:
        """Take nothing more of `key`, and forget what is here unless it is complete."""
        holding = self.holdings.get(key)
        if holding is not None and holding.completed_s is not None:
            return
        self._refuse(key)
        if holding is not None:
            self._drop(holding)

    def give_up(self, key: PublicationKey) -> None:
        """Forget what is here of `key` unless it is complete; it may come again from somebody else."""
        holding = self.holdings.get(key)
        if holding is not None and holding.completed_s is None:
            self._drop(holding)

    def sent(self, holding: Holding) -> None:
        """One child less is being sent it."""
        holding.senders -= 1
        self._notify()  # another may be begun now
        if holding.retired and not holding.senders and not holding.dropped:
            self._supersede(holding)

    def incomplete(self) -> list[Holding]:
        """Publications that are still arriving, oldest first."""
        return [holding for holding in self.holdings.values() if holding.completed_s is None]

    def complete(self) -> list[Holding]:
        """Publications that are whole, oldest first."""
        return [holding for holding in self.holdings.values() if holding.completed_s is not None]

    def close(self) -> None:
        """Give all space back."""
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
        """Forget what nobody will ask for: lineages that began before, and all but the newest of this one."""
        lineage = newest.key.lineage
        for holding in self.complete():
            if holding is newest:
                break
            if holding.key.lineage != lineage:
                self._supersede(holding)
        fulls = [h for h in self.complete() if h.key.codec == "full"]
        patches = [h for h in self.complete() if h.key.codec != "full"]
        gone = patches[:-KEPT_PATCHES]
        # A snapshot from which a patch onwards is missing leads nowhere: nobody shall be sent it.
        first = max((holding.key.version for holding in gone), default=-1)
        stale = [holding for holding in fulls[-KEPT_FULLS:] if holding.key.version < first]
        for holding in fulls[:-KEPT_FULLS] + stale + gone:
            holding.retired = True
            if not holding.senders:  # else a child slower than the publications would never get one whole
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


class Wants:
    """Publications and chunks that a child says it has, so that it is sent the rest.

    Args:
        message: what the child's `wants_message` gave.

    Raises:
        WeightsError: it is something else.
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        have, done, newest = message.get("have", {}), message.get("done", []), message.get("newest", [])
        if not (isinstance(have, dict) and isinstance(done, list) and isinstance(newest, list)):
            raise WeightsError(
                "what a child has is {have: {key: ranges}, done: [key], newest: [lineage, version]}"
            )
        if len(have) + len(done) > 256:
            raise WeightsError("a child names at most 256 publications")
        self.have = {parse_key_text(str(text)): chunk_ranges(ranges) for text, ranges in have.items()}
        self._chunks: dict[PublicationKey, tuple[int, ChunkSet]] = {}  # the same, of what is held here
        self.done = {parse_key_text(str(text)) for text in done}
        self._newest = (newest[0], newest[1]) if len(newest) == 2 and type(newest[1]) is int else ("", -1)

    def skips(self, key: PublicationKey) -> bool:
        """Whether the child has no use for the publication: it has it, or a later version.

        A full one of just the version it has goes to it all the same: it was published again for those that
        missed it, and they may be fed by this child.
        """
        lineage, version = self._newest
        passed = key.version < version if key.codec == "full" else key.version <= version
        return key in self.done or (key.lineage == lineage and passed)

    def chunks(self, transfer: Transfer) -> ChunkSet:
        """The chunks of a publication that the child has, as far as this node knows that they exist: what a
        child claims beyond takes no memory here."""
        key, num_chunks = transfer.key, transfer.num_chunks
        known, chunks = self._chunks.get(key, (-1, ChunkSet()))
        if known != num_chunks:
            ranges = [[a, min(b, num_chunks)] for a, b in self.have.get(key, ()) if a < num_chunks]
            chunks = ChunkSet.from_json(ranges, num_chunks)
            self._chunks[key] = (num_chunks, chunks)
        return chunks

    def forget(self, key: PublicationKey) -> None:
        """The child was told to throw away what it has of `key`."""
        self.have.pop(key, None)
        self._chunks.pop(key, None)


def wants_message(shelf: Shelf, newest: tuple[str, int] | None) -> dict[str, Any]:
    """Message to the parent when a child attaches: what it has, and what it does not want.

    Args:
        newest: (lineage, version) that is staged: patches to it and to older ones are not wanted.
    """
    return {
        "have": {key_text(h.key): h.transfer.have.to_json() for h in shelf.incomplete()},
        "done": [key_text(key) for key in (*(h.key for h in shelf.complete()), *shelf.unwanted)],
        "newest": list(newest) if newest else [],
    }
