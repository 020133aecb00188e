"""Whether the machines of a cluster can hold the fleet and the learner of a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from echo_planes.config.schema import Config, FleetConfig
from echo_planes.errors import ClusterError


def check_fit(config: Config, has: Mapping[str, float], labels: Sequence[Mapping[str, str]]) -> None:
    """Refuse a fleet that the cluster can never hold.

    Raises:
        ClusterError: names the resource, what is wanted and what there is.
    """
    wanted: dict[str, float] = {}
    kinds = [] if config.fleet.brings_nodes else config.fleet.workers
    for kind in kinds:
        count = kind.count if config.fleet.scale == "fixed" else kind.quota
        for resource, amount in kind.resources.items():
            wanted[resource] = wanted.get(resource, 0.0) + amount * count
        if kind.labels and not any(kind.labels.items() <= node.items() for node in labels):
            raise ClusterError(
                f"fleet: no node of the cluster carries the labels {kind.labels} of SKU '{kind.sku}'; start "
                "such a node, or change the fleet's labels"
            )
    for resource, amount in config.learner.resources.items():
        wanted[resource] = wanted.get(resource, 0.0) + amount * config.learner.num_ranks
    workers, smaller = "workers", "choose a smaller fleet"
    if config.fleet.scale == "static":  # any of them may be used
        workers, smaller = "workers up to their max_count", "lower fleet.workers.N.max_count"
    for resource, amount in wanted.items():
        if amount > has.get(resource, 0.0) + 1e-9:
            raise ClusterError(
                f"fleet: {workers} and the learner need {amount:g} {resource}, the cluster has "
                f"{has.get(resource, 0.0):g}; {smaller}, or their 'resources'"
            )


def check_nodes(fleet: FleetConfig, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse an engine whose devices lie on no single node: its worker would wait for ever.

    Args:
        nodes: what each node of the cluster has.

    Raises:
        ClusterError: names the SKU and what its engine needs.
    """
    for kind in [] if fleet.brings_nodes else fleet.workers:
        if kind.engine.num_ranks > 1 and not any(
            all(amount <= node.get(resource, 0.0) for resource, amount in kind.resources.items())
            for node in nodes
        ):
            needs = ", ".join(f"{amount:g} {resource}" for resource, amount in kind.resources.items())
            raise ClusterError(
                f"fleet: an engine of SKU '{kind.sku}' needs {needs} on one node, and no node of the cluster "
                "has that; start such a node, or make the engine smaller"
            )


def cluster_address(config: Config) -> str | None:
    """The Ray cluster to join, or None for a private one."""
    return config.run.ray_address or os.environ.get("RAY_ADDRESS")
