"""Machines that Ray's autoscaler (v2) brings, on a cloud (`ray up`) or on Kubernetes (KubeRay).

An instance type is a node type of the cluster (KubeRay: a worker group) with the name
`node_type(instance_type)`. Each of its nodes has the type's labels and one unit of a custom resource with the
name of the instance type (see configs/cluster). So one requested bundle is one node of that type. Only one
job at a time may use this actuator: the floor of a second job would replace that of the first.

Besides Ray's developer API, this module uses Ray's GCS client and the messages of its autoscaler. Both are
internal, which is one reason why the project pins the version of Ray (2.60).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.autoscaler.sdk import request_resources
from ray.autoscaler.v2.sdk import GcsClient
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.core.generated.autoscaler_pb2 import (
    DrainNodeReason,
    GetClusterStatusReply,
    NodeStatus,
)
from ray.exceptions import RayError

from echo_planes.cluster.clock import Clock
from echo_planes.errors import ClusterError, RunError, WaitTimeoutError
from echo_planes.fleet.actuators.actuator import (
    Machine,
    MachineState,
    Sighting,
    check_known,
    node_type,
    picture,
)

RPC_S = 10.0  # limit of one request to the cluster's head
REPORT_S = 60.0  # limit until a new cluster's autoscaler reports for the first time
AGAIN_S = 0.5  # between two attempts
DRAIN_S = 10.0  # limit until a node counts as idle after its worker has ended

T = TypeVar("T")


class RayNodes:
    """`ray` actuator. Ray must be connected to the cluster.

    Args:
        labels: instance type name -> labels that its nodes carry, besides their resource.
        clock: the run's clock, on which deadlines are.
    """

    def __init__(self, labels: Mapping[str, Mapping[str, str]], clock: Clock) -> None:
        self._labels = {instance_type_name: dict(wanted) for instance_type_name, wanted in labels.items()}
        self._clock = clock
        self._instance_types = {
            node_type(instance_type_name): instance_type_name for instance_type_name in labels
        }
        self._wanted: dict[str, int] = {}
        self._asked_version = 0  # version of the cluster's state after the floor was set
        self._workers: dict[str, str] = {}
        self._instance_type_of: dict[
            str, str
        ] = {}  # node id -> type of every node seen; a dead node has no resources that show it
        self._client: Any = GcsClient(address=ray.get_runtime_context().gcs_address)

    async def check(self) -> None:
        """Wait until the autoscaler reports.

        Raises:
            ClusterError: no autoscaler reports in time, or it is v1, which ignores labels.
        """
        if not await self._ask("autoscaler version", lambda: is_autoscaler_v2(fetch_from_server=True)):
            raise ClusterError(
                "fleet: the cluster's autoscaler is v1, which ignores labels; start the head with "
                "RAY_enable_autoscaler_v2=1 (KubeRay: autoscalerOptions.version: v2), or use fixed machines"
            )
        deadline_s = self._clock.now_s() + REPORT_S
        while (await self._status()).autoscaling_state.autoscaler_state_version == 0:
            if self._clock.now_s() > deadline_s:
                raise ClusterError(
                    f"fleet: no autoscaler has reported within {REPORT_S:.0f} s; start the head with a "
                    "cluster file (ray up, or KubeRay's enableInTreeAutoscaling), or use fixed machines"
                )
            await asyncio.sleep(AGAIN_S)

    async def want(self, counts: Mapping[str, int]) -> None:
        check_known(counts, self._labels)
        wanted = {instance_type_name: count for instance_type_name, count in counts.items() if count}
        names = list(Counter(wanted).elements())
        bundles = [{name: 1.0} for name in names]
        selectors = [self._labels[name] for name in names]
        await self._ask(
            "request for machines",
            lambda: request_resources(bundles=bundles, bundle_label_selectors=selectors),
        )
        if wanted != self._wanted:
            # Every status request makes a new version of the cluster's state. The autoscaler reports the last
            # version it saw, so `_check_possible` can tell whether it has seen this floor.
            self._asked_version = (await self._status()).cluster_resource_state.cluster_resource_state_version
            self._wanted = wanted

    async def nodes(self) -> tuple[Machine, ...]:
        status, deadlines_ms = await asyncio.gather(self._status(), self._draining())
        self._check_possible(status)
        seen = []
        for node in status.cluster_resource_state.node_states:
            node_id = node.node_id.hex()
            instance_type_name = self._instance_type(node_id, node)
            if instance_type_name is None:
                continue
            deadline_ms = deadlines_ms.get(node_id, 0)  # 0: none
            state: MachineState = "up"
            if node.status == NodeStatus.DEAD:
                state, deadline_ms = "dead", 0
            elif node.status == NodeStatus.DRAINING or node_id in deadlines_ms:
                state = "draining"
            seen.append(
                Sighting(node_id, instance_type_name, state, deadline_ms / 1e3 if deadline_ms else None)
            )
        clock_offset_s = self._clock.now_s() - time.time()
        return picture(seen, self._coming(status), self._wanted, self._workers, clock_offset_s)

    def assign(self, node_id: str, worker_id: str) -> None:
        self._workers[node_id] = worker_id

    async def notice(self, node_id: str, deadline_s: float) -> None:
        deadline_unix_s = time.time() + deadline_s - self._clock.now_s()
        await self._drain(node_id, "DRAIN_NODE_REASON_PREEMPTION", "spot notice", int(deadline_unix_s * 1e3))

    async def release(self, node_id: str) -> None:
        """Drain a node, so that Ray places nothing on it and the autoscaler ends it.

        Ray refuses while anything runs there, for example the ending worker. So this method tries again for
        `DRAIN_S` seconds. After that the autoscaler's idle timeout ends the machine.
        """
        deadline_s = self._clock.now_s() + DRAIN_S
        reason = "DRAIN_NODE_REASON_IDLE_TERMINATION"
        while not await self._drain(node_id, reason, "its rollout worker is gone", 0):
            if self._clock.now_s() > deadline_s:
                return
            await asyncio.sleep(AGAIN_S)
        self._workers.pop(node_id, None)

    async def close(self) -> None:
        """Set the floor to zero, which would otherwise outlive the job."""
        await self.want({})

    def _instance_type(self, node_id: str, node: Any) -> str | None:
        names = (name for name in self._labels if node.total_resources.get(name, 0.0) > 0)
        instance_type_name = next(names, self._instance_type_of.get(node_id))
        if instance_type_name is not None:
            self._instance_type_of[node_id] = instance_type_name
        return instance_type_name

    def _coming(self, status: Any) -> dict[str, int]:
        autoscaler = status.autoscaling_state
        by_type: Counter[str] = Counter()
        for request in autoscaler.pending_instance_requests:
            by_type[request.ray_node_type_name] += request.count
        by_type.update(instance.ray_node_type_name for instance in autoscaler.pending_instances)
        return {
            self._instance_types[name]: count
            for name, count in by_type.items()
            if name in self._instance_types
        }

    def _check_possible(self, status: Any) -> None:
        """Check that the cluster can meet the whole floor: otherwise Ray launches no node of any type.

        Raises:
            ClusterError: names the floor and how to correct it.
        """
        autoscaler = status.autoscaling_state
        is_of_this_floor = autoscaler.last_seen_cluster_resource_state_version > self._asked_version
        if autoscaler.infeasible_cluster_resource_constraints and is_of_this_floor:
            asked = ", ".join(f"{count} {name}" for name, count in sorted(self._wanted.items()))
            raise ClusterError(
                f"fleet: the cluster can never have {asked}, so it starts nothing; give each type a node "
                "type with its resource and labels and enough max_workers, or lower its count"
            )

    async def _drain(self, node_id: str, reason: str, why: str, deadline_ms: int) -> bool:
        value = DrainNodeReason.Value(reason)
        accepted, _ = await self._ask(
            f"drain of node {node_id}",
            lambda: self._client.drain_node(node_id, value, why, deadline_ms, timeout=RPC_S),
        )
        return bool(accepted)

    async def _draining(self) -> dict[str, int]:
        found: dict[str, int] = await self._ask(
            "list of draining nodes", lambda: self._client.get_draining_nodes(timeout=RPC_S)
        )
        return found

    async def _status(self) -> Any:
        serialized = await self._ask(
            "cluster status", lambda: self._client.get_cluster_status(timeout_s=RPC_S)
        )
        return GetClusterStatusReply.FromString(serialized)

    async def _ask(self, what: str, question: Callable[[], T]) -> T:
        """Run a blocking call to Ray in a thread, with a limit beyond Ray's own.

        Raises:
            WaitTimeoutError: no answer within twice `RPC_S`.
            RunError: the call failed.
        """
        try:
            async with asyncio.timeout(2 * RPC_S):
                return await asyncio.to_thread(question)
        except TimeoutError:
            raise WaitTimeoutError(what, 2 * RPC_S) from None
        except RayError as error:
            raise RunError(f"fleet: {what} failed, the cluster's head may be gone: {error}") from error
