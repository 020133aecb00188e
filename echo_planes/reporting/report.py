"""report.html: one self-contained page about a run, made from the files in its folder.

`python -m echo_planes.reporting.report FOLDER` makes it again. Nothing is loaded from the network, and
everything that comes from the run (model output above all) is escaped; a content policy lets only this
page's own script run.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from echo_planes.config.files import SETTINGS_BYTES, read_text
from echo_planes.config.plain_yaml import parse_yaml
from echo_planes.errors import ConfigError, DataError, EchoPlanesError
from echo_planes.reporting.ledger import LEDGER_DETAILS
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
from echo_planes.reporting.sections import sections
from echo_planes.reporting.sections.charts import show_percent, show_usd
from echo_planes.reporting.sections.dissemination import dissemination
from echo_planes.reporting.sections.drift import drift, signal
from echo_planes.reporting.sections.fleet import fleet
from echo_planes.reporting.sections.money import money
from echo_planes.reporting.sections.rollouts import read_rollouts, rollout_card, run_tokenizer
from echo_planes.reporting.sections.style import CSS, JS

REPORT_FILE = "report.html"


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html from whatever the run has left there, and return its path.

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
    """The page as text."""
    steps = read_metrics(folder)
    events = read_events(folder)
    config_path = folder / "config.yaml"
    config_text = read_text(config_path, SETTINGS_BYTES) if config_path.exists() else ""
    config = parse_config(config_text)
    summary = _complete(read_summary(folder), steps, config, read_parts(folder))
    title = f"{summary.get('task', 'run')} · {summary.get('model', '')}"
    body = [_header(folder, summary)]
    if steps:
        body += [sections.learning(steps, summary), drift(steps, _setting(config, "learner", "drift_target"))]
        body += [signal(steps), sections.asynchrony(steps, summary)]
    sparsity = read_rows(folder / SPARSITY_FILE)
    last_part_s = number(summary.get("seconds_last_part")) or 0.0
    body += [sections.throughput(steps, summary), fleet(events, last_part_s)]
    body += [money(steps, summary), dissemination(summary, sparsity)]
    body += [sections.data(steps, summary, events)]
    body += [_rollouts(folder, config), _config(config_text)]
    policy = (
        f"default-src 'none'; style-src '{csp_hash(CSS)}'; script-src '{csp_hash(JS)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>"
        f"{''.join(body)}"
        "<footer>Made by echo_planes from the files of this run folder.</footer>"
        f'</main><div id="tip"></div><script>{JS}</script></body></html>\n'
    )


def csp_hash(text: str) -> str:
    """Name of an inline style sheet or script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def parse_config(text: str) -> Record:
    """A run's config.yaml.

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
    """`summary`, with what a run that has not ended (or ended badly) did not write."""
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


# --- header --------------------------------------------------------------------------------------


def _header(folder: Path, summary: Record) -> str:
    status = str(summary["status"])
    seconds = number(summary.get("seconds"))
    took = f" in {seconds:,.1f} s" if seconds is not None else ""
    if (parts := number(summary.get("parts")) or 1) > 1:
        took += f" and {parts:.0f} parts"
    error = f'<p class="error">{escape(str(summary["error"]))}</p>' if summary.get("error") else ""
    # Of a run that collapsed nothing else is worth as much as to know why.
    first, after = (error, "") if status == "collapsed" else ("", error)
    kind = "done" if status == "done" else "failed" if status in ("failed", "collapsed") else ""
    return (
        f'<header>{first}<p class="over">echo_planes run {escape(folder.resolve().name)}</p>'
        f'<div class="line"><h1>{escape(str(summary.get("task", "run")))}</h1>'
        f'<span class="pill {kind}">{escape(status)}</span></div>'
        f'<p class="sub"><code>{escape(str(summary.get("model", "unknown model")))}</code>, '
        f"{number(summary.get('steps')) or 0:,.0f} learner steps{took}. All rollouts: "
        f"<code>python -m echo_planes.view {escape(shlex.quote(str(folder)))}</code></p>{after}"
        f'<div class="figures">{"".join(_figures(summary))}</div></header>'
    )


def _figures(summary: Record) -> list[str]:
    get = {key: number(value) for key, value in summary.items()}

    def shown(key: str, spec: str = ",.0f") -> str:
        value = get.get(key)
        return "-" if value is None else format(value, spec)

    steps, seconds, usd = get.get("steps"), get.get("seconds"), get.get("usd_total")
    tokens, bubble = get.get("tokens_trained"), get.get("bubble_ratio")
    bound, stale = get.get("max_staleness"), get.get("max_staleness_observed")
    mismatches, lost = get.get("digest_mismatches"), get.get("lost_trajectories")
    duplicates = get.get("duplicate_trajectories")
    intact = None if lost is None or duplicates is None else lost + duplicates == 0
    # A run without steps has not kept the bound: it has not been put to the test.
    within = None if bound is None or stale is None or not (steps or stale) else stale <= bound
    install = get.get("install_seconds_mean")
    pace = f"{seconds / steps:.3g} s per step, start-up included" if steps and seconds else ""
    prices = []
    if usd is not None and steps:
        prices.append(f"{show_usd(usd / steps)} / step")
    if usd is not None and tokens:
        prices.append(f"{show_usd(usd / tokens * 1e6)} / M tokens")
    if (wasted := get.get("wasted_share")) is not None:
        prices.append(f"{show_percent(wasted)} wasted")
    return [
        _figure(
            "Reward",
            shown("reward_last", ".3f"),
            "first and last tenth of the steps",
            before=shown("reward_first", ".3f"),
        ),
        _figure(
            "Held-out accuracy",
            shown("eval_last", ".3f"),
            _evaluations(summary),
            before=shown("eval_first", ".3f"),
        ),
        _figure("Steps", shown("steps"), pace),
        _figure("Cost", "-" if usd is None else show_usd(usd), " · ".join(prices)),
        _figure(
            "Staleness, max",
            f"{shown('max_staleness_observed')} of {shown('max_staleness')}",
            f"mean {shown('staleness_mean', '.2f')}, published every {shown('publish_every')}",
            within,
        ),
        _figure(
            "Learner bubble", "-" if bubble is None else show_percent(bubble), "share of time spent waiting"
        ),
        _figure(
            "Digest mismatches",
            shown("digest_mismatches"),
            f"{shown('versions_published')} versions"
            + (f", {install:.2g} s per install" if install is not None else " published"),
            None if mismatches is None else mismatches == 0,
        ),
        _figure(
            "Lost / duplicate",
            f"{shown('lost_trajectories')} / {shown('duplicate_trajectories')}",
            f"of {shown('accepted')} accepted trajectories",
            intact,
        ),
    ]


def _evaluations(summary: Record) -> str:
    """Number of evaluations, pass@n of the last one, and the number with more than one version."""
    evals = summary.get("evals", [])
    words = [f"{len(evals)} evaluations"]
    if evals and (curve := evals[-1].get("pass_at")):
        n, value = next(reversed(curve.items()))
        words.append(f"last pass@{n} {number(value) or 0.0:.3f}")
    if mixed := sum(e.get("newest_version") is not None for e in evals):
        words.append(f"{mixed} of more than one version")
    return " · ".join(words)


def _figure(name: str, value: str, more: str, good: bool | None = None, before: str = "") -> str:
    kind = "" if good is None else " good" if good else " bad"
    start = f'<span class="from">{escape(before)} → </span>' if before else ""
    return (
        f'<div class="figure"><div class="name">{escape(name)}</div>'
        f'<div class="value{kind}">{start}{escape(value)}</div><div class="more">{escape(more)}</div></div>'
    )


def _rollouts(folder: Path, config: Record) -> str:
    rollouts = read_rollouts(folder)
    if not rollouts.first and not rollouts.problem:
        return ""
    tokenizer = run_tokenizer(config)
    scale = "".join(f'<span class="tok h{level}">&nbsp;</span>' for level in range(0, 10, 2))
    note = (
        f'<p class="scale">Shade: probability of the token when it was sampled, from 1 {scale} to 0. '
        "A bar marks where newer weights took over.</p>"
    )
    if rollouts.problem:
        note += f'<p class="scale">{escape(rollouts.problem)}</p>'
    cards = [rollout_card(row, tokenizer) for pair in _pairs(rollouts.first, rollouts.last) for row in pair]
    return f'<section><h2>Sample rollouts</h2>{note}<div class="grid">{"".join(cards)}</div></section>'


def _pairs(first: list[Record], last: list[Record]) -> list[list[Any]]:
    """First steps on the left, last steps on the right."""
    longest = max(len(first), len(last))
    return [[*first[i : i + 1], *last[i : i + 1]] for i in range(longest)]


def _config(text: str) -> str:
    if not text:
        return ""
    return (
        '<section><h2>Configuration</h2><details class="card"><summary>config.yaml</summary>'
        f"<pre>{escape(text)}</pre></details></section>"
    )


def main(arguments: Sequence[str]) -> int:
    """Command line: one argument, the run folder. Prints the report's path."""
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
