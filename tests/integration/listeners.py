"""Sockets that a run listens on, and what they say to somebody who brings no credentials."""

from __future__ import annotations

import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
import psutil

from tests.integration.harness import Program
from tests.integration.leftovers import Room

QUESTION = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PROMETHEUS = b"Content-Type: text/plain; version=0.0.4"
WAIT_S = 3.0
ENOUGH = 1000  # bytes of an answer
EXPECTED = ("raylet", "gcs_server", "ray::DataService", "ray::LearnerProc", "VLLM::EngineCore")
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
    """The same with what its gRPC calls came to, if it has any."""
    if not listener.answer.startswith(HTTP2_SETTINGS):
        return listener
    return replace(listener, codes=frozenset(call(listener.port, method) for method in METHODS))


def listed(processes: list[psutil.Process]) -> dict[tuple[str, int], str]:
    """Listening sockets of these processes: address and port, and the name of the process."""
    found = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            sockets = process.net_connections("inet")
            places = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
            found |= {(place.ip, place.port): process.name() for place in places}
    return found


def of(run: Program, room: Room) -> list[Listener]:
    """Sockets that a run listened on until its first step, asked then; called when the run has begun.

    Looked at all along: on a busy machine one look may take seconds, and the run ends soon after that step.
    """
    found: dict[tuple[str, int], str] = {}
    missing = set(EXPECTED)

    def complete() -> bool:
        found.update(listed(room.processes()))
        names = tuple(found.values())
        missing.difference_update([one for one in EXPECTED if any(name.startswith(one) for name in names)])
        return not missing and run.has_made(1)

    try:
        run.wait_until(complete, "a step, and sockets of the expected processes")
    except AssertionError as error:
        raise AssertionError(f"no socket of {sorted(missing)}: {error}") from None
    with ThreadPoolExecutor(len(found)) as pool:  # most say nothing, each for `WAIT_S`
        answers = pool.map(lambda place: ask(*place), found)
        both = zip(found.items(), answers, strict=True)
        return [with_codes(Listener(name, *place, answer)) for (place, name), answer in both]


def check(found: list[Listener]) -> None:
    """Check that all listen on loopback alone, and tell and do nothing but what SECURITY.md says."""
    assert [one for one in found if not one.is_local] == []
    answering = [one for one in found if one.answers]
    assert len(answering) <= 3  # Ray's Prometheus endpoints
    assert [one for one in answering if PROMETHEUS not in one.answer] == []
    assert not [one for one in found if grpc.StatusCode.OK in one.codes]  # without the token of the run
    refusing = {one.process for one in found if grpc.StatusCode.UNAUTHENTICATED in one.codes}
    assert {"gcs_server", "raylet", "ray::DataService"} <= {name.partition(".")[0] for name in refusing}
