"""Admission of connections: a burst of strangers is bounded, and each one that ends is forgotten."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from echo_planes.weights.node.door import MAX_STRANGERS_PER_ADDRESS, Door


async def _settle() -> None:
    for _ in range(500):
        await asyncio.sleep(0)


def test_a_burst_of_strangers_is_bounded_and_forgotten() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    async def story() -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        place = listener.getsockname()
        clients = [socket.create_connection(place) for _ in range(MAX_STRANGERS_PER_ADDRESS + 20)]
        door = Door(listener, None)
        door.open(web.Server(answer))
        await _settle()
        assert len(door._visits) == MAX_STRANGERS_PER_ADDRESS
        for client in clients:
            client.close()
        await _settle()
        assert len(door._visits) == 0
        await door.close()

    asyncio.run(story())
