"""The pages of `python -m echo_planes.view` in a real browser, driven through its debugging protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.unit.stored_rollouts import EVIL, a_group, a_row, store_rows

LIMIT_S = 60.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium"),
]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen in {LIMIT_S:g} s")


@pytest.fixture(scope="module")
def debugging_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A browser of its own, which reaches nothing but this machine."""
    profile = tmp_path_factory.mktemp("browser")
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    flags += " disable-component-update disable-sync remote-debugging-port=0"
    process = subprocess.Popen(
        [str(BROWSER), *(f"--{flag}" for flag in flags.split()), f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        written = profile / "DevToolsActivePort"
        yield int(
            wait_for(lambda: written.exists() and written.read_text(), "the browser's start").split()[0]
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def view(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address that the command prints, and the run's folder."""
    (tmp_path / "config.yaml").write_text("model:\n  path: builtin:tiny-math\n")
    if getattr(request, "param", True):
        hand = {"hole": ["Ah", "Tc"], "board": ["2d", "Qs", "9h"], "did": EVIL}
        turns = json.dumps({"turns": [hand, hand], "program": EVIL})
        several = a_row(
            "L0/hand",
            0,
            "12+3=",
            response_ids=[1, 2, 10, 3, 4],
            response_mask=[True, True, False, True, True],
            logprobs=[-0.01, -4.0, 0.0, -0.1, -0.2],
            span_stops=[2, 5],
            num_turns=2,
            turn_rewards=[0.5, -1.5],
            notes=turns,
        )
        evil = [a_row(EVIL, i, EVIL, prompt_text=EVIL, notes=EVIL, worker_id=EVIL) for i in range(2)]
        store_rows(tmp_path, [[several], evil, *(a_group(f"L0/g{i}") for i in range(60))], {0: 0})
    process = subprocess.Popen(
        [sys.executable, "-m", "echo_planes.view", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), tmp_path
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()


class Tab:
    """One page of the browser: commands, and what it reported meanwhile."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=LIMIT_S)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    async def value(self, expression: str) -> Any:
        answer = await self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            answer = await self.command("Runtime.evaluate", expression=expression, returnByValue=True)
            if answer["result"].get("value"):  # an exception meanwhile: the page is just being changed
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{expression} did not become true; the page says {await self.value(SAID)}")

    async def open(self, address: str) -> None:
        await self.command("Page.navigate", url=address)
        await self.until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    async def click(self, selector: str) -> None:
        before = await self.value("performance.timeOrigin")
        await self.value(f"document.querySelector({json.dumps(selector)}).click()")
        await self.until(f"performance.timeOrigin !== {before} && document.readyState === 'complete'")

    async def point_at(self, selector: str) -> None:
        box = await self.value(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        await self.command("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def requests(self) -> list[str]:
        found = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in found]

    def complaints(self) -> list[dict[str, Any]]:
        """Events that the browser would show in red, blocked scripts above all."""
        return [e for e in self.events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]


SAID = "document.body.innerText"


def browse(port: int, scenario: Callable[[Tab], Awaitable[None]]) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{port}/json/new") as response:
                target = await response.json()
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await tab.command(f"{domain}.enable")
                await scenario(tab)
                await tab.command("Page.close")

    asyncio.run(main())


def test_a_hostile_model_gets_nothing_done(debugging_port: int, view: tuple[str, Path]) -> None:
    address, _ = view

    async def scenario(tab: Tab) -> None:
        for path in (
            "",
            "group/1",
            "group/1/0",
            "group/1/1?colour=version",
            "group/0/0",
            "?step_min=<script>",
        ):
            await tab.open(address + path.replace("<script>", "%3Cscript%3E"))
            assert await tab.value("typeof window.hacked") == "undefined"
            assert await tab.value("document.images.length") == 0
            assert await tab.value("document.scripts.length") == 1
        assert "<script>window.hacked" in await tab.value(SAID) or "<script>" in await tab.value(SAID)
        origin = address.rsplit("/", 2)[0]
        assert {url[: len(origin) + 1] for url in tab.requests()} == {f"{origin}/"}
        assert [
            c for c in tab.complaints() if "favicon" not in json.dumps(c) and "400" not in json.dumps(c)
        ] == []
        # The policy is in force: what gets in all the same does not run, load or send.
        await tab.value(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=3\">');"
            "document.body.appendChild(document.createElement('script')).textContent = 'window.hacked = 4'"
        )
        assert await tab.value("typeof window.hacked") == "undefined"
        sent = await tab.command(
            "Runtime.evaluate",
            expression="fetch('./').then(() => 'sent', () => 'blocked')",
            awaitPromise=True,
        )
        assert sent["result"]["value"] == "blocked"

    browse(debugging_port, scenario)


def test_pointing_at_a_token_tells_what_is_known_of_it(debugging_port: int, view: tuple[str, Path]) -> None:
    async def scenario(tab: Tab) -> None:
        await tab.open(view[0] + "group/0/0")
        said = await tab.value(SAID)
        for words in ("Turn 1 of 2", "reward 0.5", "Turn 2 of 2", "reward -1.5", "environment"):
            assert words in said
        assert await tab.value("document.querySelectorAll('.suit').length") == 10
        await tab.point_at(".turn .tok:nth-child(2)")
        await tab.until("getComputedStyle(tip).display === 'block'")
        told = await tab.value("tip.innerText")
        for words in ("token", "2", "logprob", "-4.0000", "probability", "0.0183", "version", "3"):
            assert words in told
        await tab.point_at(".tok.env")
        await tab.until("tip.innerText.includes('written by the environment')")
        evil = json.dumps(EVIL)
        await tab.value(
            "Object.assign(document.querySelector('.turn .tok').dataset, "
            f"{{t: {evil}, v: {evil}, o: JSON.stringify([[{evil}, '1']])}})"
        )
        await tab.point_at(".turn .tok")
        await tab.until("tip.innerText.includes('or \"<script>')")
        assert await tab.value("tip.querySelectorAll('img, script').length") == 0
        assert await tab.value("typeof window.hacked") == "undefined"
        await tab.point_at("h1")
        await tab.until("getComputedStyle(tip).display === 'none'")

    browse(debugging_port, scenario)


def test_colours_follow_what_was_asked_for(debugging_port: int, view: tuple[str, Path]) -> None:
    shades = "[...document.querySelectorAll('.turn .tok')].map(t => getComputedStyle(t).backgroundColor)"

    async def scenario(tab: Tab) -> None:
        await tab.open(view[0] + "group/0/0")
        first, second, of_environment, *rest = await tab.value(shades)
        assert first != second
        assert of_environment == "rgba(0, 0, 0, 0)"
        await tab.click(".bar a")
        first, second, of_environment, *rest = await tab.value(shades)
        assert first == second != rest[0]
        assert of_environment == "rgba(0, 0, 0, 0)" != first

    browse(debugging_port, scenario)


def test_filtering_sorting_and_paging(debugging_port: int, view: tuple[str, Path]) -> None:
    names = "[...document.querySelectorAll('tbody td:first-child')].map(cell => cell.innerText)"

    async def scenario(tab: Tab) -> None:
        await tab.open(view[0])
        assert (await tab.value(names))[:2] == ["L0/g59", "L0/g58"]
        await tab.click(".pages a")
        assert await tab.value(f"{names}.length") == 12
        await tab.click("thead a")  # sorted by arrival already: turns it round
        assert (await tab.value(names))[0] == "L0/hand"
        await tab.value("document.querySelector('[name=text]').value = 'OF l0/G7'")
        await tab.click("form button")
        assert await tab.value(names) == ["L0/g7"]
        assert await tab.value("document.querySelector('[name=text]').value") == "OF l0/G7"
        await tab.click("tbody a")
        assert "Sample 1" in await tab.value(SAID)
        await tab.click(".samples a")
        assert "Response" in await tab.value(SAID)

    browse(debugging_port, scenario)


@pytest.mark.parametrize("view", [False], indirect=True, ids=["no store"])
def test_a_page_that_waits_for_the_run_goes_on_by_itself(debugging_port: int, view: tuple[str, Path]) -> None:
    address, run = view

    async def scenario(tab: Tab) -> None:
        await tab.open(address)
        assert "the run has not started" in await tab.value(SAID)
        store_rows(run, [a_group("L0/first")])
        await tab.until(f"{SAID}.includes('L0/first')")

    browse(debugging_port, scenario)
