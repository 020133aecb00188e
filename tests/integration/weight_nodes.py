"""Shared parts of tests and benchmarks of weight nodes: signed publications of random bytes, nodes in this
process, and a network between them that delays, slows, damages and cuts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, Codec, Manifest
from echo_planes.weights.chain.events import TICK_INTERVAL_S
from echo_planes.weights.node.client import SenderNode, WorkerNode
from echo_planes.weights.node.control import CONTROL_SOCKET
from echo_planes.weights.node.process import Node
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.wire.credentials import bearer, credential
from echo_planes.weights.wire.frames import ManifestFrame, SegmentFrame, encode_frame
from echo_planes.weights.wire.manifest import (
    PublicationKey,
    SegmentHeader,
    SignedManifest,
    SignedSegment,
    key_text,
)
from echo_planes.weights.wire.signing import Signer

TOKEN = "a token for tests"
LIMIT_S = 60.0  # for any one thing to come about; the machine may be slow and busy


@dataclass(frozen=True)
class Signed:
    """A publication as the learner hands it over."""

    segments: list[tuple[SignedSegment, ByteArray]]
    manifest: SignedManifest

    @property
    def key(self) -> PublicationKey:
        return self.segments[0][0].header.key

    @property
    def payload_digest(self) -> str:
        return self.manifest.manifest.payload_digest


def publication(
    signer: Signer,
    version: int,
    num_bytes: int,
    *,
    chunk_bytes: int = 256 * 1024,
    segment_bytes: int = 32 * 1024**2,
    codec: Codec = "full",
    lineage: str = "test",
) -> Signed:
    """Random bytes, signed as version `version` (of `lineage`, on the version before)."""
    payload = np.random.default_rng(version).integers(0, 256, num_bytes, dtype=np.uint8)
    base = -1 if codec == "full" else version - 1
    key = PublicationKey(lineage, version, codec, base)
    base_digest = "" if codec == "full" else f"xxh3:{base:032x}"
    segments = []
    for index, start in enumerate(range(0, num_bytes, segment_bytes)):
        part = payload[start : start + segment_bytes]
        hashes = b"".join(
            blake3(part[at : at + chunk_bytes].data).digest() for at in range(0, part.size, chunk_bytes)
        )
        header = SegmentHeader(key, base_digest, index, start, part.size, chunk_bytes, hashes)
        segments.append((signer.segment(header), part))
    manifest = Manifest(
        lineage=lineage,
        version=version,
        num_updates=version,
        codec=codec,
        base_version=base,
        base_digest=base_digest,
        digest=f"xxh3:{version:032x}",
        payload_digest=f"b3:{blake3(payload.data).hexdigest()}",
        payload_bytes=num_bytes,
        dense_bytes=num_bytes,
        changed_elements=0,
        total_elements=num_bytes // 2,
        num_segments=len(segments),
    )
    return Signed(segments, signer.manifest(manifest))


def settings(signer: Signer, node_id: str, sender: str = "", **options: Any) -> NodeSettings:
    """Of a node that only relays; `sender` for a worker."""
    plain = NodeSettings(
        role="worker" if sender else "sender",
        node_id=node_id,
        token=credential(TOKEN, node_id) if sender else TOKEN,
        public_key=signer.public_bytes().hex(),
        sender=sender,
        staging=False,
    )
    return replace(plain, **options)


def as_node(name: str, at: str = "") -> dict[str, str]:
    """Headers that the node `name` shows to the worker `at`, or to the sender."""
    return {"Authorization": bearer(credential(credential(TOKEN, at) if at else TOKEN, name)), "X-Node": name}


@contextlib.asynccontextmanager
async def running(node_settings: NodeSettings) -> AsyncIterator[Node]:
    """A node in this event loop."""
    with tempfile.TemporaryDirectory(prefix="echo-test-") as folder:
        node = Node(replace(node_settings, folder=folder))
        await node.start()
        try:
            yield node
        finally:
            await node.close()


async def until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for a condition; fails after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {limit_s:.0f} s in vain for {what}")
        await asyncio.sleep(0.01)


async def hand_over(
    node: Node, signed: Signed, *, commit: bool = True, num_segments: int | None = None
) -> None:
    """Give a sender's node a publication, or its first segments, as its learner does."""
    connector = aiohttp.UnixConnector(str(node.folder / CONTROL_SOCKET))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        for segment, payload in signed.segments[:num_segments]:
            head = encode_frame(SegmentFrame(segment))
            await _post(session, "segment", head + payload.tobytes(), {"X-Head-Bytes": str(len(head))})
        if commit:
            await _post(session, "commit", encode_frame(ManifestFrame(signed.manifest)), {})


async def _post(session: aiohttp.ClientSession, what: str, body: bytes, headers: dict[str, str]) -> None:
    async with session.post(f"http://node/control/{what}", data=body, headers=headers) as response:
        if response.status != 200:
            raise WeightsError((await response.json())["message"])


def held(node: Node, signed: Signed) -> bytes | None:
    """The payload at a node once it is complete, else None."""
    holding = node.shelf.holdings.get(signed.key)
    if holding is None or holding.completed_s is None:
        return None
    return b"".join(part.tobytes() for _, part in holding.segments())


class Proxy:
    """A TCP proxy before one node, at `place`; ends its connections. Subclasses say what happens on the way.

    Args:
        target: port of the node, on loopback.
    """

    def __init__(self, target: int = 0) -> None:
        self.target = target
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**18)
        self.place = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *why: object) -> None:
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """From now on nobody reaches the node, and open connections are gone."""
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, out = await asyncio.open_connection("127.0.0.1", self.target, limit=2**18)
        except OSError:
            writer.close()
            return
        self._join(reader, writer, there, out)

    def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        out: asyncio.StreamWriter,
    ) -> None:
        """Pass on what comes from the client (`reader`) and from the node (`there`)."""
        for pump in (self._pump(reader, out, False), self._pump(there, writer, True)):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, up: bool) -> None:
        """`up`: from the node."""
        with contextlib.suppress(ConnectionError):
            while data := await source.read(64 * 1024):
                sink.write(self._changed(data, up))
                await sink.drain()
        sink.close()

    def _changed(self, data: bytes, up: bool) -> bytes:
        """Return what becomes of `data` on the way."""
        return data


class Uplink(Proxy):
    """Proxy that slows, delays and damages what the node sends.

    Args:
        rate_bytes_per_s: of all connections together.
        delay_s: added to every byte, both ways.
    """

    def __init__(self, rate_bytes_per_s: float = 4e6, delay_s: float = 0.02) -> None:
        super().__init__()
        self.rate_bytes_per_s = rate_bytes_per_s
        self.num_flips = 0
        self._delay_s = delay_s
        self.flip_every = 0  # about one byte in so many is altered on its way out; 0: none
        self._random = np.random.default_rng(7)
        self._free_s = 0.0

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, up: bool) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(8)
        carrier = asyncio.create_task(self._carry(waiting, sink))
        try:
            while data := await _read(source):
                now_s = time.monotonic()
                if up:
                    self._free_s = max(now_s, self._free_s) + len(data) / self.rate_bytes_per_s
                    await asyncio.sleep(self._free_s - now_s)
                    data = self._damaged(data)
                await waiting.put((time.monotonic() + self._delay_s, data))
        finally:
            carrier.cancel()
            sink.close()

    async def _carry(self, waiting: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                due_s, data = await waiting.get()
                await asyncio.sleep(due_s - time.monotonic())
                sink.write(data)
                await sink.drain()

    def _damaged(self, data: bytes) -> bytes:
        if not self.flip_every or self._random.random() >= len(data) / self.flip_every:
            return data
        self.num_flips += 1
        damaged = bytearray(data)
        damaged[int(self._random.integers(len(data)))] ^= 0x40
        return bytes(damaged)


async def _read(source: asyncio.StreamReader) -> bytes:
    try:
        return await source.read(16 * 1024)
    except ConnectionError:
        return b""


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine; it has a limit as a whole too."""

    async def limited() -> None:
        await asyncio.wait_for(story(), 4 * LIMIT_S)

    asyncio.run(limited())


class Fleet:
    """Node processes: a sender and workers. Ends them all.

    Args:
        sender_options: settings of the sender beyond those of a node that only relays.
    """

    def __init__(self, **sender_options: Any) -> None:
        self.signer = Signer.generate()
        self.workers: dict[str, WorkerNode] = {}
        self._sender_options = sender_options

    async def __aenter__(self) -> Fleet:
        self.sender = SenderNode.spawn(settings(self.signer, "sender", **self._sender_options))
        self.address = self.sender.address
        return self

    async def __aexit__(self, *why: object) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers.values()))
        await asyncio.to_thread(self.sender.close)

    async def add(self, name: str, **options: Any) -> WorkerNode:
        """Start a worker; it joins by itself."""
        options = {"sender": self.address, **options}
        worker = self.workers[name] = await WorkerNode.spawn(settings(self.signer, name, **options))
        return worker

    async def publish(self, signed: Signed, *, num_segments: int | None = None, commit: bool = True) -> None:
        """Hand a publication over, as a learner does."""
        for segment, payload in signed.segments[:num_segments]:
            await asyncio.to_thread(self.sender.add_segment, segment, payload)
        if commit:
            await asyncio.to_thread(self.sender.commit, signed.manifest)

    async def status(self) -> dict[str, Any]:
        """Of the sender."""
        return await asyncio.to_thread(self.sender.status)

    async def until_obeyed(self, num_workers: int, limit_s: float) -> dict[str, str]:
        """Wait until so many workers pull from whom the tracker says, and it has come to rest: it ranks anew
        at its next tick. Returns the parent of each."""
        peers: dict[str, str] = {}
        since_s = time.monotonic()

        async def obeyed() -> bool:
            nonlocal peers, since_s
            before, peers = peers, (await self.status())["peers"]
            states = {name: await worker.status() for name, worker in self.workers.items() if name in peers}
            follow = all(
                state["connected"] and state["parent"] == peers[name] for name, state in states.items()
            )
            if len(peers) != num_workers or peers != before or not follow:
                since_s = time.monotonic()
            return time.monotonic() - since_s > 3 * TICK_INTERVAL_S

        await until_true(obeyed, limit_s, "the workers to follow the tracker")
        return peers

    async def until_complete(self, name: str, signed: Signed, limit_s: float) -> dict[str, Any]:
        """Wait until a worker has a publication whole; returns what it says of it."""
        found: dict[str, Any] = {}

        async def complete() -> bool:
            nonlocal found
            listed = (await self.workers[name].status())["publications"]
            found = next((one for one in listed if one["key"] == key_text(signed.key)), {})
            return bool(found.get("complete"))

        await until_true(complete, limit_s, f"version {signed.key.version} at {name}")
        return found


async def until_true(condition: Callable[[], Awaitable[bool]], limit_s: float, what: str) -> None:
    """Wait for a condition that has to be asked for; fails after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not await condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {limit_s:.0f} s in vain for {what}")
        await asyncio.sleep(0.05)


async def payload_at(address: str, signed: Signed, name: str, tls: ssl.SSLContext | None = None) -> bytes:
    """Payload of a publication, as the worker `name` serves it."""
    url = f"{address}/v1/publications/{key_text(signed.key)}/payload"
    async with (
        aiohttp.ClientSession(headers=as_node("reader", at=name)) as session,
        session.get(url, ssl=tls or True, timeout=aiohttp.ClientTimeout(10)) as response,
    ):
        return await response.read()


def free_port() -> int:
    """A port of loopback that nobody listens on at present."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def port_of(address: str) -> int:
    """The port of a node's base URL."""
    return int(address.rpartition(":")[2])
