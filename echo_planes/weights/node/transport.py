"""HTTP between nodes: who may ask, how large a message may be, TLS, and the sockets' options.

Nothing is decided here about weights or topology.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import web
from yarl import URL

from echo_planes.errors import ClusterError, ConfigError, EchoPlanesError, WaitTimeoutError, WeightsError
from echo_planes.weights.node.door import MAX_PER_NODE, Guest
from echo_planes.weights.node.settings import LOOPBACK, NodeSettings
from echo_planes.weights.store.objects import StoreUnreachableError
from echo_planes.weights.wire.credentials import bearer, is_bearer, may_enter

MAX_JSON_BYTES = 4 * 1024**2  # of one request: ranges of chunks, reports
CONNECT_S = 3.0
ANSWER_S = 10.0  # for one small request
BODY_S = 30.0  # for a request's body, of at most `MAX_JSON_BYTES`
READ_BUFFER_BYTES = 256 * 1024  # per connection, before the peer is made to wait
# Congestion control, where the kernel has it and lets this user choose; else the kernel's own choice works
# too. BBR keeps its window between publications, where others begin anew at a few packets per round trip
# after half a second of rest. Changing to CUBIC for the bulk of a large one made patches after it late.
CONGESTION = b"bbr"
UNSENT_BYTES = 256 * 1024  # what waits here when a child goes elsewhere was sent for nothing

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_STATUS: dict[type[EchoPlanesError], int] = {  # the first that fits
    StoreUnreachableError: 503,  # before what it is a kind of: asking again may help
    WeightsError: 422,
    WaitTimeoutError: 504,
    ConfigError: 400,
    ClusterError: 507,
}


def node_application(key: str) -> web.Application:
    """An empty server for other nodes: each shows its own credential, and X-Node names it from then on.

    Args:
        key: of the node that serves; see `credentials`.
    """

    def enters(request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return may_enter(given, request.headers.get("X-Node", ""), key)

    return _application(enters)


def owner_application(key: str) -> web.Application:
    """An empty server for the owner of the node alone, who holds its key."""
    return _application(lambda request: is_bearer(request.headers.get("Authorization", ""), key))


def _application(enters: Callable[[web.Request], bool]) -> web.Application:
    """A server that answers nobody else, and errors of ours as JSON objects."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not enters(request):
            return web.json_response(
                {"error": "Unauthorized", "message": "wrong or missing token"}, status=401
            )
        guest = request.protocol
        if isinstance(guest, Guest) and not guest.shows(request.headers["X-Node"]):
            why = f"a node has at most {MAX_PER_NODE} connections here, each of its own"
            return web.json_response({"error": "TooManyConnections", "message": why}, status=429)
        try:
            return await handler(request)
        except EchoPlanesError as error:
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
            return web.json_response({"error": type(error).__name__, "message": str(error)}, status=status)

    return web.Application(middlewares=[guard], client_max_size=MAX_JSON_BYTES)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The request's body, one JSON object of at most `MAX_JSON_BYTES`.

    Raises:
        WeightsError: it is something else.
    """
    try:
        async with asyncio.timeout(BODY_S):
            message = json.loads(await request.read())
    except TimeoutError as error:
        raise WeightsError(f"the request's body did not come within {BODY_S:.0f} s") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"the request's body is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WeightsError("the request's body is not a JSON object")
    return message


def listen(settings: NodeSettings) -> socket.socket:
    """The node's listening socket.

    Raises:
        ClusterError: the port is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(listener)  # accepted connections inherit it
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ClusterError(
            f"a weight node cannot listen on {settings.host}:{settings.port} ({error.strerror}): "
            "set weights.port or weights.host to one that is free and this machine's own"
        ) from error
    listener.listen(128)
    listener.setblocking(False)
    return listener


def tune(connection: socket.socket) -> None:
    """Options of every connection: little waits unsent in the kernel, and `CONGESTION`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)


def server_tls(settings: NodeSettings) -> ssl.SSLContext | None:
    """The TLS side of the server, or None where none is configured.

    Raises:
        ConfigError: a file that is missing or wrong.
    """
    if not settings.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS certificate {settings.tls_cert} with key {settings.tls_key} cannot be used: {error}"
        ) from error
    return context


def client_tls(settings: NodeSettings) -> ssl.SSLContext:
    """The TLS side of the client: nodes must have certificates of `tls_ca`, or of the system's authorities.

    Raises:
        ConfigError: a file that is missing or wrong.
    """
    try:
        return ssl.create_default_context(cafile=settings.tls_ca or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS authority {settings.tls_ca} cannot be used: {error}") from error


def client_session(settings: NodeSettings) -> aiohttp.ClientSession:
    """HTTP session of a worker's node to other nodes, through the environment's proxies, except on loopback.

    A peer that takes a connection and says nothing is given up after `ANSWER_S`; feeds ping more often.
    """

    def tuned(address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        connection = socket.socket(family, kind, protocol)
        tune(connection)
        return connection

    tls = client_tls(settings) if settings.sender.startswith("https://") else True
    connector = aiohttp.TCPConnector(ssl=tls, limit=0, socket_factory=tuned)
    return aiohttp.ClientSession(
        connector=connector,
        headers={"X-Node": settings.node_id},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ANSWER_S),
        read_bufsize=READ_BUFFER_BYTES,
        middlewares=(_through_proxy,),
        auto_decompress=False,
    )


async def _through_proxy(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send by the proxy that the environment names for this address, if any; `no_proxy` is obeyed.

    Not `trust_env`: that would proxy loopback too, and fail where ~/.netrc has a login for everybody.
    """
    host = request.url.host or ""
    proxy = getproxies().get(request.url.scheme)
    if proxy and host not in LOOPBACK and not proxy_bypass(host):
        request.update_proxy(URL(proxy if "://" in proxy else f"http://{proxy}"), None, None)
    return await handler(request)


async def happens(event: asyncio.Event, limit_s: float | None) -> bool:
    """Wait for `event`, at most so long; whether it was set. (`asyncio.wait_for` of Python 3.11 can lose a
    cancellation that comes together with the event.)"""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def showing(shown: str) -> dict[str, Any]:
    """Options of a request that shows this credential to whoever is asked, and to nobody it points to."""
    return {"headers": {"Authorization": bearer(shown)}, "allow_redirects": False}


async def ask(
    session: aiohttp.ClientSession, url: str, message: dict[str, Any], shown: str
) -> dict[str, Any]:
    """POST one JSON object and return the one that comes back.

    Args:
        shown: this node's credential with whoever is asked.

    Raises:
        ConnectionError: no answer within `ANSWER_S`, or none that is a JSON object with status 200.
    """
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            session.post(url, json=message, **showing(shown)) as response,
        ):
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_JSON_BYTES:
                    raise ConnectionError(f"{url} answered more than {MAX_JSON_BYTES} bytes")
            answer = json.loads(body)
            if response.status == 200 and isinstance(answer, dict):
                return answer
            said = answer.get("message") if isinstance(answer, dict) else None
            raise ConnectionError(f"{url} answered {response.status}: {str(said or bytes(body))[:200]}")
    except aiohttp.ClientConnectorCertificateError as error:
        raise ConnectionError(
            f"{url} has a certificate that is not trusted here ({error.certificate_error}): "
            "set weights.tls_ca to the authority that signed it"
        ) from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConnectionError(f"{url} did not answer: {error!r}") from error
