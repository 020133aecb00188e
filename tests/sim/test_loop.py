"""The whole loop in virtual time: real controller, data plane and workers; fake engines and learner."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from echo_planes.config.schema import Config
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.data.tasks.adapter import Policy, TaskOptions
from echo_planes.errors import RunError
from echo_planes.loop.runner import Outcome
from echo_planes.reporting.formats import ranges
from echo_planes.testing.fakes import FakeTask, FakeTokenizer
from echo_planes.testing.simulation import Faults, Simulation, Trace, replace_section, tiny_config
from echo_planes.types import Episode, EvalReport, Prompt, Reward
from tests.thorough import examples


class AlwaysRight(FakeTask):
    """Every answer is."""

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        return Reward(1.0, True)


def run(tmp_path: Path, config: Config, **settings: object) -> tuple[Outcome, Trace]:
    simulation = Simulation(config, tmp_path, **settings)  # type: ignore[arg-type]
    outcome, trace = simulation.run()
    check(config, outcome, trace)
    return outcome, trace


def check(config: Config, outcome: Outcome, trace: Trace) -> None:
    """Check what must hold however a run went."""
    counts = outcome.counts
    assert counts.lost == 0
    ids = [i for batch in trace.batches for i in batch.trajectory_ids]
    assert len(ids) == len(set(ids))
    for batch in trace.batches:
        assert int((batch.step - batch.versions).max()) <= config.staleness.max_staleness
    for seen in trace.counts:
        parts = seen.trained + seen.dropped_stale + seen.uninformative + seen.buffered
        assert seen.accepted == parts


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_bound_holds_with_a_slow_worker(tmp_path: Path, max_staleness: int, policy: str) -> None:
    for seed in range(examples(8)):
        config = tiny_config(max_staleness=max_staleness, policy=policy)
        outcome, trace = run(tmp_path / str(seed), config, seconds_per_token=(0.05, 2.0), seed=seed)
        assert outcome.status == "done"
        assert len(trace.batches) == 20
        assert {v % config.staleness.kappa for v in trace.versions} == {0}
        if policy == "wait":
            assert outcome.counts.dropped_stale == 0


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3, 6])
def test_a_lost_publication_starves_and_is_published_again(tmp_path: Path, max_staleness: int) -> None:
    config = tiny_config(max_staleness=max_staleness)
    lost = {("w0", v) for v in range(4, 9)} | {("w1", v) for v in range(4, 9)}
    outcome, trace = run(tmp_path, config, faults=Faults(lose_installs=lost))
    assert outcome.status == "done"
    assert len(trace.batches) == 20


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_batches_are_of_groups_that_carry_a_signal(tmp_path: Path, max_staleness: int, policy: str) -> None:
    config = tiny_config(max_staleness=max_staleness, policy=policy)
    sampling = replace_section(config.sampling, refill="reward", refill_limit=50.0)
    config = replace_section(config, sampling=sampling.model_dump())
    faults = Faults(die_at_s={("w1", 0): 6.0})
    outcome, trace = run(tmp_path, config, seconds_per_token=(0.05, 0.5), faults=faults)
    counts = outcome.counts
    assert outcome.status == "done"
    assert len(trace.batches) == 20
    for batch in trace.batches:
        assert batch.rewards.reshape(-1, 2).sum(1).tolist() == [1.0] * 4  # of two answers one is right
    accepted = [batch.accepted_scores for batch in trace.batches]
    assert counts.trained < sum(map(len, accepted)) <= counts.trained + counts.uninformative
    assert {round(float(scores.sum() - len(scores) / 2)) for scores in accepted} != {0}
    rows = StoreSnapshot(tmp_path / REPLAY_FOLDER).table().to_pylist()
    fates = Counter(row["fate"] for row in rows)
    assert fates["uninformative"] == counts.uninformative > 100
    assert fates["trained"] == counts.trained
    assert counts.accepted_tokens == sum(sum(row["response_mask"]) for row in rows)
    set_aside = [row for row in rows if row["fate"] == "uninformative"]
    assert counts.uninformative_tokens == sum(sum(row["response_mask"]) for row in set_aside)
    assert {row["step"] for row in set_aside} <= set(range(21))
    if policy == "wait":
        assert counts.dropped_stale == 0
        assert set(Counter(row["prompt_index"] for row in rows).values()) == {2}  # none was done twice


def test_a_policy_that_is_always_right_goes_on_within_the_limit(tmp_path: Path) -> None:
    config = tiny_config(max_staleness=1)
    sampling = replace_section(config.sampling, refill="correct", refill_limit=1.5)
    config = replace_section(config, sampling=sampling.model_dump())
    task = AlwaysRight(TaskOptions(), FakeTokenizer(), 0)
    outcome, trace = run(tmp_path, config, task=task)
    assert outcome.status == "done"
    assert len(trace.batches) == 20
    assert outcome.counts.uninformative == pytest.approx(1.5 * 20 * 8, abs=12)


def test_reward_rises_and_evaluations_come_at_the_start_and_the_end(tmp_path: Path) -> None:
    outcome, trace = run(tmp_path, tiny_config(steps=30))
    assert outcome.status == "done"
    assert [report.step for report in trace.evals] == [0, 30]
    assert trace.evals[-1].accuracy > trace.evals[0].accuracy + 0.3


class HeldOutFails(FakeTask):
    """Two held-out prompts fail in every evaluation but the first."""

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        episode = await super().rollout(prompt, policy)
        if prompt.index in (1_000_002, 1_000_003) and episode.spans[0].version > 0:
            raise ConnectionError("the environment is down")
        return episode


def test_a_held_out_prompt_that_fails_for_good_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    config = tiny_config()
    config = replace_section(config, eval={**config.eval.model_dump(), "every": 10})
    outcome, trace = run(tmp_path, config, task=HeldOutFails(TaskOptions(), FakeTokenizer(), 0))
    assert outcome.status == "done"
    assert [(report.step, report.num_unscored) for report in trace.evals] == [(0, 0), (10, 4), (20, 4)]
    assert "the environment is down" in trace.evals[-1].unscored_error
    assert [index for index, _ in trace.evals[-1].prompt_rewards] == [
        1_000_000 + i for i in (0, 1, 4, 5, 6, 7)
    ]


def sampled_under(report: EvalReport) -> set[int]:
    """Versions of the tokens that the evaluation shows."""
    return {span.version for t in report.trajectories for span in t.episode.spans}


def evaluated(config: Config, tmp_path: Path, **settings: object) -> list[EvalReport]:
    config = replace_section(config, eval={**config.eval.model_dump(), "every": 4})
    outcome, trace = run(tmp_path, config, **settings)
    assert outcome.status == "done"
    assert [report.step for report in trace.evals] == [0, 4, 8, 12, 16, 20]
    return trace.evals


@pytest.mark.parametrize("max_staleness", [1, 3, 6])
@pytest.mark.parametrize("seconds_per_token", [(0.05, 0.2), (0.4, 0.4), (0.3,)])
def test_an_evaluation_is_of_one_version(
    tmp_path: Path, max_staleness: int, seconds_per_token: tuple[float, ...]
) -> None:
    """Also where it takes longer than the learner takes to publish."""
    for seed in range(examples(4)):
        settings = {"seconds_per_token": seconds_per_token, "t_train_s": 0.2, "seed": seed}
        for report in evaluated(tiny_config(max_staleness=max_staleness), tmp_path / str(seed), **settings):
            assert len(report.trajectories) == report.num_prompts * report.samples_per_prompt  # shows all
            assert sampled_under(report) == {report.version}
            assert report.newest_version is None


def test_an_evaluation_that_a_synchronous_learner_cannot_wait_for_says_its_versions(tmp_path: Path) -> None:
    config = tiny_config(max_staleness=0)
    config = replace_section(config, eval={**config.eval.model_dump(), "num_prompts": 64})
    mixed = 0
    for seed in range(examples(4)):
        for report in evaluated(config, tmp_path / str(seed), seconds_per_token=(30.0,), seed=seed):
            newest = report.newest_version or report.version
            assert sampled_under(report) <= set(range(report.version, newest + 1))
            mixed += newest > report.version
    assert mixed


@pytest.mark.parametrize(
    ("eval_settings", "seconds_per_token", "measured"),
    [
        ({"num_prompts": 1}, (1.0,), [True, True]),
        ({"num_prompts": 1, "temperature": 0.5}, (1.0,), [False, False]),  # logprobs of another distribution
        ({"num_prompts": 64}, (3.0,), [False, True]),  # the first update comes before the last answer
    ],
)
def test_sampler_and_learner_are_compared_where_they_hold_the_same_policy(
    tmp_path: Path,
    eval_settings: dict[str, float],
    seconds_per_token: tuple[float, ...],
    measured: list[bool],
) -> None:
    config = tiny_config(steps=4)
    config = replace_section(config, eval={**config.eval.model_dump(), **eval_settings})
    groups = 1 if config.eval.num_prompts == 1 else 8  # at once: four make a batch
    _, trace = run(tmp_path, config, seconds_per_token=seconds_per_token, max_groups=groups)
    assert [mismatch is not None for mismatch in trace.mismatches] == measured


def test_same_seed_same_trace(tmp_path: Path) -> None:
    faults = {"die_at_s": {("w1", 0): 6.0}}
    traces = [
        run(tmp_path / str(i), tiny_config(), seed=3, faults=Faults(**faults))[1].lines for i in range(2)
    ]
    assert traces[0] == traces[1]


def test_a_fast_worker_does_more(tmp_path: Path) -> None:
    # Room enough in the queue that speed decides, and no holding of the learner for the slow one.
    config = tiny_config(steps=60, policy="drop", queue_batches=4.0)
    _, trace = run(tmp_path, config, seconds_per_token=(0.1, 0.4), t_train_s=0.01, max_groups=4)
    done = {line.split()[1]: int(line.split()[2]) for line in trace.lines if line.startswith("stats")}
    assert done["w0.0"] > 2 * done["w1.0"]


def test_a_killed_worker_is_replaced_and_its_prompts_go_to_others(tmp_path: Path) -> None:
    config = tiny_config(max_staleness=1)
    outcome, trace = run(tmp_path, config, faults=Faults(die_at_s={("w0", 0): 8.0, ("w0", 1): 14.0}))
    assert outcome.status == "done"
    assert any("worker w0.1 alive=True" in line for line in trace.lines)
    assert any("worker w0.2 alive=True" in line for line in trace.lines)
    prompts = sorted(i for batch in trace.batches for i in batch.trajectory_ids)
    assert len(prompts) == 20 * 8


def test_no_prompt_is_skipped_when_workers_die(tmp_path: Path) -> None:
    faults = Faults(die_at_s={("w0", 0): 5.0, ("w1", 0): 7.0, ("w1", 1): 13.0})
    outcome, _ = run(tmp_path, tiny_config(), faults=faults)
    assert outcome.status == "done"
    rows = StoreSnapshot(tmp_path / REPLAY_FOLDER).table().to_pylist()
    seen = {row["prompt_index"] for row in rows if row["fate"] == "trained"}
    buffered = outcome.counts.buffered // 2
    assert set(range(max(seen) - buffered - 8)) <= seen


def test_the_run_ends_with_a_reason_when_no_worker_is_left(tmp_path: Path) -> None:
    config = tiny_config()
    config = replace_section(config, fleet={**config.fleet.model_dump(), "restarts": 0})
    faults = Faults(die_at_s={("w0", 0): 5.0, ("w1", 0): 6.0})
    outcome, _ = Simulation(config, tmp_path, faults=faults).run()
    assert outcome.status == "failed"
    assert "no worker is left" in outcome.error


def test_a_worker_that_takes_no_weights_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    config = tiny_config()
    config = replace_section(config, fleet={**config.fleet.model_dump(), "restarts": 1})
    outcome, trace = run(tmp_path, config, faults=Faults(broken_workers={"w1"}))
    assert outcome.status == "done"
    for epoch in (0, 1):
        assert f"worker w1.{epoch} alive=False" in trace.lines
    assert "worker w1.2 alive=True" not in trace.lines


def test_a_refused_install_is_counted_and_repaired_in_full(tmp_path: Path) -> None:
    faults = Faults(refuse_installs={("w0", 4)})
    outcome, trace = run(tmp_path, tiny_config(), faults=faults)
    assert outcome.status == "done"
    assert "installed w0 2 False" in trace.lines  # version 2 serves on
    assert trace.lines.index("installed w0 4 True") > trace.lines.index("installed w0 2 False")


def test_a_killed_learner_resumes_without_skipping_or_repeating(tmp_path: Path) -> None:
    config = tiny_config()
    config = replace_section(config, checkpoint={"every": 5, "keep": 2})
    with pytest.raises(RunError, match="killed at step 13"):
        Simulation(config, tmp_path, faults=Faults(learner_dies_at_step=13)).run()
    resumed = Simulation(config, tmp_path, seed=1)
    outcome, trace = resumed.run(resume_dir=tmp_path / "checkpoints" / "step-000010", lineage="sim2")
    check(config, outcome, trace)
    assert [batch.step for batch in trace.batches] == list(range(10, 20))
    assert trace.versions[0] == 10  # a resume publishes at once
    assert outcome.counts.trained == 20 * 8


def test_a_stop_request_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(steps=1000)
    simulation = Simulation(config, tmp_path, stop_at_s=12.0)
    outcome, trace = simulation.run()
    assert outcome.status == "stopped"
    saved = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert saved == [f"step-{len(trace.batches):06d}"]


def in_parts(config: Config, groups: int = 1) -> Config:
    return replace_section(config, learner={"micro_batch_groups": groups})


def test_a_step_is_trained_while_its_last_answers_are_sampled(tmp_path: Path) -> None:
    """With a slow worker: one version a step, all its groups, nothing twice, and it takes less time."""
    took_s = {}
    for groups in (1, 2, 3, 4):
        config = in_parts(tiny_config(max_staleness=0), groups)
        slow = {"seconds_per_token": (0.05, 1.0), "t_train_s": 8.0}
        outcome, trace = run(tmp_path / str(groups), config, **slow)
        assert outcome.status == "done"
        assert len(trace.batches) == 20
        for batch in trace.batches:
            assert batch.versions.tolist() == [batch.step] * 8
            assert len(set(batch.advantage_groups.tolist())) == 4
        assert outcome.counts.trained == 20 * 8
        took_s[groups] = trace.idle_s
    assert took_s[1] < 0.5 * took_s[4]  # of waiting
    assert took_s[1] <= took_s[2] <= took_s[4]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_learner_killed_between_two_parts_resumes_without_skipping_or_repeating(
    tmp_path: Path, parts: int
) -> None:
    config = in_parts(tiny_config(max_staleness=0))
    config = replace_section(config, checkpoint={"every": 5, "keep": 2})
    faults = Faults(learner_dies_at_step=13, learner_dies_after=parts)
    slow = (0.05, 1.0)
    with pytest.raises(RunError, match="killed at step 13"):
        Simulation(config, tmp_path, faults=faults, seconds_per_token=slow).run()
    resumed = Simulation(config, tmp_path, seed=1, seconds_per_token=slow)
    outcome, trace = resumed.run(resume_dir=tmp_path / "checkpoints" / "step-000010", lineage="sim2")
    check(config, outcome, trace)
    assert [batch.step for batch in trace.batches] == list(range(10, 20))
    assert outcome.counts.trained == 20 * 8
    rows = StoreSnapshot(tmp_path / REPLAY_FOLDER).table().to_pylist()
    trained = Counter(row["trajectory_id"] for row in rows if row["fate"] == "trained")
    assert len(trained) == 20 * 8
    assert set(trained.values()) == {1}


def test_a_stop_between_two_parts_comes_after_the_step(tmp_path: Path) -> None:
    for seed in range(4):
        config = in_parts(tiny_config(steps=1000, max_staleness=0))
        simulation = Simulation(
            config, tmp_path / str(seed), stop_at_s=30.0 + seed, seconds_per_token=(0.05, 1.0), t_train_s=8.0
        )
        outcome, trace = simulation.run()
        assert outcome.status == "stopped"
        saved = sorted(p.name for p in (tmp_path / str(seed) / "checkpoints").iterdir())
        assert saved == [f"step-{len(trace.batches):06d}"]
        assert outcome.counts.trained == 8 * len(trace.batches)


def test_a_run_waits_for_its_last_uploads_or_says_which_versions_the_store_lacks(tmp_path: Path) -> None:
    outcome, trace = run(tmp_path / "slow", tiny_config(), faults=Faults(store_s=60.0))
    assert outcome.status == "done"
    told, *more = [line for line in trace.lines if line.startswith("store ")]
    assert "the run ends once the last versions are there" in told
    assert not any("lacks" in line for line in more)
    gone = [i for i, line in enumerate(trace.lines) if line.endswith("alive=False")]
    assert len(gone) == 2  # no worker is paid meanwhile
    assert max(gone) < trace.lines.index(told)
    outcome, trace = run(tmp_path / "hung", tiny_config(), faults=Faults(store_s=2.0, store_hangs_at_s=5.0))
    assert outcome.status == "done"
    *_, told = [line for line in trace.lines if line.startswith("store ")]
    missing = ranges(sorted(set(trace.versions))[2:])
    assert f"lacks of the published versions {missing}: nothing moved for 300 s" in told


def test_a_last_evaluation_that_no_worker_can_begin_is_left_out_and_told(tmp_path: Path) -> None:
    """The last publication reaches nobody: the run ends all the same, after `run.wait_limit_s`."""
    config = tiny_config()
    lost = {("w0", 20), ("w1", 20)}
    outcome, trace = run(tmp_path, config, faults=Faults(lose_installs=lost))
    assert outcome.status == "done"
    assert [report.step for report in trace.evals] == [0]
    (told,) = [line for line in trace.lines if line.startswith("evaluation ")]
    assert "that of step 20 is left out" in told
    assert "within 300 s" in told
