"""The engine's end of the wire: installs a publication wholly or not at all, proven by the live digest.

An install goes: check what needs no weights (lineage, version, codec, base) -> decode and check against the
model -> write, keeping what was there -> digest the live tensors -> probe. From the first write on, whatever
goes wrong ends with the old bits back in place, or with a `standing` that says they are not.

Generation stands still meanwhile, so a patch costs one dense digest: what the tensors were before is known
from the install before. Damage done to them since then shows after the patch, as a digest that neither the
new version nor, once the old bits are back, the old version has; from then on only a full publication is
taken. Where the new bits cover all of the damage, the new version is sound: then the bits that were replaced
tell of it, by their digest behind the patch, and it is only counted. Before a full publication, which covers
everything, all live tensors are digested too.
"""

from __future__ import annotations

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
from echo_planes.weights.digest import BitArray, BitTensor, bytes_digest, state_digest
from echo_planes.weights.lineage import Followed

_ALGORITHMS = {"xxh3": "xxh3", "b3": "blake3", "sha256": "sha256"}  # by the prefix of their digests
_REPLACED = re.compile(r"xxh3:[0-9a-f]{32}", re.ASCII)  # what `digest_of_replaced` makes
_REPLACED_BYTES, _TRAILER_BYTES = 37, 104  # of such a digest as text; and with its check
INSTALLABLE = ("overwrite", "full")  # idempotent, and cheap to write
# sound: the live tensors are what the last install proved, as far as anybody looked. damaged: they are
# something else, and must not compute until a full publication mended them. broken: an install could not be
# taken back; nothing mends that.
Standing = Literal["sound", "damaged", "broken"]


class Target(Protocol):
    """Tensors that compute, by Hugging Face name."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Specs of the tensors, by name."""
        ...

    def read(self, name: str) -> BitTensor:
        """The bits of one tensor now; may be a view of live memory."""
        ...

    def exchange(self, change: Change) -> Applied:
        """Put the new bits in place, and return what they replaced; if it raises, nothing is changed."""
        ...


@dataclass(frozen=True, slots=True)
class Installed:
    """Lineage, version and digest that the live tensors were proven to be of."""

    lineage: str
    version: int
    digest: str


class Receiver:
    """Installs publications into `target`. Not for concurrent use; nothing may compute during an install.

    Args:
        target: the tensors that compute.
        probe: raises `WeightsError` if the weights in place cannot serve; called at the end of each install.
    """

    def __init__(self, target: Target, probe: Callable[[], None] = lambda: None) -> None:
        self._target = target
        self._probe = probe
        self._followed = Followed()
        self._installed: Installed | None = None
        self._standing: Standing = "sound"
        self.digest_mismatches = 0  # times live tensors were not what their digest had to be

    @property
    def installed(self) -> Installed | None:
        """Version that serves, as proven by the last install that succeeded."""
        return self._installed

    @property
    def standing(self) -> Standing:
        """Whether the live tensors may compute; to be asked after an install that failed."""
        return self._standing

    def live_digest(self, algorithm: str | None = None) -> str:
        """Canonical digest of the target's tensors, computed now; by default as the last install's was."""
        if algorithm is None:
            algorithm = algorithm_of(self.installed.digest) if self.installed else "xxh3"
        return state_digest({name: self._target.read(name) for name in self._target.specs()}, algorithm)

    def install(self, publication: Publication) -> Installed:
        """Make the target's tensors exactly those of the publication, or leave them as they are.

        The payload itself is not hashed here: `check_payload` does that while generation goes on, and what
        slips through ends in a live digest other than the manifest's. Damage that the new bits cover wholly
        is no error: `digest_mismatches` rises, if the publication says what it replaces.

        Raises:
            WeightsError: a codec that must be staged first, a malformed `replaced_digest`, older version,
                replaced lineage, wrong base, tensors that do not fit the model, live tensors that were
                damaged since the last install, or a live digest other than the manifest's; or the probe's.
                `standing` is then "sound" (the live tensors are as they were before) or "damaged".
            RunError: the old weights could not be put back, now or before; `standing` is "broken".
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
        # The first install, another algorithm than before, or old bits that will be gone afterwards.
        before = self.live_digest(algorithm)
        if known and algorithm_of(known) == algorithm and before != known:
            self.digest_mismatches += 1
            self._standing = "damaged"
        return before

    def _replace(self, manifest: Manifest, changes: Sequence[Change], before: str) -> list[Applied]:
        done: list[Applied] = []
        standing: Standing = self._standing
        self._standing = "broken"  # until either the new weights or the old ones are proven to be in place
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
        except BaseException as error:  # whatever stopped it, half-applied weights must not stay
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
    """Whether the payload is what its manifest says, before anything stands still for it.

    Raises:
        WeightsError: other bytes, or more or fewer.
    """
    manifest, payload = publication.manifest, publication.payload
    if payload.size != manifest.payload_bytes or bytes_digest(payload) != manifest.payload_digest:
        raise WeightsError(f"the payload of version {manifest.version} was damaged on its way")


def open_staged(manifest: Manifest, path: Path) -> Publication:
    """A payload that is a file, mapped and not read: pages come as they are needed.

    Raises:
        WeightsError: no such file, not of the size in the manifest (a patch may have its `trailer` behind
            it), or a damaged trailer.
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
    """Digest of the bits that a patch replaces, in the order in which `decode` gives its changes.

    It finds damage, as the xxh3 digest of a state does, whatever algorithm the run's digests have.
    """
    hashed = xxhash.xxh3_128()
    for bits in old:
        hashed.update(np.ascontiguousarray(bits).view(np.uint8).data)
    return f"xxh3:{hashed.hexdigest()}"


def trailer(replaced_digest: str) -> bytes:
    """Last bytes of a staged file of a patch: `Publication.replaced_digest`, and a check of it.

    The check keeps damage to the file from passing for damage to live weights.
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
    """Algorithm of `weights.digest` that made this digest: "xxh3", "blake3" or "sha256".

    Raises:
        WeightsError: none of them.
    """
    algorithm = _ALGORITHMS.get(digest.partition(":")[0])
    if algorithm is None:
        raise WeightsError(
            f"{digest[:80]!r} is no digest of weights: it begins with none of xxh3:, b3:, sha256:"
        )
    return algorithm
