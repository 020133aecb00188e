"""Terminal view of a run: start-up phases, a live line on a tty, one plain line per step elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from echo_planes.cluster.clock import Clock, MonotonicClock
from echo_planes.reporting.formats import ranges, show_usd
from echo_planes.reporting.ledger import ledger_equation, reward_failures
from echo_planes.reporting.metrics import number, step_fields, step_line

BAR_CELLS = 16
TICK_S = 10.0  # between two looks at the open start-up phases
TTY_TICK_S = 1.0  # between two updates of the last line, on a tty
ERASE_LINE = "\r\x1b[2K"


class View:
    """Shows one run on `stream`.

    Args:
        stream: where to write, usually sys.stdout.
        total_steps: learner steps of the whole run.
        is_tty: rewrite the last line in place; otherwise only whole lines are written.
        clock: seconds; the view counts from its own construction.
    """

    def __init__(self, stream: TextIO, total_steps: int, is_tty: bool, clock: Clock | None = None) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._is_tty = is_tty
        self._clock = clock or MonotonicClock()
        self._start_s = self._clock.now_s()
        self._open_phases: list[str] = []
        self._has_begun = False  # steps are shown
        self._lock = threading.RLock()  # the thread of `ticking` writes beside the main thread
        self._told: tuple[list[str], float] = ([], 0.0)  # phases that were last said to be open, and when
        self._live = ""  # what the tty's last line shows now
        self._has_blocks = _encodes(stream, "█░")
        self.phase_seconds: dict[str, float] = {}  # of a start-up phase, its first time

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a start-up phase while it lasts, then its duration. Phases may overlap."""
        began_s = self._clock.now_s()
        with self._lock:
            self._open_phases.append(name)
            if not self._is_tty:
                self._line(f"{self._stamp()} {name} ...")
            self._show_phases()
        outcome = "failed"
        try:
            yield
            outcome = "ready"
        except asyncio.CancelledError:
            outcome = "not needed any more"
            raise
        finally:
            seconds = self._clock.now_s() - began_s
            with self._lock:
                self._open_phases.remove(name)
                if outcome == "ready":
                    self.phase_seconds.setdefault(name, round(seconds, 3))
                self._live = ""
                self._line(f"{self._stamp()} {name} ... {outcome}, {seconds:.1f} s")
                self._show_phases()

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Show at intervals, from a thread, which start-up phases are open."""
        done = threading.Event()
        interval_s = TTY_TICK_S if self._is_tty else TICK_S

        def tell() -> None:
            while not done.wait(interval_s):
                self.tick()

        thread = threading.Thread(target=tell, name="start-up", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(TICK_S)

    def tick(self) -> None:
        """Show the open phases with the elapsed time; do nothing once steps are shown.

        A line that says the same as the last one comes when twice the time of that one has passed.
        """
        with self._lock:
            if self._has_begun or not self._open_phases:
                return
            elapsed_s = self._clock.now_s() - self._start_s
            phases, told_s = self._told
            if self._is_tty:
                self._show_phases()
            elif phases != self._open_phases or elapsed_s >= 2 * told_s:
                self._told = [*self._open_phases], elapsed_s
                self._line(f"{self._stamp()} waiting for: {', '.join(self._open_phases)}")

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show one learner step (`step` counts completed steps, 1 to total_steps)."""
        with self._lock:
            self._has_begun = True
            self._step(metrics)

    def event(self, text: str) -> None:
        """Show one line about an event; the live line stays below it."""
        self._line(f"{self._stamp()} {text}")

    def final(self, summary: Mapping[str, Any], report: Path | None = None, go_on: str = "") -> None:
        """Show the closing block: results, staleness, cost, the report's path, and how to continue."""
        if self._live:
            self._write("\n")
            self._live = ""
        for line in closing_lines(summary, report, self._total_steps, go_on):
            self._line(line)

    def _step(self, metrics: Mapping[str, Any]) -> None:
        if not self._is_tty:
            self._line(step_line(metrics, self._total_steps))
            return
        completed = number(metrics.get("step")) or 0.0
        done = round(BAR_CELLS * min(1.0, completed / max(1, self._total_steps)))
        full, empty = ("█", "░") if self._has_blocks else ("#", ".")
        columns = shutil.get_terminal_size().columns - 1
        line = full * done + empty * (BAR_CELLS - done)
        for part in step_fields(metrics, self._total_steps):
            if len(line) + 2 + len(part) > columns:
                break
            line += "  " + part
        self._live = line
        self._write(ERASE_LINE + line)

    def _stamp(self) -> str:
        return f"[{self._clock.now_s() - self._start_s:6.1f} s]"

    def _show_phases(self) -> None:
        if self._is_tty and self._open_phases:
            columns = shutil.get_terminal_size().columns - 1
            self._live = f"{self._stamp()} {', '.join(self._open_phases)} ..."[:columns]
            self._write(ERASE_LINE + self._live)

    def _line(self, text: str) -> None:
        line = "".join(character if character.isprintable() else " " for character in text)
        with self._lock:
            self._write(f"{ERASE_LINE}{line}\n{self._live}" if self._is_tty else line + "\n")

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
        self._stream.flush()


def closing_lines(
    summary: Mapping[str, Any], report: Path | None, total_steps: int, go_on: str = ""
) -> list[str]:
    """Return `summary` (of summary.json) as a short block of text; `go_on`: how to continue, if possible."""

    def show(key: str, spec: str = ",.0f", scale: float = 1.0) -> str:
        value = number(summary.get(key))
        return "-" if value is None else format(value * scale, spec)

    def dollars(key: str) -> str:
        value = number(summary.get(key))
        return "$-" if value is None else show_usd(value)

    cost = (
        f"${show('usd_total', '.4f')}: {dollars('usd_per_step')} a step, "
        f"{dollars('usd_per_million_tokens')} per million tokens"
    )
    if number(summary.get("uninformative")):  # otherwise both prices are nearly the same
        cost += f", {dollars('usd_per_million_generated_tokens')} per million generated"
    cost += f"; {show('wasted_share', '.1f', 100.0)} % of it wasted (booting, waiting, tokens not trained)"
    if number(summary.get("usd_total")) == 0.0:
        cost = "none: no price is set (usd_per_hour of learner, fleet.workers), or nothing had started"
    status = summary.get("status", "unknown")
    of_part = ""
    if (parts := number(summary.get("parts")) or 1) > 1:
        of_part = f" ({show('seconds_last_part', '.1f')} s of it in the last of {parts:.0f} parts)"
    of_all = "" if number(summary.get("steps")) == total_steps else f" of {total_steps:,}"
    lines = [
        "",
        f"{status}: {summary.get('task', '-')} with {summary.get('model', '-')}, "
        f"{show('steps')}{of_all} steps in {show('seconds', '.1f')} s{of_part}",
    ]
    first_eval = f"{show('eval_first', '.3f')} -> " if len(summary.get("evals", [])) > 1 else ""
    if summary.get("error"):
        label = {"spent": "budget", "stopped": "by"}.get(status, "error")
        lines.append(f"  {label:9s}  {summary['error']}")
    lines += [
        f"  eval       {first_eval}{show('eval_last', '.3f')} held-out accuracy{_pass_at(summary)}"
        f"{_left_out(summary)}",
        f"  reward     {show('reward_first', '.3f')} -> {show('reward_last', '.3f')}",
        f"  staleness  mean {show('staleness_mean', '.2f')}, max {show('max_staleness_observed')} "
        f"(bound {show('max_staleness')})",
        f"  drift      mean {show('drift_mean', '.3f')} nats, rate factor at least "
        f"{show('rate_factor_min', '.3g')}; of the tokens {show('tokens_clipped_share', '.2f', 100.0)} % "
        f"clipped, {show('tokens_masked_share', '.2f', 100.0)} % masked, "
        f"{show('tokens_truncated_share', '.2f', 100.0)} % truncated",
        f"  bubble     {show('bubble_ratio', '.1f', 100.0)} % of the learner's time",
        f"  tokens     {show('tokens_trained')} trained",
        f"  cost       {cost}",
        f"  weights    {show('versions_published')} versions published, "
        f"{show('digest_mismatches')} digest mismatches{_unstored(summary)}",
        f"  ledger     {ledger_equation(summary)}; {show('lost_trajectories')} lost, "
        f"{show('duplicate_trajectories')} duplicates",
    ]
    if failures := reward_failures(summary):
        lines.append(f"  rewards    {failures}; their groups were not trained")
    if report is not None:
        lines.append(f"  report     {report}")
    if go_on:
        lines.append(f"  go on      {go_on}")
    return lines


def _left_out(summary: Mapping[str, Any]) -> str:
    """Return as text how many answers of the evaluations have no reward; "" if none."""
    evals = summary.get("evals", [])
    unscored = sum(number(e.get("num_unscored")) or 0.0 for e in evals)
    return (
        f"; {unscored:,.0f} answers of {len(evals)} evaluations without a reward left out" if unscored else ""
    )


def _unstored(summary: Mapping[str, Any]) -> str:
    """Return as text which versions the store lacks; "" if none."""
    missing = ranges(map(int, summary.get("versions_unstored", [])))
    return f"; not in the store: {missing}" if missing else ""


def _pass_at(summary: Mapping[str, Any]) -> str:
    """Return pass@n of the first and the last evaluation as text; "" unless n is more than 1."""
    curves = [e["pass_at"] for e in summary.get("evals", []) if e.get("pass_at")]
    if not curves or len(curves[-1]) < 2:
        return ""
    n, last = next(reversed(curves[-1].items()))
    if len(curves) == 1:
        return f", pass@{n} {last:.3f}"
    first = number(curves[0].get(n))
    return f", pass@{n} {'-' if first is None else format(first, '.3f')} -> {last:.3f}"


def _encodes(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
