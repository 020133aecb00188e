"""Segments that a node makes from the model's files, and what its parent then sends (`node/maker.py`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from echo_planes.errors import DataError
from echo_planes.types import ByteArray
from echo_planes.weights.codec.entry import encode, full_payload
from echo_planes.weights.digest import BitTensor, bit_tensor
from echo_planes.weights.node.maker import Maker, ModelSegments, as_bfloat16
from echo_planes.weights.node.shelf import Shelf
from echo_planes.weights.wire.manifest import PublicationKey, SegmentHeader
from echo_planes.weights.wire.signing import Verifier
from echo_planes.weights.wire.transfer import chunk_hashes
from tests.unit.test_node_feed import SCRATCH, Link, on_shelves, put
from tests.unit.tracker_fleet import Fleet
from tests.unit.wire import LIMITS, SIGNER, Signed, manifest_for

CHUNK_BYTES = 4096
SEGMENT_BYTES = 3 * CHUNK_BYTES
KEY = PublicationKey("L0", 0, "full", -1)
SHAPES = {"model.embed_tokens.weight": (50, 64), "model.norm.weight": (64,), "model.up.weight": (300, 64)}


def weights(dtype: torch.dtype = torch.float32, seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def folder_of(tensors: Mapping[str, torch.Tensor], folder: Path, *, tied: bool = False) -> Path:
    """A model folder with two files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    names = sorted(tensors)
    for number, part in enumerate((names[:1], names[1:])):
        bits = {name: bit_tensor(tensors[name]) for name in part}
        full_payload(bits).tofile(folder / f"model-{number}.safetensors")
    return folder


def published(tensors: Mapping[str, torch.Tensor], segment_bytes: int = SEGMENT_BYTES) -> Signed:
    """The first publication of a learner that has loaded these weights."""
    state: dict[str, BitTensor] = {n: bit_tensor(t.to(torch.bfloat16)) for n, t in tensors.items()}
    payloads: list[ByteArray] = [
        segment.payload for segment in encode("full", None, state, segment_bytes=segment_bytes)
    ]
    signed, at = [], 0
    for index, part in enumerate(payloads):
        hashes = chunk_hashes(part.data, CHUNK_BYTES)
        signed.append(SIGNER.segment(SegmentHeader(KEY, "", index, at, part.size, CHUNK_BYTES, hashes)))
        at += part.size
    payload = b"".join(part.tobytes() for part in payloads)
    return Signed(signed, SIGNER.manifest(manifest_for(payload, len(signed), KEY)), payload)


def makes(folder: Path, publication: Signed) -> list[bool]:
    """Say of each segment if it is made; a made one must be as it was signed."""
    segments = ModelSegments(folder, CHUNK_BYTES, segment_bytes=SEGMENT_BYTES)
    found = []
    for segment in publication.segments:
        header = segment.header
        made = segments.make(header)
        want = publication.payload[header.offset_bytes : header.offset_bytes + header.size_bytes]
        assert made is None or made.tobytes() == want
        found.append(made is not None)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    bounds = torch.iinfo(integer)
    torch.manual_seed(0)
    bits = torch.randint(bounds.min, bounds.max, (200_000,), dtype=integer)
    halves = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x00008000, 0x7F7FFFFF], dtype=torch.int32)
    numbers = torch.cat([bits.view(dtype), halves.view(torch.float32).to(dtype)])
    numbers = numbers[~numbers.isnan()]
    ours = as_bfloat16(bit_tensor(numbers).bits, str(dtype).removeprefix("torch."))
    assert np.array_equal(ours, bit_tensor(numbers.to(torch.bfloat16)).bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_files_make_the_whole_first_publication(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = weights(dtype)
    found = makes(folder_of(tensors, tmp_path), published(tensors))
    assert len(found) > 3
    assert all(found)


def test_a_tied_head_is_made_once(tmp_path: Path) -> None:
    tensors = weights()
    files = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert all(makes(folder_of(files, tmp_path, tied=True), published(tensors)))
    assert all(makes(folder_of(files, tmp_path, tied=False), published(files)))


def test_where_a_tensor_is_missing_or_too_many_nothing_wrong_is_made(tmp_path: Path) -> None:
    tensors = weights()
    less = {name: tensors[name] for name in sorted(tensors)[1:]}
    assert not any(makes(folder_of(less, tmp_path / "less"), published(tensors)))
    more = tensors | {"a.weight": torch.ones(5)}
    assert not any(makes(folder_of(more, tmp_path / "more"), published(tensors)))


def test_only_segments_of_other_weights_are_not_made(tmp_path: Path) -> None:
    tensors = weights()
    folder = folder_of(tensors, tmp_path)
    tensors["model.up.weight"][-1, -1] += 1.0
    *same, last = makes(folder, published(tensors))
    assert all(same)
    assert not last


def test_a_file_that_has_changed_since_makes_nothing(tmp_path: Path) -> None:
    folder, publication = folder_of(weights(), tmp_path), published(weights())
    segments = ModelSegments(folder, CHUNK_BYTES, segment_bytes=SEGMENT_BYTES)
    folder_of(weights(seed=2), folder)
    with pytest.raises(DataError, match="changed"):
        segments.make(publication.segments[-1].header)
    (folder / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="shorter"):
        segments.make(publication.segments[-1].header)


# --- on its way to a node ------------------------------------------------------------------------


def arrived(shelf: Shelf) -> bytes:
    (holding,) = shelf.complete()
    return b"".join(part.tobytes() for _, part in holding.segments())


def test_of_what_a_child_makes_its_parent_sends_the_headers_alone(tmp_path: Path) -> None:
    publication = published(weights())

    async def story(source: Shelf, target: Shelf) -> None:
        put(source, publication)
        folder = folder_of(weights(), tmp_path)
        target.makes = ModelSegments(folder, CHUNK_BYTES, segment_bytes=SEGMENT_BYTES).names
        await Link(source, target).drain()
        (holding,) = target.incomplete()
        assert len(holding.transfer.segments) == len(publication.segments)
        assert holding.transfer.manifest is not None
        assert target.received_bytes == 0

    on_shelves(story)


def test_what_a_child_does_not_make_is_sent(tmp_path: Path) -> None:
    tensors = weights()
    folder = folder_of(tensors, tmp_path)
    tensors["model.up.weight"][-1, -1] += 1.0
    publication = published(tensors)

    async def story(source: Shelf, target: Shelf) -> None:
        put(source, publication, num_chunks=0)
        target.makes = ModelSegments(folder, CHUNK_BYTES, segment_bytes=SEGMENT_BYTES).names
        link = Link(source, target)
        await link.drain()
        put(source, publication)  # the bytes come after the headers, as from a learner
        await link.drain()
        assert target.received_bytes == publication.segments[-1].header.size_bytes

    on_shelves(story)


def test_what_a_node_makes_is_whole_and_goes_on_to_its_children(tmp_path: Path) -> None:
    publication = published(weights(), segment_bytes=2**25)
    said: list[str] = []

    async def story(source: Shelf, target: Shelf) -> None:
        put(source, publication)
        maker = Maker(target, folder_of(weights(), tmp_path), CHUNK_BYTES, "xxh3", said.append)
        await maker.open()
        running = asyncio.create_task(maker.run())
        await Link(source, target).drain()
        while not target.complete():
            await target.changed.wait()
        assert (target.received_bytes, target.made_bytes) == (0, len(publication.payload))
        assert arrived(target) == publication.payload
        running.cancel()
        child = Shelf(Verifier(SIGNER.public_bytes()), LIMITS, SCRATCH)
        await Link(target, child).drain()
        assert arrived(child) == publication.payload
        child.close()

    on_shelves(story)
    assert said == []


def test_files_that_fail_are_told_and_their_weights_received(tmp_path: Path) -> None:
    publication = published(weights(), segment_bytes=2**25)
    said: list[str] = []

    async def story(source: Shelf, target: Shelf) -> None:
        put(source, publication)
        maker = Maker(target, folder_of(weights(), tmp_path), CHUNK_BYTES, "xxh3", said.append)
        await maker.open()
        folder_of(weights(seed=2), tmp_path)
        link = Link(source, target)
        await link.drain()
        await maker.run()  # ends
        assert not target.complete()
        link.reopen(0)
        await link.drain()
        assert arrived(target) == publication.payload
        assert target.made_bytes == 0

    on_shelves(story)
    (line,) = said
    assert str(tmp_path) in line
    assert "changed" in line


def test_a_folder_without_sound_files_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no")
    said: list[str] = []

    async def story(source: Shelf, target: Shelf) -> None:
        await Maker(target, tmp_path, CHUNK_BYTES, "xxh3", said.append).open()
        assert not target.makes

    on_shelves(story)
    assert len(said) == 1


# --- and the tracker -----------------------------------------------------------------------------


@pytest.mark.parametrize("made", [False, True])
def test_a_child_is_not_slow_because_its_parent_makes_its_weights(made: bool) -> None:
    """The parent's disk is ten times as fast as any link."""
    fleet = Fleet("ab")
    fleet.factor["a"] = 10.0
    fleet.extra["a"] = {"made": made}
    fleet.publish(0, 20_000)
    fleet.run(8.0)
    assert bool(fleet.tracker.all_stats()[-1].repairs) is not made
