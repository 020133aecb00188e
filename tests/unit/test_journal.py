"""The books: money adds up whatever happens to the machines, and a run's numbers are those of its steps."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.clock import ManualClock
from echo_planes.config import Config
from echo_planes.journal import CostMeter, Journal
from echo_planes.metrics import MetricsWriter, read_events, read_metrics, read_summary
from echo_planes.terminal import View
from echo_planes.testing import replace_section, tiny_config
from echo_planes.types import (
    BufferCounts,
    EvalReport,
    InstallReport,
    Manifest,
    StepStats,
    TrainBatch,
    WorkerInfo,
    WorkerStats,
)

# --- money ---------------------------------------------------------------------------------------

MACHINES = ["learner-0", "w0", "w1", "w2"]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["start", "stop", "look"]),
        st.sampled_from(MACHINES),
        st.floats(0.0, 100.0),  # $/h
        st.floats(0.0, 10_000.0),  # seconds since the last move
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(moves=MOVES)
def test_the_total_is_the_sum_over_machines_and_intervals_and_never_falls(moves: list[Any]) -> None:
    meter = CostMeter()
    now_s = 0.0
    running: dict[str, tuple[float, float]] = {}
    intervals: dict[str, list[float]] = {machine: [] for machine in MACHINES}
    before = 0.0
    for kind, machine, usd_per_hour, passed_s in moves:
        now_s += passed_s
        if kind != "look" and machine in running:
            since_s, rate = running.pop(machine)
            intervals[machine].append((now_s - since_s) / 3600 * rate)
        if kind == "start":
            running[machine] = (now_s, usd_per_hour)
            meter.start(machine, usd_per_hour, now_s)
        elif kind == "stop":
            meter.stop(machine, now_s)
        total = meter.total_usd(now_s)
        assert total >= before
        before = total
        for name in MACHINES:
            since_s, rate = running.get(name, (now_s, 0.0))
            expected = math.fsum([*intervals[name], (now_s - since_s) / 3600 * rate])
            assert meter.usd(name, now_s) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert total == pytest.approx(math.fsum(meter.usd(name, now_s) for name in MACHINES))


def test_an_hour_costs_its_price_and_a_stopped_machine_nothing_more() -> None:
    meter = CostMeter()
    assert meter.total_usd(0.0) == 0.0
    meter.start("w0", 2.5, 100.0)
    assert meter.usd("w0", 3700.0) == 2.5
    meter.stop("w0", 3700.0)
    meter.stop("w0", 9000.0)
    assert meter.usd("w0", 99_999.0) == 2.5
    assert meter.usd("w1", 99_999.0) == 0.0


def test_a_machine_started_again_settles_the_time_before_at_the_price_before() -> None:
    meter = CostMeter()
    meter.start("w0", 1.0, 0.0)
    meter.start("w0", 4.0, 3600.0)
    assert meter.usd("w0", 7200.0) == 5.0


# --- the books -----------------------------------------------------------------------------------


class Books:
    """A journal with its clock, folder and terminal."""

    def __init__(self, folder: Path, config: Config | None = None) -> None:
        self.folder = folder
        self.clock = ManualClock(1000.0)
        self.screen = io.StringIO()
        self.exported: list[Mapping[str, float]] = []
        self.config = config or tiny_config(steps=4)
        self.journal = Journal(
            self.config,
            MetricsWriter(folder),
            View(self.screen, 4, False, self.clock),
            self.clock,
            self.exported.append,
            start_s=1000.0,
        )

    def step(self, step: int, *names: str, versions: list[int] | None = None, seconds: float = 10.0) -> None:
        self.clock.advance(seconds)
        self.journal.on_step(batch(step, *names, versions=versions), stats(step), 1.0, BufferCounts())

    def summary(self, counts: BufferCounts | None = None, **more: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {"status": "done", "error": "", "digest_mismatches": 0, "restarts": {}}
        return self.journal.summary(counts=counts or BufferCounts(), **{**settings, **more})


def batch(step: int, *names: str, versions: list[int] | None = None) -> TrainBatch:
    """Two trajectories per group name: one right, one wrong."""
    ids = tuple(f"{name}/{i}" for name in names for i in range(2))
    n = len(ids)
    return TrainBatch(
        step=step,
        trajectory_ids=ids,
        token_ids=np.zeros(n, np.int64),
        offsets=np.arange(n + 1),
        loss_mask=np.ones(n, np.bool_),
        sampler_logprobs=np.zeros(n, np.float32),
        rewards=np.tile(np.array([1.0, 0.5], np.float32), len(names)),
        advantage_groups=np.repeat(np.arange(len(names)), 2),
        advantages=np.zeros(n, np.float32),
        versions=np.array(versions or [step] * n, np.int64),
        correct=np.tile(np.array([True, False]), len(names)),
    )


def stats(step: int) -> StepStats:
    return StepStats(
        step=step,
        loss=0.25,
        grad_norm=1.5,
        learning_rate=1e-6,
        t_train_s=3.0,
        tokens=50,
        tokens_forward=70,
        mismatch_mean=0.01,
        mismatch_p99=0.1,
        clip_fraction=0.0,
        tis_mean=1.0,
        entropy=0.5,
        kl_reference=0.0,
        groups_skipped=0,
        num_updates=step + 1,
    )


def info(worker: str = "w0", *, price: float = 3.6, epoch: int = 0) -> WorkerInfo:
    return WorkerInfo(worker, "L4", price, epoch)


def test_a_step_line_says_what_the_batch_was(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.step(2, "a", "b", versions=[0, 1, 2, 2])
    (row,) = read_metrics(tmp_path)
    assert (row["step"], row["policy_version"]) == (3, 3)  # the step made version t + 1
    assert (row["staleness_max"], row["staleness_mean"]) == (2, 0.75)
    assert (row["reward_mean"], row["correct_mean"]) == (0.75, 0.5)
    assert (row["t_train_s"], row["t_idle_s"], row["t_step_s"]) == (3.0, 1.0, 10.0)
    assert row["tokens_per_s"] == 5.0
    assert row["bubble_ratio"] == 0.25
    assert row["time_s"] == 10.0
    assert books.exported[0]["reward_mean"] == 0.75
    assert "step 3/4" in books.screen.getvalue()


def test_the_steps_pay_for_every_machine_from_start_to_end(tmp_path: Path) -> None:
    config = tiny_config(steps=4)
    config = replace_section(config, learner={"usd_per_hour": 36.0, "num_ranks": 2})
    books = Books(tmp_path, config)
    books.journal.on_worker(info(), alive=True)
    books.step(0, "a")
    books.journal.on_worker(info(), alive=False)
    books.step(1, "b")
    assert [row["t_step_s"] for row in read_metrics(tmp_path)] == [10.0, 10.0]
    assert [row["usd"] for row in read_metrics(tmp_path)] == pytest.approx([10 * 0.021, 10 * 0.02])
    books.clock.advance(5.0)
    summary = books.summary(restarts={"w0": 2})
    assert summary["usd_total"] == pytest.approx(10 * 0.021 + 15 * 0.02)
    assert summary["workers"][0]["usd"] == pytest.approx(0.01)
    assert summary["workers"][0]["restarts"] == 2


def test_news_of_a_lost_incarnation_does_not_make_its_successor_free(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.journal.on_worker(info(epoch=0), alive=True)
    books.journal.on_worker(info(epoch=1), alive=True)
    books.journal.on_worker(info(epoch=0), alive=False)
    books.clock.advance(1000.0)
    assert books.summary()["usd_total"] == pytest.approx(1.0)
    books.journal.on_worker(info(epoch=1), alive=False)
    books.clock.advance(1000.0)
    assert books.summary()["usd_total"] == pytest.approx(1.0)


def test_a_resumed_run_goes_on_counting_where_the_first_stopped(tmp_path: Path) -> None:
    config = replace_section(tiny_config(steps=4), learner={"usd_per_hour": 360.0})
    first = Books(tmp_path, config)
    first.step(0, "a")
    second = Books(tmp_path, config)
    second.step(1, "b")
    summary = second.summary()
    assert summary["usd_total"] == pytest.approx(2.0)
    assert summary["steps"] == 2


def test_the_first_step_is_timed_from_the_first_install(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.clock.advance(40.0)  # engines start
    books.journal.on_installed(InstallReport("w0", -1, "", ok=False, seconds=9.0, error="wrong base"))
    books.clock.advance(2.0)
    books.journal.on_installed(InstallReport("w0", 0, "d0", ok=True, seconds=2.0))
    books.clock.advance(3.0)
    books.journal.on_installed(InstallReport("w1", 0, "d0", ok=True, seconds=4.0))
    books.step(0, "a", seconds=5.0)
    assert read_metrics(tmp_path)[0]["t_step_s"] == 8.0
    assert books.summary()["install_seconds_mean"] == 3.0


def test_a_group_trained_twice_is_counted_in_trajectories(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.step(0, "a", "b")
    books.step(1, "c", "a")
    assert books.summary()["duplicate_trajectories"] == 2


def test_a_worker_s_row_adds_its_incarnations(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.journal.on_worker(info(), alive=True)
    for epoch, trajectories in ((0, 5), (0, 8), (1, 4)):  # counters of one incarnation grow
        worker = WorkerStats("w0", 1, "d1", 0, trajectories, 10 * trajectories, 1.0)
        books.journal.on_stats(epoch, worker)
    (row,) = books.summary()["workers"]
    assert (row["id"], row["sku"], row["trajectories"], row["tokens"]) == ("w0", "L4", 12, 120)


def test_the_summary_holds_the_ledger_and_the_evaluations(tmp_path: Path) -> None:
    books = Books(tmp_path)
    assert books.summary()["eval_first"] is None
    for step, accuracy in ((0, 0.25), (4, 0.75)):
        report = EvalReport(step, step, 8, 2, accuracy, accuracy / 2)
        books.journal.on_eval(report, mismatch=0.01 if step else None)
    counts = BufferCounts(accepted=20, trained=12, dropped_stale=4, buffered=3, refused=2)
    summary = books.summary(counts, status="failed", error="no worker is left", digest_mismatches=3)
    assert (summary["eval_first"], summary["eval_last"]) == (0.25, 0.75)
    assert summary["mismatch_same_version_mean"] == 0.01
    assert (summary["accepted"], summary["trained"], summary["buffered"], summary["refused"]) == (
        20,
        12,
        3,
        2,
    )
    assert summary["lost_trajectories"] == 1
    assert (summary["status"], summary["error"]) == ("failed", "no worker is left")
    assert summary["digest_mismatches"] == 3
    assert (summary["max_staleness"], summary["publish_every"]) == (3, 2)
    assert read_summary(tmp_path) == json.loads(json.dumps(summary))


def test_publications_and_losses_are_events(tmp_path: Path) -> None:
    books = Books(tmp_path)
    for version in (0, 2, 2):
        manifest = Manifest("L0", version, version, "overwrite", 0, "d0", "d2", "", 1234, 9, 5, 20)
        books.journal.on_published(manifest, 0.5)
    books.clock.advance(3.0)
    books.journal.on_event("worker lost", "killed", worker="w0")
    published, *_, lost = read_events(tmp_path)
    assert (published["kind"], published["version"]) == ("publication", 0)
    assert "1,234 bytes" in published["text"]
    assert "25.0% changed" in published["text"]
    assert (lost["kind"], lost["worker"], lost["time_s"]) == ("worker lost", "w0", 3.0)
    assert "killed" in books.screen.getvalue()
    assert books.summary()["versions_published"] == 2
