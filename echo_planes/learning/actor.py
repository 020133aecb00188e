"""Process of a learner rank: the learner and, on rank 0, the publisher of its weights with its node.

The constructor imports the learner, and with it torch. A process that only refers to the class saves seconds.
"""

from __future__ import annotations

from pathlib import Path

import ray

from echo_planes.cluster.clock import MonotonicClock
from echo_planes.cluster.process import enter_actor, settle
from echo_planes.config.schema import Config
from echo_planes.errors import RunError
from echo_planes.types import Adjustment, BroadcastStats, FloatArray, Manifest, StepStats, TrainBatch
from echo_planes.weights.codec.choice import CodecChoice
from echo_planes.weights.codec.table import take_codec
from echo_planes.weights.codec.warm_up import warm_up
from echo_planes.weights.digest import BitTensor
from echo_planes.weights.link import WeightLink
from echo_planes.weights.node.client import SenderNode
from echo_planes.weights.publisher import Publisher
from echo_planes.weights.wire.signing import Signer


class LearnerProcess:
    """One rank. Callers call all ranks alike, because gathering and saving are collective.

    Args:
        config: the run's settings.
        rank, world_size, master_port: place among the ranks, and the port of their rendezvous.
        failure_dir: folder for a batch that made the loss non-finite.
    """

    def __init__(
        self, config: Config, rank: int, world_size: int, master_port: int, failure_dir: Path
    ) -> None:
        enter_actor()
        from echo_planes.learning.learner import Learner

        self._config = config
        self._learner = Learner(config, rank, world_size, master_port, failure_dir)
        self._node: SenderNode | None = None
        self._publisher: Publisher | None = None
        self._choice: CodecChoice | None = None

    def listen(self, link: WeightLink, signing_key: bytes) -> str:
        """Start the node that sends weights, and return its address. Rank 0 only."""
        host = ray.util.get_node_ip_address() if link.config.host == "node" else link.config.host
        self._node = SenderNode.spawn(link.sender_settings(host, signing_key))
        if link.config.mode != "full":
            self._choice = CodecChoice(take_codec(link.config.codec), MonotonicClock())
        self._publisher = Publisher(
            link.lineage,
            Signer.from_private_bytes(signing_key),
            self._node,
            choice=self._choice,
            digest=link.config.digest,
            chunk_bytes=link.config.chunk_kib * 1024,
        )
        return self._node.address

    def place(self) -> str:
        """Return the id of the cluster node that this rank runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def start(self, checkpoint: Path | None) -> None:
        """Load the model, then the learner state in the folder `checkpoint`, if one is given."""
        self._learner.start()
        if self._publisher is not None:
            warm_up()
        if checkpoint:
            self._learner.load(checkpoint)
        settle()

    def train_step(self, batch: TrainBatch) -> StepStats:
        return self._learner.train_step(batch)

    def train_part(self, batch: TrainBatch) -> None:
        self._learner.train_part(batch)

    def adjust(self, adjustment: Adjustment) -> None:
        self._learner.adjust(adjustment)

    def logprobs(self, batch: TrainBatch) -> FloatArray:
        """Return the trained tokens' logprobs under the current weights; shape (T,), 0 elsewhere."""
        return self._learner.logprobs(batch)

    def publish(self, version: int) -> Manifest | None:
        """Send the current weights out as `version`; None on all ranks but the first."""
        bits = self._learner.state_bits()
        if self._publisher is None:
            return None
        tensors = {name: BitTensor(array, "bfloat16", shape) for name, (array, shape) in bits.items()}
        return self._publisher.publish(version, self._learner.num_updates, tensors)

    def commit(self) -> None:
        """Let workers install the last publication. Rank 0 only."""
        if self._publisher is None:
            raise RunError("only rank 0 publishes")
        self._publisher.commit()

    def broadcasts(self) -> list[BroadcastStats]:
        """Return the broadcast figures of the newest publications. Rank 0 only."""
        if self._node is None:
            raise RunError("only rank 0 publishes")
        stats = self._node.stats()
        rates = [rate for one in stats[-1:] for rate in one.hop_bytes_per_s if rate > 0]
        if self._choice is not None and rates:
            self._choice.rate_bytes_per_s = min(rates)
        return stats

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def close(self) -> None:
        self._learner.close()
        if self._node is not None:
            self._node.close()
