"""The engine's end of the wire: installs a publication wholly or not at all, proven by the live digest.

An install has five steps: check lineage, version, codec and base; decode, and check against the model;
write, keeping the old bits; digest the live tensors; probe. An error after the first write ends with the old
bits back in place, or with a `standing` that says they are not.

Generation is paused meanwhile, so a patch costs only one dense digest: the install before has proven what the
tensors were. Damage done to them since then shows after the patch, as a digest that is neither the new
version's nor, once the old bits are back, the old version's. The receiver then takes full publications only.
If the new bits cover all of the damage, the new version is sound. The receiver then finds the damage in the
replaced bits, whose expected digest follows the patch, and only counts it. A full publication covers every
weight, so the receiver digests all live tensors before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import xxhash

from echo_planes.errors import RunError, WeightsError
from echo_planes.types import Manifest, Publication, TensorSpec
from echo_planes.weights.codec.entry import Applied, Change, decode
from echo_planes.weights.digest import BitArray, BitTensor, StateHasher, bytes_digest, state_digest
from echo_planes.weights.lineage import Followed

_ALGORITHMS = {"xxh3": "xxh3", "b3": "blake3", "sha256": "sha256"}  # by the prefix of their digests
_REPLACED = re.compile(r"xxh3:[0-9a-f]{32}", re.ASCII)  # form of `digest_of_replaced`
_REPLACED_BYTES, _TRAILER_BYTES = 37, 104  # length of such a digest as text, and of the whole `trailer`
_READ_ELEMENTS = 1 << 20  # digested at once: what is made of them stays in a CPU's cache
INSTALLABLE = ("overwrite", "full")  # idempotent, and cheap to write
# sound: the live tensors are those of the last install, as far as the receiver has checked. damaged: they are
# not, and must not compute before a full publication is installed. broken: a failed install could not be
# undone; the engine must restart.
Standing = Literal["sound", "damaged", "broken"]


class Target(Protocol):
    """The live tensors of an engine, by Hugging Face name."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return the specs of the tensors, by name."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> BitTensor:
        """Return the present bits of one tensor, possibly as a view of live memory.

        `start`, `stop`: a run of its flat elements, whose shape is then (elements,).
        """
        ...

    def exchange(self, change: Change) -> Applied:
        """Write the new bits, and return the bits that they replaced. If it raises, nothing has changed."""
        ...


@dataclass(frozen=True, slots=True)
class Installed:
    """Lineage, version and digest of the weights that an install proved to be live."""

    lineage: str
    version: int
    digest: str


class Receiver:
    """Installs publications into `target`. Not for concurrent use; the engine must pause for an install.

    Args:
        target: the engine's live tensors.
        probe: raises `WeightsError` if the weights in place cannot serve; called at the end of each install.
    """

    def __init__(self, target: Target, probe: Callable[[], None] = lambda: None) -> None:
        self._target = target
        self._probe = probe
        self._followed = Followed()
        self._installed: Installed | None = None
        self._standing: Standing = "sound"
        self.digest_mismatches = 0  # times live tensors, or replaced bits, had another digest than expected

    @property
    def installed(self) -> Installed | None:
        """Version that the last successful install put in place; None before the first."""
        return self._installed

    @property
    def standing(self) -> Standing:
        """State of the live tensors. After a failed install they may compute only if it is "sound"."""
        return self._standing

    def live_digest(self, algorithm: str | None = None) -> str:
        """Digest the target's tensors now; by default as the last install did (xxh3 if none)."""
        if algorithm is None:
            algorithm = algorithm_of(self.installed.digest) if self.installed else "xxh3"
        hasher, specs = StateHasher(algorithm), self._target.specs()
        for name in sorted(specs):
            dtype, shape = specs[name].dtype, specs[name].shape
            hasher.begin(name, dtype, shape)
            for start in range(0, size := math.prod(shape), _READ_ELEMENTS):
                run = self._target.read(name, start, min(start + _READ_ELEMENTS, size))
                if run.dtype != dtype:  # no bits that were ever published
                    return state_digest({one: self._target.read(one) for one in specs}, algorithm)
                hasher.update(run.bits)
        return hasher.digest()

    def install(self, publication: Publication) -> Installed:
        """Make the target's tensors exactly those of the publication, or leave them as they are.

        `install` does not hash the payload: `check_payload` does that while generation goes on. Damage that
        it misses gives a live digest other than the manifest's. Damage to live tensors that the new bits
        cover wholly is no error: it only raises `digest_mismatches`, if the publication has a
        `replaced_digest`.

        Raises:
            WeightsError: a codec that must be staged first, a malformed `replaced_digest`, an older version,
                a replaced lineage, a wrong base, tensors that do not fit the model, live tensors damaged
                since the last install, a live digest other than the manifest's, or the probe's error.
                `standing` is then "sound" (the live tensors are as they were before) or "damaged".
            RunError: this or an earlier install could not be undone; `standing` is "broken".
        """
        manifest = publication.manifest
        if self._standing == "broken":
            raise RunError("an install could not be taken back: restart this engine")
        if manifest.codec not in INSTALLABLE:
            raise WeightsError(
                f"version {manifest.version} is written as {manifest.codec}: it must be staged before an "
                "engine can take it"
            )
        _check_replaced(publication)
        self._followed.check(manifest.lineage, manifest.version)
        before = self._digest_before(manifest)
        if manifest.codec == "overwrite" and manifest.base_digest != before:
            raise WeightsError(
                f"version {manifest.version} patches version {manifest.base_version} "
                f"({manifest.base_digest}), but the live weights are {before}"
            )
        if manifest.codec == "overwrite" and self._standing == "damaged":
            raise WeightsError(
                f"version {manifest.version} patches weights that were damaged: a full publication mends them"
            )
        changes: Sequence[Change] = ()
        # An engine that has loaded the files of the first version has its bits already.
        if manifest.codec != "full" or before != manifest.digest:
            changes = decode(manifest.codec, publication.payload, 0, self._target.specs(), self._bits)
        done = self._replace(manifest, changes, before)
        expected = publication.replaced_digest
        if expected and self._digest_of_replaced(done) != expected:
            self.digest_mismatches += 1
        self._followed.reached(manifest.lineage, manifest.version)
        self._installed = Installed(manifest.lineage, manifest.version, manifest.digest)
        return self._installed

    def _bits(self, name: str) -> BitArray:
        return self._target.read(name).bits

    def _digest_of_replaced(self, done: Sequence[Applied]) -> str:
        return digest_of_replaced(applied.old for applied in done)

    def _digest_before(self, manifest: Manifest) -> str:
        algorithm = algorithm_of(manifest.digest)
        known = self.installed.digest if self.installed else ""
        if known and algorithm_of(known) == algorithm and manifest.codec != "full":
            return known
        # No digest of this algorithm is known, or the publication replaces all bits and hides any damage.
        before = self.live_digest(algorithm)
        if known and algorithm_of(known) == algorithm and before != known:
            self.digest_mismatches += 1
            self._standing = "damaged"
        return before

    def _replace(self, manifest: Manifest, changes: Sequence[Change], before: str) -> list[Applied]:
        done: list[Applied] = []
        standing: Standing = self._standing
        self._standing = "broken"  # until the new or the old weights are proven to be in place
        try:
            for change in changes:
                done.append(self._target.exchange(change))
            digest = self.live_digest(algorithm_of(manifest.digest))
            if digest != manifest.digest:
                self.digest_mismatches += 1
                raise WeightsError(
                    f"version {manifest.version} must have digest {manifest.digest}, the live weights "
                    f"came to {digest}"
                )
            self._probe()
        except BaseException as error:  # half-applied weights must not stay, whatever the error
            try:
                self._restore(done)
                found = self.live_digest(algorithm_of(before))
            except Exception as worse:  # noqa: BLE001  a device may raise anything; it becomes a fatal error
                raise RunError(
                    f"the old weights could not be put back ({worse}): restart this engine. Version "
                    f"{manifest.version} had failed: {error}"
                ) from error
            self._standing = standing if found == before else "damaged"
            if found != before and isinstance(error, WeightsError):
                raise WeightsError(
                    f"the live weights were damaged since their last install: they must be {before} and are "
                    f"{found}; a full publication mends them. Found when version {manifest.version} came: "
                    f"{error}"
                ) from error
            raise
        self._standing = "sound"
        return done

    def _restore(self, done: Sequence[Applied]) -> None:
        for applied in reversed(done):
            change = applied.change
            self._target.exchange(Change(change.name, change.start, change.indices, applied.old))
        for applied in done:
            change, bits = applied.change, self._bits(applied.change.name)
            run = slice(change.start, change.start + applied.old.size)
            if not np.array_equal(bits[run if change.indices is None else change.indices], applied.old):
                raise RunError(f"tensor {change.name!r} did not take its old bits")


def check_payload(publication: Publication) -> None:
    """Check that the payload is the manifest's. Call it before generation pauses for the install.

    Raises:
        WeightsError: it has another size or digest.
    """
    manifest, payload = publication.manifest, publication.payload
    if payload.size != manifest.payload_bytes or bytes_digest(payload) != manifest.payload_digest:
        raise WeightsError(f"the payload of version {manifest.version} was damaged on its way")


def open_staged(manifest: Manifest, path: Path) -> Publication:
    """Map a staged file as a publication, without reading it yet.

    Raises:
        WeightsError: no such file, a size other than the manifest's (plus the `trailer` that a patch may
            have), or a damaged trailer.
    """
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="c")  # torch warns of arrays that cannot be written to
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise WeightsError(f"cannot open the staged version {manifest.version}: {error}") from error
    num_behind = mapped.size - manifest.payload_bytes
    if num_behind != 0 and (num_behind != _TRAILER_BYTES or manifest.codec != "overwrite"):
        raise WeightsError(
            f"the staged version {manifest.version} has {mapped.size} bytes, its manifest says "
            f"{manifest.payload_bytes}"
        )
    payload, behind = mapped[: manifest.payload_bytes], mapped[manifest.payload_bytes :].tobytes()
    replaced = behind[:_REPLACED_BYTES].decode("ascii", "replace")
    if behind and behind != trailer(replaced):
        raise WeightsError(
            f"what the staged version {manifest.version} says it replaces was damaged: stage it again"
        )
    return Publication(manifest, payload, replaced)


def digest_of_replaced(old: Iterable[BitArray]) -> str:
    """Digest the bits that a patch replaces, in the order in which `decode` returns its changes.

    The algorithm is always xxh3, which finds damage, whatever algorithm the run's state digests have.
    """
    hashed = xxhash.xxh3_128()
    for bits in old:
        hashed.update(np.ascontiguousarray(bits).view(np.uint8).data)
    return f"xxh3:{hashed.hexdigest()}"


def trailer(replaced_digest: str) -> bytes:
    """Return the last bytes of a patch's staged file: its `Publication.replaced_digest` and a checksum.

    The checksum distinguishes damage to the file from damage to live weights.
    """
    text = replaced_digest.encode()
    return text + bytes_digest(np.frombuffer(text, np.uint8)).encode()


def _check_replaced(publication: Publication) -> None:
    manifest, replaced = publication.manifest, publication.replaced_digest
    if replaced and (manifest.codec != "overwrite" or not _REPLACED.fullmatch(replaced)):
        raise WeightsError(
            f"version {manifest.version} ({manifest.codec}) says that it replaces {replaced[:80]!r}; a patch "
            "names the xxh3 digest of the bits, a full publication nothing"
        )


def algorithm_of(digest: str) -> str:
    """Return the algorithm of `weights.digest` that made this digest: "xxh3", "blake3" or "sha256".

    Raises:
        WeightsError: the prefix is none of theirs.
    """
    algorithm = _ALGORITHMS.get(digest.partition(":")[0])
    if algorithm is None:
        raise WeightsError(
            f"{digest[:80]!r} is no digest of weights: it begins with none of xxh3:, b3:, sha256:"
        )
    return algorithm
