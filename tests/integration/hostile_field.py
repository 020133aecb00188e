"""Field where a hostile worker is let loose: nodes on loopback, what it says to them, and their state.

`Field` holds a sender's node and honest workers, to which "mallory" speaks with the credential it was given.
`Field.child_of` is an honest worker's receiving end below a parent that serves what the attack says.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web
from blake3 import blake3
from msgspec import to_builtins

from echo_planes.weights.chain.events import TICK_INTERVAL_S, PeerJoined
from echo_planes.weights.node.dispatch import Dispatch
from echo_planes.weights.node.link import Parent, ParentLink
from echo_planes.weights.node.process import Node
from echo_planes.weights.node.roles import SenderRole
from echo_planes.weights.node.shelf import Holding, Shelf
from echo_planes.weights.wire.frames import ChunkFrame
from echo_planes.weights.wire.limits import relay_limits
from echo_planes.weights.wire.manifest import key_text
from echo_planes.weights.wire.signing import Signer, Verifier
from tests.integration.weight_nodes import (
    LIMIT_S,
    Signed,
    as_node,
    hand_over,
    held,
    publication,
    running,
    settings,
    until,
)

MALLORY = "mallory"
LINEAGE = "test"
SIZE_BYTES = 100_000
CHUNK_BYTES = 16 * 1024
MAX_BYTES = 4 * 1024**2  # of a publication
ELSEWHERE = "/v1/elsewhere"  # where a hostile parent points to
CHILD_S = 5.0  # that a hostile parent is given to do harm


class Field:
    """A sender's node and two honest workers with version 1, in this event loop."""

    def __init__(self) -> None:
        self.signer = Signer.generate()
        self.workers: dict[str, Node] = {}
        self.versions: list[Signed] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        options: dict[str, Any] = {"lineage": LINEAGE, "max_payload_bytes": MAX_BYTES}
        self.sender = await enter(running(settings(self.signer, "sender", starved_s=1.0, **options)))
        # One connection for each request: what stays open would count as the hostile worker's.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        limit = aiohttp.ClientTimeout(10)
        self.session = await enter(aiohttp.ClientSession(connector=connector, timeout=limit))
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-test-")))
        # First, so that the tracker puts it behind the honest ones.
        joined = to_builtins(PeerJoined(MALLORY, "http://127.0.0.1:9", ""))
        await self.says("join", {"events": [joined]})
        for name in ("w0", "w1"):
            self.workers[name] = await enter(
                running(settings(self.signer, name, self.sender.address, **options))
            )
        await until(lambda: len(self.parents()) == 2, LIMIT_S, "the workers to join")
        await self.publish()
        await self._settle()
        return self

    async def __aexit__(self, *why: object) -> None:
        await self._stack.aclose()

    async def publish(self) -> None:
        """The next version; every honest worker gets it."""
        version = len(self.versions) + 1
        signed = publication(self.signer, version, SIZE_BYTES, chunk_bytes=CHUNK_BYTES, lineage=LINEAGE)
        self.versions.append(signed)
        await hand_over(self.sender, signed)
        for name, node in self.workers.items():
            has = functools.partial(held, node, signed)
            await until(lambda has=has: has() is not None, LIMIT_S, f"v{version} at {name}")  # type: ignore[misc]

    async def serves(self) -> bool:
        """Whether honest workers are answered, by the sender and by one another, in good time."""
        path = f"/v1/publications/{key_text(self.versions[-1].key)}/payload"
        places = [(self.sender, ""), *((node, name) for name, node in self.workers.items())]
        for node, at in places:
            async with self.session.get(node.address + path, headers=as_node("w9", at)) as response:
                payload = await response.read()
                if (
                    response.status != 200
                    or f"b3:{blake3(payload).hexdigest()}" != self.versions[-1].payload_digest
                ):
                    return False
        return True

    def state(self) -> str:
        """A hash of what honest nodes hold, and of what the tracker believes of them.

        Not the order in which they stand: any coming and going renews it, also that of the hostile one.
        """
        nodes = {"sender": self.sender, **self.workers}
        payloads = {
            name: {
                key_text(holding.key): blake3(
                    b"".join(part.tobytes() for _, part in holding.segments())
                ).hexdigest()
                for holding in node.shelf.complete()
            }
            for name, node in nodes.items()
        }
        tracker = self.dispatch._tracker
        peers = tracker._peers
        believed = {
            name: {**asdict(peers[name].stats), "whole": peers[name].whole, "leaf": peers[name].rollout_only}
            for name in self.workers
        }
        refused = {name: sorted(node.role.feeds.refused) for name, node in nodes.items()}
        dropped = [name for name in self.workers if tracker.is_dropped(name)]
        text = json.dumps([payloads, believed, refused, dropped, sorted(self.parents())], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def dispatch(self) -> Dispatch:
        """Of the sender's node."""
        if not isinstance(self.sender.role, SenderRole):
            raise TypeError("the sender's node has another role")
        return self.sender.role.dispatch

    def parents(self) -> dict[str, str]:
        """Of the honest workers, for the tracker."""
        found = self.dispatch.peers()
        return {name: found[name] for name in self.workers if name in found}

    async def says(self, what: str, message: Any, headers: dict[str, str] | None = None) -> str:
        """Post a message of mallory to the tracker; return the answer, as `asks` does."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return await self.asks("POST", f"/v1/tracker/{what}", body, headers)

    async def asks(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, at: str = ""
    ) -> str:
        """Ask the sender or the worker `at` as mallory; return the status, and how the text begins."""
        address = self.workers[at].address if at else self.sender.address
        shown = as_node(MALLORY, at) if headers is None else headers
        async with self.session.request(method, address + path, data=body, headers=shown) as response:
            text = (await response.content.read(500)).decode(errors="replace")
            return f"{response.status} {text}"

    async def raw(self, said: bytes, at: str = "") -> str:
        """The same for bytes that no client sends."""
        port = (self.workers[at] if at else self.sender).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(said)
            async with asyncio.timeout(10):
                head = await reader.read(1000)
            return head.decode(errors="replace").partition(" ")[2]
        finally:
            writer.close()

    async def _settle(self) -> None:
        """Until the tracker has ranked everybody and come to rest."""
        before, since_s = "", time.monotonic()
        while time.monotonic() - since_s < 6 * TICK_INTERVAL_S:
            if self.state() != before:
                before, since_s = self.state(), time.monotonic()
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def child_of(
        self, serves: list[bytes], headers: dict[str, str] | None = None, status: int = 200
    ) -> AsyncIterator[Child]:
        """An honest worker's receiving end whose parent serves this on every feed, and then nothing."""
        async with Child(self, serves, headers or {}, status) as child:
            yield child


class Child:
    """The receiving end: version 5 is whole and committed here, from before."""

    def __init__(self, field: Field, serves: list[bytes], headers: dict[str, str], status: int) -> None:
        self.num_feeds = 0
        self.num_elsewhere = 0  # requests for `ELSEWHERE`
        self.shelf = Shelf(
            Verifier(field.signer.public_bytes()), relay_limits(MAX_BYTES), field.folder, LINEAGE
        )
        self._field = field
        self._serves = serves
        self._headers = headers
        self._status = status

    async def __aenter__(self) -> Child:
        had = publication(self._field.signer, 5, SIZE_BYTES, chunk_bytes=CHUNK_BYTES, lineage=LINEAGE)
        for segment, payload in had.segments:
            self.shelf.add_segment(segment)
            for index in range(segment.header.num_chunks):
                data = payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].tobytes()
                self.shelf.add_chunk(ChunkFrame(had.key, 0, index, data))
        self.shelf.commit(had.manifest)
        self.shelf.admission.committed(had.manifest.manifest)
        self.before = self.state()
        app = web.Application()
        app.router.add_post("/v1/feed", self._feed)
        app.router.add_route("*", "/{rest:.*}", self._elsewhere)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._session = aiohttp.ClientSession(headers={"X-Node": "w0"}, auto_decompress=False)
        self.link = ParentLink(self._session, self.shelf, Parent(MALLORY, address, "shown"), 1, lambda: None)
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.link.close()
        await self._session.close()
        await self._runner.cleanup()
        self.shelf.close()

    async def suffers(self) -> str:
        """Let the parent do its worst; what the child says of it, and of what it did not let in."""
        deadline_s = time.monotonic() + CHILD_S
        while time.monotonic() < deadline_s and not self.link.trouble and self.num_feeds < 3:
            await asyncio.sleep(0.02)
            if self.num_feeds and not self._serves:
                break
        await asyncio.sleep(0.1)  # what is on its way arrives
        return self.link.trouble

    def state(self) -> str:
        """A hash of what is whole here and what the child has come to."""
        whole = {
            key_text(holding.key): blake3(
                b"".join(part.tobytes() for _, part in holding.segments())
            ).hexdigest()
            for holding in self.shelf.complete()
        }
        admission = self.shelf.admission
        text = json.dumps([whole, admission.lineage, admission.newest_version], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def num_damaged(self) -> int:
        """Chunks that were not what was signed."""
        return sum(holding.transfer.num_damaged for holding in self.shelf.holdings.values())

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.num_feeds += 1
        response = web.StreamResponse(status=self._status, headers=self._headers)
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            for piece in self._serves:
                await response.write(piece)
        return response

    async def _elsewhere(self, request: web.Request) -> web.Response:
        self.num_elsewhere += request.path == ELSEWHERE
        return web.Response(status=404)


def _digest(holding: Holding) -> str:
    return blake3(b"".join(part.tobytes() for _, part in holding.segments())).hexdigest()
