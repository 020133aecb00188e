"""`python -m echo_planes.view RUN`: viewer of a run's rollouts, in a browser on this machine."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from echo_planes.errors import ClusterError, UserError
from echo_planes.reporting.viewer.run_folder import RunFolder
from echo_planes.reporting.viewer.server import HOST, serving

TOKEN_BYTES = 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the exit status. A mistake is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m echo_planes.view",
        description="Read the rollouts of a run, finished or running, in a browser on this machine.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1; default: any that is free")
    options = parser.parse_args(arguments)
    try:
        run = RunFolder(options.run)
        run.snapshot()  # reports an unreadable store here, before a browser opens it
        asyncio.run(_serve(run, _listen(options.port)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ClusterError(
            f"--port {port} cannot be used ({reason}); leave it out or take another"
        ) from error
    return listening


async def _serve(run: RunFolder, listening: socket.socket) -> None:
    token = secrets.token_urlsafe(TOKEN_BYTES)
    async with serving(run, token, listening):
        port = listening.getsockname()[1]
        print(f"http://{HOST}:{port}/{token}/", flush=True)
        print("Only who has this address can read it. Ctrl-C ends it.", flush=True)
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()


if __name__ == "__main__":
    sys.exit(main())
