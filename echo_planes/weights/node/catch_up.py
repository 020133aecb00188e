"""Catch-up of a worker's node that lacks a patch's base: from the store, through the sender's node.

If the store offers no way, or the run has no store, the sender's node makes a snapshot of its newest state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import numpy as np

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray
from echo_planes.weights.node.maker import Maker
from echo_planes.weights.node.shelf import Holding, Shelf
from echo_planes.weights.node.spool import SpoolFile
from echo_planes.weights.node.transport import showing
from echo_planes.weights.store.catch_up import CatchUp
from echo_planes.weights.store.objects import ObjectReader, StoreUnreachableError
from echo_planes.weights.store.paths import Entry, Position
from echo_planes.weights.store.reading import Store
from echo_planes.weights.wire.manifest import SegmentHeader, key_text
from echo_planes.weights.wire.messages import decode
from echo_planes.weights.wire.transfer import Verifies

if TYPE_CHECKING:
    from echo_planes.weights.node.stager import Stager

READ_S = 30.0  # without a byte, after which a read fails
LIST_BYTES = 16 * 1024**2
SHELF = "shelf/"  # prefix of the names of entries that are on this node's shelf
T = TypeVar("T")


class RemoteObjects:
    """`ObjectReader` of the store or snapshot at the sender's node. Its calls block: use it in threads only.

    Args:
        loop: the event loop of `session`.
        url: base URL of the store or the snapshot at the sender's node.
        shown: this node's credential with the sender's node.
        received: called with the number of bytes of each piece that arrives.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        session: aiohttp.ClientSession,
        url: str,
        shown: str,
        received: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._session = session
        self._url = url
        self._shown = shown
        self._received = received

    def read(self, name: str, max_bytes: int) -> bytes:
        """See `ObjectReader`."""
        return self._wait(self._get(f"objects/{name}", {}, max_bytes))

    def read_range(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        """See `ObjectReader`."""
        part = {"part": f"{offset_bytes}-{size_bytes}"}
        data = self._wait(self._get(f"objects/{name}", part, size_bytes))
        if len(data) != size_bytes:
            raise WeightsError(f"{name} ends after {len(data)} of {size_bytes} bytes")
        return data

    def list(self, prefix: str) -> list[str]:
        """See `ObjectReader`."""
        listed = self._wait(self._get(f"list/{prefix}", {}, LIST_BYTES))
        return decode(listed, list[str], "the list of the store's objects")

    def _wait(self, answer: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    async def _get(self, path: str, query: dict[str, str], max_bytes: int) -> bytes:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=READ_S, sock_read=READ_S)
        try:
            async with self._session.get(
                f"{self._url}/{path}", params=query, timeout=timeout, **showing(self._shown)
            ) as response:
                if response.status in (404, 422):
                    raise WeightsError(f"the store has no sound {path}: {await response.text()}")
                if response.status != 200:
                    raise StoreUnreachableError(f"{path}: the sender's node answered {response.status}")
                if (response.content_length or 0) > max_bytes:
                    raise WeightsError(f"{path} has {response.content_length} bytes; at most {max_bytes}")
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    self._received(len(piece))
                    if len(data) > max_bytes:
                        raise WeightsError(f"{path} has more than {max_bytes} bytes")
                return bytes(data)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StoreUnreachableError(f"{path} cannot be read from the sender's node: {error!r}") from error


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Verified bytes of one publication: on the shelf, or in a spool file of its own."""

    holding: Holding | None
    spool: SpoolFile | None
    spans: tuple[tuple[int, int], ...]  # (offset, size) of each segment in the spool
    made_bytes: int = 0  # of segments that were made from the model's files

    def segments(self) -> Iterator[tuple[int, ByteArray]]:
        if self.holding is not None:
            yield from self.holding.segments()
        if self.spool is not None:
            for offset_bytes, size_bytes in self.spans:
                yield offset_bytes, np.frombuffer(self.spool.read(offset_bytes, size_bytes), dtype=np.uint8)

    def close(self) -> None:
        if self.spool is not None:
            self.spool.close()


class Rescue:
    """Brings a stager to a publication whose base this node lacks.

    Args:
        at_sender: opens a path at the sender's node: "store", or "snapshot/<lineage>/<version>".
        folder: folder for the spool files of downloads.
        maker: makes segments from the model's files; None: every entry is downloaded.
    """

    def __init__(
        self,
        at_sender: Callable[[str], ObjectReader],
        verifier: Verifies,
        shelf: Shelf,
        stager: Stager,
        folder: Path,
        maker: Maker | None = None,
    ) -> None:
        self._maker = maker
        self._at_sender = at_sender
        self._verifier = verifier
        self._store = Store(at_sender("store"), verifier, shelf.limits)
        self._shelf = shelf
        self._stager = stager
        self._folder = folder
        self.num_done = 0
        self._way: list[Entry] = []  # entries that catch-ups have staged since the last `take_way`

    async def catch_up(self, holding: Holding) -> None:
        """Stage the entries that lead to `holding`, then `holding` itself.

        A catch-up through the sender's snapshot may end at a newer version instead.

        Raises:
            WeightsError: no way leads there now.
            ClusterError: there is no room for a download or for the staged file.
        """
        manifest = holding.transfer.manifest
        if manifest is None:
            raise WeightsError(f"{key_text(holding.key)} is not whole")
        goal = Position(manifest.lineage, manifest.version, manifest.digest)
        ours = {SHELF + key_text(held.key): held for held in self._shelf.complete()}
        for held in ours.values():
            held.pins += 1  # the shelf may retire it before the catch-up reads it
        try:
            try:
                await self._go(goal, ours, self._store, await asyncio.to_thread(self._store.index))
            except WeightsError as error:
                await self._go_by_snapshot(goal, ours, error)
        finally:
            for held in ours.values():
                held.unpin()
        self.num_done += 1

    def take_way(self) -> str:
        """Return the versions and codecs that catch-ups have staged since the last call; "" when none."""
        way, self._way = self._way, []
        return in_short([f"v{entry.manifest.version} {entry.manifest.codec}" for entry in way])

    async def _go_by_snapshot(self, goal: Position, ours: Mapping[str, Holding], why: WeightsError) -> None:
        """Catch up from a snapshot that the sender makes, and the patches on the shelf.

        The snapshot must be at least as new as the oldest base of those patches. `why`: the error of the way
        through the store, for the message.
        """
        bases = {entry.position: entry.base for entry in _entries(ours) if not entry.is_snapshot}
        oldest = goal
        while oldest in bases:
            oldest = bases[oldest]
        place = self._at_sender(f"snapshot/{goal.lineage}/{oldest.version}")
        store = Store(place, self._verifier, self._shelf.limits)
        try:
            offered = await asyncio.to_thread(store.index)
            newer = [e.position for e in offered if e.manifest.lineage == goal.lineage]
            reached = max((p for p in newer if p.version > goal.version), default=goal)
            await self._go(reached, ours, store, offered)
        except WeightsError as error:
            raise WeightsError(f"{why}; nor does the sender's snapshot help: {error}") from error

    async def _go(
        self, goal: Position, ours: Mapping[str, Holding], store: Store, stored: Sequence[Entry]
    ) -> None:
        """Catch up to `goal` with the entries on the shelf and in `store`."""
        here = _entries(ours)
        known = {entry.manifest for entry in here}
        entries = [*here, *(entry for entry in stored if entry.manifest not in known)]
        fetched: list[_Fetched] = []

        async def fetch(entry: Entry) -> _Fetched:
            holding = ours.get(entry.name)
            if holding is None:
                part = await asyncio.to_thread(self._download, store, entry)
            else:
                part = _Fetched(holding, None, ())
            self._shelf.made_bytes += part.made_bytes
            fetched.append(part)
            return part

        async def apply(entry: Entry, part: _Fetched) -> None:
            try:
                await asyncio.to_thread(self._stager.stage, entry.manifest, part.segments())
            finally:
                fetched.remove(part)
                part.close()

        catch_up = CatchUp(entries, fetch, apply, self._cost)
        try:
            await catch_up.run(self._position(), goal)
        finally:
            self._way += catch_up.applied
            for part in fetched:
                part.close()

    def _position(self) -> Position | None:
        manifest = self._stager.manifest
        return Position(manifest.lineage, manifest.version, manifest.digest) if manifest else None

    def _download(self, store: Store, entry: Entry) -> _Fetched:
        """Download an entry into a spool file. Blocking: for threads.

        A cancelled catch-up does not stop the thread; the file then closes with its last reference.
        """
        spool = SpoolFile(self._folder)
        made_bytes = 0

        def make(header: SegmentHeader) -> ByteArray | None:
            nonlocal made_bytes
            segment = self._maker.make(header) if self._maker else None
            made_bytes += 0 if segment is None else segment.size
            return segment

        try:
            spans = []
            for signed, data in store.open(entry).payload(make):
                spool.write(signed.header.offset_bytes, data.data)
                spans.append((signed.header.offset_bytes, signed.header.size_bytes))
        except BaseException:
            spool.close()
            raise
        return _Fetched(None, spool, tuple(spans), made_bytes)

    def _cost(self, entry: Entry) -> float:
        """Return the bytes to fetch: 0 for an entry on the shelf or in the model's files."""
        here = entry.name.startswith(SHELF) or (self._maker is not None and self._maker.holds(entry.manifest))
        return 0.0 if here else float(entry.manifest.payload_bytes)


def _entries(ours: Mapping[str, Holding]) -> list[Entry]:
    """Return the shelf's publications as entries whose sequence numbers are below all of a store's."""
    return [
        Entry(name, -1 - number, held.transfer.signed_manifest)
        for number, (name, held) in enumerate(ours.items())
        if held.transfer.signed_manifest is not None
    ]


def in_short(steps: Sequence[str]) -> str:
    """Return the steps in one line; of more than four: the first two, the number left out, and the last."""
    if len(steps) > 4:
        steps = [*steps[:2], f"{len(steps) - 3} more", steps[-1]]
    return ", ".join(steps)
