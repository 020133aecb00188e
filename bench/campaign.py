"""The fault campaign from the command line: `python -m bench.campaign --seeds N --json FILE`.

    python -m bench.campaign --seeds 100000 --json FILE                  seeds 0 .. 99,999 on up to 16 cores
    python -m bench.campaign --seed 1234                                 one seed, with its last events
    python -m bench.campaign --bug "a group is trained twice" --seed 0   the same, with that bug put in

After the seeds every bug of `mutants.py` is put in, one at a time, and seeds are run from 0 on until one
finds it. The file is written anew with every line of progress: whatever ends a campaign early, what was found
by then is there, and says that it is not complete.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from bench.mutants import MUTANTS, Mutant
from echo_planes.reporting.metrics import write_atomic
from echo_planes.sim.campaign import Outcome, replays, run_seed

REPLAY_EVERY = 10  # of the seeds, so many are run twice
BUG_SEEDS = 3000  # within which a bug must be found
CHUNK = 20  # seeds at a time, of one process
SHOWN = 10  # violations
PROGRESS_S = 10.0  # between two lines of progress
MOST_PROCESSES = 16


@dataclass(slots=True)
class Tally:
    """Outcomes of some seeds, counted."""

    seeds: int = 0
    replayed: int = 0
    unequal: list[int] = field(default_factory=list)  # seeds whose replay was another
    bad: list[Outcome] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    events: int = 0

    def add(self, other: Tally) -> None:
        """Enter another's."""
        self.seeds += other.seeds
        self.replayed += other.replayed
        self.unequal += other.unequal
        self.bad += other.bad
        self.statuses += other.statuses
        self.events += other.events


def run_seeds(seeds: Iterable[int], replay_every: int = REPLAY_EVERY) -> Tally:
    """Run seeds; every `replay_every`-th is run twice."""
    tally = Tally()
    for seed in seeds:
        outcome = run_seed(seed)
        tally.seeds += 1
        tally.events += outcome.num_events
        tally.statuses[outcome.status or "broken off"] += 1
        if outcome.violation:
            tally.bad.append(outcome)
        if seed % replay_every == 0:
            tally.replayed += 1
            if not replays(seed, outcome):
                tally.unequal.append(seed)
    return tally


def find(mutant: Mutant, seeds: Iterable[int]) -> Outcome | None:
    """The first seed that finds a bug, and what it says: without the bug nothing is wrong with it."""
    for seed in seeds:
        with mutant.applied():
            outcome = run_seed(seed)
        if outcome.violation and not run_seed(seed).violation:
            return outcome
    return None


def show(outcome: Outcome, bug: str = "") -> str:
    """A violation, or the end, with the events before it and the command that replays it."""
    option = f' --bug "{bug}"' if bug else ""
    command = f"python -m bench.campaign{option} --seed {outcome.seed}"
    what = f"VIOLATION: {outcome.violation}" if outcome.violation else f"ended: {outcome.status}"
    return "\n".join([*outcome.last, f"seed {outcome.seed}: {what}", f"replay: {command}"])


def _find_bug(place: int) -> Outcome | None:
    return find(MUTANTS[place], range(BUG_SEEDS))


@dataclass(slots=True)
class Campaign:
    """A campaign, as far as it has come.

    Args:
        num_seeds: that were asked for.
        processes: that run them.
        path: where the figures go; None: nowhere.
    """

    num_seeds: int
    processes: int
    path: Path | None
    tally: Tally = field(default_factory=Tally)
    found: dict[str, Outcome | None] = field(default_factory=dict)  # by bug
    stopped: str = ""  # why it ended early
    complete: bool = False
    begun_s: float = field(default_factory=time.monotonic)
    told_s: float = -math.inf

    def run(self) -> None:
        """Run to the end, or until it is interrupted. The seeds that were run are always the first ones."""
        context = multiprocessing.get_context("spawn")
        with _interrupts(), ProcessPoolExecutor(self.processes, context, _ignore_interrupts) as pool:
            try:
                starts = range(0, self.num_seeds, CHUNK)
                chunks = [range(start, min(start + CHUNK, self.num_seeds)) for start in starts]
                for part in pool.map(run_seeds, chunks):
                    self.tally.add(part)
                    self._tell()
                for mutant, outcome in zip(MUTANTS, pool.map(_find_bug, range(len(MUTANTS))), strict=True):
                    self.found[mutant.name] = outcome
                    self._tell()
                self.complete = True
            except KeyboardInterrupt:
                self.stopped = "it was interrupted"
                for child in multiprocessing.active_children():
                    child.terminate()  # what it has in hand may take minutes
            except BrokenProcessPool:
                self.stopped = "one of its processes was killed"

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong with what was run."""
        return not self.tally.bad and not self.tally.unequal and None not in self.found.values()

    def result(self) -> dict[str, Any]:
        """The figures."""
        tally, seconds = self.tally, time.monotonic() - self.begun_s
        firsts = {name: outcome.seed if outcome else None for name, outcome in self.found.items()}
        return {
            "simulated": True,
            "complete": self.complete,
            "stopped": self.stopped,
            "seeds_asked": self.num_seeds,
            "seeds": tally.seeds,
            "events": tally.events,
            "ended": dict(sorted(tally.statuses.items())),
            "violations": len(tally.bad),
            "violating_seeds": sorted(outcome.seed for outcome in tally.bad),
            "replayed": tally.replayed,
            "replays_equal": tally.replayed - len(tally.unequal),
            "bugs_seeded": len(MUTANTS),
            "bugs_tried": len(self.found),
            "bugs_found": sum(outcome is not None for outcome in self.found.values()),
            "first_seed_of_bug": firsts,
            "seconds": seconds,
            "processes": self.processes,
        }

    def write(self) -> None:
        """Write the figures to the file, if there is one."""
        if self.path is not None:
            write_atomic(self.path, json.dumps(self.result(), indent=2) + "\n")

    def _tell(self) -> None:
        """A line of progress, if it is time for one."""
        now_s = time.monotonic()
        if now_s - self.told_s < PROGRESS_S:
            return
        self.told_s = now_s
        tally = self.tally
        rate = tally.seeds / (now_s - self.begun_s)
        said = f"{tally.seeds:,} of {self.num_seeds:,} seeds, {len(tally.bad)} violations"
        if tally.seeds < self.num_seeds:
            left_s = (self.num_seeds - tally.seeds) / rate
            said += f", {rate:.1f} seeds/s, {left_s / 60:.0f} min left"
        else:
            said += f"; {len(self.found)} of {len(MUTANTS)} bugs tried"
        print(said, file=sys.stderr, flush=True)
        self.write()


@contextmanager
def _interrupts() -> Iterator[None]:
    """Within it, being asked to end is an interrupt, too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ignore_interrupts() -> None:
    """In a process of the pool: Ctrl-C reaches all of them, and the campaign is who ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _campaign(num_seeds: int, path: Path | None, processes: int) -> int:
    campaign = Campaign(num_seeds, processes, path)
    campaign.run()
    for outcome in sorted(islice(campaign.tally.bad, SHOWN), key=lambda one: one.seed):
        _print(show(outcome))
    for name, found in campaign.found.items():
        said = f"seed {found.seed}: {found.violation}" if found else "NOT FOUND"
        _print(f"{name:48} {said}")
    _print(json.dumps(campaign.result(), indent=2))
    campaign.write()
    if campaign.stopped:
        _print(f"NOT COMPLETE: {campaign.stopped} after {campaign.tally.seeds:,} of {num_seeds:,} seeds")
    return int(not (campaign.complete and campaign.is_clean))


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where an invariant was violated, a replay differs, a bug was not found, or it ended early."""
    parser = argparse.ArgumentParser(prog="python -m bench.campaign", description="the fault campaign")
    parser.add_argument("--seeds", type=int, default=2000, help="run seeds 0 .. N - 1")
    parser.add_argument("--seed", type=int, help="run one seed and show its last events")
    parser.add_argument("--bug", choices=[mutant.name for mutant in MUTANTS], help="put in, with --seed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    most = min(os.cpu_count() or 1, MOST_PROCESSES)
    parser.add_argument("--processes", type=int, default=most, help=f"that run them; default: {most}")
    options = parser.parse_args(arguments)
    if options.seed is None:
        return _campaign(options.seeds, options.json, options.processes)
    mutant = next((one for one in MUTANTS if one.name == options.bug), None)
    with mutant.applied() if mutant else nullcontext():
        outcome = run_seed(options.seed)
        equal = replays(options.seed, outcome)
    _print(show(outcome, options.bug or ""))
    _print(f"replay: {'equal' if equal else 'NOT EQUAL'}, checksum {outcome.checksum:08x}")
    return int(bool(outcome.violation) or not equal)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
