"""Faults of a scenario, each at its time."""

from __future__ import annotations

import random
from functools import partial

from echo_planes.sim.flow import SimMember
from echo_planes.sim.kernel import Kernel
from echo_planes.sim.scenario import FaultConfig
from echo_planes.sim.trace import Trace
from echo_planes.sim.workers import SimWorkers


class Faults:
    """Planned faults.

    Args:
        faults: of the scenario.
        kernel: the clock.
        workers: the workers that the faults affect.
        trace: the accounting.
        rng: draws the affected workers if the scenario names none.
    """

    def __init__(
        self, faults: list[FaultConfig], kernel: Kernel, workers: SimWorkers, trace: Trace, rng: random.Random
    ) -> None:
        self._kernel = kernel
        self._workers = workers
        self._trace = trace
        self._rng = rng
        for fault in faults:
            kernel.at(fault.at_s, partial(self._strike, fault))

    def _strike(self, fault: FaultConfig) -> None:
        serving = self._workers.serving()
        if fault.worker:
            victims = [member for member in serving if member.name == fault.worker]
        else:
            victims = self._rng.sample(serving, min(fault.count, len(serving)))
        if not victims:
            self._trace.event(self._kernel.now_s, "fault", f"{fault.kind}: no target is there")
        for member in victims:
            self._trace.fault(self._kernel.now_s, fault.kind, member.name)
            self._befall(fault, member)

    def _befall(self, fault: FaultConfig, member: SimMember) -> None:
        workers, now_s = self._workers, self._kernel.now_s
        match fault.kind:
            case "kill":
                member.cause = "died"
                workers.lose(member, "its process was killed")
            case "preempt":
                workers.market.take(member.name)
            case "slow":
                self._slow(member, member.slowed, fault)
            case "slow_link":
                self._slow(member, member.slowed_link, fault)
            case "silence":
                workers.flow.silence(member, now_s + fault.duration_s)
                workers.tell_capacity(member)
                self._kernel.after(fault.duration_s, partial(workers.tell_capacity, member))
            case "refuse_install":
                member.refuses = True

    def _slow(self, member: SimMember, factors: list[float], fault: FaultConfig) -> None:
        """Slow a worker's engine or link, until the fault is over."""
        factors.append(fault.factor)
        self._set_speed(member, factors)
        self._kernel.after(fault.duration_s, partial(self._end_slow, member, factors, fault.factor))

    def _end_slow(self, member: SimMember, factors: list[float], factor: float) -> None:
        factors.remove(factor)
        self._set_speed(member, factors)

    def _set_speed(self, member: SimMember, factors: list[float]) -> None:
        workers = self._workers
        if factors is member.slowed_link:
            if workers.members.get(member.name) is member:
                workers.network.set_speed(member.name, min(factors, default=1.0))
        elif member.engine is not None:
            workers.flow.advance(member)
            member.engine.engine.set_speed(member.speed)
            workers.flow.plan(member)
            workers.tell_capacity(member)
