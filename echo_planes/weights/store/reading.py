"""Reader of a store of weights, and the store's format.

::

    public_key                                     64 hex digits: the key that signs all publications here
    objects/<BLAKE3 of the payload>                a publication's payload, whole
    publications/<sequence>-<lineage>.<version>.<codec>.<base>/
        segments.json                              the signed segment headers
        manifest.json                              the signed manifest
        READY                                      written last: readers ignore a folder without it

The reader does not trust the store. It checks every signature, every chunk against its signed hash, and every
size before it allocates memory. It records damaged or incomplete entries in `Store.bad` and no longer offers
them, so that the next plan avoids them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from blake3 import blake3

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, Manifest
from echo_planes.weights.store.objects import ObjectReader, StoreUnreachableError
from echo_planes.weights.store.paths import Entry
from echo_planes.weights.wire.frames import manifest_from_json, segments_from_json
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
_FOLDER = re.compile(r"([0-9]{8,18})-")  # beginning of a publication's folder name
_PARALLEL_READS = 8
_SIGNED_JSON_BYTES = 1024  # bound on JSON around a segment's chunk hashes, or around a manifest


class StoredPublication:
    """One publication of a store, with verified headers. Each read verifies the bytes."""

    def __init__(self, store: Store, entry: Entry, segments: tuple[SignedSegment, ...]) -> None:
        self._store = store
        self.entry = entry
        self.segments = segments

    @property
    def signed_manifest(self) -> SignedManifest:
        return self.entry.signed

    def read(self, index: int) -> ByteArray:
        """Return the bytes of one segment, shape (size_bytes,), with every chunk verified.

        Raises:
            WeightsError: missing or damaged; the entry is then in `Store.bad`.
            StoreUnreachableError: the store cannot be read now.
        """
        header = self.segments[index].header
        return self._store.read_segment(self.entry, header)

    def payload(
        self, make: Callable[[SegmentHeader], ByteArray | None] = lambda header: None
    ) -> Iterator[tuple[SignedSegment, ByteArray]]:
        """Yield every segment with its bytes, in order, and check the payload's digest at the end.

        `make` returns a segment that need not be read from the store, else None.

        Raises:
            WeightsError, StoreUnreachableError: as `read`; or another digest, which does not mark the entry.
        """
        hasher = blake3()
        for index, signed in enumerate(self.segments):
            data = make(signed.header)
            data = self.read(index) if data is None else data
            hasher.update(data.data)
            yield signed, data
        if f"b3:{hasher.hexdigest()}" != self.entry.manifest.payload_digest:
            raise WeightsError(f"{object_name(self.entry.manifest)} does not hold what it is named by")


class Store:
    """Reads a store, by blocking calls. Thread-safe.

    Args:
        objects: the store's objects.
        verifier: checks the signatures.
        limits: the largest publication to accept (`limits_for` the model, or `relay_limits`).
    """

    def __init__(self, objects: ObjectReader, verifier: Verifies, limits: TransferLimits) -> None:
        self.bad: dict[str, str] = {}  # entry name -> error
        self._objects = objects
        self._verifier = verifier
        self._limits = limits
        self._known: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def index(self) -> list[Entry]:
        """Return all usable publications, in the order they were stored.

        It reads each manifest once, because entries never change. Invalid entries go to `bad`.

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
        """Return the publication of an entry, with verified headers.

        Raises:
            WeightsError: a file is missing, damaged or forged; the entry is then in `bad`.
            StoreUnreachableError: the store cannot be read now.
        """
        name = f"{PUBLICATIONS}/{entry.name}/{SEGMENTS}"
        try:
            data = self._objects.read(name, _segments_limit(entry.manifest, self._limits))
            segments = segments_from_json(data, name)
            check_signed(entry.signed, segments, self._verifier, self._limits)
        except WeightsError as error:
            self._mark(entry.name, error)
            raise
        return StoredPublication(self, entry, segments)

    def read_segment(self, entry: Entry, header: SegmentHeader) -> ByteArray:
        """Do `StoredPublication.read` for the segment with this header."""
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
        """Return the names of the files in each publication's folder, by folder."""
        folders: dict[str, set[str]] = {}
        for name in self._objects.list(PUBLICATIONS):
            _, _, rest = name.partition("/")
            folder, _, file = rest.partition("/")
            if _FOLDER.match(folder):  # other folders are not the store's
                folders.setdefault(folder, set()).add(file)
        return folders

    def _read_entry(self, folder: str) -> Entry | None:
        name = f"{PUBLICATIONS}/{folder}/{MANIFEST}"
        try:
            data = self._objects.read(name, MAX_MANIFEST_BYTES + _SIGNED_JSON_BYTES)
            signed = manifest_from_json(data, name)
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
    """Return the folder of a publication. Up to sequence 99,999,999, folders sort in order of storing."""
    return f"{sequence:08d}-{key_text(key)}"


def sequence_of(folder: str) -> int:
    """Return the sequence number in a folder's name.

    Raises:
        WeightsError: the name is not a publication's folder.
    """
    match = _FOLDER.match(folder)
    if match is None:
        raise WeightsError(f"{folder} is no folder of a publication")
    return int(match[1])


def object_name(manifest: Manifest) -> str:
    """Return the name of the object with a publication's payload: the payload's BLAKE3.

    Raises:
        WeightsError: the payload's digest is not a BLAKE3 digest.
    """
    prefix, _, digits = manifest.payload_digest.partition(":")
    if prefix != "b3" or len(digits) != 2 * HASH_BYTES or not digits.isalnum():
        raise WeightsError(f"payload digest {manifest.payload_digest!r} is not b3: and 64 hex digits")
    return f"{OBJECTS}/{digits}"


def read_public_key(objects: ObjectReader) -> bytes:
    """Return the public key in a store, for inspection. Workers must not trust it: the store may be altered.

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
    """Check that manifest and segments are signed, belong together and are complete, by a `Transfer`.

    Raises:
        WeightsError: they are not.
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
    """Return the greatest possible size of segments.json, since a signed manifest bounds its chunks."""
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
