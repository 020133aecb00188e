"""metrics.py and view.py: what a run writes down, and what a person reads in the terminal."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from echo_planes.cluster.clock import ManualClock
from echo_planes.errors import ClusterError, DataError
from echo_planes.reporting import terminal
from echo_planes.reporting.formats import show_usd
from echo_planes.reporting.metrics import (
    GAUGES,
    Aggregates,
    MetricsWriter,
    read_events,
    read_metrics,
    read_summary,
    step_line,
    write_atomic,
)
from echo_planes.reporting.terminal import ERASE_LINE, View, closing_lines

FULL_DISK = Path("/dev/full")
needs_full_disk = pytest.mark.skipif(not FULL_DISK.exists(), reason="no /dev/full on this system")


def a_step(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "policy_version": step,
        "reward_mean": 0.5,
        "correct_mean": 0.25,
        "staleness_max": 2,
        "staleness_mean": 1.5,
        "t_train_s": 0.6,
        "t_idle_s": 0.2,
        "tokens": 1000,
        "tokens_per_s": 2134.4,
        "usd": 0.0123,
        "bubble_ratio": 0.08,
        **values,
    }


# --- the files -----------------------------------------------------------------------------------


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run")
    writer.step(a_step(1))
    writer.step(a_step(2, reward_mean=0.75))
    writer.event(1.23456, "worker lost", "killed", worker="w1")
    writer.event(2.0, "publication", "patch", version=7)

    assert read_metrics(tmp_path / "run") == [a_step(1), a_step(2, reward_mean=0.75)]
    assert read_events(tmp_path / "run") == [
        {"time_s": 1.235, "kind": "worker lost", "text": "killed", "worker": "w1"},
        {"time_s": 2.0, "kind": "publication", "text": "patch", "version": 7},
    ]


def test_every_line_is_on_disk_before_the_next_call(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.step(a_step(step))
        assert (tmp_path / "metrics.jsonl").read_text().count("\n") == step


def test_non_finite_numbers_become_null_at_any_depth(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.step({"step": 1, "loss": float("nan"), "parts": {"a": [float("inf"), 1.0]}})
    writer.write_summary({"loss": float("-inf")})

    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "loss": None,
        "parts": {"a": [None, 1.0]},
    }
    assert read_summary(tmp_path) == {"loss": None}


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.step(a_step(1))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    assert read_metrics(tmp_path) == [a_step(1)]

    MetricsWriter(tmp_path).step(a_step(2))
    assert read_metrics(tmp_path) == [a_step(1), a_step(2)]


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_metrics(tmp_path)


def test_steps_made_again_after_a_resume_replace_the_abandoned_ones(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.step(a_step(step, usd=1.0))
    resumed = MetricsWriter(tmp_path)
    resumed.step(a_step(2, usd=5.0))

    assert [(s["step"], s["usd"]) for s in read_metrics(tmp_path)] == [(1, 1.0), (2, 5.0)]


def test_a_resumed_writer_goes_on_counting(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).step(a_step(1, tokens=10))
    resumed = MetricsWriter(tmp_path)
    resumed.step(a_step(2, tokens=5))
    assert resumed.aggregates.tokens_trained == 15


def test_a_summary_that_fails_leaves_the_old_one_whole(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write_summary({"status": "stopped"})
    with pytest.raises(TypeError):
        writer.write_summary({"status": object()})
    writer.write_summary({"status": "done"})
    assert read_summary(tmp_path) == {"status": "done"}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@needs_full_disk
def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to(FULL_DISK)
    with pytest.raises(ClusterError, match=r"metrics\.jsonl: the disk is full") as caught:
        writer.step(a_step(1))
    assert "\n" not in str(caught.value)
    assert writer.aggregates.num_steps == 0


@needs_full_disk
def test_a_full_disk_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / ".page.tmp").symlink_to(FULL_DISK)
    with pytest.raises(ClusterError, match="the disk is full"):
        write_atomic(tmp_path / "page", "x" * 100_000)
    assert list(tmp_path.iterdir()) == []


# --- aggregates ----------------------------------------------------------------------------------


def test_reward_first_and_last_are_means_of_a_tenth() -> None:
    steps = [a_step(i, reward_mean=float(i)) for i in range(1, 31)]
    totals = Aggregates(steps)
    assert totals.reward_first == pytest.approx(2.0)
    assert totals.reward_last == pytest.approx(29.0)


def test_bubble_weighs_seconds_not_steps() -> None:
    totals = Aggregates([a_step(1, t_idle_s=3.0, t_train_s=1.0), a_step(2, t_idle_s=0.0, t_train_s=8.0)])
    assert totals.bubble_ratio == pytest.approx(3 / 12)


def test_no_steps_say_nothing() -> None:
    assert Aggregates().summary() == {
        "steps": 0,
        "reward_first": None,
        "reward_last": None,
        "staleness_mean": None,
        "max_staleness_observed": 0,
        "bubble_ratio": None,
        "tokens_trained": 0,
        "usd_total": 0.0,
        "drift_mean": None,
        "rate_factor_min": None,
        "updates_skipped": 0,
        "tokens_clipped_share": None,
        "tokens_masked_share": None,
        "tokens_truncated_share": None,
    }


def test_what_drift_came_to_weighs_tokens_and_leaves_out_what_was_not_measured() -> None:
    nothing = {"mismatch_mean": None, "clip_fraction": None, "masked_fraction": None}
    steps = [
        a_step(
            1, tokens_scored=100, mismatch_mean=0.1, clip_fraction=0.5, rate_factor=0.4, updates_skipped=1
        ),
        a_step(2, tokens_scored=0, rate_factor=0.6, updates_skipped=2, **nothing),
        a_step(3, tokens_scored=300, mismatch_mean=0.3, clip_fraction=0.1, truncated_fraction=0.2),
    ]
    summary = Aggregates(steps).summary()
    assert summary["drift_mean"] == pytest.approx(0.2)
    assert (summary["rate_factor_min"], summary["updates_skipped"]) == (0.4, 3)
    assert summary["tokens_clipped_share"] == pytest.approx((0.5 * 100 + 0.1 * 300) / 400)
    assert summary["tokens_truncated_share"] == pytest.approx(0.2)
    assert summary["tokens_masked_share"] is None


def test_a_missing_value_does_not_poison_the_totals() -> None:
    totals = Aggregates([a_step(1, usd=None, reward_mean=float("nan")), a_step(2, usd=2.0, staleness_max=3)])
    assert (totals.usd_total, totals.reward_first, totals.max_staleness_observed) == (2.0, 0.5, 3)


def test_gauge_names_are_valid_and_distinct() -> None:
    names = [gauge.name for gauge in GAUGES]
    assert len(set(names)) == len(names)
    assert all(name.replace("_", "").isalnum() and name.islower() for name in names)


# --- the terminal --------------------------------------------------------------------------------


def test_step_line() -> None:
    assert step_line(a_step(42, reward_mean=0.71, correct_mean=0.71), 120) == (
        "step  42/120  v42  reward 0.71  correct 0.71  stale 2/1.5  bubble 8%  2,134 tok/s  $0.0123"
    )


def test_step_line_shows_what_the_run_will_have_cost_where_that_is_known() -> None:
    assert step_line(a_step(42, usd_projected=0.0351), 120).endswith("  $0.0123 of $0.0351")
    assert step_line(a_step(42, usd_projected=None), 120).endswith("  $0.0123")


def test_step_line_shows_what_is_missing() -> None:
    assert step_line({"step": 1}, 9) == "step 1/9  v-  reward -  correct -  stale -/-  bubble -%  - tok/s  $-"


def a_view(is_tty: bool, steps: int = 120) -> tuple[View, io.StringIO, ManualClock]:
    stream, clock = io.StringIO(), ManualClock(100.0)
    return View(stream, steps, is_tty, clock), stream, clock


@pytest.mark.parametrize(
    ("usd", "shown"),
    [
        (0.0, "$0"),
        (1234.5, "$1,234.50"),
        (0.6, "$0.60"),
        (0.0087, "$0.0087"),
        (5e-5, "$0.00005"),
        (0.9999, "$1.00"),
    ],
)
def test_dollars_are_shown_as_a_person_writes_them(usd: float, shown: str) -> None:
    assert show_usd(usd) == shown


def test_plain_output_is_whole_lines_without_control_codes() -> None:
    view, stream, clock = a_view(is_tty=False)
    with view.phase("Ray"):
        clock.advance(4.1)
    view.step(a_step(1))
    view.event("worker w1 \x1b[31mlost\n")
    assert stream.getvalue().splitlines() == [
        "[   0.0 s] Ray ...",
        "[   4.1 s] Ray ... ready, 4.1 s",
        step_line(a_step(1), 120),
        "[   4.1 s] worker w1  [31mlost ",
    ]
    assert view.phase_seconds == {"Ray": pytest.approx(4.1)}


def test_a_long_start_up_says_what_it_waits_for_until_there_are_steps() -> None:
    view, stream, clock = a_view(is_tty=False)
    view.tick()
    with view.phase("engines"), view.phase("learner"):
        clock.advance(10.0)
        view.tick()
        clock.advance(9.0)
        view.tick()  # says nothing new
        clock.advance(1.0)
        view.tick()
    with view.phase("first publication"):
        view.step(a_step(1))
        view.tick()  # a worker that boots in mid-run is no start-up
    waits = [line for line in stream.getvalue().splitlines() if "waiting" in line]
    assert waits == [f"[  {when} s] waiting for: engines, learner" for when in ("10.0", "20.0")]
    view, stream, clock = a_view(is_tty=True)
    with view.phase("learner"):
        clock.advance(7.0)
        view.tick()
        assert stream.getvalue().endswith(f"{ERASE_LINE}[   7.0 s] learner ...")
        assert "\n" not in stream.getvalue()


def test_start_up_is_told_of_while_the_main_thread_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "TICK_S", 0.01)
    view, _, _ = a_view(is_tty=False)
    ticked = threading.Event()
    monkeypatch.setattr(view, "tick", ticked.set)
    with view.ticking():
        assert ticked.wait(30.0)
        (thread,) = [one for one in threading.enumerate() if one.name == "start-up"]
    assert not thread.is_alive()


def test_a_phase_that_fails_says_so_and_lets_the_error_through() -> None:
    view, stream, clock = a_view(is_tty=False)

    def start() -> None:
        with view.phase("engines"):
            clock.advance(2.0)
            raise ClusterError("no GPU")

    with pytest.raises(ClusterError, match="no GPU"):
        start()
    assert "[   2.0 s] engines ... failed, 2.0 s" in stream.getvalue()
    assert view.phase_seconds == {}


def test_a_phase_that_is_cancelled_has_not_failed_and_the_first_time_counts() -> None:
    view, stream, clock = a_view(is_tty=False)
    with view.phase("w1"):
        clock.advance(3.0)

    def start_again() -> None:
        with view.phase("w1"):
            clock.advance(2.0)
            raise asyncio.CancelledError  # the run has ended

    with pytest.raises(asyncio.CancelledError):
        start_again()
    assert stream.getvalue().splitlines()[-1] == "[   5.0 s] w1 ... not needed any more, 2.0 s"
    assert view.phase_seconds == {"w1": 3.0}


def test_phases_may_overlap_on_a_tty() -> None:
    view, stream, clock = a_view(is_tty=True)
    with view.phase("engines"):
        with view.phase("learner"):
            clock.advance(1.0)
        after_learner = stream.getvalue()
        clock.advance(1.0)
    assert after_learner.endswith(f"learner ... ready, 1.0 s\n{ERASE_LINE}[   1.0 s] engines ...")
    assert view.phase_seconds == {"learner": pytest.approx(1.0), "engines": pytest.approx(2.0)}


def test_the_live_line_rewrites_itself_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    view, stream, _ = a_view(is_tty=True, steps=4)
    view.step(a_step(1))
    view.step(a_step(2))
    assert "\n" not in stream.getvalue()
    shown = stream.getvalue().split(ERASE_LINE)[-1]
    assert shown.startswith("████████░░░░░░░░  step 2/4")
    assert len(shown) < 60


def test_an_event_scrolls_above_the_live_line() -> None:
    view, stream, _ = a_view(is_tty=True)
    view.step(a_step(1))
    live = stream.getvalue().removeprefix(ERASE_LINE)
    view.event("worker w1 lost")
    assert stream.getvalue().endswith(f"{ERASE_LINE}[   0.0 s] worker w1 lost\n{live}")


def test_an_ascii_terminal_is_no_reason_to_crash() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    view = View(stream, 2, True, ManualClock())
    view.step(a_step(1))
    view.event("café")
    assert b"########........" in raw.getvalue()
    assert b"caf?" in raw.getvalue()


def test_the_closing_block_says_what_matters() -> None:
    view, stream, _ = a_view(is_tty=False)
    view.final(
        {
            "status": "failed",
            "error": "DivergedError: loss is nan",
            "task": "math",
            "model": "m",
            "steps": 3,
            "eval_first": 0.5,
            "eval_last": 0.9,
            "evals": [{"pass_at": {"1": 0.5, "4": 0.75}}, {"pass_at": {"1": 0.9, "4": 0.9375}}],
            "drift_mean": 0.0512,
            "rate_factor_min": 0.25,
            "tokens_clipped_share": 0.0125,
            "max_staleness": 3,
            "max_staleness_observed": 2,
            "digest_mismatches": 0,
            "usd_total": 1.5,
            "usd_per_step": 0.5,
            "usd_per_million_tokens": 12.3456,
            "wasted_share": 0.0625,
        },
        Path("runs/x/report.html"),
    )
    text = stream.getvalue()
    for expected in (
        "failed: math with m, 3 of 120 steps in - s",
        "DivergedError: loss is nan",
        "0.500 -> 0.900 held-out accuracy, pass@4 0.750 -> 0.938",
        "mean 0.051 nats, rate factor at least 0.25; of the tokens 1.25 % clipped, - % masked",
        "max 2 (bound 3)",
        "0 digest mismatches",
        "$1.5000: $0.50 a step, $12.35 per million tokens; 6.2 % of it wasted",
        "runs/x/report.html",
    ):
        assert expected in text


def test_a_run_without_prices_says_so() -> None:
    (line,) = [line for line in closing_lines({"usd_total": 0.0}, None, 3) if "cost" in line]
    assert "no price is set" in line
    assert "$" not in line
    assert "$" in step_line(a_step(1) | {"usd": 0.25}, 3)
    assert "$" not in step_line(a_step(1) | {"usd": 0.0}, 3)
