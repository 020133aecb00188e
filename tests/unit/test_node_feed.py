"""Publications that a node keeps and sends to a child, frame by frame: no sockets, no waiting."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import ClusterError, WeightsError
from echo_planes.weights.node.feed import MAX_BEGUN, Feeds, _Child, _Feed
from echo_planes.weights.node.shelf import KEPT_PATCHES, Shelf, Wanted, Wants, wants_message
from echo_planes.weights.node.spool import SpoolFile
from echo_planes.weights.node.transport import _STATUS
from echo_planes.weights.wire.frames import (
    CancelFrame,
    ChunkFrame,
    Frame,
    FrameParser,
    ManifestFrame,
    SegmentFrame,
)
from echo_planes.weights.wire.manifest import PublicationKey, key_text
from echo_planes.weights.wire.messages import decode
from echo_planes.weights.wire.signing import Verifier
from tests.unit.wire import LIMITS, SIGNER, Signed, signed

VERIFIER = Verifier(SIGNER.public_bytes())
MOST_LAG = 10 * (MAX_BEGUN + 2)  # versions: so many publications at ten intervals each are sent first
SCRATCH = Path("/tmp")


def patch(version: int, size: int = 512) -> Signed:
    key = PublicationKey("L0", version, "compact", version - 1)
    return signed(bytes([version % 256]) * size, key=key)


def full(version: int, lineage: str = "L0") -> Signed:
    return signed(bytes([version % 256]) * 256, key=PublicationKey(lineage, version, "full", -1))


def key_of(publication: Signed) -> PublicationKey:
    return publication.segments[0].header.key


def put(shelf: Shelf, publication: Signed, *, num_chunks: int | None = None) -> None:
    """The first chunks of it, or all of it with its manifest."""
    for segment in publication.segments:
        shelf.add_segment(segment)
    for at in publication.chunks[:num_chunks]:
        shelf.add_chunk(ChunkFrame(key_of(publication), *at, publication.chunk(*at)))
    if num_chunks is None:
        shelf.commit(publication.manifest)


class Wire:
    """Stands for the response of a feed: parses what is written to it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._parser = FrameParser(LIMITS)

    async def write(self, data: bytes) -> None:
        self.frames += self._parser.feed(data)


class Link:
    """Streams from one shelf into another, one frame at a time."""

    def __init__(self, source: Shelf, target: Shelf, streams: int = 1) -> None:
        self.source = source
        self.target = target
        self.cancelled: list[PublicationKey] = []
        self.state = _Child(source)
        self.wires = [Wire() for _ in range(streams)]
        self.feeds: list[_Feed] = []
        for stream in range(streams):
            self.feeds.append(self._open(stream))

    def reopen(self, stream: int) -> None:
        """The stream breaks, and the child opens it anew."""
        self.wires[stream] = Wire()
        self.feeds[stream] = self._open(stream)

    def _open(self, stream: int) -> _Feed:
        wants = Wants(wants_message(self.target, None))
        response: Any = self.wires[stream]
        feeds, of = Feeds(self.source), len(self.wires)
        feed = _Feed(feeds, self.source, response, "child", self.state, stream, of, wants)
        self.state.enter(feed)
        return feed

    async def step(self, stream: int = 0) -> bool:
        """Carry what one stream sends next."""
        going_on = await self.feeds[stream].send_next()
        wire = self.wires[stream]
        for frame in wire.frames:
            match frame:
                case SegmentFrame(signed_segment):
                    self.target.add_segment(signed_segment)
                case ChunkFrame():
                    self.target.add_chunk(frame)
                case ManifestFrame(manifest):
                    self.target.commit(manifest)
                case CancelFrame(key):
                    self.cancelled.append(key)
                    self.target.give_up(key)
        wire.frames.clear()
        return going_on

    async def drain(self) -> None:
        while any([await self.step(stream) for stream in range(len(self.feeds))]):
            pass


def on_shelves(story: Callable[[Shelf, Shelf], Awaitable[None]]) -> None:
    async def run() -> None:
        shelves = [Shelf(VERIFIER, LIMITS, SCRATCH) for _ in range(2)]
        try:
            await story(*shelves)
        finally:
            for shelf in shelves:
                shelf.close()

    asyncio.run(run())


def versions(shelf: Shelf) -> list[int]:
    return [holding.key.version for holding in shelf.complete()]


# --- a child that is gone or out -----------------------------------------------------------------


class Deaf:
    """Stands for the response of a feed whose child reads nothing."""

    async def write(self, data: bytes) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("frame", ["ping", "cancel"])
def test_a_child_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, frame: str) -> None:
    monkeypatch.setattr("echo_planes.weights.node.feed.WRITE_S", 0.01)
    monkeypatch.setattr("echo_planes.weights.node.feed.PING_INTERVAL_S", 0.0)

    async def story(source: Shelf, target: Shelf) -> None:
        if frame == "cancel":  # of a publication that the child has in part, and its parent no longer wants
            put(target, patch(1), num_chunks=1)
            source.cancel(key_of(patch(1)))
        response: Any = Deaf()
        state = _Child(source)
        one = _Feed(Feeds(source), source, response, "child", state, 0, 1, Wants(wants_message(target, None)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0) as limit:
                await one.run()
        assert not limit.expired()

    on_shelves(story)


def test_a_peer_that_is_dropped_while_it_asks_gets_no_feed() -> None:
    async def story(source: Shelf, target: Shelf) -> None:
        feeds = Feeds(source)

        async def read() -> bytes:
            feeds.cut("w0")
            return b"{}"

        request: Any = SimpleNamespace(headers={"X-Node": "w0"}, query={"stream": "0", "of": "1"}, read=read)
        with pytest.raises(WeightsError, match="out for now"):
            await feeds.serve(request)

    on_shelves(story)


# --- a child slower than the publications --------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans())
def test_a_child_slower_than_the_publications_still_gets_new_ones(paces: list[int], late: bool) -> None:
    """`paces`: frames of each stream between two publications, which has up to ten."""

    async def story(source: Shelf, target: Shelf) -> None:
        if late:
            for version in range(1, KEPT_PATCHES + 1):
                put(source, patch(version))
        link = Link(source, target, len(paces))
        begin = KEPT_PATCHES if late else 0
        seen: list[int] = []  # versions that became complete at the child
        for version in range(begin + 1, begin + 61):
            put(source, patch(version))
            for stream, pace in enumerate(paces):
                for _ in range(pace):
                    await link.step(stream)
            seen += [number for number in versions(target) if number not in seen]
            assert len(source.holdings) <= KEPT_PATCHES + MAX_BEGUN
            if version - begin > MOST_LAG:
                assert seen[-1:] > [version - MOST_LAG]

    on_shelves(story)


def test_all_that_came_before_the_child_is_sent_to_it_in_order() -> None:
    async def story(source: Shelf, target: Shelf) -> None:
        put(source, full(0))
        for version in range(1, KEPT_PATCHES + 1):
            put(source, patch(version))
        await Link(source, target, 2).drain()
        assert versions(target) == list(range(KEPT_PATCHES + 1))

    on_shelves(story)


def test_what_is_being_sent_is_retired_only_afterwards() -> None:
    async def story(source: Shelf, target: Shelf) -> None:
        put(source, patch(1))
        link = Link(source, target)
        await link.step()
        for version in range(2, 20):
            put(source, patch(version))
        assert versions(source) == [1, *range(20 - KEPT_PATCHES, 20)]
        await link.drain()
        assert link.cancelled == []
        assert versions(target) == [1, 19]
        assert versions(source) == list(range(20 - KEPT_PATCHES, 20))
        other = Link(source, target)
        await other.step()
        other.state.leave(other.feeds[0])
        assert all(holding.senders == 0 for holding in source.holdings.values())

    on_shelves(story)


def test_a_stream_that_a_child_opens_again_holds_nothing_back() -> None:
    async def story(source: Shelf, target: Shelf) -> None:
        put(source, patch(1))
        link = Link(source, target)
        await link.step()
        again = _Feed(Feeds(source), source, link.wires[0], "child", link.state, 0, 1, Wants(Wanted()))  # type: ignore[arg-type]
        link.state.enter(again)
        assert link.feeds[0].ended
        link.state.leave(again)
        assert source.holdings[key_of(patch(1))].senders == 0

    on_shelves(story)


# --- several streams -----------------------------------------------------------------------------


def test_a_stream_that_stands_still_holds_up_only_what_it_was_handed() -> None:
    async def story(source: Shelf, target: Shelf) -> None:
        publication = patch(1, size=4096)
        put(source, publication)
        link = Link(source, target, 2)
        for _ in publication.segments:
            await link.step(1)
        assert await link.feeds[1].send_next()  # a chunk that stays on its way
        while await link.step(0):
            pass
        holding = target.holdings[key_of(publication)]
        assert len(holding.transfer.have) == len(publication.chunks) - 1

        link.state.leave(link.feeds[1])
        assert not await link.step(0)  # how much of it arrived, the child will say
        link.reopen(1)
        await link.step(0)
        assert holding.transfer.complete
        assert not await link.step(0)

    on_shelves(story)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["step", "lose", "break"])), max_size=80))
def test_streams_that_break_at_any_moment_lose_nothing(events: list[tuple[int, str]]) -> None:
    """`lose`: a frame goes out and is under way when the stream next breaks."""

    async def story(source: Shelf, target: Shelf) -> None:
        for version in (1, 2):
            put(source, patch(version, size=2048))
        link = Link(source, target, 3)
        lossy: set[int] = set()
        for stream, event in events:
            if event == "break":
                link.reopen(stream)
                lossy.discard(stream)
            elif event == "lose" or stream in lossy:  # a stream keeps its order
                lossy.add(stream)
                await link.feeds[stream].send_next()
                link.wires[stream].frames.clear()
            else:
                await link.step(stream)
        for stream in lossy:
            link.reopen(stream)
        await link.drain()
        assert versions(target) == [1, 2]

    on_shelves(story)


def test_a_throttled_child_is_sent_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []

    async def sleep(seconds: float) -> None:
        waits_s.append(seconds)

    async def story(source: Shelf, target: Shelf) -> None:
        publication = patch(1, size=4096)
        put(source, publication)
        link = Link(source, target, 2)
        link.state.free_s = time.monotonic() + 1.0  # the link is busy
        for feed in link.feeds:
            feed._feeds.throttle({"child": 1000.0, "other": 1.0})
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await link.drain()
        assert target.holdings[key_of(publication)].transfer.complete
        assert waits_s[0] == pytest.approx(1.0, abs=0.2)
        assert waits_s[-1] > 1.0 + 4.096 / 2
        waits_s.clear()
        for feed in link.feeds:
            feed._feeds.throttle({"child": 0.0})
        put(source, patch(2))
        await link.drain()
        assert versions(target) == [1, 2]
        assert not waits_s

    on_shelves(story)


# --- what will not come any more -----------------------------------------------------------------


def test_a_reopened_stream_cancels_what_its_parent_has_retired_even_while_it_sends() -> None:
    async def story(source: Shelf, target: Shelf) -> None:
        put(target, patch(1), num_chunks=2)
        for version in range(1, KEPT_PATCHES + 3):
            put(source, patch(version))
        link = Link(source, target)
        assert await link.step()  # there is something else to send
        assert link.cancelled == [key_of(patch(1))]
        assert key_of(patch(1)) not in target.holdings
        assert await link.step()
        assert len(link.cancelled) == 1

    on_shelves(story)


def test_what_a_parent_has_not_got_yet_is_not_cancelled() -> None:
    async def story(source: Shelf, target: Shelf) -> None:
        put(target, patch(5), num_chunks=2)
        put(source, patch(4))
        link = Link(source, target)
        await link.drain()
        assert link.cancelled == []
        put(source, patch(5), num_chunks=1)
        put(source, patch(5))
        await link.drain()
        assert sorted(versions(target)) == [4, 5]

    on_shelves(story)


# --- what a child says it has --------------------------------------------------------------------


def test_what_a_child_claims_takes_no_memory_beyond_what_is_here() -> None:
    async def story(source: Shelf, target: Shelf) -> None:
        have = {key_text(key_of(patch(v))): [(0, 2), (3, 2**40)] for v in range(1, 200)}
        wants = Wants(Wanted(have))
        put(source, patch(1), num_chunks=0)
        chunks = wants.chunks(source.holdings[key_of(patch(1))].transfer)
        assert chunks.ranges() == [(0, 2), (3, 8)]
        wrong: list[Any] = [[[2, 1]], [[0, 2], [1, 3]], [[0]], [["a", 1]], {}, [[0, 2], [2, 3]]]
        for ranges in wrong:
            with pytest.raises(WeightsError):
                Wants(decode(json.dumps({"have": {key_text(key_of(patch(1))): ranges}}), Wanted, "wanted"))

    on_shelves(story)


def test_a_child_is_not_sent_again_what_it_has_staged() -> None:
    wants = Wants(Wanted(newest=("L0", 7)))
    assert wants.skips(key_of(full(6)))
    assert wants.skips(key_of(patch(7)))
    assert not wants.skips(key_of(full(7)))  # those that it feeds may need it
    assert not wants.skips(key_of(full(8)))
    assert not wants.skips(key_of(full(7, "L1")))


# --- what comes in -------------------------------------------------------------------------------


def test_a_chunk_that_could_not_be_written_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(shelf: Shelf, _: Shelf) -> None:
        one = patch(1)
        put(shelf, one, num_chunks=0)
        frames = [ChunkFrame(key_of(one), *at, one.chunk(*at)) for at in one.chunks]

        def no_room(*args: object) -> None:
            raise ClusterError("no room")

        with monkeypatch.context() as broken:
            broken.setattr(SpoolFile, "write", no_room)
            with pytest.raises(ClusterError):
                shelf.add_chunk(frames[0])
        holding = shelf.holdings[key_of(one)]
        assert len(holding.transfer.have) == holding.transfer.bytes_have == len(holding.arrivals) == 0
        assert [shelf.add_chunk(frame) for frame in frames] == ["accepted"] * len(frames)
        shelf.commit(one.manifest)
        assert b"".join(part.tobytes() for _, part in holding.segments()) == one.payload

    on_shelves(story)


def test_a_publication_that_may_not_come_in_is_refused_without_an_error() -> None:
    async def story(shelf: Shelf, _: Shelf) -> None:
        shelf.admission.follow("L1")
        shelf.admission.follow("L0")
        shelf.admission._followed.version = 5
        for void in (full(3), full(9, "L1")):
            assert shelf.add_segment(void.segments[0]) is None
            assert key_of(void) in shelf.unwanted
        forged = signed(bytes(64), key=PublicationKey("L0", 2, "full", -1), signer=type(SIGNER).generate())
        with pytest.raises(WeightsError, match="forged"):
            shelf.add_segment(forged.segments[0])
        assert key_of(forged) not in shelf.unwanted

    on_shelves(story)


def test_a_store_that_is_away_is_worth_asking_again() -> None:
    from echo_planes.weights.store.objects import StoreUnreachableError

    error = StoreUnreachableError("away")
    assert next(code for kind, code in _STATUS.items() if isinstance(error, kind)) == 503
