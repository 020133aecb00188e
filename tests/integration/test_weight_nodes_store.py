"""The store side of nodes, in this process: what comes twice, too late, too fast, or not at all."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest

from echo_planes.errors import ClusterError, ConfigError, WeightsError
from echo_planes.types import ByteArray, Codec
from echo_planes.weights.digest import BitTensor, state_digest
from echo_planes.weights.node.process import Node
from echo_planes.weights.node.roles import SenderRole, WorkerRole
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.shadow import Shadow, Snapshot
from echo_planes.weights.node.shelf import Holding, Shelf
from echo_planes.weights.node.spool import SpoolFile
from echo_planes.weights.node.staging import Staging
from echo_planes.weights.node.store import StoreUploader
from echo_planes.weights.publisher import Publisher
from echo_planes.weights.store.archivist import SnapshotWork
from echo_planes.weights.wire.frames import ChunkFrame
from echo_planes.weights.wire.limits import relay_limits
from echo_planes.weights.wire.manifest import SignedManifest, SignedSegment
from echo_planes.weights.wire.signing import Signer, Verifier
from tests.integration.weight_nodes import Signed, as_node, hand_over, publication, running, settings, until

LIMIT_S = 30.0


class Learner:
    """Publishes a small model whose weights change a little with each version; `signed` is what it made."""

    def __init__(self, signer: Signer) -> None:
        self._random = np.random.default_rng(3)
        self._bits = self._random.integers(0, 2**15, 50_000, dtype=np.uint16)
        self._publisher = Publisher("run", signer, self, choice=self)  # type: ignore[arg-type]
        self._segments: list[tuple[SignedSegment, ByteArray]] = []
        self.signed: Signed

    def codec(self, *states: object) -> Codec:
        return "fast"

    def add_segment(self, segment: SignedSegment, payload: ByteArray) -> None:
        self._segments.append((segment, payload.copy()))

    def commit(self, manifest: SignedManifest) -> None:
        self.signed, self._segments = Signed(self._segments, manifest), []

    def publish(self, version: int) -> Signed:
        self._bits = self._bits.copy()
        self._bits[self._random.integers(0, self._bits.size, 500)] ^= 1
        tensors = {"w": BitTensor(self._bits, "bfloat16", (100, 500))}
        self._publisher.publish(version, version, tensors)
        self._publisher.commit()
        return self.signed


def sender_settings(signer: Signer, **options: Any) -> NodeSettings:
    return settings(signer, "sender", signing_key=signer.private_bytes().hex(), **options)


def sender_of(node: Node) -> SenderRole:
    assert isinstance(node.role, SenderRole)
    return node.role


def holding_of(shelf: Shelf, signed: Signed) -> Holding:
    for segment, payload in signed.segments:
        holding = shelf.add_segment(segment)
        assert holding
        header = segment.header
        for index in range(header.num_chunks):
            holding.transfer.add_chunk(
                0, index, payload.tobytes()[index * header.chunk_bytes :][: header.chunk_bytes]
            )
    holding = shelf.commit(signed.manifest)
    assert holding
    return holding


def put(shelf: Shelf, signed: Signed) -> None:
    """All of it, its bytes too."""
    for segment, payload in signed.segments:
        shelf.add_segment(segment)
        header = segment.header
        for index in range(header.num_chunks):
            data = payload.tobytes()[index * header.chunk_bytes :][: header.chunk_bytes]
            shelf.add_chunk(ChunkFrame(header.key, header.index, index, data))
    shelf.commit(signed.manifest)


# --- the sender ----------------------------------------------------------------------------------


def test_what_is_handed_over_again_is_stored_once(tmp_path: Path) -> None:
    async def run() -> None:
        signer = Signer.generate()
        async with running(sender_settings(signer, store=str(tmp_path))) as sender:
            signed = Learner(signer).publish(0)
            await hand_over(sender, signed)
            role = sender_of(sender)
            assert role.store
            assert role.shadow
            for _ in range(2):  # while it is being stored
                role.store.published(sender.shelf.holdings[signed.key])
                role.shadow.published(sender.shelf.holdings[signed.key])
            await until(lambda: role.status()["store"]["waiting"] == 0, LIMIT_S, "the store to have it")
            await hand_over(sender, signed)
            assert role.status()["store"]["failed"] == role.status()["store"]["waiting"] == 0
            await until(lambda: not cast(Shadow, role.shadow).behind, LIMIT_S, "the shadow")
            await until(lambda: sender.shelf.holdings[signed.key].pins == 0, LIMIT_S, "no readers")

    asyncio.run(run())
    assert len(list(tmp_path.glob("publications/*/READY"))) == 1


def test_only_publications_are_served_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "signing_key.pem").write_text("secret")

    async def run() -> None:
        signer = Signer.generate()
        async with (
            running(sender_settings(signer, store=str(tmp_path))) as sender,
            aiohttp.ClientSession(headers=as_node("reader")) as session,
        ):
            for path, status in (
                ("objects/signing_key.pem", 422),
                ("objects/public_key", 422),
                ("objects/objects/../signing_key.pem", 422),
                ("list/other", 422),
                ("list/publications", 200),
            ):
                url = f"{sender.address}/v1/store/{path}".replace("..", "%2E%2E")
                async with session.get(url) as response:
                    assert response.status in (status, 404 if status == 422 else status), path
                    assert b"secret" not in await response.read()

    asyncio.run(run())


def test_what_a_dead_sender_left_is_swept_at_the_start(tmp_path: Path) -> None:
    left = tmp_path / "publications" / "00000003-run.9.full.-1"
    left.mkdir(parents=True)
    (left / "segments.json").write_text("[]")

    async def run() -> None:
        async with running(sender_settings(Signer.generate(), store=str(tmp_path))):
            assert not left.exists()

    asyncio.run(run())


def test_an_older_snapshot_is_not_the_one_that_was_asked_for(tmp_path: Path) -> None:
    signer = Signer.generate()
    signed = publication(signer, 3, 10_000, lineage="run")
    snapshot = Snapshot(signed.manifest, [part for part, _ in signed.segments], signed.segments[0][1])

    class Shadowed:
        def make(self) -> Snapshot:
            return snapshot

    shadow = cast(Shadow, Shadowed())
    verifier = Verifier(signer.public_bytes())
    shelf = Shelf(verifier, relay_limits(10**6), tmp_path)
    keeper = StoreUploader(sender_settings(signer, store=str(tmp_path)), shelf, verifier, shadow, print)
    assert "shadow holds version 3 of run" in keeper._put_snapshot(shadow, SnapshotWork("run", 4)).reason
    assert "shadow holds version 3 of run" in keeper._put_snapshot(shadow, SnapshotWork("other", 2)).reason
    assert keeper._put_snapshot(shadow, SnapshotWork("run", 2)).stored


def test_a_slow_shadow_holds_no_more_than_two_copies_of_the_model(tmp_path: Path) -> None:
    async def run() -> None:
        signer = Signer.generate()
        shelf = Shelf(Verifier(signer.public_bytes()), relay_limits(10**6), tmp_path)
        told: list[str] = []
        shadow = Shadow(sender_settings(signer, folder=str(tmp_path)), shelf, told.append)
        pinned: list[Holding] = []

        def publish(version: int, codec: Codec) -> int:
            pinned.append(holding_of(shelf, publication(signer, version, 100_000, codec=codec)))
            for _ in range(2):  # the same again changes nothing
                shadow.published(pinned[-1])
            return sum(holding.pins for holding in pinned)

        # A full publication makes what waits before it needless.
        assert [publish(v, c) for v, c in ((0, "full"), (1, "fast"), (2, "full"))] == [1, 2, 1]  # type: ignore[arg-type]
        assert [publish(v, "fast") for v in (3, 4, 5)] == [2, 0, 0]
        assert len(told) == 1
        assert publish(6, "full") == 1

    asyncio.run(run())


@pytest.mark.parametrize("way", ["shelf", "store"])
def test_a_shadow_that_was_damaged_recovers_by_patches_alone(tmp_path: Path, way: str) -> None:
    async def run() -> None:
        signer = Signer.generate()
        place = str(tmp_path) if way == "store" else ""
        async with running(sender_settings(signer, store=place)) as sender:
            shadow = sender_of(sender).shadow
            assert shadow
            learner = Learner(signer)
            last = 13 if way == "store" else 3  # the node itself keeps fewer
            for version in range(last):
                await hand_over(sender, learner.publish(version))
                await until(lambda: not shadow.behind, LIMIT_S, "the shadow")
            if place:
                stored = cast(StoreUploader, sender_of(sender).store)
                await until(lambda: not stored.status()["waiting"], LIMIT_S, "the store")
            shadow._stager.bits()["w"].bits[7] ^= 1
            for version in (last, last + 1):
                await hand_over(sender, learner.publish(version))
                await until(lambda: not shadow.behind, LIMIT_S, "the shadow to recover")
                made = await asyncio.to_thread(shadow.make)
                assert made.signed.manifest.digest == learner.signed.manifest.manifest.digest
                assert state_digest(shadow._stager.bits()) == made.signed.manifest.digest

    asyncio.run(run())


def test_a_shadow_that_was_too_slow_goes_on_without_a_full_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_planes.weights.node.shadow.WAITING_COPIES", 0)

    async def run() -> None:
        signer = Signer.generate()
        shelf = Shelf(Verifier(signer.public_bytes()), relay_limits(10**6), tmp_path)
        told: list[str] = []
        shadow = Shadow(sender_settings(signer, folder=str(tmp_path)), shelf, told.append)
        learner = Learner(signer)
        for version in range(4):  # two wait already when it begins
            put(shelf, learner.publish(version))
            shadow.published(shelf.complete()[-1])
        assert [("slower" in line) for line in told] == [True]
        task = asyncio.create_task(shadow.run())
        await until(lambda: not shadow.behind, LIMIT_S, "the shadow")
        assert shadow.make().signed.manifest.digest == learner.signed.manifest.manifest.digest
        assert told[1:] == ["snapshots can be made again"]
        assert all(holding.pins == 0 for holding in shelf.complete())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_snapshot_that_nobody_reads_any_more_is_freed_and_made_again_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echo_planes.weights.node.shadow.SNAPSHOT_KEPT_S", 0.7)

    async def run() -> None:
        signer = Signer.generate()
        async with (
            running(sender_settings(signer)) as sender,
            aiohttp.ClientSession(headers=as_node("reader")) as session,
        ):
            shadow = sender_of(sender).shadow
            assert shadow
            await hand_over(sender, Learner(signer).publish(0))
            await until(lambda: not shadow.behind, LIMIT_S, "the shadow")
            place = f"{sender.address}/v1/snapshot/run/0"
            for _ in range(2):
                async with session.get(f"{place}/list/objects") as response:
                    (name,) = await response.json()
                offered = weakref.ref(cast(Any, shadow._offered))
                until_s = time.monotonic() + 1.0
                while time.monotonic() < until_s:  # for longer than it is kept without being read
                    async with session.get(f"{place}/objects/{name}?part=0-100") as response:
                        assert (response.status, len(await response.read())) == (200, 100)
                await until(lambda seen=offered: seen() is None, LIMIT_S, "the snapshot to go")  # type: ignore[misc]
                async with session.get(f"{place}/objects/{name}?part=0-100") as response:
                    assert response.status == 422

    asyncio.run(run())


@pytest.mark.parametrize("segment_bytes", [1_000_000, 32 * 1024**2])
def test_the_learner_hears_why_a_publication_is_refused(segment_bytes: int) -> None:
    """By whichever segment it finds out: one that is too large itself, or the first one beyond the model."""

    async def run() -> None:
        signer = Signer.generate()
        async with running(sender_settings(signer, max_payload_bytes=3_000_000)) as sender:
            large = publication(signer, 0, 40_000_000, segment_bytes=segment_bytes)
            for num_segments in (1, 2):
                with pytest.raises(WeightsError, match="the model needs at most 3000000"):
                    await hand_over(sender, replace(large, segments=large.segments[num_segments - 1 :]))
            with pytest.raises(WeightsError, match="the model needs at most 3000000"):
                await hand_over(sender, replace(large, segments=[]))
            for version in (1, 2):
                await hand_over(sender, publication(signer, version, 1000))
            with pytest.raises(WeightsError, match="later versions have replaced it"):
                await hand_over(sender, publication(signer, 1, 1000))

    asyncio.run(run())


# --- the worker ----------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["none", "lost"])
def test_a_late_worker_is_given_the_senders_own_state_where_no_store_helps(
    tmp_path: Path, store: str
) -> None:
    async def run() -> None:
        signer = Signer.generate()
        place = str(tmp_path / "store") if store == "lost" else ""
        async with running(sender_settings(signer, store=place)) as sender:
            learner = Learner(signer)
            for version in range(13):  # more than the node itself keeps
                await hand_over(sender, learner.publish(version))
            shadow = sender_of(sender).shadow
            assert shadow
            await until(lambda: not shadow.behind, LIMIT_S, "the sender's shadow")
            if place:
                keeper = sender_of(sender)
                await until(lambda: not keeper.status()["store"]["waiting"], LIMIT_S, "the store")
                shutil.rmtree(tmp_path / "store" / "publications")
            async with running(settings(signer, "late", sender.address, staging=True)) as late:
                assert isinstance(late.role, WorkerRole)
                assert late.role.staging
                staged = await late.role.staging.staged("run", 12, LIMIT_S, False)
                assert staged
                assert staged.manifest.digest == learner.signed.manifest.manifest.digest
                await late.role.staging.settled(12, True)
                await hand_over(sender, learner.publish(13))
                staged = await late.role.staging.staged("run", 13, LIMIT_S, False)
                assert staged
                assert staged.manifest.digest == learner.signed.manifest.manifest.digest
                assert staged.manifest.codec == "overwrite"
                # Memory that went bad shows at the next patch: the worker begins anew, and gets there.
                late.role._stager.bits()["w"].bits[7] ^= 1
                await hand_over(sender, learner.publish(14))
                staged = await late.role.staging.staged("run", 14, LIMIT_S, False)
                assert staged
                assert staged.manifest.digest == learner.signed.manifest.manifest.digest
                assert staged.manifest.codec == "full"
                assert not late.role.staging.refused

    asyncio.run(asyncio.wait_for(run(), 90))


class _Stager:
    """Refuses what it is told to, as if the weights were not what the patch needs."""

    def __init__(self) -> None:
        self.manifest: Any = None
        self.refuses: set[int] = set()
        self.resets = 0

    def stage(self, manifest: Any, segments: Any) -> None:
        if manifest.version in self.refuses:
            raise WeightsError("another digest")
        self.manifest = manifest

    def reset(self) -> None:
        self.resets += 1
        self.manifest = None


def test_a_full_disk_during_catch_up_is_given_time(tmp_path: Path) -> None:
    async def run() -> None:
        signer = Signer.generate()
        shelf = Shelf(Verifier(signer.public_bytes()), relay_limits(10**6), tmp_path)
        attempts: list[float] = []
        loop = asyncio.get_running_loop()

        async def catch_up(holding: Holding) -> None:
            attempts.append(loop.time())
            raise ClusterError("the disk is full")

        staging = Staging(cast(Any, _Stager()), shelf, catch_up)
        holding_of(shelf, publication(signer, 5, 10_000, codec="fast"))
        task = asyncio.create_task(staging.run())
        await until(lambda: len(attempts) == 2, LIMIT_S, "a second attempt")
        assert attempts[1] - attempts[0] > 0.9  # it is said not to be tried again at once
        assert "disk is full" in staging.trouble
        assert not staging.refused
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_weights_that_a_patch_does_not_fit_are_begun_anew_once(tmp_path: Path) -> None:
    async def run() -> None:
        signer = Signer.generate()
        shelf = Shelf(Verifier(signer.public_bytes()), relay_limits(10**6), tmp_path)
        stager, caught_up = _Stager(), list[int]()
        stager.refuses = {2}
        older = publication(signer, 0, 10_000).manifest.manifest

        async def catch_up(holding: Holding) -> None:
            caught_up.append(holding.key.version)
            stager.manifest = older  # the snapshot there is does not reach the patch

        staging = Staging(cast(Any, stager), shelf, catch_up)
        holding_of(shelf, publication(signer, 1, 10_000))
        patch = holding_of(shelf, publication(signer, 2, 10_000, codec="fast"))
        task = asyncio.create_task(staging.run())
        await until(lambda: patch.key in staging.refused, LIMIT_S, "the patch to be refused for good")
        assert (stager.resets, caught_up) == (1, [2])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_worker_that_cannot_start_says_why_and_ends(tmp_path: Path) -> None:
    async def run() -> None:
        options = settings(
            Signer.generate(), "w0", "https://127.0.0.1:1", folder=str(tmp_path), tls_ca="none.pem"
        )
        node = Node(options)
        with pytest.raises(ConfigError, match=r"none\.pem"):
            await node.start()
        assert node.role.status()["parent"] is None
        await node.close()

    asyncio.run(run())


def test_a_spool_file_that_nobody_closes_is_closed(tmp_path: Path) -> None:
    spool = SpoolFile(tmp_path)
    descriptor = spool._descriptor
    del spool
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(ClusterError, match="nowhere"):
        SpoolFile(tmp_path / "nowhere")
