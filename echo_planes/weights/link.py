"""Settings by which a run's learner and workers exchange weights, and the settings of each one's node."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echo_planes.config.weights import WeightsConfig
from echo_planes.errors import WaitTimeoutError, WeightsError
from echo_planes.types import Manifest, Publication
from echo_planes.weights.node.client import WorkerNode
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.receiver import open_staged
from echo_planes.weights.wire.credentials import credential

OF_MACHINE = "node"  # as a host: the address of the machine that a node runs on


def listening_host(config: WeightsConfig, *, joined: bool) -> str:
    """Return the host that a run's nodes listen on.

    Unless the user set one: loopback on a private cluster, and the machine's address on one that was joined,
    where machines may come later.
    """
    return config.host or (OF_MACHINE if joined else "127.0.0.1")


@dataclass(frozen=True, slots=True)
class WeightLink:
    """A run's settings for exchanging weights. The learner gets them as made, each worker by `of_worker`."""

    lineage: str
    token: str  # the run's secret, from which credentials are made; in a worker's copy: its own credential
    public_key: str  # of the run's signing key, in hex
    store: str  # folder or s3:// address
    model_bytes: int  # size of the model's files; nodes refuse publications above 6 times this
    config: WeightsConfig
    host: str = "127.0.0.1"  # that the nodes listen on (`listening_host`)
    sender: str = ""  # address of the learner's node; "": not started yet

    def sender_settings(self, machine: str, signing_key: bytes) -> NodeSettings:
        """Return settings of the learner's node, which signs the snapshots it makes.

        `machine`: address of the machine that it will run on.
        """
        config = self.config
        return NodeSettings(
            **self._common(machine),
            role="sender",
            node_id="sender",
            port=config.port or 0,
            uplink_mbit=config.uplink_mbit,
            worker_mbit=config.worker_mbit,
            direct=config.mode != "chain",
            starved_s=config.starved_s,
            store=self.store,
            signing_key=signing_key.hex(),
            snapshot_every=config.snapshot_every,
            keep_patches=config.keep_patches,
            keep_snapshots=config.keep_snapshots,
        )

    def of_worker(self, worker_id: str, epoch: int) -> WeightLink:
        """Return the copy for one incarnation of a worker, with its credential instead of the secret."""
        return replace(self, token=credential(self.token, _node_id(worker_id, epoch)))

    def worker_settings(
        self, worker_id: str, epoch: int, machine: str, region: str, model: Path | None = None
    ) -> NodeSettings:
        """Return settings of a worker's node on that machine. Call it on `of_worker`'s copy.

        `model`: the model's folder with its weights; None: the machine has none.
        """
        return NodeSettings(
            **self._common(machine),
            role="worker",
            node_id=_node_id(worker_id, epoch),
            sender=self.sender,
            region=region,
            model_folder=str(model or ""),
            chunk_bytes=self.config.chunk_kib * 1024,
        )

    def _common(self, machine: str) -> dict[str, Any]:
        config = self.config
        return {
            "token": self.token,
            "public_key": self.public_key,
            "lineage": self.lineage,
            "host": machine if self.host == OF_MACHINE else self.host,
            "digest": config.digest,
            "codec": config.codec,
            # The largest patch, positions (8 bytes) and values of all 16-bit weights, is 5 times the weights.
            "max_payload_bytes": 6 * self.model_bytes,
            "streams_per_link": config.streams_per_link,
            "tls_cert": config.tls_cert or "",
            "tls_key": config.tls_key or "",
            "tls_ca": config.tls_ca or "",
        }


def _node_id(worker_id: str, epoch: int) -> str:
    # Each incarnation of a worker is a new node, since it holds none of its predecessor's publications.
    return f"{worker_id}.{epoch}"


class NodeSource:
    """A worker's node as its `rollout.sources.WeightSource`.

    Args:
        lineage: lineage of the versions to ask for.
        wait_s: longest wait for a version without a byte of weights, seconds.
    """

    def __init__(self, lineage: str, wait_s: float) -> None:
        self.node: WorkerNode | None = None  # the worker sets it once its node runs
        self._lineage = lineage
        self._wait_s = wait_s

    async def staged(self, manifest: Manifest, fresh: bool) -> Publication:
        """See `WeightSource.staged`."""
        try:
            staged, path = await self._running().staged(self._lineage, manifest.version, self._wait_s, fresh)
        except WaitTimeoutError as why:
            raise WeightsError(f"version {manifest.version} did not arrive: {why}") from why
        return open_staged(staged, path)

    async def settled(self, version: int, ok: bool) -> str:
        """See `WeightSource.settled`."""
        return await self._running().settled(version, ok)

    async def snapshot(self) -> Path:
        """Return a safetensors file of all weights of the newest version here, once there is one.

        It waits as long as its caller does. The file stays until the node is asked for another version.

        Raises:
            WeightsError: what arrived was refused.
        """
        while True:
            with suppress(WaitTimeoutError):
                return (await self._running().staged(self._lineage, 0, self._wait_s, fresh=True))[1]

    async def received_bytes(self) -> int:
        """Return the bytes of weights that the node has received, or made of files; 0 before it runs."""
        status = {} if self.node is None else await self.node.status()
        return sum(int(status.get(name, 0)) for name in ("bytes_received", "bytes_made"))

    def _running(self) -> WorkerNode:
        if self.node is None:
            raise WeightsError("the worker's weight node does not run yet")
        return self.node
