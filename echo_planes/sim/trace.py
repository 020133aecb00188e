"""Accounting of a simulated run: its events in order, and their sums. Every record is marked "simulated"."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo_planes.data.replay.buffer_state import Accepted
from echo_planes.fleet.capacity import needed_capacity
from echo_planes.fleet.money import Accounting, Fate
from echo_planes.reporting.broadcasts import BroadcastLog
from echo_planes.reporting.metrics import WORKER_STATE
from echo_planes.sim.scenario import Scenario
from echo_planes.types import BufferCounts, InstallReport, Manifest, SeedReport

Record = dict[str, Any]
MARK = {"simulated": True}
LEARNER = "learner"
SAME = 1e-9


@dataclass(slots=True)
class _Fault:
    at_s: float
    text: str
    before: float  # capacity, tokens/s
    least: float
    recovered_s: float | None = None


class Trace:
    """Records of a simulated run: events, steps, faults, tokens and money.

    Args:
        scenario: settings of the run.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.money = Accounting()
        self.broadcasts = BroadcastLog()
        self.events: list[Record] = []
        self.steps: list[Record] = []
        self.learner_s = {"train": 0.0, "idle": 0.0}
        self._capacity: dict[str, float] = {}  # tokens/s of every serving worker, at its present speed
        self._total = 0.0  # sum of `_capacity`
        self._states: dict[str, str] = {}  # of workers whose machine came
        self._faults: list[_Fault] = []
        self._paid: dict[str, Mapping[str, int]] = {}  # of buffered groups: tokens by machine
        self._fates: Counter[str] = Counter()  # tokens by fate
        self._stale_sum = 0  # over trained groups
        self._stale_max = 0

    # --- events ----------------------------------------------------------------------------------

    def event(self, now_s: float, kind: str, text: str, **more: Any) -> None:
        """Record an event."""
        self.events.append({"time_s": round(now_s, 3), "kind": kind, "text": text, **more})

    def worker(self, now_s: float, worker_id: str, state: str, instance_type: str) -> None:
        """Set a worker's state from now on: `booting`, `serving` or `gone`."""
        if self._states.get(worker_id, "gone") != state:
            self._states[worker_id] = state
            self.event(now_s, WORKER_STATE, state, worker=worker_id, instance_type=instance_type)

    def capacity(self, now_s: float, worker_id: str, tokens_per_s: float) -> None:
        """Set a worker's throughput from now on, tokens/s; 0 if it does not serve."""
        if self._capacity.get(worker_id, 0.0) == tokens_per_s:
            return
        if tokens_per_s:
            self._capacity[worker_id] = tokens_per_s
        else:
            self._capacity.pop(worker_id, None)
        # Sum anew, in ascending order: differences would drift, and the sum must not depend on the order.
        self._total = sum(sorted(self._capacity.values()))
        for fault in self._faults:
            if fault.recovered_s is None:
                fault.least = min(fault.least, self._total)
                if self._total >= fault.before * (1 - SAME):
                    fault.recovered_s = now_s - fault.at_s

    def fault(self, now_s: float, kind: str, worker_id: str) -> None:
        """Record a fault before it takes effect."""
        self._faults.append(_Fault(now_s, f"{kind} {worker_id}", self._total, self._total))
        self.event(now_s, "fault", kind, worker=worker_id)

    def lost(self, machine: str, tokens: int, fate: str) -> None:
        """Settle tokens that will never be trained."""
        if tokens:
            self.money.settle(machine, "lost" if fate == "lost" else "failed", tokens)
            self._fates[fate] += tokens

    def accepted(self, group_id: str, paid: Mapping[str, int]) -> None:
        """Record the tokens of a group that goes to the buffer, by machine."""
        self._paid[group_id] = paid

    def refused(self, group_id: str, machine: str, tokens: int) -> None:
        """Record that a group was not accepted; `tokens` are those that the data plane does not have."""
        self._paid.pop(group_id, None)
        self.lost(machine, tokens, "refused")

    def dropped(self, groups: Sequence[Accepted]) -> None:
        """Settle groups that became too old."""
        for group in groups:
            self._settle(group.group_id, "stale")

    def uninformative(self, groups: Sequence[Accepted]) -> None:
        """Settle groups set aside as uninformative."""
        for group in groups:
            self._settle(group.group_id, "uninformative")

    def trained(
        self,
        now_s: float,
        step: int,
        groups: Sequence[Accepted],
        t_train_s: float,
        idle_s: float,
        counts: BufferCounts,
        seeding: SeedReport | None = None,
    ) -> None:
        """Record the end of a learner step."""
        tokens = sum(self._settle(group.group_id, "trained") for group in groups)
        ages = [step - group.version for group in groups]
        self._stale_sum += sum(ages)
        self._stale_max = max(self._stale_max, *ages)
        self.learner_s["train"] += t_train_s
        self.learner_s["idle"] += idle_s
        newest = self.broadcasts.newest()
        row = {
            "step": step + 1,
            "time_s": round(now_s, 3),
            "staleness_max": max(ages),
            "staleness_mean": sum(ages) / len(ages),
            "t_train_s": t_train_s,
            "t_idle_s": idle_s,
            "bubble_ratio": self.bubble_ratio,
            "tokens": tokens,
            "usd": self.money.step(now_s, tokens, idle_s),
            "workers": len(self._capacity),
            "capacity_tokens_per_s": self._total,
            "t_bcast_s": newest.get("t_bcast_s"),
            "published_version": newest.get("published_version"),
            "accepted": counts.accepted,
            "trained": counts.trained,
            "dropped_stale": counts.dropped_stale,
            "uninformative": counts.uninformative,
            "buffered": counts.buffered,
            "lost": counts.lost,
        }
        if seeding is not None:
            row |= {
                "t_seed_s": seeding.t_seed_s,
                "t_train_wait_s": seeding.train_wait_s,
                "t_remote_wait_s": seeding.remote_wait_s,
                "mean_remote": seeding.mean_remote,
            }
        self.steps.append(row)

    def _settle(self, group_id: str, fate: Fate) -> int:
        """Settle the tokens of a group and return their number; 0 if they were settled before."""
        paid = self._paid.pop(group_id, {})
        for machine, tokens in paid.items():
            self.money.settle(machine, fate, tokens)
        total = sum(paid.values())
        self._fates[fate] += total
        return total

    # --- publications ----------------------------------------------------------------------------

    def published(self, now_s: float, manifest: Manifest, seconds: float) -> None:
        self.broadcasts.on_published(manifest, seconds, now_s)
        self.event(
            now_s,
            "publication",
            f"{manifest.codec}, {manifest.payload_bytes:,} bytes",
            version=manifest.version,
        )

    def installed(self, now_s: float, report: InstallReport, num_active: int) -> None:
        self.broadcasts.on_installed(report, num_active, now_s)

    # --- results ---------------------------------------------------------------------------------

    @property
    def bubble_ratio(self) -> float:
        """T_idle / (T_idle + T_train)."""
        idle_s, train_s = self.learner_s["idle"], self.learner_s["train"]
        return idle_s / (idle_s + train_s) if idle_s + train_s else 0.0

    def summary(self, now_s: float, *, status: str, error: str, counts: BufferCounts, more: Record) -> Record:
        """Return the contents of summary.json."""
        money = self.money.summary(now_s)
        num_steps = len(self.steps)
        bcasts = [row["t_bcast_s"] for row in self.broadcasts.rows() if row["t_bcast_s"] is not None]
        trains = [row["t_train_s"] for row in self.steps]
        staleness, t_bcast_s = self._scenario.staleness, statistics.median(bcasts) if bcasts else None
        mu_min = None
        if trains and t_bcast_s is not None:
            formed = num_steps * self._scenario.per_step
            mu_min = needed_capacity(
                staleness.kappa,
                self._scenario.per_step,
                statistics.median(trains),
                t_bcast_s,
                uninformative=counts.uninformative / (counts.uninformative + formed),
            )
        return {
            **MARK,
            "scenario": self._scenario.name,
            "seed": self._scenario.seed,
            "status": status,
            "error": error,
            "seconds": now_s,
            "steps": num_steps,
            "bubble_ratio": self.bubble_ratio,
            "t_train_s_total": self.learner_s["train"],
            "t_idle_s_total": self.learner_s["idle"],
            "t_bcast_s_median": t_bcast_s,
            "t_bcast_s_max": max(bcasts, default=None),
            "mu_min": mu_min,
            "trajectories_per_s": counts.accepted / now_s if now_s else 0.0,
            "max_staleness": staleness.max_staleness,
            "publish_every": staleness.kappa,
            "max_staleness_observed": self._stale_max,
            "staleness_mean": self._stale_sum
            * self._scenario.sampling.samples_per_prompt
            / max(counts.trained + counts.reused, 1),
            "accepted": counts.accepted,
            "trained": counts.trained,
            "dropped_stale": counts.dropped_stale,
            "uninformative": counts.uninformative,
            "buffered": counts.buffered,
            "refused": counts.refused,
            "expired_leases": counts.expired,
            "continued_leases": counts.continued,
            "continued_tokens": counts.continued_tokens,
            "discarded_tokens": counts.discarded_tokens,
            "lost_trajectories": counts.lost,
            "trained_tokens": self._fates["trained"],
            "stale_tokens": self._fates["stale"],
            "uninformative_tokens": self._fates["uninformative"],
            "lost_tokens": self._fates["lost"],
            "refused_tokens": self._fates["refused"],
            **money,
            "usd_per_step": money["usd_total"] / num_steps if num_steps else None,
            "faults": [
                {
                    "time_s": fault.at_s,
                    "what": fault.text,
                    "capacity_drop": 1 - fault.least / fault.before if fault.before else 0.0,
                    "recovered_after_s": fault.recovered_s if fault.least < fault.before else 0.0,
                }
                for fault in self._faults
            ],
            **more,
        }


def dump_lines(records: Sequence[Record]) -> str:
    """Return records as JSON lines, each marked as simulated."""
    return "".join(json.dumps(MARK | record) + "\n" for record in records)
