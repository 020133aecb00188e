"""Checks that the machines of a cluster can hold the fleet and the learner of a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from echo_planes.config.fleet import FleetConfig
from echo_planes.config.schema import Config
from echo_planes.errors import ClusterError


def check_fit(config: Config, has: Mapping[str, float], labels: Sequence[Mapping[str, str]]) -> None:
    """Refuse a fleet that the cluster can never hold.

    Raises:
        ClusterError: names the resource, the amount needed and the amount present.
    """
    wanted: dict[str, float] = {}
    worker_configs = [] if config.fleet.brings_nodes else config.fleet.workers
    for worker_config in worker_configs:
        count = worker_config.count if config.fleet.scale == "fixed" else worker_config.quota
        for resource, amount in worker_config.resources.items():
            wanted[resource] = wanted.get(resource, 0.0) + amount * count
        if worker_config.labels and not any(worker_config.labels.items() <= node.items() for node in labels):
            raise ClusterError(
                f"fleet: no node of the cluster carries the labels {worker_config.labels} of SKU "
                f"'{worker_config.sku}'; start such a node, or change the fleet's labels"
            )
    seeding, learner = config.seeding, config.learner
    for resources, count in ((learner.resources, learner.num_ranks), (seeding.resources, seeding.engines)):
        for resource, amount in resources.items():
            wanted[resource] = wanted.get(resource, 0.0) + amount * count
    for resource, amount in wanted.items():
        if amount > has.get(resource, 0.0) + 1e-9:
            workers, smaller = "workers", "choose a smaller fleet"
            if config.fleet.scale == "static":  # the fleet may grow to every max_count at once
                quotas = [
                    f"fleet.workers.{place}.max_count={worker_config.quota}"
                    for place, worker_config in enumerate(worker_configs)
                    if worker_config.quota and worker_config.resources.get(resource)
                ]
                workers, smaller = "workers up to their max_count", f"lower {' or '.join(quotas)}"
            if seeding.engines and seeding.resources.get(resource):
                workers, smaller = f"{workers}, seeders", f"{smaller}, or lower seeding.engines"
            raise ClusterError(
                f"fleet: {workers} and the learner need {amount:g} {resource}, the cluster has "
                f"{has.get(resource, 0.0):g}; {smaller}, or their 'resources'"
            )


@dataclass(frozen=True, slots=True)
class RanksPlacement:
    """Constraints on the machines of the learner's ranks."""

    strategy: Literal["STRICT_PACK", "PACK"]  # of Ray's placement groups: one machine, or as few as possible
    label_selector: Mapping[str, str]


def place_ranks(
    config: Config, nodes: Sequence[tuple[Mapping[str, float], Mapping[str, str]]]
) -> RanksPlacement:
    """Choose the machines of the learner's ranks: one if one can hold all, and none that may be taken away.

    Machines with the labels of a spot instance type are left to the workers, if others have room.

    Args:
        nodes: resources and labels of each machine of the cluster.
    """
    spot: dict[str, set[str]] = {}
    for worker_config in config.fleet.workers:
        for key, value in worker_config.labels.items() if worker_config.market == "spot" else ():
            spot.setdefault(key, set()).add(value)
    lasting = [
        (has, labels) for has, labels in nodes if not any(labels.get(key) in spot[key] for key in spot)
    ]
    most = config.learner.num_ranks
    rooms = [_units(config.learner.resources, has, most) for has, _ in lasting]
    selector = {key: f"!in({','.join(sorted(values))})" for key, values in spot.items()}
    if sum(rooms) < most:
        rooms, selector = [_units(config.learner.resources, has, most) for has, _ in nodes], {}
    return RanksPlacement("STRICT_PACK" if max(rooms, default=0) >= most else "PACK", selector)


def _units(unit: Mapping[str, float], has: Mapping[str, float], most: int) -> int:
    """Return how many units, at most `most`, resources hold."""
    return min((int(has.get(name, 0.0) / need + 1e-9) for name, need in unit.items() if need), default=most)


def check_nodes(fleet: FleetConfig, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse an engine that no single node has the devices for: its worker would wait for ever.

    Args:
        nodes: resources of each node of the cluster.

    Raises:
        ClusterError: names the SKU and the resources that its engine needs.
    """
    for worker_config in [] if fleet.brings_nodes else fleet.workers:
        if worker_config.engine.num_ranks > 1 and not any(
            all(amount <= node.get(resource, 0.0) for resource, amount in worker_config.resources.items())
            for node in nodes
        ):
            needs = ", ".join(
                f"{amount:g} {resource}" for resource, amount in worker_config.resources.items()
            )
            raise ClusterError(
                f"fleet: an engine of SKU '{worker_config.sku}' needs {needs} on one node, and no node of "
                "the cluster has that; start such a node, or make the engine smaller"
            )


def cluster_address(config: Config) -> str | None:
    """Return the address of the Ray cluster to join, or None for a private one."""
    return config.run.ray_address or os.environ.get("RAY_ADDRESS")
