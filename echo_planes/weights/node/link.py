"""The receiving end of a link: pulls from the parent the tracker named, and asks again for what was damaged.

Whether a chunk is good is `Transfer`'s verdict, and who the parent is the tracker's; this only follows.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from echo_planes.errors import EchoPlanesError, WeightsError
from echo_planes.weights.chain.events import PING_INTERVAL_S
from echo_planes.weights.node.shelf import Shelf, wants_message
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

FORGERY_TRIES = 3  # so often one chunk must come altered over TLS from one parent to prove that it lies
STALL_PINGS = 4  # a parent with so little to say while chunks are missing: attach again, saying what is here
STALL_S = STALL_PINGS * PING_INTERVAL_S
DEAD_STREAM_S = STALL_S - PING_INTERVAL_S  # a stream as silent as this while another pings has broken
RETRY_S = (0.05, 1.0)  # between attempts to connect: first, largest
RATE_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Parent:
    """Whom to pull from."""

    peer_id: str
    address: str
    shown: str  # this node's credential with it


class ParentLink:
    """Streams from one parent into the shelf, until closed.

    Args:
        parent: whom to pull from.
        streams: how many connections at once.
        newest: (lineage, version) that is staged here, or None.
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
        self.heard_s = time.monotonic()  # last byte from it
        self.connected: set[int] = set()
        self.forger = False  # it alters signed bytes: nobody else can have
        self.trouble = ""  # why what arrives cannot be kept here
        self._heard: dict[int, tuple[float, asyncio.Timeout]] = {}  # by open stream: last byte, what ends it
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
        """Since the last byte from the parent, pings included."""
        return time.monotonic() - self.heard_s

    @property
    def rate_bytes_per_s(self) -> float:
        """Payload accepted over the last second."""
        now_s = time.monotonic()
        while self._arrived and self._arrived[0][0] < now_s - RATE_WINDOW_S:
            self._arrived.popleft()
        return sum(size for _, size in self._arrived) / RATE_WINDOW_S

    async def close(self) -> None:
        """Stop pulling. What has arrived stays."""
        tasks = [*self._streams, *self._repairs, *self._refusals.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def refuse(self, key: PublicationKey) -> None:
        """Ask the parent to send no more of `key`. Nobody waits for it: the parent may be out of reach."""
        if key not in self._refusals:
            task = self._refusals[key] = asyncio.create_task(self._say_unwanted(key))
            task.add_done_callback(lambda _: self._refusals.pop(key, None))

    async def _say_unwanted(self, key: PublicationKey) -> None:
        try:
            url, message = f"{self.parent.address}/v1/unwanted", {"key": key_text(key)}
            await ask(self._session, url, message, self.parent.shown)
        except ConnectionError:
            return  # what still comes is thrown away

    async def _follow(self, number: int) -> None:
        """Keep one stream open; after each end say anew what is here."""
        pause_s = RETRY_S[0]
        while True:
            before_s = self.heard_s
            try:
                await self._pull(number)
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # the tracker hears of it in the next report
            except WeightsError as error:
                self.trouble = f"{self.parent.peer_id} sent what is not sound: {error}"
                self._damaged_stream()
            except EchoPlanesError as error:  # this machine's own, such as no room: it may pass
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
        message = wants_message(self._shelf, self._newest())
        num_pings = 0  # since anything else came
        shown = showing(self.parent.shown)
        async with asyncio.timeout(None) as limit, self._session.post(url, json=message, **shown) as response:
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
                self.heard_s = now_s  # only now: whoever sends nothing sound is as good as silent
                is_ping = bool(frames) and all(isinstance(frame, PingFrame) for frame in frames)
                num_pings = num_pings + 1 if is_ping else 0
                # Where this one has rested too, it is the machine or the path, and the others come next.
                if is_ping and rested_s < DEAD_STREAM_S:
                    self._end_dead_streams(now_s)
                if num_pings >= STALL_PINGS and self._has_holes() and last_s - self._mended_s > STALL_S:
                    return

    def _end_dead_streams(self, now_s: float) -> None:
        """Open anew what is silent while another stream pings; what it was to bring comes on the others.

        A ping says that the parent has had nothing to send for a while: then each of its streams pings.
        Chunks on another stream say nothing of this one, which may only have come too late for them.
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
        """Ask for one chunk until it is here undamaged; after `FORGERY_TRIES` leave it to a new stream."""
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
        """Over TLS nobody between the nodes can have altered a byte: repeated damage is the parent's own."""
        self._bad[key, segment_index, chunk_index] += 1
        if self.parent.address.startswith("https://"):
            self.forger |= self._bad[key, segment_index, chunk_index] >= FORGERY_TRIES

    def _damaged_stream(self) -> None:
        for holding in self._shelf.incomplete():
            holding.transfer.num_damaged += 1

    def _has_holes(self) -> bool:
        """Chunks or a manifest are missing, perhaps because a damaged stream let them fall."""
        return not self._repairs and any(
            holding.transfer.manifest is not None or len(holding.transfer.have) < holding.transfer.num_chunks
            for holding in self._shelf.incomplete()
        )
