"""Clients of the node beside a learner or a worker: start the process, hand over, wait, end it.

The two talk HTTP over a Unix socket in a folder that only this user may enter, so that no other user of
the machine, and no other node, can commit, settle or stop anything here.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from echo_planes.errors import (
    ClusterError,
    ConfigError,
    EchoPlanesError,
    RunError,
    WaitTimeoutError,
    WeightsError,
)
from echo_planes.types import BroadcastStats, ByteArray, Manifest
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.spool import claim_folder, remove_folder
from echo_planes.weights.wire.credentials import bearer
from echo_planes.weights.wire.frames import ManifestFrame, SegmentFrame, encode_frame
from echo_planes.weights.wire.manifest import SignedManifest, SignedSegment

CONTROL_SOCKET = "control.sock"
READY_S = 30.0  # until a fresh node listens: Python's imports on a busy machine
CLOSE_S = 5.0  # a node is given this long to end by itself
CALL_S = 120.0  # one call of the learner to its own node, a segment's bytes included

_ERRORS: dict[str, type[EchoPlanesError]] = {
    "ConfigError": ConfigError,
    "ClusterError": ClusterError,
    "WeightsError": WeightsError,
}


class SenderNode:
    """The learner's node. Blocking calls, for a thread of the learner; one caller at a time.

    Use `spawn`. Calls raise RunError when the node's process has died, WeightsError when it refuses.
    """

    def __init__(self, process: _NodeProcess) -> None:
        self._process = process
        self._connection = _UnixConnection(process.socket)

    @classmethod
    def spawn(cls, settings: NodeSettings) -> SenderNode:
        """Start the node and wait until it listens.

        It dies with the *thread* that calls this: call it from one that lives as long as the learner.

        Raises:
            ConfigError, ClusterError: it cannot start so: a taken port, a wrong TLS file, no room.
            WaitTimeoutError: it did not listen within `READY_S`.
        """
        return cls(_NodeProcess(settings).wait_ready())

    @property
    def address(self) -> str:
        """Address at which workers' nodes find this one, "http(s)://host:port"."""
        return self._process.address

    @property
    def pid(self) -> int:
        """The node's process."""
        return self._process.pid

    def add_segment(self, signed: SignedSegment, payload: ByteArray) -> None:
        """Hand over one segment, `payload` of shape (header.size_bytes,); its chunks leave at once.

        The first segment opens the publication. Returns when the node has all of its bytes.
        """
        head = encode_frame(SegmentFrame(signed))
        self._post("/control/segment", [head, payload.data], {"X-Head-Bytes": str(len(head))})

    def commit(self, signed: SignedManifest) -> None:
        """Hand over the manifest, which completes the publication: only now does any worker stage it."""
        self._post("/control/commit", [encode_frame(ManifestFrame(signed))])

    def stats(self) -> list[BroadcastStats]:
        """Figures of the broadcasts of this node's newest publications, oldest first."""
        return [
            BroadcastStats(**{**record, "hop_bytes_per_s": tuple(record["hop_bytes_per_s"])})
            for record in self._post("/control/stats", [])["broadcasts"]
        ]

    def status(self) -> dict[str, Any]:
        """Answer of `GET /v1/status`: the publications held, the peers, the counters."""
        return self._post("/control/status", [])

    def close(self) -> None:
        """End the node and remove its scratch folder. May be called twice."""
        self._connection.close()
        self._process.close()

    def _post(
        self, path: str, body: list[bytes | memoryview], headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        size = sum(memoryview(part).nbytes for part in body)
        sent = {**self._process.headers, **(headers or {}), "Content-Length": str(size)}
        try:
            self._connection.request("POST", path, body=iter(body), headers=sent)
            response = self._connection.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next call begins with a fresh connection
            raise self._process.lost(error) from error
        return _answer(status, text)


class WorkerNode:
    """A rollout worker's node: takes part in the chains and has each version ready as one staged file.

    For one event loop. Use `spawn`. Calls raise RunError when the node's process has died.
    """

    def __init__(self, process: _NodeProcess) -> None:
        self._process = process
        connector = aiohttp.UnixConnector(path=str(process.socket))
        self._session = aiohttp.ClientSession(
            connector=connector, headers=process.headers, timeout=aiohttp.ClientTimeout(total=None)
        )

    @classmethod
    async def spawn(cls, settings: NodeSettings) -> WorkerNode:
        """Start the node and wait until it listens; it joins its sender by itself, however late that comes.

        It dies with the thread that calls this, so call it in the worker's own event loop.

        Raises:
            ConfigError, ClusterError: it cannot start so: a taken port, a wrong TLS file, no room.
            WaitTimeoutError: it did not listen within `READY_S`.
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

        The file is one safetensors payload of codec `overwrite` relative to what was last `settled`, or
        `full`; the manifest describes it. It stays until `settled` or the next call.

        Args:
            wait_s: how long to wait, seconds.
            fresh: a full one, whatever the engine has: after damage, or for a new engine.

        Raises:
            WaitTimeoutError: not staged within `wait_s`; ask again, the transfer goes on.
            WeightsError: `version` can never be staged here: another model's shapes, a forged manifest.
        """
        asked = {"lineage": lineage, "version": version, "wait_s": wait_s, "fresh": fresh}
        answer = await self._post("/control/staged", asked)
        if answer["manifest"] is None:
            raise WaitTimeoutError("weights to arrive", wait_s, version=version)
        return Manifest(**answer["manifest"]), Path(answer["path"])

    async def settled(self, version: int, ok: bool) -> str:
        """Tell the node how the install of `version` went: if `ok`, the next file is relative to it.

        Returns:
            The publications it was caught up with, in words; "" where it came as one patch or snapshot.
        """
        return str((await self._post("/control/settled", {"version": version, "ok": ok}))["caught_up"])

    async def status(self) -> dict[str, Any]:
        """Answer of `GET /v1/status`: the parent, the publications held, the counters."""
        return await self._post("/control/status", {})

    @property
    def pid(self) -> int:
        """The node's process."""
        return self._process.pid

    async def close(self) -> None:
        """End the node and remove its scratch folder. May be called twice."""
        await self._session.close()
        await asyncio.to_thread(self._process.close)

    async def _post(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self._session.post(f"http://node{path}", json=message) as response:
                return _answer(response.status, await response.read())
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
    """The child process, its scratch folder, and the address it says it has."""

    def __init__(self, settings: NodeSettings) -> None:
        if not settings.folder:
            settings = replace(settings, folder=str(claim_folder()))
        self._settings = settings
        self.socket = Path(settings.folder) / CONTROL_SOCKET
        self.headers = {"Authorization": bearer(settings.token)}
        self.address = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "echo_planes.weights.node.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
            with contextlib.suppress(OSError):  # it has ended: there is no line, and that is said below
                process.stdin.write(self._settings.to_json() + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            self.close()
            raise WaitTimeoutError("weight node start", READY_S, worker=self._settings.node_id)
        ready = json.loads(line)
        if "error" in ready:
            self.close()
            raise _ERRORS.get(ready["error"], RunError)(ready["message"])
        self.address = ready["address"]
        return self

    def lost(self, error: Exception) -> RunError:
        """Error to raise when the node does not answer."""
        status = self._process.poll()
        state = "is running but does not answer" if status is None else f"has ended with status {status}"
        return RunError(f"the weight node of {self._settings.node_id} {state}: {error}")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()  # the end of its stdin is the node's order to end
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_folder(Path(self._settings.folder))


def _answer(status: int, body: bytes) -> dict[str, Any]:
    """The JSON object a node answered with; raises what it says went wrong."""
    try:
        answer: dict[str, Any] = json.loads(body)
    except ValueError:
        answer = {"error": "RunError", "message": f"answer {status}: {body[:200]!r}"}
    if status == 200:
        return answer
    raise _ERRORS.get(str(answer.get("error")), RunError)(str(answer.get("message")))
