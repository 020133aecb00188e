"""`soak`: a long run with a fault every few seconds, and what each of its processes holds meanwhile.

Faults go round: a worker, its weight node and a reward process are killed, and a worker stands still for some
seconds. After the first part of the run, in which caches fill, nothing may grow: memory, descriptors and
threads by the part a process plays, the number of processes, the memory of all of them, and the bytes on
disk. All memory is compared at the most usual number of processes: it follows how many live, and after a
fault some are missing until others have started. Two things grow on purpose
and are judged otherwise: logs, which are left out, and the replay store. No group is ever forgotten there,
else it could be accepted twice; it may keep so many bytes of each, where its rows have gone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.chaos.failpoints import SEEN, Victim, arm, seen
from bench.chaos.lives import START_S, Lineage, find, kill, read_lines, wait_for
from echo_planes.data.store.fates import FATES_NAME
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot
from tests.integration.harness import Program, events, summary

FAULT_EVERY_S = 20.0
SAMPLE_EVERY_S = 10.0
STILL_S = 5.0  # a worker that stands still
SETTLED = 1 / 6  # of the run: caches are full by then
VICTIMS: tuple[Victim, ...] = ("worker", "worker's node", "reward")
STILL = "worker stands still"
LOGS = ("metrics.jsonl", "events.jsonl")  # grow with every step, as they should
# So much more in the last third than in the first, after the run has settled, counts as growth.
MOST_GROWTH = {"rss_bytes": (0.05, 24 * 2**20), "descriptors": (0.05, 6), "threads": (0.05, 4)}
MOST_DISK_GROWTH = (0.05, 16 * 2**20)
MOST_PROCESS_GROWTH = (0.05, 2)
# On a slow machine two hours may not fill a segment of the replay store, and then the run goes on by so many.
MORE_STEPS, MORE_S = (1000,) * 12, 1800.0
MOST_BYTES_PER_GROUP = 400.0  # on disk
WHOLE = "all processes"
UNASSIGNED = "ray::IDLE"  # a process that plays no part yet
WORDS = (
    "staleness.max_staleness=3",
    "staleness.queue_batches=2",
    "replay.max_versions=50",
    "weights.keep_snapshots=2",
    "weights.keep_patches=50",
    "fleet.workers.0.count=2",
    "fleet.workers.0.resources={CPU: 0.5}",  # two workers and the learner on two cores
    "learner.resources={CPU: 0.5}",
)


@dataclass(frozen=True, slots=True)
class Growth:
    """Medians of one quantity of one part: early, late, and whether that is flat."""

    early: float
    late: float
    is_flat: bool


def soak(folder: Path, hours: float, *, real_engine: bool) -> dict[str, Any]:
    """Figures of one run of so many hours; begun anew if it was interrupted."""
    lineage = Lineage(folder / "soak", *WORDS, real_engine=real_engine)
    samples = lineage.folder / "samples.jsonl"
    samples.unlink(missing_ok=True)
    (lineage.folder / SEEN).unlink(missing_ok=True)
    arm(lineage.folder, None, real_engine=real_engine)
    faults: list[dict[str, Any]] = []
    with lineage.life(1) as running:
        wait_for(lambda: lineage.last_step() > 0 or running.process.poll() is not None, START_S, "a step")
        begun_s = time.monotonic()
        with samples.open("a", buffering=1) as out:
            for at_s in _ticks(begun_s, hours * 3600):
                if running.process.poll() is not None:
                    raise RuntimeError(f"the run ended after {at_s:.0f} s: {running.tail()}")
                for line in _sampled(running, lineage.run_dir, at_s):
                    out.write(json.dumps(line) + "\n")
                if at_s >= (len(faults) + 1) * FAULT_EVERY_S:
                    faults.append(_fault(running, len(faults), at_s))
                    print(f"[soak] {at_s:6.0f} s  step {lineage.last_step()}  {faults[-1]}", flush=True)
        running.interrupt()
        running.wait(START_S)
    kept = 0.0
    for number, steps in enumerate((3, *MORE_STEPS), start=2):
        with lineage.life(number, lineage.last_step() + steps) as running:
            if running.wait(MORE_S) != 0:
                raise RuntimeError(f"the run does not go on: {running.tail()}")
        kept = replay_bytes_per_group(lineage.run_dir / REPLAY_FOLDER)
        if kept:
            break
    waits = [one for one in events(lineage.run_dir, "worker lost") if "timed out after" in one["text"]]
    lines = read_lines(samples)
    told = summary(lineage.run_dir)
    last = {note["step"]: note["ids"] for note in seen(lineage.folder, "batch")}
    trained = [one for step, ids in last.items() if step < told["steps"] for one in ids]
    return {
        "hours": hours,
        **fault_figures(faults),
        "steps": told["steps"],
        "lost": told["lost_trajectories"],
        "trained_twice": len(trained) - len(set(trained)),
        "replay_bytes_per_group": round(kept, 1),
        "growth": {part: _shown(of) for part, of in growth(lines, hours * 3600).items()},
        "waits that ended by their limit": [one["text"] for one in waits],
    }


def fault_figures(faults: list[dict[str, Any]]) -> dict[str, Any]:
    """Faults that hit a process. One whose victim was still starting is none."""
    kinds = [one["fault"] for one in faults if one["pid"] is not None]
    return {"faults": len(kinds), "by fault": {kind: kinds.count(kind) for kind in (*VICTIMS, STILL)}}


def verdicts(figures: dict[str, Any], hours: float) -> dict[str, bool]:
    """Claims of the campaign, by their words."""
    return {
        f"{hours:g} h with a fault every {FAULT_EVERY_S:.0f} s": figures["hours"] >= hours
        and figures["faults"] >= 0.9 * hours * 3600 / FAULT_EVERY_S,
        "memory, descriptors, threads and disk are flat": bool(figures["growth"])
        and all(one["is_flat"] for of in figures["growth"].values() for one in of.values()),
        f"the replay store keeps at most {MOST_BYTES_PER_GROUP:.0f} bytes of a group whose rows have gone": (
            0 < figures["replay_bytes_per_group"] <= MOST_BYTES_PER_GROUP
        ),
        "nothing is lost, nothing trained twice": not figures["lost"] and not figures["trained_twice"],
    }


def replay_bytes_per_group(folder: Path) -> float:
    """Bytes on disk of a group whose rows have gone: of the sealed segments, and of the log of fates.

    0 before the first segment was sealed.
    """
    index = StoreSnapshot(folder).index
    sealed = list((folder / "segments").glob("*.index"))
    if not sealed:
        return 0.0
    numbers = [int(path.stem) for path in sealed]
    in_sealed = np.isin(index.messages["segment"], numbers)
    files = sum(path.stat().st_size + path.with_suffix(".arrows").stat().st_size for path in sealed)
    fates = (folder / FATES_NAME).stat().st_size
    return float(files / index.messages["num_groups"][in_sealed].sum() + fates / index.num_groups)


def growth(lines: list[dict[str, Any]], length_s: float) -> dict[str, dict[str, Growth]]:
    """By part and quantity, once the run has settled: the first third against the last."""
    first_s, third_s = SETTLED * length_s, (1 - SETTLED) * length_s / 3
    found: dict[str, dict[str, Growth]] = {}
    for part in sorted({line["part"] for line in lines} - {UNASSIGNED}):
        of = [line for line in lines if line["part"] == part]
        limits = {"bytes": MOST_DISK_GROWTH} if part == "disk" else MOST_GROWTH
        usual = 0
        if part == WHOLE:
            limits = {"rss_bytes": MOST_GROWTH["rss_bytes"], "processes": MOST_PROCESS_GROWTH}
            usual = statistics.mode(one["processes"] for one in of)
        for name, (share, least) in limits.items():
            like = [one for one in of if part != WHOLE or name == "processes" or one["processes"] == usual]
            early = [one[name] for one in like if first_s <= one["at_s"] < first_s + third_s]
            late = [one[name] for one in like if one["at_s"] >= length_s - third_s]
            if not early or not late:
                continue
            before, after = statistics.median(early), statistics.median(late)
            flat = after - before <= max(share * before, least)
            found.setdefault(part, {})[name] = Growth(before, after, flat)
    return found


def _shown(of: dict[str, Growth]) -> dict[str, dict[str, Any]]:
    return {name: {"early": one.early, "late": one.late, "is_flat": one.is_flat} for name, one in of.items()}


def _ticks(begun_s: float, length_s: float) -> Iterator[float]:
    """Seconds since `begun_s`, one every `SAMPLE_EVERY_S`."""
    while (at_s := time.monotonic() - begun_s) < length_s:
        yield at_s
        time.sleep(max(0.0, begun_s + at_s + SAMPLE_EVERY_S - time.monotonic()))


def _sampled(running: Program, run_dir: Path, at_s: float) -> Iterator[dict[str, Any]]:
    whole_bytes = count = 0
    for process in running.processes():
        try:
            with process.oneshot():
                rss_bytes = process.memory_info().rss
                yield {
                    "at_s": at_s,
                    "part": _part(process),
                    "pid": process.pid,
                    "rss_bytes": rss_bytes,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
                whole_bytes += rss_bytes
                count += 1
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone meanwhile
    yield {"at_s": at_s, "part": WHOLE, "rss_bytes": whole_bytes, "processes": count}
    kept = 0
    for path, folders, names in os.walk(run_dir):
        if REPLAY_FOLDER in folders:
            folders.remove(REPLAY_FOLDER)
        for name in names:
            if name not in LOGS:
                try:
                    kept += os.path.getsize(os.path.join(path, name))
                except FileNotFoundError:
                    continue  # pruned meanwhile
    yield {"at_s": at_s, "part": "disk", "bytes": kept}


def _part(process: psutil.Process) -> str:
    """Name of a process's part: its module, its actor's class, or its program's name."""
    words = process.cmdline()
    title = words[0] if words else process.name()
    if title.startswith("ray::"):
        return title.split(".")[0].split()[0]
    if "-m" in words[:6]:
        module = words[words.index("-m") + 1]
        parent = process.parent()
        above = "" if parent is None else parent.name()
        return f"{module} of {above.split('.')[0]}" if above.startswith("ray::") else module
    return Path(title).name


def _fault(running: Program, number: int, at_s: float) -> dict[str, Any]:
    kinds = (*VICTIMS, STILL)
    kind = kinds[number % len(kinds)]
    rng = random.Random(number)
    victim: Victim = "worker" if kind == STILL else VICTIMS[number % len(kinds)]
    process = find(running, victim)
    if process is None:  # it is starting
        return {"at_s": at_s, "fault": kind, "pid": None}
    if kind == STILL:
        process.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.5, 1.0) * STILL_S)
        process.send_signal(signal.SIGCONT)
    else:
        kill(process)
    return {"at_s": at_s, "fault": kind, "pid": process.pid}
