"""Canonical bytes: one for each message, and nothing but them is taken."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from echo_planes.errors import WeightsError
from echo_planes.weights.wire.manifest import (
    MAX_KEY_BYTES,
    MAX_MANIFEST_BYTES,
    PublicationKey,
    check_key,
    header_bytes,
    key_bytes,
    key_of,
    key_text,
    manifest_bytes,
    parse_header,
    parse_key,
    parse_key_text,
    parse_manifest,
)
from echo_planes.weights.wire.messages import decode
from tests.unit.wire import FULL, PATCH, header_of, manifest_for

MANIFEST = manifest_for(b"x" * 100, 1, PATCH)
HEADER = header_of(b"x" * 100, key=PATCH, index=3, offset_bytes=50)

keys = st.one_of(
    st.builds(
        lambda lineage, base, step, codec: PublicationKey(lineage, base + step, codec, base),
        st.from_regex(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}", fullmatch=True),
        st.integers(0, 2**62 - 1),
        st.integers(1, 2**62),
        st.sampled_from(["compact", "fast", "overwrite"]),
    ),
    st.builds(
        lambda lineage, version: PublicationKey(lineage, version, "full", -1),
        st.from_regex(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}", fullmatch=True),
        st.integers(0, 2**63 - 1),
    ),
)


@settings(deadline=None)
@given(keys)
def test_every_key_comes_back_from_each_of_its_forms(key: PublicationKey) -> None:
    data = key_bytes(key)
    assert len(data) <= MAX_KEY_BYTES
    assert parse_key(data + b"rest") == (key, len(data))
    assert parse_key_text(key_text(key)) == key
    assert decode(json.dumps(structs.asdict(key)), PublicationKey, "a key") == key


@pytest.mark.parametrize(
    "key",
    [
        PublicationKey("", 1, "full", -1),
        PublicationKey("../x", 1, "full", -1),
        PublicationKey(".hidden", 1, "full", -1),
        PublicationKey("a" * 65, 1, "full", -1),
        PublicationKey("L0\n", 1, "full", -1),
        PublicationKey("L0", -1, "full", -1),
        PublicationKey("L0", 2**63, "full", -1),
        PublicationKey("L0", True, "full", -1),
        PublicationKey("L0", 1, "full", 0),
        PublicationKey("L0", 1, "compact", 1),
        PublicationKey("L0", 1, "compact", -1),
        PublicationKey("L0", 10**5000, "full", -1),
        PublicationKey(3, 1, "full", -1),  # type: ignore[arg-type]
    ],
)
def test_keys_that_cannot_be_are_refused(key: PublicationKey) -> None:
    with pytest.raises(WeightsError):
        check_key(key)


@pytest.mark.parametrize("codec", ["zip", "", "my_codec:NAME", ["full"]])
def test_no_key_of_an_unknown_codec_can_be_made(codec: Any) -> None:
    with pytest.raises(WeightsError, match="unknown codec"):
        PublicationKey("L0", 1, codec, 0)
    text = msgspec.json.encode({"lineage": "L0", "version": 1, "codec": codec, "base_version": 0})
    with pytest.raises(WeightsError):
        decode(text, PublicationKey, "a key")


@pytest.mark.parametrize(
    "text",
    ["", "L0", "L0.1.full", "L0.01.full.-1", "L0.+1.full.-1", "L0.1.full.-1 ", "L0.1.zip.0", "x" * 999],
)
def test_only_the_name_of_a_publication_names_one(text: str) -> None:
    with pytest.raises(WeightsError):
        parse_key_text(text)


def test_headers_and_manifests_come_back() -> None:
    assert parse_header(header_bytes(HEADER)) == HEADER
    assert parse_header(memoryview(header_bytes(HEADER))) == HEADER
    assert parse_manifest(manifest_bytes(MANIFEST)) == MANIFEST
    assert key_of(MANIFEST) == PATCH


def test_an_empty_segment_is_a_segment() -> None:
    header = header_of(b"")
    assert header.num_chunks == 0
    assert parse_header(header_bytes(header)) == header


def test_the_longest_manifest_fits_its_bound() -> None:
    longest = replace(
        MANIFEST,
        lineage="L" * 64,
        codec="overwrite",
        version=2**63 - 1,
        base_version=2**63 - 2,
        base_digest="d" * 160,
        digest="d" * 160,
        payload_digest="d" * 160,
        num_updates=2**63 - 1,
        payload_bytes=2**63 - 1,
        dense_bytes=2**63 - 1,
        total_elements=2**63 - 1,
        changed_elements=2**63 - 1,
        num_segments=2**32 - 1,
    )
    assert len(manifest_bytes(longest)) <= MAX_MANIFEST_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        {"index": -1},
        {"index": 2**32},
        {"size_bytes": -1},
        {"size_bytes": 129},
        {"size_bytes": 64},
        {"offset_bytes": -1},
        {"offset_bytes": 2**63 - 50},
        {"chunk_bytes": 0},
        {"chunk_bytes": 2**32},
        {"chunk_bytes": 1.5},
        {"chunk_hashes": b""},
        {"chunk_hashes": "00" * 64},
        {"base_digest": ""},
        {"base_digest": "b3:é"},
        {"base_digest": "d" * 161},
        {"key": FULL},  # a base digest without a base
    ],
)
def test_headers_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(WeightsError):
        header_bytes(structs.replace(HEADER, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_updates": -1},
        {"payload_bytes": 1.0},
        {"dense_bytes": None},
        {"changed_elements": 501},
        {"total_elements": True},
        {"num_segments": 2**32},
        {"digest": 5},
        {"payload_digest": "b3:\n"},
        {"base_digest": ""},
        {"codec": "zip"},
        {"codec": {}},
        {"lineage": "a/b"},
        {"extra": 1},
    ],
)
def test_manifests_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    whole = asdict(MANIFEST) | fields
    with pytest.raises(WeightsError):
        parse_manifest(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode())
    if "extra" not in fields:
        with pytest.raises(WeightsError):
            manifest_bytes(replace(MANIFEST, **fields))


@pytest.mark.parametrize("missing", sorted(asdict(MANIFEST)))
def test_a_manifest_without_one_of_its_fields_is_refused(missing: str) -> None:
    fields = asdict(MANIFEST)
    del fields[missing]
    with pytest.raises(WeightsError):
        parse_manifest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def test_only_the_canonical_form_is_taken() -> None:
    text = manifest_bytes(MANIFEST)
    for other in (
        json.dumps(asdict(MANIFEST)).encode(),  # spaces, another order
        text + b" ",
        text.replace(b'{"base', b'{"version":8,"base', 1),  # a key twice
        text.replace(b'"L0"', b'"\\u004c0"'),
        b"[" * 4000,
        b"\xff" * 10,
        b'{"version":' + b"9" * 4000 + b"}",
        b" " * (MAX_MANIFEST_BYTES + 1),
    ):
        with pytest.raises(WeightsError):
            parse_manifest(other)


@settings(deadline=None)
@given(st.integers(0, len(header_bytes(HEADER)) - 1), st.integers(1, 255))
def test_no_two_headers_have_the_same_bytes(position: int, mask: int) -> None:
    data = bytearray(header_bytes(HEADER))
    data[position] ^= mask
    try:
        header = parse_header(bytes(data))
    except WeightsError:
        return
    assert header != HEADER
    assert header_bytes(header) == bytes(data)


@settings(deadline=None)
@given(st.integers(0, len(header_bytes(HEADER)) - 1))
def test_a_header_that_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(WeightsError):
        parse_header(header_bytes(HEADER)[:length])
