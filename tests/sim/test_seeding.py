"""Seeding in virtual time: the real controller, data plane and workers; fake engines and learner."""

from __future__ import annotations

import asyncio
import bisect
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from echo_planes.config.schema import Config
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.errors import RunError
from echo_planes.loop.runner import Outcome
from echo_planes.testing import simulation
from echo_planes.testing.fakes import FakeEngine, FakeLearner
from echo_planes.testing.simulation import Faults, Simulation, Trace, replace_section, tiny_config
from echo_planes.types import Sample, TrainBatch
from tests.sim.test_loop import check
from tests.thorough import THOROUGH

STEPS = 8
GROUPS, SAMPLES = 4, 2  # of a step
SCHEDULES = 10_000 if THOROUGH else 60


def seeded(config: Config | None = None, *, parts: int | None = 1, **seeding: Any) -> Config:
    """A synchronous run with a seeder, trained in parts of `parts` groups."""
    config = config or tiny_config(steps=STEPS, max_staleness=0)
    changes = {"seeding": {"engines": 1, **seeding}, "learner": {"micro_batch_groups": parts}}
    return replace_section(config, **changes)


class Watched:
    """Times of the tokens that seeders sampled for training, and of the learner's work; virtual seconds."""

    def __init__(self) -> None:
        self.tokens_s: list[float] = []
        self.training: list[tuple[float, float]] = []

    def check(self) -> None:
        """No seeder samples while the learner trains."""
        starts = sorted(self.training)
        for at_s in self.tokens_s:
            place = bisect.bisect_left(starts, (at_s, 0.0)) - 1
            assert place < 0 or at_s >= starts[place][1], (
                f"a token at {at_s:.3f} s, trained in {starts[place]}"
            )
        self.tokens_s.clear()
        self.training.clear()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Watch the engines and the learner of every run here."""
    seen = Watched()

    class Engine(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], **options: Any) -> list[Sample]:
            tell = options["on_tokens"]
            is_held_out = "".join(map(chr, prompt_ids)).startswith("1000")

            def on_tokens(number: int, piece: Sample) -> None:
                if self._id.startswith("s") and not is_held_out:
                    seen.tokens_s.append(asyncio.get_running_loop().time())
                tell(number, piece)

            return await super().generate(prompt_ids, **{**options, "on_tokens": on_tokens})

    class Learner(FakeLearner):
        async def _train(self, batch: TrainBatch) -> None:
            begun_s = asyncio.get_running_loop().time()
            await super()._train(batch)
            seen.training.append((begun_s, asyncio.get_running_loop().time()))

    monkeypatch.setattr(simulation, "FakeEngine", Engine)
    monkeypatch.setattr(simulation, "FakeLearner", Learner)
    yield seen
    seen.check()


def run(folder: Path, config: Config, **settings: Any) -> tuple[Outcome, Trace]:
    outcome, trace = Simulation(config, folder, **settings).run()
    assert outcome.status == "done", outcome.error
    check(config, outcome, trace)
    check_steps(config, trace)
    return outcome, trace


def check_steps(config: Config, trace: Trace) -> None:
    """Every step has R trajectories of its own version; the learner trains in no open window."""
    assert [batch.step for batch in trace.batches] == list(range(config.run.steps))
    for batch in trace.batches:
        assert batch.versions.tolist() == [batch.step] * (GROUPS * SAMPLES)
    for counts, batch in zip(trace.counts, trace.batches, strict=True):
        assert counts.trained == (batch.step + 1) * GROUPS * SAMPLES
    assert len(trace.seeding) == config.run.steps
    for report in trace.seeding:
        ends = 0.0
        for one in sorted(report.intervals, key=lambda one: one.start_s):
            assert one.start_s >= ends - 1e-9
            ends = one.stop_s
        assert sum(one.what == "train" for one in report.intervals) >= 1


def of_workers(folder: Path) -> Counter[str]:
    """Trained trajectories by the worker that finished them."""
    rows = StoreSnapshot(folder / REPLAY_FOLDER).table().to_pylist()
    return Counter(row["worker_id"] for row in rows if row["fate"] == "trained")


def test_random_schedules_keep_to_one_version_and_train_each_trajectory_once(
    tmp_path: Path, watched: Watched
) -> None:
    """Of engines, speeds, windows, parts, losses of workers and of installs."""
    for seed in range(SCHEDULES):
        rng = random.Random(f"schedule {seed}")
        num_remote, engines = rng.randint(0, 4), rng.randint(1, 2)
        names = [f"w{i}" for i in range(num_remote)] + [f"s{i}" for i in range(engines)]
        faults = Faults(
            die_at_s={
                (rng.choice(names), epoch): rng.uniform(0.5, 25.0)
                for epoch in range(3)
                for _ in range(rng.randint(0, 2))
            },
            refuse_installs={(rng.choice(names), rng.randint(0, STEPS)) for _ in range(rng.randint(0, 2))},
        )
        config = seeded(
            parts=rng.choice([None, 1, 2, 3]),
            engines=engines,
            first_s=rng.choice([0.0, 0.1, 0.5, 3.0]),
            eta=rng.choice([0.5, 2.0, 5.0]),
        )
        config = replace_section(config, fleet={"restarts": 10})
        outcome, _ = run(
            tmp_path / str(seed),
            config,
            seconds_per_token=tuple(rng.choice([0.05, 0.3, 2.0]) for _ in range(num_remote)),
            seeder_seconds_per_token=rng.choice([0.05, 0.3]),
            t_train_s=rng.choice([0.1, 1.0, 8.0]),
            max_groups=rng.choice([1, 2, 8]),
            faults=faults,
            seed=seed,
        )
        assert outcome.counts.trained == STEPS * GROUPS * SAMPLES
        watched.check()


def test_without_remote_workers_the_window_lasts_until_the_step_is_sampled(tmp_path: Path) -> None:
    _, trace = run(tmp_path, seeded(first_s=0.0), seconds_per_token=())
    assert set(of_workers(tmp_path)) == {"s0"}
    for report in trace.seeding:
        assert [one.what for one in report.intervals] == ["seed", "train"]
        assert report.mean_remote == 0.0


def test_a_window_balances_the_waits_and_a_step_takes_less_time(tmp_path: Path, watched: Watched) -> None:
    """One slow remote worker, for whom the learner waits long; a faster one needs a shorter window."""
    took_s, windows = {}, {}
    steps = tiny_config(steps=16, max_staleness=0)
    for name, config, speeds in (  # each run has a clock of its own
        ("remote only", replace_section(steps, learner={"micro_batch_groups": 1}), (1.5,)),
        ("colocated", seeded(steps), ()),
        ("seeded", seeded(steps, first_s=0.5), (1.5,)),
        ("seeded, faster", seeded(steps, first_s=0.5), (0.8,)),
    ):
        settings: dict[str, Any] = {"seeder_seconds_per_token": 1.0, "t_train_s": 4.0, "max_groups": 1}
        outcome, trace = Simulation(config, tmp_path / name, seconds_per_token=speeds, **settings).run()
        assert outcome.status == "done"
        watched.check()
        took_s[name] = trace.idle_s + trace.train_s
        windows[name] = [report.t_seed_s for report in trace.seeding[8:]]
        if "seeded" in name:
            check_steps(config, trace)
            assert set(of_workers(tmp_path / name)) == {"s0", "w0"}
    assert took_s["seeded"] < 0.9 * took_s["colocated"]
    assert took_s["seeded"] < 0.9 * took_s["remote only"]
    assert sum(windows["seeded, faster"]) < sum(windows["seeded"])


def test_when_the_only_remote_worker_dies_in_mid_step_the_seeders_end_the_step(tmp_path: Path) -> None:
    """It is away for the time of some restarts; back, it takes part in the steps again."""
    dies = {("w0", epoch): 12.0 for epoch in range(3)}  # back after 0 + 1 + 3 seconds and three starts
    config = replace_section(seeded(first_s=0.3), fleet={"restarts": 10})
    config = replace_section(config, run={"steps": 24, "wait_limit_s": 300.0})
    _, trace = run(tmp_path, config, seconds_per_token=(0.6,), faults=Faults(die_at_s=dies))
    alone = [report for report in trace.seeding if report.mean_remote < 0.5]
    assert alone
    assert trace.seeding[-1].mean_remote == pytest.approx(1.0)
    sampled = of_workers(tmp_path)
    assert sampled["w0"] > 0 < sampled["s0"]
    assert max(report.remote_s for report in trace.seeding) < 12.0  # no step stood still


def test_a_seeder_that_dies_is_parked_when_it_comes_back(tmp_path: Path) -> None:
    config = replace_section(seeded(first_s=0.2), fleet={"restarts": 10})
    dies = {("s0", 0): 5.0, ("s0", 1): 12.0}
    _, trace = run(tmp_path, config, seconds_per_token=(0.5,), faults=Faults(die_at_s=dies), t_train_s=3.0)
    assert sum(line.startswith("worker lost s0") for line in trace.lines) == 2


@pytest.mark.parametrize("parts", [1, 2])
def test_a_learner_killed_between_two_parts_resumes_without_skipping_or_repeating(
    tmp_path: Path, watched: Watched, parts: int
) -> None:
    config = seeded(tiny_config(steps=20, max_staleness=0), first_s=0.3)
    config = replace_section(config, checkpoint={"every": 5, "keep": 2})
    faults = Faults(learner_dies_at_step=13, learner_dies_after=parts)
    with pytest.raises(RunError, match="killed at step 13"):
        Simulation(config, tmp_path, faults=faults, seconds_per_token=(1.0,)).run()
    watched.check()
    resumed = Simulation(config, tmp_path, seed=1, seconds_per_token=(1.0,))
    outcome, trace = resumed.run(resume_dir=tmp_path / "checkpoints" / "step-000010", lineage="sim2")
    check(config, outcome, trace)
    assert [batch.step for batch in trace.batches] == list(range(10, 20))
    rows = StoreSnapshot(tmp_path / REPLAY_FOLDER).table().to_pylist()
    trained = Counter(row["trajectory_id"] for row in rows if row["fate"] == "trained")
    assert len(trained) == 20 * GROUPS * SAMPLES
    assert set(trained.values()) == {1}


def test_a_stop_in_an_open_window_ends_with_a_checkpoint(tmp_path: Path, watched: Watched) -> None:
    for seed in range(6):
        config = seeded(tiny_config(steps=1000, max_staleness=0), first_s=1.0)
        simulation = Simulation(
            config, tmp_path / str(seed), stop_at_s=10.0 + 0.37 * seed, seconds_per_token=(2.0,)
        )
        outcome, trace = simulation.run()
        assert outcome.status == "stopped"
        saved = sorted(path.name for path in (tmp_path / str(seed) / "checkpoints").iterdir())
        assert saved == [f"step-{len(trace.batches):06d}"]
        watched.check()


def test_seeding_is_for_steps_of_one_version() -> None:
    with pytest.raises(ValueError, match=r"seeding\.engines=1 does not go with staleness\.max_staleness=3"):
        replace_section(tiny_config(), seeding={"engines": 1})


def test_a_seeder_that_comes_back_takes_part_in_the_window_that_is_open(tmp_path: Path) -> None:
    config = seeded(tiny_config(steps=1, max_staleness=0), engines=2)
    slow: dict[str, Any] = {"seeder_seconds_per_token": 3.0, "max_groups": 1, "seconds_per_token": ()}
    run(tmp_path, config, faults=Faults(die_at_s={("s1", 0): 4.0}), **slow)
    assert of_workers(tmp_path)["s1"] > 0
