"""The sender's node and its store: publications go up in the background, anchors are made by a shadow.

What to write next is `Archivist`'s decision. Whatever the store does, the broadcast goes on; what could not
be stored is counted and said, and an anchor follows as soon as the store takes it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aiohttp import web

from echo_planes.errors import ClusterError, WeightsError
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.shadow import Shadow
from echo_planes.weights.node.shelf import Holding, Shelf
from echo_planes.weights.node.transport import happens
from echo_planes.weights.store.archivist import AnchorWork, Archivist
from echo_planes.weights.store.objects import check_store, open_objects
from echo_planes.weights.store.serving import answer_list, answer_object
from echo_planes.weights.store.writing import StoreWriter
from echo_planes.weights.wire.manifest import PublicationKey, SignedManifest
from echo_planes.weights.wire.transfer import Verifies

REMEMBERED_KEYS = 64  # a learner that lost an answer hands the same publication over again
POLL_S = 1.0  # how often a retry that is due is looked for


class StoreUploader:
    """Writes the sender's publications to its store, and serves it to workers. `run` it as a task.

    Args:
        settings: with `store`.
        shadow: makes the anchors; None: there are none.
        notify: is called with one line for people when the store fails, and when it works again.

    Raises:
        ConfigError, ClusterError: the store cannot be used (also from `open`).
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
            keep_anchors=settings.keep_anchors,
        )
        self._archivist = Archivist(settings.anchor_every)
        self._shadow = shadow
        self._notify = notify
        self._told: deque[PublicationKey] = deque(maxlen=REMEMBERED_KEYS)
        self._pinned: dict[PublicationKey, Holding] = {}  # until they are stored or skipped
        self._woken = asyncio.Event()
        self._working = True

    def open(self) -> None:
        """Try the store, say whose publications it holds, and clear what a dead sender left. Blocking.

        Raises:
            ConfigError, ClusterError: it cannot be used.
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
        """Workers read the store through this node."""
        public.router.add_get("/v1/store/list/{prefix:.+}", self._list)
        public.router.add_get("/v1/store/objects/{name:.+}", self._read)

    def published(self, holding: Holding) -> None:
        """A publication is complete here. The same one again changes nothing."""
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
        """Figures for people, and for tests."""
        archivist = self._archivist
        return {
            "waiting": len(archivist.holds),
            "failed": archivist.num_failed,
            "skipped": archivist.num_skipped,
            "last_error": archivist.last_error,
            "anchor_due": archivist.broken,
        }

    async def run(self) -> None:
        """Store for ever."""
        await asyncio.gather(self._each(self._store_next), self._each(self._store_anchor))

    async def _each(self, step: Callable[[], Any]) -> None:
        while True:
            woken = self._woken
            if await step():
                self._wake()
                continue
            await happens(woken, POLL_S)  # or not: a retry may be due

    async def _store_next(self) -> bool:
        key = self._archivist.next_publication()
        if key is None:
            return False
        holding = self._pinned[key]
        signed = holding.transfer.signed_manifest
        error = "it is not whole" if signed is None else await asyncio.to_thread(self._put, signed, holding)
        self._archivist.publication_done(key, error)
        self._pinned.pop(key).unpin()
        self._say(error)
        return True

    def _put(self, signed: SignedManifest, holding: Holding) -> str:
        """Why it could not be stored; "" when it was. In a thread."""
        payload = (part.data for _, part in holding.segments())
        outcome = self._writer.put(signed, holding.transfer.segments, payload)
        if outcome.stored:
            return self._writer.prune().reason
        return outcome.reason

    async def _store_anchor(self) -> bool:
        if self._shadow is None or self._shadow.behind:
            return False
        work = self._archivist.next_anchor(time.monotonic())
        if work is None:
            return False
        error = await asyncio.to_thread(self._put_anchor, self._shadow, work)
        self._archivist.anchor_done(error, time.monotonic())
        self._say(error)
        return True

    def _put_anchor(self, shadow: Shadow, work: AnchorWork) -> str:
        """Why the anchor could not be stored; "" when it was. In a thread."""
        try:
            snapshot = shadow.make()
        except WeightsError as error:
            return str(error)
        manifest = snapshot.signed.manifest
        if manifest.lineage != work.lineage or manifest.version < work.version:
            return (
                f"version {work.version} of {work.lineage} is to be stored in full, but the sender's shadow "
                f"holds version {manifest.version} of {manifest.lineage}"
            )
        outcome = self._writer.put(snapshot.signed, snapshot.segments, [snapshot.payload.data])
        return "" if outcome.stored else outcome.reason

    def _release_skipped(self) -> None:
        held = self._archivist.holds
        for key in [key for key in self._pinned if key not in held]:
            self._pinned.pop(key).unpin()

    def _say(self, error: str) -> None:
        """Once when it begins to fail, once when it works again."""
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
