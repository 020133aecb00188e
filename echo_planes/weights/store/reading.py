"""Publications kept for later: anchors and the patches between them, in a folder or a bucket. Reading.

::

    public_key                                     64 hex digits: whose signatures count here
    objects/<BLAKE3 of the payload>                a publication's payload, whole
    publications/<sequence>-<lineage>.<version>.<codec>.<base>/
        segments.json                              the signed segment headers
        manifest.json                              the signed manifest
        READY                                      written last: only now the publication is there

A store is not believed: every signature is checked, every chunk against its signed hash, every size before
anything is allocated. What is damaged or missing is remembered in `Store.bad` and no longer offered, so that
the next plan goes another way.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from blake3 import blake3

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, Manifest
from echo_planes.weights.store.objects import ObjectReader, StoreUnreachableError
from echo_planes.weights.store.paths import Entry
from echo_planes.weights.wire.frames import manifest_from_json, segment_from_json
from echo_planes.weights.wire.limits import TransferLimits
from echo_planes.weights.wire.manifest import (
    HASH_BYTES,
    MAX_MANIFEST_BYTES,
    PublicationKey,
    SegmentHeader,
    SignedManifest,
    SignedSegment,
    key_of,
    key_text,
)
from echo_planes.weights.wire.transfer import Transfer, Verifies

OBJECTS, PUBLICATIONS, PUBLIC_KEY = "objects", "publications", "public_key"
SEGMENTS, MANIFEST, READY = "segments.json", "manifest.json", "READY"
KEY_DIGITS = 64
_FOLDER = re.compile(r"([0-9]{8,18})-")  # begins the folder of a publication
_PARALLEL_READS = 8
_SIGNED_JSON_BYTES = 1024  # of a segment's or a manifest's JSON, beside chunk hashes and a manifest's own


class StoredPublication:
    """One publication of a store, its headers verified; its bytes are verified as they are read."""

    def __init__(self, store: Store, entry: Entry, segments: tuple[SignedSegment, ...]) -> None:
        self._store = store
        self.entry = entry
        self.segments = segments

    @property
    def signed_manifest(self) -> SignedManifest:
        return self.entry.signed

    def read(self, index: int) -> ByteArray:
        """The bytes of one segment, shape (size_bytes,), each chunk as it was signed.

        Raises:
            WeightsError: missing or damaged; the store has marked the entry.
            StoreUnreachableError: the store cannot be read now.
        """
        header = self.segments[index].header
        return self._store.read_segment(self.entry, header)

    def payload(self) -> Iterator[tuple[SignedSegment, ByteArray]]:
        """Every segment with its bytes, in order; at its end, whether they make the manifest's payload.

        Raises as `read` does.
        """
        hasher = blake3()
        for index, signed in enumerate(self.segments):
            data = self.read(index)
            hasher.update(data.data)
            yield signed, data
        if f"b3:{hasher.hexdigest()}" != self.entry.manifest.payload_digest:
            raise WeightsError(f"{object_name(self.entry.manifest)} does not hold what it is named by")


class Store:
    """Reads a store. Blocking calls, safe to use from threads.

    Args:
        objects: where it lies.
        verifier: whose signatures count.
        limits: the largest publication that makes sense (`limits_for` the model, or `relay_limits`).
    """

    def __init__(self, objects: ObjectReader, verifier: Verifies, limits: TransferLimits) -> None:
        self.bad: dict[str, str] = {}  # entry name -> what is wrong with it
        self._objects = objects
        self._verifier = verifier
        self._limits = limits
        self._known: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def index(self) -> list[Entry]:
        """All usable publications, in the order they were stored.

        Manifests are read once: an entry never changes. One that is not what it should be goes to `bad`.

        Raises:
            StoreUnreachableError: the store cannot be read now.
        """
        ready = {name for name, files in self._folders().items() if READY in files}
        fresh = sorted(ready - self._known.keys() - self.bad.keys())
        with ThreadPoolExecutor(_PARALLEL_READS) as readers:
            found = [entry for entry in readers.map(self._read_entry, fresh) if entry is not None]
        with self._lock:
            self._known |= {entry.name: entry for entry in found}
            usable = [entry for name, entry in self._known.items() if name in ready and name not in self.bad]
        return sorted(usable, key=lambda entry: entry.sequence)

    def open(self, entry: Entry) -> StoredPublication:
        """The publication behind an entry, with its headers verified.

        Raises:
            WeightsError: a file is missing, damaged or forged; the entry is marked.
            StoreUnreachableError: the store cannot be read now.
        """
        name = f"{PUBLICATIONS}/{entry.name}/{SEGMENTS}"
        try:
            found = _parsed(self._objects.read(name, _segments_limit(entry.manifest, self._limits)), name)
            if not isinstance(found, list):
                raise WeightsError(f"{name} is not a list of segments")
            segments = tuple(segment_from_json(fields) for fields in found)
            check_signed(entry.signed, segments, self._verifier, self._limits)
        except WeightsError as error:
            self._mark(entry.name, error)
            raise
        return StoredPublication(self, entry, segments)

    def read_segment(self, entry: Entry, header: SegmentHeader) -> ByteArray:
        """Read one segment, as `StoredPublication.read` does, and raise as it does."""
        try:
            data = self._objects.read_range(
                object_name(entry.manifest), header.offset_bytes, header.size_bytes
            )
            _check_chunks(header, data)
        except WeightsError as error:
            self._mark(entry.name, error)
            raise
        return np.frombuffer(data, dtype=np.uint8)

    def _folders(self) -> dict[str, set[str]]:
        """Folder of each publication -> names of the files in it."""
        folders: dict[str, set[str]] = {}
        for name in self._objects.list(PUBLICATIONS):
            _, _, rest = name.partition("/")
            folder, _, file = rest.partition("/")
            if _FOLDER.match(folder):  # others are not ours: a file system's own, a person's
                folders.setdefault(folder, set()).add(file)
        return folders

    def _read_entry(self, folder: str) -> Entry | None:
        name = f"{PUBLICATIONS}/{folder}/{MANIFEST}"
        try:
            data = self._objects.read(name, MAX_MANIFEST_BYTES + _SIGNED_JSON_BYTES)
            signed = manifest_from_json(_parsed(data, name))
            self._verifier.check_manifest(signed)
            self._limits.check_manifest(signed.manifest)
            entry = Entry(folder, sequence_of(folder), signed)
            if folder != folder_name(entry.sequence, entry.key):
                raise WeightsError(f"{name} belongs to another publication, {key_text(entry.key)}")
        except StoreUnreachableError:
            raise
        except WeightsError as error:
            self._mark(folder, error)
            return None
        return entry

    def _mark(self, folder: str, error: WeightsError) -> None:
        if not isinstance(error, StoreUnreachableError):
            with self._lock:
                self.bad[folder] = str(error)


# --- names and sizes -----------------------------------------------------------------------------


def folder_name(sequence: int, key: PublicationKey) -> str:
    """The folder of the `sequence`-th publication stored. Sorted by name they are in that order."""
    return f"{sequence:08d}-{key_text(key)}"


def sequence_of(folder: str) -> int:
    """The inverse of `folder_name`, as far as the number goes.

    Raises:
        WeightsError: no such folder name.
    """
    match = _FOLDER.match(folder)
    if match is None:
        raise WeightsError(f"{folder} is no folder of a publication")
    return int(match[1])


def object_name(manifest: Manifest) -> str:
    """Name of the object with a publication's payload, made of the payload's own hash.

    Raises:
        WeightsError: the payload's digest is no BLAKE3.
    """
    prefix, _, digits = manifest.payload_digest.partition(":")
    if prefix != "b3" or len(digits) != 2 * HASH_BYTES or not digits.isalnum():
        raise WeightsError(f"payload digest {manifest.payload_digest!r} is not b3: and 64 hex digits")
    return f"{OBJECTS}/{digits}"


def read_public_key(objects: ObjectReader) -> bytes:
    """The key that a store says its publications are signed with: for a person, not for a worker.

    Raises:
        WeightsError: the store has none, or it is not 64 hex digits.
        StoreUnreachableError: the store cannot be read now.
    """
    text = objects.read(PUBLIC_KEY, KEY_DIGITS + 1)
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError as error:
        raise WeightsError(f"{PUBLIC_KEY} is not {KEY_DIGITS} hex digits") from error


def check_signed(
    signed: SignedManifest, segments: tuple[SignedSegment, ...], verifier: Verifies, limits: TransferLimits
) -> None:
    """Whether manifest and segments are signed, belong together and are complete, as for a transfer.

    Raises:
        WeightsError: they do not.
    """
    transfer = Transfer(key_of(signed.manifest), verifier, limits)
    transfer.commit(signed)
    for index, segment in enumerate(segments):
        if segment.header.index != index:
            raise WeightsError(f"segment {index} of {transfer.key} is missing")
        transfer.add_segment(segment)
    if len(transfer.segments) != signed.manifest.num_segments:
        raise WeightsError(f"{transfer.key} has {len(segments)} of {signed.manifest.num_segments} segments")


def _segments_limit(manifest: Manifest, limits: TransferLimits) -> int:
    """Bytes that segments.json can have: a signed manifest bounds the number of chunks."""
    chunks = manifest.payload_bytes // limits.min_chunk_bytes + manifest.num_segments
    return (manifest.num_segments + 1) * _SIGNED_JSON_BYTES + chunks * 2 * HASH_BYTES


def _check_chunks(header: SegmentHeader, data: bytes) -> None:
    view = memoryview(data)
    for index in range(header.num_chunks):
        chunk = view[index * header.chunk_bytes : (index + 1) * header.chunk_bytes]
        start = index * HASH_BYTES
        if blake3(chunk).digest() != header.chunk_hashes[start : start + HASH_BYTES]:
            raise WeightsError(
                f"chunk {index} of segment {header.index} of {key_text(header.key)} is damaged in the store"
            )


def _parsed(data: bytes, name: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{name} is not JSON: {error}") from error
