"""Whether slow answers are trained as often as quick ones: rewards ignore lengths, which vary twentyfold.

Under `wait` whatever is issued is trained, so the lengths trained and the lengths issued are one distribution
(two-sample Kolmogorov-Smirnov). Under `drop` the long ones come too late, and are missed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from echo_planes.sim.scenario import parse_scenario
from echo_planes.sim.world import World
from echo_planes.types import Lease, TrainBatch

STEPS = 150
GROUPS = 24
ALPHA = 0.01
SEED = 13
KILLS: dict[str, Any] = {
    "faults": [
        {"at_s": 30.0 * i, "kind": "kill" if i % 3 else "preempt", "worker": f"w{i % 6}"}
        for i in range(1, 40)
    ]
}
MIGRATIONS: dict[str, Any] = {"sampling": {"router": "jsq", "theta": 8}}
SETTINGS: dict[str, dict[str, Any]] = {
    "calm": {},
    "kills": KILLS,
    "migrations": MIGRATIONS,
    "kills and migrations": KILLS | MIGRATIONS,
    "refill": {"sampling": {"solved": 0.5, "refill": "reward"}},
}


@dataclass
class Seen:
    """Prompts that a run issued and trained, by index."""

    issued: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)


class WatchedWorld(World):
    """A run that remembers its prompts."""

    def __init__(self, *arguments: Any) -> None:
        self.seen = Seen()
        super().__init__(*arguments)

    def _on_leases(self, worker_id: str, leases: Sequence[Lease]) -> None:
        self.seen.issued += [lease.prompt.index for lease in leases if not lease.partials]
        super()._on_leases(worker_id, leases)

    def _train(self, batch: TrainBatch) -> None:
        self.seen.trained += [group.prompt_index for group in self._chosen]
        super()._train(batch)

    def lengths_of(self, prompts: Sequence[int]) -> npt.NDArray[np.float64]:
        """Tokens of every answer."""
        return np.concatenate([np.asarray(self.lengths.tokens(index), np.float64) for index in prompts])


@cache
def simulate(policy: str, setting: str = "calm") -> tuple[WatchedWorld, dict[str, Any]]:
    """A fleet of two speeds."""
    sections: dict[str, Any] = {
        "name": "lengths",
        "seed": SEED,
        "run": {"hours": 24, "steps": STEPS},
        "sampling": {"prompts_per_step": GROUPS, "samples_per_prompt": 2, "stream_s": 1.0, "lease_s": 600.0},
        "lengths": {"median_tokens": 200, "sigma": 0.95, "max_tokens": 2000},
        "staleness": {"max_staleness": 2, "publish_every": 1, "policy": policy, "queue_batches": 3.0},
        "learner": {"t_train_s": 8.0, "publish_s": 0.0},
        "network": {"snapshot_mb": 10, "patch_mb": 1, "install_s": 0.1},
        "fleet": {"mode": "fixed", "restarts": 100},
        "instance_types": [
            {"name": "quick", "count": 4, "peak_tokens_per_s": 2000.0, "boot_s": 5.0, "max_groups": 8},
            {"name": "slow", "count": 2, "peak_tokens_per_s": 500.0, "boot_s": 5.0, "max_groups": 8},
        ],
    }
    for key, changes in SETTINGS[setting].items():
        sections[key] = {**sections[key], **changes} if isinstance(changes, dict) else changes
    world = WatchedWorld(parse_scenario(sections))
    summary = world.run().summary
    assert summary["status"] == "done"
    return world, summary


def kolmogorov_smirnov(one: npt.ArrayLike, other: npt.ArrayLike) -> tuple[float, float]:
    """D of two samples and its asymptotic p-value (Press et al., Numerical Recipes, section 14.3.3)."""
    first, second = np.sort(one), np.sort(other)
    places = np.concatenate([first, second])
    below = np.searchsorted(first, places, "right") / len(first)
    d = float(np.abs(below - np.searchsorted(second, places, "right") / len(second)).max())
    root = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    x = (root + 0.12 + 0.11 / root) * d
    terms = [(-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101)]
    return d, min(1.0, max(0.0, 2 * sum(terms))) if x > 0.2 else 1.0


def test_the_statistic_is_right() -> None:
    assert kolmogorov_smirnov([1, 2, 3], [1, 2, 3]) == (0.0, 1.0)
    assert kolmogorov_smirnov([1, 2, 3, 4], [5, 6, 7, 8])[0] == 1.0
    rng = np.random.default_rng(0)
    same = [kolmogorov_smirnov(rng.normal(size=400), rng.normal(size=300))[1] for _ in range(1000)]
    assert 0.03 < np.mean(np.array(same) < 0.05) < 0.07
    assert kolmogorov_smirnov(rng.normal(size=4000), rng.normal(0.2, size=3000))[1] < 1e-6


@pytest.mark.parametrize("setting", SETTINGS)
def test_under_wait_the_lengths_trained_are_those_issued(setting: str) -> None:
    world, summary = simulate("wait", setting)
    issued, trained = world.lengths_of(world.seen.issued), world.lengths_of(world.seen.trained)
    low, high = np.quantile(issued, (0.05, 0.95))
    assert high / low > 20
    assert summary["dropped_stale"] == 0
    d, p = kolmogorov_smirnov(trained, issued)
    assert p > ALPHA, f"D = {d:.4f}, p = {p:.2g}"
    # Nothing is missing but what was in flight or buffered at the end, or set aside for what it says.
    missing = set(world.seen.issued) - set(world.seen.trained)
    counts = world.data.counts
    assert 2 * len(missing) == counts.buffered + counts.leased + counts.uninformative
    assert counts.buffered + counts.leased <= 3 * 2 * GROUPS
    if "kills" in setting:
        assert summary["workers_lost"] > 30
        assert summary["continued_leases"] > 20


def test_under_drop_the_long_answers_are_missed() -> None:
    world, summary = simulate("drop")
    assert summary["dropped_stale"] > 0
    issued, trained = world.lengths_of(world.seen.issued), world.lengths_of(world.seen.trained)
    d, p = kolmogorov_smirnov(trained, issued)
    assert p < 1e-6, f"D = {d:.4f}, p = {p:.2g}"
    assert trained.mean() < 0.95 * issued.mean()


@pytest.mark.parametrize("setting", ["kills", "migrations", "kills and migrations"])
def test_kills_and_migrations_change_nothing_of_the_lengths_trained(setting: str) -> None:
    calm, _ = simulate("wait")
    world, _ = simulate("wait", setting)
    d, p = kolmogorov_smirnov(calm.lengths_of(calm.seen.trained), world.lengths_of(world.seen.trained))
    assert p > ALPHA, f"D = {d:.4f}, p = {p:.2g}"
