"""Published versions of this lineage, and of the lineages it descends from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from echo_planes.errors import LeaseError
from echo_planes.types import Trajectory

KEPT_VERSIONS = 4096  # publications remembered beyond the S newest; a checkpoint holds all remembered ones


class Lineage:
    """Line of published versions, each under one digest.

    A resume opens a new lineage that branches off at the checkpoint's step. Versions up to that step belong
    to the new lineage too, so work sampled under them can be continued. Later versions of the old lineage
    come from weights that no longer exist, and are forgotten. The new lineage publishes the step's version
    again; if its digest differs, the new digest counts. Only the `kept` newest publications are remembered.

    Args:
        lineage: name of this run's line.
        published: the checkpoint's publications (lineage, version, digest), in order of publication.
        step: step of the checkpoint.
        kept: number of publications to remember.
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
        """Digest of every remembered version, by version."""
        return self._digests

    @property
    def published(self) -> tuple[tuple[str, int, str], ...]:
        """Lineage, version and digest of every remembered publication, for a checkpoint."""
        return tuple((line, version, digest) for (line, version), digest in self._published.items())

    def publish(self, version: int, digest: str) -> None:
        """Record a published version.

        Raises:
            LeaseError: this lineage has published the version under another digest.
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
        """Return whether a trajectory names this lineage, and every token a remembered version and digest."""
        return trajectory.lineage == self._lineage and all(
            self._digests.get(span.version) == span.digest for span in trajectory.episode.spans
        )
