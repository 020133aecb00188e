"""Admission of connections to a node: limits on strangers, connections that have shown no credential yet.

A connection costs a descriptor before the node knows its peer. So strangers are few, in all and per address,
and have `STRANGER_S` seconds. Beyond a limit, a new one replaces the oldest stranger of its own address, or
of the address with the most. An honest node shows its credential as soon as it is connected, so it gets in
even during a flood of strangers. Then it may have `MAX_PER_NODE` connections. `RESERVED_DESCRIPTORS` stay
free for the node itself: its files, its own connections, and the socket of its owner.
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

STRANGER_S = 5.0  # from connecting, the TLS handshake included, to a request with a valid credential
KEEP_S = 75.0  # of rest between two requests on one connection
MAX_STRANGERS = 256
MAX_STRANGERS_PER_ADDRESS = 64
MAX_PER_NODE = 64  # connections of one name: 16 streams, reports, repairs, a store's objects
RESERVED_DESCRIPTORS = 64
MIN_ROOM = 16  # connections allowed even if this process has fewer descriptors
FULL_PAUSE_S = 0.1


class Door:
    """Accepts the connections of a node's public server.

    Args:
        listener: listening and non-blocking; `close` closes it.
        tls: the server's context; None: no TLS.
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
        """Accept connections for `server` from now on."""
        self._server = server
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop accepting, and close all connections and the listener."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        for visit in list(self._visits):
            visit.end()
        self._listener.close()

    def welcome(self, visit: Visit, name: str) -> bool:
        """Note the name that a connection has proven. Return whether the connection may stay.

        It may not if the name has `MAX_PER_NODE` connections, or if it has shown another name before.
        """
        if visit.name == name:
            return True
        if visit not in self._visits:  # closed meanwhile
            return False
        if visit.name or self._names[name] >= MAX_PER_NODE:
            return False
        visit.name = name
        visit.deadline.cancel()
        self._names[name] += 1
        self._forget_stranger(visit)
        return True

    def gone(self, visit: Visit) -> None:
        """Forget a connection that has ended. May be called twice."""
        if visit not in self._visits:
            return
        self._visits.discard(visit)
        visit.deadline.cancel()
        self._forget_stranger(visit)
        if visit.name:
            self._names[visit.name] -= 1
            self._names += Counter()  # removes names without connections

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
            await asyncio.sleep(0)  # a task that is cancelled before it has begun would not close anything

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
            visit.end()  # `end` was called during the handshake

    def _end_oldest_stranger(self) -> bool:
        """End the oldest stranger of the address that has the most. Return whether there was one."""
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
    """One connection. `name` is "" until its peer has proven one."""

    __slots__ = ("address", "deadline", "ended", "entering", "guest", "name")

    def __init__(self, address: str) -> None:
        self.address = address
        self.name = ""
        self.guest: Guest | None = None
        self.entering: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle
        self.ended = False

    def end(self) -> None:
        """Close the connection at once."""
        self.ended = True
        if self.guest is not None:
            self.guest.leave()
        elif self.entering is not None:
            self.entering.cancel()


class Guest(web.RequestHandler):
    """aiohttp's handler of a connection that a `Door` has accepted."""

    __slots__ = ("_door", "_visit")

    def __init__(self, server: web.Server, door: Door, visit: Visit, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server, loop=loop, keepalive_timeout=KEEP_S)
        self._door = door
        self._visit = visit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Do as the base class; close the connection if its visit has ended meanwhile."""
        self._visit.guest = self
        super().connection_made(transport)
        if self._visit.ended:
            self.leave()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Do as the base class, after telling the door."""
        self._door.gone(self._visit)
        super().connection_lost(exc)

    def shows(self, name: str) -> bool:
        """Note the name that the peer has proven; return as `Door.welcome` does."""
        return self._door.welcome(self._visit, name)

    def leave(self) -> None:
        """Close the connection and discard unsent data."""
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
        """Do as the base class, but answer a client's error in one line and do not log it."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return super().handle_error(request, status, exc, message)
        why = HTTPStatus(status).phrase
        response = web.json_response(
            {"error": why, "message": "not a request this node reads"}, status=status
        )
        response.force_close()
        return response


def _room() -> int:
    """Return how many connections this process may hold."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(MIN_ROOM, most - RESERVED_DESCRIPTORS)


def _place(host: str) -> str:
    """Return the address to count strangers under; for IPv6 its /64 network, which is one customer's."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
