"""The books: money adds up whatever happens to the machines, and a run's numbers are those of its steps."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_planes.cluster.clock import ManualClock
from echo_planes.config.schema import Config
from echo_planes.loop.accounting import GroupUses, Journal
from echo_planes.reporting.ledger import LEDGER_DETAILS
from echo_planes.reporting.metrics import (
    FLEET_STATE,
    GAUGES,
    WORKER_STATE,
    MetricsWriter,
    read_events,
    read_metrics,
    read_summary,
)
from echo_planes.reporting.terminal import View, closing_lines
from echo_planes.testing.simulation import replace_section, tiny_config
from echo_planes.types import (
    BroadcastStats,
    BufferCounts,
    EvalReport,
    InstallReport,
    LagStats,
    Manifest,
    StepStats,
    TrainBatch,
    WorkerInfo,
    WorkerStats,
)

# --- the accounting -----------------------------------------------------------------------------------


class Books:
    """A journal with its clock, folder and terminal."""

    def __init__(self, folder: Path, config: Config | None = None, start_step: int | None = None) -> None:
        self.folder = folder
        self.clock = ManualClock(1000.0)
        self.screen = io.StringIO()
        self.exported: list[Mapping[str, float]] = []
        self.accepted: dict[tuple[str, int], tuple[int, int]] = {}
        self.config = config or tiny_config(steps=4)
        self.journal = Journal(
            self.config,
            MetricsWriter(folder),
            View(self.screen, 4, False, self.clock),
            self.clock,
            self.exported.append,
            start_s=1000.0,
            start_step=start_step,
        )

    def step(self, step: int, *names: str, versions: list[int] | None = None, seconds: float = 10.0) -> None:
        self.clock.advance(seconds)
        self.journal.on_step(batch(step, *names, versions=versions), stats(step), 1.0, BufferCounts())

    def summary(self, counts: BufferCounts | None = None, **more: Any) -> dict[str, Any]:
        settings = {"status": "done", "error": "", "digest_mismatches": 0, "restarts": {}, "unstored": ()}
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
        token_versions=np.array(versions or [step] * n, np.int64),
        cut_off=np.zeros(n, np.bool_),
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
    assert "reward_parts" not in row  # no answer has any
    books.journal.on_step(
        replace(batch(3, "c"), reward_parts=(("format", 0.5, 2),)), stats(3), 1.0, BufferCounts()
    )
    assert read_metrics(tmp_path)[-1]["reward_parts"] == {"format": 0.5}


def test_a_step_line_says_what_the_learner_measured(tmp_path: Path) -> None:
    books = Books(tmp_path)
    measured = replace(
        stats(0),
        tokens_scored=40,
        rate_factor=0.5,
        masked_fraction=0.125,
        truncated_fraction=0.1,
        effective_samples=0.75,
        log_weight=(0.01, 0.2, 0.5, 2.0),
        k3=0.02,
        lags=(LagStats(0, 30, 0.01, 0.0, 0.0, 0.1, 0.0), LagStats(2, 10, 0.3, 0.1, 0.4, 0.2, 0.5)),
        updates_skipped=1,
    )
    books.clock.advance(10.0)
    books.journal.on_step(batch(0, "a"), measured, 1.0, BufferCounts())
    (row,) = read_metrics(tmp_path)
    weights = [row[f"log_weight_{part}"] for part in ("p50", "p99", "p999", "max")]
    assert weights == [0.01, 0.2, 0.5, 2.0]
    assert (row["tokens_scored"], row["rate_factor"], row["updates_skipped"]) == (40, 0.5, 1)
    assert (row["masked_fraction"], row["effective_samples"], row["k3"]) == (0.125, 0.75, 0.02)
    assert row["truncated_fraction"] == 0.1
    assert row["lags"][1] == {
        "lag": 2,
        "tokens": 10,
        "drift": 0.3,
        "k3": 0.1,
        "truncated": 0.4,
        "masked": 0.2,
        "clipped": 0.5,
    }


def test_what_was_not_measured_is_null_and_not_zero(tmp_path: Path) -> None:
    books = Books(tmp_path)
    optional = (
        *("loss", "grad_norm", "learning_rate", "mismatch_mean", "mismatch_p99", "clip_fraction"),
        *("tis_mean", "entropy", "kl_reference", "masked_fraction", "effective_samples", "k3"),
        "truncated_fraction",
    )
    nothing: dict[str, Any] = dict.fromkeys(optional)
    books.journal.on_step(batch(0, "a"), replace(stats(0), **nothing), 1.0, BufferCounts())
    (row,) = read_metrics(tmp_path)
    derived = ("log_weight_p50", "log_weight_max")
    assert {row[key] for key in (*optional, *derived)} == {None}
    assert (row["lags"], row["tokens_scored"], row["updates_skipped"]) == ([], 0, 0)


def test_a_step_line_says_how_long_answers_are_and_which_groups_teach(tmp_path: Path) -> None:
    """Four groups of two answers; an answer of i tokens for i = 1 ... 8, each after a prompt of two."""
    lengths = np.arange(1, 9)
    versions = np.concatenate([[-1, -1] + [0] * int(n) for n in lengths]).astype(np.int64)
    trained = batch(0, "a", "b", "c", "d")
    books = Books(tmp_path)
    shaped = replace(
        trained,
        loss_mask=versions >= 0,
        token_versions=versions,
        offsets=np.concatenate([[0], np.cumsum(lengths + 2)]),
        correct=np.array([True, True, False, False, False, True, False, False]),
        cut_off=np.array([False, False, False, False, False, False, True, True]),
    )
    books.journal.on_step(shaped, stats(0), 1.0, BufferCounts())
    (row,) = read_metrics(tmp_path)
    assert (row["response_tokens_mean"], row["response_tokens_p95"]) == (4.5, pytest.approx(7.65))
    assert row["cut_off_share"] == 0.25
    assert (row["groups_all_right"], row["groups_all_wrong"], row["groups_mixed"]) == (0.25, 0.5, 0.25)


def test_every_number_of_a_step_has_its_gauge(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.journal.on_eval(EvalReport(0, 0, 8, 2, 0.5, 0.5, pass_at=(0.5, 0.75)), None)
    books.journal.on_audited(0.25)
    books.step(0, "a")
    numbers = {key for key, value in books.exported[0].items() if isinstance(value, int | float)}
    assert numbers - {gauge.key for gauge in GAUGES} - set(LEDGER_DETAILS) == set()


def test_a_step_line_has_the_sparse_drift_of_the_audits_since_the_last(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.step(0, "a")
    books.journal.on_audited(0.25)
    books.step(1, "b")
    books.step(2, "c")
    assert [row.get("mismatch_sparse") for row in read_metrics(tmp_path)] == [None, 0.25, None]


def test_an_evaluation_goes_into_the_steps_that_follow_it(tmp_path: Path) -> None:
    config = replace_section(tiny_config(steps=4), eval={"temperature": 0.5, "samples_per_prompt": 5})
    books = Books(tmp_path, config)
    curve = (0.5, 0.6, 0.7, 0.75, 0.8)
    books.step(0, "a")
    books.journal.on_eval(EvalReport(0, 0, 8, 5, 0.5, 0.5, pass_at=curve), None)
    books.step(1, "b")
    late = EvalReport(2, 2, 8, 5, 0.75, 0.5, num_unscored=3, newest_version=4, pass_at=curve)
    books.journal.on_eval(late, None)
    books.step(2, "c")
    before, first, second = read_metrics(tmp_path)
    assert "eval_step" not in before
    assert (first["eval_step"], first["eval_version"], first["eval_newest_version"]) == (0, 0, None)
    assert (second["eval_accuracy"], second["eval_newest_version"]) == (0.75, 4)
    assert second["eval_pass_at"] == {"1": 0.5, "2": 0.6, "4": 0.75, "5": 0.8}
    assert second["eval_pass_at_n"] == 0.8
    row = books.summary()["evals"][1]
    assert (row["version"], row["newest_version"], row["samples_per_prompt"]) == (2, 4, 5)
    assert (row["temperature"], row["top_p"]) == (0.5, 1.0)
    assert row["pass_at"] == {"1": 0.5, "2": 0.6, "4": 0.75, "5": 0.8}
    shown = books.screen.getvalue()
    assert "accuracy 0.500 at step 0 (avg@5, pass@2 0.600, pass@4 0.750, pass@5 0.800; v0)" in shown
    assert "v2 to v4: newer weights came meanwhile); 3 answers of 40 without a reward left out" in shown
    assert (first["eval_unscored"], second["eval_unscored"], row["num_unscored"]) == (0, 3, 3)
    closing = "".join(closing_lines(books.summary(), None, 4))
    assert "; 3 answers of 2 evaluations without a reward left out" in closing


def test_the_reward_that_is_told_is_the_task_s_beside_the_one_that_is_trained(tmp_path: Path) -> None:
    books = Books(tmp_path)
    scored = replace(batch(0, "a"), scores=np.array([1.0, 1.0], np.float32))  # trained on: 1.0 and 0.5
    counts = BufferCounts(accepted=6, trained=2, uninformative=4, accepted_tokens=60, uninformative_tokens=45)
    books.clock.advance(10.0)
    books.journal.on_step(scored, stats(0), 1.0, counts)
    (row,) = read_metrics(tmp_path)
    assert (row["reward_mean"], row["reward_trained_mean"]) == (1.0, 0.75)
    assert (row["uninformative"], row["tokens_generated"]) == (4, 60)
    summary = books.summary(counts)
    assert (summary["uninformative"], summary["tokens_generated"]) == (4, 60)
    told = summary["usd_total"] / 60 * 1e6
    assert summary["usd_per_million_generated_tokens"] == pytest.approx(told)


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


def test_a_worker_boots_until_it_has_weights_and_says_itself_when_it_was_busy(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.journal.on_worker(info(price=3600.0), alive=True)
    books.clock.advance(20.0)
    books.journal.on_installed(InstallReport("w0", -1, "", ok=False, seconds=1.0, error="wrong base"))
    books.clock.advance(10.0)
    books.journal.on_installed(InstallReport("w0", 0, "d0", ok=True, seconds=1.0))
    books.clock.advance(10.0)
    books.journal.on_stats(0, WorkerStats("w0", 0, "d0", 1, 4, 40, busy_s=2.5))
    parts = books.summary()["usd_by_part"]
    assert {part: usd for part, usd in parts.items() if usd} == {"booting": 30.0, "idle": 7.5, "open": 2.5}


def test_late_news_of_an_incarnation_says_nothing_of_its_successor_s_time(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.journal.on_worker(info(price=3600.0, epoch=1), alive=True)
    books.journal.on_installed(InstallReport("w0", 0, "d0", ok=True, seconds=1.0))
    books.clock.advance(10.0)
    books.journal.on_stats(0, WorkerStats("w0", 0, "d0", 1, 4, 40, busy_s=2.5))
    assert books.summary()["usd_by_part"]["open"] == 10.0
    books.journal.on_stats(1, WorkerStats("w0", 0, "d0", 1, 4, 40, busy_s=2.5))
    assert books.summary()["usd_by_part"]["open"] == 2.5


def test_a_step_s_tokens_are_paid_for_by_the_workers_at_work(tmp_path: Path) -> None:
    books = Books(tmp_path, replace_section(tiny_config(steps=4), staleness={"reuse": 2, "max_staleness": 3}))
    books.journal.on_worker(info(price=3600.0), alive=True)
    books.journal.on_installed(InstallReport("w0", 0, "d0", ok=True, seconds=1.0))
    books.clock.advance(10.0)
    books.journal.on_step(batch(0, "a"), stats(0), 1.0, BufferCounts(dropped_stale=2))
    books.clock.advance(10.0)
    books.journal.on_step(batch(1, "a"), stats(1), 1.0, BufferCounts(dropped_stale=2))  # trained again
    first, second = read_metrics(tmp_path)
    assert (first["usd_wasted"], first["wasted_share"], first["usd_projected"]) == (5.0, 0.5, 40.0)
    assert (second["usd"], second["usd_wasted"], second["usd_per_million_tokens"]) == (10.0, 10.0, 2e5)
    assert "$20.0000 of $40.0000" in books.screen.getvalue()
    summary = books.summary()
    assert (summary["usd_per_step"], summary["usd_by_sku"]) == (10.0, {"L4 on_demand": 20.0})


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
    books.journal.on_accepted({("w0", 0): (50, 5), ("w1", 0): (70, 7)})
    books.journal.on_accepted({("w0", 0): (80, 8), ("w0", 1): (40, 4), ("w1", 0): (70, 7)})
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


def test_what_a_worker_is_goes_into_the_file_and_not_to_the_terminal(tmp_path: Path) -> None:
    books = Books(tmp_path)
    offered = replace(info(epoch=1), instance_type="L4/eu/spot")
    refused = InstallReport("w0", 0, "d0", False, 0.5)
    books.journal.on_worker(info(epoch=0), alive=True)
    books.journal.on_worker(info(epoch=0), alive=False)
    books.journal.on_worker(offered, alive=True)
    books.journal.on_worker(info(epoch=0), alive=False)  # late news
    books.clock.advance(2.0)
    books.journal.on_installed(refused)
    for version in (0, 1):
        books.clock.advance(1.0)
        books.journal.on_installed(InstallReport("w0", version, f"d{version}", True, 0.5))
    books.journal.on_fleet("too few", {"mu": 1.5, "launched": {"L4/eu/spot": 1}})
    *states, fleet = read_events(tmp_path)
    assert [(e["time_s"], e["kind"], e["text"], e["epoch"], e["instance_type"]) for e in states] == [
        (0.0, WORKER_STATE, "booting", 0, "L4"),
        (0.0, WORKER_STATE, "gone", 0, "L4"),
        (0.0, WORKER_STATE, "booting", 1, "L4/eu/spot"),
        (3.0, WORKER_STATE, "serving", 1, "L4/eu/spot"),
    ]
    assert fleet == {
        "time_s": 4.0,
        "kind": FLEET_STATE,
        "text": "too few",
        "mu": 1.5,
        "launched": {"L4/eu/spot": 1},
    }
    assert books.screen.getvalue() == ""


def test_publications_and_losses_are_events(tmp_path: Path) -> None:
    books = Books(tmp_path)
    for version in (0, 2, 2):
        manifest = Manifest("L0", version, version, "overwrite", 0, "d0", "d2", "", 1234, 9, 5, 20)
        books.journal.on_published(manifest, 0.5)
    books.clock.advance(3.0)
    books.journal.on_event("worker lost", "killed", worker="w0")
    published, *_, lost = read_events(tmp_path)
    assert (published["kind"], published["lineage"], published["version"]) == ("publication", "L0", 0)
    assert "1,234 bytes" in published["text"]
    assert "25.0% changed" in published["text"]
    assert (lost["kind"], lost["worker"], lost["time_s"]) == ("worker lost", "w0", 3.0)
    assert "killed" in books.screen.getvalue()
    assert books.summary()["versions_published"] == 2


def test_versions_that_the_store_lacks_are_in_the_summary_and_on_the_terminal(tmp_path: Path) -> None:
    books = Books(tmp_path)
    assert "store" not in "".join(closing_lines(books.summary(), None, 1))
    summary = books.summary(unstored=(3, 4, 6))
    assert read_summary(tmp_path)["versions_unstored"] == [3, 4, 6]
    assert "; not in the store: 3-4, 6" in "".join(closing_lines(summary, None, 1))


def test_a_peer_that_is_moved_out_of_a_broadcast_s_way_is_an_event(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.journal.on_published(Manifest("L0", 2, 2, "overwrite", 0, "d0", "d2", "", 1234, 9, 5, 20), 0.5)
    books.clock.advance(3.0)
    at_fault = BroadcastStats(2, "overwrite", 1234, 2, 1, None, 1, (), ("w3 falls silent in mid-broadcast",))
    for _ in range(2):  # told again with every step, an event once
        books.journal.on_broadcasts([at_fault])
    (event,) = (event for event in read_events(tmp_path) if event["kind"] == "peer at fault")
    assert (event["version"], event["time_s"]) == (2, 3.0)
    assert "w3 falls silent in mid-broadcast while v2 is on its way" in event["text"]
    assert event["text"] in books.screen.getvalue()


def test_uses_of_a_group_are_counted_by_its_number_and_by_its_name() -> None:
    uses = GroupUses()
    assert [uses.add("L0.3"), uses.add("L0.3"), uses.add("L1.3"), uses.add("L0.0")] == [1, 2, 1, 1]
    assert [uses.add("by name"), uses.add("by name"), uses.add(f"L0.{10**11}")] == [1, 2, 1]
    for expected in [*range(3, 256), 255, 255]:
        assert uses.add("L0.3") == expected
