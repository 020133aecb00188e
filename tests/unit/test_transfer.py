"""One publication at one node: only what the learner signed counts, and what is missing is known."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from echo_planes.errors import WeightsError
from echo_planes.types import Codec, TensorSpec
from echo_planes.weights.codec.entry import encode
from echo_planes.weights.digest import BIT_DTYPES, BitTensor
from echo_planes.weights.wire.limits import limits_for
from echo_planes.weights.wire.manifest import SEGMENT_BYTES, SignedManifest, SignedSegment
from echo_planes.weights.wire.messages import decode
from echo_planes.weights.wire.signing import Signer, Verifier
from echo_planes.weights.wire.transfer import ChunkSet, ChunkSpan, Transfer
from tests.unit.wire import FULL, LIMITS, PATCH, SIGNER, Signed, header_of, manifest_for, signed

VERIFIER = Verifier(SIGNER.public_bytes())
PAYLOAD = random.Random(1).randbytes(1000)
PUBLICATION = signed(PAYLOAD, [300, 0, 64, 636])


def transfer(publication: Signed = PUBLICATION, *, segments: bool = True) -> Transfer:
    made = Transfer(publication.segments[0].header.key, VERIFIER, LIMITS)
    for segment in publication.segments if segments else ():
        assert made.add_segment(segment) == "accepted"
    return made


def fill(into: Transfer, publication: Signed = PUBLICATION) -> None:
    for at in publication.chunks:
        assert into.add_chunk(*at, publication.chunk(*at)) == "accepted"


# --- a whole transfer ----------------------------------------------------------------------------


def test_a_transfer_is_complete_with_manifest_and_all_chunks() -> None:
    one = transfer()
    spool = bytearray(one.num_bytes)
    order = PUBLICATION.chunks
    random.Random(2).shuffle(order)
    for done, at in enumerate(order):
        assert len(one.missing()) == len(order) - done
        assert not one.complete
        data = PUBLICATION.chunk(*at)
        assert one.add_chunk(*at, memoryview(data)) == "accepted"
        span = one.span(*at)
        spool[span.offset_bytes : span.offset_bytes + span.size_bytes] = data
    assert not one.complete
    one.commit(PUBLICATION.manifest)
    assert one.complete
    assert bytes(spool) == PAYLOAD
    assert one.bytes_have == one.num_bytes == len(PAYLOAD)
    assert one.manifest == PUBLICATION.manifest.manifest


def test_the_manifest_may_come_first() -> None:
    one = transfer(segments=False)
    one.commit(PUBLICATION.manifest)
    one.commit(PUBLICATION.manifest)
    assert not one.complete
    for segment in PUBLICATION.segments:
        one.add_segment(segment)
    fill(one)
    assert one.complete


def test_a_publication_without_segments_is_complete_at_once() -> None:
    one = Transfer(FULL, VERIFIER, LIMITS)
    one.commit(SIGNER.manifest(manifest_for(b"", 0)))
    assert one.complete


# --- segments ------------------------------------------------------------------------------------


def test_a_segment_again_is_a_duplicate_and_one_too_early_unknown() -> None:
    one = transfer(segments=False)
    assert one.add_segment(PUBLICATION.segments[1]) == "unknown"
    assert one.add_segment(PUBLICATION.segments[0]) == "accepted"
    assert one.add_segment(PUBLICATION.segments[0]) == "duplicate"
    assert one.add_segment(PUBLICATION.segments[1]) == "accepted"
    assert one.num_chunks == 5


def refused(one: Transfer, segment: SignedSegment, why: str) -> None:
    before = (one.num_chunks, one.num_bytes, list(one.segments))
    with pytest.raises(WeightsError, match=why):
        one.add_segment(segment)
    assert (one.num_chunks, one.num_bytes, list(one.segments)) == before


def test_segments_that_do_not_belong_are_refused() -> None:
    one = transfer(segments=False)
    one.add_segment(PUBLICATION.segments[0])
    header = PUBLICATION.segments[2].header
    forged = SignedSegment(structs.replace(PUBLICATION.segments[1].header, offset_bytes=0), bytes(64))
    refused(one, forged, "forged")
    refused(one, Signer.generate().segment(PUBLICATION.segments[1].header), "forged")
    refused(one, signed(PAYLOAD, key=PATCH).segments[0], "within")
    refused(one, SIGNER.segment(structs.replace(header, index=1, offset_bytes=301)), "begins at byte 301")
    refused(one, SIGNER.segment(structs.replace(header, index=1, offset_bytes=0)), "begins at byte 0")
    refused(one, SIGNER.segment(header_of(b"other", chunk_bytes=64)), "twice")
    refused(one, SignedSegment(header_of(b"other", chunk_bytes=64), bytes(64)), "forged")
    refused(one, SIGNER.segment(header_of(b"x", index=1, offset_bytes=300, chunk_bytes=15)), "chunks of 15")
    refused(one, SIGNER.segment(structs.replace(header, index=LIMITS.max_segments)), "at most")
    refused(one, SIGNER.segment(structs.replace(header, index=1, offset_bytes=2**26)), "at most")


def test_segments_of_one_publication_have_one_base() -> None:
    publication = signed(PAYLOAD, [500, 500], key=PATCH)
    other = SIGNER.segment(structs.replace(publication.segments[1].header, base_digest="xxh3:" + "a" * 32))
    one = Transfer(PATCH, VERIFIER, LIMITS)
    one.add_segment(publication.segments[0])
    refused(one, other, "other bases")
    first = SIGNER.segment(structs.replace(publication.segments[0].header, base_digest="xxh3:" + "a" * 32))
    two = Transfer(PATCH, VERIFIER, LIMITS)
    two.commit(publication.manifest)
    refused(two, first, "other bases")
    three = Transfer(PATCH, VERIFIER, LIMITS)
    three.add_segment(first)
    with pytest.raises(WeightsError, match="other bases"):
        three.commit(publication.manifest)


# --- the manifest --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_segments": 3}, "by its manifest"),
        ({"payload_bytes": 999}, "by its manifest"),
        ({"payload_bytes": 1001}, "by its manifest"),
        ({"num_segments": 5, "payload_bytes": 999}, "by its manifest"),
        ({"payload_bytes": 2**26 + 1}, "at most"),
        ({"num_segments": LIMITS.max_segments + 1}, "at most"),
        ({"version": 6}, "manifest of"),
        ({"lineage": "L1"}, "manifest of"),
    ],
)
def test_manifests_that_do_not_fit_are_refused(fields: dict[str, object], why: str) -> None:
    one = transfer()
    with pytest.raises(WeightsError, match=why):
        one.commit(SIGNER.manifest(replace(PUBLICATION.manifest.manifest, **fields)))  # type: ignore[arg-type]
    assert one.manifest is None
    one.commit(PUBLICATION.manifest)


def test_a_forged_manifest_is_refused_and_a_second_one_too() -> None:
    one = transfer()
    manifest = PUBLICATION.manifest.manifest
    for forged in (SignedManifest(manifest, bytes(64)), Signer.generate().manifest(manifest)):
        with pytest.raises(WeightsError, match="forged"):
            one.commit(forged)
    one.commit(PUBLICATION.manifest)
    with pytest.raises(WeightsError, match="two manifests"):
        one.commit(SIGNER.manifest(replace(manifest, digest="xxh3:" + "e" * 32)))
    assert one.manifest == manifest


def test_segments_beyond_the_manifest_are_refused() -> None:
    one = transfer(segments=False)
    one.commit(PUBLICATION.manifest)
    for segment in PUBLICATION.segments[:3]:
        one.add_segment(segment)
    last = PUBLICATION.segments[3].header
    refused(one, SIGNER.segment(header_of(b"x" * 635, index=3, offset_bytes=364)), "by its manifest")
    one.add_segment(PUBLICATION.segments[3])
    refused(one, SIGNER.segment(header_of(b"", index=4, offset_bytes=1000)), "by its manifest")
    assert one.segments[3].header == last


# --- chunks --------------------------------------------------------------------------------------


def test_chunks_are_judged_by_their_bytes_and_their_place() -> None:
    one = transfer()
    data = PUBLICATION.chunk(0, 1)
    flipped = bytes([data[0] ^ 1]) + data[1:]
    assert one.add_chunk(0, 1, flipped) == "damaged"
    assert one.add_chunk(0, 1, data[:-1]) == "damaged"
    assert one.add_chunk(0, 1, data + b"x") == "damaged"
    assert one.add_chunk(0, 1, b"") == "damaged"
    assert one.add_chunk(0, 2, data) == "damaged"
    assert one.add_chunk(3, 1, data) == "damaged"
    assert one.add_chunk(0, 5, data) == "damaged"
    assert one.add_chunk(0, -1, data) == "damaged"
    assert one.add_chunk(1, 0, b"") == "damaged"  # an empty segment has no chunk
    assert one.add_chunk(4, 0, data) == "unknown"
    assert one.add_chunk(-1, 0, data) == "unknown"
    assert one.num_damaged == 9
    assert len(one.have) == 0
    assert one.add_chunk(0, 1, data) == "accepted"
    assert one.add_chunk(0, 1, data) == "duplicate"
    assert one.add_chunk(0, 1, flipped) == "duplicate"
    assert one.bytes_have == len(data)


def test_a_chunk_before_its_segment_is_unknown() -> None:
    one = transfer(segments=False)
    assert one.add_chunk(0, 0, PUBLICATION.chunk(0, 0)) == "unknown"
    assert not one.have
    one.add_segment(PUBLICATION.segments[0])
    assert one.add_chunk(0, 0, PUBLICATION.chunk(0, 0)) == "accepted"


def test_chunk_numbers_run_through_the_segments() -> None:
    one = transfer()
    spans = [one.chunk_span(number) for number in range(one.num_chunks)]
    assert [span[:2] for span in spans] == PUBLICATION.chunks
    assert [one.chunk_number(*span[:2]) for span in spans] == list(range(one.num_chunks))
    assert spans[4] == ChunkSpan(0, 4, 256, 44)
    assert spans[5] == ChunkSpan(2, 0, 300, 64)
    end = 0
    for span in spans:
        assert span.offset_bytes == end
        end += span.size_bytes
    assert end == len(PAYLOAD)


@settings(deadline=None)
@given(st.sets(st.integers(0, 15)))
def test_verified_bytes_are_known_from_any_offset(have: set[int]) -> None:
    one = transfer()
    there = bytearray(len(PAYLOAD))
    for number in have:
        span = one.chunk_span(number)
        assert one.add_chunk(*span[:2], PUBLICATION.chunk(*span[:2])) == "accepted"
        there[span.offset_bytes : span.offset_bytes + span.size_bytes] = b"\1" * span.size_bytes
    for offset in range(len(PAYLOAD) + 2):
        gap = there.find(0, offset)
        expected = max(offset, gap if gap >= 0 else len(PAYLOAD)) if offset < len(PAYLOAD) else offset
        assert one.verified_end(offset) == expected
    assert one.verified_end(-1) == -1


# --- what a node has -----------------------------------------------------------------------------

numbers = st.sets(st.integers(0, 200))


def chunk_set(ranges: object, max_chunks: int) -> ChunkSet:
    """As from a peer's JSON."""
    return ChunkSet.of(decode(json.dumps(ranges), list[tuple[int, int]], "ranges"), max_chunks)


@settings(deadline=None)
@given(numbers)
def test_a_chunk_set_is_a_set(members: set[int]) -> None:
    chunks = ChunkSet()
    for number in [*members, *members]:
        chunks.add(number)
    assert len(chunks) == len(members)
    assert {n for n in range(-5, 300) if n in chunks} == members
    assert list(chunks.missing(150)) == [n for n in range(150) if n not in members]
    assert list(chunks.missing(150, 70)) == [n for n in range(70, 150) if n not in members]
    assert chunks.first_missing() == next(n for n in range(300) if n not in members)
    again = chunk_set(chunks.ranges(), 201)
    assert again.ranges() == chunks.ranges()
    assert len(again) == len(members)
    assert list(again.missing(300)) == list(chunks.missing(300))


@pytest.mark.parametrize(
    "ranges",
    [None, 5, {}, "[]", [5], [[1]], [[1, 2, 3]], [[1, "2"]], [[1, 2.0]], [[False, True]], [[2, 2]], [[3, 2]],
     [[-1, 2]], [[0, 11]], [[0, 2], [1, 3]], [[0, 2], [2, 3]], [[4, 5], [0, 1]], [[2**70, 2**71]]],
)  # fmt: skip
def test_only_ranges_in_order_are_a_chunk_set(ranges: object) -> None:
    with pytest.raises(WeightsError):
        chunk_set(ranges, 10)


@settings(deadline=None)
@given(st.recursive(st.integers() | st.text() | st.none() | st.floats(), st.lists, max_leaves=12))
def test_any_json_is_a_chunk_set_or_a_typed_error(value: object) -> None:
    try:
        chunks = chunk_set(value, 1000)
    except WeightsError:
        return
    assert list(map(list, chunks.ranges())) == value


# --- limits --------------------------------------------------------------------------------------


def specs(*shapes: tuple[int, ...], dtype: str = "bfloat16") -> dict[str, TensorSpec]:
    return {f"t{i}": TensorSpec(f"t{i}", dtype, shape) for i, shape in enumerate(shapes)}


def test_limits_grow_with_the_model() -> None:
    small, large = limits_for(specs((10, 10))), limits_for(specs((4096, 4096), (), (0,), (1,)))
    assert small.dense_bytes == 200
    assert small.total_elements == 100
    assert 200 < small.max_full_bytes < 2000
    dense = 2 * (4096 * 4096 + 2)
    assert large.dense_bytes == dense
    assert dense < large.max_full_bytes < dense + 8000
    assert 4 * dense < large.max_patch_bytes < 6 * dense  # an int64 index for each element
    assert large.max_segment_bytes >= min(SEGMENT_BYTES, dense) * 5
    assert large.max_chunks_per_segment * 4096 >= large.max_segment_bytes


def test_the_largest_payloads_of_a_model_fit_its_limits() -> None:
    model = specs((7, 9), (), (1,), (0, 3), dtype="float32")
    limits = limits_for(model)
    header = {
        name: {"dtype": "F32", "shape": list(spec.shape), "data_offsets": [10**6, 10**6]}
        for name, spec in model.items()
    }
    full_bytes = 8 + len(json.dumps(header)) + 8 + 4 * 65
    assert limits.max_full_bytes >= full_bytes
    assert limits.max_patch_bytes >= 2 * len(json.dumps(header)) + (4 + 8) * 65


@pytest.mark.parametrize("codec", ["compact", "fast", "overwrite", "full"])
def test_no_codec_needs_more_than_the_limits_allow(codec: Codec) -> None:
    rng = np.random.default_rng(3)
    model = specs((40, 50), (1,), (0, 3), (777,)) | {"f": TensorSpec("f", "float32", (30, 7))}
    states = []
    for _ in range(2):
        bits = {
            n: rng.integers(0, 2**16, math.prod(s.shape), BIT_DTYPES["bfloat16"]) for n, s in model.items()
        }
        bits["f"] = rng.integers(0, 2**32, 210, BIT_DTYPES["float32"])
        states.append({n: BitTensor(bits[n], s.dtype, s.shape) for n, s in model.items()})
    base = None if codec == "full" else states[0]
    payloads = [s.payload.size for s in encode(codec, base, states[1], segment_bytes=512)]
    limits = limits_for(model)
    assert sum(payloads) <= limits.max_payload_bytes(codec)
    assert max(payloads) <= limits.max_segment_bytes
    assert len(payloads) <= limits.max_segments


def test_a_model_that_no_codec_takes_is_refused() -> None:
    with pytest.raises(WeightsError, match="int8"):
        limits_for(specs((3,), dtype="int8"))


def test_a_manifest_of_another_model_is_refused() -> None:
    limits = limits_for(specs((500,)))
    manifest = manifest_for(b"x" * 100, 1)
    limits.check_manifest(manifest)
    for fields in ({"dense_bytes": 1001}, {"total_elements": 501}, {"payload_bytes": 10**6}):
        with pytest.raises(WeightsError):
            limits.check_manifest(replace(manifest, **fields))
    with pytest.raises(WeightsError, match="at most"):
        limits.check_header(header_of(b"x" * 5000, chunk_bytes=4096))
    limits.check_header(header_of(b"x" * 1000, chunk_bytes=4096))
