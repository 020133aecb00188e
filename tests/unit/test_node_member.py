"""A worker's node and the sender's: what they believe of each other, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from echo_planes.errors import ClusterError, WeightsError
from echo_planes.weights.chain.events import (
    PING_INTERVAL_S,
    Answer,
    Assign,
    CancelBroadcast,
    PeerJoined,
    Report,
    Tick,
)
from echo_planes.weights.chain.tracker import FORGOTTEN_S, Tracker, TrackerSettings
from echo_planes.weights.node.dispatch import Dispatch
from echo_planes.weights.node.feed import Feeds
from echo_planes.weights.node.link import DEAD_STREAM_S, Parent, ParentLink
from echo_planes.weights.node.membership import Membership
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.shelf import Shelf
from echo_planes.weights.wire.frames import ChunkFrame, PingFrame, encode_frame
from echo_planes.weights.wire.signing import Verifier
from tests.unit.wire import LIMITS, PATCH, SIGNER, signed

VERIFIER = Verifier(SIGNER.public_bytes())


class Request:
    """Stands for a request of node w0 with a JSON body."""

    def __init__(self, *events: Any) -> None:
        self.headers = {"X-Node": "w0"}
        self._body = msgspec.json.encode({"events": events})

    async def read(self) -> bytes:
        return self._body


def member(shelf: Shelf, session: Any, sender: str) -> Membership:
    options = NodeSettings("worker", "w0", "token", SIGNER.public_bytes().hex(), sender)
    feeds = Feeds(shelf)
    return Membership(options, session, shelf, feeds, "https://w0", lambda: None, lambda lineage: -1)


def test_a_peer_that_the_tracker_has_forgotten_is_asked_to_join_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def story() -> None:
        now_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: now_s)
        monkeypatch.setattr("echo_planes.weights.node.dispatch.time", clock)
        tracker = Tracker(TrackerSettings())
        dispatch = Dispatch(tracker, Feeds(Shelf(VERIFIER, LIMITS, tmp_path)), lambda line: None, "secret")
        report = Report("w0", "", None, 0, 0, 0.0, 0, 0.0, False, False, -1, -1, False)

        async def answer_to(handler: Any, *events: Any) -> dict[str, Any]:
            response = await handler(Request(*events))
            parsed: dict[str, Any] = json.loads(response.body)
            return parsed

        assert await answer_to(dispatch.report, report) == {"join": True}
        assert (await answer_to(dispatch.join, PeerJoined("w0", "http://w0:1", "")))["orders"]
        assert (await answer_to(dispatch.report, report))["orders"]
        while now_s < FORGOTTEN_S + 10:
            now_s += 0.5
            dispatch.handle(Tick())
        assert await answer_to(dispatch.report, report) == {"join": True}
        assert (await answer_to(dispatch.join, PeerJoined("w0", "http://w0:1", "")))["orders"]

    asyncio.run(story())


@pytest.mark.parametrize("host", ["a..b", ".a", "x" * 64, "a." + "x" * 64, "a b", "[::1", ""])
def test_an_address_whose_name_no_child_can_look_up_is_refused(host: str, tmp_path: Path) -> None:
    async def story() -> None:
        feeds = Feeds(Shelf(VERIFIER, LIMITS, tmp_path))
        dispatch = Dispatch(Tracker(TrackerSettings()), feeds, lambda line: None, "secret")
        for sound in ("a-b.c_d.", "x" * 63 + ".e", "10.0.0.1", "[::1]"):
            request: Any = Request(PeerJoined("w0", f"http://{sound}:1", ""))
            await dispatch.join(request)
        request = Request(PeerJoined("w0", f"http://{host}:1", ""))
        with pytest.raises(WeightsError, match="joins with the address"):
            await dispatch.join(request)

    asyncio.run(story())


class Unreachable:
    """Stands for a session: whoever is asked never answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def post(self, url: str, data: object, **shown: object) -> Unreachable:
        self.asked.append(url)
        return self

    async def __aenter__(self) -> aiohttp.ClientResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def __aexit__(self, *why: object) -> None:
        pass


def test_the_token_does_not_go_out_in_plain_text_where_the_sender_speaks_tls(tmp_path: Path) -> None:
    async def story() -> None:
        session = Unreachable()
        one = member(Shelf(VERIFIER, LIMITS, tmp_path), session, "https://sender")
        plain, safe = (Assign("w0", "w1", f"{kind}://w1", "shown") for kind in ("http", "https"))
        await one._follow(Answer((plain,)))
        assert one.link is None
        assert "TLS" in one.trouble
        await one._follow(Answer((safe,)))
        assert one.link is not None
        assert one.trouble == ""
        await one._follow(Answer((plain,)))
        assert one.link.parent.address == "https://w1"  # the present one is kept
        await one.leave()

    asyncio.run(story())


def test_a_cancelled_publication_is_refused_without_waiting_for_the_parent(tmp_path: Path) -> None:
    async def story() -> None:
        session = Unreachable()
        shelf = Shelf(VERIFIER, LIMITS, tmp_path)
        one = member(shelf, session, "http://sender")
        await one._follow(Answer((Assign("w0", "w1", "http://w1", "shown"),)))
        shelf.add_segment(signed(bytes(100), key=PATCH).segments[0])
        order = Answer((CancelBroadcast(PATCH, ("w0",)),))
        await asyncio.wait_for(one._follow(order), 5.0)
        await asyncio.sleep(0)
        assert session.asked[-1] == "http://w1/v1/unwanted"
        await one.leave()

    asyncio.run(story())


def test_a_publication_that_is_whole_is_not_refused_with_every_answer(tmp_path: Path) -> None:
    async def story() -> None:
        session = Unreachable()
        shelf = Shelf(VERIFIER, LIMITS, tmp_path)
        one = member(shelf, session, "http://sender")
        await one._follow(Answer((Assign("w0", "w1", "http://w1", "shown"),)))
        whole = signed(bytes(100), key=PATCH)
        for segment in whole.segments:
            shelf.add_segment(segment)
        for at in whole.chunks:
            shelf.add_chunk(ChunkFrame(PATCH, *at, whole.chunk(*at)))
        shelf.commit(whole.manifest)
        await one._follow(Answer((CancelBroadcast(PATCH, ("w0",)),)))
        await asyncio.sleep(0)
        assert [holding.key for holding in shelf.complete()] == [PATCH]
        assert "http://w1/v1/unwanted" not in session.asked
        await one.leave()
        shelf.close()

    asyncio.run(story())


def test_a_stream_goes_on_after_there_was_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("echo_planes.weights.node.link.RETRY_S", (0.0, 0.0))

    async def story() -> None:
        shelf = Shelf(VERIFIER, LIMITS, tmp_path)
        num_tries = 0
        tried_again = asyncio.Event()

        async def pull(link: ParentLink, number: int) -> None:
            nonlocal num_tries
            num_tries += 1
            if num_tries == 1:
                raise ClusterError("no room for weights")
            assert link.trouble == "no room for weights"
            one = signed(bytes(100), key=PATCH)
            shelf.add_segment(one.segments[0])
            link._take_chunk(ChunkFrame(PATCH, 0, 0, one.chunk(0, 0)))
            tried_again.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(ParentLink, "_pull", pull)
        session: Any = Unreachable()
        link = ParentLink(session, shelf, Parent("w1", "http://w1", ""), 1, lambda: None)
        await asyncio.wait_for(tried_again.wait(), 5.0)
        assert link.trouble == ""
        await link.close()
        shelf.close()

    asyncio.run(story())


class _Pipe:
    """Stands for a session to a parent: a stream brings what the test puts into its queue."""

    def __init__(self) -> None:
        self.opened: list[asyncio.Queue[bytes]] = []  # in the order of opening
        self.numbers: list[int] = []
        self.closed: list[int] = []

    @contextlib.asynccontextmanager
    async def post(self, url: str, data: object, **shown: object) -> AsyncIterator[Any]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.opened.append(queue)
        self.numbers.append(int(url.partition("stream=")[2].partition("&")[0]))

        async def arriving() -> AsyncIterator[bytes]:
            while True:
                yield await queue.get()
                queue.task_done()

        try:
            yield SimpleNamespace(status=200, content=SimpleNamespace(iter_any=arriving))
        finally:
            self.closed.append(self.numbers[self.opened.index(queue)])


async def _happens(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("others", ["ping", "bring chunks", "are silent too"])
def test_a_stream_that_is_silent_while_others_ping_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: str
) -> None:
    now_s = 0.0
    monkeypatch.setattr("echo_planes.weights.node.link.time", SimpleNamespace(monotonic=lambda: now_s))
    one = signed(bytes(100), key=PATCH)
    brought = {
        "ping": encode_frame(PingFrame()),
        "bring chunks": encode_frame(ChunkFrame(PATCH, 0, 0, one.chunk(0, 0))),
        "are silent too": b"",
    }[others]

    async def story() -> None:
        nonlocal now_s
        pipe: Any = _Pipe()
        shelf = Shelf(VERIFIER, LIMITS, tmp_path)
        link = ParentLink(pipe, shelf, Parent("w1", "http://w1", ""), 3, lambda: None)
        await _happens(lambda: link.connected == {0, 1, 2})
        while now_s <= DEAD_STREAM_S:
            assert pipe.closed == []
            now_s += PING_INTERVAL_S
            for stream in (0, 2) if brought else ():
                pipe.opened[stream].put_nowait(brought)
                await pipe.opened[stream].join()
        if others == "ping":
            await _happens(lambda: len(pipe.opened) == 4 and len(link.connected) == 3)
            assert (pipe.closed, pipe.numbers[3]) == ([1], 1)
            pipe.opened[0].put_nowait(brought)  # the new one has its own time
            await pipe.opened[0].join()
        now_s += 10 * DEAD_STREAM_S  # no stream was read for so long: none is to blame
        pipe.opened[2].put_nowait(encode_frame(PingFrame()))
        await pipe.opened[2].join()
        await asyncio.sleep(0.02)
        assert pipe.closed == ([1] if others == "ping" else [])
        await link.close()
        shelf.close()

    asyncio.run(story())
