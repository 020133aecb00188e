"""Fleet of a simulated run: the real `Reconciler`, with the simulator's events and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from echo_planes.fleet.capacity import Pace, UninformativeShare
from echo_planes.fleet.estimates import CapacityModel, ThroughputSample
from echo_planes.fleet.instance_types import InstanceType, Limits
from echo_planes.fleet.provisioner import Provisioner
from echo_planes.fleet.reconciler import Reconciler
from echo_planes.fleet.record import FleetRecord
from echo_planes.fleet.workers import Cause, FleetAction
from echo_planes.reporting.metrics import FLEET_STATE
from echo_planes.sim.context import Context
from echo_planes.sim.exact_policy import ExactPolicy
from echo_planes.sim.lengths import LengthModel
from echo_planes.sim.scenario import InstanceTypeModel

SAMPLE_PROMPTS = 1024  # prompts for the mean of a group's longest answer


class Scaling:
    """Fleet modes `kept`, `provisioned` and `exact`. `SimWorkers` carries out the returned actions."""

    def __init__(self, run: Context) -> None:
        scenario = run.scenario
        self._run = run
        self._kernel = run.kernel
        self._model = CapacityModel()
        self._pace = Pace(scenario.run.steps)
        self._uninformative = UninformativeShare(scenario.per_step)
        self._broadcast = 0  # newest version whose T_bcast was observed; 0, a whole snapshot, does not count
        self._reason = ""
        fleet = scenario.fleet
        self._limits = Limits(fleet.usd_per_hour, interruptions_per_hour=fleet.interruptions_per_hour)
        shape = GroupShape.of(run.lengths)
        policy = ExactPolicy if fleet.mode == "exact" else Provisioner
        self.fleet = Reconciler(
            [
                _instance_type(instance_type, expected_mu(instance_type, shape))
                for instance_type in scenario.instance_types
            ],
            {instance_type.name: instance_type.count for instance_type in scenario.instance_types},
            provisioner=policy(self._limits, sustain_s=fleet.sustain_s),
            model=self._model,
            boot_limit_s=fleet.boot_limit_s,
            standby=fleet.standby,
        )
        self._record = FleetRecord(self.fleet)

    def begin(self) -> list[FleetAction]:
        """Launch the first workers."""
        first = self.fleet.begin(0.0)
        self._record.begun(first)
        return first

    # --- events ----------------------------------------------------------------------------------

    def came(self, worker_id: str) -> None:
        """Report that a worker's machine has come."""
        self.fleet.came(worker_id, self._kernel.now_s)

    def serving(self, worker_id: str) -> None:
        """Report that a worker serves."""
        self.fleet.serving(worker_id, self._kernel.now_s)

    def notice(self, worker_id: str, limit_s: float) -> list[FleetAction]:
        """Report that a machine will be taken in `limit_s` seconds; return the actions due."""
        return self.fleet.notice(worker_id, limit_s, self._kernel.now_s)

    def gone(self, worker_id: str, cause: str) -> None:
        """Report that a worker has ended."""
        self.fleet.gone(worker_id, cast(Cause, cause), self._kernel.now_s)

    def on_step(self, completed: int, t_train_s: float, idle_s: float, uninformative: int) -> None:
        """Report the end of a learner step; `uninformative` is the total of replaced trajectories so far."""
        self._model.observe_step(t_train_s)
        self._pace.observe(completed, t_train_s + idle_s, self._kernel.now_s)
        self._uninformative.observe(uninformative)
        newest = self._run.trace.broadcasts.newest()
        if newest and newest["published_version"] > self._broadcast:
            self._broadcast = newest["published_version"]
            self._model.observe_broadcast(newest["t_bcast_s"])

    # --- decisions -------------------------------------------------------------------------------

    def tick(self, samples: Mapping[str, ThroughputSample]) -> list[FleetAction]:
        """Return the actions due; the caller passes each serving worker's counters every `fleet.tick_s`."""
        now_s, scenario = self._kernel.now_s, self._run.scenario
        need = None
        for worker_id, sample in samples.items():
            self.fleet.measured(worker_id, sample, now_s)
        if scenario.fleet.follows_need:
            staleness = scenario.staleness
            need = self._model.need(
                staleness.max_staleness,
                staleness.kappa,
                scenario.per_step,
                scenario.fleet.gamma,
                mu_first=self.fleet.mu_first(now_s),
                uninformative=self._uninformative.share,
            )
        self.fleet.limits = replace(self._limits, seconds_left=self._pace.left_s(now_s))
        actions = self.fleet.tick(now_s, need)
        decision = self.fleet.decision
        if decision is not None and actions and decision.reason != self._reason:
            self._reason = decision.reason
            self._run.trace.event(now_s, "fleet", decision.reason)
        written = self._record.tick(need, actions, now_s)
        if written is not None:
            text, numbers = written
            self._run.trace.event(now_s, FLEET_STATE, text, **numbers)
        return actions


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Lengths of a group's answers, averaged over `SAMPLE_PROMPTS` prompts."""

    num_samples: int
    mean: float  # tokens of an answer
    longest: float  # tokens of a group's longest answer

    @classmethod
    def of(cls, lengths: LengthModel) -> GroupShape:
        groups = np.array([lengths.tokens(index) for index in range(SAMPLE_PROMPTS)])
        num_samples = groups.shape[1]
        mean = sum((groups.sum(1) / num_samples / SAMPLE_PROMPTS).tolist())
        return cls(num_samples, mean, float(groups.max(1).sum() / SAMPLE_PROMPTS))


def expected_mu(instance_type: InstanceTypeModel, shape: GroupShape) -> float:
    """Return the trajectories/s of one worker with all places taken, as a measurement would.

    A group keeps its place until its longest answer ends, so fewer samples run than the places could hold.
    """
    batch = instance_type.max_groups * shape.num_samples * shape.mean / shape.longest
    return instance_type.engine.tokens_per_s(batch) / shape.mean


def _instance_type(instance_type: InstanceTypeModel, mu: float) -> InstanceType:
    return InstanceType(
        name=instance_type.name,
        sku=instance_type.sku,
        usd_per_hour=instance_type.usd_per_hour,
        mu=mu,
        max_count=instance_type.quota,
        min_count=instance_type.min_count,
        region=instance_type.region,
        market=instance_type.market,
        interruptions_per_hour=instance_type.interruptions_per_hour,
        boot_s=instance_type.boot_s,
    )
