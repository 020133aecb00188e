"""Settings that the learner and workers of a run share to exchange weights, and those of each one's node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from echo_planes.config.schema import WeightsConfig
from echo_planes.errors import WaitTimeoutError, WeightsError
from echo_planes.types import Manifest, Publication
from echo_planes.weights.node.client import WorkerNode
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.receiver import open_staged
from echo_planes.weights.wire.credentials import credential


def reachable(config: WeightsConfig, num_machines: int) -> WeightsConfig:
    """Nodes on loopback cannot reach one another across machines: there each listens on its own address."""
    if "host" not in config.model_fields_set and num_machines > 1:
        return config.model_copy(update={"host": "node"})
    return config


@dataclass(frozen=True, slots=True)
class WeightLink:
    """Made once per run; as it is for the learner, and as `of_worker` gives it for each worker."""

    lineage: str
    token: str  # the run's secret, which makes every node's credential; of a worker's copy: that worker's own
    public_key: str  # hex: whose signatures count
    store: str  # folder or s3:// address
    model_bytes: int  # size of the model's files: much larger publications are refused
    config: WeightsConfig
    sender: str = ""  # address of the learner's node, once it is known

    def sender_settings(self, host: str, signing_key: bytes) -> NodeSettings:
        """Of the node beside the learner, which listens on `host` and signs the snapshots it makes."""
        config = self.config
        return NodeSettings(
            **self._common(host),
            role="sender",
            node_id="sender",
            port=config.port or 0,
            uplink_mbit=config.uplink_mbit,
            worker_mbit=config.worker_mbit,
            direct=config.mode != "chain",
            starved_s=config.starved_s,
            store=self.store,
            signing_key=signing_key.hex(),
            anchor_every=config.anchor_every,
            keep_patches=config.keep_patches,
            keep_anchors=config.keep_anchors,
        )

    def of_worker(self, worker_id: str, epoch: int) -> WeightLink:
        """The copy for one incarnation of a worker: with its own credential in the place of the secret."""
        return replace(self, token=credential(self.token, _node_id(worker_id, epoch)))

    def worker_settings(self, worker_id: str, epoch: int, host: str, region: str) -> NodeSettings:
        """Of the node beside one incarnation of a worker, which listens on `host`; of `of_worker`'s copy."""
        return NodeSettings(
            **self._common(host),
            role="worker",
            node_id=_node_id(worker_id, epoch),
            sender=self.sender,
            region=region,
        )

    def _common(self, host: str) -> dict[str, Any]:
        config = self.config
        return {
            "token": self.token,
            "public_key": self.public_key,
            "lineage": self.lineage,
            "host": host,
            "digest": config.digest,
            # Positions and values of every weight, the largest patch there is, take five times the weights.
            "max_payload_bytes": 6 * self.model_bytes,
            "streams_per_link": config.streams_per_link,
            "tls_cert": config.tls_cert or "",
            "tls_key": config.tls_key or "",
            "tls_ca": config.tls_ca or "",
        }


def _node_id(worker_id: str, epoch: int) -> str:
    # Another incarnation is another node: it has nothing, whatever its predecessor had.
    return f"{worker_id}.{epoch}"


class NodeSource:
    """A worker's node as its `rollout.worker.WeightSource`.

    Args:
        lineage: whose versions are wanted.
        wait_s: how long a version may take to arrive.
    """

    def __init__(self, lineage: str, wait_s: float) -> None:
        self.node: WorkerNode | None = None  # beside the worker; set once it runs
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

    def _running(self) -> WorkerNode:
        if self.node is None:
            raise WeightsError("the worker's weight node does not run yet")
        return self.node
