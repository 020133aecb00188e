"""The sender's side of the fleet: hands events to the tracker and its orders to the peers.

A peer is told its orders in the answer to its own reports, and is told all of them every time, so that an
answer that was lost costs nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace

from aiohttp import web

from echo_planes.errors import WeightsError
from echo_planes.types import BroadcastStats
from echo_planes.weights.chain.events import (
    SENDER_ID,
    TICK_INTERVAL_S,
    Accusation,
    Action,
    Assign,
    CancelBroadcast,
    Demote,
    Drop,
    Event,
    PeerJoined,
    PeerLeft,
    PublicationCommitted,
    PublicationOpened,
    Readmit,
    Report,
    SegmentAdded,
    Throttle,
    Tick,
    action_to_json,
    event_from_json,
)
from echo_planes.weights.chain.tracker import Tracker
from echo_planes.weights.node.feed import Feeds
from echo_planes.weights.node.shelf import Holding
from echo_planes.weights.node.transport import read_json
from echo_planes.weights.wire.credentials import credential
from echo_planes.weights.wire.manifest import PublicationKey

MAX_EVENTS = 64  # in one message of a peer
_ADDRESS = re.compile(r"https?://(\[[0-9a-fA-F:.]{2,45}\]|[0-9a-zA-Z._-]{1,253}):[0-9]{1,5}")


class Dispatch:
    """Runs the tracker. One event loop owns it.

    Args:
        tracker: decides.
        feeds: this node's own, which obey throttling and dropping as well.
        notify: is called with one line for people about each repair, demotion and drop.
        secret: of the run, of which the peers' credentials are made.
    """

    def __init__(self, tracker: Tracker, feeds: Feeds, notify: Callable[[str], None], secret: str) -> None:
        self._tracker = tracker
        self._feeds = feeds
        self._notify = notify
        self._secret = secret
        self._throttles: dict[str, Throttle] = {}  # by child
        self._opened: set[PublicationKey] = set()
        self._dense_bytes: int | None = None  # of the model, once a manifest said so

    async def run(self) -> None:
        """Let the tracker see time pass, for ever."""
        while True:
            self.handle(Tick())
            await asyncio.sleep(TICK_INTERVAL_S)

    def handle(self, event: Event) -> None:
        """Hand one event to the tracker and keep its orders."""
        for action in self._tracker.handle(event, time.monotonic()):
            self._keep(action)

    def segment_added(self, holding: Holding, most_bytes: int) -> None:
        """The learner has handed over a segment's header.

        Args:
            most_bytes: the publication can be no larger, if nothing better is known.
        """
        self._open(holding, most_bytes if self._dense_bytes is None else self._dense_bytes)
        transfer = holding.transfer
        self.handle(SegmentAdded(transfer.key, transfer.num_chunks, transfer.num_bytes))

    def committed(self, holding: Holding) -> None:
        """The learner has handed over the manifest."""
        transfer = holding.transfer
        if transfer.manifest is not None:
            self._dense_bytes = transfer.manifest.dense_bytes
        self._open(holding, transfer.num_bytes)  # where it has no segment at all
        self.handle(PublicationCommitted(transfer.key, transfer.num_bytes, transfer.num_chunks))
        self._opened.discard(transfer.key)

    def stats(self) -> list[BroadcastStats]:
        """Of the publications that the tracker remembers, oldest first."""
        return self._tracker.all_stats()

    def peers(self) -> dict[str, str]:
        """Parent that each peer pulls from, for people."""
        return self._tracker.parents()

    async def join(self, request: web.Request) -> web.Response:
        """`POST /v1/tracker/join`: {"events": [one PeerJoined or PeerLeft]}."""
        return await self._heard(request, (PeerJoined, PeerLeft))

    async def report(self, request: web.Request) -> web.Response:
        """`POST /v1/tracker/report`: {"events": [Reports and Accusation]} of the peer that asks."""
        peer_id = request.headers.get("X-Node", "")
        if self._tracker.assignment(peer_id) is None and not self._tracker.is_dropped(peer_id):
            return web.json_response({"join": True})
        return await self._heard(request, (Report, Accusation))

    async def _heard(self, request: web.Request, kinds: tuple[type, ...]) -> web.Response:
        peer_id = request.headers.get("X-Node", "")
        events = (await read_json(request)).get("events")
        if not isinstance(events, list) or len(events) > MAX_EVENTS:
            raise WeightsError(f"a message to the tracker is {{events: [...]}} with at most {MAX_EVENTS}")
        for event in map(event_from_json, events):
            speaker = event.by if isinstance(event, Accusation) else getattr(event, "peer_id", "")
            if not isinstance(event, kinds) or speaker != peer_id:
                raise WeightsError(f"{peer_id} cannot say {type(event).__name__} here, or not for {speaker}")
            if isinstance(event, PeerJoined) and not _ADDRESS.fullmatch(event.address):
                raise WeightsError(
                    f"{peer_id} joins with the address {event.address[:80]!r}, not http(s)://host:port"
                )
            self.handle(event)
        return web.json_response({"orders": [action_to_json(order) for order in self._orders(peer_id)]})

    def _open(self, holding: Holding, est_bytes: int) -> None:
        key = holding.transfer.key
        if key not in self._opened and self._tracker.stats(key) is None:
            self._opened.add(key)
            self.handle(PublicationOpened(key, est_bytes))

    def _orders(self, peer_id: str) -> list[Action]:
        """All that holds for one peer now."""
        if self._tracker.is_dropped(peer_id):
            return [Drop(peer_id, "its children say that it alters signed bytes")]
        assign = self._tracker.assignment(peer_id)
        if assign is not None:
            at_sender = assign.parent_id == SENDER_ID
            key = self._secret if at_sender else credential(self._secret, assign.parent_id)
            assign = replace(assign, shown=credential(key, peer_id))
        cancelled = [CancelBroadcast(key, (peer_id,)) for key in self._tracker.cancelled(peer_id)]
        throttles = [order for order in self._throttles.values() if order.parent_id == peer_id]
        return [*([assign] if assign else []), *cancelled, *throttles]

    def _keep(self, action: Action) -> None:
        match action:
            case Assign(peer_id):
                self._throttles.pop(peer_id, None)  # it was of the link that the peer had
            case Drop(peer_id, reason):
                self._feeds.cut(peer_id)
                self._notify(f"{peer_id} was dropped: {reason}")
            case Readmit(peer_id):
                self._feeds.readmit(peer_id)
                self._notify(f"{peer_id} may join again")
            case Demote(peer_id, reason):
                self._notify(f"{peer_id} is rollout-only from now on: {reason}")
            case Throttle(child_id, _, bytes_per_s):
                self._throttles.pop(child_id, None)
                if bytes_per_s:
                    self._throttles[child_id] = action
            case CancelBroadcast():
                pass  # `Tracker.cancelled` repeats it
        own = [order for order in self._throttles.values() if order.parent_id == SENDER_ID]
        self._feeds.throttle({order.child_id: order.bytes_per_s for order in own})
