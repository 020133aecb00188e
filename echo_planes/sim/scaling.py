"""The fleet of a simulated run: the real `Reconciler`, told what happens and asked what should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from echo_planes.fleet.capacity import UninformativeShare
from echo_planes.fleet.estimates import CapacityModel, ThroughputSample
from echo_planes.fleet.instance_types import Limits, Offer
from echo_planes.fleet.provisioner import Provisioner
from echo_planes.fleet.reconciler import Reconciler
from echo_planes.fleet.record import FleetRecord
from echo_planes.fleet.workers import Cause, FleetAction
from echo_planes.reporting.metrics import FLEET_STATE
from echo_planes.sim.context import Context
from echo_planes.sim.exact_policy import ExactPolicy
from echo_planes.sim.lengths import LengthModel
from echo_planes.sim.scenario import OfferModel

SAMPLE_PROMPTS = 1024  # for the mean of a group's longest answer


class Scaling:
    """Fleet modes `kept`, `provisioned` and `exact`.

    Its workers do what the actions that it returns say.
    """

    def __init__(self, run: Context) -> None:
        scenario = run.scenario
        self._run = run
        self._kernel = run.kernel
        self._model = CapacityModel()
        self._uninformative = UninformativeShare(scenario.per_step)
        self._broadcast = 0  # newest version whose T_bcast was observed; the first goes out whole, once
        self._reason = ""
        fleet = scenario.fleet
        limits = Limits(usd_per_hour=fleet.usd_per_hour, interruptions_per_hour=fleet.interruptions_per_hour)
        shape = GroupShape.of(run.lengths)
        policy = ExactPolicy if fleet.mode == "exact" else Provisioner
        self.fleet = Reconciler(
            [_offer(offer, expected_mu(offer, shape)) for offer in scenario.offers],
            {offer.name: offer.count for offer in scenario.offers},
            provisioner=policy(limits, sustain_s=fleet.sustain_s),
            model=self._model,
            boot_limit_s=fleet.boot_limit_s,
            standby=fleet.standby,
        )
        self._record = FleetRecord(self.fleet)

    def begin(self) -> list[FleetAction]:
        """The first workers."""
        first = self.fleet.begin(0.0)
        self._record.begun(first)
        return first

    # --- what happens ----------------------------------------------------------------------------

    def came(self, worker_id: str) -> None:
        """A machine is there."""
        self.fleet.came(worker_id, self._kernel.now_s)

    def serving(self, worker_id: str) -> None:
        """A worker generates."""
        self.fleet.serving(worker_id, self._kernel.now_s)

    def notice(self, worker_id: str, limit_s: float) -> list[FleetAction]:
        """A machine will go."""
        return self.fleet.notice(worker_id, limit_s, self._kernel.now_s)

    def gone(self, worker_id: str, cause: str) -> None:
        """A worker is no more."""
        self.fleet.gone(worker_id, cast(Cause, cause), self._kernel.now_s)

    def on_step(self, t_train_s: float, uninformative: int) -> None:
        """A learner step has ended; so many trajectories were replaced so far."""
        self._model.observe_step(t_train_s)
        self._uninformative.observe(uninformative)
        newest = self._run.trace.broadcasts.newest()
        if newest and newest["published_version"] > self._broadcast:
            self._broadcast = newest["published_version"]
            self._model.observe_broadcast(newest["t_bcast_s"])

    # --- what should be --------------------------------------------------------------------------

    def tick(self, samples: Mapping[str, ThroughputSample]) -> list[FleetAction]:
        """Every `fleet.tick_s`: what each serving worker has made so far."""
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
    """Answers of a group, on average over `SAMPLE_PROMPTS` prompts."""

    num_samples: int
    mean: float  # tokens of an answer
    longest: float  # tokens of a group's longest answer

    @classmethod
    def of(cls, lengths: LengthModel) -> GroupShape:
        groups = np.array([lengths.tokens(index) for index in range(SAMPLE_PROMPTS)])
        num_samples = groups.shape[1]
        mean = sum((groups.sum(1) / num_samples / SAMPLE_PROMPTS).tolist())
        return cls(num_samples, mean, float(groups.max(1).sum() / SAMPLE_PROMPTS))


def expected_mu(offer: OfferModel, shape: GroupShape) -> float:
    """Trajectories/s of one worker with all places taken: what a measurement would say.

    A place is taken until the longest answer of its group ends, so fewer samples run than there are places
    for.
    """
    batch = offer.max_groups * shape.num_samples * shape.mean / shape.longest
    return offer.engine.tokens_per_s(batch) / shape.mean


def _offer(offer: OfferModel, mu: float) -> Offer:
    return Offer(
        name=offer.name,
        sku=offer.sku,
        usd_per_hour=offer.usd_per_hour,
        mu=mu,
        max_count=offer.quota,
        min_count=offer.min_count,
        region=offer.region,
        market=offer.market,
        interruptions_per_hour=offer.interruptions_per_hour,
        boot_s=offer.boot_s,
    )
