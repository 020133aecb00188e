"""report.html: one self-contained page about a run, made from the files in its folder.

`python -m echo_planes.reporting.report FOLDER` makes it again. The page loads nothing from the network. It
escapes everything that comes from the run, model output above all, and its content policy allows only its
own script.
"""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from echo_planes.config.files import SETTINGS_BYTES, read_text
from echo_planes.config.plain_yaml import parse_yaml
from echo_planes.errors import ConfigError, DataError, EchoPlanesError
from echo_planes.reporting.formats import si
from echo_planes.reporting.html import page
from echo_planes.reporting.ledger import LEDGER_DETAILS, ledger_equation, reward_failures
from echo_planes.reporting.metrics import (
    SPARSITY_FILE,
    Aggregates,
    Record,
    number,
    read_events,
    read_metrics,
    read_rows,
    read_summary,
    write_atomic,
)
from echo_planes.reporting.parts import read_parts, whole_run
from echo_planes.reporting.sections.cards import CHARTS, StepCharts, told_events
from echo_planes.reporting.sections.charts import Series
from echo_planes.reporting.sections.dissemination import weights_values
from echo_planes.reporting.sections.fleet import fleet
from echo_planes.reporting.sections.learning import (
    drift_by_lag,
    pass_at_chart,
    reward_chart,
    reward_parts_chart,
)
from echo_planes.reporting.sections.money import dollars_by_name, dollars_by_part, spent_so_far, worker_rows
from echo_planes.reporting.sections.rollouts import read_rollouts, rollout_card, run_tokenizer
from echo_planes.reporting.sections.seeding import step_timeline

REPORT_FILE = "report.html"


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html from the files that the run has left there, and return its path.

    Raises:
        DataError: the folder is missing, or one of its files is damaged.
        ClusterError: the disk is full.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a run folder: it does not exist; give the folder of a run")
    path = folder / REPORT_FILE
    write_atomic(path, render(folder))
    return path


def render(folder: Path) -> str:
    """Return the page as text."""
    steps = read_metrics(folder)
    events = read_events(folder)
    config_path = folder / "config.yaml"
    config_text = read_text(config_path, SETTINGS_BYTES) if config_path.exists() else ""
    config = parse_config(config_text)
    summary = _complete(read_summary(folder), steps, config, read_parts(folder))
    charts = StepCharts(steps)
    return page(
        "report",
        run=folder.resolve().name,
        folder=shlex.quote(str(folder)),
        task=str(summary.get("task", "run")),
        model=str(summary.get("model", "")),
        status=str(summary["status"]),
        error=str(summary.get("error") or ""),
        f=defaultdict(lambda: None, {key: number(value) for key, value in summary.items()}),
        steps=charts,
        **CHARTS,
        evaluations=_evaluations(summary.get("evals", [])),
        ledger=_ledger(summary),
        **_learning(charts, steps, summary, config),
        **_spending(charts, summary),
        **weights_values(summary, read_rows(folder / SPARSITY_FILE)),
        **_rollouts(folder, config),
        seeded_step=step_timeline(steps),
        fleet=fleet(events, number(summary.get("seconds_last_part")) or 0.0),
        events=told_events(events, "worker "),
        config=config_text,
    )


def parse_config(text: str) -> Record:
    """Parse a run's config.yaml; {} if it holds no mapping.

    Raises:
        DataError: it is not YAML.
    """
    try:
        config = parse_yaml(text, "config.yaml of the run")
    except ConfigError as error:
        raise DataError(f"{error}; or take the file away") from error
    return config if isinstance(config, dict) else {}


def _setting(config: Record, group: str, key: str) -> Any:
    section = config.get(group)
    return section.get(key) if isinstance(section, dict) else None


def _complete(summary: Record, steps: Sequence[Record], config: Record, parts: Sequence[Record]) -> Record:
    """Return `summary`, completed from other files if the run has not ended, or not properly."""
    known = {key: value for key, value in summary.items() if value is not None}
    task = _setting(config, "task", "name")
    model = _setting(config, "model", "path")
    last = steps[-1] if steps else {}
    from_steps: Record = {"seconds": last.get("time_s"), "status": "unfinished", "task": task, "model": model}
    from_steps |= whole_run(parts) if parts else {}
    from_steps["seconds_last_part"] = known.get("seconds", last.get("time_s"))
    from_steps["max_staleness"] = _setting(config, "staleness", "max_staleness")
    for key in ("accepted", "trained", "dropped_stale", "buffered", *LEDGER_DETAILS):
        from_steps[key] = last.get(key)
    return {k: v for k, v in {**from_steps, **Aggregates(steps).summary(), **known}.items() if v is not None}


def _evaluations(evals: Sequence[Record]) -> str:
    """Return as text the number of evaluations, pass@n of the last, and what is peculiar about them."""
    words = [f"{len(evals)} evaluations"]
    if evals and (curve := evals[-1].get("pass_at")):
        n, value = next(reversed(curve.items()))
        words.append(f"last pass@{n} {number(value) or 0.0:.3f}")
    if mixed := sum(e.get("newest_version") is not None for e in evals):
        words.append(f"{mixed} of more than one version")
    if unscored := sum(number(e.get("num_unscored")) or 0.0 for e in evals):
        words.append(f"{unscored:,.0f} answers without a reward left out")
    return " · ".join(words)


def _ledger(summary: Record) -> str:
    failures = reward_failures(summary)
    told = f"; rewards that failed, so that their groups were not trained: {failures}" if failures else ""
    return ledger_equation(summary) + told


def _mismatches(charts: StepCharts) -> list[Series]:
    """Return the drift of all tokens and, where rollouts are sparse, the part that audits found."""
    parts = [Series("all tokens", charts.column("mismatch_mean"), 5)]
    sparse = charts.column("mismatch_sparse")
    return (
        parts if not any(sparse) else [*parts, Series("sparse attention alone (audits)", sparse, 5, "faint")]
    )


def _learning(charts: StepCharts, steps: Sequence[Record], summary: Record, config: Record) -> Record:
    """Return the template's values about learning, workers and start-up."""
    workers = summary.get("workers", [])
    startup = summary.get("seconds_startup", {}).items()
    return {
        "reward_chart": reward_chart,
        "reward_parts_chart": reward_parts_chart,
        "pass_at_chart": pass_at_chart,
        "evals": summary.get("evals", []),
        "by_lag": [*drift_by_lag(steps), *_mismatches(charts)],
        "drift_target": number(_setting(config, "learner", "drift_target")) or 0.0,
        "worker_rows": worker_rows(workers),
        "worker_tokens": [(str(w.get("id", "?")), number(w.get("tokens")) or 0.0) for w in workers],
        "show_tokens": lambda tokens: f"{si(tokens)} tokens",
        "startup": [(name, number(seconds) or 0.0) for name, seconds in startup],
    }


def _spending(charts: StepCharts, summary: Record) -> Record:
    """Return the template's values about dollars."""
    usd = charts.column("usd")
    return {
        "step_cost": Series("$ per step", [None, *usd[1:]] if len(usd) > 1 else usd, 1),
        "spent": Series("spent", spent_so_far(usd), 1, pool="last"),
        "by_part": dollars_by_part(summary),
        "by_sku": dollars_by_name(summary, "usd_by_sku"),
    }


def _rollouts(folder: Path, config: Record) -> Record:
    found = read_rollouts(folder)
    tokenizer = run_tokenizer(config) if found.first else None
    pairs = zip_longest(found.first, found.last)  # the first step on the left, the last one on the right
    cards = [rollout_card(row, tokenizer) for pair in pairs for row in pair if row is not None]
    return {"rollouts": cards, "problem": found.problem}


def main(arguments: Sequence[str]) -> int:
    """Write the report of the run folder in the only argument; print its path, return the exit status."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print("usage: python -m echo_planes.reporting.report FOLDER", file=sys.stderr)
        return 2
    try:
        print(write_report(Path(arguments[0])))
    except EchoPlanesError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
