"""`network`: what a whole run unpickles, and what it listens on.

Every Python process of the run writes down who asks for a class while bytes are unpickled (`sys.audit`), and
every listening socket is asked, without credentials, what it has to say: as a browser would, and with bytes
of no protocol.
"""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.failpoints import SEEN, arm, seen
from bench.chaos.lives import START_S, Lineage, wait_for
from tests.integration.harness import Program

STEPS = 8
PROBE_S = 2.0
NOISE, NOISE_BYTES = b"\xf5\x00\r\n" * 16 + b"\r\n\r\n", 512
HTTP2_SETTINGS = b"\x04"  # kind of a frame, after its length of three bytes
LOOPBACK = ("127.0.0.1", "::1")
IPV4_IN_IPV6 = "::ffff:"
# Packages that may unpickle, and why that is no hole. Our own packages are not among them.
MAY_UNPICKLE = {
    "ray": "Ray's own protocol, behind the cluster's token",
    "multiprocessing": "pipes to a process's own children",
    "concurrent": "pipes to a process's own children",
    "vllm": "Unix sockets of one engine, in a folder of mode 0700",
    "torch": "the run's own checkpoint files",
    "deepspeed": "the run's own checkpoint files",
    "numba": "its own cache of compiled functions, in a folder of the user's",
    "copy": "no bytes: copies of objects",
    "bench": "this campaign's own comparison of checkpoint files",
}
RAY_METRICS = ("/-/healthy", "/metrics", "/")  # what README says is shown without credentials


@dataclass(frozen=True, slots=True)
class Port:
    """A listening socket of a run."""

    process: str
    address: str
    port: int
    is_loopback: bool
    answer: str  # to an HTTP request without credentials; "" where none came
    bytes_back: str  # hexadecimal: the first bytes to one that only connects, and then sends noise


def network(folder: Path, *, real_engine: bool) -> dict[str, Any]:
    """Figures of one run: it is asked while it trains, then killed off and resumed, so that it also loads."""
    lineage = Lineage(folder / "network", real_engine=real_engine)
    (lineage.folder / SEEN).unlink(missing_ok=True)
    arm(lineage.folder, None, real_engine=real_engine)
    with lineage.life(1) as running:
        wait_for(lambda: lineage.last_step() >= STEPS or running.process.poll() is not None, START_S, "steps")
        if running.process.poll() is not None:
            raise RuntimeError(f"the run ended by itself: {running.tail()}")
        ports = [_asked(*one) for one in _listening(running)]
        running.interrupt()
        running.wait(START_S)
    with lineage.life(2, lineage.last_step() + 3) as running:
        if running.wait(START_S) != 0:
            raise RuntimeError(f"the run does not go on: {running.tail()}")
    unpickled: dict[str, list[str]] = {}
    for one in seen(lineage.folder, "unpickled"):
        by = unpickled.setdefault(one["by"], [])
        if one["what"] not in by:
            by.append(one["what"])
    return {
        "processes watched": len({one["pid"] for one in seen(lineage.folder, "watched")}),
        "unpickled by": {by: sorted(what) for by, what in sorted(unpickled.items())},
        "ports": [asdict(one) for one in ports],
    }


def verdicts(figures: dict[str, Any]) -> dict[str, bool]:
    """Claims of the section, by their words."""
    ports = figures["ports"]
    return {
        "nothing but Ray, vLLM and checkpoints unpickles": figures["processes watched"] > 0
        and all(by.split(".")[0] in MAY_UNPICKLE for by in figures["unpickled by"]),
        "nothing but Ray's metrics listens beyond loopback": bool(ports)
        and all(one["is_loopback"] or _is_metrics(one) for one in ports),
        "nothing but Ray's metrics answers without credentials": all(
            not one["answer"].startswith("2") or _is_metrics(one) for one in ports
        ),
        "noise gets a refusal of HTTP's, gRPC's greeting, or nothing": all(
            _is_metrics(one) or _is_refusal(bytes.fromhex(one["bytes_back"])) for one in ports
        ),
    }


def _is_metrics(port: dict[str, Any]) -> bool:
    return "ray_" in port["answer"] or "# HELP" in port["answer"]


def _listening(running: Program) -> list[tuple[str, str, int]]:
    """Process, address and port of every TCP socket of the run that listens."""
    found = set()
    for process in running.processes():
        try:
            words = process.cmdline()
            name = " ".join(words[:3])[:80] if words else process.name()
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.add((name, one.laddr.ip.removeprefix(IPV4_IN_IPV6), one.laddr.port))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found)


def _asked(process: str, address: str, port: int) -> Port:
    host = address if address in LOOPBACK else "127.0.0.1"
    answers = [_http(host, port, path) for path in RAY_METRICS]
    best = next((one for one in answers if one.startswith("2")), answers[0])
    return Port(process, address, port, address in LOOPBACK, best, _noise(host, port).hex())


def _noise(host: str, port: int) -> bytes:
    """Return what comes back before and after bytes that no protocol begins with."""
    back = b""
    with suppress(OSError), socket.create_connection((host, port), PROBE_S) as connection:
        connection.settimeout(PROBE_S / 4)
        for sent in (b"", NOISE):
            connection.sendall(sent)
            with suppress(TimeoutError):
                back += connection.recv(NOISE_BYTES)
    return back


def _is_refusal(back: bytes) -> bool:
    """Return whether noise got nothing, an error of HTTP, or the settings with which gRPC begins."""
    is_error = back.startswith(b"HTTP/1.") and back[9:10] in b"45"
    return not back or is_error or back[3:4] == HTTP2_SETTINGS


def _http(host: str, port: int, path: str) -> str:
    """Status and the first words of an answer; "" where it was none of HTTP's."""
    shown = f"[{host}]" if ":" in host else host
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{shown}:{port}{path}", timeout=PROBE_S) as answer:
            return f"{answer.status} {answer.read(200_000).decode('utf-8', 'replace')[:4000]}"
    except urllib.error.HTTPError as refused:
        return f"{refused.code}"
    except (TimeoutError, OSError, ValueError):
        return ""
    except Exception as why:  # noqa: BLE001  what speaks another protocol answers anything
        return f"not HTTP: {type(why).__name__}"
