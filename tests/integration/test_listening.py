"""Every socket that a whole run listens on, and what it says to somebody who brings no credentials."""

from __future__ import annotations

import ipaddress
import socket
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
WAIT_S = 3.0


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
    try:
        with socket.create_connection((address, port), WAIT_S) as connection:
            connection.sendall(QUESTION)
            return connection.recv(200)
    except OSError:
        return b""


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


def test_nobody_without_credentials_is_answered_but_by_what_the_readme_names(found: list[Listener]) -> None:
    print(*sorted(map(str, found)), sep="\n")
    assert {one.process for one in found if one.answers} <= set()
