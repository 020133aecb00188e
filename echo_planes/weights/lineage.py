"""The lineage of versions that one process follows: versions only rise, and a replaced lineage is void."""

from __future__ import annotations

from echo_planes.errors import WeightsError


class Followed:
    """One lineage at a time.

    A signature does not grow old: without this memory an old publication, sent again, would take a worker
    back.
    """

    def __init__(self) -> None:
        self.lineage = ""  # "": none yet
        self.version = -1  # the newest in place; -1: any may come
        self._replaced: set[str] = set()

    def check(self, lineage: str, version: int) -> None:
        """Whether this version may follow. The last one may come again, and so may another lineage.

        Raises:
            WeightsError: a version older than the last one, or of a lineage that was replaced.
        """
        if lineage in self._replaced:
            raise WeightsError(
                f"lineage {lineage} was replaced by {self.lineage}; its version {version} is void"
            )
        if lineage == self.lineage and version < self.version:
            raise WeightsError(
                f"version {version} of {lineage} is older than the present version {self.version}"
            )

    def follow(self, lineage: str) -> bool:
        """Follow this lineage from now on. Another one voids the one before for good; says whether it is.

        Raises:
            WeightsError: the lineage was replaced before.
        """
        if lineage in self._replaced:
            raise WeightsError(f"lineage {lineage} was replaced by {self.lineage}; it is void")
        is_new = lineage != self.lineage
        if is_new:
            self._replaced |= {self.lineage} - {""}
            self.lineage, self.version = lineage, -1
        return is_new

    def reopen(self) -> None:
        """Any version of the present lineage may come again."""
        self.version = -1

    def reached(self, lineage: str, version: int) -> None:
        """This version is in place.

        Raises:
            WeightsError: as `follow`.
        """
        self.follow(lineage)
        self.version = version
