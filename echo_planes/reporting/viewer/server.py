"""Server of the pages, for one user on this machine only.

All users of a machine share its loopback interface, and so do the web pages that they open. Each address
therefore begins with a token that only the user who started the server knows. The Host header must name this
machine, because a foreign page could let its own name resolve to it. The server answers only GET, and a
content policy prevents the pages from loading or sending anything.

Processes without the token can still connect. The server therefore limits the number of connections, closes
idle ones after `HEADER_LIMIT_S`, and closes the oldest for a new one. One thread makes all pages.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from socket import socket

import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from markupsafe import Markup

from echo_planes.errors import DataError
from echo_planes.reporting.html import address, page, part, policy
from echo_planes.reporting.sections.rollouts import Row
from echo_planes.reporting.viewer.listing import list_body
from echo_planes.reporting.viewer.queries import find, parse_query
from echo_planes.reporting.viewer.reading import COLOURS, group_body, sample_body
from echo_planes.reporting.viewer.run_folder import RunFolder

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOST = "127.0.0.1"
WAIT_REFRESH_S = 3
HEADER_LIMIT_S = 10.0  # longest wait for the whole of a connection's next request
MAX_CONNECTIONS = 64
BACKLOG = 16
_HEADERS = {
    "Content-Security-Policy": f"{policy('viewer.js')}; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def make_app(run: RunFolder, token: str) -> web.Application:
    """Make the application with a run's pages, below `/<token>/`. The caller must listen on HOST only."""
    pages = _Pages(run)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = _refusal(request, token)
        try:
            response = refused or await handler(request)
        except web.HTTPException as error:
            response = _plain(HTTPStatus(error.status), error.reason)
        except DataError as error:
            response = pages.problem(request, error)
        response.headers.update(_HEADERS)
        return response

    app = web.Application(middlewares=[guard])
    app.on_cleanup.append(pages.close)
    # Not add_get, which would answer HEAD too.
    app.router.add_route("GET", "/{token}/", pages.groups)
    app.router.add_route("GET", r"/{token}/group/{sequence:\d{1,18}}", pages.group)
    app.router.add_route("GET", r"/{token}/group/{sequence:\d{1,18}}/{sample:\d{1,9}}", pages.sample)
    return app


@asynccontextmanager
async def serving(run: RunFolder, token: str, listening: socket) -> AsyncIterator[None]:
    """Serve the pages on a bound socket, within the limits on connections above."""
    runner = web.AppRunner(
        make_app(run, token),
        access_log=None,
        logger=_logger(),
        keepalive_timeout=HEADER_LIMIT_S,
        lingering_time=1.0,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    server = runner.server
    if server is None:
        raise RuntimeError("a runner that was set up has a server")

    def admit() -> asyncio.BaseProtocol:
        if len(server.connections) >= MAX_CONNECTIONS:
            server.connections[0].force_close()
        return server()

    accepting = await asyncio.get_running_loop().create_server(admit, sock=listening, backlog=BACKLOG)
    try:
        yield
    finally:
        accepting.close()
        await runner.cleanup()


def _logger() -> logging.Logger:
    """Return a logger of the server's own errors. It omits malformed requests, which could hold the token."""
    logger = logging.getLogger(__name__)
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _refusal(request: web.Request, token: str) -> web.Response | None:
    """Return the refusal of a request; None if the request is admitted."""
    own = request.transport.get_extra_info("sockname") if request.transport else None
    if own is None or request.headers.get("Host") not in (f"{HOST}:{own[1]}", f"localhost:{own[1]}"):
        return _plain(HTTPStatus.FORBIDDEN, "the Host header does not name this server")
    given = request.path.removeprefix("/").partition("/")[0]
    if not hmac.compare_digest(given.encode(errors="replace"), token.encode()):
        return _plain(HTTPStatus.FORBIDDEN, "open the whole address that the command printed")
    return None


def _plain(status: HTTPStatus, text: str) -> web.Response:
    return web.Response(status=status, text=f"{status.value}: {text}\n")


class _Pages:
    """Handlers of the pages. One thread reads the run, so that a long search delays no connection."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(1, "pages")

    async def groups(self, request: web.Request) -> web.Response:
        return await self._made(self._groups, request)

    async def group(self, request: web.Request) -> web.Response:
        return await self._made(self._group, request)

    async def sample(self, request: web.Request) -> web.Response:
        return await self._made(self._sample, request)

    async def close(self, app: web.Application) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _made(self, page: Callable[[web.Request], web.Response], request: web.Request) -> web.Response:
        return await asyncio.get_running_loop().run_in_executor(self._thread, page, request)

    def _groups(self, request: web.Request) -> web.Response:
        snapshot = self._run.snapshot()
        if snapshot is None:
            said = "No rollouts yet: the run has not started. This page looks again."
            body = part("note", text=said, kind="empty")
            return self._page("Rollouts", body, refresh_s=WAIT_REFRESH_S)
        query = parse_query(request.query)
        body = list_body(snapshot, query, find(snapshot, query), request.query)
        return self._page("Rollouts", body)

    def _group(self, request: web.Request) -> web.Response:
        sequence, rows, about = self._rows(request)
        title = f"Group {rows[0]['group_id']}"
        body = group_body(rows, self._run.tokenizer, _colour(request), f"{sequence}/")
        return self._page(title, about + body, crumbs=[("../", "all groups")])

    def _sample(self, request: web.Request) -> web.Response:
        sequence, rows, _ = self._rows(request)
        sample = int(request.match_info["sample"])
        if sample >= len(rows):
            raise DataError(
                f"group {sequence} has {len(rows)} samples, there is no sample {sample}; go back to it"
            )
        row = rows[sample]
        colour = _colour(request)
        body = _neighbours("sample", sample, len(rows), colour) + sample_body(
            row, self._run.tokenizer, colour
        )
        crumbs = [("../../", "all groups"), (f"../{sequence}", f"group {row['group_id']}")]
        return self._page(f"Sample {sample}", body, crumbs=crumbs)

    def problem(self, request: web.Request, error: DataError) -> web.Response:
        """Return a page that shows an error."""
        top = "../" * (request.path.count("/") - 2) or "./"
        body = part("note", text=error, kind="error")
        return self._page("Not shown", body, crumbs=[(top, "all groups")], status=HTTPStatus.BAD_REQUEST)

    def _rows(self, request: web.Request) -> tuple[int, list[Row], Markup]:
        """Return a group's sequence number, its rows, and its facts with links to its neighbours."""
        sequence = int(request.match_info["sequence"])
        snapshot = self._run.snapshot()
        if snapshot is None or sequence >= snapshot.index.groups.length:
            raise DataError(f"there is no group {sequence}; go back to the list")
        rows: list[Row] = snapshot.gather(np.array([sequence])).to_pylist()
        if not rows:
            raise DataError(
                f"the rows of group {sequence} ({snapshot.index.ids[sequence]}) are gone: let go by "
                "retention, or damaged; go back to the list"
            )
        step = rows[0]["step"]
        pairs = [
            ("fate", rows[0]["fate"]),
            *([("step", step + 1)] if step >= 0 else []),
            ("version", int(snapshot.index.groups["version"][sequence])),
            ("mean reward", f"{float(snapshot.index.groups['reward_mean'][sequence]):.4g}"),
            ("samples", len(rows)),
            ("prompt number", rows[0]["prompt_index"]),
        ]
        links = _neighbours("group", sequence, snapshot.index.groups.length, _colour(request))
        return sequence, rows, part("facts", pairs=pairs) + links

    def _page(
        self,
        title: str,
        body: Markup,
        *,
        crumbs: Sequence[tuple[str, str]] = (),
        refresh_s: int = 0,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> web.Response:
        text = page("viewer", title=title, body=body, run=self._run.name, crumbs=crumbs, refresh_s=refresh_s)
        return web.Response(status=status, text=text, content_type="text/html")


def _colour(request: web.Request) -> str:
    asked = request.query.get("colour", "")
    return asked if asked in COLOURS else COLOURS[0]


def _neighbours(noun: str, place: int, total: int, colour: str) -> Markup:
    """Return links to the previous and the next page, if they exist."""
    places = ((place - 1, f"previous {noun}"), (place + 1, f"next {noun}"))
    links = [(address(str(i), {"colour": colour}), name) for i, name in places if 0 <= i < total]
    return part("links", links=links)
