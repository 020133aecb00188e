"""Shared parts of the claims of `bench.papers`: assumptions, rows of the table, and ECHO-2's scenario.

Everything here is simulated: the code that decides is the real one, what it decides about is modelled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from echo_planes.sim.engine_model import Engine, EngineSpec
from echo_planes.sim.lengths import LengthModel
from echo_planes.sim.scenario import Scenario, parse_scenario
from echo_planes.sim.world import Result, World

ASSUMPTIONS = Path(__file__).with_name("assumptions.yaml")
MEASURED_GROUPS = 600  # of one worker, for its mu
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. `holds` is None where nothing is claimed."""

    what: str
    paper: str
    ours: str
    holds: bool | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """Result of one claim of a paper. All of it is simulated."""

    name: str
    source: str
    rows: tuple[Row, ...]
    sensitivity: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()  # sections of the file
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every row that claims something does."""
        return all(row.holds is not False for row in self.rows)


@dataclass(frozen=True, slots=True)
class Variation:
    """The assumptions with some of them halved or doubled."""

    name: str = "as assumed"
    boot: float = 1.0
    throughput: float = 1.0
    price: float = 1.0


BASE = Variation()


def variations(*names: str) -> list[Variation]:
    """Each of the named quantities at half and at twice its value."""
    return [Variation(f"{name} x{factor:g}", **{name: factor}) for name in names for factor in (0.5, 2.0)]


def load() -> dict[str, Values]:
    """The values of all assumptions, by section."""
    tree = yaml.safe_load(ASSUMPTIONS.read_text())
    sections = {name: rows for name, rows in tree.items() if name != "changed"}
    return {name: {key: row["value"] for key, row in rows.items()} for name, rows in sections.items()}


def lengths_of(values: Values, seed: int = 0) -> LengthModel:
    """The answers' lengths."""
    return LengthModel(
        seed,
        num_samples=values["samples_per_prompt"],
        median_tokens=values["median_tokens"],
        sigma=values["sigma"],
        max_tokens=values["max_tokens"],
    )


def measured_mu(spec: EngineSpec, max_groups: int, lengths: LengthModel) -> float:
    """mu of a worker whose places are always taken, trajectories/s: the engine model, watched."""
    engine, num_samples = Engine(spec, max_groups, 0.0), len(lengths.tokens(0))
    for index in range(max_groups):
        engine.add(str(index), lengths.tokens(index))
    begun, ended, now_s, first_s = max_groups, 0, 0.0, 0.0
    while ended < MEASURED_GROUPS:
        now_s = engine.next_end_s()
        engine.advance(now_s)
        for _ in engine.take_ended():
            ended += 1
            engine.add(str(begun), lengths.tokens(begun))
            begun += 1
        if ended <= max_groups:
            first_s, skipped = now_s, ended
    return num_samples * (ended - skipped) / (now_s - first_s)


def peak_for(mu: float, values: Values) -> float:
    """The peak, tokens/s, at which a worker has that mu. Throughput is proportional to the peak."""
    spec = EngineSpec(1000.0, values["half_batch"])
    return 1000.0 * mu / measured_mu(spec, values["max_groups"], lengths_of(values))


def scenario(values: Values, **sections: Any) -> Scenario:
    """A scenario from the values that all claims name alike; `sections` replace or add to its sections."""
    tree: dict[str, Any] = {
        "name": "papers",
        "sampling": {
            "prompts_per_step": values["prompts_per_step"],
            "samples_per_prompt": values["samples_per_prompt"],
        },
        "lengths": {key: values[key] for key in ("median_tokens", "sigma", "max_tokens")},
        "learner": {"t_train_s": values["t_train_s"], "publish_s": 0.0, "checkpoint_s": 0.0},
        "run": {"hours": 10_000.0, "wait_limit_s": 1e6},
    }
    for name, section in sections.items():
        known = tree.get(name)
        tree[name] = {**known, **section} if isinstance(known, dict) else section
    return parse_scenario(tree)


def instance_type(values: Values, name: str, mu: float, **more: Any) -> Values:
    """Workers of one kind, with so much throughput."""
    return {
        "name": name,
        "peak_tokens_per_s": peak_for(mu, values),
        "half_batch": values["half_batch"],
        "max_groups": values["max_groups"],
        "boot_s": values["boot_s"],
        **more,
    }


def run(scenario: Scenario) -> Result:
    """Simulate."""
    return World(scenario).run()


def bubble(result: Result, warm_up_steps: int) -> float:
    """T_idle / (T_idle + T_train) of the learner after the first steps."""
    rows = result.steps[warm_up_steps:]
    idle_s = sum(row["t_idle_s"] for row in rows)
    return float(idle_s / (idle_s + sum(row["t_train_s"] for row in rows)))


def workers_for(mu_needed: float, mu: float) -> int:
    """The fewest equal workers that have it."""
    return math.ceil(mu_needed / mu - 1e-9)
