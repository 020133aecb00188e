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
    """Get a worker of an offer."""

    worker_id: str
    offer: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Have a worker hand over what it has and go, within `limit_s`."""

    worker_id: str
    reason: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Park:
    """Have the data plane lease a worker nothing. Said before the worker is there."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Activate:
    """Have the data plane lease prompts to a worker that was parked."""

    worker_id: str
    reason: str


FleetAction = Launch | Leave | Park | Activate


@dataclass(frozen=True, slots=True)
class Standing:
    """Standing of a fleet at a moment."""

    workers: Mapping[str, int]  # by state
    mu: float  # trajectories/s of those that serve
    usd_per_hour: float  # of all machines that are there


@dataclass
class FleetWorker:
    """One worker of a fleet."""

    offer: str
    since_s: float  # of its state
    spare: bool = False  # it is, or will be, a standby
    state: State = "asked"
    noticed: bool = False  # its machine announced that it will go
    served_since_s: float | None = None
    proved: bool = False  # served long enough to speak for its offer
    seen_s: float | None = None  # until when its hours are in the interruption rates
    successor: str = ""  # who takes the place of this slow worker as soon as it serves
    slow: str = ""  # why it is replaced

    @property
    def counts(self) -> bool:
        """Whether it is part of the capacity: it, or who will take its place, never both."""
        return self.state != "leaving" and not self.spare and not self.successor


class Members:
    """All workers of a fleet, in the order in which they were asked for."""

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
        """Names and workers as they are now."""
        return list(self._all.items())

    # --- how many --------------------------------------------------------------------------------

    @property
    def counts(self) -> Counter[str]:
        """Workers of each offer that are part of the capacity, or will be."""
        return Counter(m.offer for m in self._all.values() if m.counts)

    @property
    def held(self) -> Counter[str]:
        """Workers of each offer that are there or on their way, standbys too; not those that leave."""
        return Counter(m.offer for m in self._all.values() if m.state != "leaving")

    @property
    def beside(self) -> Counter[str]:
        """Of these, those that are no part of the capacity."""
        return self.held - self.counts

    # --- who -------------------------------------------------------------------------------------

    @property
    def ready(self) -> list[str]:
        """Standbys that could serve, those first that have been there for longest."""
        return [worker_id for worker_id, member in self._all.items() if member.state == "standby"]

    @property
    def spares(self) -> list[str]:
        """Standbys that are there or on their way."""
        return [name for name, member in self._all.items() if member.spare and member.state != "leaving"]

    def least_missed(self, offer: str) -> list[str]:
        """Workers of an offer, those first that would be missed least: not serving yet, then the newest."""
        mine = [
            (member.state == "serving", -member.since_s, worker_id)
            for worker_id, member in self._all.items()
            if member.offer == offer and member.counts
        ]
        return [worker_id for _, _, worker_id in sorted(mine)]

    # --- what happens ----------------------------------------------------------------------------

    def launch(self, offer: str, now_s: float, *, spare: bool = False) -> Launch:
        """One more worker of an offer, under a name of its own."""
        worker_id = f"w{self._issued}"
        self._issued += 1
        self._all[worker_id] = FleetWorker(offer, now_s, spare)
        return Launch(worker_id, offer)

    def enter(self, worker_id: str, state: State, now_s: float) -> None:
        """A worker is in another state. Who leaves does not come back."""
        member = self._all.get(worker_id)
        if member is not None and member.state != "leaving":
            member.state, member.since_s = state, now_s

    def remove(self, worker_id: str) -> FleetWorker | None:
        """A worker is gone; None: it was already."""
        return self._all.pop(worker_id, None)
