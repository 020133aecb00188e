"""Node processes against strangers without the token, bad and dead lines, and plain clients."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from blake3 import blake3

from echo_planes.weights.node.transport import MAX_JSON_BYTES
from echo_planes.weights.wire.frames import PingFrame, encode_frame
from echo_planes.weights.wire.manifest import key_text
from tests.integration.weight_nodes import (
    LIMIT_S,
    Fleet,
    Proxy,
    Signed,
    Uplink,
    as_node,
    free_port,
    payload_at,
    port_of,
    publication,
    run,
    until,
    until_true,
)

CHUNK_BYTES = 32 * 1024


def payload_of(signed: Signed) -> bytes:
    return b"".join(part.tobytes() for _, part in signed.segments)


# --- the token -------------------------------------------------------------------------------------


def test_another_token_is_refused_by_every_node() -> None:
    async def story() -> None:
        async with Fleet() as fleet:
            worker = await fleet.add("w0")
            await fleet.until_obeyed(1, LIMIT_S)
            asked = [("GET", "/v1/status"), ("POST", "/v1/feed?stream=0&of=1")]
            asked += [("POST", "/v1/tracker/join"), ("POST", "/v1/unwanted"), ("POST", "/control/commit")]
            headers = {"Authorization": "Bearer another", "X-Node": "w0"}
            async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(10)) as session:
                for address in (fleet.address, worker.address):
                    for method, path in asked:
                        async with session.request(method, address + path, data=b"{}") as response:
                            assert response.status == 401, (address, path)
            assert (await fleet.status())["peers"] == {"w0": "sender"}

    run(story)


def test_a_worker_with_the_wrong_token_says_so_and_does_not_hang(capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with Fleet() as fleet:
            worker = await fleet.add("w0", token="another")

            async def troubled() -> bool:
                return bool((await worker.status())["trouble"])

            await until_true(troubled, LIMIT_S, "trouble")
            status = await worker.status()
            assert status["trouble"].endswith("/v1/tracker/join answered 401: wrong or missing token")
            assert status["parent"] is None
            await fleet.publish(publication(fleet.signer, 1, 100_000))
            assert (await fleet.status())["peers"] == {}
            assert (await worker.status())["publications"] == []
            start_s = time.monotonic()
            await worker.close()
            assert time.monotonic() - start_s < LIMIT_S

    run(story)
    told = [line for line in capfd.readouterr().err.splitlines() if "wrong or missing token" in line]
    assert len(told) == 1  # not once for each attempt
    assert told[0].startswith("weights: w0: ")


# --- bad lines -------------------------------------------------------------------------------------


class Lines:
    """A fleet whose workers are reached by their children through lines that can be made bad."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.uplinks: dict[str, Uplink] = {}

    async def order(self, num_workers: int) -> list[str]:
        """The chain from the sender's child to the tail, once all follow it."""
        parents = await self.fleet.until_obeyed(num_workers, LIMIT_S)
        child_of = {parent: child for child, parent in parents.items()}
        order, at = [], "sender"
        while at in child_of:
            order.append(child_of[at])
            at = child_of[at]
        assert len(order) == num_workers  # a chain, not a star
        return order

    async def orders_to(self, name: str) -> list[dict[str, Any]]:
        """Orders of the tracker to a worker, in answer to an empty report."""
        headers = as_node(name)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(10)) as session,
            session.post(f"{self.fleet.address}/v1/tracker/report", json={"events": []}) as response,
        ):
            orders: list[dict[str, Any]] = (await response.json())["orders"]
            return orders


@contextlib.asynccontextmanager
async def lines(num_workers: int) -> AsyncIterator[Lines]:
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet())
        made = Lines(fleet)
        for number in range(num_workers):
            uplink = await stack.enter_async_context(Uplink())
            made.uplinks[f"w{number}"] = uplink
            uplink.target = free_port()
            await fleet.add(f"w{number}", port=uplink.target, advertise=uplink.place)
        yield made


def test_nothing_that_was_altered_on_the_way_is_kept_or_goes_on() -> None:
    async def story() -> None:
        async with lines(3) as made:
            head, middle, tail = await made.order(3)
            made.uplinks[head].flip_every = 300_000
            signed = publication(made.fleet.signer, 1, 8_000_000, chunk_bytes=CHUNK_BYTES)
            await made.fleet.publish(signed)
            throttled = False

            async def complete() -> bool:
                nonlocal throttled
                orders = await made.orders_to(head)
                throttled |= any(o["kind"] == "Throttle" and o["child_id"] == middle for o in orders)
                listed = (await made.fleet.workers[tail].status())["publications"]
                return any(one["complete"] for one in listed)

            await until_true(complete, LIMIT_S, "the tail to have it")
            had = {name: await made.fleet.until_complete(name, signed, LIMIT_S) for name in made.uplinks}
            moved = (await made.fleet.workers[middle].status())["parents_changed"]
            assert made.uplinks[head].num_flips > 3
            assert had[middle]["damaged_chunks"] > 3
            assert had[head]["damaged_chunks"] == had[tail]["damaged_chunks"] == 0  # it ended there
            assert throttled or moved
            for name, port in ((name, uplink.target) for name, uplink in made.uplinks.items()):
                payload = await payload_at(f"http://127.0.0.1:{port}", signed, name)
                assert f"b3:{blake3(payload).hexdigest()}" == signed.payload_digest, name

    run(story)


class Router(Proxy):
    """Between a worker and its sender: it can forget its connections, and tells neither end."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self._epoch = 0

    def forget(self) -> None:
        """Nothing passes any more on the connections that there are; new ones can be made."""
        self._epoch += 1

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, up: bool) -> None:
        epoch = self._epoch
        with contextlib.suppress(ConnectionError):
            while data := await source.read(64 * 1024):
                if epoch == self._epoch:
                    sink.write(data)
                    await sink.drain()
        sink.close()


def test_connections_that_died_unnoticed_are_made_anew() -> None:
    async def story() -> None:
        async with Fleet() as fleet, Router(port_of(fleet.address)) as router:
            await fleet.add("w0", sender=f"http://{router.place}")
            await fleet.until_obeyed(1, LIMIT_S)
            router.forget()
            signed = publication(fleet.signer, 1, 100_000)
            await fleet.publish(signed)
            await fleet.until_complete("w0", signed, LIMIT_S)

    run(story)


class Older(Proxy):
    """Between a worker and its sender: makes the sender one that speaks an older version of frames."""

    num_changed = 0  # pieces of a stream

    def _changed(self, data: bytes, up: bool) -> bytes:
        ours = encode_frame(PingFrame())[:3]  # the magic and the version
        if not up or ours not in data:
            return data
        self.num_changed += 1
        return data.replace(ours, ours[:2] + bytes([ours[2] - 1]))


def test_a_worker_whose_parent_speaks_another_version_of_frames_says_so_and_takes_nothing() -> None:
    async def story() -> None:
        async with Fleet() as fleet, Older(port_of(fleet.address)) as older:
            worker = await fleet.add("w0", sender=f"http://{older.place}")

            async def troubled() -> bool:
                return bool((await worker.status())["trouble"])

            await until_true(troubled, LIMIT_S, "trouble")
            await fleet.publish(publication(fleet.signer, 1, 100_000))
            before = older.num_changed
            await until(lambda: older.num_changed > before + 2, LIMIT_S, "the worker to ask again")
            status = await worker.status()
            told = r"sender sent what is not sound: frames of version \d+; this node speaks version \d+: .*"
            assert re.fullmatch(told, status["trouble"])
            assert status["publications"] == []

    run(story)


# --- plain clients ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Signed]]:
    """host:port of a sender, and what it serves."""
    fleet = Fleet()

    async def begin() -> Signed:
        await fleet.__aenter__()
        signed = publication(fleet.signer, 1, 300_000, chunk_bytes=CHUNK_BYTES)
        await fleet.publish(signed)
        return signed

    signed = asyncio.run(begin())
    try:
        yield fleet.address.removeprefix("http://"), signed
    finally:
        fleet.sender.close()


def ask(
    place: str, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(place, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response, response.read()


def test_any_client_with_the_token_can_read_ranges(served: tuple[str, Signed]) -> None:
    place, signed = served
    path = f"/v1/publications/{key_text(signed.key)}/payload"
    token = as_node("reader")
    response, data = ask(place, "GET", path, {**token, "Range": "bytes=40000-139999"})
    assert response.status == 206
    assert response.headers["Content-Range"] == "bytes 40000-139999/300000"
    assert data == payload_of(signed)[40_000:140_000]
    response, data = ask(place, "GET", path, token)
    assert (response.status, data) == (200, payload_of(signed))
    response, data = ask(place, "GET", path, {**token, "Range": "bytes=300000-"})
    assert (response.status, response.headers["Content-Range"]) == (416, "bytes */300000")
    response, data = ask(place, "GET", path, {"Range": "bytes=0-9"})
    assert response.status == 401
    assert payload_of(signed)[:10] not in data


@pytest.mark.parametrize("path", ["/v1/tracker/join", "/v1/unwanted", "/v1/feed?stream=0&of=1"])
def test_a_message_that_is_too_large_is_refused(served: tuple[str, Signed], path: str) -> None:
    place, _ = served
    body = json.dumps({"events": "x" * MAX_JSON_BYTES}).encode()
    headers = {**as_node("w0"), "Content-Type": "application/json"}
    response, _ = ask(place, "POST", path, headers, body)
    assert response.status == 413
    response, _ = ask(place, "GET", "/v1/status", headers)
    assert response.status == 200  # it goes on
