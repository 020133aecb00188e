"""GPUs of the learner's ranks, as Ray accounts for them. The cluster declares a card; there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.harness import told_by
from tests.thorough import takes_minutes

pytestmark = [
    pytest.mark.integration,
    takes_minutes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card"),
]

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """Return what `main` prints, run in a process of its own to which a card is visible."""
    found: dict[str, Any] = told_by("tests.integration.test_learner_gpu", environment={VISIBLE: "0"})
    return found


def test_a_rank_has_a_gpu_by_default_where_the_cluster_has_one(said: dict[str, Any]) -> None:
    assert said["resources"] == {"CPU": 1.0, "GPU": 1.0}


def test_a_rank_sees_the_card_that_ray_gave_it_and_no_other(said: dict[str, Any]) -> None:
    assert said["visible"] == {"0": "", "1": "0"}


def test_a_card_that_torch_cannot_use_is_one_line(said: dict[str, Any]) -> None:
    assert "learner.resources has GPU: 1, but torch" in said["refused"]
    assert "learner.resources='{CPU: 1}'" in said["refused"]


def main() -> None:
    """Open a session on a cluster that declares a card; print what ranks with and without it see."""
    from echo_planes.cluster.process import keep_ray_private
    from echo_planes.loop.loading import load_config

    keep_ray_private()
    import ray

    from echo_planes.cluster import session as cluster
    from echo_planes.learning.actor import PROGRESS, LearnerProcess

    class Rank(LearnerProcess):
        def visible(self) -> str:
            return os.environ[VISIBLE]

    init = ray.init
    ray.init = lambda **options: init(**options, num_gpus=1)
    with cluster.ray_session(load_config(["fleet=single"])) as config:
        ranks = {
            amount: ray.remote(concurrency_groups={PROGRESS: 1})(Rank)
            .options(num_cpus=0, num_gpus=amount)
            .remote(config, 0, 1, Path("failures"))
            for amount in (0, 1)
        }
        visible = {amount: ray.get(rank.visible.remote(), timeout=200) for amount, rank in ranks.items()}
        try:
            ray.get(ranks[1].start.remote(None, "127.0.0.1", 0), timeout=200)
            refused = ""
        except ray.exceptions.RayTaskError as error:
            refused = str(error.cause)
    print(json.dumps({"resources": config.learner.resources, "visible": visible, "refused": refused}))


if __name__ == "__main__":
    main()
