"""Nodes over HTTP on loopback, with slow, damaging and dying links between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import aiohttp
import numpy as np
import pytest

from echo_planes.cluster.clock import MonotonicClock
from echo_planes.errors import ClusterError, ConfigError, RunError, WaitTimeoutError, WeightsError
from echo_planes.loop.ending import drain
from echo_planes.types import Codec, Manifest, Uploads
from echo_planes.weights.codec.table import CODECS, take_codec
from echo_planes.weights.digest import BitTensor, state_digest
from echo_planes.weights.node.client import SenderNode, WorkerNode
from echo_planes.weights.node.process import Node
from echo_planes.weights.node.roles import WorkerRole
from echo_planes.weights.node.shelf import Holding
from echo_planes.weights.node.transport import happens
from echo_planes.weights.publisher import Publisher
from echo_planes.weights.store.objects import open_objects
from echo_planes.weights.store.reading import Store
from echo_planes.weights.wire import manifest as manifest_module
from echo_planes.weights.wire.limits import relay_limits
from echo_planes.weights.wire.manifest import key_text
from echo_planes.weights.wire.signing import Signer, Verifier
from tests.integration.weight_nodes import (
    LIMIT_S,
    TOKEN,
    Signed,
    Uplink,
    as_node,
    hand_over,
    held,
    publication,
    running,
    settings,
    until,
    until_true,
)
from tests.unit.s3_stub import ACCESS_KEY, S3Stub, s3_stub

CHUNK_BYTES = 32 * 1024


class Chain:
    """A sender and workers in this event loop, each behind an uplink of its own."""

    def __init__(self, signer: Signer, stack: contextlib.AsyncExitStack) -> None:
        self.signer = signer
        self.workers: dict[str, Node] = {}
        self.uplinks: dict[str, Uplink] = {}
        self.stops: dict[str, Callable[[], Awaitable[None]]] = {}
        self.num_settled = 0
        self._stack = stack

    async def begin(self, num_workers: int) -> None:
        self.sender = await self._node("sender")
        for number in range(num_workers):
            await self.add(f"w{number}")
        await self.settle()

    async def settle(self) -> None:
        """Send a small publication, after which the tracker has ranked its peers; wait until they obey."""
        self.num_settled += 1
        signed = publication(self.signer, self.num_settled, 10_000, lineage="settling")
        await hand_over(self.sender, signed)
        await all_have(self, signed)
        for what in (self._is_counted, self._is_obeyed):
            await until(what, LIMIT_S, "the chain to settle")

    def _is_counted(self) -> bool:
        stats = self.sender.role.dispatch.stats()
        return bool(stats) and stats[-1].num_complete == len(self.workers)

    def _is_obeyed(self) -> bool:
        wanted = self.sender.role.dispatch.peers()
        status = {name: node.role.status() for name, node in self.workers.items()}
        return all(status[name]["connected"] and status[name]["parent"] == wanted[name] for name in status)

    async def add(self, name: str) -> Node:
        node = self.workers[name] = await self._node(name)
        await until(lambda: self.parent(name) is not None, LIMIT_S, f"{name} to have a parent")
        return node

    def parent(self, name: str) -> str | None:
        parent: str | None = self.workers[name].role.status()["parent"]
        return parent

    def order(self) -> list[str]:
        """The chain from the sender to its tail."""
        child = {self.parent(name): name for name in self.workers}
        order, at = [], "sender"
        while at in child:
            order.append(child[at])
            at = child[at]
        return order

    async def kill(self, name: str) -> None:
        self.workers.pop(name)
        self.uplinks[name].cut()
        await self.stops[name]()

    async def _node(self, name: str) -> Node:
        uplink = await self._stack.enter_async_context(Uplink())
        worker = name != "sender"
        sender = self.sender.address if worker else ""
        own = contextlib.AsyncExitStack()
        options = settings(self.signer, name, sender, advertise=uplink.place)
        node = await own.enter_async_context(running(options))
        self._stack.push_async_exit(own)
        uplink.target, self.uplinks[name], self.stops[name] = node.port, uplink, own.aclose
        return node


def on_chain(num_workers: int, story: Callable[[Chain], Awaitable[None]]) -> None:
    """Run `story` on a chain of so many workers."""

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            chain = Chain(Signer.generate(), stack)
            await chain.begin(num_workers)
            await story(chain)

    asyncio.run(run())


def payload_of(signed: Signed) -> bytes:
    return b"".join(part.tobytes() for _, part in signed.segments)


async def all_have(chain: Chain, signed: Signed) -> None:
    await until(
        lambda: all(held(node, signed) is not None for node in chain.workers.values()),
        LIMIT_S,
        "all to have it",
    )
    for name, node in chain.workers.items():
        assert held(node, signed) == payload_of(signed), name


def damaged_at(node: Node, signed: Signed) -> int:
    return node.shelf.holdings[signed.key].transfer.num_damaged


def bytes_at(node: Node, signed: Signed) -> int:
    holding = node.shelf.holdings.get(signed.key)
    return holding.transfer.bytes_have if holding else 0


def test_a_chain_of_four_ends_with_the_same_bytes() -> None:
    async def story(chain: Chain) -> None:
        signed = publication(
            chain.signer, 1, 3_000_000, chunk_bytes=CHUNK_BYTES, segment_bytes=1_000_000, codec="full"
        )
        before = chain.sender.role.status()["bytes_sent"]
        await hand_over(chain.sender, signed)
        await all_have(chain, signed)
        assert len(chain.order()) == 4  # one chain, not a star
        sent = chain.sender.role.status()["bytes_sent"] - before
        assert sent < 1.2 * len(payload_of(signed))  # the sender sent everything once
        stats = chain.sender.role.dispatch.stats()
        await until(lambda: chain.sender.role.dispatch.stats()[-1].num_complete == 4, LIMIT_S, "all reports")
        assert stats[-1].payload_bytes == 3_000_000

    on_chain(4, story)


def test_chunks_go_on_before_the_publication_is_whole() -> None:
    async def story(chain: Chain) -> None:
        signed = publication(chain.signer, 1, 2_000_000, chunk_bytes=CHUNK_BYTES, segment_bytes=500_000)
        await hand_over(chain.sender, signed, num_segments=1, commit=False)
        tail = chain.workers[chain.order()[-1]]
        await until(lambda: bytes_at(tail, signed) == 500_000, LIMIT_S, "the first segment at the tail")
        assert held(tail, signed) is None  # without its manifest it is nothing yet
        await hand_over(chain.sender, signed)
        await all_have(chain, signed)

    on_chain(3, story)


def test_a_relay_that_dies_in_mid_broadcast_is_cut_out() -> None:
    async def story(chain: Chain) -> None:
        signed = publication(chain.signer, 1, 6_000_000, chunk_bytes=CHUNK_BYTES)
        first, second, *_ = chain.order()
        await hand_over(chain.sender, signed)
        await until(lambda: bytes_at(chain.workers[second], signed) > 3_000_000, LIMIT_S, "half of it")
        had = bytes_at(chain.workers[second], signed)
        assert had < 6_000_000
        before = chain.sender.role.status()["bytes_sent"]
        await chain.kill(first)
        await all_have(chain, signed)
        assert first not in chain.order()
        # What the second had already was not sent again (but for what was on its way).
        assert chain.sender.role.status()["bytes_sent"] - before < 6_000_000 - had + 1_000_000

    on_chain(4, story)


def test_a_damaging_link_is_repaired_and_forwards_nothing_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    forwarded: list[tuple[int, bytes]] = []
    chunk_of = Holding.chunk

    def recorded(holding: Holding, number: int) -> bytes:
        data = chunk_of(holding, number)
        if holding.key.lineage == "test":
            forwarded.append((holding.transfer.chunk_span(number).offset_bytes, data))
        return data

    monkeypatch.setattr(Holding, "chunk", recorded)

    async def story(chain: Chain) -> None:
        bad, after, last = chain.order()
        chain.uplinks[bad].flip_every = 300_000
        signed = publication(chain.signer, 1, 3_000_000, chunk_bytes=CHUNK_BYTES)
        await hand_over(chain.sender, signed)
        await all_have(chain, signed)
        assert chain.uplinks[bad].num_flips > 0
        assert sum(damaged_at(chain.workers[name], signed) for name in (after, last)) > 0
        payload = payload_of(signed)
        assert len(forwarded) >= 2 * 92
        assert all(data == payload[start : start + len(data)] for start, data in forwarded)

    on_chain(3, story)


def test_a_worker_that_joins_in_mid_broadcast_gets_everything() -> None:
    async def story(chain: Chain) -> None:
        signed = publication(chain.signer, 1, 4_000_000, chunk_bytes=CHUNK_BYTES)
        await hand_over(chain.sender, signed)
        await until(lambda: bytes_at(chain.workers["w1"], signed) > 200_000, LIMIT_S, "a beginning")
        await chain.add("late")
        assert held(chain.workers["w1"], signed) is None
        await all_have(chain, signed)

    on_chain(2, story)


def test_a_wrong_token_is_turned_away_everywhere() -> None:
    async def story(chain: Chain) -> None:
        await hand_over(chain.sender, publication(chain.signer, 1, 100_000))
        asked = [("GET", "/v1/status"), ("POST", "/v1/feed?stream=0&of=1")]
        asked += [("POST", "/v1/tracker/join"), ("POST", "/v1/tracker/report"), ("GET", "/nothing")]
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            async with aiohttp.ClientSession(headers=headers) as session:
                for method, path in asked:
                    async with session.request(method, chain.sender.address + path, data=b"{}") as response:
                        assert response.status == 401, path
                        assert b"test" not in await response.read()

    on_chain(0, story)


def test_ranges_are_served_up_to_what_is_verified() -> None:
    async def story(chain: Chain) -> None:
        signed = publication(chain.signer, 1, 500_000, chunk_bytes=CHUNK_BYTES, segment_bytes=300_000)
        await hand_over(chain.sender, signed, num_segments=1, commit=False)
        url = f"{chain.sender.address}/v1/publications/{key_text(signed.key)}/payload"
        async with aiohttp.ClientSession(headers=as_node("reader")) as session:
            async with session.get(url, headers={"Range": "bytes=1000-1999"}) as response:
                assert (response.status, response.headers["Content-Range"]) == (206, "bytes 1000-1999/*")
                assert await response.read() == payload_of(signed)[1000:2000]
            async with session.get(url, headers={"Range": "bytes=299000-400000"}) as response:
                assert await response.read() == payload_of(signed)[299_000:300_000]
            async with session.get(url, headers={"Range": "bytes=300000-300001"}) as response:
                assert response.status == 416
            async with session.get(f"{chain.sender.address}/v1/publications/x.1.full.-1/payload") as response:
                assert response.status == 404

    on_chain(0, story)


def test_what_another_key_signed_goes_nowhere() -> None:
    async def story(chain: Chain) -> None:
        forged = publication(Signer.generate(), 1, 100_000, chunk_bytes=CHUNK_BYTES)
        with pytest.raises(WeightsError, match="forged"):
            await hand_over(chain.sender, forged)
        assert forged.key not in chain.sender.shelf.holdings
        sound = publication(chain.signer, 1, 100_000, chunk_bytes=CHUNK_BYTES)
        with pytest.raises(WeightsError, match="forged"):
            await hand_over(chain.sender, Signed(sound.segments, forged.manifest))
        assert held(chain.sender, sound) is None

    on_chain(0, story)


def test_a_worker_believes_only_the_learners_key() -> None:
    async def run() -> None:
        learner, stranger = Signer.generate(), Signer.generate()
        async with running(settings(stranger, "sender")) as sender:
            options = settings(learner, "w0", sender.address)
            async with running(options) as worker:
                await until(lambda: bool(worker.role.status()["connected"]), LIMIT_S, "a link")
                await hand_over(sender, publication(stranger, 1, 100_000))
                told = sender.role.status()["bytes_sent"]
                await until(lambda: sender.role.status()["bytes_sent"] > told, LIMIT_S, "another try")
                assert not worker.shelf.holdings

    asyncio.run(run())


def test_a_broken_sender_leaves_the_present_parent() -> None:
    async def story(chain: Chain) -> None:
        order = chain.order()
        tail = chain.workers[order[-1]]
        assert isinstance(tail.role, WorkerRole)
        await chain.stops["sender"]()
        for _ in range(3):
            with pytest.raises(ConnectionError):
                await tail.role.member._speak()
        assert chain.parent(order[-1]) == order[-2]

    on_chain(2, story)


def test_processes_start_deliver_and_leave_nothing_behind() -> None:
    async def run() -> None:
        signer = Signer.generate()
        sender = SenderNode.spawn(settings(signer, "sender"))
        worker = await WorkerNode.spawn(settings(signer, "w0", sender.address))
        folders = [Path(node._process.socket).parent for node in (sender, worker)]
        try:
            signed = publication(signer, 1, 300_000)
            for segment, payload in signed.segments:
                await asyncio.to_thread(sender.add_segment, segment, payload)
            await asyncio.to_thread(sender.commit, signed.manifest)

            async def complete() -> bool:
                return any(held["complete"] for held in (await worker.status())["publications"])

            while not await complete():
                await asyncio.sleep(0.02)
            with pytest.raises(WeightsError, match="relays"):
                await worker.staged("test", 1, 0.0)
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            with pytest.raises(RunError, match="w0"):
                await worker.status()
        finally:
            await worker.close()
            sender.close()
        assert not any(folder.exists() for folder in folders)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_port_that_is_taken_is_one_clear_error() -> None:
    signer = Signer.generate()
    sender = SenderNode.spawn(settings(signer, "sender"))
    try:
        port = int(sender.address.rpartition(":")[2])
        with pytest.raises(ClusterError, match=r"weights\.port"):
            SenderNode.spawn(settings(signer, "other", port=port))
    finally:
        sender.close()


def test_a_wait_that_is_cancelled_as_its_event_happens_ends() -> None:
    async def run() -> None:
        first, second = asyncio.Event(), asyncio.Event()

        async def both() -> None:
            await happens(first, 5.0)
            await happens(second, 1.0)

        task = asyncio.create_task(both())
        for _ in range(3):
            await asyncio.sleep(0)
        first.set()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(run())


class Learner:
    """Publishes a small model whose weights change a little with each version."""

    def __init__(self, signer: Signer, sender: SenderNode, codec: Codec = "fast") -> None:
        self._codec = codec
        self._random = np.random.default_rng(3)
        self._bits = self._random.integers(0, 2**15, 200_000, dtype=np.uint16)
        self._publisher = Publisher("run", signer, sender, choice=self)  # type: ignore[arg-type]
        self.manifest: Manifest

    def codec(self, *states: object) -> Codec:
        """As `CodecChoice`: always the same."""
        return self._codec

    def publish(self, version: int) -> None:
        self._bits = self._bits.copy()
        self._bits[self._random.integers(0, self._bits.size, 2_000)] ^= 1
        self.manifest = self._publisher.publish(version, version, self.tensors())
        self._publisher.commit()

    def tensors(self) -> dict[str, BitTensor]:
        return {"w": BitTensor(self._bits, "bfloat16", (400, 500))}


@pytest.mark.parametrize("mode", ["", "full", "silent"])
def test_at_the_end_a_slow_bucket_has_every_version_and_of_a_broken_one_it_is_said(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    signer, told = Signer.generate(), list[str]()

    async def run(bucket: S3Stub, sender: SenderNode) -> tuple[int, ...]:
        async def uploads() -> Uploads:
            return await asyncio.to_thread(sender.uploads)

        learner = Learner(signer, sender)
        await asyncio.to_thread(learner.publish, 0)
        await until(lambda: sender.uploads().is_over, LIMIT_S, "the first version in the store")
        bucket.put_s, bucket.mode = 0.1, mode  # a version takes several requests
        for version in range(1, 6):
            await asyncio.to_thread(learner.publish, version)
        assert sender.uploads().unstored
        return await drain(uploads, MonotonicClock(), 2.0 if mode else LIMIT_S, told.append)

    with s3_stub() as bucket:
        secret = signer.private_bytes().hex()
        sender = SenderNode.spawn(settings(signer, "sender", store=bucket.url(), signing_key=secret))
        try:
            missing = asyncio.run(run(bucket, sender))
        finally:
            sender.close()
        bucket.mode = ""
        store = Store(open_objects(bucket.url()), Verifier(signer.public_bytes()), relay_limits(10**8))
        there = {entry.manifest.version for entry in store.index()}
    assert missing == (() if not mode else (1, 2, 3, 4, 5))
    assert there == set(range(6)) - set(missing)
    assert ("1-5" in told[-1]) == bool(mode)


def test_a_late_worker_catches_up_from_the_store_and_then_follows(tmp_path: Path) -> None:
    async def run() -> None:
        signer = Signer.generate()
        secret = signer.private_bytes().hex()
        options = settings(signer, "sender", store=str(tmp_path), signing_key=secret, snapshot_every=5)
        sender = SenderNode.spawn(options)
        try:
            learner = Learner(signer, sender)
            for version in range(13):  # more than the node itself keeps
                await asyncio.to_thread(learner.publish, version)

            def stored() -> bool:
                state = sender.status()["store"]
                return state["waiting"] == 0 and not state["snapshot_due"]

            await until(stored, LIMIT_S, "the store to have everything")
            assert sender.status()["store"]["failed"] == 0
            late = await WorkerNode.spawn(settings(signer, "late", sender.address, staging=True))
            try:
                manifest, path = await late.staged("run", 12, LIMIT_S)
                assert (manifest.version, manifest.codec) == (12, "full")
                assert manifest.digest == learner.manifest.digest == state_digest(learner.tensors())
                assert path.stat().st_size == manifest.payload_bytes
                assert (await late.status())["catch_ups"] == 1
                assert await late.settled(12, False) == ""
                manifest, _ = await late.staged("run", 12, LIMIT_S)
                assert (manifest.version, manifest.codec) == (12, "full")
                way = await late.settled(12, True)
                assert "full" in way, way  # told with the install that succeeded
                await asyncio.to_thread(learner.publish, 13)
                manifest, _ = await late.staged("run", 13, LIMIT_S)
                assert (manifest.version, manifest.codec, manifest.base_version) == (13, "overwrite", 12)
                assert manifest.digest == learner.manifest.digest
                manifest, _ = await late.staged("run", 13, LIMIT_S, fresh=True)
                assert (manifest.version, manifest.codec) == (13, "full")
                with pytest.raises(WaitTimeoutError, match="version 14"):
                    await late.staged("run", 14, 0.05)
            finally:
                await late.close()
        finally:
            sender.close()

    asyncio.run(asyncio.wait_for(run(), 90))
    entries = [path.parent.name for path in tmp_path.glob("publications/*/READY")]
    assert sum(".full." in name for name in entries) >= 2  # the first, and a snapshot


def test_a_store_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    signer = Signer.generate()
    with pytest.raises(ConfigError, match=r"weights\.store"):
        SenderNode.spawn(settings(signer, "sender", store=str(tmp_path / "file")))


@pytest.mark.parametrize("what", ["payload", "feed"])
def test_who_reads_nothing_of_what_it_asked_for_holds_nothing(
    what: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("echo_planes.weights.node.feed.WRITE_S", 0.3)

    async def story(chain: Chain) -> None:
        signed = publication(chain.signer, 1, 30_000_000)
        await hand_over(chain.sender, signed)
        holding = chain.sender.shelf.holdings[signed.key]
        path = f"GET /v1/publications/{key_text(signed.key)}/payload"
        asked = path if what == "payload" else "POST /v1/feed?stream=0&of=1"
        headers = "".join(f"{name}: {value}\r\n" for name, value in as_node("idler").items())
        reader, writer = await asyncio.open_connection("127.0.0.1", chain.sender.port, limit=1024)
        writer.write(f"{asked} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n{headers}\r\n{{}}".encode())
        await until(lambda: holding.pins + holding.senders > 0, LIMIT_S, "it to be sent something")
        await until(lambda: holding.pins + holding.senders == 0, LIMIT_S, "it to be given up")
        writer.transport.abort()
        del reader

    on_chain(0, story)
    assert "Traceback" not in capfd.readouterr().err


OWN_CODEC = """
import zlib

import numpy as np

from echo_planes.weights.codec.codec import TensorCodec


class Xor(TensorCodec):
    name = "xor"

    def pack(self, old, new):
        return zlib.compress((old ^ new).tobytes())

    def unpack(self, data, old):
        return old ^ np.frombuffer(zlib.decompressobj().decompress(data, old.nbytes), old.dtype)


CODEC = Xor()
"""


def test_a_run_s_own_codec_goes_from_the_learner_to_the_engine_s_file_and_into_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes' processes import it because their settings say so, by the paths that this process has."""
    (tmp_path / "nodes_own_codec.py").write_text(OWN_CODEC)
    monkeypatch.syspath_prepend(str(tmp_path))
    place = "nodes_own_codec:CODEC"

    async def run() -> None:
        signer = Signer.generate()
        secret = signer.private_bytes().hex()
        with pytest.raises(ConfigError, match="no module named 'nowhere_at_all'"):
            SenderNode.spawn(settings(signer, "sender", codec="nowhere_at_all:CODEC"))
        options = settings(signer, "sender", store=str(tmp_path / "store"), signing_key=secret, codec=place)
        sender = SenderNode.spawn(options)
        try:
            learner = Learner(signer, sender, take_codec(place))
            worker = await WorkerNode.spawn(settings(signer, "w", sender.address, staging=True, codec=place))
            # One whose own settings say nothing of the codec.
            stranger = await WorkerNode.spawn(settings(signer, "s", sender.address, staging=True))
            try:
                for version in range(3):
                    await asyncio.to_thread(learner.publish, version)
                    manifest, _ = await worker.staged("run", version, LIMIT_S)
                    assert manifest.digest == learner.manifest.digest == state_digest(learner.tensors())
                    await worker.settled(version, True)
                assert (learner.manifest.codec, manifest.codec) == ("xor", "overwrite")

                async def is_told() -> bool:
                    return "unknown codec" in (await stranger.status())["trouble"]

                await until_true(is_told, LIMIT_S, "the stranger to say what it does not know")
                with pytest.raises(WaitTimeoutError):
                    await stranger.staged("run", 2, 0.5)
                await until(lambda: sender.status()["store"]["waiting"] == 0, LIMIT_S, "the store")
                assert sender.status()["store"]["failed"] == 0
            finally:
                await worker.close()
                await stranger.close()
        finally:
            sender.close()
        names = sorted(path.name.split("-", 1)[1] for path in (tmp_path / "store" / "publications").iterdir())
        assert names == ["run.0.full.-1", "run.1.xor.0", "run.2.xor.1"]

    with patch.dict(CODECS), patch.dict(manifest_module._CODES), patch.dict(manifest_module._CODECS):
        asyncio.run(asyncio.wait_for(run(), 90))
