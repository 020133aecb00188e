"""The sender's side of the fleet: hands events to the tracker, and the tracker's orders to the peers.

A peer gets its orders in the answers to its own reports. Each answer repeats all orders in force, so a lost
answer costs nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

from aiohttp import web
from msgspec.structs import replace

from echo_planes.errors import WeightsError
from echo_planes.types import BroadcastStats
from echo_planes.weights.chain.events import (
    SENDER_ID,
    TICK_INTERVAL_S,
    Accusation,
    Action,
    Answer,
    Assign,
    CancelBroadcast,
    Demote,
    Drop,
    Event,
    Greeting,
    Heard,
    PeerJoined,
    PublicationCommitted,
    PublicationOpened,
    Readmit,
    SegmentAdded,
    Throttle,
    Tick,
)
from echo_planes.weights.chain.tracker import Tracker
from echo_planes.weights.node.feed import Feeds
from echo_planes.weights.node.shelf import Holding
from echo_planes.weights.node.transport import read_message, say
from echo_planes.weights.wire.credentials import credential
from echo_planes.weights.wire.manifest import PublicationKey

_LABEL = r"[0-9a-zA-Z_-]{1,63}"  # between the dots of a name; looking up any other raises a UnicodeError
_ADDRESS = re.compile(rf"https?://(\[[0-9a-fA-F:.]{{2,45}}\]|{_LABEL}(\.{_LABEL})*\.?):[0-9]{{1,5}}")


class Dispatch:
    """Runs the tracker. One event loop owns it.

    Args:
        tracker: decides which peer pulls from which.
        feeds: the sender's own feeds, which also obey throttles and drops.
        notify: called with one line for people about each drop, readmission and demotion.
        secret: the run's secret, from which the peers' credentials are made.
    """

    def __init__(self, tracker: Tracker, feeds: Feeds, notify: Callable[[str], None], secret: str) -> None:
        self._tracker = tracker
        self._feeds = feeds
        self._notify = notify
        self._secret = secret
        self._throttles: dict[str, Throttle] = {}  # by child
        self._opened: set[PublicationKey] = set()
        self._dense_bytes: int | None = None  # size of the model; None before the first manifest

    async def run(self) -> None:
        """Hand the tracker a `Tick` every `TICK_INTERVAL_S` seconds, until cancelled."""
        while True:
            self.handle(Tick())
            await asyncio.sleep(TICK_INTERVAL_S)

    def handle(self, event: Event) -> None:
        """Hand one event to the tracker, and keep or carry out its orders."""
        for action in self._tracker.handle(event, time.monotonic()):
            self._keep(action)

    def segment_added(self, holding: Holding, most_bytes: int) -> None:
        """Tell the tracker that the learner has handed over a segment's header.

        Args:
            most_bytes: upper bound of the publication's size, used until a manifest gives the model's size.
        """
        self._open(holding, most_bytes if self._dense_bytes is None else self._dense_bytes)
        transfer = holding.transfer
        self.handle(SegmentAdded(transfer.key, transfer.num_chunks, transfer.num_bytes))

    def committed(self, holding: Holding) -> None:
        """Tell the tracker that the learner has handed over the manifest."""
        transfer = holding.transfer
        if transfer.manifest is not None:
            self._dense_bytes = transfer.manifest.dense_bytes
        self._open(holding, transfer.num_bytes)  # a publication without segments is not open yet
        self.handle(PublicationCommitted(transfer.key, transfer.num_bytes, transfer.num_chunks))
        self._opened.discard(transfer.key)

    def stats(self) -> list[BroadcastStats]:
        """Return the figures of the publications that the tracker remembers, oldest first."""
        return self._tracker.all_stats()

    def peers(self) -> dict[str, str]:
        """Return the parent of each peer, for people."""
        return self._tracker.parents()

    async def join(self, request: web.Request) -> web.Response:
        """Handle `POST /v1/tracker/join`: a `Greeting` of the peer that asks."""
        return self._hear(request, await read_message(request, Greeting))

    async def report(self, request: web.Request) -> web.Response:
        """Handle `POST /v1/tracker/report`: the observations (`Heard`) of the peer that asks."""
        peer_id = request.headers.get("X-Node", "")
        if self._tracker.assignment(peer_id) is None and not self._tracker.is_dropped(peer_id):
            return say(Answer(join=True))
        return self._hear(request, await read_message(request, Heard))

    def _hear(self, request: web.Request, message: Greeting | Heard) -> web.Response:
        peer_id = request.headers.get("X-Node", "")
        for event in message.events:
            speaker = event.by if isinstance(event, Accusation) else event.peer_id
            if speaker != peer_id:
                raise WeightsError(f"{peer_id} cannot say {type(event).__name__} for {speaker}")
            if isinstance(event, PeerJoined) and not _ADDRESS.fullmatch(event.address):
                raise WeightsError(
                    f"{peer_id} joins with the address {event.address[:80]!r}, not http(s)://host:port"
                )
            self.handle(event)
        return say(Answer(tuple(self._orders(peer_id))))

    def _open(self, holding: Holding, est_bytes: int) -> None:
        key = holding.transfer.key
        if key not in self._opened and self._tracker.stats(key) is None:
            self._opened.add(key)
            self.handle(PublicationOpened(key, est_bytes))

    def _orders(self, peer_id: str) -> list[Action]:
        """Return all orders now in force for one peer."""
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
                self._throttles.pop(peer_id, None)  # it was for the link to the former parent
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
                pass  # `_orders` asks `Tracker.cancelled` for it
        own = [order for order in self._throttles.values() if order.parent_id == SENDER_ID]
        self._feeds.throttle({order.child_id: order.bytes_per_s for order in own})
