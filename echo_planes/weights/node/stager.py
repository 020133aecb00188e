"""Stager beside a worker's engine: turns verified publications into one file that the engine can install.

The stager keeps a shadow in host memory: the whole state as it last staged it. It decodes a publication
against the shadow, applies it, and compares the shadow's digest with the manifest's. If they differ, it
restores the shadow bit for bit. Generation goes on meanwhile. The engine gets a file of new bits (codec
`overwrite`, or `full`), relative to the version that it last reported, however many publications came since.
A patch's file ends with a digest of the bits that it replaces, as they were in that version. With this digest
the engine finds damage to them, which the new bits would hide.

Memory: one dense copy; the positions changed since the engine's version with their old bits, at most another
copy; some segments; and at most one more copy at a time for the bits that a publication replaces while it is
applied, or for the positions and old bits merged while a file is written.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from blake3 import blake3

from echo_planes.errors import ClusterError, WeightsError
from echo_planes.types import ByteArray, Manifest, Publication, TensorSpec
from echo_planes.weights.codec.dense import full_specs, overwrite_pieces
from echo_planes.weights.codec.entry import Change, Patcher, apply, decode, encode, full_payload
from echo_planes.weights.digest import (
    BIT_DTYPES,
    BitArray,
    BitTensor,
    StateHasher,
    bytes_digest,
    state_digest,
)
from echo_planes.weights.lineage import Followed
from echo_planes.weights.node.staging_steps import (
    Step,
    Touched,
    putting_back,
    touched_since,
    undo_all,
    write_run,
)
from echo_planes.weights.receiver import (
    Installed,
    algorithm_of,
    digest_of_replaced,
    open_staged,
    trailer,
)


@dataclass(frozen=True, slots=True)
class Staged:
    """A version ready for an engine: `path` holds the payload that `manifest` describes.

    In a patch's file `receiver.trailer` follows the payload; the manifest does not count it.
    """

    manifest: Manifest
    path: Path

    def publication(self) -> Publication:
        """Return it as `Engine.install` takes it: the file is mapped, not read.

        Raises:
            WeightsError: the file is gone, of another size, or has a damaged trailer.
        """
        return open_staged(self.manifest, self.path)


class Stager:
    """The shadow and the staged files. Safe to call from several threads; `stage` takes seconds.

    Args:
        specs: the engine's model: other tensors are refused. None: learnt from the first full publication.
        folder: folder for the staged files, memory-backed if there is room; made if missing.
        digest_algorithm: algorithm of the run's state digests: xxh3, blake3 or sha256.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec] | None, folder: Path, digest_algorithm: str = "xxh3"
    ) -> None:
        self._specs = dict(specs) if specs is not None else None
        self._folder = folder
        self._algorithm = digest_algorithm
        self._lock = threading.Lock()
        self._shadow: dict[str, BitTensor] = {}
        self._followed = Followed()
        self._manifest: Manifest | None = None
        self._engine: Installed | None = None  # version that the engine last reported; None: unknown
        self._steps: list[Step] = []  # publications applied since that version, oldest first
        self._files: list[Staged] = []  # at most the one in the engine's hands and the newest, in this order
        self._handed: Staged | None = None  # the file that `current` returned last: the engine may open it
        self._num_files = 0

    @property
    def manifest(self) -> Manifest | None:
        """Published manifest of the shadow's version; None before the first and after `reset`."""
        return self._manifest

    def stage(self, manifest: Manifest, segments: Iterable[tuple[int, ByteArray]]) -> Staged:
        """Apply a publication whose manifest and chunks were verified, and write the engine's file.

        Args:
            segments: (offset in the payload, bytes) in order, each as it was signed; may be lazy.

        Raises:
            WeightsError: an older version or replaced lineage, another base than the shadow, tensors that
                are not the model's, or a digest other than the manifest's. The shadow is as it was.
            ClusterError: the file could not be written. The publication is applied; `current` tries again.
        """
        with self._lock:
            self._check(manifest)
            checked = _whole(manifest, segments)
            reached = Installed(manifest.lineage, manifest.version, manifest.digest)
            step = Step(reached, sum(tensor.nbytes for tensor in self._shadow.values()))
            if manifest.codec == "full":
                self._fill(manifest, checked, step)
            else:
                self._patch(manifest, checked, step)
            self._followed.reached(manifest.lineage, manifest.version)
            self._manifest = manifest
            self._remember(step)
            return self._current(manifest, fresh=False)

    def current(self, *, fresh: bool = False) -> Staged:
        """Return the file that brings the engine from the version it last reported to the shadow's.

        It stays, whatever is staged meanwhile, until `settled`, `reset`, or the next call.

        Args:
            fresh: write a new full file: for an engine with damaged weights, or one that could not use the
                last file.

        Raises:
            WeightsError: nothing was staged yet.
            ClusterError: the file could not be written.
        """
        with self._lock:
            self._handed = self._current(self._held(), fresh=fresh)
            return self._handed

    def settled(self, version: int, ok: bool) -> None:
        """Note that the engine has installed `version` (`ok`) or refused it: then its next file is full."""
        with self._lock:
            reached = [i for i, step in enumerate(self._steps) if step.reached.version == version]
            if ok and reached:
                self._engine = self._steps[reached[-1]].reached
                del self._steps[: reached[-1] + 1]
            elif not ok or self._engine is None or self._engine.version != version:
                self._engine = None
            # A file that was refused may be damaged itself, so it is not handed out again.
            self._drop_files(lambda staged: not ok or staged.manifest.version <= version)

    def reset(self) -> None:
        """Forget the shadow, which may be damaged, and start again from a full publication.

        That may be any version of the present lineage. The specs of the tensors stay, and replaced lineages
        stay void.
        """
        with self._lock:
            self._specs = self._specs or {name: t.spec(name) for name, t in self._shadow.items()} or None
            self._shadow, self._manifest, self._engine = {}, None, None
            self._steps.clear()
            self._followed.reopen()
            self._drop_files(lambda _: True)

    def snapshot(self) -> Publication:
        """Return the shadow's version in full, for a worker that lacks its base.

        Makes a dense copy, and needs room for a second one meanwhile.

        Raises:
            WeightsError: nothing was staged yet.
        """
        with self._lock:
            payload = full_payload(self._shadow)
            return Publication(_restated(self._held(), payload.size, bytes_digest(payload), None), payload)

    def read(self, name: str) -> BitArray:
        """Return one tensor's bits in the shadow, flat: a view that the next `stage` changes.

        Raises:
            WeightsError: no such tensor.
        """
        tensor = self._shadow.get(name)
        if tensor is None:
            raise WeightsError(f"there is no tensor {name!r}")
        return tensor.bits

    def bits(self) -> Mapping[str, BitTensor]:
        """Return the shadow: views that the next `stage` changes."""
        return dict(self._shadow)

    # --- applying --------------------------------------------------------------------------------

    def _held(self) -> Manifest:
        if self._manifest is None:
            raise WeightsError("nothing was staged yet")
        return self._manifest

    def _check(self, manifest: Manifest) -> None:
        if algorithm_of(manifest.digest) != self._algorithm:
            raise WeightsError(
                f"version {manifest.version} is named by {manifest.digest[:20]}..., this run uses "
                f"{self._algorithm} digests"
            )
        self._followed.check(manifest.lineage, manifest.version)
        if manifest.codec != "full":
            have = self._manifest.digest if self._manifest else "nothing"
            if manifest.base_digest != have:
                raise WeightsError(
                    f"version {manifest.version} patches version {manifest.base_version} "
                    f"({manifest.base_digest}), but staged is {have}"
                )

    def _patch(self, manifest: Manifest, segments: Iterable[tuple[int, ByteArray]], step: Step) -> None:
        patcher = Patcher(manifest.codec, self._shadow, StateHasher(self._algorithm))
        replaced: list[Change] = []
        try:
            for _, segment in segments:
                for applied in patcher.apply(segment):
                    name, bits = applied.change.name, self._shadow[applied.change.name].bits
                    where = applied.change.indices
                    if where is None:
                        raise WeightsError(f"a patch of tensor {name!r} came without positions")
                    if manifest.codec == "overwrite":  # `where` is a view that keeps the whole segment
                        where = where.copy()
                    replaced.append(putting_back(name, where, applied.old, bits))
                    step.add(name, Touched(where, applied.old))
                patcher.applied.clear()  # `replaced` holds the same in a smaller form
            _check_digest(manifest, patcher.digest(self._algorithm))
        except BaseException:
            patcher.undo()
            undo_all(replaced, self._shadow)
            raise

    def _fill(self, manifest: Manifest, segments: Iterable[tuple[int, ByteArray]], step: Step) -> None:
        shadow, replaced = self._shadow, list[Change]()
        try:
            for offset_bytes, segment in segments:
                if offset_bytes == 0:
                    specs = full_specs(segment, manifest.payload_bytes)
                    _check_model(specs, self._specs or {name: t.spec(name) for name, t in shadow.items()})
                    shadow = shadow or {name: _zeros(spec) for name, spec in specs.items()}
                for change in decode("full", segment, offset_bytes, specs, self.read):
                    if self._shadow:
                        write_run(shadow[change.name].bits, change, replaced, step)
                    else:  # the first state replaces nothing
                        apply(change, shadow[change.name].bits)
            _check_digest(manifest, state_digest(shadow, self._algorithm))
        except BaseException:
            undo_all(replaced, shadow)
            raise
        self._shadow = shadow

    def _remember(self, step: Step) -> None:
        """Keep the step's changes for the engine's next file; free the oldest once a full file is smaller."""
        self._steps.append(step)
        while sum(kept.nbytes for kept in self._steps) > step.dense_bytes:
            next(kept for kept in self._steps if kept.nbytes).forget()
        forgotten = [i for i, kept in enumerate(self._steps) if kept.forgotten]
        if forgotten:
            del self._steps[: forgotten[-1]]
            self._engine = None

    # --- files -----------------------------------------------------------------------------------

    def _current(self, manifest: Manifest, *, fresh: bool) -> Staged:
        base = None if fresh else self._engine
        if fresh:
            self._drop_files(lambda staged: staged.manifest.codec == "full")
        newest = self._files[-1].manifest if self._files else None
        if (
            newest
            and (newest.lineage, newest.version) == (manifest.lineage, manifest.version)
            and (newest.codec == "full" or (base and newest.base_digest == base.digest))
        ):
            return self._files[-1]
        self._drop_files(lambda staged: staged is not self._handed)
        self._num_files += 1  # names are unique: the engine may be reading an earlier file
        path = self._folder / f"v{manifest.version}.{self._num_files}.safetensors"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            written = self._write_file(path, manifest, base)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise ClusterError(
                f"cannot stage version {manifest.version} in {self._folder}: {error}; it needs room for "
                f"2 copies of the model ({manifest.dense_bytes} bytes each)"
            ) from error
        self._files.append(Staged(written, path))
        return self._files[-1]

    def _write_file(self, path: Path, manifest: Manifest, base: Installed | None) -> Manifest:
        touched = touched_since(self._steps, self._shadow) if base else None
        pieces: Iterator[ByteArray]
        if touched is None:
            pieces = (segment.payload for segment in encode("full", None, self._shadow))
        else:
            pieces = overwrite_pieces({name: t.indices for name, t in touched.items()}, self._shadow)
        size_bytes, hashed = 0, blake3()
        with path.open("wb") as file:
            for piece in pieces:
                file.write(piece.data)
                hashed.update(piece.data)
                size_bytes += piece.size
            if touched is not None:
                file.write(trailer(digest_of_replaced(t.old for t in touched.values())))
        base = None if touched is None else base
        return _restated(manifest, size_bytes, f"b3:{hashed.hexdigest()}", base)

    def _drop_files(self, superseded: Callable[[Staged], bool]) -> None:
        for staged in [staged for staged in self._files if superseded(staged)]:
            self._files.remove(staged)
            staged.path.unlink(missing_ok=True)


def _restated(manifest: Manifest, size_bytes: int, payload_digest: str, base: Installed | None) -> Manifest:
    """Return the manifest of the same version written as new bits relative to `base`, or in full."""
    return replace(
        manifest,
        codec="overwrite" if base else "full",
        base_version=base.version if base else -1,
        base_digest=base.digest if base else "",
        payload_digest=payload_digest,
        payload_bytes=size_bytes,
        num_segments=1,
    )


def _zeros(spec: TensorSpec) -> BitTensor:
    return BitTensor(np.zeros(math.prod(spec.shape), BIT_DTYPES[spec.dtype]), spec.dtype, spec.shape)


def _whole(manifest: Manifest, segments: Iterable[tuple[int, ByteArray]]) -> Iterator[tuple[int, ByteArray]]:
    """Yield the same segments, and check that they make up the manifest's payload.

    Raises:
        WeightsError: they leave gaps, or are more or fewer.
    """
    covered = num_segments = 0
    for offset_bytes, segment in segments:
        if offset_bytes != covered or segment.size > manifest.payload_bytes - covered:
            raise WeightsError(
                f"version {manifest.version}: a segment of {segment.size} bytes at {offset_bytes} does "
                f"not follow {covered} of {manifest.payload_bytes} bytes"
            )
        yield offset_bytes, segment
        covered += segment.size
        num_segments += 1
    if (covered, num_segments) != (manifest.payload_bytes, manifest.num_segments):
        raise WeightsError(
            f"version {manifest.version} came as {covered} bytes in {num_segments} segments, its "
            f"manifest says {manifest.payload_bytes} in {manifest.num_segments}"
        )


def _check_digest(manifest: Manifest, digest: str) -> None:
    """Check that the state came out as published.

    Raises:
        WeightsError: it did not.
    """
    if digest != manifest.digest:
        raise WeightsError(
            f"version {manifest.version} must have digest {manifest.digest}, but came to {digest}"
        )


def _check_model(published: Mapping[str, TensorSpec], model: Mapping[str, TensorSpec]) -> None:
    """Check that the publication holds the model's tensors. An empty `model` is not known yet: any will do.

    Raises:
        WeightsError: it does not; the message names the first tensor that differs, and both shapes.
    """
    for name in sorted(published.keys() | model.keys()) if model else ():
        theirs, ours = published.get(name), model.get(name)
        if theirs != ours:
            raise WeightsError(
                f"tensor {name!r} is {_shown(theirs)} in the publication, {_shown(ours)} in this model"
            )


def _shown(spec: TensorSpec | None) -> str:
    return f"{spec.dtype} {spec.shape}" if spec else "missing"
