"""Market of machines in virtual time: it grants them, starts their bills, and takes them away.

A recorded spot market gives the number of machines of a type. Requests beyond that number wait. When the
number falls below the held machines, the market takes some, drawn at random. It also interrupts machines at
random, at the rate in the scenario.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from echo_planes.sim.kernel import Kernel, Timer
from echo_planes.sim.scenario import InstanceTypeModel
from echo_planes.sim.spot import SpotTrace


class Tenant(Protocol):
    """Tenant of the market, which receives the events of each machine."""

    def on_granted(self, worker_id: str) -> None:
        """Handle a machine that has come: it is billed and boots."""

    def on_up(self, worker_id: str) -> None:
        """Handle a machine that has booted."""

    def on_notice(self, worker_id: str, limit_s: float) -> None:
        """Handle the notice of a machine that will be taken in `limit_s` seconds."""

    def on_taken(self, worker_id: str) -> None:
        """Handle a machine that was taken and is no longer billed."""


@dataclass(slots=True)
class _Machine:
    instance_type: str
    timers: list[Timer] = field(default_factory=list)
    noticed: bool = False


class Market:
    """Market of all instance types, with the machines that the tenant holds.

    Args:
        instance_types: by name.
        traces: recorded markets of some instance types, by name.
        kernel: the clock.
        tenant: receives the events of machines.
        rng: draws interruptions and the machines to take.
    """

    def __init__(
        self,
        instance_types: Mapping[str, InstanceTypeModel],
        traces: Mapping[str, SpotTrace],
        kernel: Kernel,
        tenant: Tenant,
        rng: random.Random,
    ) -> None:
        self._instance_types = instance_types
        self._traces = traces
        self._kernel = kernel
        self._tenant = tenant
        self._rng = rng
        self._held: dict[str, _Machine] = {}
        self._counts = dict.fromkeys(instance_types, 0)  # held machines of each type
        self._waiting: dict[str, deque[str]] = {name: deque() for name in instance_types}
        for name in traces:
            kernel.at(kernel.now_s, partial(self._trace_changes, name))

    def holds(self, worker_id: str) -> bool:
        """Return whether a worker holds its machine."""
        return worker_id in self._held

    def available(self, instance_type: str) -> float:
        """Return the machines of a type that exist now, held ones included; infinite without a trace."""
        trace = self._traces.get(instance_type)
        if trace is None:
            return math.inf
        return math.floor(
            trace.count(self._kernel.now_s) * self._instance_types[instance_type].trace_share + 1e-9
        )

    def ask(self, worker_id: str, instance_type: str) -> None:
        """Request a machine, which the market grants as soon as one is available."""
        self._waiting[instance_type].append(worker_id)
        self._grant(instance_type)

    def release(self, worker_id: str) -> None:
        """Give a machine back, or withdraw the request for it."""
        machine = self._held.get(worker_id)
        if machine is not None:
            self._remove(worker_id, machine)
            self._grant(machine.instance_type)
            return
        for waiting in self._waiting.values():
            if worker_id in waiting:
                waiting.remove(worker_id)

    def take(self, worker_id: str) -> None:
        """Interrupt a machine, with its instance type's notice."""
        machine = self._held.get(worker_id)
        if machine is None or machine.noticed:
            return
        machine.noticed = True
        notice_s = self._instance_types[machine.instance_type].notice_s
        machine.timers.append(self._kernel.after(notice_s, partial(self._taken, worker_id)))
        if notice_s:
            self._tenant.on_notice(worker_id, notice_s)

    def waiting(self, instance_type: str) -> Sequence[str]:
        """Return the workers that wait for a machine of an instance type."""
        return tuple(self._waiting[instance_type])

    # --- inside ----------------------------------------------------------------------------------

    def _grant(self, instance_type: str) -> None:
        waiting, settings = self._waiting[instance_type], self._instance_types[instance_type]
        while waiting and self._counts[instance_type] < self.available(instance_type):
            worker_id = waiting.popleft()
            machine = self._held[worker_id] = _Machine(instance_type)
            self._counts[instance_type] += 1
            up = partial(self._tenant.on_up, worker_id)
            machine.timers.append(self._kernel.after(settings.boot_s, up))
            if settings.interruptions_per_hour:
                life_s = self._rng.expovariate(settings.interruptions_per_hour / 3600.0)
                machine.timers.append(self._kernel.after(life_s, partial(self.take, worker_id)))
            self._tenant.on_granted(worker_id)

    def _taken(self, worker_id: str) -> None:
        machine = self._held[worker_id]
        self._remove(worker_id, machine)
        self._tenant.on_taken(worker_id)
        self._grant(machine.instance_type)

    def _remove(self, worker_id: str, machine: _Machine) -> None:
        del self._held[worker_id]
        self._counts[machine.instance_type] -= 1
        for timer in machine.timers:
            timer.cancel()

    def _trace_changes(self, name: str) -> None:
        trace = self._traces[name]
        held = [
            w for w, machine in self._held.items() if machine.instance_type == name and not machine.noticed
        ]
        excess = len(held) - self.available(name)
        if excess > 0:
            for worker_id in self._rng.sample(held, int(excess)):
                self.take(worker_id)
        self._grant(name)
        later_s = trace.next_change_s(self._kernel.now_s)
        if later_s < math.inf:
            self._kernel.at(later_s, partial(self._trace_changes, name))
