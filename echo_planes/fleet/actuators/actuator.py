"""Machines for rollout workers: asked for, seen, let go. Who asks does not know where they come from."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from echo_planes.errors import ClusterError

MachineState = Literal["pending", "up", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, or the place of one that was asked for."""

    node_id: str  # "pending/OFFER/i" while it is only asked for
    offer_name: str
    state: MachineState
    notice_deadline_s: float | None = None  # run's clock: when it will be taken; None: no time was given
    worker_id: str | None = None  # the worker that `assign` put there


class Actuator(Protocol):
    """Machines: asked for, seen, let go. All is called from one event loop; each call has a limit of its own.

    `release` may run beside the other calls, once for each of several machines.

    Raises (all methods but `assign`):
        ClusterError: the cluster can never give what is asked for; says what to change.
        WaitTimeoutError: no answer within the limit.
        RunError: the cluster refused or cannot be reached now.
    """

    async def want(self, counts: Mapping[str, int]) -> None:
        """Nodes of each offer wanted from now on: a floor. Whatever is more may go when idle."""
        ...

    async def nodes(self) -> tuple[Machine, ...]:
        """List the machines. The pending ones are those still on their way: none if nothing is coming."""
        ...

    def assign(self, node_id: str, worker_id: str) -> None:
        """Remember which worker runs on a node; `nodes` says it from then on."""
        ...

    async def notice(self, node_id: str, deadline_s: float) -> None:
        """The machine will be taken at `deadline_s` (run's clock), its cloud said: nothing new goes there."""
        ...

    async def release(self, node_id: str) -> None:
        """Its worker is gone: the machine may go. Lower `want` first, or another one comes in its place."""
        ...

    async def close(self) -> None:
        """Ask for nothing any more."""
        ...


# --- machines that are there anyway --------------------------------------------------------------


class StaticActuator:
    """A fixed set of machines: the fleet chooses how many of them it uses. Nothing is started or stopped.

    Args:
        machines: how many there are of each offer.
    """

    def __init__(self, machines: Mapping[str, int]) -> None:
        self._machines = dict(machines)
        self._active: dict[str, Machine] = {}

    async def want(self, counts: Mapping[str, int]) -> None:
        """Take parked machines into use, as far as there are any."""
        check_known(counts, self._machines)
        for offer_name, count in counts.items():
            places = [f"{offer_name}/{i}" for i in range(self._machines[offer_name])]
            parked = [node_id for node_id in places if node_id not in self._active]
            num_up = sum(n.state == "up" for n in self._active.values() if n.offer_name == offer_name)
            for node_id in parked[: max(0, count - num_up)]:
                self._active[node_id] = Machine(node_id, offer_name, "up")

    async def nodes(self) -> tuple[Machine, ...]:
        """The machines in use."""
        return tuple(self._active.values())

    def assign(self, node_id: str, worker_id: str) -> None:
        self._active[node_id] = replace(self._node(node_id), worker_id=worker_id)

    async def notice(self, node_id: str, deadline_s: float) -> None:
        node = self._node(node_id)
        self._active[node_id] = replace(node, state="draining", notice_deadline_s=deadline_s)

    async def release(self, node_id: str) -> None:
        """Park it: the next `want` may take it again."""
        self._active.pop(node_id, None)

    async def close(self) -> None:
        self._active.clear()

    def _node(self, node_id: str) -> Machine:
        if node_id not in self._active:
            raise ClusterError(f"fleet: machine '{node_id}' is not in use; in use are {sorted(self._active)}")
        return self._active[node_id]


def check_known(counts: Mapping[str, int], offers: Collection[str]) -> None:
    """Refuse to want what is not offered.

    Raises:
        ClusterError: names the offer and those that there are.
    """
    for offer_name, count in counts.items():
        if offer_name not in offers:
            raise ClusterError(
                f"fleet: {count} of offer '{offer_name}' are wanted, which is not among {sorted(offers)}; "
                "correct its name, or add the offer"
            )
        if count < 0:
            raise ClusterError(f"fleet: {count} of offer '{offer_name}' are wanted; ask for 0 or more")


# --- machines that an autoscaler brings ----------------------------------------------------------


def node_type(offer_name: str) -> str:
    """Name of an offer's node type in the cluster: H100/us-east-1/spot -> h100-us-east-1-spot.

    Clouds and Kubernetes allow only such names: lower-case letters, digits and hyphens.
    """
    return re.sub(r"[^a-z0-9]+", "-", offer_name.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Sighting:
    """One machine as a cluster reports it."""

    node_id: str
    offer_name: str
    state: MachineState
    deadline_unix_s: float | None = None  # of its notice


def picture(
    seen: Sequence[Sighting],
    coming: Mapping[str, int],
    wanted: Mapping[str, int],
    workers: Mapping[str, str],
    clock_offset_s: float,
) -> tuple[Machine, ...]:
    """List the machines, sorted by offer and then by id, from the reports of a cluster and its autoscaler.

    An autoscaler's count of machines on their way is a round old: it still holds some that have come. So no
    more are pending than are missing.

    Args:
        seen: machines that are, or were, in the cluster.
        coming: machines of each offer that the autoscaler says are on their way.
        wanted: the floor.
        workers: node id -> worker id.
        clock_offset_s: run's clock minus Unix time.
    """
    nodes = [
        Machine(
            node_id=sighting.node_id,
            offer_name=sighting.offer_name,
            state=sighting.state,
            notice_deadline_s=_moved(sighting.deadline_unix_s, clock_offset_s),
            worker_id=workers.get(sighting.node_id),
        )
        for sighting in seen
    ]
    for offer_name, count in coming.items():
        num_up = sum(node.state == "up" for node in nodes if node.offer_name == offer_name)
        num_missing = max(0, wanted.get(offer_name, 0) - num_up)
        places = range(min(count, num_missing))
        nodes += [Machine(f"pending/{offer_name}/{i}", offer_name, "pending") for i in places]
    return tuple(sorted(nodes, key=lambda node: (node.offer_name, node.node_id)))


def _moved(unix_s: float | None, clock_offset_s: float) -> float | None:
    return None if unix_s is None else unix_s + clock_offset_s
