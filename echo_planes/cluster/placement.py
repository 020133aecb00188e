"""Checks that the machines of a cluster can hold the fleet and the learner of a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo_planes.config.fleet import FleetConfig
from echo_planes.config.schema import Config
from echo_planes.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Machine:
    """Node of a Ray cluster, as far as placement looks."""

    node_id: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


def with_learner_resources(config: Config, machines: Sequence[Machine]) -> Config:
    """Return the settings with `learner.resources` of a rank on this cluster, unless they are given.

    A rank takes a CPU, and on a cluster with GPUs one of those that workers and seeders do not need. A single
    rank is content with the part of a card that they leave.

    Raises:
        ClusterError: the cluster has GPUs, and workers and seeders need them.
    """
    learner, bought = config.learner, set()
    if config.fleet.brings_nodes:  # machines of workers may be up already, of a run that this one continues
        bought = {one.instance_type for one in config.fleet.workers}
    total = sum(one.resources.get("GPU", 0.0) for one in machines if not bought & one.resources.keys())
    if learner.resources is not None or not total:
        return config
    taken = _wanted(config).get("GPU", 0.0)
    free = total - taken
    share = 1.0 if free >= learner.num_ranks else free if learner.num_ranks == 1 else 0.0
    if share <= 0:
        raise ClusterError(
            f"learner: the cluster has {total:g} GPU, of which workers and seeders need {taken:g}: too few "
            f"are left for {learner.num_ranks} ranks with one each; choose a smaller fleet or a smaller "
            "learner.num_ranks, or train on CPUs with learner.resources='{CPU: 1}'"
        )
    resources = {"CPU": 1.0, "GPU": share}
    return config.model_copy(update={"learner": learner.model_copy(update={"resources": resources})})


def _wanted(config: Config) -> dict[str, float]:
    """Return what workers on the cluster's own nodes, at most, and seeders need."""
    wanted: dict[str, float] = {}
    needs = [(config.seeding.resources, config.seeding.engines)]
    for one in [] if config.fleet.brings_nodes else config.fleet.workers:
        needs.append((one.resources, one.count if config.fleet.scale == "fixed" else one.quota))
    for resources, count in needs:
        for resource, amount in resources.items():
            wanted[resource] = wanted.get(resource, 0.0) + amount * count
    return wanted


def check_fit(config: Config, has: Mapping[str, float], labels: Sequence[Mapping[str, str]]) -> None:
    """Refuse a fleet that the cluster can never hold.

    Raises:
        ClusterError: names the resource, the amount needed and the amount present.
    """
    worker_configs = [] if config.fleet.brings_nodes else config.fleet.workers
    for worker_config in worker_configs:
        if worker_config.labels and not any(worker_config.labels.items() <= node.items() for node in labels):
            raise ClusterError(
                f"fleet: no node of the cluster carries the labels {worker_config.labels} of SKU "
                f"'{worker_config.sku}'; start such a node, or change the fleet's labels"
            )
    seeding, wanted = config.seeding, _wanted(config)
    for resource, amount in config.learner.rank_resources.items():
        wanted[resource] = wanted.get(resource, 0.0) + amount * config.learner.num_ranks
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


def lasting_machines(config: Config, machines: Sequence[Machine]) -> tuple[str, ...]:
    """Return the ids of the machines that learner ranks may take; () for any.

    Machines that a spot instance type selects may be taken away, so ranks take others, if these have room for
    all ranks now. Spot types without labels select no machine in particular.
    """
    spot = [one.labels for one in config.fleet.workers if one.market == "spot" and one.labels]
    lasting = [one for one in machines if not any(_selects(selector, one.labels) for selector in spot)]
    learner = config.learner
    room = sum(_units(learner.rank_resources, one.resources, learner.num_ranks) for one in lasting)
    return tuple(one.node_id for one in lasting) if spot and room >= learner.num_ranks else ()


def _selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether a node's labels pass a label selector of Ray: value, !value, in(...) or !in(...)."""

    def passes(key: str, wanted: str) -> bool:
        text = wanted.removeprefix("!")
        several = text.startswith("in(") and text.endswith(")")
        values = text[3:-1].split(",") if several else [text]
        return (labels.get(key) in [value.strip() for value in values]) != wanted.startswith("!")

    return all(passes(key, wanted) for key, wanted in selector.items())


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
