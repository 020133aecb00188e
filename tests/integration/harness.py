"""Runs the program the way a person does: a process of its own, its output in files.

`python -m tests.integration.harness lossy WORDS` is the program on a network that loses publications,
`watched WORDS` one whose data plane writes down what it is told, `slow WORDS` one with a slow learner,
`heavy WORDS` one whose every micro-batch takes seconds, `mute WORDS` that one without word of its progress,
`impatient WORDS` one that soon names what stands still;
`python -m tests.integration.harness several < CASES` is the program many times in one process.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot
from tests.integration.leftovers import Room

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 420.0  # a whole run takes a minute on two idle cores; the machine may be busy
POLL_S = 0.1
PROGRAM = ("echo_planes.run",)
LOSSY_PROGRAM = ("tests.integration.harness", "lossy")
SLOW_STEP_S = 1.0  # more for every step of the slow program
SLOWER_FROM, SLOWER_STEP_S = 20, 8.0  # and from this step on
SLOW_PROGRAM = ("tests.integration.harness", "slow")
WATCHED_PROGRAM = ("tests.integration.harness", "watched")
MICRO_BATCH_S = 8.0  # of the heavy program
LOST_VERSIONS = (4, 5)  # what the lossy network does not deliver

T = TypeVar("T")


def wait_until(condition: Callable[[], T], limit_s: float, what: str) -> T:
    """The first truthy value of `condition`; fails the test after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    tick = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {limit_s:.0f} s in vain for {what}")
        tick.wait(POLL_S)


@dataclass(frozen=True)
class Program:
    """A run that was started: its process, its run folder, and where its output goes."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    work_dir: Path  # its working directory, and nobody else's: it marks every process of the run

    @property
    def stdout(self) -> str:
        return (self.work_dir / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.work_dir / "stderr").read_text()

    def processes(self) -> list[psutil.Process]:
        """Every living process of the run, orphans too.

        Told by the working directory: all inherit it, while a title overwrites the environment in /proc.
        """
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.cwd() == str(self.work_dir)
            except (psutil.Error, OSError):
                continue  # gone meanwhile, a zombie, or deeper than a path may be long: no run works there
            if is_ours:
                found.append(process)
        return found

    def actor(self, title: str) -> psutil.Process:
        """The first process of the run whose title begins with `title`."""
        return next(p for p in sorted(self.processes(), key=lambda p: p.pid) if p.name().startswith(title))

    def wait(self, limit_s: float = RUN_LIMIT_S) -> int:
        """The exit status."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {limit_s:.0f} s:\n{self.tail()}") from None

    def wait_until(self, condition: Callable[[], T], what: str) -> T:
        """The first truthy value of `condition`, while the run lives; fails the test at its end.

        A run that has ended fails the test too, unless its last words made the condition true.
        """

        def reached() -> T:
            ended = self.process.poll() is not None
            value = condition()
            if ended and not value:
                raise AssertionError(f"the run ended before {what}:\n{self.tail()}")
            return value

        try:
            return wait_until(reached, RUN_LIMIT_S, what)
        except AssertionError as missed:
            told = json_lines(self.run_dir / "events.jsonl")
            last = [event for event in told if event["kind"] not in ("publication", "checkpoint")][-20:]
            raise AssertionError(f"{missed}; last events but publications: {last}") from None

    def has_made(self, step: int) -> bool:
        """Whether metrics.jsonl holds `step`."""
        steps = metrics(self.run_dir)
        return bool(steps) and steps[-1]["step"] >= step

    def wait_for_step(self, step: int) -> None:
        """Wait until metrics.jsonl holds `step`."""
        self.wait_until(lambda: self.has_made(step), f"step {step}")

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ctrl-C in a terminal: every process of the foreground group hears it. `timeout` sends SIGTERM."""
        os.killpg(self.process.pid, number)

    def left_behind(self) -> list[str]:
        """Processes that outlive the run by more than a moment."""

        def ended() -> bool:
            return not self.processes()

        try:
            wait_until(ended, 10.0, "the processes of the run to end")
        except AssertionError:
            return [f"{p.pid} {p.name()}" for p in self.processes()]
        return []

    def tail(self) -> str:
        return f"{self.stdout[-2000:]}\n{self.stderr[-4000:]}"


def _environment() -> dict[str, str]:
    """This one's, less what would change a run, with the checkout importable from any folder.

    A learner in this process leaves gloo's interface in its environment: not that of a run's machines.

    Ray gives actors the lowest priority but four, so that a desktop stays usable. Beside a test of usual
    priority on the same core a worker would take many minutes to start.
    """
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "ECHO_PLANES_", "GLOO_", "NCCL_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}


@contextmanager
def program(
    work_dir: Path,
    run_dir: Path,
    *words: str,
    command: Sequence[str] = PROGRAM,
    room: Room | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Program]:
    """Start the program on `run_dir`, in `room`; whatever is left of it at the end is killed.

    `environment`: variables beside the usual ones.
    """
    work_dir.mkdir()
    given = [] if any(word.startswith("run.resume=") for word in words) else [f"run.dir={run_dir}"]
    with (work_dir / "stdout").open("wb") as out, (work_dir / "stderr").open("wb") as err:
        process = subprocess.Popen(
            [*(room.prefix(work_dir) if room else ()), sys.executable, "-m", *command, *given, *words],
            cwd=work_dir,
            env=_environment() | (room.environment if room else {}) | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # a process group of its own, as a shell gives it
        )
    running = Program(process, run_dir, work_dir)
    try:
        yield running
    finally:
        for left in running.processes():
            try:
                left.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()


def run_to_end(work_dir: Path, run_dir: Path, *words: str, command: Sequence[str] = PROGRAM) -> Program:
    """A whole run that must end well and leave no process behind."""
    with program(work_dir, run_dir, *words, command=command) as finished:
        status = finished.wait()
        assert status == 0, finished.tail()
        assert finished.left_behind() == []
    return finished


def told_by(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run a test module as a program, without settings of Ray and of ours; return its last line, JSON."""
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ECHO_PLANES_"))
    }
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=plain | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# --- what a run wrote ----------------------------------------------------------------------------


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written to."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return json_lines(run_dir / "metrics.jsonl")


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json_lines(run_dir / "events.jsonl") if event["kind"] == kind]


def summary(run_dir: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return read


def trajectories(run_dir: Path) -> list[dict[str, Any]]:
    """Every row of the run's replay store; what a resume set aside is not among them."""
    rows = StoreSnapshot(run_dir / REPLAY_FOLDER).table().to_pylist()
    return [row for row in rows if row["fate"] != "quarantined"]


def trained(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in trajectories(run_dir) if row["fate"] == "trained"]


def staleness(row: dict[str, Any]) -> int:
    """Of a trained trajectory's oldest token."""
    return int(row["step"] - min(row["span_versions"]))


# --- a run of small steps: what is at stake in most tests is not how well it learns ---------------

PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 16, 4
SMALL = (
    f"sampling.prompts_per_step={PROMPTS_PER_STEP}",
    f"sampling.samples_per_prompt={SAMPLES_PER_PROMPT}",
    "eval.num_prompts=16",
    "eval.samples_per_prompt=1",
)


def check_books(run_dir: Path, num_steps: int, max_staleness: int = 3) -> dict[str, Any]:
    """Check what holds at the end of every run, however bumpy; return its summary."""
    told = summary(run_dir)
    assert told["status"] == "done"
    assert told["steps"] == num_steps
    assert [step["step"] for step in metrics(run_dir)] == list(range(1, num_steps + 1))
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == told["digest_mismatches"] == 0
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    rows = trained(run_dir)
    assert len(rows) == told["trained"] == num_steps * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
    assert len({row["trajectory_id"] for row in rows}) == len(rows)
    assert all(0 <= staleness(row) <= max_staleness for row in rows)
    return told


# --- a network that loses publications -----------------------------------------------------------


def lossy_run(words: list[str]) -> int:
    """The program, but each worker's first delivery of each of `LOST_VERSIONS` never arrives."""
    from echo_planes.loop import launch
    from echo_planes.types import InstallReport, Manifest

    class LossyWorker(launch.RemoteWorker):
        undelivered: set[int]

        async def install(self, manifest: Manifest, fresh: bool) -> InstallReport:
            version = manifest.version
            if version in self.undelivered:
                self.undelivered.discard(version)
                await asyncio.get_running_loop().create_future()  # nobody will ever answer
            return await super().install(manifest, fresh)

    class LossyPlanes(launch.RayPlanes):
        async def spawn_worker(self, worker_id: str, epoch: int) -> LossyWorker:
            plain = await super().spawn_worker(worker_id, epoch)
            output = self._failures / f"engine-{worker_id}-{epoch}.txt"
            worker = LossyWorker(plain.handle, f"worker {worker_id}", self.learner, output)
            worker.undelivered = set(LOST_VERSIONS)
            return worker

    return _run_on(LossyPlanes, words)


def slow_run(words: list[str]) -> int:
    """The program with a learner as slow as a large model's, which gets slower still on the way."""
    from echo_planes.loop import launch
    from echo_planes.types import StepStats, TrainBatch

    class SlowLearner(launch.RemoteLearner):
        async def train_step(self, batch: TrainBatch) -> StepStats:
            stats = await super().train_step(batch)
            more_s = SLOW_STEP_S if batch.step < SLOWER_FROM else SLOWER_STEP_S
            await asyncio.sleep(more_s)
            return replace(stats, t_train_s=stats.t_train_s + more_s)

    setattr(launch, launch.RemoteLearner.__name__, SlowLearner)
    return _run_on(launch.RayPlanes, words)


def heavy_run(words: list[str], *, mute: bool = False) -> int:
    """The program with a learner whose micro-batches take `MICRO_BATCH_S`; `mute`: it tells no progress."""
    from echo_planes.learning.actor import LearnerProcess
    from echo_planes.loop import launch
    from echo_planes.types import StepStats, TrainBatch

    class HeavyRank(LearnerProcess):
        def train_step(self, batch: TrainBatch) -> StepStats:
            learner: Any = self._learner
            micro_loss = type(learner)._micro_loss

            def heavy(*arguments: Any) -> Any:
                time.sleep(MICRO_BATCH_S)
                return micro_loss(learner, *arguments)

            learner._micro_loss = heavy
            return super().train_step(batch)

    class MuteLearner(launch.RemoteLearner):
        async def progress(self) -> dict[str, str]:
            return {}

    setattr(launch, LearnerProcess.__name__, HeavyRank)
    if mute:
        setattr(launch, launch.RemoteLearner.__name__, MuteLearner)
    return _run_on(launch.RayPlanes, words)


def impatient_run(words: list[str]) -> int:
    """The program, but what stands still is named after 4 s."""
    from echo_planes.loop import launch, runner
    from echo_planes.loop.watch import Watch

    setattr(runner, Watch.__name__, functools.partial(Watch, look_s=1.0, stalled_s=4.0))
    return _run_on(launch.RayPlanes, words)


def watched_run(words: list[str]) -> int:
    """The program, but the data plane writes down every message of its workers, in RUN/watched.jsonl."""
    from echo_planes.data.actor import DataService
    from echo_planes.loop import launch
    from echo_planes.types import Group, Lease, LeaseTokens, Receipt

    class WatchedData(DataService):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self._log = (arguments[2].parent / "watched.jsonl").open("a", buffering=1)

        def _note(self, kind: str, worker_id: str, epoch: int, **what: Any) -> None:
            record = {"at_s": time.time(), "kind": kind, "worker": worker_id, "epoch": epoch, **what}
            self._log.write(json.dumps(record) + "\n")

        async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]:
            leases = await super().pull(worker_id, epoch, room, wait_s)
            for one in leases:
                partials = [asdict(partial) for partial in one.partials]
                self._note(
                    "lease", worker_id, epoch, lease=one.lease_id, prompt=one.prompt.index, partials=partials
                )
            return leases

        async def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
            unwanted = await super().stream(worker_id, epoch, messages)
            for one in messages:
                pieces, late = asdict(one)["pieces"], one.lease_id in unwanted
                self._note("stream", worker_id, epoch, lease=one.lease_id, pieces=pieces, late=late)
            return unwanted

        async def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
            for one in messages:
                self._note("hand over", worker_id, epoch, lease=one.lease_id, pieces=asdict(one)["pieces"])
            return await super().hand_over(worker_id, epoch, messages)

        async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]:
            receipts = await super().submit(worker_id, epoch, groups)
            for receipt, (lease_id, group) in zip(receipts, groups, strict=True):
                episodes = [asdict(one.episode) for one in group.trajectories]
                reason = "" if receipt.accepted else receipt.reason
                self._note("submit", worker_id, epoch, lease=lease_id, refused=reason, episodes=episodes)
            return receipts

        async def lose(self, worker_id: str) -> int:
            self._note("lose", worker_id, -1)
            return await super().lose(worker_id)

    setattr(launch, DataService.__name__, WatchedData)
    return _run_on(launch.RayPlanes, words)


def _run_on(planes: Any, words: list[str]) -> int:
    """The program on other planes."""
    from echo_planes.cluster import session as cluster
    from echo_planes.cluster.clock import MonotonicClock
    from echo_planes.loop import launch
    from echo_planes.loop.checkpoint import CheckpointMeta
    from echo_planes.loop.job import run_job
    from echo_planes.loop.loading import load_config
    from echo_planes.reporting.terminal import View

    config = load_config(words)
    clock = MonotonicClock()
    view = View(sys.stdout, config.run.steps, False, clock)
    with cluster.ray_session(config) as config:
        outcome = asyncio.run(
            run_job(
                config,
                Path(str(config.run.dir)),
                view,
                clock,
                start_s=clock.now_s(),
                checkpoint=None,
                meta=CheckpointMeta(step=0, lineage_number=0, next_epoch=0),
                make_planes=planes,
                make_actuator=launch.make_actuator,
                worker_configs=config.first_workers(),
                export=lambda numbers: None,
            )
        )
    return 0 if outcome.status == "done" else 1


# --- many short runs in one process --------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Result of one call of the program."""

    status: int
    stdout: str
    stderr: str


def several(cases: Mapping[str, Sequence[str]], work_dir: Path) -> dict[str, Answer]:
    """Every case, in turn, in one process that works in `work_dir`; a traceback fails them all."""
    work_dir.mkdir()
    answer = subprocess.run(
        [sys.executable, "-m", "tests.integration.harness", "several"],
        cwd=work_dir,
        env=_environment(),
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    return {name: Answer(**fields) for name, fields in json.loads(answer.stdout).items()}


def _several() -> None:
    from echo_planes.run import main

    answers = {}
    for name, words in json.load(sys.stdin).items():
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = main(words)
        answers[name] = {"status": status, "stdout": out.getvalue(), "stderr": err.getvalue()}
    print(json.dumps(answers))


if __name__ == "__main__":
    others: dict[str, Callable[[list[str]], int]] = {
        "heavy": heavy_run,
        "impatient": impatient_run,
        "lossy": lossy_run,
        "mute": functools.partial(heavy_run, mute=True),
        "slow": slow_run,
        "watched": watched_run,
    }
    if sys.argv[1] in others:
        sys.exit(others[sys.argv[1]](sys.argv[2:]))
    _several()
