"""A worker's node that lies: it has a credential of its own, takes part, and serves what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from aiohttp import web
from msgspec import to_builtins

from echo_planes.weights.chain.events import Event, PeerJoined, Report
from echo_planes.weights.wire.frames import (
    CancelFrame,
    ChunkFrame,
    ManifestFrame,
    PingFrame,
    SegmentFrame,
    encode_frame,
)
from tests.integration.weight_nodes import Signed, as_node

PAUSE_S = 0.05
Serves = Callable[["HostileRelay"], AsyncIterator[bytes]]  # what goes out on a feed, piece by piece


class HostileRelay:
    """Joins, reports that it has everything, and answers feeds with `serves`.

    Args:
        sender: address of the sender's node.
        name: of which it has the credential.
        serves: see there.
    """

    def __init__(self, sender: str, name: str, serves: Serves) -> None:
        self.name = name
        self.offered: Signed | None = None  # what it claims to have whole
        self.old: Signed | None = None  # a signed version from before
        self.num_feeds = 0
        self._sender = sender
        self._serves = serves

    async def __aenter__(self) -> HostileRelay:
        app = web.Application()
        app.router.add_post("/v1/feed", self._feed)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.session = aiohttp.ClientSession(headers=as_node(self.name), timeout=aiohttp.ClientTimeout(10))
        await self.tell("join", PeerJoined(self.name, self.address, ""))
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *why: object) -> None:
        self._heart.cancel()
        await asyncio.gather(self._heart, return_exceptions=True)
        await self.session.close()
        await self._runner.cleanup()

    async def tell(self, what: str, event: Event) -> dict[str, Any]:
        """Say something to the tracker; what it answers."""
        message = {"events": [to_builtins(event)]}
        async with self.session.post(f"{self._sender}/v1/tracker/{what}", json=message) as response:
            answer: dict[str, Any] = await response.json()
            return answer

    async def _beat(self) -> None:
        while True:
            signed = self.offered
            size = signed.manifest.manifest.payload_bytes if signed else 0
            key = signed.key if signed else None
            whole = signed is not None
            version = signed.key.version if signed else -1
            figures = (size, size, 1e9, 0, 0.0, False, whole, version, -1, False)
            report = Report(self.name, "sender", key, *figures)
            with contextlib.suppress(aiohttp.ClientError):
                await self.tell("report", report)
            await asyncio.sleep(0.2)

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.num_feeds += 1
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            async for piece in self._serves(self):
                await response.write(piece)
                await asyncio.sleep(PAUSE_S)
        return response


def frames_of(signed: Signed, *, segments: bool = True, chunks: bool = True) -> list[bytes]:
    """A publication as a feed carries it: headers, chunks, and the manifest."""
    frames = []
    for segment, payload in signed.segments:
        header = segment.header
        if segments:
            frames.append(encode_frame(SegmentFrame(segment)))
        for index in range(header.num_chunks if chunks else 0):
            data = payload[index * header.chunk_bytes : (index + 1) * header.chunk_bytes].tobytes()
            frames.append(encode_frame(ChunkFrame(header.key, header.index, index, data)))
    return [*frames, encode_frame(ManifestFrame(signed.manifest))]


async def _pings(relay: HostileRelay) -> AsyncIterator[bytes]:
    while True:
        yield encode_frame(PingFrame())


async def _old_version(relay: HostileRelay) -> AsyncIterator[bytes]:
    while True:
        for frame in frames_of(relay.old) if relay.old else []:
            yield frame
        yield encode_frame(PingFrame())


async def _cancels(relay: HostileRelay) -> AsyncIterator[bytes]:
    while True:
        if relay.offered is not None:
            for frame in frames_of(relay.offered)[:2]:
                yield frame
            yield encode_frame(CancelFrame(relay.offered.key))
        yield encode_frame(PingFrame())


async def _single_bytes(relay: HostileRelay) -> AsyncIterator[bytes]:
    while relay.offered is None:
        yield encode_frame(PingFrame())
    segment, *rest = frames_of(relay.offered)
    yield segment
    for byte in rest[0]:
        yield bytes([byte])


async def _headers_without_chunks(relay: HostileRelay) -> AsyncIterator[bytes]:
    while relay.offered is None:
        yield encode_frame(PingFrame())
    for frame in frames_of(relay.offered, chunks=False):
        yield frame
    while True:
        yield encode_frame(PingFrame())


FREEZES: dict[str, Serves] = {
    "pings": _pings,
    "an old version": _old_version,
    "cancels": _cancels,
    "single bytes": _single_bytes,
    "headers without chunks": _headers_without_chunks,
}
