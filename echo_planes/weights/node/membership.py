"""A worker's node as a member of the fleet: joins, reports, and pulls from the parent that the tracker names.

The tracker runs in the sender's node. While the sender is out of reach, the node keeps its present parent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import aiohttp

from echo_planes.weights.chain.events import (
    IDLE_REPORT_INTERVAL_S,
    REPORT_INTERVAL_S,
    SENDER_ID,
    Accusation,
    Answer,
    Assign,
    CancelBroadcast,
    Drop,
    Greeting,
    Heard,
    PeerJoined,
    Report,
    Throttle,
)
from echo_planes.weights.node.feed import Feeds
from echo_planes.weights.node.link import Parent, ParentLink
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.shelf import Holding, Shelf
from echo_planes.weights.node.transport import ask, happens
from echo_planes.weights.wire.manifest import PublicationKey


class Membership:
    """Keeps this node in the fleet. `run` it as a task.

    Args:
        address: base URL at which this node's children find it.
        position: returns the (lineage, version) that is staged here, or None.
        installed: returns the version of a lineage that the engine has, -1 for none.
    """

    def __init__(
        self,
        settings: NodeSettings,
        session: aiohttp.ClientSession,
        shelf: Shelf,
        feeds: Feeds,
        address: str,
        position: Callable[[], tuple[str, int] | None],
        installed: Callable[[str], int],
    ) -> None:
        self.link: ParentLink | None = None
        self.dropped = ""  # why the tracker has dropped this node for now
        self.repairs = 0  # changes of parent while a publication was arriving
        self._refused = ""  # why the last order to change the parent was not followed
        self._unheard = ""  # why the last report did not reach the sender
        self._settings = settings
        self._session = session
        self._shelf = shelf
        self._feeds = feeds
        self._address = address
        self._position = position
        self._installed = installed
        self._joined = False
        self._forgers: set[str] = set()  # parents, also former ones, still to be accused at the tracker
        self._told: set[PublicationKey] = set()  # complete publications that the tracker has heard of

    @property
    def trouble(self) -> str:
        """Reason why nothing arrives, for people; "" where all is well."""
        return self._refused or self._unheard or (self.link.trouble if self.link else "")

    async def run(self) -> None:
        """Report to the tracker, until cancelled."""
        next_s = time.monotonic()
        while True:
            try:
                await self._speak()
                self._unheard = ""
            except ConnectionError as error:  # the sender may come back; the parent is kept meanwhile
                if not self._unheard:
                    print(f"weights: {self._settings.node_id}: {error}", file=sys.stderr, flush=True)
                self._unheard = str(error)
            busy = not self.dropped and (bool(self._shelf.incomplete()) or not self._joined)
            next_s = max(next_s, time.monotonic() - REPORT_INTERVAL_S)
            next_s += REPORT_INTERVAL_S if busy else IDLE_REPORT_INTERVAL_S
            await self._rest_until(next_s)
            if self._has_news():
                next_s = time.monotonic()

    async def leave(self) -> None:
        """Stop pulling."""
        await self._attach(None)

    async def _rest_until(self, until_s: float) -> None:
        """Wait until `until_s`, or until there is news for the tracker or a publication begins to arrive."""
        while (left_s := until_s - time.monotonic()) > 0:
            changed = self._shelf.changed
            was_idle = not self._shelf.incomplete()
            if self._has_news():
                return
            if not await happens(changed, left_s):
                return
            if was_idle and self._shelf.incomplete():
                return  # a publication has begun: report at the shorter interval

    def _has_news(self) -> bool:
        return any(holding.key not in self._told for holding in self._shelf.complete())

    async def _speak(self) -> None:
        if not self._joined:
            joined = PeerJoined(self._settings.node_id, self._address, self._settings.region)
            await self._follow(await self._tell("join", Greeting((joined,))))
            self._joined = True
            self._told.clear()
        news = [holding for holding in self._shelf.complete() if holding.key not in self._told]
        about: list[Holding | None] = [*self._shelf.incomplete(), *news]
        reports = [self._report(holding) for holding in about or [None]]
        self._note_forgery()
        accused = sorted(self._forgers)
        accusations = [Accusation(forger, self._settings.node_id) for forger in accused]
        answer = await self._tell("report", Heard((*reports, *accusations)))
        if not answer.join:
            self._forgers.difference_update(accused)
        self._told = {holding.key for holding in self._shelf.complete()} & (
            self._told | {holding.key for holding in news}
        )
        await self._follow(answer)

    async def _tell(self, what: str, message: Greeting | Heard) -> Answer:
        url, shown = f"{self._settings.sender}/v1/tracker/{what}", self._settings.token
        return await ask(self._session, url, message, shown, Answer)

    def _report(self, holding: Holding | None) -> Report:
        link = self.link
        transfer = holding.transfer if holding is not None else None
        held = [transfer.key, *self._shelf.holdings] if transfer else list(self._shelf.holdings)[::-1]
        lineage = held[0].lineage if held else ""
        staged = self._position()
        return Report(
            peer_id=self._settings.node_id,
            parent_id=link.parent.peer_id if link else "",
            key=transfer.key if transfer else None,
            chunks_have=len(transfer.have) if transfer else 0,
            bytes_received=transfer.bytes_have if transfer else 0,
            rate_bytes_per_s=link.rate_bytes_per_s if link else 0.0,
            damaged_chunks=transfer.num_damaged if transfer else 0,
            parent_silent_s=link.silent_s if link else 0.0,
            parent_closed=link is not None and not link.connected,
            complete=holding is not None and holding.completed_s is not None,
            made=holding is not None and holding.made,
            installed_version=self._installed(lineage),
            staged_version=staged[1] if staged is not None and staged[0] == lineage else -1,
        )

    async def _follow(self, answer: Answer) -> None:
        """Carry out the tracker's orders. Every answer repeats all of them."""
        if answer.join:
            self._joined = False  # the tracker was restarted, or has forgotten or readmitted this node
            return
        if answer.orders is None:
            raise ConnectionError("the sender's answer has no orders")
        limits: dict[str, float] = {}
        for action in answer.orders:
            match action:
                case Assign(_, parent_id, address, shown):
                    sender = parent_id == SENDER_ID
                    place = self._settings.sender if sender else address
                    await self._assigned(Parent(parent_id, place, shown))
                case CancelBroadcast(key, _) if key in (one.key for one in self._shelf.incomplete()):
                    self._shelf.cancel(key)
                    if self.link is not None:
                        self.link.refuse(key)
                case Throttle(child_id, _, bytes_per_s):
                    limits[child_id] = bytes_per_s
                case Drop():
                    await self._attach(None)
        self.dropped = next((action.reason for action in answer.orders if isinstance(action, Drop)), "")
        self._feeds.throttle(limits)

    async def _assigned(self, parent: Parent) -> None:
        """Attach to a parent, unless that would send a credential in plain text."""
        if self._settings.sender.startswith("https://") and not parent.address.startswith("https://"):
            self._refused = (
                f"{parent.peer_id} at {parent.address} does not speak TLS, as the sender does: no credential "
                "is shown to it; give its node weights.tls_cert and weights.tls_key"
            )
            return
        self._refused = ""
        await self._attach(parent)

    def _note_forgery(self) -> None:
        if self.link is not None and self.link.forger:
            self._forgers.add(self.link.parent.peer_id)

    async def _attach(self, parent: Parent | None) -> None:
        if self.link is not None:
            if self.link.parent == parent:
                return
            self.repairs += bool(self._shelf.incomplete())
            self._note_forgery()
            link, self.link = self.link, None
            await link.close()
        if parent is not None:
            streams = self._settings.streams_per_link
            self.link = ParentLink(self._session, self._shelf, parent, streams, self._position)
