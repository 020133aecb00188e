"""Catch-up of a late worker: the cheapest way to a version through a store, the next best if that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from echo_planes.errors import WeightsError
from echo_planes.weights.store.paths import Cost, Entry, Position, cheapest_steps, payload_cost, way_to

Fetched = TypeVar("Fetched")


def plan_path(
    have: Position | None,
    lineage: str,
    want_version: int,
    entries: Iterable[Entry],
    cost: Cost = payload_cost,
    *,
    digest: str | None = None,
) -> list[Entry]:
    """The cheapest entries to apply, in order: an anchor and patches after it, or patches from `have`.

    Nothing to do (`have` is the wanted version already) is an empty list.

    Args:
        have: what the worker has now, or None.
        cost: of fetching and applying one entry; bytes unless told otherwise.
        digest: of the wanted state; None: whatever the entries say that version is.

    Raises:
        WeightsError: no way leads there.
    """
    ours = [entry for entry in entries if entry.manifest.lineage == lineage]

    def wanted(state: Position) -> bool:
        here = (state.lineage, state.version) == (lineage, want_version)
        return here and digest in (None, state.digest)

    if have is not None and wanted(have):
        return []
    steps = cheapest_steps(ours, cost, have)
    ways = [way_to(steps, goal) for goal in steps if wanted(goal)]
    if not ways:
        start = "nothing" if have is None else f"version {have.version} of lineage {have.lineage}"
        raise WeightsError(
            f"no way leads to version {want_version} of lineage {lineage} from {start}: {_stock(ours)}"
        )
    return min(ways, key=lambda way: (sum(cost(entry) for entry in way), len(way)))


def _stock(entries: Sequence[Entry]) -> str:
    if not entries:
        return "the store has nothing of this lineage"
    anchors = sorted(entry.manifest.version for entry in entries if entry.is_anchor)
    last = max(entry.manifest.version for entry in entries)
    shown = ", ".join(map(str, anchors[-3:])) or "none"
    return f"it has {len(entries)} usable entries up to version {last}, anchors at versions {shown}"


class CatchUp(Generic[Fetched]):
    """Goes such a way, fetching the next entry while it applies one; a bad entry costs a detour only.

    Args:
        entries: what the store holds.
        fetch: gets one entry's verified bytes; raises WeightsError for a missing or damaged one.
        apply: makes the worker's state that of the entry, or raises WeightsError and leaves it as it was.
        cost: as for `plan_path`.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        fetch: Callable[[Entry], Coroutine[Any, Any, Fetched]],
        apply: Callable[[Entry, Fetched], Coroutine[Any, Any, None]],
        cost: Cost = payload_cost,
    ) -> None:
        self._entries = list(entries)
        self._fetch = fetch
        self._apply = apply
        self._cost = cost
        self.failed: dict[str, str] = {}  # entry name -> why it was given up
        self.applied: list[Entry] = []

    async def run(self, have: Position | None, goal: Position) -> Position:
        """Apply entries until the state is `goal`, its digest included; returns it.

        Raises:
            WeightsError: no way is left; says what failed. What was applied stays applied.
        """
        ahead: tuple[Entry, asyncio.Task[Fetched]] | None = None
        try:
            while have != goal:
                path = self._plan(have, goal)
                if ahead is None or ahead[0] != path[0]:
                    await _drop(ahead)
                    ahead = (path[0], asyncio.create_task(self._fetch(path[0])))
                entry, task = ahead
                ahead = None
                try:
                    fetched = await task
                    if len(path) > 1:
                        ahead = (path[1], asyncio.create_task(self._fetch(path[1])))
                    await self._apply(entry, fetched)
                except WeightsError as error:
                    self.failed[entry.name] = str(error)
                    continue
                self.applied.append(entry)
                have = entry.position
        finally:
            await _drop(ahead)
        return goal

    def _plan(self, have: Position | None, goal: Position) -> list[Entry]:
        usable = [entry for entry in self._entries if entry.name not in self.failed]
        try:
            return plan_path(have, goal.lineage, goal.version, usable, self._cost, digest=goal.digest)
        except WeightsError as error:
            if not self.failed:
                raise
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.failed.items())[-3:])
            raise WeightsError(f"{error}; {len(self.failed)} entries failed: {reasons}") from error


async def _drop(ahead: tuple[Entry, asyncio.Task[Fetched]] | None) -> None:
    """End a fetch that is no longer wanted, and wait until it has ended."""
    if ahead is not None:
        ahead[1].cancel()
        await asyncio.gather(ahead[1], return_exceptions=True)
