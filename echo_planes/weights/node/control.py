"""Messages between a node and its owner, a learner or a worker, over its pipes and its Unix socket.

Answers to other nodes report errors in the same form (`Failure`).
"""

from __future__ import annotations

from echo_planes.errors import WeightsError
from echo_planes.types import BroadcastStats, Manifest
from echo_planes.weights.wire.messages import Message, decode

CONTROL_SOCKET = "control.sock"


class Failure(Message, frozen=True):
    """An error of the node, for the caller to raise."""

    error: str  # name of its class
    message: str


class Started(Message, frozen=True):
    """The node's first line on stdout: its address, or the error that keeps it from listening."""

    address: str = ""
    failure: Failure | None = None


class StagedAsked(Message, frozen=True):
    """`POST /control/staged`: see `WorkerNode.staged`."""

    lineage: str
    version: int
    wait_s: float
    fresh: bool


class StagedFile(Message, frozen=True):
    """The answer; `manifest` is None if nothing was staged in time."""

    manifest: Manifest | None = None
    path: str = ""


class Settled(Message, frozen=True):
    """`POST /control/settled`: see `WorkerNode.settled`."""

    version: int
    ok: bool


class CaughtUp(Message, frozen=True):
    """The answer: publications that catch-ups have staged since the last install, as text."""

    caught_up: str


class BroadcastFigures(Message, frozen=True):
    """The answer to `POST /control/stats`: see `SenderNode.stats`."""

    broadcasts: list[BroadcastStats]


def failure(status: int, body: bytes | bytearray) -> Failure:
    """Return the error in a node's answer whose status is not 200."""
    try:
        return decode(body, Failure, "an error")
    except WeightsError:  # aiohttp's own errors are plain text
        return Failure("RunError", f"status {status}, {bytes(body[:200])!r}")
