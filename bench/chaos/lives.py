"""One run that is killed and resumed again and again: its lives, its processes, and what it must come to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.checkpoints import digests_of
from bench.chaos.failpoints import Victim, arm, seen
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot
from tests.integration.harness import ROOT, Program, metrics, program, summary
from tests.integration.leftovers import KILLED_S, Room, left_within

PROMPTS, SAMPLES = 6, 4
EVERY = 5  # steps between checkpoints
ENDLESS = 1_000_000
START_S = 240.0  # until the first step of a life, on a busy machine
WORDS = (
    "task=bench.chaos.parts:ChaosTask",
    "model.path=builtin:tiny-code",
    "model.max_model_len=64",
    "staleness.max_staleness=0",
    "eval.every=0",
    "eval.num_prompts=2",
    "eval.samples_per_prompt=1",
    "guard.mode='off'",
    f"sampling.prompts_per_step={PROMPTS}",
    f"sampling.samples_per_prompt={SAMPLES}",
    "sampling.max_new_tokens=6",
    "sampling.stream_s=0.1",
    "learner.micro_batch_tokens=512",
    "learner.decay=0",  # else the rate would hang on how long the run is to be
    "fleet.restarts=1000000",
    f"checkpoint.every={EVERY}",
)
ENDS_THE_RUN: tuple[Victim, ...] = ("driver", "learner", "learner's node", "data plane")
GOES_ON: tuple[Victim, ...] = ("worker", "worker's node", "reward")
# Processes that live no longer than the actor that started them.
OWNED = ("echo_planes.weights.node.process", "echo_planes.data.tasks.reward_child", "VLLM::")


class Lineage:
    """A run in a folder of its own: `run` is its run folder, `seen.jsonl` the record of its processes."""

    def __init__(self, folder: Path, *words: str, real_engine: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.run_dir = folder / "run"
        self.real_engine = real_engine
        self._words = (*WORDS, *words)
        self._room: Room | None = None  # of the present life

    @contextmanager
    def life(self, number: int, steps: int = ENDLESS) -> Iterator[Program]:
        """The program, from its newest checkpoint if there is one. Its working folder goes with it.

        It has a temporary folder and shared memory of its own, in which all that is left is its own.
        """
        work = self.folder / f"life-{number:04d}"
        shutil.rmtree(work, ignore_errors=True)
        if not (self.folder / "plan.json").exists():
            arm(self.folder, None, real_engine=self.real_engine)
        goes_on = self.has_checkpoint()
        if not goes_on and self.run_dir.exists():
            shutil.rmtree(self.run_dir)  # killed before its first checkpoint: begun anew
            (self.folder / "seen.jsonl").unlink(missing_ok=True)
        words = [*self._words, f"run.steps={steps}"]
        if goes_on:
            words.append(f"run.resume={self.run_dir}")
        environment = {
            "PYTHONPATH": os.pathsep.join((str(ROOT / "bench" / "chaos" / "inject"), str(ROOT))),
            "ECHO_CHAOS": str(self.folder),
        }
        with (
            Room() as self._room,
            program(work, self.run_dir, *words, room=self._room, environment=environment) as running,
        ):
            yield running
        shutil.rmtree(work)

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to go on from."""
        return any((self.run_dir / "checkpoints").glob("step-*/meta.json"))

    def left_behind(self) -> str:
        """List what is still there of a life `KILLED_S` after it ended, processes and files; "" if nothing.

        Raises:
            RuntimeError: there was no life yet.
        """
        room = self._room
        if room is None:
            raise RuntimeError("nothing can be left of a run that was never started")
        left = left_within(room.look, KILLED_S)
        return str(left) if left.count else ""

    def last_step(self) -> int:
        """Of the metrics; 0 before the first."""
        rows = metrics(self.run_dir)
        return int(rows[-1]["step"]) if rows else 0


def find(running: Program, victim: Victim) -> psutil.Process | None:
    """The living process of a run that plays that part; of several the one that is oldest."""
    if victim == "driver":
        return psutil.Process(running.process.pid)
    for process in sorted(running.processes(), key=lambda one: one.pid):
        try:
            command, parent = " ".join(process.cmdline()), process.parent()
            above = parent.name() if parent is not None else ""
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        is_node = "echo_planes.weights.node.process" in command
        if {
            "learner": command.startswith("ray::LearnerProcess"),
            "worker": command.startswith("ray::WorkerProcess"),
            "data plane": command.startswith("ray::DataService"),
            "learner's node": is_node and above.startswith("ray::LearnerPro"),
            "worker's node": is_node and above.startswith("ray::WorkerPro"),
            "reward": "echo_planes.data.tasks.reward_child" in command,
        }[victim]:
            return process
    return None


def orphans(running: Program) -> list[str]:
    """Command lines of a run's living processes whose owner is gone: nodes, reward processes, engines."""
    found = []
    for process in running.processes():
        try:
            command, parents = " ".join(process.cmdline()), process.parents()
            owned = any(parent.name().startswith(("ray::WorkerPro", "ray::LearnerPro")) for parent in parents)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if not owned and any(word in command for word in OWNED):
            found.append(f"{process.pid} {command[:80]}")
    return found


def wait_for(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    """The first truthy value.

    Raises:
        TimeoutError: none within the limit.
    """
    until_s = time.monotonic() + limit_s
    tick = threading.Event()
    while not (value := condition()):
        if time.monotonic() > until_s:
            raise TimeoutError(f"{limit_s:.0f} s without {what}")
        tick.wait(0.05)
    return value


def kill(process: psutil.Process) -> bool:
    """SIGKILL; whether it was still there."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on a lineage, after its last life ended well."""

    steps: int
    acknowledged: int  # groups that a worker was told are taken
    acknowledged_lost: int
    trained_twice: int
    digests: int  # publications, over all lives
    digests_unequal: int  # that differ from the unfaulted run's of that version
    books_exact: bool


def judge(lineage: Lineage, reference: dict[int, str] | None) -> Judgement:
    """Hold the record of a run's processes against its store, its summary and an unfaulted run's weights.

    `reference`: digest by version; None where the algorithm is not deterministic.
    """
    store = StoreSnapshot(lineage.run_dir / REPLAY_FOLDER).table()
    groups = set(store.column("group_id").to_pylist())
    taken = [group for note in seen(lineage.folder, "acknowledged") for group in note["groups"]]
    last = {note["step"]: note["ids"] for note in seen(lineage.folder, "batch")}
    told = summary(lineage.run_dir)
    trained = [one for step, ids in last.items() if step < told["steps"] for one in ids]
    published = [(note["version"], note["digest"]) for note in seen(lineage.folder, "weights")]
    rows = [row for row in store.to_pylist() if row["fate"] == "trained"]
    counted = told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    whole = [row["step"] for row in metrics(lineage.run_dir)] == list(range(1, told["steps"] + 1))
    return Judgement(
        steps=told["steps"],
        acknowledged=len(taken),
        acknowledged_lost=len(set(taken) - groups),
        trained_twice=len(trained) - len(set(trained)),
        digests=len(published),
        digests_unequal=0
        if reference is None
        else sum(reference.get(version) != digest for version, digest in published),
        books_exact=counted
        and whole
        and told["status"] == "done"
        and told["lost_trajectories"] == told["duplicate_trajectories"] == told["digest_mismatches"] == 0
        and len(rows) == told["trained"] == told["steps"] * PROMPTS * SAMPLES
        and {row["trajectory_id"] for row in rows} == set(trained),
    )


class Reference:
    """A run of at least so many steps that nobody disturbs. Kept in `folder`; one too short goes on."""

    def __init__(self, folder: Path, steps: int) -> None:
        lineage = Lineage(folder, "checkpoint.keep=1000000")
        steps = -(-steps // EVERY) * EVERY
        if lineage.last_step() < steps:
            number = sum(1 for _ in folder.glob("went-*")) + 1
            with lineage.life(number, steps) as running:
                if running.wait(START_S + 5.0 * steps) != 0:
                    raise RuntimeError(f"the undisturbed run failed: {running.tail()}")
            (folder / f"went-{number}").touch()
        self.digests = {note["version"]: note["digest"] for note in seen(folder, "weights")}
        self._checkpoints = lineage.run_dir / "checkpoints"

    @cache  # noqa: B019  a campaign has one or two of these
    def parts(self, name: str) -> dict[str, str]:
        """Digests of one of its checkpoints, by part; none where it has no such checkpoint."""
        folder = self._checkpoints / name
        return digests_of(folder) if folder.exists() else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines of a file that may not be there yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
