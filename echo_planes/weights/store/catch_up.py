"""Catch-up of a late worker to a version by a store's cheapest entries, or the next best if they fail."""

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
    """Return the cheapest entries to apply, in order: a snapshot and later patches, or patches from `have`.

    The list is empty if `have` is the wanted version.

    Args:
        have: the worker's present state, or None.
        cost: cost of fetching and applying one entry; by default its bytes.
        digest: digest of the wanted state; None: any state that the entries give for that version.

    Raises:
        WeightsError: the entries do not lead to that version.
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
    snapshots = sorted(entry.manifest.version for entry in entries if entry.is_snapshot)
    last = max(entry.manifest.version for entry in entries)
    shown = ", ".join(map(str, snapshots[-3:])) or "none"
    return f"it has {len(entries)} usable entries up to version {last}, snapshots at versions {shown}"


class CatchUp(Generic[Fetched]):
    """Applies the entries of a `plan_path`, fetching the next one meanwhile; plans again after a bad entry.

    Args:
        entries: all entries of the store.
        fetch: gets one entry's verified bytes; raises WeightsError if they are missing or damaged.
        apply: brings the worker to the entry's state, or raises WeightsError and leaves its state unchanged.
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
        self.failed: dict[str, str] = {}  # entry name -> reason of the failure
        self.applied: list[Entry] = []

    async def run(self, have: Position | None, goal: Position) -> Position:
        """Apply entries until the state is `goal`, its digest included. Return it.

        Raises:
            WeightsError: no entries are left that lead to `goal`; the message names failed ones. Applied
                entries stay applied.
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
    """Cancel a fetch, and wait until it has ended."""
    if ahead is not None:
        ahead[1].cancel()
        await asyncio.gather(ahead[1], return_exceptions=True)
