"""The receiving end of a link: pulls from the parent that the tracker named, and repairs damaged chunks.

`Transfer` judges whether a chunk is sound; the tracker chooses the parent.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from echo_planes.errors import EchoPlanesError, WeightsError
from echo_planes.weights.chain.events import PING_INTERVAL_S
from echo_planes.weights.node.shelf import Shelf, Unwanted, wants_message
from echo_planes.weights.node.transport import ANSWER_S, ask, showing
from echo_planes.weights.wire.frames import (
    CancelFrame,
    ChunkFrame,
    Frame,
    FrameParser,
    ManifestFrame,
    PingFrame,
    SegmentFrame,
)
from echo_planes.weights.wire.manifest import PublicationKey, key_text

FORGERY_TRIES = 3  # altered copies of one chunk, over TLS, that make the parent a forger
STALL_PINGS = 4  # pings in a row while chunks are missing, after which the node attaches again
STALL_S = STALL_PINGS * PING_INTERVAL_S
DEAD_STREAM_S = STALL_S - PING_INTERVAL_S  # a stream silent for longer, while another one pings, is broken
RETRY_S = (0.05, 1.0)  # pause between attempts to connect: first, largest
RATE_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Parent:
    """The node to pull from."""

    peer_id: str
    address: str
    shown: str  # this node's credential with the parent


class ParentLink:
    """Streams from one parent into the shelf, until closed.

    Args:
        parent: the node to pull from.
        streams: number of connections.
        newest: returns the (lineage, version) that is staged here, or None.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        shelf: Shelf,
        parent: Parent,
        streams: int,
        newest: Callable[[], tuple[str, int] | None],
    ) -> None:
        self.parent = parent
        self.heard_s = time.monotonic()  # last sound frames from the parent
        self.connected: set[int] = set()
        self.forger = False  # the parent alters signed bytes: over TLS no other node can
        self.trouble = ""  # why what arrives cannot be kept here
        self._heard: dict[int, tuple[float, asyncio.Timeout]] = {}  # by open stream: last byte, its timeout
        self._mended_s = -STALL_S  # when a dead stream was last ended
        self._session = session
        self._shelf = shelf
        self._num_streams = streams
        self._newest = newest
        self._arrived: deque[tuple[float, int]] = deque()  # (when, bytes) of new chunks
        self._bad: Counter[tuple[PublicationKey, int, int]] = Counter()
        self._repairs: set[asyncio.Task[None]] = set()
        self._refusals: dict[PublicationKey, asyncio.Task[None]] = {}
        self._streams = [asyncio.create_task(self._follow(number)) for number in range(streams)]

    @property
    def silent_s(self) -> float:
        """Seconds since the last sound frames from the parent, pings included."""
        return time.monotonic() - self.heard_s

    @property
    def rate_bytes_per_s(self) -> float:
        """Payload bytes accepted per second, over the last `RATE_WINDOW_S` seconds."""
        now_s = time.monotonic()
        while self._arrived and self._arrived[0][0] < now_s - RATE_WINDOW_S:
            self._arrived.popleft()
        return sum(size for _, size in self._arrived) / RATE_WINDOW_S

    async def close(self) -> None:
        """Stop pulling. Chunks that have arrived stay on the shelf."""
        tasks = [*self._streams, *self._repairs, *self._refusals.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def refuse(self, key: PublicationKey) -> None:
        """Ask the parent, in the background since it may be out of reach, to send no more of `key`."""
        if key not in self._refusals:
            task = self._refusals[key] = asyncio.create_task(self._say_unwanted(key))
            task.add_done_callback(lambda _: self._refusals.pop(key, None))

    async def _say_unwanted(self, key: PublicationKey) -> None:
        try:
            url, message = f"{self.parent.address}/v1/unwanted", Unwanted(key_text(key))
            await ask(self._session, url, message, self.parent.shown, dict)
        except ConnectionError:
            return  # the shelf discards the chunks that still arrive

    async def _follow(self, number: int) -> None:
        """Keep one stream open: after each end, open it again and say anew what is here."""
        pause_s = RETRY_S[0]
        while True:
            before_s = self.heard_s
            try:
                await self._pull(number)
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # the next report tells the tracker
            except WeightsError as error:
                self.trouble = f"{self.parent.peer_id} sent what is not sound: {error}"
                self._damaged_stream()
            except EchoPlanesError as error:  # a local error that may pass, such as no room
                self.trouble = str(error)
                before_s = self.heard_s
            finally:
                self.connected.discard(number)
                self._heard.pop(number, None)
            pause_s = RETRY_S[0] if self.heard_s > before_s else min(2 * pause_s, RETRY_S[1])
            await asyncio.sleep(pause_s)

    async def _pull(self, number: int) -> None:
        url = f"{self.parent.address}/v1/feed?stream={number}&of={self._num_streams}"
        parser = FrameParser(self._shelf.limits)
        message = msgspec.json.encode(wants_message(self._shelf, self._newest()))
        num_pings = 0  # since the last other frame
        shown = showing(self.parent.shown)
        async with asyncio.timeout(None) as limit, self._session.post(url, data=message, **shown) as response:
            if response.status != 200:
                return
            self.connected.add(number)
            last_s = time.monotonic()
            self._heard[number] = last_s, limit
            async for data in response.content.iter_any():
                now_s = time.monotonic()
                rested_s, last_s = now_s - last_s, now_s
                self._heard[number] = now_s, limit
                frames = parser.feed(data)
                for frame in frames:
                    self._take(frame)
                self.heard_s = now_s  # only now: a parent that sends nothing sound counts as silent
                is_ping = bool(frames) and all(isinstance(frame, PingFrame) for frame in frames)
                num_pings = num_pings + 1 if is_ping else 0
                # If this stream was silent as long, machine or path stood still, and the others resume next.
                if is_ping and rested_s < DEAD_STREAM_S:
                    self._end_dead_streams(now_s)
                if num_pings >= STALL_PINGS and self._has_holes() and last_s - self._mended_s > STALL_S:
                    return

    def _end_dead_streams(self, now_s: float) -> None:
        """End streams that are silent while another one pings. `_follow` opens them again.

        A parent with nothing to send pings on every stream, so a stream without pings is broken. Chunks on
        another stream prove nothing: the silent stream may merely have had no share of them.
        """
        dead = [number for number, (s, _) in self._heard.items() if now_s - s > DEAD_STREAM_S]
        for number in dead:
            _, limit = self._heard.pop(number)
            limit.reschedule(asyncio.get_running_loop().time())
            self._mended_s = now_s

    def _take(self, frame: Frame) -> None:
        match frame:
            case ChunkFrame():
                self._take_chunk(frame)
            case SegmentFrame(signed):
                key = signed.header.key
                if self._shelf.add_segment(signed) is None and key in self._shelf.unwanted:
                    self.refuse(key)
            case ManifestFrame(signed):
                self._shelf.commit(signed)
            case CancelFrame(key):
                self._shelf.give_up(key)

    def _take_chunk(self, frame: ChunkFrame) -> None:
        verdict = self._shelf.add_chunk(frame)
        if verdict == "accepted":
            self.trouble = ""
            self._arrived.append((self.heard_s, len(frame.data)))
        elif verdict == "damaged":
            self._count_damage(frame.key, frame.segment_index, frame.chunk_index)
            task = asyncio.create_task(self._repair(frame.key, frame.segment_index, frame.chunk_index))
            self._repairs.add(task)
            task.add_done_callback(self._repairs.discard)

    async def _repair(self, key: PublicationKey, segment_index: int, chunk_index: int) -> None:
        """Request one chunk again until it is sound; after `FORGERY_TRIES` leave it to a new stream."""
        for _ in range(FORGERY_TRIES):
            holding = self._shelf.holdings.get(key)
            segments = holding.transfer.segments if holding else []
            if holding is None or segment_index >= len(segments):
                return
            if chunk_index >= segments[segment_index].header.num_chunks:
                return
            span = holding.transfer.span(segment_index, chunk_index)
            data = await self._range(key, span.offset_bytes, span.size_bytes)
            if data is None:
                continue
            frame = ChunkFrame(key, segment_index, chunk_index, data)
            try:
                verdict = self._shelf.add_chunk(frame)
            except EchoPlanesError as error:
                self.trouble = str(error)
                return  # a new stream will bring it, when there is room
            if verdict != "damaged":
                self._arrived.append((self.heard_s, len(data)))
                return
            self._count_damage(key, segment_index, chunk_index)

    async def _range(self, key: PublicationKey, offset_bytes: int, size_bytes: int) -> bytes | None:
        url = f"{self.parent.address}/v1/publications/{key_text(key)}/payload"
        asked = showing(self.parent.shown)
        asked["headers"]["Range"] = f"bytes={offset_bytes}-{offset_bytes + size_bytes - 1}"
        try:
            async with asyncio.timeout(ANSWER_S), self._session.get(url, **asked) as response:
                if response.status != 206:
                    return None
                data = await response.content.read(size_bytes)
                while len(data) < size_bytes:
                    more = await response.content.read(size_bytes - len(data))
                    if not more:
                        break
                    data += more
                return data
        except (aiohttp.ClientError, TimeoutError, OSError):
            await asyncio.sleep(RETRY_S[0])
            return None

    def _count_damage(self, key: PublicationKey, segment_index: int, chunk_index: int) -> None:
        """Count a damaged chunk. Over TLS only the parent can have altered it: repeated, that is forgery."""
        self._bad[key, segment_index, chunk_index] += 1
        if self.parent.address.startswith("https://"):
            self.forger |= self._bad[key, segment_index, chunk_index] >= FORGERY_TRIES

    def _damaged_stream(self) -> None:
        for holding in self._shelf.incomplete():
            holding.transfer.num_damaged += 1

    def _has_holes(self) -> bool:
        """Return whether known chunks, or segments of a known manifest, are missing, and the parent must be
        asked for them: they are not under repair, and not being made here."""
        return not (self._repairs or self._shelf.is_making) and any(
            holding.transfer.manifest is not None or len(holding.transfer.have) < holding.transfer.num_chunks
            for holding in self._shelf.incomplete()
        )
