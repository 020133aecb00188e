"""Writer of a store of weights: stores publications, and removes those that the retention rule drops.

The order of writing makes a store safe to read at any moment: payload, headers, manifest, and READY last.
Removal goes in the reverse order: READY, the rest of the folder, payload.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from echo_planes.errors import ConfigError, WeightsError
from echo_planes.types import Manifest
from echo_planes.weights.store.objects import Objects, Piece, one_line
from echo_planes.weights.store.paths import Entry
from echo_planes.weights.store.reading import (
    KEY_DIGITS,
    MANIFEST,
    OBJECTS,
    PUBLIC_KEY,
    PUBLICATIONS,
    READY,
    SEGMENTS,
    Store,
    check_signed,
    folder_name,
    object_name,
    sequence_of,
)
from echo_planes.weights.store.retention import kept_entries
from echo_planes.weights.wire.frames import manifest_to_json, segments_to_json
from echo_planes.weights.wire.limits import TransferLimits
from echo_planes.weights.wire.manifest import SignedManifest, SignedSegment, key_of
from echo_planes.weights.wire.transfer import Verifies


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """Result of `put`: whether the publication is in the store. If not, `reason` says why."""

    stored: bool
    reason: str = ""
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class PruneOutcome:
    """Names of removed entries, and in `sweep` of removed objects. `reason`: the error that stopped it."""

    removed: tuple[str, ...]
    reason: str = ""


class StoreWriter(Store):
    """Store that only this process writes, from any of its threads. `prune` does not wait for a `put`.

    Args:
        objects, verifier, limits: as for `Store`.
        keep_patches, keep_snapshots: as for `retention.kept_entries`.
    """

    def __init__(
        self,
        objects: Objects,
        verifier: Verifies,
        limits: TransferLimits,
        *,
        keep_patches: int = 100,
        keep_snapshots: int = 10,
    ) -> None:
        super().__init__(objects, verifier, limits)
        if keep_patches < 1 or keep_snapshots < 1:
            raise ConfigError(
                f"weights.keep_patches={keep_patches} and weights.keep_snapshots={keep_snapshots}: "
                "both must be at least 1"
            )
        self._writable = objects
        self._keep_patches = keep_patches
        self._keep_snapshots = keep_snapshots
        self._last_sequence = 0
        self._being_written: set[str] = set()  # objects of publications that are on their way
        self._blobs = threading.Condition()  # publications with equal payloads share an object

    def claim(self, public: bytes) -> None:
        """Write the run's public key to the store; call it once at the start. `public`: Ed25519, 32 bytes.

        Raises:
            ConfigError: the store has another key; its versions must not be mixed with this run's.
            OSError, WeightsError: the store cannot be read or written now.
        """
        if self._writable.exists(PUBLIC_KEY):
            known = self._writable.read(PUBLIC_KEY, KEY_DIGITS + 1).decode("ascii", "replace").strip()
            if known != public.hex():
                raise ConfigError(
                    f"weights.store belongs to another key ({known[:16]}..., this run has "
                    f"{public.hex()[:16]}...): give another folder or prefix, or that run's weights.key_file"
                )
            return
        self._writable.write(PUBLIC_KEY, [public.hex().encode()])

    def put(
        self, signed: SignedManifest, segments: Sequence[SignedSegment], payload: Iterable[Piece]
    ) -> PutOutcome:
        """Store one publication, unless the store has it already.

        Args:
            signed: its manifest.
            segments: its headers, in order.
            payload: its bytes, in order, in pieces of any size. `put` hashes them, and stores the
                publication only if they are whole and undamaged. It may raise WeightsError and OSError.

        Returns:
            Whether it is in the store now. After an error, the store offers the same entries as before.
        """
        try:
            check_signed(signed, tuple(segments), self._verifier, self._limits)
            for entry in self.index():
                if entry.manifest == signed.manifest:
                    return PutOutcome(True, "it was there already", entry)
            return PutOutcome(True, entry=self._put(signed, segments, payload))
        except (OSError, WeightsError) as error:
            return PutOutcome(False, one_line(error))

    def prune(self) -> PruneOutcome:
        """Remove the entries that `retention.kept_entries` drops. Errors of the store become `reason`."""
        removed: list[str] = []
        try:
            entries = self.index()
            kept = kept_entries(entries, self._keep_patches, self._keep_snapshots)
            for entry in entries:
                if entry.name not in kept:
                    self._remove(entry)
                    removed.append(entry.name)
        except (OSError, WeightsError) as error:
            return PruneOutcome(tuple(removed), one_line(error))
        return PruneOutcome(tuple(removed))

    def sweep(self) -> PruneOutcome:
        """Remove half-written publications of a dead writer; call it once at the start, before any `put`.

        It removes payloads that no entry names only if it could read every entry, because an unreadable entry
        may name them. Errors of the store become `reason`.
        """
        removed: list[str] = []
        try:
            entries = self.index()
            ready = {entry.name for entry in entries} | self.bad.keys()
            for folder in self._folders().keys() - ready:
                self._writable.delete_folder(f"{PUBLICATIONS}/{folder}")
                removed.append(folder)
            blobs = {object_name(entry.manifest) for entry in entries}
            for name in () if self.bad else set(self._writable.list(OBJECTS)) - blobs:
                self._writable.delete(name)
                removed.append(name)
        except (OSError, WeightsError) as error:
            return PruneOutcome(tuple(removed), one_line(error))
        return PruneOutcome(tuple(sorted(removed)))

    def _put(
        self, signed: SignedManifest, segments: Sequence[SignedSegment], payload: Iterable[Piece]
    ) -> Entry:
        folder = folder_name(self._next_sequence(), key_of(signed.manifest))
        blob = object_name(signed.manifest)
        base = f"{PUBLICATIONS}/{folder}"
        with self._blobs:
            # Two writers of one object would mix their bytes, and the failure of one would remove it.
            self._blobs.wait_for(lambda: blob not in self._being_written)
            self._being_written.add(blob)
            is_named = self._is_named(blob)
        try:
            pieces = _checked(signed.manifest, payload)
            if is_named and self._writable.exists(blob):
                deque(pieces, maxlen=0)  # only checks them: a failed write would remove the object
            else:
                self._writable.write(blob, pieces)
            for name, data in entry_files(folder, signed, segments):
                self._writable.write(name, [data])
        except BaseException:
            self._discard(base, blob)
            raise
        entry = Entry(folder, sequence_of(folder), signed)
        with self._lock:
            self._known[folder] = entry
        self._written(blob)
        return entry

    def _next_sequence(self) -> int:
        with self._lock:
            there = [sequence_of(folder) for folder in self._folders()]
            self._last_sequence = max([self._last_sequence, *there]) + 1
            return self._last_sequence

    def _remove(self, entry: Entry) -> None:
        base = f"{PUBLICATIONS}/{entry.name}"
        self._writable.delete(f"{base}/{READY}")
        self._writable.delete_folder(base)
        with self._lock:
            self._known.pop(entry.name, None)
        self._delete_unused(object_name(entry.manifest))

    def _discard(self, base: str, blob: str) -> None:
        """Remove an incompletely written publication, ignoring errors of the store."""
        with contextlib.suppress(OSError):
            self._writable.delete_folder(base)
        self._written(blob)
        with contextlib.suppress(OSError):
            self._delete_unused(blob)

    def _written(self, blob: str) -> None:
        with self._blobs:
            self._being_written.remove(blob)
            self._blobs.notify_all()

    def _is_named(self, blob: str) -> bool:
        with self._lock:
            return any(object_name(entry.manifest) == blob for entry in self._known.values())

    def _delete_unused(self, blob: str) -> None:
        with self._blobs:
            if blob not in self._being_written and not self._is_named(blob):
                self._writable.delete(blob)


def entry_files(
    folder: str, signed: SignedManifest, segments: Iterable[SignedSegment]
) -> list[tuple[str, bytes]]:
    """Return (name, content) of one publication's files beside its payload, in the order to write them."""
    base = f"{PUBLICATIONS}/{folder}"
    return [
        (f"{base}/{SEGMENTS}", segments_to_json(segments)),
        (f"{base}/{MANIFEST}", manifest_to_json(signed)),
        (f"{base}/{READY}", b"ready\n"),
    ]


def _checked(manifest: Manifest, payload: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces of `payload`, and check at the end that they are the manifest's payload.

    Raises:
        WeightsError: another size or digest.
    """
    hasher, size_bytes = blake3(), 0
    for piece in payload:
        view = memoryview(piece).cast("B")
        hasher.update(view)
        size_bytes += view.nbytes
        yield piece
    if size_bytes != manifest.payload_bytes or f"b3:{hasher.hexdigest()}" != manifest.payload_digest:
        raise WeightsError(
            f"the payload of version {manifest.version} is not what its manifest says: {size_bytes} bytes, "
            f"expected {manifest.payload_bytes}"
        )
