"""Places of learner ranks and replay buffer in a cluster of 21 machines, 18 of them spot, over 20 seeds."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import ROOT
from tests.thorough import takes_minutes

SEEDS = 20
SPOT_MACHINES, OWN_MACHINES = 18, 2  # and the driver's own, which has no card
SPOT, OWN = {"market": "spot"}, {"market": "own"}
GPUS = 4.0  # of a machine that is not rented
STORE_BYTES = 80_000_000  # of each node's object store


@takes_minutes
@pytest.mark.integration
@pytest.mark.timeout(900)
def test_ranks_and_buffer_are_where_they_belong(tmp_path: Path) -> None:
    out = tmp_path / "places.json"
    words = [sys.executable, "-m", "tests.integration.test_placement", str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    assert len(told["seeds"]) == SEEDS
    for one in told["seeds"]:
        assert one["buffer"] == "driver"
        assert set(one["ranks"]) == {"own"}
        assert sum(one["ranks"].values()) == one["num_ranks"]
        assert one["machines"] == -(-one["num_ranks"] // int(GPUS))  # as few as hold them
    # Where no instance type is known as spot, or the buffer has no place of its own, Ray takes any machine.
    assert told["without_the_rule"]["spot"] > 0
    assert told["buffers_without_a_place"].keys() - {"driver"}


class Place:
    """Stands for the process of a rank, or of the buffer: says where it is, and starts nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def place(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def listen(self, *_: Any) -> str:
        return ""

    def counts(self) -> str:
        return self.place()

    def close(self) -> None: ...


async def places(config: Any, folder: Path) -> tuple[list[str], str]:
    """Node of each rank, and of the buffer, as the planes of a run place them."""
    from echo_planes.loop import launch

    planes = launch.RayPlanes(config, "lineage", folder, None, 0, {})
    try:
        return await planes.learner.places(), str(await planes.data.counts())
    finally:
        await planes.learner.close()
        await planes.data.close()


def cluster_of_21() -> Any:
    """Start the machines, as processes here, and join them."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for labels, gpus, count in ((OWN, GPUS, OWN_MACHINES), (SPOT, 8.0, SPOT_MACHINES)):
        for _ in range(count):
            cluster.add_node(
                wait=False, num_cpus=8, num_gpus=gpus, object_store_memory=STORE_BYTES, labels=labels
            )
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster


def placed(num_ranks: int, worker: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    """Place the planes of a run once."""
    from echo_planes.config.schema import Config

    given = {
        "learner": {"num_ranks": num_ranks, "resources": {"GPU": 1.0}},
        "fleet": {"workers": [{"sku": "L4", "resources": {"GPU": 1.0}, **worker}]},
    }
    with tempfile.TemporaryDirectory() as folder:
        ranks, buffer = asyncio.run(places(Config.model_validate(given), Path(folder)))
    kinds = Counter(labels[node] for node in ranks)
    return {"num_ranks": num_ranks, "ranks": kinds, "machines": len(set(ranks)), "buffer": labels[buffer]}


def main(out: Path) -> None:
    """Place the planes once a seed, and write where they were."""
    # Before Ray is loaded: its machines listen on this one's own address, so calls need a token.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray

    from echo_planes.loop import launch

    launch.LearnerProcess = launch.DataService = Place  # type: ignore[misc, assignment]
    cluster = cluster_of_21()
    try:
        labels = {node["NodeID"]: node["Labels"].get("market", "driver") for node in ray.nodes()}
        assert Counter(labels.values()) == {"driver": 1, "own": OWN_MACHINES, "spot": SPOT_MACHINES}
        numbers = [random.Random(seed).randint(1, 8) for seed in range(SEEDS)]
        rented = {"market": "spot", "labels": SPOT}
        seeds = [placed(num_ranks, rented, labels) for num_ranks in numbers]
        free = sum((placed(one, {}, labels)["ranks"] for one in numbers[:5]), Counter[str]())
        remote = ray.remote(num_cpus=0)(Place)
        buffers = [remote.remote() for _ in range(10)]
        unplaced = Counter(labels[node] for node in ray.get([one.place.remote() for one in buffers]))
        told = {"seeds": seeds, "without_the_rule": free, "buffers_without_a_place": unplaced}
        out.write_text(json.dumps(told))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
