"""One whole run of the embedded job, looked at from outside: exit status, files, sockets, leftovers."""

from __future__ import annotations

import re
import signal
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.reporting.weights.cli import main
from tests.integration import leftovers, listeners
from tests.integration.harness import (
    SMALL,
    Program,
    events,
    metrics,
    program,
    run_to_end,
    staleness,
    summary,
    trained,
    trajectories,
)
from tests.integration.leftovers import Left, Room
from tests.integration.listeners import Listener
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 28  # enough for a look at its sockets on the way, however late the first step is seen
MAX_STALENESS = 3
SUMMARY_KEYS = {
    "task",
    "steps",
    "seconds",
    "reward_first",
    "reward_last",
    "eval_first",
    "eval_last",
    "staleness_mean",
    "max_staleness",
    "max_staleness_observed",
    "publish_every",
    "bubble_ratio",
    "versions_published",
    "digest_mismatches",
    "lost_trajectories",
    "duplicate_trajectories",
    "tokens_trained",
    "usd_total",
    "workers",
    "mismatch_same_version_mean",
}
STEP_KEYS = {
    "step",
    "policy_version",
    "reward_mean",
    "loss",
    "grad_norm",
    "staleness_max",
    "staleness_mean",
    "t_train_s",
    "t_idle_s",
    "tokens",
    "mismatch_mean",
    "mismatch_p99",
}


@dataclass(frozen=True)
class Finished:
    """A run that has ended, its sockets while it made steps, and what it left; None: there is no `Room`."""

    program: Program
    listening: list[Listener] | None
    left: Left | None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run that all tests here look at; exit status and processes are checked on the way."""
    base = tmp_path_factory.mktemp("run")
    with ExitStack() as stack:
        room = None if leftovers.missing() else stack.enter_context(Room())
        words = (
            "fleet=laptop",
            f"run.steps={STEPS}",
            f"staleness.max_staleness={MAX_STALENESS}",
            "checkpoint.every=20",
        )
        run = stack.enter_context(program(base / "work", base / "run", *words, room=room))
        listening = None if room is None else listeners.of(run, room)
        assert run.wait() == 0, run.tail()
        assert run.left_behind() == []
        return Finished(run, listening, None if room is None else room.look())


@pytest.fixture(scope="module")
def run_dir(finished: Finished) -> Path:
    return finished.program.run_dir


def test_a_good_run_says_nothing_on_stderr(finished: Finished) -> None:
    run = finished.program
    assert run.stderr == ""
    assert f"step {STEPS}/{STEPS}" in run.stdout
    assert str(run.run_dir / "report.html") in run.stdout


def test_every_socket_is_local_and_does_nothing_for_strangers(finished: Finished) -> None:
    if finished.listening is None:
        pytest.skip(f"not shown: {leftovers.missing()}")
    listeners.check(finished.listening)


def test_it_leaves_nothing_on_the_machine(finished: Finished) -> None:
    if finished.left is None:
        pytest.skip(f"not shown: {leftovers.missing()}")
    assert finished.left == Left()


def test_the_summary_adds_up(run_dir: Path) -> None:
    told = summary(run_dir)
    assert told.keys() >= SUMMARY_KEYS
    assert (told["task"], told["steps"], told["status"]) == ("math", STEPS, "done")
    assert told["max_staleness"] == MAX_STALENESS
    assert told["publish_every"] == 2
    assert told["versions_published"] == STEPS // 2 + 1
    assert told["max_staleness_observed"] <= MAX_STALENESS
    assert told["digest_mismatches"] == 0
    assert told["lost_trajectories"] == 0
    assert told["duplicate_trajectories"] == 0
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    assert told["trained"] == STEPS * 32 * 8
    assert told["tokens_trained"] == sum(step["tokens"] for step in metrics(run_dir))
    assert 0 < told["bubble_ratio"] < 1


def test_the_policy_learns_and_the_sampler_agrees_with_the_learner(run_dir: Path) -> None:
    told = summary(run_dir)
    assert told["eval_last"] > told["eval_first"] + 0.05
    assert told["reward_last"] > told["reward_first"]
    assert 0 < told["mismatch_same_version_mean"] < 0.02


def test_what_the_workers_did_adds_up(run_dir: Path) -> None:
    told = summary(run_dir)
    large, small = told["workers"]
    assert [large["sku"], small["sku"]] == ["cpu-large", "cpu-small"]
    assert large["trajectories"] + small["trajectories"] == told["accepted"]
    assert large["restarts"] == small["restarts"] == 0
    assert told["usd_total"] > 0
    assert told["usd_total"] == pytest.approx(large["usd"] + small["usd"], rel=0.01)
    # Both were asked for at the same moment, so their costs are as their prices.
    assert large["usd"] / small["usd"] == pytest.approx(
        large["usd_per_hour"] / small["usd_per_hour"], rel=0.05
    )


def by_worker_since_both_began(run_dir: Path) -> list[int]:
    """Trajectories of the large and of the small worker; nothing before either has submitted its first."""
    accepted = [(row["worker_id"], row["created_s"]) for row in trajectories(run_dir)]
    firsts = {who: min(at_s for one, at_s in accepted if one == who) for who, _ in accepted}
    if len(firsts) < 2:
        return [0, 0]
    counts = Counter(who for who, at_s in accepted if at_s >= max(firsts.values()))
    return [counts[who] for who in sorted(firsts)]


@takes_minutes
def test_both_workers_work_and_the_large_one_does_more(tmp_path: Path) -> None:
    """A run of its own, which goes on until both have been at work: on a busy machine one may begin late."""
    words = (*SMALL, "fleet=laptop", "run.steps=100000", "eval.every=0")
    with program(tmp_path / "work", tmp_path / "run", *words) as run:
        run.wait_for_step(1)
        run.wait_until(lambda: min(by_worker_since_both_began(run.run_dir)) >= 32, "both at work")
        run.interrupt(signal.SIGTERM)  # Ray's daemons do not hear it: a checkpoint is saved first
        assert run.wait() == 130
        assert run.left_behind() == []
        assert "go on      python -m echo_planes.run run.resume=" in run.stdout
        large, small = by_worker_since_both_began(run.run_dir)
    assert large > small
    assert all(worker["tokens"] > 0 for worker in summary(run.run_dir)["workers"])


def test_metrics_have_one_line_per_step(run_dir: Path) -> None:
    steps = metrics(run_dir)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert step.keys() >= STEP_KEYS
        assert step["policy_version"] == step["step"]
        assert step["staleness_mean"] <= step["staleness_max"] <= MAX_STALENESS
        assert step["t_train_s"] > 0
        assert step["t_idle_s"] >= 0
        assert step["accepted"] == step["trained"] + step["dropped_stale"] + step["buffered"]
        assert np.isfinite([step[key] for key in STEP_KEYS]).all()


def test_trajectories_open_as_arrow_and_keep_the_bound_token_by_token(run_dir: Path) -> None:
    rows = trained(run_dir)
    told = summary(run_dir)
    assert len(rows) == told["trained"]
    assert len({row["trajectory_id"] for row in rows}) == len(rows)
    assert max(staleness(row) for row in rows) == told["max_staleness_observed"]
    for row in rows:
        assert 0 <= staleness(row) <= MAX_STALENESS
        assert row["version"] == min(row["span_versions"])
        assert row["span_stops"][-1] == len(row["response_ids"]) == len(row["logprobs"])
    dropped = sum(row["fate"] == "dropped" for row in trajectories(run_dir))
    assert dropped == told["dropped_stale"]


def test_every_version_has_one_digest(run_dir: Path) -> None:
    digests: dict[int, set[str]] = {}
    for row in trained(run_dir):
        for version, digest in zip(row["span_versions"], row["span_digests"], strict=True):
            digests.setdefault(version, set()).add(digest)
    assert all(version % 2 == 0 for version in digests)
    assert all(len(known) == 1 for known in digests.values())
    assert len({digest for known in digests.values() for digest in known}) == len(digests)


def test_waiting_for_the_engines_is_not_starvation(run_dir: Path) -> None:
    published = [event["version"] for event in events(run_dir, "publication")]
    assert set(published) == set(range(0, STEPS + 1, 2))
    # Republished every two seconds until the first engine is built, it would be ten times and more.
    assert published.count(0) < 5


def test_the_report_is_one_page_that_loads_nothing(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org/)", page)
    assert not re.findall(r"<(?:link|iframe|img|script)[^>]*(?:src|href)=", page)
    assert "<h1>math</h1>" in page
    assert "<svg" in page


def test_the_checkpoints_are_there_and_whole(run_dir: Path) -> None:
    found = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert found == ["step-000000", "step-000020", "step-000028"]  # no younger one is known to be good
    for name in found:
        assert (run_dir / "checkpoints" / name / "meta.json").is_file()


@takes_minutes
def test_an_exported_version_goes_on_as_the_model_of_another_run(tmp_path: Path) -> None:
    """Its first evaluation there is the last one here; both take the likeliest token."""
    words = ("fleet=single", "eval.temperature=0", "eval.samples_per_prompt=1", "learner.warmup_steps=0")
    first = run_to_end(tmp_path / "work", tmp_path / "first", "run.steps=6", *words)
    out = tmp_path / "exported"
    assert main(["export", str(first.run_dir), str(out)]) == 0
    second = run_to_end(tmp_path / "other", tmp_path / "second", "run.steps=1", f"model.path={out}", *words)
    began, ended = summary(first.run_dir), summary(second.run_dir)
    # Accuracy may be the same after six steps: 127 of 128 at the start are right.
    start = BUILTIN_MODELS["builtin:tiny-math"] / "model.safetensors"
    assert (out / "model.safetensors").read_bytes() != start.read_bytes()
    assert ended["eval_first"] == began["eval_last"]
    assert ended["digest_mismatches"] == 0
