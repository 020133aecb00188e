"""Machines for rollout workers: interface of their sources (`Actuator`), and a fixed set of machines."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from echo_planes.errors import ClusterError

MachineState = Literal["pending", "up", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine, or the place of a machine that was asked for."""

    node_id: str  # "pending/INSTANCE_TYPE/i" until the machine comes
    instance_type_name: str
    state: MachineState
    notice_deadline_s: float | None = None  # time on the run's clock at which it will be taken, if announced
    worker_id: str | None = None  # the worker that `assign` put there


class Actuator(Protocol):
    """Source of machines. All calls come from one event loop; each call has its own time limit.

    Calls of `release` for several machines may run concurrently with each other and with the other calls.

    Raises (all methods but `assign`):
        ClusterError: the cluster can never provide the machines; says what to change.
        WaitTimeoutError: no answer within the limit.
        RunError: the cluster refused or cannot be reached now.
    """

    async def want(self, counts: Mapping[str, int]) -> None:
        """Set the number of nodes wanted of each instance type: a floor. Idle nodes beyond it may go."""
        ...

    async def nodes(self) -> tuple[Machine, ...]:
        """Return the machines; pending ones are still on their way."""
        ...

    def assign(self, node_id: str, worker_id: str) -> None:
        """Remember which worker runs on a node; `nodes` reports it from then on."""
        ...

    async def notice(self, node_id: str, deadline_s: float) -> None:
        """Mark a machine that its cloud takes at `deadline_s` (run's clock): nothing new is placed there."""
        ...

    async def release(self, node_id: str) -> None:
        """Let a machine go whose worker is gone. Lower `want` first, otherwise a new machine replaces it."""
        ...

    async def close(self) -> None:
        """Stop asking for machines."""
        ...


# --- a fixed set of machines ---------------------------------------------------------------------


class StaticActuator:
    """Fixed set of machines, of which the fleet uses as many as it wants. Nothing is started or stopped.

    Args:
        machines: number of machines of each instance type.
    """

    def __init__(self, machines: Mapping[str, int]) -> None:
        self._machines = dict(machines)
        self._active: dict[str, Machine] = {}

    async def want(self, counts: Mapping[str, int]) -> None:
        """Take unused machines into use until `counts` are up or none is left."""
        check_known(counts, self._machines)
        for instance_type_name, count in counts.items():
            places = [f"{instance_type_name}/{i}" for i in range(self._machines[instance_type_name])]
            parked = [node_id for node_id in places if node_id not in self._active]
            num_up = sum(
                n.state == "up" for n in self._active.values() if n.instance_type_name == instance_type_name
            )
            for node_id in parked[: max(0, count - num_up)]:
                self._active[node_id] = Machine(node_id, instance_type_name, "up")

    async def nodes(self) -> tuple[Machine, ...]:
        """Return the machines in use."""
        return tuple(self._active.values())

    def assign(self, node_id: str, worker_id: str) -> None:
        self._active[node_id] = replace(self._node(node_id), worker_id=worker_id)

    async def notice(self, node_id: str, deadline_s: float) -> None:
        node = self._node(node_id)
        self._active[node_id] = replace(node, state="draining", notice_deadline_s=deadline_s)

    async def release(self, node_id: str) -> None:
        """Take a machine out of use; the next `want` may use it again."""
        self._active.pop(node_id, None)

    async def close(self) -> None:
        self._active.clear()

    def _node(self, node_id: str) -> Machine:
        if node_id not in self._active:
            raise ClusterError(f"fleet: machine '{node_id}' is not in use; in use are {sorted(self._active)}")
        return self._active[node_id]


def check_known(counts: Mapping[str, int], instance_types: Collection[str]) -> None:
    """Check that every wanted instance type is on offer and no count is negative.

    Raises:
        ClusterError: names the wrong instance type and the known ones, or the negative count.
    """
    for instance_type_name, count in counts.items():
        if instance_type_name not in instance_types:
            raise ClusterError(
                f"fleet: {count} of instance type '{instance_type_name}' are wanted, which is not among "
                f"{sorted(instance_types)}; correct its name, or add the instance type"
            )
        if count < 0:
            raise ClusterError(
                f"fleet: {count} of instance type '{instance_type_name}' are wanted; ask for 0 or more"
            )


# --- machines that an autoscaler brings ----------------------------------------------------------


def node_type(instance_type_name: str) -> str:
    """Return the name of an instance type's node type: H100/us-east-1/spot -> h100-us-east-1-spot.

    Clouds and Kubernetes allow only lower-case letters, digits and hyphens in such names.
    """
    return re.sub(r"[^a-z0-9]+", "-", instance_type_name.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Sighting:
    """Machine as the cluster reports it."""

    node_id: str
    instance_type_name: str
    state: MachineState
    deadline_unix_s: float | None = None  # of its notice


def picture(
    seen: Sequence[Sighting],
    coming: Mapping[str, int],
    wanted: Mapping[str, int],
    workers: Mapping[str, str],
    clock_offset_s: float,
) -> tuple[Machine, ...]:
    """Return the machines, sorted by type and then by id, from the reports of a cluster and its autoscaler.

    The autoscaler's count of machines on their way is one round old and may include some that have come. So
    the pending machines are at most those missing to the floor.

    Args:
        seen: machines that are, or were, in the cluster.
        coming: machines of each instance type that the autoscaler reports as on their way.
        wanted: floor that was set last, by instance type.
        workers: node id -> worker id.
        clock_offset_s: run's clock minus Unix time, seconds.
    """
    nodes = [
        Machine(
            node_id=sighting.node_id,
            instance_type_name=sighting.instance_type_name,
            state=sighting.state,
            notice_deadline_s=_moved(sighting.deadline_unix_s, clock_offset_s),
            worker_id=workers.get(sighting.node_id),
        )
        for sighting in seen
    ]
    for instance_type_name, count in coming.items():
        num_up = sum(node.state == "up" for node in nodes if node.instance_type_name == instance_type_name)
        num_missing = max(0, wanted.get(instance_type_name, 0) - num_up)
        places = range(min(count, num_missing))
        nodes += [Machine(f"pending/{instance_type_name}/{i}", instance_type_name, "pending") for i in places]
    return tuple(sorted(nodes, key=lambda node: (node.instance_type_name, node.node_id)))


def _moved(unix_s: float | None, clock_offset_s: float) -> float | None:
    return None if unix_s is None else unix_s + clock_offset_s
