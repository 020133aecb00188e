"""The Ray cluster of a run: joined, or started for it alone; and what its metrics endpoint is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from ray.util.metrics import Gauge as RayGauge

from echo_planes import preflight
from echo_planes.config import Config
from echo_planes.errors import ClusterError
from echo_planes.metrics import GAUGES

PRIVATE_STORE_BYTES = 512 * 1024**2
STARTS = 3
KILLED_S = 10.0
# Of the plain `Exception` that Ray raises when its own processes were not up in time.
_TOO_SLOW = "timed out during startup"


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Join the configured cluster, or start a private one, and leave it again.

    A private one keeps to loopback if `process.keep_ray_private` ran before Ray was imported.

    Raises:
        ClusterError: no cluster at that address, or not what the fleet needs; a private one does not start.
    """
    address = preflight.cluster_address(config)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        options["address"] = address
    else:
        options |= {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": PRIVATE_STORE_BYTES,
            "_metrics_export_port": config.run.metrics_port,
        }
    try:
        _start(options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterError(f"Ray cluster '{address or 'local'}' cannot be reached: {error}") from error
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        preflight.check_fit(config, ray.cluster_resources(), [node["Labels"] for node in nodes])
        preflight.check_nodes(config.fleet, [node["Resources"] for node in nodes])
        yield
    finally:
        ray.shutdown()


def _start(options: Mapping[str, Any]) -> None:
    """`ray.init`, and again where Ray gave up on its own processes.

    It grants them 30 s, which no setting changes, however busy the machine is. What it had begun lives on.
    """
    before = set(psutil.Process().children(recursive=True))
    for _ in range(STARTS):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises nothing narrower for it; all others go on
            if _TOO_SLOW not in str(error):
                raise
        begun = [one for one in psutil.Process().children(recursive=True) if one not in before]
        for process in begun:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(begun, timeout=KILLED_S)
    raise ClusterError(
        f"Ray's own processes were not up within 30 s, {STARTS} times: this machine is too busy for them; "
        "end what else runs on it, or join a cluster with run.ray_address"
    )


def prometheus() -> Any:
    """A function that exports a step's numbers through Ray's metrics endpoint."""
    gauges = {gauge.key: RayGauge(gauge.name, gauge.description) for gauge in GAUGES}

    def export(metrics: Mapping[str, float]) -> None:
        for key, gauge in gauges.items():
            value = metrics.get(key)
            if value is not None:
                gauge.set(value)

    return export
