"""Members of a fleet and their states, and the actions of the reconciler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Cause = Literal["preempted", "died", "left", "never came"]
State = Literal["asked", "booting", "serving", "standby", "leaving"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Get a worker of an instance type."""

    worker_id: str
    instance_type: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Have a worker hand over its leases and leave within `limit_s` seconds."""

    worker_id: str
    reason: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Park:
    """Have the data plane lease nothing to a worker. The action comes right after its launch."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Activate:
    """Have the data plane lease prompts to a worker that was parked."""

    worker_id: str
    reason: str


FleetAction = Launch | Leave | Park | Activate


@dataclass(frozen=True, slots=True)
class Standing:
    """Workers, throughput and price of a fleet at one moment."""

    workers: Mapping[str, int]  # by state
    mu: float  # trajectories/s of the serving workers
    usd_per_hour: float  # of all machines that have come


@dataclass
class FleetWorker:
    """Worker of a fleet. Times are on the clock of the reconciler's caller."""

    instance_type: str
    since_s: float  # beginning of its state
    asked_s: float  # time of its launch
    spare: bool = False  # a standby, now or once it is ready
    state: State = "asked"
    noticed: bool = False  # its machine announced its end
    served_since_s: float | None = None
    proved: bool = False  # it served long enough for `InstanceRecords.prove`
    seen_s: float | None = None  # end of the hours that the interruption rates include
    successor: str = ""  # worker that takes the place of this slow one as soon as it serves
    slow: str = ""  # reason for which it is replaced

    @property
    def counts(self) -> bool:
        """Whether it is part of the capacity. Of a slow worker and its successor, only the successor is."""
        return self.state != "leaving" and not self.spare and not self.successor


class Members:
    """Workers of a fleet, in the order of their launches."""

    def __init__(self) -> None:
        self._all: dict[str, FleetWorker] = {}
        self._issued = 0

    def __iter__(self) -> Iterator[FleetWorker]:
        return iter(self._all.values())

    def __getitem__(self, worker_id: str) -> FleetWorker:
        return self._all[worker_id]

    def get(self, worker_id: str) -> FleetWorker | None:
        return self._all.get(worker_id)

    def items(self) -> list[tuple[str, FleetWorker]]:
        """Return a copy of the list of names and workers."""
        return list(self._all.items())

    # --- numbers ---------------------------------------------------------------------------------

    @property
    def counts(self) -> Counter[str]:
        """Workers of each instance type that are part of the capacity, or will be."""
        return Counter(m.instance_type for m in self._all.values() if m.counts)

    @property
    def held(self) -> Counter[str]:
        """Workers of each type that do not leave: present or on their way, standbys included."""
        return Counter(m.instance_type for m in self._all.values() if m.state != "leaving")

    @property
    def beside(self) -> Counter[str]:
        """Workers in `held` that are not part of the capacity."""
        return self.held - self.counts

    # --- names -----------------------------------------------------------------------------------

    @property
    def ready(self) -> list[str]:
        """Standbys that could serve, in the order of their launches."""
        return [worker_id for worker_id, member in self._all.items() if member.state == "standby"]

    @property
    def spares(self) -> list[str]:
        """Standbys that are present or on their way."""
        return [name for name, member in self._all.items() if member.spare and member.state != "leaving"]

    def least_missed(self, instance_type: str) -> list[str]:
        """Return the workers of a type, the least useful first: not serving yet, then the newest."""
        mine = [
            (member.state == "serving", -member.since_s, worker_id)
            for worker_id, member in self._all.items()
            if member.instance_type == instance_type and member.counts
        ]
        return [worker_id for _, _, worker_id in sorted(mine)]

    # --- events ----------------------------------------------------------------------------------

    def launch(self, instance_type: str, now_s: float, *, spare: bool = False) -> Launch:
        """Add a worker of an instance type under a new name."""
        worker_id = f"w{self._issued}"
        self._issued += 1
        self._all[worker_id] = FleetWorker(instance_type, now_s, now_s, spare)
        return Launch(worker_id, instance_type)

    def enter(self, worker_id: str, state: State, now_s: float) -> None:
        """Set a worker's state. A leaving worker keeps its state."""
        member = self._all.get(worker_id)
        if member is not None and member.state != "leaving":
            member.state, member.since_s = state, now_s

    def remove(self, worker_id: str) -> FleetWorker | None:
        """Remove and return a worker; None if there is none of that name."""
        return self._all.pop(worker_id, None)
