"""`python -m echo_planes.simulate scenario=NAME|FILE.yaml key=value ...`: a whole run in virtual time.

The decision code is the real one; learner, engines, links, prices, spot markets and faults are models. All
output says that it is simulated.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from echo_planes.config.files import user_path
from echo_planes.config.kv_schedule import Schedule
from echo_planes.errors import ClusterError, ConfigError, EchoPlanesError, RunError, UserError
from echo_planes.loop.sparsity import read_schedule
from echo_planes.reporting.formats import show_percent, show_usd
from echo_planes.reporting.ledger import ledger_equation
from echo_planes.reporting.metrics import write_atomic
from echo_planes.rollout.sparsity.cost import mean_read_tokens
from echo_planes.sim.report import render
from echo_planes.sim.scenario import Scenario, describe, dump_scenario, load_scenario, scenario_names
from echo_planes.sim.trace import MARK, Record
from echo_planes.sim.world import Result, World

SEEN_PROMPTS = 64  # whose answers tell the mean of what is read

USAGE = """usage: python -m echo_planes.simulate [--json] [--print] [--help] scenario=NAME|FILE.yaml ...

  python -m echo_planes.simulate scenario=steady                     ten workers, a day
  python -m echo_planes.simulate scenario=steady instance_types.0.count=8    ... two fewer
  python -m echo_planes.simulate scenario=steady sparse=FILE.yaml instance_types.0.kv_share=0.5
                                        its engines decode by a schedule; an upper bound of what that saves
  python -m echo_planes.simulate scenario=faults out=FOLDER          write trace.jsonl, report.html there, too

  --json    print the summary as JSON
  --print   show the resolved scenario and exit
  --help    show this, with every key
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, and return the exit status. A person's mistake is one line on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or "--help" in words or "-h" in words:
            _print(f"{USAGE}\nscenarios: {', '.join(scenario_names())}\n\n{describe()}")
            return 0 if words else UserError.exit_status
        outs = [word.removeprefix("out=") for word in words if word.startswith("out=")]
        flags = {word for word in words if word in ("--json", "--print")}
        schedules = [word.removeprefix("sparse=") for word in words if word.startswith("sparse=")]
        own = (*flags, *(f"out={one}" for one in outs), *(f"sparse={one}" for one in schedules))
        scenario = load_scenario([word for word in words if word not in own])
        if schedules:
            scenario = _sparse(scenario, read_schedule(schedules[-1]))
        if "--print" in flags:
            _print(dump_scenario(scenario).rstrip())
            return 0
        result = World(scenario).run()
        if outs:
            write_result(user_path(outs[-1]), result, dump_scenario(scenario))
        _print(json.dumps(result.summary, indent=2) if "--json" in flags else show(result.summary))
        if result.summary["status"] == "failed":
            raise RunError(f"the simulated run failed: {result.summary['error']}")
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except EchoPlanesError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _sparse(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Return the scenario with engines that decode by a schedule of KV budgets (Sparrow, equations 2 and 3).

    Raises:
        ConfigError: no engine of the scenario spends time on its KV cache.
    """
    types, seeding = scenario.instance_types, scenario.seeding
    if not any(one.kv_share for one in types) and not seeding.kv_share:
        raise ConfigError(
            "sparse: every kv_share is 0, so nothing would be saved; set instance_types.0.kv_share to the "
            "share of a sample's time that reading its KV takes"
        )
    model = scenario.length_model()
    lengths = [length for prompt in range(SEEN_PROMPTS) for length in model.tokens(prompt)]
    read, whole = (
        sum(mean_read_tokens(one, scenario.lengths.prompt_tokens, length) * length for length in lengths)
        for one in (schedule, None)
    )
    share = {"read_share": read / whole}
    changed = {
        "instance_types": [one.model_copy(update=share) for one in types],
        "seeding": seeding.model_copy(update=share),
    }
    return scenario.model_copy(update=changed)


def write_result(folder: Path, result: Result, scenario_text: str) -> None:
    """Make a folder if necessary, and write trace.jsonl, summary.json, scenario.yaml and report.html to it.

    Raises:
        ClusterError: the folder cannot be made, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"out={folder} cannot be made ({error.strerror}): give another folder") from error
    write_atomic(folder / "trace.jsonl", result.lines())
    write_atomic(folder / "summary.json", json.dumps(MARK | result.summary, indent=2) + "\n")
    write_atomic(folder / "scenario.yaml", f"# simulated\n{scenario_text}")
    write_atomic(folder / "report.html", render(result, scenario_text))


def show(summary: Record) -> str:
    """Return the summary as text for a terminal."""
    bcast, per_step, mu_min = summary["t_bcast_s_median"], summary["usd_per_step"], summary["mu_min"]
    skus = ", ".join(f"{name} {show_usd(usd)}" for name, usd in summary["usd_by_sku"].items())
    wasted = sum(summary[f"{fate}_tokens"] for fate in ("lost", "stale", "uninformative", "refused"))
    lines = [
        f"SIMULATED: {summary['scenario']}, seed {summary['seed']}: {summary['status']}",
        f"  steps      {summary['steps']:,} in {summary['seconds'] / 3600:,.2f} virtual hours",
        f"  bubble     {show_percent(summary['bubble_ratio'])} of the learner's time",
        f"  staleness  max {summary['max_staleness_observed']} of S = {summary['max_staleness']}, "
        f"mean {summary['staleness_mean']:.2f}, kappa {summary['publish_every']}",
        f"  T_bcast    {'-' if bcast is None else f'{bcast:,.1f} s'} (median)",
        f"  rollouts   {summary['trajectories_per_s']:,.3f} trajectories/s accepted; "
        f"mu_min {'-' if mu_min is None else f'{mu_min:,.3f}'}",
        f"  ledger     {ledger_equation(summary)}; {summary['lost_trajectories']} lost",
        f"  tokens     {summary['trained_tokens']:,} trained, {wasted:,} wasted, "
        f"{summary['continued_tokens']:,} continued elsewhere",
        f"  workers    {summary['workers_most']:,} at most, {summary['workers_lost']:,} lost",
        f"  dollars    {show_usd(summary['usd_total'])}"
        + ("" if per_step is None else f", {show_usd(per_step)} a step")
        + f", {show_percent(summary['wasted_share'])} wasted ({skus})",
    ]
    for fault in summary["faults"]:
        after, drop = fault["recovered_after_s"], show_percent(fault["capacity_drop"])
        made_good = "never" if after is None else f"after {after:,.0f} s"
        lines.append(
            f"  fault      {fault['what']} at {fault['time_s']:,.0f} s: {drop} of the capacity, "
            f"made good {made_good}"
        )
    return "\n".join(lines)


def _print(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, as in `--help | head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    # The simulation makes almost no reference cycles; the default thresholds cost an eighth of its time.
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    sys.exit(main())
