"""Every socket that a whole run listens on, and what it says to somebody who brings no credentials."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.integration import leftovers
from tests.integration.harness import SMALL, program
from tests.integration.leftovers import Room

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(leftovers.missing()), reason=leftovers.missing()),
]

TWO_RANKS = ("learner.num_ranks=2", "learner.resources.CPU=0.5")
QUESTION = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PROMETHEUS = b"Content-Type: text/plain; version=0.0.4"
WAIT_S = 3.0
JOIN_S = 120.0
ENOUGH = 1000  # bytes of an answer


@dataclass(frozen=True)
class Listener:
    """A socket: whose it is, where it listens, and how it answers `QUESTION`."""

    process: str
    address: str
    port: int
    answer: bytes

    @property
    def is_local(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    @property
    def answers(self) -> bool:
        return self.answer.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200"))


def ask(address: str, port: int) -> bytes:
    """The beginning of what comes back; b"" where nothing does."""
    answer = b""
    try:
        with socket.create_connection((address, port), WAIT_S) as connection:
            connection.sendall(QUESTION)
            while len(answer) < ENOUGH and (more := connection.recv(ENOUGH)):  # a header may come alone
                answer += more
    except OSError:
        pass  # what has come is the answer
    return answer


def listeners(processes: list[psutil.Process]) -> list[Listener]:
    found = []
    for process in processes:
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                answer = ask(one.laddr.ip, one.laddr.port)
                found.append(Listener(process.name(), one.laddr.ip, one.laddr.port, answer))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Listener]]:
    """Of a run of two learner ranks and two workers, when all of it is at work."""
    folder = tmp_path_factory.mktemp("listening")
    words = (*SMALL, "run.steps=1000", *TWO_RANKS)
    with Room() as room, program(folder / "work", folder / "run", *words, room=room) as run:
        run.wait_for_step(1)
        yield listeners(room.processes())


def test_the_run_has_its_usual_listeners(found: list[Listener]) -> None:
    """Else the tests below look at nothing."""
    processes = {one.process for one in found}
    assert {"raylet", "gcs_server", "VLLM::EngineCore"} <= processes
    assert any(name.startswith("ray::LearnerProc") for name in processes)


def test_every_socket_listens_on_loopback_alone(found: list[Listener]) -> None:
    assert [one for one in found if not one.is_local] == []


def test_only_numbers_are_told_to_whoever_brings_no_credentials(found: list[Listener]) -> None:
    """Ray's three Prometheus endpoints; README says so."""
    answering = [one for one in found if one.answers]
    assert len(answering) <= 3
    assert [one for one in answering if PROMETHEUS not in one.answer] == []


def test_ray_lets_nobody_in_without_the_token_of_the_run(found: list[Listener]) -> None:
    (gcs,) = {one.port for one in found if one.process == "gcs_server"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    script = f"import ray; ray.init(address='127.0.0.1:{gcs}', log_to_driver=False)"
    command = [sys.executable, "-c", script]
    tried = subprocess.run(command, env=kept, capture_output=True, text=True, check=False, timeout=JOIN_S)
    assert tried.returncode != 0
    assert "Unauthenticated" in tried.stderr or "uthentication" in tried.stderr, tried.stderr
