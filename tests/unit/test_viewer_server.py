"""Answers of the viewer's server, and what the command says of a mistake."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from echo_planes import view
from echo_planes.reporting.viewer import server
from echo_planes.reporting.viewer.queries import find
from echo_planes.reporting.viewer.run_folder import RunFolder
from echo_planes.reporting.viewer.server import make_app
from tests.unit.stored_rollouts import EVIL, a_group, store_rows

TOKEN = "a-token"
LIMIT_S = 30.0  # for what never takes so long
TestServer.__test__ = TestClient.__test__ = False  # type: ignore[attr-defined]


def served(run: Path, scenario: Callable[[TestClient], Awaitable[None]]) -> None:
    """Run `scenario` against the pages of a run."""

    async def main() -> None:
        async with TestClient(TestServer(make_app(RunFolder(run), TOKEN), host="127.0.0.1")) as client:
            await scenario(client)

    asyncio.run(main())


def a_run(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("model:\n  path: builtin:tiny-math\n")
    return store_rows(folder, [a_group("L0/g0"), a_group("L0/g1")], {0: 4})


async def text(client: TestClient, path: str, status: int = 200) -> str:
    async with client.get(f"/{TOKEN}/{path}") as response:
        assert response.status == status
        return await response.text()


# --- who -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", f"/{TOKEN}x/", f"/x/{TOKEN}/", "/%61-toke/", "/group/0", "//", "/ä/"])
def test_every_address_begins_with_the_token(tmp_path: Path, path: str) -> None:
    async def scenario(client: TestClient) -> None:
        async with client.get(path) as response:
            assert response.status == 403
            assert "L0" not in await response.text()
            assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")

    served(a_run(tmp_path), scenario)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "localhost", ""]
)
def test_another_hosts_name_is_refused(tmp_path: Path, host: str) -> None:
    async def scenario(client: TestClient) -> None:
        async with client.get(f"/{TOKEN}/", headers={"Host": host}) as response:
            assert response.status == 403
        own = f"localhost:{client.port}"
        async with client.get(f"/{TOKEN}/", headers={"Host": own}) as response:
            assert response.status == 200

    served(a_run(tmp_path), scenario)


def test_a_request_for_no_path_at_all_is_refused(tmp_path: Path) -> None:
    async def scenario(client: TestClient) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == b"403"
        writer.close()

    served(a_run(tmp_path), scenario)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_only_get_is_answered(tmp_path: Path, method: str) -> None:
    async def scenario(client: TestClient) -> None:
        async with client.request(method, f"/{TOKEN}/") as response:
            assert response.status == 405

    served(a_run(tmp_path), scenario)


def test_every_answer_forbids_what_a_page_could_do(tmp_path: Path) -> None:
    async def scenario(client: TestClient) -> None:
        for path in ("", "group/0", "group/0/1", "group/77", "nothing", "?step_min=x"):
            async with client.get(f"/{TOKEN}/{path}") as response:
                headers = response.headers
                policy = headers["Content-Security-Policy"]
                assert "unsafe" not in policy
                assert "http" not in policy
                assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
                assert headers["X-Content-Type-Options"] == "nosniff"

    served(a_run(tmp_path), scenario)


# --- what ----------------------------------------------------------------------------------------


def test_links_lead_from_the_list_to_a_sample_and_back(tmp_path: Path) -> None:
    async def scenario(client: TestClient) -> None:
        page = await text(client, "")
        assert ">L0/g0</a>" in page
        assert 'href="group/0"' in page
        page = await text(client, "group/0")
        assert 'href="0/1"' in page
        assert 'href="../"' in page
        assert "<i>step</i> 5" in page
        page = await text(client, "group/0/1?colour=version")
        assert 'href="../0"' in page
        assert 'data-colour="version"' in page

    served(a_run(tmp_path), scenario)


def test_what_is_not_there_is_said_on_a_page(tmp_path: Path) -> None:
    async def scenario(client: TestClient) -> None:
        assert "there is no group 77" in await text(client, "group/77", 400)
        assert "there is no sample 9" in await text(client, "group/0/9", 400)
        assert "is no number" in await text(client, "?reward_min=x", 400)
        assert "&lt;script&gt;" in await text(client, "?step_min=<script>", 400)
        await text(client, "group/-1", 404)

    served(a_run(tmp_path), scenario)


def test_before_the_run_has_begun_the_page_waits_and_then_follows(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {}\n")

    async def scenario(client: TestClient) -> None:
        page = await text(client, "")
        assert "the run has not started" in page
        assert '<meta http-equiv="refresh"' in page
        await text(client, "group/0", 400)
        a_run(tmp_path)
        page = await text(client, "")
        assert "refresh" not in page
        assert "<b>2</b> groups" in page
        store_rows(tmp_path, [a_group("L0/later")])
        assert "L0/later" in await text(client, "")

    served(tmp_path, scenario)


def test_a_store_that_turns_strange_is_said_and_heals(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    strange = run / "replay" / "segments" / "00000009.arrows"

    async def scenario(client: TestClient) -> None:
        strange.write_bytes(b"x" * 9000)
        assert "no file of this store" in await text(client, "", 400)
        strange.unlink()
        assert "L0/g0" in await text(client, "")

    served(run, scenario)


def test_a_run_whose_name_and_config_are_hostile(tmp_path: Path) -> None:
    run = a_run(tmp_path / EVIL.replace("/", ""))
    (run / "config.yaml").write_text("a: [1\n")

    async def scenario(client: TestClient) -> None:
        assert "<script>window" not in await text(client, "")
        assert "config.yaml of the run is not YAML" in await text(client, "group/0", 400)

    served(run, scenario)


# --- the command ---------------------------------------------------------------------------------


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert view.main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert re.fullmatch(r"error: .*\n", printed.err)
        return printed.err

    assert "does not exist" in said(str(tmp_path / "nowhere"))
    assert "has no config.yaml and no replay/" in said(str(tmp_path))
    run = str(a_run(tmp_path / "run"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port} cannot be used" in said(run, "--port", port)
    assert "--port 70000 cannot be used" in said(run, "--port", "70000")
    description = tmp_path / "run" / "replay" / "store.json"
    description.write_text(description.read_text().replace('"format": 1', '"format": 7'))
    assert "was written in format 7" in said(run)


# --- who asks for too much -----------------------------------------------------------------------


def serving(run: Path, scenario: Callable[[int], Awaitable[None]]) -> None:
    """Run `scenario` against the server that the command starts; it is given the port."""

    async def main() -> None:
        listening = view._listen(0)
        async with server.serving(RunFolder(run), TOKEN, listening):
            await asyncio.wait_for(scenario(listening.getsockname()[1]), LIMIT_S)

    asyncio.run(main())


async def asked(port: int, path: str, headers: bytes = b"") -> bytes:
    """The whole answer to one request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    host = f"Host: 127.0.0.1:{port}\r\nConnection: close\r\n".encode()
    writer.write(b"GET " + path.encode("latin-1") + b" HTTP/1.1\r\n" + host + headers + b"\r\n")
    try:
        return await reader.read()
    finally:
        writer.close()


def test_a_long_search_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        began.set()
        assert goes_on.wait(LIMIT_S)
        return find(*arguments)

    monkeypatch.setattr(server, "find", slow)

    async def scenario(client: TestClient) -> None:
        search = asyncio.create_task(text(client, "?text=L0"))
        assert await asyncio.to_thread(began.wait, LIMIT_S)
        async with client.get("/another-token/") as response:
            assert response.status == 403
        assert not search.done()
        goes_on.set()
        assert "L0/g0" in await search

    served(a_run(tmp_path), scenario)


@pytest.mark.parametrize("field", ["text", "worker", "status"])
def test_a_search_is_short(tmp_path: Path, field: str) -> None:
    async def scenario(client: TestClient) -> None:
        page = await text(client, f"?{field}={'aé' * 1000}", 400)
        assert f"{field} has 2,000 characters; search for 200 at most" in page
        await text(client, f"?{field}={'a' * 200}")

    served(a_run(tmp_path), scenario)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX: "])
def test_a_connection_that_asks_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server, "HEADER_LIMIT_S", 0.05)

    async def scenario(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()

    serving(a_run(tmp_path), scenario)


def test_idle_connections_leave_room_for_who_asks(tmp_path: Path) -> None:
    async def scenario(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(server.MAX_CONNECTIONS + 40)]
        assert (await asked(port, f"/{TOKEN}/")).startswith(b"HTTP/1.1 200 ")
        assert await idle[0][0].read() == b""  # the oldest made room
        for _, writer in idle:
            writer.close()

    serving(a_run(tmp_path), scenario)


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/\xff\xfe/", b"", 400),
        ("/%ff%fe/", b"", 403),
        (f"/{TOKEN}\xff/", b"", 400),
        (f"/{TOKEN}/?start={DIGITS}", b"", 200),
        (f"/{TOKEN}/?step_min={DIGITS}&reward_max=-{DIGITS}", b"", 200),
        (f"/{TOKEN}/group/{DIGITS}", b"", 404),
        (f"/{TOKEN}/?text=%ed%a0%80&worker=%00&status=%ff", b"", 200),
        (f"/{TOKEN}/", b"X: " + b"a" * 100_000 + b"\r\n", 400),
        (f"/{TOKEN}/", b"".join(b"X%d: a\r\n" % i for i in range(2000)), 400),
        (f"/{TOKEN}/", b"Content-Length: " + DIGITS.encode() + b"\r\n", 400),
        (f"/{TOKEN}/", b"Host: \xff\r\n", 403),
    ],
)
def test_odd_requests_are_answered_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, headers: bytes, status: int
) -> None:
    async def scenario(port: int) -> None:
        answer = await asked(port, path, headers)
        assert int(answer.split()[1]) in (status, 400)
        assert b"Traceback" not in answer

    serving(a_run(tmp_path), scenario)
    assert caplog.records == []
