"""Spending of a run, over all its parts, and the budget that ends it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_planes.cluster.clock import Clock, ManualClock
from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import Config
from echo_planes.data.service import DataService
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.errors import ConfigError, DataError, RunError
from echo_planes.fleet.actuators.actuator import Actuator
from echo_planes.fleet.money import WASTED, Accounting, Budget
from echo_planes.loop.checkpoint import CheckpointMeta, newest_checkpoint, rewind_metrics
from echo_planes.loop.job import run_job
from echo_planes.loop.observers import QuietObserver
from echo_planes.loop.runner import Outcome
from echo_planes.loop.spending import LOOK_S, SPENDING_FILE, BudgetGuard, Spending, check_budget, open_budget
from echo_planes.reporting.metrics import Aggregates, read_events, read_metrics, read_summary
from echo_planes.reporting.terminal import View
from echo_planes.run import exit_status
from echo_planes.testing import simulation as testing
from echo_planes.testing.simulation import Faults, Simulation, replace_section, tiny_config
from echo_planes.testing.virtual_time import VirtualTimeLoop, run_virtual
from echo_planes.types import (
    BufferCounts,
    Episode,
    EvalReport,
    Prompt,
    Reward,
    StepStats,
    TrainBatch,
    Trajectory,
    WorkerInfo,
)


def a_config(steps: int = 10, **more: Any) -> Config:
    """The learner costs 1 $/s."""
    config = tiny_config(steps=steps)
    return replace_section(config, learner={"usd_per_hour": 3600.0}, **more)  # type: ignore[no-any-return]


def batch(*lengths: int, step: int = 0) -> TrainBatch:
    """Trajectories of a prompt token and so many trained ones."""
    n, sizes = len(lengths), np.array(lengths) + 1
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    mask = np.ones(offsets[-1], np.bool_)
    mask[offsets[:-1]] = False
    return TrainBatch(
        step=step,
        trajectory_ids=tuple(f"g{step}/{i}" for i in range(n)),
        token_ids=np.zeros(offsets[-1], np.int64),
        offsets=offsets,
        loss_mask=mask,
        sampler_logprobs=np.zeros(offsets[-1], np.float32),
        rewards=np.ones(n, np.float32),
        advantage_groups=np.zeros(n, np.int64),
        advantages=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int64),
        correct=np.ones(n, np.bool_),
        token_versions=np.where(mask, 0, -1),
        cut_off=np.zeros(n, np.bool_),
    )


def stats(step: int, tokens: int) -> StepStats:
    return StepStats(step, 0.1, 1.0, 1e-6, 1.0, tokens, tokens, 0.0, 0.0, 0.0, 1.0, 0.5, 0.0, 0, step + 1)


class Spent:
    """A run's spending with a worker that is always busy, at 1 $/s, and a learner that is free."""

    def __init__(self, folder: Path, totals: Aggregates | None = None) -> None:
        config = tiny_config(steps=10)
        self.spending = Spending(config, folder, 0.0, totals or Aggregates())
        self.spending.worker(WorkerInfo("w0", "L4", 3600.0, 0, "spot"), 0.0, alive=True)
        self.spending.serves("w0", 0.0)
        self.now_s = 0.0
        self.steps = 0

    def step(self, *lengths: int, is_first: list[bool] | None = None, **counts: int) -> dict[str, Any]:
        self.now_s += 100.0
        self.spending.book.worked("w0", self.now_s, self.now_s)
        trained = batch(*lengths, step=self.steps)
        row = self.spending.step(
            trained,
            is_first or [True] * len(lengths),
            stats(self.steps, sum(lengths)),
            0.0,
            BufferCounts(**counts),
            self.now_s,
        )
        self.steps += 1
        return row

    @property
    def parts(self) -> dict[str, float]:
        """Those that are more than what was left of a division."""
        found = self.spending.summary(self.now_s, self.steps, 1000)["usd_by_part"]
        return {part: usd for part, usd in found.items() if usd > 1e-20}


# --- what the dollars went into ------------------------------------------------------------------


def test_the_fleet_s_dollars_follow_the_ledger(tmp_path: Path) -> None:
    run = Spent(tmp_path)
    run.step(10, 30, dropped_stale=2, removed=1, buffered=4)  # 20 tokens a trajectory
    of_180 = {"trained": 40, "stale": 40, "lost": 20, "open": 80}
    assert run.parts == pytest.approx({part: tokens / 180 * 100 for part, tokens in of_180.items()})
    run.step(5, 5, dropped_stale=6, removed=3)  # four more are dropped and two removed, of 5 tokens
    of_140 = {"trained": 50, "stale": 60, "lost": 30}
    assert run.parts == pytest.approx({part: tokens / 140 * 200 for part, tokens in of_140.items()})


def test_tokens_of_groups_that_others_replaced_are_a_part_of_their_own_and_count_as_generated(
    tmp_path: Path,
) -> None:
    run = Spent(tmp_path)
    row = run.step(10, 30, accepted_tokens=240, uninformative_tokens=160, discarded_tokens=10, buffered=2)
    of_250 = {"trained": 40, "uninformative": 160, "open": 40, "lost": 10}
    assert run.parts == pytest.approx({part: tokens / 250 * 100 for part, tokens in of_250.items()})
    assert "uninformative" in WASTED
    assert row["wasted_share"] == pytest.approx(170 / 250)
    assert (row["tokens_generated"], row["usd_per_million_generated_tokens"]) == (250, pytest.approx(4e5))
    assert row["usd_per_million_tokens"] == pytest.approx(100 / 40 * 1e6)
    row = run.step(10, 30, accepted_tokens=300, uninformative_tokens=180, discarded_tokens=10)
    of_270 = {"trained": 80, "uninformative": 180, "lost": 10}
    assert run.parts == pytest.approx({part: tokens / 270 * 200 for part, tokens in of_270.items()})
    assert row["usd_per_million_generated_tokens"] == pytest.approx(200 / 310 * 1e6)


def test_discarded_tokens_are_failed_as_far_as_trajectories_failed(tmp_path: Path) -> None:
    run = Spent(tmp_path)
    run.step(10, 10, failed=2, discarded_tokens=50)
    assert run.parts == pytest.approx(
        {"trained": 20 / 70 * 100, "failed": 20 / 70 * 100, "lost": 30 / 70 * 100}
    )
    run.step(10, 10, failed=8, discarded_tokens=55)  # they failed early
    assert run.parts == pytest.approx(
        {"trained": 40 / 95 * 200, "failed": 25 / 95 * 200, "lost": 30 / 95 * 200}
    )


def test_lost_are_removed_groups_and_discarded_tokens_that_did_not_fail(tmp_path: Path) -> None:
    run = Spent(tmp_path)
    run.step(10, 10, removed=3, failed=1, discarded_tokens=40)
    assert run.parts == pytest.approx(
        {part: usd / 90 * 100 for part, usd in {"trained": 20, "failed": 10, "lost": 60}.items()}
    )


def test_a_price_that_changes_holds_for_the_workers_that_run(tmp_path: Path) -> None:
    run = Spent(tmp_path)
    named = WorkerInfo("w1", "L4", 3600.0, 0, "spot", instance_type="L4/eu/spot")
    run.spending.worker(named, 0.0, alive=True)
    run.spending.reprice({"L4/eu/spot": 7200.0, "H100/eu/spot": 1.0}, 0.0)
    assert run.spending.priced(named).usd_per_hour == 7200.0
    run.step(10)
    assert sum(run.parts.values()) == pytest.approx(100.0 + 200.0)


def test_tokens_that_are_trained_again_are_paid_for_once(tmp_path: Path) -> None:
    run = Spent(tmp_path)
    run.step(10, 10, buffered=1)
    run.step(10, 30, is_first=[True, False], buffered=1)
    assert run.parts == pytest.approx({"trained": 30 / 50 * 200, "open": 20 / 50 * 200})


def test_an_evaluation_s_answers_are_taken_to_be_as_long_as_those_it_shows(tmp_path: Path) -> None:
    run = Spent(tmp_path)
    prompt, reward = Prompt(0, (1,)), Reward(1.0, True)
    masks = ((True, False, True, True), (True, False, False, False))  # 3 tokens of its own, and 1
    episodes = [Episode((1, 2, 3, 4), mask, (0.0,) * 4, (), "stop") for mask in masks]
    shown = tuple(Trajectory("e/0", "e", prompt, episode, reward, "w0", "L") for episode in episodes)
    run.spending.evaluated(EvalReport(0, 0, 5, 3, 1.0, 1.0, trajectories=shown))
    run.spending.evaluated(EvalReport(0, 0, 5, 3, 1.0, 1.0))  # shows none: nobody knows
    run.step(30, 40)
    assert run.parts == pytest.approx({"trained": 70.0, "evaluated": 30.0})


def test_start_up_is_waste_and_the_learner_waits_only_after_it(tmp_path: Path) -> None:
    spending = Spending(a_config(), tmp_path, 100.0, Aggregates())
    spending.worker(WorkerInfo("w0", "L4", 3600.0, 0), 110.0, alive=True)
    spending.serves("w0", 130.0)
    spending.serves("w0", 131.0)
    row = spending.step(batch(10), [True], stats(0, 10), 4.0, BufferCounts(), 140.0)
    assert row == {
        "usd": 70.0,
        "usd_per_million_tokens": pytest.approx(7e6),
        "tokens_generated": 0,
        "usd_per_million_generated_tokens": None,
        "usd_wasted": 54.0,  # 30 + 20 booting, 4 idle
        "wasted_share": pytest.approx(54 / 70),
        "usd_projected": 70.0 + 9 * 20.0,  # start-up is paid once
    }


# --- over the parts of a run ---------------------------------------------------------------------


def of_steps(*usd: float) -> Aggregates:
    return Aggregates([{"step": i + 1, "usd": value, "tokens": 10} for i, value in enumerate(usd)])


def test_a_resumed_run_goes_on_from_what_the_earlier_parts_spent(tmp_path: Path) -> None:
    first = Spent(tmp_path)
    first.step(10, 10, dropped_stale=2)
    first.now_s += 50.0  # after its last step
    first.spending.summary(first.now_s, 1, 20)
    second = Spent(tmp_path, of_steps(100.0))
    assert second.spending.earlier_usd == 150.0
    row = second.step(10, 10, dropped_stale=40, failed=7, discarded_tokens=99)  # counts of all parts
    assert row["usd"] == 100.0
    assert row["usd_projected"] == 250.0 + 9 * 100.0
    assert second.parts == pytest.approx({"trained": 175.0, "stale": 75.0})
    second.step(10, 10, dropped_stale=42, failed=7, discarded_tokens=99)
    assert second.parts == pytest.approx({"trained": 75 + 200 * 40 / 60, "stale": 75 + 200 * 20 / 60})
    summary = second.spending.summary(second.now_s, 3, 50)
    assert summary["usd_total"] == 350.0
    assert summary["usd_per_step"] == pytest.approx(350 / 3)
    assert summary["usd_per_million_tokens"] == 7e6
    assert summary["usd_by_sku"] == {"L4 spot": 350.0}
    assert sum(summary["usd_by_part"].values()) == pytest.approx(350.0)


def test_before_its_first_step_a_resumed_run_does_not_know_what_was_generated(tmp_path: Path) -> None:
    new, resumed = Spent(tmp_path), Spent(tmp_path, of_steps(1.0))
    assert new.spending.summary(5.0, 0, 0)["tokens_generated"] == 0
    told = resumed.spending.summary(5.0, 1, 10)
    assert (told["tokens_generated"], told["usd_per_million_generated_tokens"]) == (None, None)


def test_a_new_run_owes_nothing_to_one_that_never_made_a_step(tmp_path: Path) -> None:
    failed = Spent(tmp_path)
    failed.spending.summary(50.0, 0, 0)
    assert Spent(tmp_path).spending.earlier_usd == 0.0


def test_without_the_file_the_steps_say_what_was_spent(tmp_path: Path) -> None:
    run = Spent(tmp_path, of_steps(1.0, 2.0))
    run.step(10, 10)
    assert run.parts == pytest.approx({"earlier": 3.0, "trained": 100.0})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"usd_by_sku": {}}',
        '{"usd_by_sku": {}, "usd_by_part": []}',
        '{"usd_by_sku": {}, "usd_by_part": {"lost": "1"}}',
        '{"usd_by_sku": {}, "usd_by_part": {"lost": NaN}}',
        '{"usd_by_sku": {"L4": -1.0}, "usd_by_part": {"lost": 1.0}}',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / SPENDING_FILE).write_text(text)
    with pytest.raises(DataError, match=r"spending\.json (does not say|is not JSON)") as caught:
        Spent(tmp_path, of_steps(1.0))
    assert "\n" not in str(caught.value)


# --- the budget ----------------------------------------------------------------------------------


def test_a_budget_that_earlier_parts_have_spent_ends_before_it_begins(tmp_path: Path) -> None:
    first = Spent(tmp_path)
    first.step(10)
    spending = Spent(tmp_path, of_steps(100.0)).spending
    assert open_budget(a_config(), spending) is None
    with pytest.raises(ConfigError, match=r"^budget\.usd=100: the run has spent \$100 already; give more"):
        open_budget(a_config(budget={"usd": 100.0}), spending)
    budget = open_budget(a_config(budget={"usd": 130.0}), spending)
    assert budget is not None
    assert budget.left(10.0) == 20.0


@pytest.mark.parametrize(
    ("status", "expected"), [("done", 0), ("spent", 0), ("stopped", 130), ("failed", None)]
)
def test_what_a_run_ends_with(status: Any, expected: int | None) -> None:
    outcome = Outcome(status, "why", BufferCounts())
    if expected is None:
        with pytest.raises(RunError, match=r"^why$"):
            exit_status(outcome)
    else:
        assert exit_status(outcome) == expected


def test_a_larger_budget_is_one_that_the_rest_fits_in(tmp_path: Path) -> None:
    """One of ten steps is made for 100 $, another was in an earlier part."""
    first = Spent(tmp_path)
    assert first.spending.larger_budget(3.0) == "budget.usd=6"  # nothing was trained yet
    first.step(10)
    resumed = Spent(tmp_path, of_steps(100.0))
    resumed.step(10)
    # 100 + 100 + 9 * 100, a tenth more, two digits
    assert resumed.spending.larger_budget(100.0) == "budget.usd=1300"


class Heard(QuietObserver):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_event(self, kind: str, text: str, *, worker: str = "", version: int | None = None) -> None:
        self.events.append(f"{kind}: {text}")


class Guarded:
    """A guard over a machine of 1 $/s, and ten steps of 10 s."""

    def __init__(self, usd: float) -> None:
        self.clock = ManualClock()
        self.book = Accounting()
        self.book.start("w0", 3600.0, 0.0)
        self.heard = Heard()
        self.stops: list[str] = []
        budget = Budget(usd, self.book)
        config = a_config(budget={"usd": usd})
        self.guard = BudgetGuard(config, budget, self.clock, self.stops.append, self.heard)

    def step(self, step: int) -> None:
        self.clock.advance(10.0)
        self.book.step(self.clock.now_s(), 10, 0.0)
        self.guard.on_step(batch(10), stats(step, 10), 0.0, BufferCounts())


def test_the_guard_warns_once_and_stops_once() -> None:
    run = Guarded(55.0)
    told = []
    for step in range(7):
        run.step(step)
        told.append((len(run.heard.events), len(run.stops)))
    assert told == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 0), (2, 1), (2, 1)]
    assert run.heard.events[0] == "budget: budget.usd=55 pays for 2 steps more; 7 are to do"
    assert run.stops == ["budget.usd=55 is spent; give a larger one to go on"]


def test_the_guard_is_silent_until_a_step_tells_what_one_costs() -> None:
    run = Guarded(55.0)
    run.guard.on_step(batch(10), stats(0, 10), 0.0, BufferCounts())
    assert (run.heard.events, run.stops) == ([], [])


def test_a_budget_that_suffices_is_not_spoken_of() -> None:
    run = Guarded(105.0)
    for step in range(10):
        run.step(step)
    assert (run.heard.events, run.stops) == ([], [])


def test_the_guard_does_not_wait_for_a_step() -> None:
    """A run that never serves costs money all the same."""

    async def main(loop: VirtualTimeLoop) -> float:
        book, stopped = Accounting(), loop.create_future()
        book.start("w0", 3600.0, 0.0)
        config = a_config(budget={"usd": 99.5})
        guard = BudgetGuard(
            config, Budget(99.5, book), loop, lambda why: stopped.set_result(loop.now_s()), Heard()
        )
        watching = asyncio.ensure_future(guard.run(None))
        at_s: float = await stopped
        watching.cancel()
        return at_s

    assert 99.5 <= run_virtual(main) <= 99.5 + LOOK_S


# --- a whole run, simulated ----------------------------------------------------------------------


class _Planes(testing.LocalPlanes):
    def enlist(self, worker_id: str, kind: WorkerConfig) -> None:
        raise AssertionError("this fleet does not change")


async def no_actuator(config: Config, clock: Clock) -> Actuator:
    raise AssertionError("this fleet does not change")


class Job:
    """Runs of one folder, by `run_job`, on fakes and in virtual time."""

    def __init__(self, folder: Path, faults: Faults | None = None) -> None:
        self.folder = folder
        self.faults = faults or Faults()
        self.screen = io.StringIO()
        self.num_planes = 0

    def run(self, usd: float | None, *, resume: bool = False) -> Outcome:
        config = a_config(steps=20, budget={"usd": usd})
        checkpoint, meta = None, CheckpointMeta(step=0, lineage_number=0, next_epoch=0)
        if resume:
            checkpoint, meta = newest_checkpoint(self.folder)
            rewind_metrics(self.folder, meta.step)
        return run_virtual(lambda loop: self._job(loop, config, checkpoint, meta))

    async def _job(
        self, loop: VirtualTimeLoop, config: Config, checkpoint: Path | None, meta: CheckpointMeta
    ) -> Outcome:
        def make_planes(
            config: Config,
            lineage: str,
            run_dir: Path,
            resume_dir: Path | None,
            start_step: int,
            kinds: Mapping[str, WorkerConfig],
        ) -> _Planes:
            self.num_planes += 1
            simulation = Simulation(config, run_dir, faults=self.faults)
            data = DataService(
                config,
                lineage,
                run_dir / REPLAY_FOLDER,
                resume_dir / "data" if resume_dir else None,
                adapter=simulation.task,
                clock=loop,
            )
            return _Planes(simulation, data, lineage)

        return await run_job(
            config,
            self.folder,
            View(self.screen, config.run.steps, False, loop),
            loop,
            start_s=loop.now_s(),
            checkpoint=checkpoint,
            meta=meta,
            make_planes=make_planes,
            make_actuator=no_actuator,
            worker_configs={
                "w0": WorkerConfig(sku="fast", usd_per_hour=1800.0),
                "w1": WorkerConfig(sku="slow"),
            },
            export=lambda numbers: None,
        )


def test_a_run_stops_at_its_budget_with_a_checkpoint_and_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    stopped = job.run(12.0)
    assert (stopped.status, stopped.error) == (
        "spent",
        "budget.usd=12 is spent; give a larger one to go on",
    )
    assert exit_status(stopped) == 0
    summary = read_summary(job.folder)
    steps = summary["steps"]
    assert 0 < steps < 20
    assert summary["status"] == "spent"
    closing = job.screen.getvalue().splitlines()
    assert f"spent: math with builtin:tiny-math, {steps} of 20 steps in " in job.screen.getvalue()
    assert f"  budget     {stopped.error}" in closing
    command, _, enough_usd = closing[-1].rpartition(" budget.usd=")
    assert command == f"  go on      python -m echo_planes.run run.resume={job.folder}"
    _, meta = newest_checkpoint(job.folder)
    assert meta.step == steps
    # A step that was under way, and the checkpoint, are all it took more.
    dearest = max(row["usd"] for row in read_metrics(job.folder)[1:])
    assert 12.0 <= summary["usd_total"] <= 12.0 + 2 * dearest
    assert sum(summary["usd_by_part"].values()) == pytest.approx(summary["usd_total"])
    assert sum(summary["usd_by_sku"].values()) == pytest.approx(summary["usd_total"])
    assert [e["text"] for e in read_events(job.folder) if e["kind"] == "budget"][1:] == [stopped.error]

    with pytest.raises(ConfigError, match=r"budget\.usd=12: the run has spent \$1\d\.\d+ already"):
        job.run(12.0, resume=True)
    assert job.num_planes == 1
    assert read_summary(job.folder) == summary

    with pytest.raises(ConfigError, match=r"budget\.usd=12: the run has spent \$1\d\.\d+ already"):
        check_budget(12.0, job.folder)  # before anything is started
    check_budget(float(enough_usd), job.folder)

    done = job.run(float(enough_usd), resume=True)
    assert (done.status, exit_status(done)) == ("done", 0)
    assert job.screen.getvalue().count("go on  ") == 1
    whole = read_summary(job.folder)
    assert whole["steps"] == 20
    assert whole["usd_total"] > summary["usd_total"]
    spent = json.loads((job.folder / SPENDING_FILE).read_text())
    assert sum(spent["usd_by_part"].values()) == pytest.approx(whole["usd_total"])
    assert all(whole["usd_by_part"][part] >= usd for part, usd in summary["usd_by_part"].items())


def test_a_run_that_has_not_made_a_step_stops_at_its_budget_too(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", Faults(lose_installs={("w0", 0), ("w1", 0)}))
    assert job.run(2.5).status == "spent"
    assert "go on      there is no checkpoint: start anew, with budget.usd=" in job.screen.getvalue()
    summary = read_summary(job.folder)
    assert summary["steps"] == 0
    assert 2.5 <= summary["usd_total"] <= 2.5 + 1.5 * LOOK_S  # 1.5 $/s
    assert summary["usd_by_part"]["booting"] == summary["usd_total"]


def test_the_step_line_shows_what_the_run_will_have_cost(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.run(None)
    shown = [
        line.rpartition("  $")[2] for line in job.screen.getvalue().splitlines() if line.startswith("step ")
    ]
    assert len(shown) == 20
    so_far, projected = zip(*(map(float, text.split(" of $")) for text in shown), strict=True)
    assert projected[-1] == so_far[-1]
    assert projected[4] == pytest.approx(so_far[-1], rel=0.3)
    whole = read_summary(job.folder)
    assert f"a step, ${whole['usd_per_million_tokens']:,.2f} per million tokens; " in job.screen.getvalue()
