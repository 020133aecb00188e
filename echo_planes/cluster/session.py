"""Ray cluster of a run, joined or started for the run alone, and the export of metrics through it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.metrics import Gauge as RayGauge

from echo_planes.cluster import scratch
from echo_planes.cluster.placement import (
    Machine,
    check_fit,
    check_nodes,
    cluster_address,
    with_learner_resources,
)
from echo_planes.config.schema import Config
from echo_planes.errors import ClusterError

PRIVATE_STORE_BYTES = 512 * 1024**2
STARTS = 3
KILLED_S = 10.0
LEAVE_S = 3.0  # for the processes of a private cluster to end after `ray.shutdown`
# Part of the message of the plain `Exception` that Ray raises when its own processes start too slowly.
_TOO_SLOW = "timed out during startup"


def take_gpus() -> list[str]:
    """Return the ids of the GPUs that Ray gave this actor, and hide all cards from one without any.

    Ray leaves every card visible to an actor that asked for none, and the first may be another's.
    """
    ids = [str(one) for one in ray.get_gpu_ids()]
    if not ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return ids


@contextmanager
def ray_session(config: Config, logs: Path | None = None) -> Iterator[Config]:
    """Join the configured cluster, or start a private one, and leave it at the end without remains.

    Yields the settings with all that follows from the cluster: `learner.resources`.

    A private one listens on loopback only if `process.keep_ray_private` ran before Ray was imported.

    Args:
        logs: folder for Ray's logs of a private cluster, copied if the session ends by an error.

    Raises:
        ClusterError: the cluster cannot be reached, lacks what the fleet needs, or does not start.
    """
    with scratch.opened() as folders:
        try:
            with _joined(config, folders.private / "ray") as settled:
                yield settled
        except Exception as error:
            if logs is not None and logs.parent.is_dir():
                try:
                    _keep_logs(folders.private / "ray", logs)
                except OSError:  # a full disk, say, which must not hide why the session ended
                    error.add_note(f"Ray's logs could not be copied to {logs}")
            raise


def _keep_logs(ray_folder: Path, logs: Path) -> None:
    for session in ray_folder.glob("session_*/logs"):
        if not session.parent.is_symlink():
            shutil.copytree(session, logs / session.parent.name, symlinks=True, dirs_exist_ok=True)


@contextmanager
def _joined(config: Config, ray_folder: Path) -> Iterator[Config]:
    address = cluster_address(config)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        options["address"] = address
    else:
        options |= {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": PRIVATE_STORE_BYTES,
            "_metrics_export_port": config.run.metrics_port,
            "_temp_dir": str(ray_folder),
        }
    before = set(psutil.Process().children(recursive=True))
    try:
        _start(options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterError(f"Ray cluster '{address or 'local'}' cannot be reached: {error}") from error
    try:
        nodes = machines()
        config = with_learner_resources(config, nodes)
        check_fit(config, ray.cluster_resources(), [node.labels for node in nodes])
        check_nodes(config.fleet, [node.resources for node in nodes])
        yield config
    finally:
        begun = set(psutil.Process().children(recursive=True)) - before
        ray.shutdown()
        _, alive = psutil.wait_procs(begun, timeout=LEAVE_S)
        _kill(alive)


def machines() -> list[Machine]:
    """Return the nodes of the cluster that are alive."""
    return [
        Machine(node["NodeID"], node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]
    ]


class NodeWatch:
    """Watch over the node daemon (raylet) of a private cluster, in the running event loop.

    Ray itself reports the daemon's death about 15 s later, and leaves calls to actors without an answer until
    then.
    """

    def __init__(self, raylet_pid: int) -> None:
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        descriptor = os.pidfd_open(raylet_pid)
        asyncio.get_running_loop().add_reader(descriptor, self._on_end, descriptor)

    @classmethod
    def of_this_process(cls) -> NodeWatch | None:
        """Watch the cluster that this process started; return None if it joined one."""
        for child in psutil.Process().children():
            if child.name() == "raylet":
                return cls(child.pid)
        return None

    async def while_up(self, answer: Awaitable[Any]) -> Any:
        """Await `answer` and return its result.

        Raises:
            ConnectionResetError: the node daemon has ended, so there will be no result.
        """
        waiting = asyncio.ensure_future(answer)
        try:
            await asyncio.wait((waiting, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        raise ConnectionResetError("the Ray node that its process was on is gone: its raylet has ended")

    def _on_end(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        if not self._lost.done():
            self._lost.set_result(None)


@contextmanager
def _group_of_their_own() -> Iterator[None]:
    """Have Ray start its daemons in process groups of their own.

    SIGTERM to the group of a run, as `timeout` and schedulers send it, would end them before the run can save
    a checkpoint. They end with this process in any case.
    """
    services = ray._private.services
    usual = services.ConsolePopen

    class Apart(usual):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options, process_group=0)

    services.ConsolePopen = Apart
    try:
        yield
    finally:
        services.ConsolePopen = usual


def _start(options: Mapping[str, Any]) -> None:
    """Call `ray.init`, up to `STARTS` times if Ray's own processes start too slowly.

    Ray grants them 30 s, which no setting changes. It leaves the processes it has started, so this kills
    them.
    """
    before = set(psutil.Process().children(recursive=True))
    for _ in range(STARTS):
        try:
            with _group_of_their_own():
                ray.init(**options)
            return
        except Exception as error:  # Ray raises no narrower class for a slow start
            if _TOO_SLOW not in str(error):
                raise
        begun = [one for one in psutil.Process().children(recursive=True) if one not in before]
        _kill(begun)
    raise ClusterError(
        f"Ray's own processes were not up within 30 s, {STARTS} times: this machine is too busy for them; "
        "end what else runs on it, or join a cluster with run.ray_address"
    )


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=KILLED_S)


def prometheus(described: Iterable[tuple[str, str, str]]) -> Callable[[Mapping[str, float]], None]:
    """Return a function that exports a step's numbers through Ray's metrics endpoint.

    Args:
        described: for each number, its key in a step's metrics, its Prometheus name, and its description.
    """
    gauges = {key: RayGauge(name, description) for key, name, description in described}

    def export(metrics: Mapping[str, float]) -> None:
        for key, gauge in gauges.items():
            value = metrics.get(key)
            if value is not None:
                gauge.set(value)

    return export
