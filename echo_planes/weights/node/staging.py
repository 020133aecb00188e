"""Staging in a worker's node, between chain and engine: stages each complete version, in a thread.

A patch whose base is missing here waits while the base is arriving; otherwise the node catches up from the
store. If the stager refuses a patch on its own base, the node resets the stager and catches up from nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from echo_planes.errors import ClusterError, WeightsError
from echo_planes.types import Manifest
from echo_planes.weights.node.shelf import Holding, Shelf
from echo_planes.weights.node.transport import happens
from echo_planes.weights.wire.manifest import PublicationKey

if TYPE_CHECKING:
    from echo_planes.weights.node.stager import Staged, Stager

CatchUp = Callable[[Holding], Awaitable[None]]  # stages the way to a publication, and the publication
FIRST_RETRY_S = 1.0  # after an attempt to catch up that failed; doubled each time
MAX_RETRY_S = 30.0
LOOK_S = 5.0  # between two looks at the bytes received, while a version is waited for


class Staging:
    """Stages the publications that are complete on the shelf. Run `run` as a task.

    Args:
        catch_up: brings the stager to a publication whose base is missing here, or to a later version;
            raises WeightsError or ClusterError when it cannot.
    """

    def __init__(self, stager: Stager, shelf: Shelf, catch_up: CatchUp) -> None:
        self.refused: dict[PublicationKey, str] = {}  # publications that cannot be staged, and why
        self.installed: tuple[str, int] | None = None  # (lineage, version) that the engine has
        self.trouble = ""  # why the last attempt to catch up failed
        self._restarted: set[PublicationKey] = set()  # patches whose refusal has reset the stager
        self._is_lost = False  # a complete publication waits whose base is neither here nor arriving
        self._pause_s = FIRST_RETRY_S
        self._retry_at_s = 0.0  # monotonic time of the next attempt to catch up
        self._stager = stager
        self._shelf = shelf
        self._catch_up = catch_up
        self._advanced = asyncio.Event()

    @property
    def position(self) -> tuple[str, int] | None:
        """(lineage, version) that is staged; None before the first."""
        manifest = self._stager.manifest
        return (manifest.lineage, manifest.version) if manifest else None

    async def run(self) -> None:
        """Stage publications, until cancelled."""
        while True:
            changed = self._shelf.changed
            holding = self._next()
            if holding is None:
                left_s = max(0.0, self._retry_at_s - time.monotonic()) if self._is_lost else None
                await happens(changed, left_s)
                continue
            await self._take(holding)
            self._notify()

    async def staged(self, lineage: str, version: int, wait_s: float, fresh: bool) -> Staged | None:
        """Return the file for `version` or a later one of `lineage`; None if no byte came for `wait_s`.

        Raises:
            WeightsError: the version is here and was refused.
            ClusterError: there is no room for the file.
        """
        deadline_s, gained_bytes = time.monotonic() + wait_s, self._shelf.gained_bytes
        while True:
            advanced = self._advanced
            position = self.position
            if position is not None and position[0] == lineage and position[1] >= version:
                return await asyncio.to_thread(self._stager.current, fresh=fresh)
            for key, reason in self.refused.items():
                if (key.lineage, key.version) == (lineage, version) and not self._may_still_come(key):
                    raise WeightsError(reason)
            if gained_bytes != self._shelf.gained_bytes:
                deadline_s, gained_bytes = time.monotonic() + wait_s, self._shelf.gained_bytes
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            await happens(advanced, min(left_s, LOOK_S))

    async def settled(self, version: int, ok: bool) -> None:
        """Note that the engine has installed `version` (`ok`) or refused it."""
        await asyncio.to_thread(self._stager.settled, version, ok)
        if ok and self.position is not None:
            self.installed = (self.position[0], version)

    def _may_still_come(self, key: PublicationKey) -> bool:
        """Return whether another publication of the same version is arriving or untried."""
        return any(
            (other.lineage, other.version) == (key.lineage, key.version) and other not in self.refused
            for other in self._shelf.holdings
        )

    def _next(self) -> Holding | None:
        """Return the oldest complete publication that can be staged now, else one to catch up to, if any."""
        position = self.position
        waiting = []
        for holding in self._shelf.complete():
            manifest = holding.transfer.manifest
            if manifest is None or holding.key in self.refused:
                continue
            same_line = position is not None and position[0] == manifest.lineage
            if position is not None and same_line and manifest.version <= position[1]:
                continue
            base = (manifest.lineage, manifest.base_version)
            if manifest.codec == "full" or base == position:
                return holding
            waiting.append(holding)
        arriving = {(h.key.lineage, h.key.version) for h in self._shelf.incomplete()}
        arriving |= {(h.key.lineage, h.key.version) for h in waiting}
        lost = [h for h in waiting if (h.key.lineage, h.key.base_version) not in arriving]
        self._is_lost = bool(lost)
        return lost[-1] if lost and self._retry_at_s <= time.monotonic() else None

    async def _take(self, holding: Holding) -> None:
        manifest = holding.transfer.manifest
        if manifest is None:
            return
        holding.pins += 1
        try:
            if manifest.codec == "full" or self.position == (manifest.lineage, manifest.base_version):
                self._shelf.admission.check_manifest(manifest)
                await self._stage(holding, manifest)
            else:
                await self._try_to_catch_up(holding)
        except WeightsError as error:
            self.refused[holding.key] = str(error)
        finally:
            holding.unpin()
        admission, staged = self._shelf.admission, self._stager.manifest
        # A catch-up that failed half-way may leave weights older than those staged before.
        if staged and (staged.lineage != admission.lineage or staged.version >= admission.newest_version):
            admission.committed(staged)

    async def _stage(self, holding: Holding, manifest: Manifest) -> None:
        """Stage a publication whose base is here.

        Raises:
            WeightsError: it is refused for good.
        """
        try:
            await asyncio.to_thread(self._stager.stage, manifest, holding.segments())
            self.trouble = ""
        except ClusterError:
            pass  # the publication is applied; `staged` tries to write the file again and reports the error
        except WeightsError as error:
            if manifest.codec == "full" or holding.key in self._restarted:
                raise
            self._restarted.add(holding.key)
            self.trouble = str(error)
            await asyncio.to_thread(self._stager.reset)
            await self._try_to_catch_up(holding)

    async def _try_to_catch_up(self, holding: Holding) -> None:
        try:
            await self._catch_up(holding)
        except (WeightsError, ClusterError) as error:  # the missing entries may be there later
            self.trouble = str(error)
            self._retry_at_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_RETRY_S)
        else:
            self.trouble, self._pause_s, self._retry_at_s = "", FIRST_RETRY_S, 0.0

    def _notify(self) -> None:
        self._advanced.set()
        self._advanced = asyncio.Event()
