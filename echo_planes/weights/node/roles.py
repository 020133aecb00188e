"""Roles of a node beyond serving: the sender's part beside the learner, the worker's beside an engine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from echo_planes.errors import WeightsError
from echo_planes.weights.chain.tracker import Tracker, TrackerSettings
from echo_planes.weights.node.catch_up import RemoteObjects, Rescue
from echo_planes.weights.node.control import BroadcastFigures, CaughtUp, Settled, StagedAsked, StagedFile
from echo_planes.weights.node.dispatch import Dispatch
from echo_planes.weights.node.feed import Feeds
from echo_planes.weights.node.maker import Maker
from echo_planes.weights.node.membership import Membership
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.shadow import Shadow
from echo_planes.weights.node.shelf import Holding, Shelf, Unwanted
from echo_planes.weights.node.staging import Staging
from echo_planes.weights.node.store import StoreUploader
from echo_planes.weights.node.transport import client_session, read_message, say
from echo_planes.weights.wire.frames import ChunkFrame, FrameParser, ManifestFrame, SegmentFrame
from echo_planes.weights.wire.manifest import (
    PublicationKey,
    SegmentHeader,
    SignedSegment,
    key_of,
    key_text,
    parse_key_text,
)
from echo_planes.weights.wire.signing import Verifier

BYTES_PER_S_PER_MBIT = 1e6 / 8


class _Role:
    """Common parts of both roles: feeds, ranges and figures."""

    def __init__(self, settings: NodeSettings, shelf: Shelf) -> None:
        self.settings = settings
        self.shelf = shelf
        self.feeds = Feeds(shelf)
        self._tasks: list[asyncio.Task[None]] = []

    def add_routes(self, public: web.Application, control: web.Application) -> None:
        """Register the handlers: `public` for other nodes, `control` for the owner alone."""
        public.router.add_get("/v1/status", self._answer_status)
        public.router.add_get("/v1/publications/{key}/payload", self.feeds.payload)
        public.router.add_post("/v1/feed", self.feeds.serve)
        public.router.add_post("/v1/unwanted", self._unwanted)
        control.router.add_post("/control/status", self._answer_status)

    async def close(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """Return figures for people and tests."""
        return {
            "node_id": self.settings.node_id,
            "role": self.settings.role,
            "bytes_sent": self.feeds.bytes_sent,
            "bytes_received": self.shelf.received_bytes,
            "bytes_made": self.shelf.made_bytes,
            "publications": [_described(holding) for holding in self.shelf.holdings.values()],
        }

    def _spawn(self, *runs: Any) -> None:
        for run in runs:
            task = asyncio.create_task(run)
            task.add_done_callback(_end_with)
            self._tasks.append(task)

    async def _answer_status(self, request: web.Request) -> web.Response:
        return web.json_response(self.status())

    async def _unwanted(self, request: web.Request) -> web.Response:
        key = parse_key_text((await read_message(request, Unwanted)).key)
        self.feeds.unwanted(request.headers.get("X-Node", ""), key)
        return web.json_response({})


class SenderRole(_Role):
    """Role beside the learner: takes its publications, runs the tracker, and keeps shadow and store."""

    def __init__(self, settings: NodeSettings, shelf: Shelf, address: str) -> None:
        super().__init__(settings, shelf)
        rates = TrackerSettings(
            uplink_bytes_per_s=_bytes_per_s(settings.uplink_mbit),
            worker_bytes_per_s=_bytes_per_s(settings.worker_mbit),
            direct=settings.direct,
            starved_s=settings.starved_s,
            streams_per_link=settings.streams_per_link,
        )
        self.dispatch = Dispatch(Tracker(rates), self.feeds, _tell, settings.token)
        self._refusal: tuple[PublicationKey, str] | None = None  # the last publication refused, and why
        self.shadow = Shadow(settings, shelf, _tell) if settings.signing_key else None
        self.store: StoreUploader | None = None
        if settings.store:
            self.store = StoreUploader(settings, shelf, Verifier(settings.public_bytes), self.shadow, _tell)

    def add_routes(self, public: web.Application, control: web.Application) -> None:
        """Register the base class's handlers, and those for the fleet and the learner."""
        super().add_routes(public, control)
        public.router.add_post("/v1/tracker/join", self.dispatch.join)
        public.router.add_post("/v1/tracker/report", self.dispatch.report)
        if self.shadow is not None:
            self.shadow.add_routes(public)
        if self.store is not None:
            self.store.add_routes(public)
        control.router.add_post("/control/segment", self._segment)
        control.router.add_post("/control/commit", self._commit)
        control.router.add_post("/control/stats", self._stats)

    async def start(self) -> None:
        """Open the store and start the tasks."""
        if self.store is not None:
            await asyncio.to_thread(self.store.open)
            self._spawn(self.store.run())
        if self.shadow is not None:
            self._spawn(self.shadow.run())
        self._spawn(self.dispatch.run())

    def status(self) -> dict[str, Any]:
        """Return the base class's figures, the parent of each peer, and the store's figures."""
        stored = self.store.status() if self.store else None
        return {**super().status(), "peers": self.dispatch.peers(), "store": stored}

    async def _segment(self, request: web.Request) -> web.Response:
        """Take a header frame of X-Head-Bytes bytes, then the payload; feeds forward each chunk at once."""
        head = await request.content.readexactly(int(request.headers["X-Head-Bytes"]))
        frames = FrameParser(self.shelf.limits).feed(head)
        if len(frames) != 1 or not isinstance(frames[0], SegmentFrame):
            raise WeightsError("a segment begins with one segment frame")
        signed: SignedSegment = frames[0].signed
        try:
            holding = self.shelf.add_segment(signed)
            if holding is None:
                raise WeightsError(self._why_refused(signed.header))
        except WeightsError as error:
            self._refusal = (signed.header.key, str(error))
            raise
        self.dispatch.segment_added(holding, self.shelf.limits.max_payload_bytes(holding.key.codec))
        header = signed.header
        for index in range(header.num_chunks):
            size = min(header.chunk_bytes, header.size_bytes - index * header.chunk_bytes)
            data = await request.content.readexactly(size)
            if self.shelf.add_chunk(ChunkFrame(header.key, header.index, index, data)) == "damaged":
                raise WeightsError(f"chunk {index} of segment {header.index} is not what was signed")
        return web.json_response({})

    async def _commit(self, request: web.Request) -> web.Response:
        frames = FrameParser(self.shelf.limits).feed(await request.read())
        if len(frames) != 1 or not isinstance(frames[0], ManifestFrame):
            raise WeightsError("a commit is one manifest frame")
        holding = self.shelf.commit(frames[0].signed)
        if holding is None or holding.completed_s is None:
            key, why = self._refusal or (None, "")
            if key == key_of(frames[0].signed.manifest):
                raise WeightsError(why)
            raise WeightsError(f"version {frames[0].signed.manifest.version} is committed before it is whole")
        self.dispatch.committed(holding)
        if self.shadow is not None:
            self.shadow.published(holding)
        if self.store is not None:
            self.store.published(holding)
        return web.json_response({})

    def _why_refused(self, header: SegmentHeader) -> str:
        """Return, or raise, the reason why the shelf refused a segment; the learner's error shows only it."""
        if header.key in self.shelf.unwanted:
            self.shelf.admission.check(header.key, header.base_digest)
            return f"{key_text(header.key)} was complete here before, and later versions have replaced it"
        key, why = self._refusal or (None, "")
        if header.key == key:
            return why  # the reason for an earlier segment of the publication
        return f"segment {header.index} of {key_text(header.key)} came out of order"

    async def _stats(self, request: web.Request) -> web.Response:
        return say(BroadcastFigures(self.dispatch.stats()))


class WorkerRole(_Role):
    """Role beside an engine: follows the tracker's orders, and stages."""

    def __init__(self, settings: NodeSettings, shelf: Shelf, address: str) -> None:
        super().__init__(settings, shelf)
        self._address = address
        self.session: aiohttp.ClientSession | None = None  # until `start`
        self.member: Membership | None = None
        self._rescue: Rescue | None = None
        self.staging: Staging | None = None
        files = Path(settings.model_folder), settings.chunk_bytes, settings.digest
        self._maker = Maker(shelf, *files, _tell)
        if settings.staging:
            from echo_planes.weights.node.stager import Stager  # loads numba: not for nodes that only relay

            specs = {spec.name: spec for spec in settings.specs} or None
            self._stager = Stager(specs, Path(settings.folder) / "staged", settings.digest)
            self.staging = Staging(self._stager, shelf, self._catch_up)

    def add_routes(self, public: web.Application, control: web.Application) -> None:
        """Register the base class's handlers, and those for the worker."""
        super().add_routes(public, control)
        control.router.add_post("/control/staged", self._staged)
        control.router.add_post("/control/settled", self._settled)

    async def start(self) -> None:
        """Join the fleet, and start staging."""
        self.session = client_session(self.settings)
        self.member = Membership(
            self.settings,
            self.session,
            self.shelf,
            self.feeds,
            self._address,
            position=lambda: self.staging.position if self.staging else None,
            installed=self._installed,
        )
        self._spawn(self._take_part(self.member))
        if self.staging is not None:
            self._spawn(self.staging.run())

    async def _take_part(self, member: Membership) -> None:
        """Join once the files are read: a parent must know what not to send."""
        if self.settings.model_folder:
            await self._maker.open()
            self._spawn(self._maker.run())
        await member.run()

    async def close(self) -> None:
        """End the tasks and the connections."""
        await super().close()
        if self.member is not None:
            await self.member.leave()
        if self.session is not None:
            await self.session.close()

    def status(self) -> dict[str, Any]:
        """Return the base class's figures, the parent, and the state of staging."""
        member = self.member
        link = member.link if member else None
        return {
            **super().status(),
            "parent": link.parent.peer_id if link else None,
            "connected": bool(link and link.connected),
            "parents_changed": member.repairs if member else 0,
            "dropped": member.dropped if member else "",
            "staged": self.staging.position if self.staging else None,
            "catch_ups": self._rescue.num_done if self._rescue else 0,
            "trouble": (member.trouble if member else "") or (self.staging.trouble if self.staging else ""),
            "refused": {key_text(k): why for k, why in self.staging.refused.items()} if self.staging else {},
        }

    def _installed(self, lineage: str) -> int:
        """Return the engine's version of `lineage`, -1 for none; of a relay, the newest complete one."""
        if self.staging is not None:
            installed = self.staging.installed
            return installed[1] if installed is not None and installed[0] == lineage else -1
        held = (holding.key for holding in self.shelf.complete())
        return max((key.version for key in held if key.lineage == lineage), default=-1)

    async def _catch_up(self, holding: Holding) -> None:
        if self._rescue is None:
            verifier, folder = Verifier(self.settings.public_bytes), Path(self.settings.folder)
            self._rescue = Rescue(self._at_sender, verifier, self.shelf, self._stager, folder, self._maker)
        await self._rescue.catch_up(holding)

    def _at_sender(self, path: str) -> RemoteObjects:
        if self.session is None:
            raise WeightsError("this node has not begun yet")
        url = f"{self.settings.sender}/v1/{path}"
        token, loop = self.settings.token, asyncio.get_running_loop()
        return RemoteObjects(loop, self.session, url, token, self._caught_up)

    def _caught_up(self, size_bytes: int) -> None:
        self.shelf.received_bytes += size_bytes

    async def _staged(self, request: web.Request) -> web.Response:
        asked = await read_message(request, StagedAsked)
        staged = await self._staging().staged(asked.lineage, asked.version, asked.wait_s, asked.fresh)
        return say(StagedFile() if staged is None else StagedFile(staged.manifest, str(staged.path)))

    async def _settled(self, request: web.Request) -> web.Response:
        told = await read_message(request, Settled)
        await self._staging().settled(told.version, told.ok)
        # After a refusal the way is told with the install that succeeds.
        return say(CaughtUp(self._rescue.take_way() if self._rescue and told.ok else ""))

    def _staging(self) -> Staging:
        if self.staging is None:
            raise WeightsError("this node only relays: it stages nothing")
        return self.staging


def _described(holding: Holding) -> dict[str, Any]:
    transfer = holding.transfer
    manifest = transfer.manifest
    return {
        "key": key_text(holding.key),
        "complete": holding.completed_s is not None,
        "bytes_have": transfer.bytes_have,
        "bytes_known": transfer.num_bytes,
        "payload_digest": manifest.payload_digest if manifest else None,
        "damaged_chunks": transfer.num_damaged,
        "opened_s": holding.opened_s,
        "completed_s": holding.completed_s,
    }


def _bytes_per_s(mbit: float | None) -> float | None:
    return None if mbit is None else mbit * BYTES_PER_S_PER_MBIT


def _tell(line: str) -> None:
    print(f"weights: {line}", file=sys.stderr, flush=True)


def _end_with(task: asyncio.Task[None]) -> None:
    """End a node whose task has failed: its owner can replace it, but not one that stands still."""
    if not task.cancelled() and (error := task.exception()) is not None:
        loop = task.get_loop()
        loop.call_exception_handler(
            {"message": f"a weight node's task has failed: {error!r}", "exception": error}
        )
        loop.stop()
