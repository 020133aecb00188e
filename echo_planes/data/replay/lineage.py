"""Versions that work may be made of: those of this lineage, and those it descends from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from echo_planes.errors import LeaseError
from echo_planes.types import Trajectory

KEPT_VERSIONS = 4096  # beyond those that may still be trained; a checkpoint has all that are kept


class Lineage:
    """A line of published versions, each under one digest.

    A resume opens a new lineage that parts from the checkpoint's at the checkpoint's step. Versions up to
    there are versions of the new one too, so what was sampled under them can be gone on with; a later version
    of the old lineage comes from weights that are no more, and is forgotten. The new lineage publishes the
    step's version again. Should its digest differ, the new one counts. Versions that are older than any that
    is asked for are forgotten.

    Args:
        lineage: name of this run's line.
        published: of the checkpoint to continue from: lineage, version, digest, in the order of publication.
        step: of that checkpoint.
        kept: publications that are remembered, the newest.
    """

    def __init__(
        self,
        lineage: str,
        published: Iterable[tuple[str, int, str]] = (),
        step: int = 0,
        kept: int = KEPT_VERSIONS,
    ) -> None:
        self._lineage = lineage
        self._kept = kept
        self._published = {(line, version): digest for line, version, digest in published if version <= step}
        self._digests = {version: digest for (_, version), digest in self._published.items()}

    @property
    def digests(self) -> Mapping[int, str]:
        """Digest of every version of the line that is remembered."""
        return self._digests

    @property
    def published(self) -> tuple[tuple[str, int, str], ...]:
        """For a checkpoint: lineage, version and digest of every publication that is remembered."""
        return tuple((line, version, digest) for (line, version), digest in self._published.items())

    def publish(self, version: int, digest: str) -> None:
        """A version exists from now on.

        Raises:
            LeaseError: this lineage published it under another digest.
        """
        known = self._published.setdefault((self._lineage, version), digest)
        if known != digest:
            raise LeaseError(f"version {version} was published twice with different digests")
        self._digests[version] = digest
        while len(self._published) > self._kept:
            line, oldest = next(iter(self._published))
            del self._published[line, oldest]
            if (self._lineage, oldest) not in self._published:
                self._digests.pop(oldest, None)

    def has_made(self, trajectory: Trajectory) -> bool:
        """Whether it is of this lineage, and every token of a version of the line."""
        return trajectory.lineage == self._lineage and all(
            self._digests.get(span.version) == span.digest for span in trajectory.episode.spans
        )
