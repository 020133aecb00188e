"""Upload of the sender's publications to its store, in the background, with snapshots from the shadow.

`Archivist` decides what to write next. A failing store never stops the broadcast: the node counts and reports
the failure, and stores a snapshot as soon as the store takes one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from aiohttp import web

from echo_planes.errors import ClusterError, WeightsError
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.shadow import Shadow
from echo_planes.weights.node.shelf import Holding, Shelf
from echo_planes.weights.node.transport import happens
from echo_planes.weights.store.archivist import Archivist, SnapshotWork
from echo_planes.weights.store.objects import Piece, check_store, open_objects
from echo_planes.weights.store.serving import answer_list, answer_object
from echo_planes.weights.store.writing import PutOutcome, StoreWriter
from echo_planes.weights.wire.manifest import PublicationKey, SignedManifest, SignedSegment
from echo_planes.weights.wire.transfer import Verifies

REMEMBERED_KEYS = 64  # a learner that lost an answer hands the same publication over again
POLL_S = 1.0  # between two checks for a retry that is due
PIECE_BYTES = 32 * 1024**2  # of a payload that the store takes at a time


class _Taken:
    """Bytes of payloads that the store has taken. They don't grow while it takes again what failed before."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._stored_bytes = 0  # of payloads that it holds

    def counted(self, payload: Iterable[Piece]) -> Iterator[Piece]:
        """Yield a payload in pieces of at most `PIECE_BYTES`, and count each that was taken."""
        bytes_now = self._stored_bytes
        for part in payload:
            view = memoryview(part).cast("B")
            for start in range(0, view.nbytes, PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                yield piece
                bytes_now += piece.nbytes
                self.most_bytes = max(self.most_bytes, bytes_now)

    def stored(self) -> None:
        """Note that the store holds the payload: the next one is new to it."""
        self._stored_bytes = self.most_bytes


class StoreUploader:
    """Writes the sender's publications to its store, and serves the store to workers. Run `run` as a task.

    Args:
        settings: must have a `store`.
        shadow: makes the snapshots; None: the store gets none.
        notify: called with one line for people when the store fails, and when it works again.

    Raises:
        ConfigError: the store's address or one of its settings cannot work.
    """

    def __init__(
        self,
        settings: NodeSettings,
        shelf: Shelf,
        verifier: Verifies,
        shadow: Shadow | None,
        notify: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._objects = open_objects(settings.store)
        self._writer = StoreWriter(
            self._objects,
            verifier,
            shelf.limits,
            keep_patches=settings.keep_patches,
            keep_snapshots=settings.keep_snapshots,
        )
        self._archivist = Archivist(settings.snapshot_every)
        self._shadow = shadow
        self._notify = notify
        self._told: deque[PublicationKey] = deque(maxlen=REMEMBERED_KEYS)
        self._pinned: dict[PublicationKey, Holding] = {}  # until they are stored or skipped
        self._patches, self._snapshots = _Taken(), _Taken()
        self._woken = asyncio.Event()
        self._working = True

    def open(self) -> None:
        """Check the store, claim it for this run's key, and remove what a dead sender left. Blocking.

        Raises:
            ConfigError, ClusterError: the store cannot be used.
        """
        check_store(self._settings.store, writes=True)
        try:
            self._writer.claim(self._settings.public_bytes)
        except (OSError, WeightsError) as error:
            raise ClusterError(f"weights.store={self._settings.store} cannot be used: {error}") from error
        left = self._writer.sweep()
        if left.reason:
            self._notify(f"what a dead sender left half-written in the store stays there: {left.reason}")

    def add_routes(self, public: web.Application) -> None:
        """Register the handlers through which workers read the store."""
        public.router.add_get("/v1/store/list/{prefix:.+}", self._list)
        public.router.add_get("/v1/store/objects/{name:.+}", self._read)

    def published(self, holding: Holding) -> None:
        """Queue a publication that is complete on the shelf. The same one again changes nothing."""
        key, manifest = holding.key, holding.transfer.manifest
        if manifest is None or key in self._told:
            return
        self._told.append(key)
        holding.pins += 1
        self._pinned[key] = holding
        self._archivist.published(key, manifest.payload_bytes, manifest.dense_bytes)
        self._release_skipped()
        self._wake()

    def status(self) -> dict[str, Any]:
        """Return figures for people and tests."""
        archivist = self._archivist
        return {
            "waiting": len(archivist.holds),
            "taken_bytes": self._patches.most_bytes + self._snapshots.most_bytes,
            "unstored": archivist.unstored,
            "failed": archivist.num_failed,
            "skipped": archivist.num_skipped,
            "last_error": archivist.last_error,
            "snapshot_due": archivist.broken,
        }

    async def run(self) -> None:
        """Store publications and snapshots, until cancelled."""
        await asyncio.gather(self._each(self._store_next), self._each(self._store_snapshot))

    async def _each(self, step: Callable[[], Any]) -> None:
        while True:
            woken = self._woken
            if await step():
                self._wake()
                continue
            await happens(woken, POLL_S)  # after `POLL_S` go on in any case: a retry may be due

    async def _store_next(self) -> bool:
        key = self._archivist.next_publication()
        if key is None:
            return False
        holding = self._pinned[key]
        signed = holding.transfer.signed_manifest
        error = "it is not whole" if signed is None else await asyncio.to_thread(self._put, signed, holding)
        self._archivist.publication_done(key, error)
        self._pinned.pop(key).unpin()
        self._say(error or (await asyncio.to_thread(self._writer.prune)).reason)
        return True

    def _put(self, signed: SignedManifest, holding: Holding) -> str:
        """Store a publication; return why that failed, "" if it did not. Blocking: for threads."""
        payload = (part.data for _, part in holding.segments())
        outcome = self._put_counted(self._patches, signed, holding.transfer.segments, payload)
        return "" if outcome.stored else outcome.reason

    async def _store_snapshot(self) -> bool:
        if self._shadow is None or self._shadow.behind:
            return False
        work = self._archivist.next_snapshot(time.monotonic())
        if work is None:
            return False
        outcome = await asyncio.to_thread(self._put_snapshot, self._shadow, work)
        error = "" if outcome.stored else outcome.reason
        version = outcome.entry.manifest.version if outcome.entry else work.version
        self._archivist.snapshot_done(version, error, time.monotonic())
        self._say(error)
        return True

    def _put_snapshot(self, shadow: Shadow, work: SnapshotWork) -> PutOutcome:
        """Store a snapshot of the wanted version or a newer one. Blocking: for threads."""
        try:
            snapshot = shadow.make()
        except WeightsError as error:
            return PutOutcome(False, str(error))
        manifest = snapshot.signed.manifest
        if manifest.lineage != work.lineage or manifest.version < work.version:
            return PutOutcome(
                False,
                f"version {work.version} of {work.lineage} is to be stored in full, but the sender's shadow "
                f"holds version {manifest.version} of {manifest.lineage}",
            )
        payload = [snapshot.payload.data]
        return self._put_counted(self._snapshots, snapshot.signed, snapshot.segments, payload)

    def _put_counted(
        self,
        taken: _Taken,
        signed: SignedManifest,
        segments: Sequence[SignedSegment],
        payload: Iterable[Piece],
    ) -> PutOutcome:
        outcome = self._writer.put(signed, segments, taken.counted(payload))
        if outcome.stored:
            taken.stored()
        return outcome

    def _release_skipped(self) -> None:
        held = self._archivist.holds
        for key in [key for key in self._pinned if key not in held]:
            self._pinned.pop(key).unpin()

    def _say(self, error: str) -> None:
        """Notify people once when the store begins to fail, and once when it works again."""
        if error and self._working:
            self._notify(f"the store does not take everything, training goes on: {error}")
        elif not error and not self._working:
            self._notify("the store works again")
        self._working = not error

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    async def _list(self, request: web.Request) -> web.Response:
        return await answer_list(self._objects, request)

    async def _read(self, request: web.Request) -> web.Response:
        return await answer_object(self._objects, request)
