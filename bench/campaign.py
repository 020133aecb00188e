"""The fault campaign from the command line: `python -m bench.campaign --seeds N --json FILE`.

    python -m bench.campaign --seeds 100000 --json FILE                      every core
    python -m bench.campaign --seed 1234                                     one seed, with its last events
    python -m bench.campaign --bug "a group is trained twice" --seed 0       the same, with that bug put in

    python -m bench.campaign --bug "a group is trained twice" --seed 0       the same, with that bug in it
at a time, and seeds are run from 0 on until one finds it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from bench.mutants import MUTANTS, Mutant
from echo_planes.metrics import write_atomic
from echo_planes.sim.campaign import Outcome, replays, run_seed

REPLAY_EVERY = 10  # of the seeds, so many are run twice
BUG_SEEDS = 3000  # within which a bug must be found
CHUNK = 50  # seeds at a time, of one process
SHOWN = 10  # violations


@dataclass(slots=True)
class Tally:
    """What some seeds came to."""

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


def _campaign(num_seeds: int, path: Path | None) -> int:
    begun_s = time.monotonic()
    tally, found = Tally(), {}
    processes = min(os.cpu_count() or 1, 16)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        starts = range(0, num_seeds, CHUNK)
        chunks = (range(start, min(start + CHUNK, num_seeds)) for start in starts)
        for part in pool.imap_unordered(run_seeds, chunks):
            tally.add(part)
        for mutant, outcome in zip(MUTANTS, pool.imap(_find_bug, range(len(MUTANTS))), strict=True):
            found[mutant.name] = outcome
    for outcome in sorted(islice(tally.bad, SHOWN), key=lambda one: one.seed):
        _print(show(outcome))
    for name, outcome in found.items():
        said = f"seed {outcome.seed}: {outcome.violation}" if outcome else "NOT FOUND"
        _print(f"{name:48} {said}")
    num_found = sum(outcome is not None for outcome in found.values())
    result = {
        "simulated": True,
        "seeds": tally.seeds,
        "events": tally.events,
        "ended": dict(sorted(tally.statuses.items())),
        "violations": len(tally.bad),
        "violating_seeds": sorted(outcome.seed for outcome in tally.bad),
        "replayed": tally.replayed,
        "replays_equal": tally.replayed - len(tally.unequal),
        "bugs_seeded": len(MUTANTS),
        "bugs_found": num_found,
        "first_seed_of_bug": {name: outcome.seed if outcome else None for name, outcome in found.items()},
        "seconds": time.monotonic() - begun_s,
        "processes": processes,
    }
    _print(json.dumps(result, indent=2))
    if path is not None:
        write_atomic(path, json.dumps(result, indent=2) + "\n")
    return int(bool(tally.bad or tally.unequal or num_found < len(MUTANTS)))


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where an invariant was violated, a replay differs, or a bug was not found."""
    parser = argparse.ArgumentParser(prog="python -m bench.campaign", description="the fault campaign")
    parser.add_argument("--seeds", type=int, default=2000, help="run seeds 0 .. N - 1")
    parser.add_argument("--seed", type=int, help="run one seed and show its last events")
    parser.add_argument("--bug", choices=[mutant.name for mutant in MUTANTS], help="put in, with --seed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    if options.seed is None:
        return _campaign(options.seeds, options.json)
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
