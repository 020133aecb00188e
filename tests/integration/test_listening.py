"""Every socket that a whole run listens on, and what it says to somebody who brings no credentials.

The run has two learner ranks, which meet over a socket of torch's. What a kill -9 of its driver leaves behind
is looked for here, too.
"""

from __future__ import annotations

import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
import psutil
import pytest

from tests.integration import leftovers
from tests.integration.harness import SMALL, program
from tests.integration.leftovers import KILLED_S, Left, Room, left_within

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(leftovers.missing()), reason=leftovers.missing()),
]

TWO_RANKS = ("learner.num_ranks=2", "learner.resources.CPU=0.5")
QUESTION = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PROMETHEUS = b"Content-Type: text/plain; version=0.0.4"
WAIT_S = 3.0
ENOUGH = 1000  # bytes of an answer
HTTP2_SETTINGS = b"\0\0\x18\x04"
METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)


@dataclass(frozen=True)
class Listener:
    """A socket: whose it is, where it listens, and how it answers `QUESTION`."""

    process: str
    address: str
    port: int
    answer: bytes
    codes: frozenset[Any] = frozenset()  # statuses of gRPC calls, where it speaks HTTP/2

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


def call(port: int, method: str) -> Any:
    """The status of a gRPC call with an empty message and no credentials."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=WAIT_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def with_codes(listener: Listener) -> Listener:
    if not listener.answer.startswith(HTTP2_SETTINGS):
        return listener
    return replace(listener, codes=frozenset(call(listener.port, method) for method in METHODS))


def listeners(processes: list[psutil.Process]) -> list[Listener]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            sockets = process.net_connections("inet")
            places = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
            found += [(process.name(), place.ip, place.port) for place in places]
    with ThreadPoolExecutor(len(found)) as pool:  # most say nothing, each for `WAIT_S`
        answers = pool.map(lambda one: ask(one[1], one[2]), found)
    return [Listener(*one, answer) for one, answer in zip(found, answers, strict=True)]


@dataclass(frozen=True)
class Seen:
    """Listeners when all of a run was at work, and what was left some time after its driver's end."""

    listeners: list[Listener]
    left: Left


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Of a run of two learner ranks and a worker."""
    folder = tmp_path_factory.mktemp("listening")
    words = (*SMALL, "run.steps=1000", "fleet=single", *TWO_RANKS)
    with Room() as room, program(folder / "work", folder / "run", *words, room=room) as run:
        run.wait_for_step(1)
        found = [with_codes(one) for one in listeners(room.processes())]
        run.process.kill()
        # Beside other tests; `bench.chaos kills` holds it to the limit itself.
        return Seen(found, left_within(room.look, 6 * KILLED_S))


@pytest.fixture
def found(seen: Seen) -> list[Listener]:
    return seen.listeners


def test_the_run_has_its_usual_listeners(found: list[Listener]) -> None:
    """Else the tests below look at nothing."""
    processes = {one.process for one in found}
    assert {"raylet", "gcs_server", "VLLM::EngineCore"} <= processes
    assert any(name.startswith("ray::LearnerProc") for name in processes)


def test_every_socket_listens_on_loopback_alone(found: list[Listener]) -> None:
    assert [one for one in found if not one.is_local] == []


def test_only_numbers_are_told_to_whoever_brings_no_credentials(found: list[Listener]) -> None:
    """Ray's three Prometheus endpoints; SECURITY.md says so."""
    answering = [one for one in found if one.answers]
    assert len(answering) <= 3
    assert [one for one in answering if PROMETHEUS not in one.answer] == []


def test_ray_does_nothing_for_a_caller_without_the_token_of_the_run(found: list[Listener]) -> None:
    assert not [one for one in found if grpc.StatusCode.OK in one.codes]
    refusing = {one.process for one in found if grpc.StatusCode.UNAUTHENTICATED in one.codes}
    assert {"gcs_server", "raylet", "ray::DataService"} <= {name.partition(".")[0] for name in refusing}


def test_nothing_is_left_seconds_after_a_kill_of_the_driver(seen: Seen) -> None:
    assert seen.left == Left(), str(seen.left)
