"""One million chunks over links that flip, truncate, swap and replay: none installed, none forwarded.

A node's loop as it is: every round, what is missing is sent again; what a chunk's judge accepts is written to
the spool and forwarded, nothing else is. Each publication begins with other bytes, and the link replays
chunks of the one before under the new key too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from blake3 import blake3

from echo_planes.errors import WeightsError
from echo_planes.weights.wire.frames import (
    ChunkFrame,
    Frame,
    FrameParser,
    ManifestFrame,
    SegmentFrame,
    encode_frame,
)
from echo_planes.weights.wire.limits import TransferLimits, relay_limits
from echo_planes.weights.wire.manifest import PublicationKey
from echo_planes.weights.wire.signing import Verifier
from echo_planes.weights.wire.transfer import ChunkSpan, Transfer
from tests.thorough import THOROUGH
from tests.unit.wire import SIGNER, Signed, signed

CHUNK_BYTES = 1024
CHUNKS = 25_000  # of one publication
SEGMENTS = 10
PUBLICATIONS = 10  # at each rate: all four rates make a million chunks
RATES = (1e-4, 1e-3, 1e-2, 1e-1) if THOROUGH else (1e-3, 1e-1)
FLIP, TRUNCATE, SWAP, REPLAY, REPLAY_OLDER = range(5)
LIMITS = relay_limits(2 * CHUNKS * CHUNK_BYTES, min_chunk_bytes=CHUNK_BYTES)
VERIFIER = Verifier(SIGNER.public_bytes())


@dataclass
class Tally:
    """Counts of what went over the link, and of what came of it."""

    sent: int = 0  # transmissions
    sent_bytes: int = 0
    sent_again_bytes: int = 0
    corrupted: int = 0
    corrupted_bytes: int = 0
    forwarded_damage: int = 0
    installed_damage: int = 0


def publication(number: int, rng: np.random.Generator) -> Signed:
    payload = rng.bytes(CHUNKS * CHUNK_BYTES - 100)  # the last chunk is shorter
    size = CHUNKS // SEGMENTS * CHUNK_BYTES
    sizes = [size] * (SEGMENTS - 1) + [size - 100]
    key = PublicationKey("L0", number, "full", -1)
    return signed(payload, sizes, key=key, chunk_bytes=CHUNK_BYTES)


def opened(source: Signed) -> Transfer:
    transfer = Transfer(source.segments[0].header.key, VERIFIER, LIMITS)
    for segment in source.segments:
        transfer.add_segment(segment)
    return transfer


class CorruptLink:
    """Hands over chunks, each corrupted with probability `rate`, in one of five ways."""

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self._rate = rate
        self._rng = rng

    def carry(
        self, spans: list[ChunkSpan], payload: memoryview, older: memoryview, tally: Tally
    ) -> Iterator[tuple[ChunkSpan, memoryview, bool]]:
        """(address, bytes, whether the bytes at this address are the true ones) of what arrives."""
        hit = np.flatnonzero(self._rng.random(len(spans)) < self._rate)
        faults = dict(zip(hit.tolist(), self._rng.integers(0, 5, hit.size).tolist(), strict=True))
        others = self._rng.integers(0, len(spans), (hit.size, 2)).tolist()
        tally.sent += len(spans)
        tally.corrupted += len(faults)
        last = 0
        for position, span in enumerate(spans):
            data = payload[span.offset_bytes : span.offset_bytes + span.size_bytes]
            tally.sent_bytes += span.size_bytes
            fault = faults.get(position)
            if fault is None:
                yield span, data, True
                continue
            tally.corrupted_bytes += span.size_bytes
            other, place = others[last]
            last += 1
            if fault == FLIP:
                flipped = bytearray(data)
                flipped[place % len(flipped)] ^= 1 << (other % 8)
                yield span, memoryview(flipped), False
            elif fault == TRUNCATE:
                yield span, data[: place % len(data)], False
            elif fault == SWAP:  # another chunk's bytes under this one's address
                stranger = spans[other]
                taken = payload[stranger.offset_bytes : stranger.offset_bytes + stranger.size_bytes]
                yield span, taken, stranger == span
            elif fault == REPLAY:  # another chunk of the same publication instead, as it was sent
                again = spans[other]
                yield again, payload[again.offset_bytes : again.offset_bytes + again.size_bytes], True
            else:  # the same place in the publication before
                yield span, older[span.offset_bytes : span.offset_bytes + span.size_bytes], False


def receive(source: Signed, older: Signed, link: CorruptLink, tally: Tally) -> None:
    """One publication through the link into a node, until it is complete."""
    transfer = opened(source)
    transfer.commit(source.manifest)
    spool = bytearray(len(source.payload))
    payload, before = memoryview(source.payload), memoryview(older.payload)
    first_round = True
    while not transfer.complete:
        spans = [transfer.span(*at) for at in transfer.missing()]
        if not first_round:
            tally.sent_again_bytes += sum(span.size_bytes for span in spans)
        first_round = False
        for span, data, true in link.carry(spans, payload, before, tally):
            if transfer.add_chunk(span.segment_index, span.chunk_index, data) == "accepted":
                spool[span.offset_bytes : span.offset_bytes + len(data)] = data
                tally.forwarded_damage += not true
    tally.installed_damage += bytes(spool) != source.payload
    digest = f"b3:{blake3(spool).hexdigest()}"
    tally.installed_damage += digest != source.manifest.manifest.payload_digest


@pytest.mark.parametrize("rate", RATES)
def test_no_damage_is_installed_or_forwarded_and_only_it_is_sent_again(rate: float) -> None:
    rng = np.random.default_rng(int(1 / rate))
    tally = Tally()
    older = publication(0, rng)
    for number in range(1, PUBLICATIONS + 1):
        source = publication(number, rng)
        receive(source, older, CorruptLink(rate, rng), tally)
        older = source
    assert tally.sent >= PUBLICATIONS * CHUNKS
    assert tally.corrupted > 0.7 * rate * tally.sent
    assert tally.forwarded_damage == 0
    assert tally.installed_damage == 0
    assert tally.sent_again_bytes <= 1.1 * tally.corrupted_bytes


# --- the same on the stream itself: any byte may be hit, lengths and addresses too -----------------


def stream_of(source: Signed, spans: list[ChunkSpan]) -> bytes:
    frames: list[Frame] = [SegmentFrame(segment) for segment in source.segments]
    key = source.segments[0].header.key
    frames += [ChunkFrame(key, *span[:2], source.chunk(*span[:2])) for span in spans]
    frames.append(ManifestFrame(source.manifest))
    return b"".join(encode_frame(frame) for frame in frames)


def damaged(stream: bytes, rng: np.random.Generator, faults: int) -> bytes:
    """The stream with some bytes flipped, cut out, or put in twice."""
    data = bytearray(stream)
    for _ in range(faults):
        start, length = int(rng.integers(len(data))), int(rng.integers(1, 2000))
        match int(rng.integers(3)):
            case 0:
                data[start] ^= int(rng.integers(1, 256))
            case 1:
                del data[start : start + length]
            case _:
                data[start:start] = data[start : start + length]
    return bytes(data)


def hear(transfer: Transfer, frame: Frame) -> ChunkFrame | None:
    """Take a frame as a node does; return the chunk to write and forward, if it is an accepted one."""
    match frame:
        case SegmentFrame(segment) if segment.header.key == transfer.key:
            transfer.add_segment(segment)
        case ManifestFrame(manifest):
            transfer.commit(manifest)
        case ChunkFrame(key, segment_index, chunk_index, data) if key == transfer.key:
            if transfer.add_chunk(segment_index, chunk_index, data) == "accepted":
                return frame
    return None


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_with_damage_anywhere_ends_with_the_true_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = signed(rng.bytes(200 * 512), [80 * 512, 120 * 512], chunk_bytes=512)
    limits = relay_limits(2**20, min_chunk_bytes=16)
    transfer = Transfer(source.segments[0].header.key, VERIFIER, limits)
    sender = holder(source, limits)
    spool = bytearray(len(source.payload))
    connections = 0
    while not transfer.complete:
        connections += 1
        assert connections < 200, "the repair does not come to an end"
        parser = FrameParser(limits)
        lacking = transfer.have.missing(sender.num_chunks)
        stream = stream_of(source, [sender.chunk_span(number) for number in lacking])
        data = damaged(stream, rng, faults=int(rng.integers(4)))
        try:
            for start in range(0, len(data), 1000):
                for frame in parser.feed(data[start : start + 1000]):
                    chunk = hear(transfer, frame)
                    if chunk is not None:
                        assert bytes(chunk.data) == source.chunk(chunk.segment_index, chunk.chunk_index)
                        offset = transfer.span(chunk.segment_index, chunk.chunk_index).offset_bytes
                        spool[offset : offset + len(chunk.data)] = chunk.data
        except WeightsError:
            continue  # this connection is closed, the next one says what is missing
    assert bytes(spool) == source.payload


def holder(source: Signed, limits: TransferLimits) -> Transfer:
    """The sender's own transfer: everything is there."""
    transfer = Transfer(source.segments[0].header.key, VERIFIER, limits)
    for segment in source.segments:
        transfer.add_segment(segment)
    for at in source.chunks:
        transfer.add_chunk(*at, source.chunk(*at))
    return transfer
