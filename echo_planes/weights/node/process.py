"""The process beside a learner or a worker that moves weights: `python -m echo_planes.weights.node.process`.

One program, two roles. The sender's node takes publications from the learner, serves them, runs the tracker
and keeps the store; a worker's node pulls from its parent, serves its children and stages for its engine.

The node reads its settings as one line of JSON from stdin (`NodeSettings`), and answers with one line on
stdout (`Started`) when it listens or cannot. It ends when its stdin ends, and dies with its parent process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from echo_planes.cluster.process import die_with_parent, settle
from echo_planes.errors import ConfigError, EchoPlanesError, RunError
from echo_planes.weights.node.control import CONTROL_SOCKET, Failure, Started
from echo_planes.weights.node.door import Door
from echo_planes.weights.node.roles import SenderRole, WorkerRole
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.shelf import Shelf
from echo_planes.weights.node.spool import hold_folder, remove_folder
from echo_planes.weights.node.transport import listen, node_application, owner_application, server_tls
from echo_planes.weights.wire.limits import TransferLimits, limits_for, relay_limits
from echo_planes.weights.wire.signing import Verifier


class Node:
    """One node in the running event loop. `start`, then `close`.

    Args:
        settings: `folder` must be set.

    Raises:
        ConfigError, ClusterError: the settings cannot work here.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.folder = Path(settings.folder)
        verifier = Verifier(settings.public_bytes)
        self.shelf = Shelf(verifier, _limits(settings), self.folder, settings.lineage)
        listener = listen(settings)
        tls = server_tls(settings)
        self._door = Door(listener, tls)
        self.port: int = listener.getsockname()[1]
        place = settings.advertise or settings.host
        if place.count(":") > 1:
            place = f"[{place}]"
        if ":" not in place.rpartition("]")[2]:
            place = f"{place}:{self.port}"
        self.address = f"http{'s' if tls else ''}://{place}"
        self._public = node_application(settings.token)
        self._control = owner_application(settings.token)
        role = SenderRole if settings.role == "sender" else WorkerRole
        self.role: SenderRole | WorkerRole = role(settings, self.shelf, self.address)
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        """Listen, and start the role's tasks."""
        self.role.add_routes(self._public, self._control)
        public = await self._runner(self._public)
        if public.server is None:
            raise RunError("the node's server was not set up")
        self._door.open(public.server)
        control = await self._runner(self._control)
        await web.UnixSite(control, str(self.folder / CONTROL_SOCKET)).start()
        await self.role.start()

    async def close(self) -> None:
        """End everything that `start` began, and free the shelf's space."""
        await self.role.close()
        await self._door.close()
        for runner in self._runners:
            await runner.cleanup()
        self.shelf.close()

    async def _runner(self, app: web.Application) -> web.AppRunner:
        # Feeds never end by themselves, so the shutdown does not wait for them.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        self._runners.append(runner)
        return runner


def _limits(settings: NodeSettings) -> TransferLimits:
    if settings.specs:
        return limits_for({spec.name: spec for spec in settings.specs})
    return relay_limits(settings.max_payload_bytes)


def _answer(started: Started) -> None:
    print(msgspec.json.encode(started).decode(), flush=True)


async def serve(settings: NodeSettings, ended: asyncio.Event) -> None:
    """Run one node until `ended` is set; print its address on stdout."""
    node = Node(settings)
    try:
        await node.start()
        _answer(Started(node.address))
        settle()
        await ended.wait()
    finally:
        await node.close()


async def _until_stdin_ends(settings: NodeSettings) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch() -> None:
        sys.stdin.read()
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=watch, daemon=True).start()
    await serve(settings, ended)


def main() -> int:
    """Run a node as this process. Return the exit status: 0, or that of the error."""
    die_with_parent()
    folder: Path | None = None
    try:
        settings = NodeSettings.from_json(sys.stdin.readline())
        if not settings.folder:
            raise ConfigError("a node needs a folder of its own")
        folder = Path(settings.folder)
        if ":" in settings.codec:
            from echo_planes.weights.codec.table import (
                take_codec,  # loads numba: only where the run has a codec of its own
            )

            take_codec(settings.codec)
        lock = hold_folder(folder)
        uvloop.run(_until_stdin_ends(settings))
        os.close(lock)
    except EchoPlanesError as error:
        _answer(Started(failure=Failure(type(error).__name__, str(error))))
        return getattr(error, "exit_status", 1)
    finally:
        if folder is not None:
            remove_folder(folder)
    return 0


if __name__ == "__main__":
    # A thread may be stuck in a read or write of an unreachable store: exit without waiting for it.
    status = main()
    sys.stdout.flush()
    os._exit(status)
