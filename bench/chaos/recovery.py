"""`recovery`: how soon the work of a lost worker goes on, and whether a poor link looks like a loss.

Three machines (`machines.py`): the driver, the learner and the replay buffer on the first, a worker on each
of the others. All packets between them take 80 ms each way and 2 % of them are lost, at every measurement
here. Answers take nine seconds, so that leases last 22 s and what notices a loss is not a lease that ends.

A fault is one of

- `actor`: kill -9 of the process of a worker;
- `node stopped`: SIGSTOP of every process of the machine of a worker, the raylet first. Nobody is told
  anything: no connection is closed or reset, as when a machine has vanished;
- `node killed`: kill -9 of every process of that machine; its kernel closes their connections;
- `link`: no packet goes to or from that machine any more.

Work has resumed once each prompt that the lost incarnation had a lease of at the moment of the fault, and
never hands in, is leased to another incarnation, *and* tokens that this one sampled have reached the replay
buffer. The time is that of the last such prompt. Both moments are by the clock of this one machine: the
fault's is taken before the first signal is sent or the switch told, the others in the replay buffer's
process.

A false death is a worker that the run takes for lost while nothing was done to it. Leases that were taken
from a living worker because they ran out are counted beside; so are machines that were given up between the
faults.

`RECOMMENDED` is what the head of a cluster is to be started with (configs/cluster has it). The head of a
private cluster, which is the only machine of its run, keeps Ray's defaults: nobody could go on elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.chaos.failpoints import LEASES, SEEN, arm
from bench.chaos.leases import Incarnation, LeaseRecord
from bench.chaos.lives import ENDLESS, START_S, WORDS, kill, read_lines, wait_for
from bench.chaos.machines import LOSS, RTT_S, USUAL, Machines, shut_off, up
from tests.integration.fake_cluster import GCS_PORT
from tests.integration.harness import ROOT, Program, events, metrics, program
from tests.integration.netns import missing

Fault = Literal["actor", "node stopped", "node killed", "link"]
NOTHING = "none"  # in the place of a fault: a machine was given up all the same
BARS_S: dict[Fault, float] = {"actor": 4.0, "node stopped": 6.0, "node killed": 6.0, "link": 8.0}
RECOMMENDED = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
SETTINGS: dict[str, dict[str, str]] = {"recommended": RECOMMENDED, "defaults": {}}
DEFAULTS_SHARE = 4  # so many times fewer faults with the defaults: each takes a minute
WORKERS = (1, 2)  # their machines
PER_LIFE = 8  # faults of a run: each worker that is started again is started later, up to a minute
LIMIT_S = 150.0  # until work has resumed; counted as so much if it has not
RECENT_S = 4.0  # a worker was heard of so lately: it samples
SLICE_S = 30.0
SAMPLES, QUIET = "samples.jsonl", "quiet.jsonl"
_WORKER = "{{sku: machine{0}, max_groups: 32, resources: {{CPU: 1, machine{0}: 1}}}}"
_WORDS = (
    *WORDS,
    "staleness.max_staleness=3",
    "checkpoint.every=0",
    "sampling.stream_s=1.0",
    "learner.resources={CPU: 1, machine0: 1}",
    f"fleet.workers=[{', '.join(_WORKER.format(machine) for machine in WORKERS)}]",
    f"run.steps={ENDLESS}",
)
TOKEN_S = 1.5  # six tokens an answer


def recovery(folder: Path, number: int, minutes: float) -> dict[str, Any]:
    """Do what is not in the folder yet, in namespaces of its own, and give the figures of all.

    Args:
        folder: of the campaign.
        number: faults of each kind, with the recommended settings; a quarter of it with the defaults.
        minutes: of a run that nothing is done to.

    Raises:
        RuntimeError: no such namespaces here, or the campaign failed.
    """
    if why := missing():
        raise RuntimeError(f"recovery cannot be shown here: {why}")
    words = [sys.executable, "-m", "bench.chaos.recovery", str(folder), str(number), str(minutes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(shut_off(words), env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"the campaign ended with status {done.returncode}; it goes on from {folder}")
    return figures_of(read_lines(folder / SAMPLES), read_lines(folder / QUIET))


# --- figures -------------------------------------------------------------------------------------


def figures_of(samples: Sequence[Mapping[str, Any]], quiet: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures by settings and fault, and those of the undisturbed run."""
    figures: dict[str, Any] = {"rtt_s": RTT_S, "loss": LOSS, "recommended_environment": RECOMMENDED}
    for name in SETTINGS:
        mine = [one for one in samples if one["settings"] == name]
        by_fault = {fault: [one for one in mine if one["fault"] == fault] for fault in BARS_S}
        figures[name] = {fault: _fault_figures(some) for fault, some in by_fault.items() if some}
        figures[f"{name}: given up for nothing"] = sum(one["fault"] == NOTHING for one in mine)
    if quiet:
        figures["quiet"] = {
            "minutes": round(sum(one["seconds"] for one in quiet) / 60, 2),
            "round_trip_ms": round(1e3 * statistics.median(one["round_trip_s"] for one in quiet), 1),
            "sent_again": round(sum(one["again"] for one in quiet) / sum(one["sent"] for one in quiet), 4),
            **{key: sum(one[key] for one in quiet) for key in ("steps", "workers_lost", "leases_taken_away")},
        }
    return figures


def _fault_figures(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = sorted(LIMIT_S if one["seconds"] is None else one["seconds"] for one in samples)
    return {
        "number": len(seconds),
        "median_s": round(statistics.median(seconds), 2),
        "p95_s": round(seconds[math.ceil(0.95 * len(seconds)) - 1], 2),
        "noticed_by_a_lease": sum(one["noticed"] == "lease" for one in samples),
        "samples_s": [round(one, 2) for one in seconds],
    }


def recovery_verdicts(figures: Mapping[str, Any], number: int, minutes: float) -> dict[str, bool]:
    """Claims of the campaign, by their words."""
    mine: Mapping[str, Any] = figures["recommended"]
    claims = {
        f"{number} faults of each kind": set(mine) == set(BARS_S)
        and all(row["number"] >= number for row in mine.values())
    }
    for fault, bar_s in BARS_S.items():
        claims[f"{fault}: work has resumed within {bar_s:g} s, p95"] = (
            fault in mine and mine[fault]["p95_s"] <= bar_s
        )
    if minutes:
        quiet = figures.get("quiet", {"minutes": 0.0, "workers_lost": 0, "sent_again": 0.0})
        link = f"{1e3 * RTT_S:.0f} ms and {100 * LOSS:.0f} % loss"
        claims[f"no false death in {minutes:g} minutes of {link}"] = (
            quiet["minutes"] >= minutes and quiet["workers_lost"] == 0 and quiet["sent_again"] > 0
        )
    return claims


def faults_left(samples: Sequence[Mapping[str, Any]], name: str, number: int) -> list[Fault]:
    """Faults still to be made, of `number` of each kind, the kinds in turn."""
    done = dict.fromkeys(BARS_S, 0)
    for one in samples:
        if one["settings"] == name and one["fault"] != NOTHING:
            done[one["fault"]] += 1
    return [fault for turn in range(number) for fault in BARS_S if turn >= done[fault]]


# --- inside the namespaces -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Life:
    """A run on a cluster, and what its replay buffer is told."""

    machines: Machines
    running: Program
    record: LeaseRecord
    missed: list[int] = field(default_factory=list)  # machines that were given up and nothing done to them
    struck: set[Incarnation] = field(default_factory=set)  # whose end was our doing

    def worker(self, machine: int) -> str:
        """The name of the worker on it."""
        return f"w{WORKERS.index(machine)}"

    def wait(self, condition: Any, limit_s: float, what: str) -> Any:
        """`wait_for`, while the run lives and its record is read."""

        def reached() -> Any:
            if self.running.process.poll() is not None:
                raise RuntimeError(f"the run ended by itself: {self.running.tail()}")
            self.record.read()
            return condition()

        return wait_for(reached, limit_s, what)

    def sampling(self, machine: int) -> Incarnation | None:
        """The incarnation that samples there now, if one does."""
        newest = self.record.samples(self.worker(machine), time.time() - RECENT_S)
        return newest if newest not in self.struck else None

    def wait_until_all_sample(self) -> None:
        """Until each worker has leases, and sends tokens. A machine that was given up joins again."""

        def all_sample() -> bool:
            for machine in WORKERS:
                if not self.machines.has_raylet(machine):
                    self.missed.append(machine)
                    self.machines.clear(machine)
                    self.machines.start(machine)
            return all(self.sampling(machine) for machine in WORKERS)

        self.wait(all_sample, START_S, "tokens of every worker")


@contextmanager
def life(folder: Path, settings: Mapping[str, str]) -> Iterator[Life]:
    """A run with two workers on machines of their own. Nothing of it is left; no other may be in `folder`."""
    place = folder / "life"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    arm(place, None)
    environment = {
        "PYTHONPATH": os.pathsep.join((str(ROOT / "bench" / "chaos" / "inject"), str(ROOT))),
        "ECHO_CHAOS": str(place),
        "ECHO_CHAOS_TOKEN_S": str(TOKEN_S),
        LEASES: "1",
    }
    with up(1 + len(WORKERS), {**environment, **settings}) as machines, ExitStack() as stack:
        joined = {**environment, **USUAL, "RAY_ADDRESS": machines.address}
        starting = program(place / "work", place / "run", *_WORDS, environment=joined)
        with machines.net.inside(0):
            running = stack.enter_context(starting)
        one = Life(machines, running, LeaseRecord(place / SEEN))
        one.wait_until_all_sample()
        yield one
    shutil.rmtree(place)


def strike(one: Life, fault: Fault, machine: int) -> dict[str, Any]:
    """One fault, and how long its work stood still; then the machine is as it was."""
    worker = one.worker(machine)
    lost: Incarnation = one.wait(lambda: one.sampling(machine), START_S, f"tokens of {worker}")
    one.struck.add(lost)
    at_s = time.time()
    if fault == "actor":
        for name, process in one.machines.processes(machine):
            if name.startswith("ray::WorkerPro"):
                kill(process)
    elif fault == "link":
        one.machines.net.cut(machine)
    else:
        one.machines.signal(machine, signal.SIGSTOP if fault == "node stopped" else signal.SIGKILL)
    resumed_s: float | None = None
    with suppress(TimeoutError):
        resumed_s = one.wait(lambda: one.record.resumed_s(lost, at_s), LIMIT_S, "work to resume")
    sample = {
        "fault": fault,
        "machine": machine,
        "leases": len(one.record.open_leases(lost, at_s)),
        "seconds": None if resumed_s is None else resumed_s - at_s,
        "noticed": "loss" if one.record.was_lost(worker, at_s, resumed_s or math.inf) else "lease",
    }
    if fault != "actor":
        one.machines.clear(machine)
        one.machines.start(machine)
    return sample


def _strike_all(folder: Path, name: str, number: int) -> None:
    while left := faults_left(read_lines(folder / SAMPLES), name, number):
        with life(folder, SETTINGS[name]) as one:
            for fault in left[:PER_LIFE]:
                done = read_lines(folder / SAMPLES)
                one.wait_until_all_sample()
                for machine in one.missed:
                    _append(folder / SAMPLES, {"settings": name, "fault": NOTHING, "machine": machine})
                    print(f"[recovery] machine {machine} was given up, and nothing done to it", flush=True)
                one.missed.clear()
                time.sleep(random.Random(f"{name}/{len(done)}").uniform(0.0, 2.0))
                before = sum(earlier["fault"] == fault for earlier in done)
                sample = {"settings": name, **strike(one, fault, WORKERS[before % len(WORKERS)])}
                _append(folder / SAMPLES, sample)
                print(f"[recovery] {len(done) + 1}: {sample}", flush=True)


def _sit_still(folder: Path, minutes: float) -> None:
    """A run that nothing is done to, in slices that are kept."""

    def done_s() -> float:
        return sum(float(one["seconds"]) for one in read_lines(folder / QUIET))

    if done_s() >= 60 * minutes:
        return
    with life(folder, RECOMMENDED) as one:
        before = _so_far(one)
        while (left_s := 60 * minutes - done_s()) > 0:
            begun_s = time.monotonic()
            time.sleep(min(SLICE_S, left_s + 0.5))
            one.wait(lambda: True, 1.0, "the record")
            now = _so_far(one)
            piece: dict[str, float] = {key: now[key] - before[key] for key in now}
            piece |= {"seconds": time.monotonic() - begun_s, "round_trip_s": _round_trip_s(one.machines)}
            before = now
            _append(folder / QUIET, piece)
            print(f"[recovery] undisturbed {done_s():.0f} s: {piece}", flush=True)


def _so_far(one: Life) -> dict[str, int]:
    sent = again = 0
    for machine in WORKERS:
        with one.machines.net.inside(machine):
            lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        counters = dict(zip(names[1:], map(int, values[1:]), strict=True))
        sent, again = sent + counters["OutSegs"], again + counters["RetransSegs"]
    return {
        "steps": len(metrics(one.running.run_dir)),
        "workers_lost": len(events(one.running.run_dir, "worker lost")),
        "leases_taken_away": one.record.taken_away(),
        "sent": sent,
        "again": again,
    }


def _round_trip_s(machines: Machines) -> float:
    """Of the first machine of a worker to the head: the least of a few."""
    taken_s = []
    with machines.net.inside(WORKERS[0]):
        for _ in range(3):
            begun_s = time.monotonic()
            with socket.create_connection((machines.net.address(0), GCS_PORT), timeout=10.0):
                taken_s.append(time.monotonic() - begun_s)
    return min(taken_s)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def main(folder: Path, number: int, minutes: float) -> None:
    """The whole campaign, inside."""
    _strike_all(folder, "recommended", number)
    _sit_still(folder, minutes)
    _strike_all(folder, "defaults", math.ceil(number / DEFAULTS_SHARE))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
