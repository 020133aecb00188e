"""Small changes of the modules that decide, against their tests: `python -m bench.mutation [--json FILE]`.

    python -m bench.mutation                                       all modules
    python -m bench.mutation --module echo_planes/data/replay/leases.py   one of them; may be given again
    python -m bench.mutation --survivors                           only what no test noticed the last time

cosmic-ray (`pip install -e .[mutants]`) and two operators of our own make the changes; so many are drawn a
module, always the same. Each runs the tests that are named here beside the module, until one fails. A change
that no test notices is a survivor, and must be explained in one line of `mutation_survivors.yaml`. It begins
with `same` (whatever may come, the module does what it did) or `untested` (a test is not worth its lines).
What is the same nobody could notice: of the others at least 95 % must be killed, in every module.

What was tried is kept in `.mutation/`, so a run that was broken off goes on: what a test noticed is not tried
again while the module, that test and what tests share are what they were, a survivor while all tests of its
module are. Ends with 1 where a verdict is false.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench.mutation_changes import Change, changes
from bench.mutation_trials import ROOT, Bench, Outcome, Trial

SEED = "1"
MOST_CHANGES = 40  # of a module
LEAST_TRIED = 500  # of all modules
LEAST_KILLED = 0.95  # of a module's
SAME, UNTESTED = "same", "untested"  # what an explanation begins with
KEPT = ROOT / ".mutation"
SURVIVORS = ROOT / "bench" / "mutation_survivors.yaml"

# Modules that decide, and what would be lost if they were wrong. Beside each the tests that must notice.
MODULES: dict[str, tuple[str, ...]] = {
    # data: every sample counted once, none too old, none lost, none masked wrongly
    "echo_planes/data/replay/leases.py": ("test_leases", "test_partial_rollouts", "test_buffer"),
    "echo_planes/data/replay/staleness.py": ("test_limiter",),
    "echo_planes/data/replay/prompts.py": ("test_limiter", "test_curriculum"),
    "echo_planes/data/replay/checkpoint_state.py": ("test_resume_partial_rollouts", "test_checkpoint"),
    "echo_planes/data/replay/partial_rollouts.py": ("test_partial_rollouts", "test_resume_partial_rollouts"),
    "echo_planes/data/replay/batch.py": ("test_batch", "test_refill"),
    "echo_planes/data/replay/overlong.py": ("test_refill",),
    "echo_planes/reporting/ledger.py": ("test_ledger", "test_journal"),
    # dollars
    "echo_planes/fleet/money.py": ("test_money", "test_budget"),
    "echo_planes/loop/spending.py": ("test_budget", "test_preflight"),
    # the loop
    "echo_planes/loop/controller.py": (
        "test_controller",
        "test_controller_guard",
        "test_controller_fleet",
        "test_seeding",
    ),
    "echo_planes/loop/seeding.py": ("test_seeding",),
    "echo_planes/loop/seed_window.py": ("test_seed_window", "test_seeding"),
    # weights: nothing is let in that the learner did not sign, or that is older; who forwards to whom
    "echo_planes/weights/wire/admission.py": ("test_admission",),
    "echo_planes/weights/chain/plan.py": ("test_chain", "test_chain_rates"),
    "echo_planes/weights/wire/signing.py": ("test_signing",),
    # the fleet
    "echo_planes/fleet/capacity.py": ("test_capacity",),
    "echo_planes/rollout/group_policy.py": ("test_group_policy",),
    "echo_planes/fleet/provisioner.py": ("test_provisioner", "test_fleet"),
    # learning: what the gradient is of, and when a run is taken back
    "echo_planes/learning/advantages.py": ("test_advantages",),
    "echo_planes/learning/rate.py": ("test_learning_rate",),
    "echo_planes/learning/guard.py": ("test_guard",),
}


@dataclass(frozen=True, slots=True)
class Tried:
    """A change and what came of it."""

    line: int
    text: str
    outcome: Outcome


@dataclass(slots=True)
class Result:
    """Outcomes of a module's changes."""

    module: str
    places: int
    tried: list[Tried] = field(default_factory=list)

    def count(self, outcome: Outcome) -> int:
        return sum(one.outcome == outcome for one in self.tried)

    @property
    def survivors(self) -> list[Tried]:
        return [one for one in self.tried if one.outcome == "survived"]

    def killed_share(self, why: Mapping[str, str]) -> float:
        """The share that some test noticed, of what was tried and is not the same; without end is noticed.

        Args:
            why: explanations of survivors.
        """
        same = sum(why.get(one.text, "").startswith(f"{SAME}: ") for one in self.survivors)
        return 1.0 - (len(self.survivors) - same) / max(len(self.tried) - same, 1)


class Kept:
    """Record of earlier trials of a module. A line a trial, so whatever ends a run early loses one.

    Args:
        module: its path.
        tests: the paths of its tests.
    """

    def __init__(self, module: str, tests: Sequence[str]) -> None:
        KEPT.mkdir(exist_ok=True)
        self._path = KEPT / (module.replace("/", ".") + ".jsonl")
        self._tests = tests
        self._module = _digest(module, *_shared())
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._records: dict[str, dict[str, Any]] = {}  # the newest, by change
        for line in lines:
            with contextlib.suppress(ValueError):  # the run was ended in the middle of it
                record = json.loads(line)
                self._records[record["text"]] = record

    def outcome(self, change: Change) -> Outcome | None:
        """Return the recorded outcome of a change, if another trial would end the same; else None."""
        record = self._records.get(change.text)
        if record is None or record["of"] != self._of(record["by"]):
            return None
        outcome: Outcome = record["outcome"]
        return outcome

    def survived(self, change: Change) -> bool:
        """Whether it did when it was tried last."""
        return self._records.get(change.text, {}).get("outcome") == "survived"

    def add(self, change: Change, trial: Trial) -> None:
        """Enter a trial."""
        record = {"text": change.text, "of": self._of(trial.by), **asdict(trial)}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _of(self, by: str) -> str:
        """Digest of what an outcome hangs on: the module, and the test that failed, or all where none did."""
        path = by.partition("::")[0]
        tests = _digest(*self._tests) if not by else _test_digest(by) if path in self._tests else ""
        return f"{self._module} {tests}"


@cache
def _shared() -> tuple[str, ...]:
    """Files that tests have in common."""
    found = [*(ROOT / "tests").glob("*.py"), *(ROOT / "tests" / "unit").glob("*.py")]
    return tuple(str(path.relative_to(ROOT)) for path in sorted(found) if not path.name.startswith("test_"))


@cache
def _digest(*paths: str) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update((ROOT / path).read_bytes())
    return digest.hexdigest()[:16]


@cache
def _test_digest(test: str) -> str:
    """Of a test and of what its file holds beside tests."""
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_bytes())
    kept = [one for one in tree.body if not name or getattr(one, "name", name) == name or not _is_test(one)]
    return hashlib.sha256("\n".join(map(ast.dump, kept)).encode()).hexdigest()[:16]


def _is_test(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef) and statement.name.startswith("test_")


def test_paths(module: str) -> list[str]:
    """The tests of a module, as pytest takes them."""
    return [f"tests/unit/{name}.py" for name in MODULES[module]]


def run_module(module: str, only_survivors: bool = False) -> Result:
    """Try the changes of a module whose outcome is not known."""
    source = (ROOT / module).read_text(encoding="utf-8")
    drawn, places = changes(source, most=MOST_CHANGES, seed=f"{SEED} {module}")
    tests = test_paths(module)
    kept = Kept(module, tests)
    if only_survivors:
        drawn = [change for change in drawn if kept.survived(change)]
    bench: Bench | None = None
    result = Result(module, places)
    for change in drawn:
        outcome = kept.outcome(change)
        if outcome is None:
            bench = bench or Bench(module, tests)
            trial = bench.run(change.source)
            kept.add(change, trial)
            outcome = trial.outcome
        result.tried.append(Tried(change.line, change.text, outcome))
        if outcome == "survived":
            say(f"  {module}:{change.line}  {change.text}")
    return result


def explanations(path: Path = SURVIVORS) -> dict[str, dict[str, str]]:
    """Why a change may survive, by module and change."""
    return yaml.safe_load(path.read_text()) or {}


def verdicts(
    results: Sequence[Result], explained: Mapping[str, Mapping[str, str]], least_tried: int
) -> dict[str, bool]:
    """The claims, and whether each holds."""
    told: dict[str, bool] = {
        f"at least {least_tried} tried": sum(len(r.tried) for r in results) >= least_tried
    }
    for result in results:
        share = result.killed_share(explained.get(result.module, {}))
        told[f"{result.module}: killed >= {LEAST_KILLED:.0%}"] = share >= LEAST_KILLED
    told["every survivor is explained"] = not list(unexplained(results, explained))
    told["every explanation is of a survivor"] = not list(outlived(results, explained))
    return told


def unexplained(results: Sequence[Result], explained: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The survivors that have no explanation."""
    for result in results:
        for one in result.survivors:
            why = explained.get(result.module, {}).get(one.text, "")
            if why.partition(": ")[0] not in (SAME, UNTESTED):
                yield f"{result.module}:{one.line}  {one.text}"


def outlived(results: Sequence[Result], explained: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The explanations of changes that did not survive, or are no longer drawn."""
    for result in results:
        survivors = {one.text for one in result.survivors}
        for text in explained.get(result.module, {}):
            if text not in survivors:
                yield f"{result.module}  {text}"


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where a verdict is false."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--module", action="append", choices=MODULES, metavar="PATH", help="only this one")
    parser.add_argument("--survivors", action="store_true", help="what survived the last time; no verdict")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("cosmic_ray") is None:
        parser.error("cosmic-ray is not installed: pip install -e '.[mutants]'")
    modules = options.module or list(MODULES)
    results = [run_module(module, options.survivors) for module in modules]
    if options.survivors:
        return int(any(result.survivors for result in results))
    explained = explanations()
    told = verdicts(results, explained, 0 if options.module else LEAST_TRIED)
    _print_table(results)
    for line in unexplained(results, explained):
        say(f"not explained: {line}")
    for line in outlived(results, explained):
        say(f"explained, but no survivor: {line}")
    for claim, holds in told.items():
        say(f"{'holds' if holds else 'FAILS'}  {claim}")
    if options.json:
        options.json.write_text(json.dumps(_figures(results, explained, told), indent=1) + "\n")
    return int(not all(told.values()))


def _figures(
    results: Sequence[Result], explained: Mapping[str, Mapping[str, str]], told: Mapping[str, bool]
) -> dict[str, Any]:
    return {
        "seed": SEED,
        "modules": [
            {
                "module": result.module,
                "tests": test_paths(result.module),
                "places": result.places,
                "tried": len(result.tried),
                "killed_share": round(result.killed_share(explained.get(result.module, {})), 4),
                **{outcome.replace(" ", "_"): count for outcome, count in _counts(result).items()},
                "survivors": [
                    {**asdict(one), "why": explained.get(result.module, {}).get(one.text)}
                    for one in result.survivors
                ],
                "without_end": [asdict(one) for one in result.tried if one.outcome == "timed out"],
            }
            for result in results
        ],
        "verdicts": dict(told),
    }


def _counts(result: Result) -> dict[str, int]:
    return {
        "killed": result.count("killed"),
        "survived": result.count("survived"),
        "timed out": result.count("timed out"),
    }


def _print_table(results: Sequence[Result]) -> None:
    say(f"{'module':44} places  tried  killed  survived  timed out")
    total: Counter[str] = Counter()
    for result in results:
        counts = {"places": result.places, "tried": len(result.tried), **_counts(result)}
        total.update(counts)
        say(f"{result.module:44} " + _columns(counts))
    say(f"{'all':44} " + _columns(total))


def _columns(counts: Mapping[str, int]) -> str:
    widths = {"places": 6, "tried": 6, "killed": 7, "survived": 9, "timed out": 10}
    return " ".join(f"{counts[name]:{width}}" for name, width in widths.items())


def say(line: str) -> None:
    """Write a line at once: a run takes minutes."""
    print(line, flush=True)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set is part of what a test sees
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "bench.mutation", *sys.argv[1:]], environment)
    sys.exit(main())
