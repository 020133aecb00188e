"""Dollars that the provisioner saves: `python -m bench.cost [--json FILE] [--data DIR]`.

The real Fleet, Provisioner, Controller and ReplayBuffer run in the simulator, on a dated price list and three
recorded spot markets, and make a fixed number of steps. Their dollars are compared with

- (a) a fleet of one on-demand SKU, simulated in the same way: the cheapest such fleet that reaches mu_target,
  which is the bar, and the usual one, H100;
- (b) random activation (ECHO-2, 5.5.2, "w/o Cost"): the mean over seeds of fleets with the same target;
- (c) the clairvoyant optimum: at every moment the cheapest fleet of what there is then, changed at once and
  for nothing;
- (d) the optimum as a policy: the same integer programme, asked at every tick and obeyed at once, in the
  provisioner's world: with its estimates, boots, notices and back-off.

(b) and (c) pay for no boot, no wait and no lost work; the others do. Percentages are of the rollout fleet's
dollars; those of learner and fleet stand beside them. Assumed: cost_assumptions.yaml.
Everything here is simulated. The exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cost_account import Watch, account, mu_by_instance_type
from bench.cost_fleets import (
    HOUR_S,
    Priced,
    cheapest_fleets,
    cheapest_single,
    homogeneous,
    optimum,
    plan_counts,
    random_fleet,
    work_s,
)
from bench.cost_market import (
    Assumptions,
    Case,
    Listed,
    SpotMarket,
    listed,
    read_assumptions,
    scenario,
    snapshot_s,
    spot_market,
)
from bench.cost_papers import papers_own
from echo_planes.errors import DataError
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.instance_types import InstanceType
from echo_planes.fleet.prices import PriceRow, read_prices
from echo_planes.sim.scenario import Scenario
from echo_planes.sim.trace import LEARNER
from echo_planes.sim.world import World

DATA_DIR = Path(os.environ.get("ECHO_PLANES_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
PRICES = "gpu_prices/gpu_prices.csv"
PAPERS = "gpu_prices/papers.csv"
USUAL = "H100"
SENSITIVITY = (
    ("boot 60 s", {"boot_s": 60.0}),
    ("boot 600 s", {"boot_s": 600.0}),
    ("throughput x0.5", {"throughput": 0.5}),
    ("throughput x2", {"throughput": 2.0}),
    ("spot prices x0.5", {"spot_price": 0.5}),
    ("spot prices x2", {"spot_price": 2.0}),
    ("all spot instance types in step", {"in_step": True}),
    ("shifted by 1/3", {"shift": 1 / 3}),
    ("shifted by 2/3", {"shift": 2 / 3}),
)


@dataclass(frozen=True, slots=True)
class Run:
    """Cost of a fleet, and what it did. Simulated, or priced without friction."""

    name: str
    steps: int
    hours: float
    rollout_usd: float
    learner_usd: float
    bubble: float = 0.0
    workers: float = 0.0  # mean where priced, most at once where simulated
    t_bcast_s: float | None = None
    lost: int = 0  # workers
    usd_by_part: Mapping[str, float] = field(default_factory=dict)

    @property
    def per_step(self) -> float:
        """Dollars of the rollout fleet."""
        return self.rollout_usd / self.steps

    @property
    def total_per_step(self) -> float:
        return (self.rollout_usd + self.learner_usd) / self.steps


@dataclass(frozen=True, slots=True)
class Outcome:
    """One market: the provisioner's run and what it is compared with."""

    case: Case
    ours: Run
    single: Run  # (a) the bar
    usual: Run | None  # (a) the usual one
    drawn: Run  # (b)
    best: Run  # (c)
    policy: Run | None  # (d)
    beyond_best: Mapping[str, float]  # rollout dollars beyond those of (c), by cause
    boot_usd: float  # that (c) would pay if what it starts had to boot

    @property
    def below_single(self) -> float:
        return 1 - self.ours.per_step / self.single.per_step

    @property
    def above_best(self) -> float:
        return self.ours.per_step / self.best.per_step - 1

    def above(self, run: Run) -> tuple[float, float]:
        """Beyond another's dollars for a step: of the rollout fleet, and with the learner's."""
        return self.ours.per_step / run.per_step - 1, self.ours.total_per_step / run.total_per_step - 1


def simulate(name: str, what: Scenario) -> Run:
    """A simulated run; see `finished`."""
    return finished(name, World(what))


def finished(name: str, world: World) -> Run:
    """A simulated run to its end.

    Raises:
        DataError: it did not make its steps.
    """
    summary = world.run().summary
    if summary["status"] != "done":
        raise DataError(f"{name}: the simulated run ended with {summary['status']}: {summary['error']}")
    learner = sum(usd for sku, usd in summary["usd_by_sku"].items() if sku.split()[0] == LEARNER)
    return Run(
        name,
        steps=summary["steps"],
        hours=summary["seconds"] / HOUR_S,
        rollout_usd=summary["usd_total"] - learner,
        learner_usd=learner,
        bubble=summary["bubble_ratio"],
        workers=summary["workers_most"],
        t_bcast_s=summary["t_bcast_s_median"],
        lost=summary["workers_lost"],
        usd_by_part=summary["usd_by_part"],
    )


def frictionless(name: str, priced: Priced, assumptions: Assumptions, steps: int) -> Run:
    hours = priced.seconds / HOUR_S
    learner = assumptions.learner.usd_per_hour * hours
    return Run(name, steps, hours, priced.usd, learner, workers=priced.workers)


def provisioned(
    assumptions: Assumptions,
    instance_types: Sequence[Listed],
    market: SpotMarket,
    need: Need,
    steps: int,
    mode: str,
) -> tuple[Run, Watch]:
    """A run in the recorded market. It begins with the fleet that a plan for these quotas says.

    Args:
        mode: provisioned, or exact for (d).
    """
    first = plan_counts(market.instance_types, need)
    with tempfile.TemporaryDirectory() as folder:
        what = scenario(
            assumptions,
            [one.model for one in instance_types],
            first,
            mode=mode,
            steps=steps,
            market=market,
            folder=Path(folder),
        )
        world = World(what)
        watch = Watch(world, mu_by_instance_type(market.instance_types))
        return finished("provisioner" if mode == "provisioned" else "(d) optimum as a policy", world), watch


def steady(
    name: str,
    assumptions: Assumptions,
    instance_types: Sequence[Listed],
    instance_type: InstanceType,
    need: Need,
    steps: int,
) -> Run:
    """The run of a fleet of one on-demand instance type that does not change."""
    model = next(one.model for one in instance_types if one.instance_type is instance_type)
    counts = {instance_type.name: homogeneous(instance_type, need)}
    model = model.model_copy(update={"max_count": counts[instance_type.name]})
    what = scenario(assumptions, [model], counts, mode="fixed", steps=steps)
    return simulate(f"{name}: {counts[instance_type.name]} x {instance_type.name}", what)


def compare(
    assumptions: Assumptions,
    rows: Sequence[PriceRow],
    case: Case,
    data: Path,
    *,
    simulate_single: bool,
    most_steps: int | None = None,
) -> Outcome:
    """The provisioner and all that it is compared with, in one market.

    Args:
        simulate_single: simulate (a), and the usual fleet and (d) with it; otherwise (a) is priced without
            friction.
        most_steps: not more than so many; default: as many as the recording is long.
    """
    instance_types = listed(assumptions, rows, case)
    market = spot_market(assumptions, [one.instance_type for one in instance_types], case, data)
    length_s = max(trace.end_s for trace in market.traces.values())
    steps = min(int(length_s // assumptions.t_train_s), most_steps or sys.maxsize)
    ours, watch = provisioned(
        assumptions, instance_types, market, assumptions.need(0.0), steps, "provisioned"
    )
    need = assumptions.need(ours.t_bcast_s or 0.0)
    single = cheapest_single(market.instance_types, need)
    usual = policy = None
    if simulate_single:
        policy, _ = provisioned(assumptions, instance_types, market, assumptions.need(0.0), steps, "exact")
        alone = steady("(a) bar", assumptions, instance_types, single, need, steps)
        h100 = cheapest_single(
            [instance_type for instance_type in market.instance_types if instance_type.sku == USUAL], need
        )
        usual = steady("(a) usual", assumptions, instance_types, h100, need, steps)
    else:
        count, seconds = homogeneous(single, need), work_s(need, steps)
        usd = count * single.usd_per_hour * seconds / HOUR_S
        alone = frictionless(f"(a) {count} x {single.name}", Priced(usd, seconds), assumptions, steps)
    fleets = cheapest_fleets(market, need, steps)
    best = optimum(market.instance_types, fleets, install_s=snapshot_s(assumptions))
    seeds = range(assumptions.random_seeds)
    draws = [random_fleet(market, need, steps, random.Random(f"{assumptions.seed}/{n}")) for n in seeds]
    drawn = Priced(
        statistics.fmean(draw.usd for draw in draws),
        draws[0].seconds,
        workers=statistics.fmean(draw.workers for draw in draws),
    )
    return Outcome(
        case,
        ours,
        alone,
        usual,
        frictionless(f"(b) random, mean of {len(draws)}", drawn, assumptions, steps),
        frictionless("(c) clairvoyant optimum", best, assumptions, steps),
        policy,
        account(watch, fleets, ours.rollout_usd - best.usd),
        best.boot_usd,
    )


# --- what is printed -------------------------------------------------------------------------------


def show_outcome(outcome: Outcome) -> list[str]:
    """A table of one market."""
    ours = outcome.ours
    lines = [
        f"trace {outcome.case.trace}, SIMULATED: {ours.steps} steps",
        f"  {'fleet':<42}{'hours':>7}{'bubble':>8}{'workers':>8}{'rollout $/step':>15}{'learner':>9}"
        f"{'total':>8}   the provisioner is",
    ]
    for run in (ours, outcome.single, outcome.usual, outcome.drawn, outcome.best, outcome.policy):
        if run is None:
            continue
        change, total = outcome.above(run)
        beside = "" if run is ours else f"   {change:+.1%} (total {total:+.1%})"
        lines.append(
            f"  {run.name:<42}{run.hours:>7.2f}{run.bubble:>8.1%}{run.workers:>8.1f}{run.per_step:>15.3f}"
            f"{run.learner_usd / run.steps:>9.3f}{run.total_per_step:>8.3f}{beside}"
        )
    rollout = {part: usd for part, usd in ours.usd_by_part.items() if not part.startswith(LEARNER)}
    parts = ", ".join(f"{part} {usd / ours.rollout_usd:.1%}" for part, usd in rollout.items() if usd)
    lines.append(f"  of the provisioner's rollout dollars: {parts}; {ours.lost} workers lost without notice")
    causes = ", ".join(
        f"{cause} {usd / outcome.best.rollout_usd:+.1%}" for cause, usd in outcome.beyond_best.items()
    )
    lines.append(f"  beyond (c), in percent of its rollout dollars: {causes}")
    boots = outcome.boot_usd / outcome.best.rollout_usd
    lines.append(f"  if what (c) starts had to boot, it would cost {boots:.1%} more")
    return lines


def show_sensitivity(name: str, outcome: Outcome) -> str:
    ours = outcome.ours
    return (
        f"  {name:<26}{ours.per_step:>9.3f}{ours.bubble:>8.1%}{outcome.single.per_step:>9.3f}"
        f"{outcome.drawn.per_step:>9.3f}{outcome.best.per_step:>9.3f}{-outcome.below_single:>+9.1%}"
        f"{ours.per_step / outcome.drawn.per_step - 1:>+9.1%}{outcome.above_best:>+9.1%}"
    )


def judge(outcomes: Sequence[Outcome], assumptions: Assumptions) -> list[tuple[str, bool]]:
    """Each bar in each market."""
    bars, verdicts = assumptions.bars, []
    for outcome in outcomes:
        trace, below = outcome.case.trace, outcome.below_single
        verdicts.append(
            (
                f"{trace}: {below:.1%} below (a), at least {bars.below_on_demand:.0%}",
                below >= bars.below_on_demand,
            )
        )
        for run in (outcome.best, outcome.policy):
            if run is None:
                continue
            above, total = outcome.above(run)
            verdicts += [
                (
                    f"{trace}: {above:+.1%} of {run.name}, at most {bars.above_optimum:+.0%}",
                    above <= bars.above_optimum,
                ),
                (
                    f"{trace}: {total:+.1%} of {run.name} with the learner, "
                    f"at most {bars.total_above_optimum:+.0%}",
                    total <= bars.total_above_optimum,
                ),
            ]
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cost", description="What the provisioner saves.")
    parser.add_argument("--json", type=Path, help="write all figures as one JSON object")
    parser.add_argument(
        "--data", type=Path, default=DATA_DIR, help="default $ECHO_PLANES_DATA, else ../shared/data"
    )
    options = parser.parse_args(arguments)
    assumptions = read_assumptions()
    data: Path = options.data
    needed = (PRICES, PAPERS, *assumptions.traces.values())
    if missing := [name for name in needed if not (data / name).is_file()]:
        print(f"error: {data / missing[0]} is not there: set ECHO_PLANES_DATA or --data", file=sys.stderr)
        return 2
    rows = read_prices(data / PRICES)
    need = assumptions.need(0.0)
    print(
        f"SIMULATED. R = {need.per_step}, T_train = {need.t_train_s:.0f} s, S = {need.max_staleness}, "
        f"kappa = {need.kappa}; percentages are of the rollout fleet's dollars"
    )
    outcomes = []
    for trace in assumptions.traces:
        outcomes.append(compare(assumptions, rows, Case(trace), data, simulate_single=True))
        print("\n".join(show_outcome(outcomes[-1])), flush=True)
    first = next(iter(assumptions.traces))
    print(
        f"sensitivity, trace {first}, rollout $/step; (a) priced without friction\n"
        f"  {'':<26}{'ours':>9}{'bubble':>8}{'(a)':>9}{'(b)':>9}{'(c)':>9}"
        f"{'to (a)':>9}{'to (b)':>9}{'to (c)':>9}"
    )
    varied = {}
    for name, changes in SENSITIVITY:
        fields: dict[str, Any] = dict(changes)
        case = Case(first, **fields)
        varied[name] = compare(assumptions, rows, case, data, simulate_single=False, most_steps=30)
        print(show_sensitivity(name, varied[name]), flush=True)
    papers = papers_own(data / PAPERS)
    print("the same rule at the papers' own prices (papers.csv)")
    print("\n".join(f"  {what:<50}{ours:<50}paper: {theirs}" for what, ours, theirs in papers))
    verdicts = judge(outcomes, assumptions)
    print("\n".join(f"{'pass' if holds else 'MISSED'}  {text}" for text, holds in verdicts))
    if options.json:
        figures = {
            "simulated": True,
            "assumptions": assumptions.model_dump(),
            "outcomes": [asdict(outcome) for outcome in outcomes],
            "sensitivity": {name: asdict(outcome) for name, outcome in varied.items()},
            "papers": papers,
            "bars": dict(verdicts),
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(holds for _, holds in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
