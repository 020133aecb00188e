"""The guard in the whole loop, in virtual time: real controller, data plane and books; the rest is fake."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import Config, GuardConfig
from echo_planes.data.service import DataService
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.tasks.adapter import Progress, TaskOptions
from echo_planes.errors import CollapsedError, RunError
from echo_planes.loop.checkpoint import CheckpointMeta, newest_checkpoint
from echo_planes.loop.job import open_folder, run_job
from echo_planes.loop.loading import load_config
from echo_planes.loop.runner import Outcome
from echo_planes.reporting.metrics import read_events, read_metrics, read_summary
from echo_planes.reporting.terminal import View
from echo_planes.run import exit_status
from echo_planes.testing.simulation import (
    FakeTask,
    FakeTokenizer,
    Faults,
    LocalPlanes,
    Simulation,
    replace_section,
    tiny_config,
)
from echo_planes.testing.virtual_time import VirtualTimeLoop, run_virtual
from echo_planes.types import Adjustment, Prompt
from tests.thorough import THOROUGH, examples, takes_minutes

K3 = Callable[
    [int, int, Adjustment], float
]  # of a part of the run, its step, as the guard has set the learner
Skill = Callable[[int, int, str], float]  # chance of a right answer: of a part of the run, version, prompt
CALM, ALARMING = 0.01, 0.4


def config(*, steps: int = 40, s: int = 3, every: int = 5, guard: Mapping[str, Any] | None = None) -> Config:
    base = tiny_config(steps=steps, max_staleness=s)
    return replace_section(  # type: ignore[no-any-return]
        base,
        checkpoint={"every": every, "keep": 1},
        guard=GuardConfig(**{"patience": 3, "good_after": 4, **(guard or {})}).model_dump(),
        learner={**base.learner.model_dump(), "lr": 8e-4},
    )


class Job:
    """A run from its first part to its report, on planes in one process."""

    def __init__(
        self,
        given: Config,
        folder: Path,
        k3: K3,
        *,
        resume: bool = False,
        skill: Skill | None = None,
        task: type[FakeTask] = FakeTask,
        seed: int = 0,
    ) -> None:
        self.folder = folder
        self.screen = io.StringIO()
        self.lineages: list[str] = []
        self.configs: list[Config] = []
        self._k3 = k3
        self._skill = skill
        self._task = task
        self._seed = seed
        try:
            self.outcome = run_virtual(lambda loop: self._main(given, loop, resume))
        except RunError:
            self._data._store.close()  # as its process does when it dies
            raise

    async def _main(self, given: Config, loop: VirtualTimeLoop, resume: bool) -> Outcome:
        checkpoint, meta = newest_checkpoint(self.folder) if resume else (None, CheckpointMeta(0, 0, 0))
        meta = open_folder(given, self.folder, checkpoint, meta)
        return await run_job(
            given,
            self.folder,
            View(self.screen, given.run.steps, False, loop),
            loop,
            start_s=loop.now_s(),
            checkpoint=checkpoint,
            meta=meta,
            make_planes=self._planes,
            make_actuator=None,  # type: ignore[arg-type]
            worker_configs={"w0": WorkerConfig(), "w1": WorkerConfig()},
            export=lambda _: None,
        )

    def _planes(
        self,
        given: Config,
        lineage: str,
        run_dir: Path,
        resume_dir: Path | None,
        start_step: int,
        kinds: Mapping[str, WorkerConfig],
    ) -> Any:
        part = len(self.lineages)
        self.lineages.append(lineage)
        self.configs.append(given)
        faults = Faults(k3=partial(self._k3, part))
        if self._skill is not None:
            faults.skill = partial(self._skill, part)
        task = self._task(TaskOptions(), FakeTokenizer(), 0)
        simulation = Simulation(given, run_dir, faults=faults, seed=100 * self._seed + part, task=task)
        data = DataService(
            given,
            lineage,
            run_dir / REPLAY_FOLDER,
            resume_dir / "data" if resume_dir else None,
            adapter=simulation.task,
            clock=asyncio.get_running_loop(),  # type: ignore[arg-type]
        )
        self._data = data
        return LocalPlanes(simulation, data, lineage)

    @property
    def told(self) -> list[str]:
        return [event["text"] for event in read_events(self.folder) if event["kind"] == "guard"]


def always_alarming(_: int, step: int, adjustment: Adjustment) -> float:
    return ALARMING


def calm(*_: object) -> float:
    return CALM


def from_step(first: int) -> K3:
    """Alarming from that step of the first part on; healthy after a rollback."""
    return lambda part, step, _: ALARMING if part == 0 and step >= first else CALM


# --- rungs ---------------------------------------------------------------------------------------

CURES: dict[str, Callable[[Adjustment], bool]] = {
    "mask": lambda adjustment: adjustment.mask_outliers,
    "slow": lambda adjustment: adjustment.rate_scale < 1,
}


@pytest.mark.parametrize(("rung", "actions"), [("mask", ["mask"]), ("slow", ["mask", "limit", "slow"])])
def test_the_rung_that_helps_is_the_last_one(tmp_path: Path, rung: str, actions: list[str]) -> None:
    job = Job(config(), tmp_path, lambda _, step, adjustment: CALM if CURES[rung](adjustment) else ALARMING)
    assert exit_status(job.outcome) == 0
    told = read_summary(tmp_path)
    assert told["status"] == "done"
    assert told["guard"]["actions"] == dict.fromkeys(actions, 1)
    assert told["guard"]["alarms"] == {"k3": len(actions)}
    assert len(job.told) == len(actions)
    for text in job.told:
        assert text in job.screen.getvalue()  # on the terminal as in the events
        assert "0.4 nats, above guard.k3=0.3" in text


def test_every_step_says_what_is_in_force(tmp_path: Path) -> None:
    Job(config(), tmp_path, lambda _, step, adjustment: ALARMING if step < 14 else CALM)
    keys = ("guard_rung", "guard_max_staleness", "guard_rate_scale", "guard_alarms")
    rows = [tuple(row[key] for key in keys) for row in read_metrics(tmp_path)]
    changes = [(i, row) for i, row in enumerate(rows) if i == 0 or row != rows[i - 1]]
    # 0.4 is not twice the limit: 3 steps each, and after the second rung 3 that do not count.
    assert changes == [
        (0, (0, 3, 1.0, 0)),
        (3, (1, 3, 1.0, 1)),
        (6, (2, 1, 1.0, 2)),
        (12, (3, 1, 0.5, 3)),
    ]


@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_a_lowered_bound_holds_from_the_next_batch_on(tmp_path: Path, policy: Any) -> None:
    for seed in range(examples(8)):
        base = config(steps=30, s=6)
        given = replace_section(
            base, staleness={"max_staleness": 6, "policy": policy}, checkpoint={"every": 0}
        )
        faults = Faults(k3=lambda step, _: ALARMING if 8 <= step < 14 else CALM)
        simulation = Simulation(
            given, tmp_path / str(seed), faults=faults, seed=seed, seconds_per_token=(0.05, 2.0)
        )
        outcome, trace = simulation.run()
        assert outcome.status == "done"
        assert outcome.counts.lost == 0
        (lowered,) = [report for report in trace.guard if report.rung == 2]
        assert lowered.max_staleness == 3
        assert len(trace.batches) == 30
        for batch in trace.batches:
            assert int((batch.step - batch.versions).max()) <= (6 if batch.step < 14 else 3)
        assert [version for version in trace.versions if version >= 14] == list(range(14, 31))
        assert max(int((b.step - b.versions).max()) for b in trace.batches[8:14]) > 3


# --- the end -------------------------------------------------------------------------------------


def test_without_a_good_checkpoint_it_ends_as_collapsed(tmp_path: Path) -> None:
    job = Job(config(every=0), tmp_path, always_alarming)
    with pytest.raises(CollapsedError, match=r"k3 .* no good checkpoint .*; lower learner.lr") as caught:
        exit_status(job.outcome)
    assert caught.value.exit_status == 1
    assert "\n" not in str(caught.value)
    told = read_summary(tmp_path)
    assert told["status"] == "collapsed"
    assert told["error"] == str(caught.value)
    assert told["guard"]["actions"] == {"mask": 1, "limit": 1, "slow": 1, "stop": 1}
    assert "collapsed: " in job.screen.getvalue()
    assert "done" not in job.screen.getvalue()


def test_the_report_begins_with_it(tmp_path: Path) -> None:
    Job(config(every=0), tmp_path, always_alarming)
    page = (tmp_path / "report.html").read_text()
    body = page[page.index("<main>") + len("<main>") :]
    assert body.startswith('<header><p class="error">k3 of the tokens of one lag 0.4 nats')
    assert '<span class="pill failed">collapsed</span>' in body


def test_a_mismatch_at_the_start_ends_the_run_with_the_likely_causes(tmp_path: Path) -> None:
    simulation = Simulation(tiny_config(), tmp_path, faults=Faults(mismatch=0.4))
    outcome, trace = simulation.run()
    assert outcome.status == "failed"
    assert "guard.mismatch" in outcome.error
    assert len(trace.batches) < 20
    assert Simulation(tiny_config(), tmp_path / "b", faults=Faults(mismatch=0.05)).run()[0].status == "done"


# --- rollback ------------------------------------------------------------------------------------


def test_it_goes_back_to_the_good_checkpoint_at_half_of_both(tmp_path: Path) -> None:
    job = Job(config(), tmp_path, from_step(18))
    assert exit_status(job.outcome) == 0
    assert job.lineages == ["L0", "L1"]
    before, after = job.configs
    assert (before.staleness.max_staleness, after.staleness.max_staleness) == (3, 1)
    assert (before.lr, after.lr) == (8e-4, 4e-4)
    assert after.staleness.kappa == 1
    assert "back to the checkpoint of step 10" in job.told[-1]
    told = read_summary(tmp_path)
    assert told["status"] == "done"
    assert told["guard"]["guard_rollbacks"] == 1
    assert told["guard"]["guard_rung"] == 0
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == 0
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert {row["guard_rollbacks"] for row in rows[:10]} == {0}
    assert {row["guard_rollbacks"] for row in rows[10:]} == {1}
    assert {row["guard_max_staleness"] for row in rows[10:]} == {1}
    assert all(row["staleness_max"] <= row["guard_max_staleness"] for row in rows)
    assert told["max_staleness"] == 3 >= told["max_staleness_observed"]


def test_a_run_that_breaks_before_any_checkpoint_was_good_begins_again_at_half_of_both(
    tmp_path: Path,
) -> None:
    job = Job(config(every=30), tmp_path, from_step(3))
    assert exit_status(job.outcome) == 0
    assert job.lineages == ["L0", "L1"]
    assert "back to the checkpoint of step 0" in job.told[-1]
    assert (job.configs[1].staleness.max_staleness, job.configs[1].lr) == (1, 4e-4)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert {row["guard_rollbacks"] for row in rows} == {1}
    told = read_summary(tmp_path)
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == 0


def test_the_dollars_before_a_rollback_to_the_start_stay_spent(tmp_path: Path) -> None:
    """They are of no step that is left; a budget must know them all the same."""
    given = config(every=30)
    given = replace_section(given, learner={**given.learner.model_dump(), "usd_per_hour": 3600.0})
    Job(given, tmp_path, from_step(3))
    told = read_summary(tmp_path)
    assert told["parts"] == 2
    assert told["seconds"] > told["seconds_last_part"] + 10
    assert told["usd_by_sku"]["learner on_demand"] == pytest.approx(told["seconds"], rel=1e-3)


def test_a_stop_that_comes_while_a_rollback_ends_its_part_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = DataService.close
    handlers: dict[int, Callable[[], None]] = {}

    def add(_: object, number: int, handler: Callable[..., None], *arguments: Any) -> None:
        handlers[number] = partial(handler, *arguments)

    async def interrupted(service: DataService) -> Any:
        if handler := handlers.pop(signal.SIGTERM, None):
            monkeypatch.setattr(VirtualTimeLoop, "add_signal_handler", lambda *_: None)  # it comes only once
            handler()
        return await close(service)

    monkeypatch.setattr(VirtualTimeLoop, "add_signal_handler", add)
    monkeypatch.setattr(DataService, "close", interrupted)
    job = Job(config(), tmp_path, from_step(18))
    assert (job.outcome.status, job.outcome.error) == ("stopped", "SIGTERM")
    assert job.lineages == ["L0", "L1"]
    assert newest_checkpoint(tmp_path)[1].step == 10
    assert read_summary(tmp_path)["status"] == "stopped"
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 11))


def test_later_checkpoints_of_the_policy_that_was_given_up_are_gone(tmp_path: Path) -> None:
    """They would be the newest ones to resume from."""
    there: dict[tuple[int, int], list[str]] = {}

    def k3(part: int, step: int, _: Adjustment) -> float:
        there[part, step] = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
        return ALARMING if part == 0 and step >= 18 else CALM

    Job(config(), tmp_path, k3)
    assert there[0, 35] == ["step-000010", "step-000035"]  # keep=1: the newest, and the good one beside it
    assert there[1, 10] == ["step-000010"]


def test_it_goes_back_as_often_as_it_may_and_then_ends_as_collapsed(tmp_path: Path) -> None:
    job = Job(
        config(steps=80, guard={"max_rollbacks": 2}),
        tmp_path,
        lambda _, step, __: ALARMING if step >= 18 else CALM,
    )
    with pytest.raises(CollapsedError, match="after 2 rollbacks"):
        exit_status(job.outcome)
    assert [given.staleness.max_staleness for given in job.configs] == [3, 1, 0]
    assert [given.lr for given in job.configs] == [8e-4, 4e-4, 2e-4]
    assert job.lineages == ["L0", "L1", "L2"]
    assert read_summary(tmp_path)["guard"]["actions"] == {
        "mask": 3,
        "limit": 2,  # a synchronous run has nothing to lower
        "slow": 3,
        "rollback": 2,
        "stop": 1,
    }


def test_a_resume_after_a_rollback_knows_of_it(tmp_path: Path) -> None:
    """Also one from the good checkpoint itself, before another was written."""

    def dies(part: int, step: int, _: Adjustment) -> float:
        if part == 1 and step == 12:
            raise RunError("killed")
        return ALARMING if step >= 18 else CALM

    given = config(steps=80, guard={"max_rollbacks": 1})
    with pytest.raises(RunError, match="killed"):
        Job(given, tmp_path, dies)
    written = load_config([f"run.resume={tmp_path}"])
    assert (written.staleness.max_staleness, written.lr) == (1, 4e-4)
    again = Job(written, tmp_path, always_alarming, resume=True)
    assert again.lineages == ["L2"]
    with pytest.raises(CollapsedError, match="after 1 rollbacks"):
        exit_status(again.outcome)


def test_a_good_checkpoint_that_is_gone_is_told(tmp_path: Path) -> None:
    def k3(part: int, step: int, _: Adjustment) -> float:
        if step == 25:
            (tmp_path / "checkpoints" / "step-000010" / "meta.json").unlink()
        return ALARMING if step >= 18 else CALM

    job = Job(config(), tmp_path, k3)
    with pytest.raises(CollapsedError, match=r"step-000010/meta.json cannot be read"):
        exit_status(job.outcome)
    assert read_summary(tmp_path)["status"] == "collapsed"


# --- rewards alone -------------------------------------------------------------------------------


def forgetful(_: int, version: int, __: str) -> float:
    return 0.0 if version >= 40 else min(0.95, 0.3 + 0.02 * version)


@pytest.mark.parametrize(
    "mode", ["act", *(pytest.param(mode, marks=takes_minutes) for mode in ("warn", "off"))]
)
def test_a_run_whose_reward_ends_far_below_its_best_is_not_done(tmp_path: Path, mode: str) -> None:
    """It ends as collapsed in every mode of the guard: only the reward shows it, too late for the guard."""
    given = config(steps=60, every=0, guard={"mode": mode, "reward_drop": 50.0})
    given = replace_section(given, sampling={**given.sampling.model_dump(), "prompts_per_step": 16})
    assert Job(given, tmp_path / "learns", calm).outcome.status == "done"
    job = Job(given, tmp_path, calm, skill=forgetful)
    with pytest.raises(CollapsedError, match=r"the reward fell to 0 in the last 6 steps"):
        exit_status(job.outcome)
    assert read_summary(tmp_path)["status"] == "collapsed"
    assert "done:" not in job.screen.getvalue()


# --- health that looks like a fall ---------------------------------------------------------------
#
# Simulated: the engines answer by the `Skill` given, and no model learns.

GRADE_AT = 40  # groups of a level until the next one may begin
SEEDS = range(20 if THOROUGH else 1)  # a run with a refill takes half a minute


class Laddered(FakeTask):
    """Three levels; the next one begins once the present one is known."""

    num_levels = 3

    def level(self, progress: Progress) -> int:
        is_known = progress.num_groups >= GRADE_AT and progress.accuracy > 0.8
        return min(progress.level + is_known, self.num_levels - 1)

    def prompt_at(self, index: int, level: int) -> Prompt:
        return Prompt(index, tuple(self.tokenizer.encode(f"{level}.{index}?")), answer=str(index % 10))


def with_many_answers(mode: str, **sampling: Any) -> Config:
    """Settings with so many answers a step that noise hides nothing, and with the guard's own limits."""
    given = config(steps=60, every=10, guard={**GuardConfig().model_dump(), "mode": mode})
    sizes = {"prompts_per_step": 8, "samples_per_prompt": 8}
    return replace_section(  # type: ignore[no-any-return]
        given,
        sampling={**given.sampling.model_dump(), **sizes, **sampling},
        eval={**given.eval.model_dump(), "num_prompts": 64},
    )


def easy_first(_: int, version: int, prompt: str) -> float:
    """Half of the prompts are soon mastered, the others slowly: a refill leaves ever harder ones."""
    return 0.01 + 0.0015 * version if int(prompt) % 2 else min(1.0, 0.7 + 0.02 * version)


def level_by_level(_: int, version: int, prompt: str) -> float:
    level = int(prompt.partition(".")[0]) if "." in prompt else 0
    return min(max(0.4 + 0.03 * version - 0.9 * level, 0.02), 0.95)


HEALTHY: dict[str, tuple[dict[str, Any], type[FakeTask], Skill]] = {
    "refill": ({"refill": "correct", "refill_limit": 4.0}, FakeTask, easy_first),
    "curriculum": ({}, Laddered, level_by_level),
}


@pytest.mark.parametrize("mode", ["act", "off"])
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_batch_that_becomes_harder_is_no_fall(tmp_path: Path, kind: str, mode: str) -> None:
    """Neither for the guard nor for the verdict at the end."""
    sampling, task, skill = HEALTHY[kind]
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        job = Job(with_many_answers(mode, **sampling), folder, calm, skill=skill, task=task, seed=seed)
        assert (job.outcome.status, job.told) == ("done", [])
        rows = read_metrics(folder)
        trained = [row["reward_mean"] for row in rows]
        assert fmean(trained[-5:]) < max(trained) - 0.4
        before, after = (one["accuracy"] for one in read_summary(folder)["evals"])
        assert after > before


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_fall_is_told_also_where_batches_become_harder(tmp_path: Path, kind: str) -> None:
    sampling, task, skill = HEALTHY[kind]

    def forgets(part: int, version: int, prompt: str) -> float:
        return skill(part, version, prompt) if version < 40 else 0.0

    for seed in SEEDS:
        given = with_many_answers("warn", **sampling)
        job = Job(given, tmp_path / str(seed), calm, skill=forgets, task=task, seed=seed)
        assert job.outcome.status == "collapsed"
        assert "fall of the reward from its best" in job.told[0]


def test_what_was_gained_after_the_good_checkpoint_may_be_learnt_again_slowly(tmp_path: Path) -> None:
    def skill(part: int, version: int, _: str) -> float:
        if part == 0:
            return 0.1 if version < 15 else 0.9
        return 0.1 + 0.004 * (version - 15)

    for seed in SEEDS:
        folder = tmp_path / str(seed)
        given = config(steps=60, every=15)
        sizes = {"prompts_per_step": 8, "samples_per_prompt": 8}
        given = replace_section(given, sampling={**given.sampling.model_dump(), **sizes})
        job = Job(given, folder, from_step(26), skill=skill, seed=seed)
        assert job.outcome.status == "done"
        assert "back to the checkpoint of step 15" in job.told[-1]
        actions = read_summary(folder)["guard"]["actions"]
        assert actions == dict.fromkeys(("mask", "limit", "slow", "rollback"), 1)


def test_a_run_that_the_guard_stopped_is_resumed_at_its_good_checkpoint(tmp_path: Path) -> None:
    def k3(_: int, step: int, __: Adjustment) -> float:
        return ALARMING if step >= 18 else CALM

    stopped = Job(config(steps=80, guard={"max_rollbacks": 0}), tmp_path, k3)
    assert stopped.outcome.status == "collapsed"
    assert newest_checkpoint(tmp_path)[1].step == 10
    assert "a resume begins at the good checkpoint, of step 10" in stopped.outcome.error
    resumed = Job(load_config([f"run.resume={tmp_path}"]), tmp_path, calm, resume=True)
    assert resumed.outcome.status == "done"
    told = read_summary(tmp_path)
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == 0
    assert told["guard"]["actions"]["stop"] == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 81))
    events = [event["text"] for event in read_events(tmp_path) if event["kind"] == "resume"]
    assert events == ["at step 10, as lineage L1"]
