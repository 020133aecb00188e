"""Uploads of a sender's publications to its store, without a network."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.shelf import Shelf
from echo_planes.weights.node.store import PIECE_BYTES, StoreUploader, _Taken
from echo_planes.weights.store.objects import Objects
from echo_planes.weights.wire.frames import ChunkFrame
from echo_planes.weights.wire.manifest import PublicationKey
from echo_planes.weights.wire.signing import Verifier
from tests.unit.wire import LIMITS, SIGNER, signed

VERIFIER = Verifier(SIGNER.public_bytes())


def test_a_store_that_removes_nothing_still_has_what_was_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise every publication would ask for a snapshot, though none is missing."""

    def refuse(*arguments: object) -> None:
        raise OSError("no permission to delete")

    monkeypatch.setattr(Objects, "delete", refuse)
    told: list[str] = []

    async def story() -> None:
        shelf = Shelf(VERIFIER, LIMITS, tmp_path)
        settings = NodeSettings(
            "sender",
            "sender",
            "secret",
            SIGNER.public_bytes().hex(),
            store=str(tmp_path / "store"),
            keep_patches=1,
        )
        uploader = StoreUploader(settings, shelf, VERIFIER, None, told.append)
        for version in (1, 2, 3):
            key = PublicationKey("L0", version, "compact" if version > 1 else "full", version - 1 or -1)
            one = signed(bytes([version]) * 100, key=key)
            for segment in one.segments:
                shelf.add_segment(segment)
            for at in one.chunks:
                shelf.add_chunk(ChunkFrame(key, *at, one.chunk(*at)))
            holding = shelf.commit(one.manifest)
            assert holding is not None
            uploader.published(holding)
            assert await uploader._store_next()
        assert len(uploader._writer.index()) == 3
        assert uploader.status()["failed"] == 0
        assert not uploader.status()["snapshot_due"]
        assert ["no permission to delete" in line for line in told] == [True]
        shelf.close()

    asyncio.run(story())


def test_bytes_that_a_failing_store_takes_again_and_again_are_no_progress() -> None:
    """Else the end of a run would wait for such a store for ever."""
    taken, payload = _Taken(), [bytes(100)]
    for _ in range(3):  # the store fails after the bytes, at a header
        assert b"".join(taken.counted(payload)) == payload[0]
        assert taken.most_bytes == 100
    taken.stored()
    assert sum(map(len, taken.counted([bytes(PIECE_BYTES + 1), b""]))) == PIECE_BYTES + 1
    assert taken.most_bytes == 100 + PIECE_BYTES + 1
