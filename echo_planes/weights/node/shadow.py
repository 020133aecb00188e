"""The sender's own copy of the newest state, and the signed snapshots that it makes of this copy.

Snapshots go to the store, and to workers that cannot catch up in another way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from echo_planes.errors import ClusterError, WeightsError
from echo_planes.types import ByteArray, Publication
from echo_planes.weights.node.catch_up import Rescue
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.node.shelf import Holding, Shelf
from echo_planes.weights.node.transport import happens
from echo_planes.weights.store.archivist import FIRST_RETRY_S, MAX_RETRY_S
from echo_planes.weights.store.objects import open_objects
from echo_planes.weights.store.reading import folder_name, object_name
from echo_planes.weights.store.serving import answer_list, answer_object
from echo_planes.weights.store.writing import entry_files
from echo_planes.weights.wire.manifest import (
    SEGMENT_BYTES,
    PublicationKey,
    SegmentHeader,
    SignedManifest,
    SignedSegment,
    key_of,
)
from echo_planes.weights.wire.signing import Signer, Verifier
from echo_planes.weights.wire.transfer import chunk_hashes

if TYPE_CHECKING:
    from echo_planes.weights.node.stager import Stager

CHUNK_BYTES = 256 * 1024
WAITING_COPIES = 2  # times the model's size: publications that may wait for a shadow slower than the learner
SNAPSHOT_KEPT_S = 600.0  # after the last request: longer than a part takes on any usable link
REMEMBERED_KEYS = 64  # a learner that lost an answer hands the same publication over again


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version in full. `payload` has shape (manifest.payload_bytes,)."""

    signed: SignedManifest
    segments: list[SignedSegment]
    payload: ByteArray


class Shadow:
    """Follows the sender's publications. Run `run` as a task.

    Args:
        settings: must have a `signing_key`.
        shelf: holds the publications.
        notify: called with one line for people when the shadow cannot follow, and when it can again.
    """

    def __init__(self, settings: NodeSettings, shelf: Shelf, notify: Callable[[str], None]) -> None:
        from echo_planes.weights.node.stager import Stager  # loads numba: only where snapshots are made

        specs = {spec.name: spec for spec in settings.specs} or None
        self._stager: Stager = Stager(specs, Path(settings.folder) / "shadow", settings.digest)
        store = open_objects(settings.store) if settings.store else _Nothing()
        self._shelf = shelf
        self._rescue = Rescue(
            lambda path: store if path == "store" else _Nothing(),
            Verifier(settings.public_bytes),
            shelf,
            self._stager,
            Path(settings.folder),
        )
        self._signer = Signer.from_private_bytes(bytes.fromhex(settings.signing_key))
        self._notify = notify
        self._told: deque[PublicationKey] = deque(maxlen=REMEMBERED_KEYS)
        self._waiting: deque[Holding] = deque()  # pinned
        self._staging = False
        self._lost = False  # patches were left out: only `_recover` or a full publication leads on
        self._works = True
        self._woken = asyncio.Event()
        self._offered: _Offered | None = None
        self._renewing: asyncio.Task[_Offered] | None = None
        self._unused: asyncio.TimerHandle | None = None

    @property
    def behind(self) -> bool:
        """Whether publications are still to be applied."""
        return self._staging or self._lost or bool(self._waiting)

    def add_routes(self, public: web.Application) -> None:
        """Register handlers that serve a snapshot of at least a version, like a store with nothing else."""
        place = r"/v1/snapshot/{lineage}/{version:\d{1,18}}"
        public.router.add_get(place + "/list/{prefix:.+}", self._list)
        public.router.add_get(place + "/objects/{name:.+}", self._read)

    def published(self, holding: Holding) -> None:
        """Queue a publication that is complete on the shelf. The same one again changes nothing."""
        manifest = holding.transfer.manifest
        if manifest is None or holding.key in self._told:
            return
        self._told.append(holding.key)
        if manifest.codec == "full":
            self._forget_waiting()  # a full publication needs none before it
            self._lost = False
        if self._lost:
            return
        holding.pins += 1
        self._waiting.append(holding)
        waiting_bytes = sum(held.transfer.num_bytes for held in self._waiting)
        if len(self._waiting) > 1 and waiting_bytes > WAITING_COPIES * manifest.dense_bytes:
            self._forget_waiting()
            self._lost = True
            self._say("it is slower than the learner, and begins anew from the newest version")
        self._woken.set()

    async def run(self) -> None:
        """Follow the publications, until cancelled."""
        pause_s = FIRST_RETRY_S
        while True:
            self._woken.clear()
            while self._waiting:
                await self._follow(self._waiting.popleft())
            if not self._lost:
                pause_s = FIRST_RETRY_S
                await self._woken.wait()
            elif not await self._recover():
                await happens(self._woken, pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    def make(self) -> Snapshot:
        """Return the newest state in full, signed. Blocking; makes a dense copy.

        Raises:
            WeightsError: no publication was applied yet.
        """
        publication = self._stager.snapshot()
        segments, signed = _sign(self._signer, publication)
        return Snapshot(signed, segments, publication.payload)

    async def _follow(self, holding: Holding) -> None:
        self._staging = True
        try:
            error = await asyncio.to_thread(self._stage, holding)
            self._say(error)
            if error and not (self._waiting and self._waiting[0].key.codec == "full"):
                self._forget_waiting()  # they patch a state that was not reached
                self._lost = True
                await asyncio.to_thread(self._stager.reset)
        finally:
            self._staging = False
            holding.unpin()

    async def _recover(self) -> bool:
        """Catch up to the newest version as a late worker does. Return whether the shadow has advanced.

        So the shadow needs no full publication: the learner may go on with patches only.
        """
        complete = self._shelf.complete()
        if not complete:
            return False
        self._staging = True
        try:
            await self._rescue.catch_up(complete[-1])
        except (WeightsError, ClusterError) as error:  # the missing entries may be there later
            self._say(str(error))
            return False
        finally:
            self._staging = False
        reached = self._stager.manifest
        if reached is not None:
            await asyncio.to_thread(self._stager.settled, reached.version, True)
        # `published` has queued no patch meanwhile: newer patches take another round.
        if self._shelf.complete()[-1].transfer.manifest == complete[-1].transfer.manifest:
            self._lost = False
            self._say("")
        return True

    def _stage(self, holding: Holding) -> str:
        """Apply a publication; return why it failed, "" if it did not. Blocking: for threads.

        The shadow has no engine: it settles each version at once, so the next staged file is small.
        """
        manifest = holding.transfer.manifest
        if manifest is None:
            return "a publication is not whole"
        try:
            with contextlib.suppress(ClusterError):  # the unused file failed; the state is applied
                self._stager.stage(manifest, holding.segments())
            self._stager.settled(manifest.version, True)
        except WeightsError as error:
            return f"version {manifest.version} cannot be taken in: {error}"
        return ""

    def _forget_waiting(self) -> None:
        while self._waiting:
            self._waiting.popleft().unpin()

    def _say(self, error: str) -> None:
        """Notify people once when following begins to fail, and once when it works again."""
        if error and self._works:
            self._notify(f"no snapshots can be made for the store and late workers: {error}")
        elif not error and not self._works:
            self._notify("snapshots can be made again")
        self._works = not error

    # --- serving ---------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.Response:
        lineage, version = request.match_info["lineage"], int(request.match_info["version"])
        offered = self._offered
        if offered is None or not offered.reaches(lineage, version):
            offered = await self._renewed()
        self._in_use()
        return await answer_list(offered, request)

    async def _read(self, request: web.Request) -> web.Response:
        if self._offered is None:
            raise WeightsError("there is no snapshot: list it first")
        self._in_use()
        return await answer_object(self._offered, request)

    async def _renewed(self) -> _Offered:
        """Return a snapshot of the newest state. One is made at a time; cancelled requests do not stop it."""
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return await asyncio.shield(self._renewing)

    async def _renew(self) -> _Offered:
        newest = self._stager.manifest
        if self._offered is None or newest is None or self._offered.digest != newest.digest:
            self._offered = _Offered(await asyncio.to_thread(self.make))
        self._in_use()
        return self._offered

    def _in_use(self) -> None:
        """Keep the snapshot for another `SNAPSHOT_KEPT_S` seconds, then drop it.

        An answer under way holds its bytes. A worker that asks later is refused, lists the snapshot again,
        and gets a new one.
        """
        if self._unused is not None:
            self._unused.cancel()
        self._unused = asyncio.get_running_loop().call_later(SNAPSHOT_KEPT_S, self._let_go)

    def _let_go(self) -> None:
        self._offered = self._renewing = None  # a finished task still refers to the snapshot


class _Nothing:
    """An empty `ObjectReader`: for a run without a store, and for snapshots, which only the shadow makes."""

    def read(self, name: str, max_bytes: int) -> bytes:
        """See `ObjectReader`."""
        raise WeightsError(f"there is no {name}")

    def read_range(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        """See `ObjectReader`."""
        raise WeightsError(f"there is no {name}")

    def list(self, prefix: str) -> list[str]:
        """See `ObjectReader`."""
        return []


class _Offered:
    """A snapshot as an `ObjectReader`: a store of one publication, in memory."""

    def __init__(self, snapshot: Snapshot) -> None:
        manifest = snapshot.signed.manifest
        self._lineage, self._version, self.digest = manifest.lineage, manifest.version, manifest.digest
        folder = folder_name(0, key_of(manifest))  # the sequence numbers of a store begin with 1
        self._objects = {
            name: memoryview(d) for name, d in entry_files(folder, snapshot.signed, snapshot.segments)
        }
        self._objects[object_name(manifest)] = snapshot.payload.data.cast("B")

    def reaches(self, lineage: str, version: int) -> bool:
        """Return whether the snapshot is of that lineage, and of that version or a later one."""
        return self._lineage == lineage and self._version >= version

    def read(self, name: str, max_bytes: int) -> bytes:
        """See `ObjectReader`."""
        data = self._object(name)
        if len(data) > max_bytes:
            raise WeightsError(f"{name} has {len(data)} bytes; at most {max_bytes} make sense")
        return bytes(data)

    def read_range(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        """See `ObjectReader`."""
        data = bytes(self._object(name)[offset_bytes : offset_bytes + size_bytes])
        if len(data) != size_bytes:
            raise WeightsError(f"{name} ends after {len(data)} of {size_bytes} bytes")
        return data

    def list(self, prefix: str) -> list[str]:
        """See `ObjectReader`."""
        return sorted(name for name in self._objects if name.startswith(f"{prefix}/"))

    def _object(self, name: str) -> memoryview:
        data = self._objects.get(name)
        if data is None:
            raise WeightsError(f"{name} is not in this snapshot; there may be a newer one")
        return data


def _sign(signer: Signer, publication: Publication) -> tuple[list[SignedSegment], SignedManifest]:
    """Cut a publication into segments, and sign them and the manifest."""
    manifest, payload = publication.manifest, publication.payload
    key = key_of(manifest)
    segments = []
    for index, (offset, part) in enumerate(_parts(payload.data, SEGMENT_BYTES)):
        hashes = chunk_hashes(part, CHUNK_BYTES)
        header = SegmentHeader(key, manifest.base_digest, index, offset, len(part), CHUNK_BYTES, hashes)
        segments.append(signer.segment(header))
    return segments, signer.manifest(replace(manifest, num_segments=len(segments)))


def _parts(data: memoryview, size: int) -> Iterator[tuple[int, memoryview]]:
    return ((start, data[start : start + size]) for start in range(0, len(data), size))
