"""Connections of strangers: idle ones, half of a request, bytes that no client sends. Real node processes."""

from __future__ import annotations

import asyncio
import contextlib
import resource

import aiohttp
import pytest

from echo_planes.weights.node.door import (
    MAX_PER_NODE,
    MAX_STRANGERS_PER_ADDRESS,
    RESERVED_DESCRIPTORS,
    STRANGER_S,
)
from tests.integration.test_weight_nodes_tls import make_certificates
from tests.integration.weight_nodes import (
    LIMIT_S,
    Fleet,
    as_node,
    port_of,
    publication,
    run,
    until,
    until_true,
)

NUM_IDLE = 400
DESCRIPTORS = RESERVED_DESCRIPTORS + 40
HALF = b"POST /v1/tracker/join HTTP/1.1\r\nHost: x\r\nX-Node: w0\r\n"


class Strangers:
    """Connections to one port that never become a request."""

    def __init__(self, port: int, said: bytes) -> None:
        self._port = port
        self._said = said
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.num_ended = 0

    async def come(self, number: int) -> None:
        """So many more."""
        for _ in range(number):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            if self._said:
                writer.write(self._said)
            self._open.append((reader, writer))
            self._tasks.append(asyncio.create_task(self._watch(reader)))

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1024):
                pass
        self.num_ended += 1

    async def __aenter__(self) -> Strangers:
        return self

    async def __aexit__(self, *why: object) -> None:
        for _, writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize(
    "said",
    [b"", HALF, HALF + b"X-More: " + b"x" * 4000],
    ids=["idle", "half of the headers", "half of a long header"],
)
def test_idle_and_half_open_connections_keep_nobody_out_and_end(
    said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        async with Fleet() as fleet, Strangers(port_of(fleet.address), said) as strangers:
            resource.prlimit(fleet.sender.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
            await strangers.come(NUM_IDLE)
            await fleet.add("w0")  # a real worker's node, from the same address
            await fleet.until_obeyed(1, LIMIT_S)
            signed = publication(fleet.signer, 1, 500_000)
            await fleet.publish(signed)  # the learner's own hand-over
            await fleet.until_complete("w0", signed, LIMIT_S)
            await until(
                lambda: strangers.num_ended == NUM_IDLE, 4 * STRANGER_S, "all strangers to be sent away"
            )
            await strangers.come(1)
            assert strangers.num_ended < NUM_IDLE + 1  # one alone has its time

    run(story)
    assert "Traceback" not in capfd.readouterr().err


def test_strangers_never_are_many_at_a_time() -> None:
    async def story() -> None:
        async with Fleet() as fleet, Strangers(port_of(fleet.address), b"") as strangers:
            await strangers.come(MAX_STRANGERS_PER_ADDRESS + 20)
            await until(lambda: strangers.num_ended >= 20, LIMIT_S, "the oldest to go")

    run(story)


def test_a_tls_handshake_that_does_not_go_on_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))

    async def story() -> None:
        async with (
            Fleet(**certificates) as fleet,
            Strangers(port_of(fleet.address), b"\x16\x03") as strangers,
        ):
            await strangers.come(20)
            await until(lambda: strangers.num_ended == 20, 4 * STRANGER_S, "all to be sent away")

    run(story)


def test_one_node_has_so_many_connections_and_no_more() -> None:
    """They rest after their first answer: a feed would end when the next one takes its stream."""
    shown = "".join(f"{name}: {value}\r\n" for name, value in as_node("greedy").items())
    asked = f"GET /v1/status HTTP/1.1\r\nHost: x\r\n{shown}\r\n".encode()

    async def story() -> None:
        async with Fleet() as fleet:
            resting, answers = [], []
            for _ in range(MAX_PER_NODE + 5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port_of(fleet.address))
                writer.write(asked)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
                answers.append(int(head.split()[1]))
                resting.append((reader, writer))
            assert answers == [200] * MAX_PER_NODE + [429] * 5
            assert b"at most" in await asyncio.wait_for(resting[-1][0].read(1000), LIMIT_S)
            for _, writer in resting:
                writer.close()

            async def again() -> bool:
                async with (
                    aiohttp.ClientSession(headers=as_node("greedy")) as session,
                    session.get(f"{fleet.address}/v1/status") as response,
                ):
                    return response.status == 200

            await until_true(again, LIMIT_S, "its connections to be forgotten")

    run(story)


BAD_REQUESTS: dict[str, tuple[bytes, int]] = {
    "bytes that are no text as credential": (
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Node: w0\r\nAuthorization: Bearer \xff\xfe\xc3\r\n\r\n",
        401,
    ),
    "bytes that are no text as name": (
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Node: \xff\xfe\r\nAuthorization: Bearer a\r\n\r\n",
        401,
    ),
    "a header that is too large": (
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * 20_000 + b"\r\n\r\n",
        400,
    ),
    "too many headers": (
        b"GET /v1/status HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(1000)) + b"\r\n",
        400,
    ),
    "a line that is too long": (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a length of 5,000 digits": (
        b"POST /v1/feed HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        400,
    ),
    "no HTTP at all": (b"\x00\x01\x02 \xff\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_what_is_no_request_gets_one_line_and_leaves_none_in_the_log(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        async with Fleet() as fleet:
            worker = await fleet.add("w0")
            said, status = BAD_REQUESTS[name]
            for address in (fleet.address, worker.address):
                reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
                writer.write(said)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
                assert head.split()[1] == str(status).encode(), head
                body = await asyncio.wait_for(reader.read(1000), LIMIT_S)
                assert b"Traceback" not in body
                assert b"\n" not in body.strip()
                writer.close()
            await fleet.until_obeyed(1, LIMIT_S)

    run(story)
    assert capfd.readouterr().err == ""


def numbers() -> list[tuple[str, str, str]]:
    """(method, path, body) with numbers of 5,000 digits."""
    digits = "9" * 5000
    return [
        ("POST", "/v1/tracker/report", f'{{"events": [{{"kind": "Report", "chunks_have": {digits}}}]}}'),
        ("POST", "/v1/feed?stream=0&of=1", f'{{"newest": ["L", {digits}]}}'),
        ("POST", "/v1/feed?stream=0&of=1", f'{{"have": {{"L.1.full.-1": [[0, {digits}]]}}}}'),
        ("POST", f"/v1/feed?stream={digits}&of=1", "{}"),
        ("POST", "/v1/unwanted", f'{{"key": "L.{digits}.full.-1"}}'),
        ("POST", "/v1/unwanted", f'{{"key": {digits}}}'),
        ("GET", f"/v1/publications/L.{digits}.full.-1/payload", ""),
        ("GET", f"/v1/store/objects/objects/x?part={digits}-{digits}", ""),
        ("GET", f"/v1/snapshot/L/{digits}/list/objects", ""),
    ]


def test_numbers_of_thousands_of_digits_are_refused(
    capfd: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def story() -> None:
        store = str(tmp_path_factory.mktemp("store"))
        async with Fleet(store=store) as fleet, aiohttp.ClientSession(headers=as_node("w0")) as session:
            await fleet.add("w0")
            await fleet.until_obeyed(1, LIMIT_S)
            for method, path, body in numbers():
                async with session.request(method, fleet.address + path, data=body) as response:
                    assert 400 <= response.status < 500, (path[:60], response.status)
            await fleet.until_obeyed(1, LIMIT_S)

    run(story)
    assert "Traceback" not in capfd.readouterr().err
