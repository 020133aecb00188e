"""Clients for the owner of a node: start the process, hand over publications, wait for files, end it.

Client and node talk HTTP over a Unix socket in a folder that only this user may enter. No other user of the
machine and no other node can commit, settle or stop anything there.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from echo_planes.errors import (
    ClusterError,
    ConfigError,
    EchoPlanesError,
    RunError,
    WaitTimeoutError,
    WeightsError,
)
from echo_planes.types import BroadcastStats, ByteArray, Manifest, Uploads
from echo_planes.weights.node.control import (
    CONTROL_SOCKET,
    BroadcastFigures,
    CaughtUp,
    Failure,
    Settled,
    StagedAsked,
    StagedFile,
    Started,
    failure,
)
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.spool import claim_folder, remove_folder
from echo_planes.weights.wire.credentials import bearer
from echo_planes.weights.wire.frames import ManifestFrame, SegmentFrame, encode_frame
from echo_planes.weights.wire.manifest import SignedManifest, SignedSegment
from echo_planes.weights.wire.messages import decode

T = TypeVar("T")
READY_S = 90.0  # until a new node listens; covers Python's imports on a busy machine
CLOSE_S = 5.0  # for a node to end by itself, before it is killed
CALL_S = 120.0  # limit of each socket operation in a call of the learner to its own node

_ERRORS: dict[str, type[EchoPlanesError]] = {
    "ConfigError": ConfigError,
    "ClusterError": ClusterError,
    "WeightsError": WeightsError,
}


class SenderNode:
    """Client of the learner's node. Calls block; only one thread may call at a time.

    Create it with `spawn`. Calls raise RunError when the node does not answer, WeightsError when it refuses,
    ClusterError when it has no room.
    """

    def __init__(self, process: _NodeProcess) -> None:
        self._process = process
        self._connection = _UnixConnection(process.socket)

    @classmethod
    def spawn(cls, settings: NodeSettings) -> SenderNode:
        """Start the node and wait until it listens.

        The node dies with the calling *thread*: call this from one that lives as long as the learner.

        Raises:
            ConfigError, ClusterError: the node cannot start: a taken port, a wrong TLS file, no room.
            WaitTimeoutError: it did not listen within `READY_S`, or ended without an error message.
        """
        return cls(_NodeProcess(settings).wait_ready())

    @property
    def address(self) -> str:
        """Address at which workers' nodes find this one, "http(s)://host:port"."""
        return self._process.address

    @property
    def pid(self) -> int:
        """Process id of the node."""
        return self._process.pid

    def add_segment(self, signed: SignedSegment, payload: ByteArray) -> None:
        """Hand over one segment, `payload` of shape (header.size_bytes,). The node forwards chunks at once.

        The first segment opens the publication. The call returns when the node has all bytes of the segment.
        """
        head = encode_frame(SegmentFrame(signed))
        self._post("/control/segment", [head, payload.data], dict, {"X-Head-Bytes": str(len(head))})

    def commit(self, signed: SignedManifest) -> None:
        """Hand over the manifest, which completes the publication: no worker stages it before."""
        self._post("/control/commit", [encode_frame(ManifestFrame(signed))], dict)

    def stats(self) -> list[BroadcastStats]:
        """Return the figures of the newest publications' broadcasts, oldest first."""
        return self._post("/control/stats", [], BroadcastFigures).broadcasts

    def status(self) -> dict[str, Any]:
        """Return the figures of `GET /v1/status`: the publications held, the peers, the counters."""
        return self._post("/control/status", [], dict[str, Any])

    def uploads(self) -> Uploads:
        """Return the state of the uploads to the store; a node without a store has none."""
        store = self.status()["store"]
        if store is None:
            return Uploads()
        waiting = store["waiting"] + store["snapshot_due"]
        seen = f"{waiting} to come, {store['taken_bytes']:,} bytes taken"
        return Uploads(tuple(store["unstored"]), not waiting, seen, store["last_error"])

    def close(self) -> None:
        """End the node, uploads too, and remove its scratch folder. May be called twice."""
        self._connection.close()
        self._process.close()

    def _post(
        self, path: str, body: list[bytes | memoryview], kind: type[T], headers: dict[str, str] | None = None
    ) -> T:
        size = sum(memoryview(part).nbytes for part in body)
        sent = {**self._process.headers, **(headers or {}), "Content-Length": str(size)}
        try:
            self._connection.request("POST", path, body=iter(body), headers=sent)
            response = self._connection.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next call begins with a fresh connection
            raise self._process.lost(error) from error
        return _answer(status, text, kind)


class WorkerNode:
    """Client of a worker's node, which takes part in the chains and stages each version as one file.

    For one event loop. Create it with `spawn`. Calls raise RunError when the node does not answer.
    """

    def __init__(self, process: _NodeProcess) -> None:
        self._process = process
        connector = aiohttp.UnixConnector(path=str(process.socket))
        self._session = aiohttp.ClientSession(
            connector=connector, headers=process.headers, timeout=aiohttp.ClientTimeout(total=None)
        )

    @classmethod
    async def spawn(cls, settings: NodeSettings) -> WorkerNode:
        """Start the node and wait until it listens. It joins its sender by itself, even if that starts later.

        The node dies with the calling thread, so call this in the worker's own event loop.

        Raises:
            ConfigError, ClusterError: the node cannot start: a taken port, a wrong TLS file, no room.
            WaitTimeoutError: it did not listen within `READY_S`, or ended without an error message.
        """
        process = _NodeProcess(settings)
        return cls(await asyncio.to_thread(process.wait_ready))

    @property
    def address(self) -> str:
        """Address at which other nodes find this one, "http(s)://host:port"."""
        return self._process.address

    async def staged(
        self, lineage: str, version: int, wait_s: float, fresh: bool = False
    ) -> tuple[Manifest, Path]:
        """Wait until `version` or a later one of `lineage` is complete, verified and staged.

        The file is one safetensors payload: codec `overwrite`, relative to the version last `settled`, or
        `full`. The manifest describes it. It stays until `settled` or the next call.

        Args:
            wait_s: longest wait without a byte, seconds.
            fresh: ask for a full file, whatever the engine has: after damage, or for a new engine.

        Raises:
            WaitTimeoutError: no byte came for `wait_s`; ask again, the transfer goes on.
            WeightsError: `version` is here and was refused: another model's shapes, another digest.
            ClusterError: there is no room for the file.
        """
        asked = StagedAsked(lineage, version, wait_s, fresh)
        answer = await self._post("/control/staged", asked, StagedFile)
        if answer.manifest is None:
            raise WaitTimeoutError("weights to arrive", wait_s, version=version)
        return answer.manifest, Path(answer.path)

    async def settled(self, version: int, ok: bool) -> str:
        """Tell the node how the install of `version` went: if `ok`, the next file is relative to it.

        Returns:
            The publications that catch-ups have staged since the last install, as text; "" when none, or if
            not `ok`.
        """
        return (await self._post("/control/settled", Settled(version, ok), CaughtUp)).caught_up

    async def status(self) -> dict[str, Any]:
        """Return the figures of `GET /v1/status`: the parent, the publications held, the counters."""
        return await self._post("/control/status", {}, dict[str, Any])

    @property
    def pid(self) -> int:
        """Process id of the node."""
        return self._process.pid

    async def close(self) -> None:
        """End the node and remove its scratch folder. May be called twice."""
        await self._session.close()
        await asyncio.to_thread(self._process.close)

    async def _post(self, path: str, message: object, kind: type[T]) -> T:
        body = msgspec.json.encode(message)
        try:
            async with self._session.post(f"http://node{path}", data=body) as response:
                return _answer(response.status, await response.read(), kind)
        except (aiohttp.ClientError, OSError) as error:
            raise self._process.lost(error) from error


class _UnixConnection(http.client.HTTPConnection):
    """HTTP to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("node", timeout=CALL_S)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _NodeProcess:
    """The child process, its scratch folder, and the address it reports."""

    def __init__(self, settings: NodeSettings) -> None:
        if not settings.folder:
            settings = msgspec.structs.replace(settings, folder=str(claim_folder()))
        self._settings = settings
        self.socket = Path(settings.folder) / CONTROL_SOCKET
        self.headers = {"Authorization": bearer(settings.token)}
        self.address = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "echo_planes.weights.node.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The node must find the run's own codec on the same paths as this process.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> _NodeProcess:
        """Send the settings and read the line that says where the node listens."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RunError("a node's process was started without pipes")
        watchdog = threading.Timer(READY_S, process.kill)
        watchdog.start()
        try:
            with contextlib.suppress(OSError):  # the node has ended: `readline` returns no line below
                process.stdin.write(self._settings.to_json() + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            self.close()
            raise WaitTimeoutError("weight node start", READY_S, worker=self._settings.node_id)
        started = decode(line, Started, "a node's first line")
        if started.failure is not None:
            self.close()
            raise _raised(started.failure)
        self.address = started.address
        return self

    def lost(self, error: Exception) -> RunError:
        """Return the error to raise when the node does not answer."""
        status = self._process.poll()
        state = "is running but does not answer" if status is None else f"has ended with status {status}"
        return RunError(f"the weight node of {self._settings.node_id} {state}: {error}")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()  # the node ends when its stdin ends
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_folder(Path(self._settings.folder))


def _answer(status: int, body: bytes, kind: type[T]) -> T:
    """Decode a node's answer, or raise the error that it reports."""
    if status != 200:
        raise _raised(failure(status, body))
    return decode(body, kind, "a node's answer")


def _raised(said: Failure) -> EchoPlanesError:
    return _ERRORS.get(said.error, RunError)(said.message)
