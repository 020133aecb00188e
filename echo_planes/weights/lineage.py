"""The lineage that one process follows: its version never falls, and a replaced lineage stays void."""

from __future__ import annotations

from echo_planes.errors import WeightsError


class Followed:
    """State of the one lineage that is followed, and the lineages that it replaced.

    A signature never expires. Without this state, a replayed old publication would set a worker back.
    """

    def __init__(self) -> None:
        self.lineage = ""  # "": none yet
        self.version = -1  # the version in place; -1: any version may follow
        self._replaced: set[str] = set()

    def check(self, lineage: str, version: int) -> None:
        """Check that this version may follow. The present version again, and a new lineage, may.

        Raises:
            WeightsError: the version is older than the present one, or its lineage was replaced.
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
        """Follow this lineage, and void the one before for good. Return whether the lineage is new.

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
        """Allow any version of the present lineage again."""
        self.version = -1

    def reached(self, lineage: str, version: int) -> None:
        """Record that this version is in place.

        Raises:
            WeightsError: as `follow`.
        """
        self.follow(lineage)
        self.version = version
