"""HTTP handlers by which a node serves a store: names, objects and parts of objects."""

from __future__ import annotations

import asyncio
import re

from aiohttp import web

from echo_planes.errors import WeightsError
from echo_planes.weights.store.objects import ObjectReader
from echo_planes.weights.store.reading import OBJECTS, PUBLICATIONS

READABLE = (OBJECTS, PUBLICATIONS)
MAX_OBJECT_BYTES = 64 * 1024**2  # of a whole object in one answer; larger ones are read in parts
_PART = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")


async def answer_list(objects: ObjectReader, request: web.Request) -> web.Response:
    """Answer `.../list/{prefix}` with the names of the objects in that folder, as a JSON list.

    Raises:
        WeightsError: the prefix is not one of `READABLE`.
    """
    prefix = request.match_info["prefix"]
    if prefix not in READABLE:
        raise WeightsError(f"{prefix[:40]!r} is not served; {' and '.join(READABLE)} are")
    return web.json_response(await asyncio.to_thread(objects.list, prefix))


async def answer_object(objects: ObjectReader, request: web.Request) -> web.Response:
    """Answer `.../objects/{name}` with one object, or with its bytes `?part=offset-size`.

    Raises:
        WeightsError: the name is outside `READABLE`. A store's folder may be a run's, which has its key.
    """
    name = request.match_info["name"]
    if not name.startswith(tuple(f"{prefix}/" for prefix in READABLE)):
        raise WeightsError(f"{name[:40]!r} is not served; only what is in {' and '.join(READABLE)} is")
    data = await asyncio.to_thread(_read_part, objects, name, request.query.get("part", ""))
    return web.Response(body=data)


def _read_part(objects: ObjectReader, name: str, part: str) -> bytes:
    """Read an object, or its `part` "offset-size" in bytes, of at most 8 times `MAX_OBJECT_BYTES`."""
    if not part:
        return objects.read(name, MAX_OBJECT_BYTES)
    offset, _, size = part.partition("-")
    if not (_PART.fullmatch(part) and int(size) <= 8 * MAX_OBJECT_BYTES):
        raise WeightsError(f"part {part[:40]!r} of an object is offset-size")
    return objects.read_range(name, int(offset), int(size))
