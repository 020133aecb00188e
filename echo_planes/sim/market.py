"""Machines in virtual time: asked for, billed from the moment they are there, and taken away again.

A recorded spot market says how many machines of an offer there are: whoever asks beyond that waits, and when
there are fewer than are held, some are taken, drawn at random. Interruptions at random come on top.
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
from echo_planes.sim.scenario import OfferModel
from echo_planes.sim.spot import SpotTrace


class Tenant(Protocol):
    """Tenant of the market: it is told what becomes of each machine."""

    def on_granted(self, worker_id: str) -> None:
        """It is there, is billed, and boots."""

    def on_up(self, worker_id: str) -> None:
        """It can begin to work."""

    def on_notice(self, worker_id: str, limit_s: float) -> None:
        """It will be taken away in so many seconds."""

    def on_taken(self, worker_id: str) -> None:
        """It is gone, and billed no longer."""


@dataclass(slots=True)
class _Machine:
    offer: str
    timers: list[Timer] = field(default_factory=list)
    noticed: bool = False


class Market:
    """All offers with the machines that are held of them.

    Args:
        offers: by name.
        traces: recorded markets of some of them.
        kernel: the clock.
        tenant: is told.
        rng: draws interruptions and victims.
    """

    def __init__(
        self,
        offers: Mapping[str, OfferModel],
        traces: Mapping[str, SpotTrace],
        kernel: Kernel,
        tenant: Tenant,
        rng: random.Random,
    ) -> None:
        self._offers = offers
        self._traces = traces
        self._kernel = kernel
        self._tenant = tenant
        self._rng = rng
        self._held: dict[str, _Machine] = {}
        self._counts = dict.fromkeys(offers, 0)  # held of each
        self._waiting: dict[str, deque[str]] = {name: deque() for name in offers}
        for name in traces:
            kernel.at(kernel.now_s, partial(self._trace_changes, name))

    def holds(self, worker_id: str) -> bool:
        """Whether the machine of that name is there."""
        return worker_id in self._held

    def available(self, offer: str) -> float:
        """Machines of an offer that there are now, held ones included; infinite without a trace."""
        trace = self._traces.get(offer)
        if trace is None:
            return math.inf
        return math.floor(trace.count(self._kernel.now_s) * self._offers[offer].trace_share + 1e-9)

    def ask(self, worker_id: str, offer: str) -> None:
        """Get a machine as soon as there is one."""
        self._waiting[offer].append(worker_id)
        self._grant(offer)

    def release(self, worker_id: str) -> None:
        """Give a machine back, or ask for it no longer."""
        machine = self._held.get(worker_id)
        if machine is not None:
            self._remove(worker_id, machine)
            self._grant(machine.offer)
            return
        for waiting in self._waiting.values():
            if worker_id in waiting:
                waiting.remove(worker_id)

    def take(self, worker_id: str) -> None:
        """Interrupt a machine, with its offer's notice."""
        machine = self._held.get(worker_id)
        if machine is None or machine.noticed:
            return
        machine.noticed = True
        notice_s = self._offers[machine.offer].notice_s
        machine.timers.append(self._kernel.after(notice_s, partial(self._taken, worker_id)))
        if notice_s:
            self._tenant.on_notice(worker_id, notice_s)

    def waiting(self, offer: str) -> Sequence[str]:
        """Workers that have asked for a machine of an offer and not got one."""
        return tuple(self._waiting[offer])

    # --- inside ----------------------------------------------------------------------------------

    def _grant(self, offer: str) -> None:
        waiting, settings = self._waiting[offer], self._offers[offer]
        while waiting and self._counts[offer] < self.available(offer):
            worker_id = waiting.popleft()
            machine = self._held[worker_id] = _Machine(offer)
            self._counts[offer] += 1
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
        self._grant(machine.offer)

    def _remove(self, worker_id: str, machine: _Machine) -> None:
        del self._held[worker_id]
        self._counts[machine.offer] -= 1
        for timer in machine.timers:
            timer.cancel()

    def _trace_changes(self, name: str) -> None:
        trace = self._traces[name]
        held = [w for w, machine in self._held.items() if machine.offer == name and not machine.noticed]
        excess = len(held) - self.available(name)
        if excess > 0:
            for worker_id in self._rng.sample(held, int(excess)):
                self.take(worker_id)
        self._grant(name)
        later_s = trace.next_change_s(self._kernel.now_s)
        if later_s < math.inf:
            self._kernel.at(later_s, partial(self._trace_changes, name))
