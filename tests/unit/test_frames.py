"""Frames: whatever comes on a stream ends in frames or in one typed error, in bounded memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import WeightsError
from echo_planes.weights.wire.frames import (
    CancelFrame,
    ChunkFrame,
    Frame,
    FrameParser,
    ManifestFrame,
    PingFrame,
    SegmentFrame,
    chunk_head,
    encode_frame,
    manifest_from_json,
    manifest_to_json,
    segments_from_json,
    segments_to_json,
)
from echo_planes.weights.wire.limits import TransferLimits, relay_limits
from echo_planes.weights.wire.manifest import (
    MAX_KEY_BYTES,
    SignedManifest,
    SignedSegment,
    header_bytes,
    key_bytes,
    manifest_bytes,
    parse_header,
    parse_key,
    parse_manifest,
)
from echo_planes.weights.wire.signing import Verifier
from echo_planes.weights.wire.transfer import ChunkSet
from tests.thorough import examples
from tests.unit.wire import FULL, LIMITS, PATCH, SIGNER, frame_head, signed

PUBLICATION = signed(bytes(range(256)) * 2, [300, 212], key=PATCH)
FRAMES: list[Frame] = [
    PingFrame(),
    *(SegmentFrame(segment) for segment in PUBLICATION.segments),
    *(ChunkFrame(PATCH, *at, PUBLICATION.chunk(*at)) for at in PUBLICATION.chunks),
    ChunkFrame(PATCH, 9, 9, b""),
    CancelFrame(FULL),
    ManifestFrame(PUBLICATION.manifest),
]
STREAM = b"".join(encode_frame(frame) for frame in FRAMES)
SMALL = TransferLimits(2**16, 2**16, 2**16, 8, min_chunk_bytes=4096, max_chunk_bytes=4096)


def outcome(stream: bytes, cuts: list[int]) -> list[Frame] | None:
    """The frames of a stream that comes in pieces; None where it is refused."""
    parser = FrameParser(LIMITS)
    frames: list[Frame] = []
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    try:
        for start, stop in pairwise(bounds):
            frames += parser.feed(stream[start:stop])
    except WeightsError:
        with pytest.raises(WeightsError):
            parser.feed(encode_frame(PingFrame()))  # a stream never recovers by itself
        return None
    return frames


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**20), max_size=20))
def test_frames_come_back_however_the_stream_is_cut(cuts: list[int]) -> None:
    assert outcome(STREAM, cuts) == FRAMES


def test_frames_come_back_byte_by_byte() -> None:
    assert outcome(STREAM, list(range(len(STREAM)))) == FRAMES


def test_a_chunk_in_one_piece_is_not_copied() -> None:
    data = bytes(1000)
    frame = encode_frame(ChunkFrame(PATCH, 0, 0, data))
    assert frame == chunk_head(PATCH, 0, 0, len(data)) + data
    (parsed,) = FrameParser(LIMITS).feed(frame)
    assert isinstance(parsed, ChunkFrame)
    assert isinstance(parsed.data, memoryview)
    assert parsed.data.obj is frame
    assert parsed.data.readonly


def test_a_chunk_in_pieces_stays_as_it_was() -> None:
    frame = encode_frame(ChunkFrame(PATCH, 0, 0, b"a" * 1000))
    parser = FrameParser(LIMITS)
    assert parser.feed(frame[:500]) == []
    (first,) = parser.feed(frame[500:])
    parser.feed(encode_frame(ChunkFrame(PATCH, 0, 1, b"b" * 1000))[:700])
    assert isinstance(first, ChunkFrame)
    assert bytes(first.data) == b"a" * 1000


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (b"XX\2\5\0\0\0\0", "begins no frame"),
        (frame_head(0, 0), "unknown kind of frame 0"),
        (frame_head(6, 0), "unknown kind of frame 6"),
        (frame_head(5, 0), "a ping is padded"),
        (frame_head(5, 1) + b"x", "a ping is padded"),
        (frame_head(5, 2048) + bytes(2047) + b"x", "a ping is padded"),
        (frame_head(5, 2049), "at most 2048"),
        (frame_head(1, 0), "cut short"),
        (frame_head(2, 0), "cut short"),
        (frame_head(3, 0), "a manifest is not well formed"),
        (frame_head(4, 0), "cut short"),
    ],
)
def test_what_is_no_frame_is_refused(stream: bytes, why: str) -> None:
    with pytest.raises(WeightsError, match=why):
        FrameParser(LIMITS).feed(stream)


@pytest.mark.parametrize("version", [0, 1, 3, 255])
@pytest.mark.parametrize("kind", range(1, 7))
def test_frames_of_another_version_are_refused_whatever_they_hold(version: int, kind: int) -> None:
    known = {frame[3]: frame for frame in map(encode_frame, FRAMES)}
    stream = bytearray(known.get(kind, frame_head(kind, 0)))
    stream[2] = version
    with pytest.raises(WeightsError, match=f"version {version}; this node speaks version 2: run the same"):
        FrameParser(LIMITS).feed(stream)


def test_what_goes_over_the_wire_is_what_version_2_says() -> None:
    """A change here needs the next version in frames.py and wire.py: nodes would else misread others."""
    assert blake3(STREAM).hexdigest() == "fd6ebbe7bf64f228b5ff1f44da87c2e29f36ab2cc5eb36fc364b8a6d61477610"


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_a_length_is_refused_before_its_bytes_come(kind: int) -> None:
    parser = FrameParser(SMALL)
    with pytest.raises(WeightsError, match="at most"):
        parser.feed(frame_head(kind, 2**32 - 1))


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 32])
def test_bytes_behind_a_message_are_refused(extra: bytes) -> None:
    segment, manifest = PUBLICATION.segments[0], PUBLICATION.manifest
    for kind, body in (
        (1, segment.signature + header_bytes(segment.header)),
        (3, manifest.signature + manifest_bytes(manifest.manifest)),
        (4, key_bytes(PATCH)),
    ):
        whole = body + extra
        with pytest.raises(WeightsError):
            FrameParser(LIMITS).feed(frame_head(kind, len(whole)) + whole)


# --- fuzzing -------------------------------------------------------------------------------------


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 2**20), max_size=5))
def test_random_bytes_end_in_a_typed_error_or_in_nothing(data: bytes, cuts: list[int]) -> None:
    outcome(data, cuts)
    for kind in range(7):
        outcome(frame_head(kind, len(data)) + data, cuts)
    for parse in (parse_key, parse_header, parse_manifest):
        with pytest.raises(WeightsError):
            parse(data[:60])


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The valid stream with a few bytes flipped, cut out, doubled or put in."""
    stream = bytearray(STREAM)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(stream) - 1)))
        length = draw(st.integers(1, 40))
        kind = draw(st.sampled_from(["flip", "cut", "double", "insert"]))
        if kind == "flip" and start < len(stream):
            stream[start] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del stream[start : start + length]
        elif kind == "double":
            stream[start:start] = stream[start : start + length]
        else:
            stream[start:start] = draw(st.binary(max_size=40))
    return bytes(stream)


@settings(max_examples=examples(300), deadline=None)
@given(mutated(), st.lists(st.integers(0, 2**20), max_size=5))
def test_mutated_streams_end_in_frames_or_a_typed_error(stream: bytes, cuts: list[int]) -> None:
    frames = outcome(stream, cuts)
    assert frames == outcome(stream, [])  # the same, however it is cut
    for frame in frames or ():
        assert frame in FRAMES or encode_frame(frame) in stream  # nothing is made up


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
# As they were written before messages were typed, by SIGNER.
STORED_SEGMENTS = (
    b'[{"key":{"lineage":"L0","version":8,"codec":"compact","base_version":7},'
    b'"base_digest":"xxh3:00000000000000000000000000000000","index":0,"offset_bytes":0,"size_bytes":64,'
    b'"chunk_bytes":64,'
    b'"chunk_hashes":"4d006976636a8696d909a630a4081aad4d7c50f81afdee04020bf05086ab6a55",'
    b'"signature":"eac665d6242129fdec776371119c4e79ccc417c709442164b717a701cbd908a9'
    b'94c77865234c3ce5194de55492d271d3edfd7ef9ec53606526221e5ea0a94f07"}]'
)
STORED_MANIFEST = (
    b'{"manifest":{"lineage":"L0","version":8,"num_updates":8,"codec":"compact","base_version":7,'
    b'"base_digest":"xxh3:00000000000000000000000000000000",'
    b'"digest":"xxh3:11111111111111111111111111111111",'
    b'"payload_digest":"b3:4d006976636a8696d909a630a4081aad4d7c50f81afdee04020bf05086ab6a55",'
    b'"payload_bytes":64,"dense_bytes":1000,"changed_elements":10,"total_elements":500,"num_segments":1},'
    b'"signature":"7fa69516acb69bf5d27456637fbee4d21cdc0a38877a327faae22cf2b81a1f1c'
    b'ff6b43557dd4509af813163c82b6058e51b19fbc580a9be1b646c34e4ae38f0f"}'
)
SEGMENT_JSON = json.loads(segments_to_json(PUBLICATION.segments))[0]
MANIFEST_JSON = json.loads(manifest_to_json(PUBLICATION.manifest))


def segment_of(fields: object) -> SignedSegment:
    [segment] = segments_from_json(json.dumps([fields]).encode(), "segments.json")
    return segment


def manifest_of(fields: object) -> SignedManifest:
    return manifest_from_json(json.dumps(fields).encode(), "manifest.json")


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(sorted(SEGMENT_JSON)), json_values, json_values)
def test_any_json_is_a_segment_or_a_typed_error(name: str, value: Any, other: Any) -> None:
    for fields in (
        SEGMENT_JSON | {name: value},
        {**SEGMENT_JSON, "key": {**SEGMENT_JSON["key"], name: value}},
    ):
        try:
            segment = segment_of(fields)
        except WeightsError:
            continue
        assert json.loads(segments_to_json([segment])) == [fields]
    with pytest.raises(WeightsError):
        segment_of(other)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(sorted(MANIFEST_JSON["manifest"])), json_values, json_values)
def test_any_json_is_a_manifest_or_a_typed_error(name: str, value: Any, other: Any) -> None:
    for fields in (
        {**MANIFEST_JSON, "manifest": {**MANIFEST_JSON["manifest"], name: value}},
        {**MANIFEST_JSON, "signature": value},
        {**MANIFEST_JSON, "manifest": value},
    ):
        try:
            manifest = manifest_of(fields)
        except WeightsError:
            continue
        assert json.loads(manifest_to_json(manifest)) == fields
    with pytest.raises(WeightsError):
        manifest_of(other)


def test_json_comes_back_through_text() -> None:
    text = segments_to_json(PUBLICATION.segments)
    assert list(segments_from_json(text, "")) == list(PUBLICATION.segments)
    assert manifest_from_json(manifest_to_json(PUBLICATION.manifest), "") == PUBLICATION.manifest


def test_what_stands_in_stores_is_read_and_written_again_byte_for_byte() -> None:
    """The signatures are over the canonical bytes: they would not fit others."""
    verifier = Verifier(SIGNER.public_bytes())
    [segment] = segments_from_json(STORED_SEGMENTS, "segments.json")
    verifier.check_segment(segment)
    assert segments_to_json([segment]) == STORED_SEGMENTS
    manifest = manifest_from_json(STORED_MANIFEST, "manifest.json")
    verifier.check_manifest(manifest)
    assert manifest_to_json(manifest) == STORED_MANIFEST


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"index":0', b'"index":0,"more":1'),
        (b'"version":8', b'"version":8,"more":1'),
        (b'"index":0', b'"index":0.0'),
        (b'"index":0', b'"index":false'),
        (b'"index":0,', b""),
        (b'"chunk_bytes":64', b'"chunk_bytes":0'),
        (b'"L0"', b'"L0\\n"'),
        (b'"compact"', b'"zip"'),
        (b'"4d00', b'"4D00'),
        (b'"4d00', b'" 4d00'),
        (b'"base_version":7', b'"base_version":8'),
    ],
)
def test_a_stored_segment_with_another_field_is_refused_with_a_reason(old: bytes, new: bytes) -> None:
    assert STORED_SEGMENTS.count(old) == 1
    with pytest.raises(WeightsError, match=r"^[ -~]{20,400}$"):
        segments_from_json(STORED_SEGMENTS.replace(old, new), "segments.json")


@pytest.mark.parametrize("signature", ["", "00", "0" * 127, "0 " * 64, "A" * 128, "é" * 128, "00" * 65])
def test_json_signatures_have_one_form(signature: str) -> None:
    with pytest.raises(WeightsError):
        segment_of(SEGMENT_JSON | {"signature": signature})
    with pytest.raises(WeightsError):
        manifest_of(MANIFEST_JSON | {"signature": signature})


# --- memory --------------------------------------------------------------------------------------


def hostile_streams() -> list[bytes]:
    """Streams that claim far more than they hold, or hold as much as is allowed and never end."""
    segment = PUBLICATION.segments[0]
    body = bytearray(segment.signature + header_bytes(segment.header))
    place = len(body) - len(segment.header.chunk_hashes) - 24
    struct.pack_into("<IQQI", body, place, 0, 0, 2**62, 1)  # 2^62 chunks, by its own account
    huge = replace(PUBLICATION.manifest.manifest, payload_bytes=2**62, num_segments=2**32 - 1)
    return [
        frame_head(1, len(body)) + body,
        encode_frame(ManifestFrame(replace(PUBLICATION.manifest, manifest=huge))),
        *(frame_head(kind, 4096) for kind in (1, 2, 3)),
        *(frame_head(kind, 2**32 - 1) for kind in (1, 2, 3, 4, 5)),
        frame_head(2, 4096 + MAX_KEY_BYTES) + bytes(4000),
        frame_head(3, 4000) + b"[" * 4000,
        frame_head(3, 4000) + b'{"":' * 1000,
    ]


def test_memory_is_bounded_by_what_was_checked() -> None:
    streams = hostile_streams()
    parsers = [FrameParser(SMALL) for _ in streams]
    tracemalloc.start()
    try:
        for parser, stream in zip(parsers, streams, strict=True):
            try:
                for position in range(0, len(stream), 100):
                    parser.feed(stream[position : position + 100])
            except WeightsError:
                pass
        for ranges in ([(0, 2**62)], [(2**62, 2**62 + 1)], [(0, 1)] * 1000, [(-(2**62), 4)]):
            with pytest.raises(WeightsError):
                ChunkSet.of(ranges, SMALL.max_chunks)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Each parser may keep one unfinished frame; a refused JSON text of 4 KB is parsed once.
    assert peak < len(streams) * 2 * (4096 + MAX_KEY_BYTES) + 500_000


def test_an_unfinished_frame_takes_only_what_came() -> None:
    parser = FrameParser(relay_limits(2**40, max_chunk_bytes=2**31))
    tracemalloc.start()
    try:
        parser.feed(frame_head(2, 2**31) + bytes(1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000
