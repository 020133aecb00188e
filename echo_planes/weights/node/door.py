"""Admission of connections to a node: a stranger has seconds to show who it is, and there are never many.

A connection costs a descriptor before anything is known of whoever made it. So strangers are few, in all and
from one address, and each new one takes the place of the oldest of the address with the most: an honest node,
which shows its credential as soon as it is connected, is let in also while somebody fills the place. Whoever
has shown it may have `MAX_PER_NODE` connections. `RESERVED_DESCRIPTORS` stay free for the node itself: its
files, its own connections, and the socket by which its owner hands over publications.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
import ssl
from collections import Counter
from http import HTTPStatus

from aiohttp import web

STRANGER_S = 5.0  # from being connected, the TLS handshake included, to a whole request with a credential
KEEP_S = 75.0  # between two requests of one connection
MAX_STRANGERS = 256
MAX_STRANGERS_PER_ADDRESS = 64
MAX_PER_NODE = 64  # connections of one name: 16 streams, reports, repairs, a store's objects
RESERVED_DESCRIPTORS = 64
MIN_ROOM = 16  # connections, however few descriptors this process may have
FULL_PAUSE_S = 0.1


class Door:
    """Takes in the connections of a node's public server.

    Args:
        listener: listening and non-blocking; closed with the door.
        tls: the server's side, or None.
    """

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        self._listener = listener
        self._tls = tls
        self._visits: set[Visit] = set()
        self._strangers: dict[str, dict[Visit, None]] = {}  # by address, oldest first
        self._names: Counter[str] = Counter()
        self._server: web.Server | None = None
        self._accepting: asyncio.Task[None] | None = None

    def open(self, server: web.Server) -> None:
        """Serve from now on."""
        self._server = server
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Let nobody in any more; those inside go with the server."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        for visit in list(self._visits):
            visit.end()
        self._listener.close()

    def welcome(self, visit: Visit, name: str) -> bool:
        """A stranger has shown who it is; False: that name has too many connections already."""
        if visit.name == name:
            return True
        if visit not in self._visits:  # sent away just now
            return False
        if visit.name or self._names[name] >= MAX_PER_NODE:
            return False
        visit.name = name
        visit.deadline.cancel()
        self._names[name] += 1
        self._forget_stranger(visit)
        return True

    def gone(self, visit: Visit) -> None:
        """It has ended, one way or another."""
        if visit not in self._visits:
            return
        self._visits.discard(visit)
        visit.deadline.cancel()
        self._forget_stranger(visit)
        if visit.name:
            self._names[visit.name] -= 1
            self._names += Counter()  # forgets who has none

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is left, or the client went away again
                self._end_oldest_stranger()
                await asyncio.sleep(FULL_PAUSE_S)
                continue
            if len(self._visits) >= _room() and not self._end_oldest_stranger():
                connection.close()
                continue
            visit = Visit(_place(address[0]))
            visit.deadline = loop.call_later(STRANGER_S, visit.end)
            self._visits.add(visit)
            self._strangers.setdefault(visit.address, {})[visit] = None
            if len(self._strangers[visit.address]) > MAX_STRANGERS_PER_ADDRESS:
                next(iter(self._strangers[visit.address])).end()
            elif sum(map(len, self._strangers.values())) > MAX_STRANGERS:
                self._end_oldest_stranger()
            visit.entering = asyncio.create_task(self._enter(connection, visit))

    async def _enter(self, connection: socket.socket, visit: Visit) -> None:
        loop, server = asyncio.get_running_loop(), self._server
        if server is None:
            return
        try:
            await loop.connect_accepted_socket(
                lambda: Guest(server, self, visit, loop),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=STRANGER_S if self._tls else None,
            )
        except (OSError, ssl.SSLError, TimeoutError, asyncio.CancelledError):
            self.gone(visit)
            connection.close()
        if visit.ended:
            visit.end()  # it was to end while its handshake went on

    def _end_oldest_stranger(self) -> bool:
        """Of the address that has the most. Returns whether there was one."""
        if not self._strangers:
            return False
        fullest = max(self._strangers, key=lambda address: len(self._strangers[address]))
        next(iter(self._strangers[fullest])).end()
        return True

    def _forget_stranger(self, visit: Visit) -> None:
        with contextlib.suppress(KeyError):
            del self._strangers[visit.address][visit]
            if not self._strangers[visit.address]:
                del self._strangers[visit.address]


class Visit:
    """One connection. `name` is "" while it is a stranger's."""

    __slots__ = ("address", "deadline", "ended", "entering", "guest", "name")

    def __init__(self, address: str) -> None:
        self.address = address
        self.name = ""
        self.guest: Guest | None = None
        self.entering: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle
        self.ended = False

    def end(self) -> None:
        """Close it at once."""
        self.ended = True
        if self.guest is not None:
            self.guest.leave()
        elif self.entering is not None:
            self.entering.cancel()


class Guest(web.RequestHandler):
    """aiohttp's side of a connection that came through a door."""

    __slots__ = ("_door", "_visit")

    def __init__(self, server: web.Server, door: Door, visit: Visit, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server, loop=loop, keepalive_timeout=KEEP_S)
        self._door = door
        self._visit = visit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As the base class."""
        self._visit.guest = self
        super().connection_made(transport)
        if self._visit.ended:
            self.leave()

    def connection_lost(self, exc: BaseException | None) -> None:
        """As the base class."""
        self._door.gone(self._visit)
        super().connection_lost(exc)

    def shows(self, name: str) -> bool:
        """It has proven its name; False: that name has too many connections."""
        return self._door.welcome(self._visit, name)

    def leave(self) -> None:
        """Close without waiting for what is unsent."""
        self._door.gone(self._visit)
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """As the base class, but what a client did wrong is told to it alone, in one line."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return super().handle_error(request, status, exc, message)
        why = HTTPStatus(status).phrase
        response = web.json_response(
            {"error": why, "message": "not a request this node reads"}, status=status
        )
        response.force_close()
        return response


def _room() -> int:
    """Connections that this process can hold now."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(MIN_ROOM, most - RESERVED_DESCRIPTORS)


def _place(host: str) -> str:
    """Text by which an address is counted: all of an IPv6 network of 64 bits is one customer's."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
