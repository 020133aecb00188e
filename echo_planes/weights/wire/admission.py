"""Rule by which a node admits publications: no older versions, and no patch of an unequal base. Sans-I/O."""

from __future__ import annotations

from echo_planes.errors import WeightsError
from echo_planes.types import Manifest
from echo_planes.weights.lineage import Followed
from echo_planes.weights.wire.manifest import PublicationKey, key_of

_MAX_DIGESTS = 1024  # versions whose digests are remembered


class Admission:
    """Memory of a node's newest version, its lineage, and the lineages before it.

    A node follows one lineage at a time: the first that is committed or passed to `follow`. A later one (the
    learner restarted) replaces it for good.

    Args:
        only: the only lineage to admit; "": any. Without it, an old run's publication, which has a valid
            signature, could replace the present lineage.
    """

    def __init__(self, only: str = "") -> None:
        self._only = only
        self._followed = Followed()
        self._digests: dict[int, str] = {}  # by version of the followed lineage, where known

    @property
    def lineage(self) -> str:
        """The followed lineage; "": none yet."""
        return self._followed.lineage

    @property
    def newest_version(self) -> int:
        """Newest committed version of the followed lineage; -1: none."""
        return self._followed.version

    def check(self, key: PublicationKey, base_digest: str) -> None:
        """Check that the node may admit a publication; the caller calls it with the first segment.

        A patch of a base that is unknown here is admitted, since that base may be on its way. The installer
        checks the base again, against the weights themselves.

        Raises:
            WeightsError: the lineage was replaced or is not `only`, the version is older than the newest one
                committed, or the base version is known here with another digest.
        """
        self._check_current(key)
        known = self._digests.get(key.base_version) if key.lineage == self.lineage else None
        if key.codec != "full" and known is not None and known != base_digest:
            raise WeightsError(
                f"version {key.version} patches {base_digest}, but version {key.base_version} of "
                f"{key.lineage} is {known}"
            )

    def check_manifest(self, manifest: Manifest) -> None:
        """Check a verified manifest as `check` does, and the digest of its version.

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
        """Record that the node has this version, staged or stored, and verified.

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
        """Follow this lineage from now on; a different lineage followed before becomes void for good.

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
