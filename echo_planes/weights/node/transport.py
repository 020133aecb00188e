"""HTTP between nodes: credentials of requests, limits of messages, TLS, and options of sockets.

Decisions about weights and topology are made in other modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from echo_planes.errors import ClusterError, ConfigError, EchoPlanesError, WaitTimeoutError, WeightsError
from echo_planes.weights.node.control import Failure, failure
from echo_planes.weights.node.door import MAX_PER_NODE, Guest
from echo_planes.weights.node.settings import LOOPBACK, NodeSettings
from echo_planes.weights.store.objects import StoreUnreachableError
from echo_planes.weights.wire.credentials import bearer, is_bearer, may_enter
from echo_planes.weights.wire.messages import MAX_SHOWN, decode

MAX_JSON_BYTES = 4 * 1024**2  # of one message: ranges of chunks, reports, orders
CONNECT_S = 3.0
ANSWER_S = 10.0  # for one small request
BODY_S = 30.0  # for a request's body, of at most `MAX_JSON_BYTES`
READ_BUFFER_BYTES = 256 * 1024  # unread bytes per connection, beyond which the peer must wait
# Congestion control, if the kernel has it and lets this user choose it; the kernel's default works too. BBR
# keeps its window between publications. Others restart at a few packets per round trip after half a second
# of rest. Switching to CUBIC for the bulk of a large publication delayed the patches after it.
CONGESTION = b"bbr"
UNSENT_BYTES = 256 * 1024  # per socket, in the kernel: wasted if the child goes to another parent

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_STATUS: dict[type[EchoPlanesError], int] = {  # the first class that fits counts
    StoreUnreachableError: 503,  # before its base class: asking again may help
    WeightsError: 422,
    WaitTimeoutError: 504,
    ConfigError: 400,
    ClusterError: 507,
}


def node_application(key: str) -> web.Application:
    """Return a server, without handlers, for other nodes: X-Node names the node that shows its credential.

    Args:
        key: key of the node that serves; see `credentials`.
    """

    def enters(request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return may_enter(given, request.headers.get("X-Node", ""), key)

    return _application(enters)


def owner_application(key: str) -> web.Application:
    """Return a server, without handlers, for the node's owner alone, which holds the node's key."""
    return _application(lambda request: is_bearer(request.headers.get("Authorization", ""), key))


def _application(enters: Callable[[web.Request], bool]) -> web.Application:
    """Return a server that answers only requests that `enters` lets in, and our errors as JSON objects."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not enters(request):
            return _refusal("Unauthorized", "wrong or missing token", 401)
        guest = request.protocol
        if isinstance(guest, Guest) and not guest.shows(request.headers["X-Node"]):
            why = f"a node has at most {MAX_PER_NODE} connections here, each of its own"
            return _refusal("TooManyConnections", why, 429)
        try:
            return await handler(request)
        except EchoPlanesError as error:
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
            return _refusal(type(error).__name__, str(error), status)

    return web.Application(middlewares=[guard], client_max_size=MAX_JSON_BYTES)


def _refusal(error: str, message: str, status: int) -> web.Response:
    answer = say(Failure(error, message))
    answer.set_status(status)
    return answer


async def read_message(request: web.Request, kind: type[T]) -> T:
    """Return the message in the request's body: JSON of at most `MAX_JSON_BYTES`.

    Raises:
        WeightsError: the body is no such message, or did not come within `BODY_S`.
    """
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError as error:
        raise WeightsError(f"the request's body did not come within {BODY_S:.0f} s") from error
    return decode(body, kind, "the request's body")


def say(message: object) -> web.Response:
    """Return an answer that holds the JSON of a message."""
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")


def listen(settings: NodeSettings) -> socket.socket:
    """Return the node's listening socket.

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
    """Set the options of a connection: `UNSENT_BYTES` and `CONGESTION`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)


def server_tls(settings: NodeSettings) -> ssl.SSLContext | None:
    """Return the server's TLS context, or None where TLS is not configured.

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
    """Return the client's TLS context: it trusts certificates of `tls_ca`, or of the system's authorities.

    Raises:
        ConfigError: a file that is missing or wrong.
    """
    try:
        return ssl.create_default_context(cafile=settings.tls_ca or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS authority {settings.tls_ca} cannot be used: {error}") from error


def client_session(settings: NodeSettings) -> aiohttp.ClientSession:
    """Return a worker's HTTP session to other nodes, through the environment's proxies except on loopback.

    A request fails after `ANSWER_S` without a byte from the peer; feeds ping more often.
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
    """Send a request through the proxy that the environment names for its address; obey `no_proxy`.

    aiohttp's `trust_env` would proxy loopback too, and would fail where ~/.netrc has a default login.
    """
    host = request.url.host or ""
    proxy = getproxies().get(request.url.scheme)
    if proxy and host not in LOOPBACK and not proxy_bypass(host):
        request.update_proxy(URL(proxy if "://" in proxy else f"http://{proxy}"), None, None)
    return await handler(request)


async def happens(event: asyncio.Event, limit_s: float | None) -> bool:
    """Wait for `event`, at most `limit_s` seconds (None: for ever). Return whether it was set.

    `asyncio.wait_for` of Python 3.11 can lose a cancellation that comes together with the event.
    """
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def showing(shown: str) -> dict[str, Any]:
    """Return options of a request that shows this credential, but to no target of a redirect."""
    return {"headers": {"Authorization": bearer(shown)}, "allow_redirects": False}


async def ask(
    session: aiohttp.ClientSession, url: str, message: msgspec.Struct, shown: str, kind: type[T]
) -> T:
    """POST one message and return the answer.

    Args:
        shown: this node's credential with the node at `url`.
        kind: type of the answer.

    Raises:
        ConnectionError: no answer within `ANSWER_S`, or none of this kind with status 200.
    """
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            session.post(url, data=msgspec.json.encode(message), **showing(shown)) as response,
        ):
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_JSON_BYTES:
                    raise ConnectionError(f"{url} answered more than {MAX_JSON_BYTES} bytes")
            if response.status == 200:
                return decode(body, kind, f"the answer of {url}")
            said = failure(response.status, body).message
            raise ConnectionError(f"{url} answered {response.status}: {said[:MAX_SHOWN]}")
    except WeightsError as error:
        raise ConnectionError(str(error)) from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise ConnectionError(
            f"{url} has a certificate that is not trusted here ({error.certificate_error}): "
            "set weights.tls_ca to the authority that signed it"
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionError(f"{url} did not answer: {error!r}") from error
