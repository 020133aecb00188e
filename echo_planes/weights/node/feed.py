"""The serving end of a link: one long answer of frames per stream, and byte ranges of verified payloads.

A node forwards chunks in the order in which it accepted them, each as soon as it is verified. A child says
what it has and gets only the rest. Every write waits for the child's socket, so no unsent data piles up.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping

from aiohttp import web

from echo_planes.errors import WeightsError
from echo_planes.weights.chain.events import PING_INTERVAL_S
from echo_planes.weights.node.settings import MAX_STREAMS
from echo_planes.weights.node.shelf import Holding, Shelf, Wanted, Wants
from echo_planes.weights.node.transport import happens, read_message
from echo_planes.weights.wire.frames import (
    CancelFrame,
    ManifestFrame,
    PingFrame,
    SegmentFrame,
    chunk_head,
    encode_frame,
)
from echo_planes.weights.wire.manifest import PublicationKey, parse_key_text

MAX_LAG = 4  # patches that may wait for a child, if they came after it; of more it gets only the newest
MAX_BEGUN = 2  # complete publications on their way to one child: its faster streams wait for its slowest
WRITE_BYTES = 1024**2  # of a range, at a time
WRITE_S = 60.0  # per frame or piece of a range: a child that reads nothing must not keep publications here
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
_PING = encode_frame(PingFrame())


class Feeds:
    """All feeds that this node serves. Handlers for `aiohttp.web`.

    Args:
        shelf: the publications to serve.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._children: dict[str, _Child] = {}
        self._limits_bytes_per_s: dict[str, float] = {}
        self.refused: set[str] = set()  # peers that were dropped
        self.bytes_sent = 0

    def throttle(self, limits_bytes_per_s: Mapping[str, float]) -> None:
        """Replace all rate limits, in bytes/s by child. 0 or none: as fast as the child can take it."""
        self._limits_bytes_per_s = {child: limit for child, limit in limits_bytes_per_s.items() if limit > 0}

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/feed?stream=j&of=k` with a `_Feed`. The body says what the child has."""
        stream, of = _number(request, "stream", MAX_STREAMS - 1), _number(request, "of", MAX_STREAMS)
        if stream >= of:
            raise WeightsError(f"stream {stream} of {of} does not exist")
        child = request.headers.get("X-Node", "")
        wants = Wants(await read_message(request, Wanted))
        self.check(child)  # after the wait: `cut` ends only the feeds that are there
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.enable_chunked_encoding()
        state = self._children.setdefault(child, _Child(self._shelf))
        feed = _Feed(self, self._shelf, response, child, state, stream, of, wants)
        state.enter(feed)
        try:
            await response.prepare(request)
            await feed.run()
        except (ConnectionError, TimeoutError):
            _give_up(request)  # the child is gone or reads nothing; it attaches again, here or elsewhere
        finally:
            state.leave(feed)
            if not state.feeds and self._children.get(child) is state:
                del self._children[child]
        return response

    def unwanted(self, child: str, key: PublicationKey) -> None:
        """Send `child` nothing more of `key` on its open feeds."""
        if state := self._children.get(child):
            for feed in state.feeds.values():
                feed.wants.done.add(key)

    def cut(self, child: str) -> None:
        """End the feeds of a dropped peer, and refuse new ones."""
        self.refused.add(child)
        if state := self._children.get(child):
            for feed in state.feeds.values():
                feed.ended = True

    def readmit(self, child: str) -> None:
        """Let a dropped peer attach again."""
        self.refused.discard(child)

    def check(self, child: str) -> None:
        """Refuse a peer that was dropped.

        Raises:
            WeightsError: the peer was dropped.
        """
        if child in self.refused:
            raise WeightsError(f"{child} is out for now: its children say that it alters signed bytes")

    def limit_bytes_per_s(self, child: str) -> float | None:
        """Return the rate limit of the link to a child, bytes/s; None: as fast as the child can take it."""
        return self._limits_bytes_per_s.get(child)

    async def payload(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /v1/publications/{key}/payload`: verified bytes, up to the first that is missing here.

        With `Range: bytes=a-b`: status 206 and those bytes, or their beginning; 416 if byte a is missing.
        """
        self.check(request.headers.get("X-Node", ""))
        holding = self._shelf.holdings.get(parse_key_text(request.match_info["key"]))
        if holding is None:
            raise web.HTTPNotFound(text="this node does not hold that publication\n")
        asked = request.headers.get("Range")
        match = _RANGE.fullmatch(asked) if asked is not None else None
        start = int(match[1]) if match else 0
        end = holding.transfer.verified_end(start)
        if match and match[2]:
            end = min(end, int(match[2]) + 1)
        manifest = holding.transfer.manifest
        total = str(manifest.payload_bytes) if manifest else "*"
        if end <= start:
            raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{total}"})
        return await self._stream(request, holding, start, end, total, status=206 if match else 200)

    async def _stream(
        self, request: web.Request, holding: Holding, start: int, end: int, total: str, status: int
    ) -> web.StreamResponse:
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(end - start)}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
        response = web.StreamResponse(status=status, headers=headers)
        holding.pins += 1
        try:
            await response.prepare(request)
            while start < end:
                data = holding.spool.read(start, min(end - start, WRITE_BYTES))
                if not data:
                    raise ConnectionError(f"the payload of {holding.key} ends early, at byte {start}")
                async with asyncio.timeout(WRITE_S):
                    await response.write(data)
                start += len(data)
        except TimeoutError:
            _give_up(request)
        finally:
            holding.unpin()
        return response


class _Child:
    """State that the feeds of one child share, so that all its streams carry parts of the same publications.

    Each chunk goes on the stream that has room first: a slow connection delays only the chunks handed to it.
    If the connection ends, they go out again once a new stream is open.

    A child that is slower than the publications does not get them all. Once more than `MAX_LAG` patches that
    came after it wait for it, it gets the newest only, and fetches those between from the store. The shelf
    keeps a publication that is being sent to the child until all of it is sent.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.feeds: dict[int, _Feed] = {}  # by stream
        self._shelf = shelf
        self._there_before = set(shelf.holdings)  # held when the child attached: they count as no lag
        self._begun: dict[PublicationKey, Holding] = {}  # being sent: the shelf keeps them
        self._known: set[PublicationKey] = set()  # ever begun
        self._skipped: set[PublicationKey] = set()
        self._shares: dict[PublicationKey, _Share] = {}
        self.free_s = 0.0  # monotonic time from which a throttled link may carry more

    def enter(self, feed: _Feed) -> None:
        """Add an open stream, and end those that it replaces: the child has closed them unnoticed."""
        for stream in [stream for stream in self.feeds if stream == feed.stream or stream >= feed.of]:
            self._end(stream)
        self.feeds[feed.stream] = feed
        # The new stream's request says what the child has: lost chunks go out again unless it has them.
        for other in self.feeds.values():
            other.wants = feed.wants
        for share in self._shares.values():
            share.again += share.lost
            share.lost = []

    def leave(self, feed: _Feed) -> None:
        """Remove a stream that has ended."""
        if self.feeds.get(feed.stream) is feed:
            self._end(feed.stream)
        self._release()

    def share(self, holding: Holding) -> _Share:
        """Return the progress of all streams together with a publication."""
        share = self._shares.get(holding.key)
        if share is None or share.holding is not holding:
            share = self._shares[holding.key] = _Share(holding)
        return share

    def plan(self, wants: Wants) -> None:
        """Release publications that are sent or gone, and skip to the newest patch where the child lags."""
        held = self._shelf.holdings
        self._release()
        for key in [key for key, holding in self._begun.items() if held.get(key) is not holding]:
            self._let_go(key)
        for keys in (self._there_before, self._known, self._skipped):
            keys.intersection_update(held)
        for key in [key for key in self._shares if key not in held]:
            del self._shares[key]
        waiting = [
            key
            for key in held
            if key.codec != "full"
            and not (key in self._known or key in self._skipped or key in wants.have or wants.skips(key))
        ]
        if sum(key not in self._there_before for key in waiting) > MAX_LAG:
            self._skipped.update(waiting[:-1])

    def takes(self, holding: Holding, wants: Wants) -> bool:
        """Return whether the publication is being sent to the child, or its sending may begin."""
        key = holding.key
        if wants.skips(key):
            return False
        if key in self._known or key in wants.have:
            return True
        num_begun = sum(begun.completed_s is not None for begun in self._begun.values())
        return num_begun < MAX_BEGUN and not (key in self._skipped or holding.retired)

    def begin(self, holding: Holding) -> None:
        """Note that a frame of the publication goes out; the shelf keeps it from the first one on."""
        if holding.key in self._known:
            return
        self._known.add(holding.key)
        self._begun[holding.key] = holding
        holding.senders += 1

    def _end(self, stream: int) -> None:
        feed = self.feeds.pop(stream)
        feed.ended = True
        for key, cursor in feed.sent.items():
            share = self._shares.get(key)
            if share is not None and share.holding is cursor.holding:
                share.lost += cursor.handed

    def _release(self) -> None:
        """Let the shelf retire publications of which no stream has anything left to send."""
        for key, holding in list(self._begun.items()):
            if all(feed.is_through(holding) for feed in self.feeds.values()):
                self._let_go(key)

    def _let_go(self, key: PublicationKey) -> None:
        self._shelf.sent(self._begun.pop(key))


class _Feed:
    """One stream to one child: signed segments, its share of the chunks, manifests, pings."""

    def __init__(
        self,
        feeds: Feeds,
        shelf: Shelf,
        response: web.StreamResponse,
        child: str,
        state: _Child,
        stream: int,
        of: int,
        wants: Wants,
    ) -> None:
        self.stream = stream
        self.of = of
        self.wants = wants
        self.ended = False
        self.sent: dict[PublicationKey, _Cursor] = {}
        self._feeds = feeds
        self._shelf = shelf
        self._response = response
        self._child = child
        self._state = state

    async def run(self) -> None:
        while not self.ended:
            changed = self._shelf.changed  # taken first, so that no change during sending is missed
            if await self.send_next():
                await asyncio.sleep(0)  # a stream that has waited longer sends the next chunk
                continue
            if not await happens(changed, PING_INTERVAL_S):
                await self._put(_PING)

    async def send_next(self) -> bool:
        """Send the next frame, of the oldest publication that has one. Return whether there was one."""
        for key in self._gone():
            await self._put(encode_frame(CancelFrame(key)))
        self._state.plan(self.wants)
        for key, holding in list(self._shelf.holdings.items()):
            if not self._state.takes(holding, self.wants):
                continue
            cursor = self.sent.get(key)
            if cursor is None or cursor.holding is not holding:
                cursor = self.sent[key] = _Cursor(holding)
            if await self._send_of(holding, cursor, self._state.share(holding)):
                return True
        return False

    def is_through(self, holding: Holding) -> bool:
        """Return whether this stream has nothing left to send of it, or the child does not want it."""
        cursor = self.sent.get(holding.key)
        through = cursor is not None and cursor.manifest and self._state.share(holding).through
        return self.wants.skips(holding.key) or (through and holding.transfer.complete)

    def _gone(self) -> list[PublicationKey]:
        """Forget and return publications that the child has in part and cannot get from this node."""
        held = self._shelf.holdings
        gone = [key for key in self.sent if key not in held]
        gone = [key for key in gone if not self.sent.pop(key).manifest]
        newest = {holding.key.lineage: holding.key.version for holding in self._shelf.complete()}
        for key in [key for key in self.wants.have if key not in held and key not in gone]:
            if key in self._shelf.unwanted or key.version < newest.get(key.lineage, -1):
                gone.append(key)
        for key in gone:
            self.wants.forget(key)
        return gone

    async def _send_of(self, holding: Holding, cursor: _Cursor, share: _Share) -> bool:
        transfer = holding.transfer
        if cursor.segments < len(transfer.segments):
            frame = SegmentFrame(transfer.segments[cursor.segments])
            cursor.segments += 1
            self._state.begin(holding)
            await self._write(encode_frame(frame))
            return True
        have = self.wants.chunks(transfer)
        while (number := share.take()) is not None:
            cursor.handed.append(number)  # even if the child makes it: it may find that it cannot
            if number not in have:
                span = transfer.chunk_span(number)
                head = chunk_head(holding.key, span.segment_index, span.chunk_index, span.size_bytes)
                await self._write(head + holding.chunk(number))
                return True
        if transfer.signed_manifest is not None and not cursor.manifest:
            cursor.manifest = True
            await self._write(encode_frame(ManifestFrame(transfer.signed_manifest)))
            return True
        return False

    async def _write(self, data: bytes) -> None:
        """Send a frame: delay it if the link is throttled, and wait until the child's socket has room."""
        limit = self._feeds.limit_bytes_per_s(self._child)
        if limit is not None:
            now_s = time.monotonic()
            start_s = max(now_s, self._state.free_s)
            self._state.free_s = start_s + len(data) / limit
            await asyncio.sleep(start_s - now_s)
        await self._put(data)
        self._feeds.bytes_sent += len(data)

    async def _put(self, data: bytes) -> None:
        async with asyncio.timeout(WRITE_S):
            await self._response.write(data)


class _Cursor:
    """Progress of a feed with one publication."""

    __slots__ = ("handed", "holding", "manifest", "segments")

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.segments = 0
        self.handed: list[int] = []  # chunks, by number
        self.manifest = False


class _Share:
    """Progress of all feeds of a child with the chunks of one publication."""

    __slots__ = ("again", "arrivals", "holding", "lost")

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.arrivals = 0
        self.again: list[int] = []  # to be handed out once more
        self.lost: list[int] = []  # handed to streams that ended; the child has some of them

    @property
    def through(self) -> bool:
        """Whether every chunk accepted so far was handed to a stream."""
        return not self.again and not self.lost and self.arrivals == len(self.holding.arrivals)

    def take(self) -> int | None:
        """Take the next chunk to send and return its number; None: there is none at present."""
        if self.again:
            return self.again.pop()
        if self.arrivals == len(self.holding.arrivals):
            return None
        self.arrivals += 1
        return self.holding.arrivals[self.arrivals - 1]


def _give_up(request: web.Request) -> None:
    """Close a connection and discard unsent data."""
    if request.transport is not None:
        request.transport.abort()


def _number(request: web.Request, name: str, most: int) -> int:
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= most):
        raise WeightsError(f"{name} must be a number of at most {most}")
    return int(text)
