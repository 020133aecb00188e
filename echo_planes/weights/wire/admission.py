"""Rule by which a node lets publications in at all: never back, never onto another base. Sans-I/O."""

from __future__ import annotations

from echo_planes.errors import WeightsError
from echo_planes.types import Manifest
from echo_planes.weights.lineage import Followed
from echo_planes.weights.wire.manifest import PublicationKey, key_of

_MAX_DIGESTS = 1024  # versions whose digests are remembered


class Admission:
    """Remembers what a node has come to: the newest version, its lineage, and the lineages before it.

    One lineage is followed at a time; the first that is committed, or named by `follow`, is it, and another
    one that is committed later (the learner restarted) replaces it for good.

    Args:
        only: the one lineage there is, where that is known; else an old run's publication, whose signature is
            as good, could retire the present lineage.
    """

    def __init__(self, only: str = "") -> None:
        self._only = only
        self._followed = Followed()
        self._digests: dict[int, str] = {}  # of the lineage's versions, as far as they are known

    @property
    def lineage(self) -> str:
        """The one that is followed; "": none yet."""
        return self._followed.lineage

    @property
    def newest_version(self) -> int:
        """Committed in it; -1: none."""
        return self._followed.version

    def check(self, key: PublicationKey, base_digest: str) -> None:
        """Whether a publication may come in: to be called with its first segment.

        A base that is not known here yet is let in: it may itself be on its way. Whoever installs checks
        the base again, against the weights themselves.

        Raises:
            WeightsError: of a lineage that was replaced, older than what is committed, or upon a base other
                than the one known here under that version.
        """
        self._check_current(key)
        known = self._digests.get(key.base_version) if key.lineage == self.lineage else None
        if key.codec != "full" and known is not None and known != base_digest:
            raise WeightsError(
                f"version {key.version} patches {base_digest}, but version {key.base_version} of "
                f"{key.lineage} is {known}"
            )

    def check_manifest(self, manifest: Manifest) -> None:
        """The same for a verified manifest, which also says what the version is.

        Raises:
            WeightsError: as `check`, or the version is known here with another digest.
        """
        self.check(key_of(manifest), manifest.base_digest)
        known = self._digests.get(manifest.version) if manifest.lineage == self.lineage else None
        if known is not None and known != manifest.digest:
            raise WeightsError(
                f"version {manifest.version} of {manifest.lineage} is {known} and cannot be {manifest.digest}"
            )

    def committed(self, manifest: Manifest) -> None:
        """The node has come to this version: its weights were staged, or written down, and proven.

        Raises:
            WeightsError: as `check_manifest`.
        """
        self.check_manifest(manifest)
        self.follow(manifest.lineage)
        self._followed.reached(manifest.lineage, manifest.version)
        self._digests[manifest.version] = manifest.digest
        while len(self._digests) > _MAX_DIGESTS:
            del self._digests[min(self._digests)]

    def follow(self, lineage: str) -> None:
        """Follow this lineage from now on: the one before it is void for good. The same again is no change.

        Raises:
            WeightsError: the lineage was replaced before.
        """
        if self._followed.follow(lineage):
            self._digests.clear()

    def _check_current(self, key: PublicationKey) -> None:
        if self._only and key.lineage != self._only:
            raise WeightsError(
                f"version {key.version} is of lineage {key.lineage}, this run's is {self._only}"
            )
        self._followed.check(key.lineage, key.version)
