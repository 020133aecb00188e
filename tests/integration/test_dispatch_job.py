"""A whole job with `sampling.router=jsq`: what waits at a worker that is slow is moved to one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import SMALL, WATCHED_PROGRAM, check_books, json_lines, run_to_end
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, takes_minutes, pytest.mark.timeout(600)]

STEPS, THETA = 6, 3


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("router")
    same = {"engine": {"max_num_seqs": 8}, "max_groups": 8, "resources": {"CPU": 0.25}}
    kinds = [{**same, "sku": "fast"}, {**same, "sku": "slow", "slowdown_s": 3.0}]
    words = [
        *SMALL,
        f"run.steps={STEPS}",
        f"fleet.workers={json.dumps(kinds)}",
        "sampling.router=jsq",
        f"sampling.theta={THETA}",
        "sampling.stream_s=0.5",  # a lease lasts ten times that: longer than the slow one takes to begin
        "staleness.queue_batches=1",
    ]
    run_to_end(base / "work", base / "run", *words, command=WATCHED_PROGRAM)
    return base / "run"


def told(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [note for note in json_lines(run_dir / "watched.jsonl") if note["kind"] == kind]


def test_the_books_add_up(run_dir: Path) -> None:
    check_books(run_dir, STEPS)
    accepted = [note["lease"] for note in told(run_dir, "submit") if not note["refused"]]
    assert len(set(accepted)) == len(accepted)


def test_what_waits_at_the_slow_worker_is_done_by_the_other(run_dir: Path) -> None:
    leases = {note["lease"]: note for note in told(run_dir, "lease")}
    moved = [leases[note["lease"]] for note in told(run_dir, "hand over")]
    assert {note["worker"] for note in moved} >= {"w1"}
    next_workers = [
        next(
            later["worker"] for later in leases.values() if later["prompt"] == one["prompt"] and later != one
        )
        for one in moved
        if one["worker"] == "w1"
    ]
    print(f"{len(moved)} leases moved, {next_workers.count('w0')} of them from the slow worker to the other")
    assert next_workers.count("w0") > len(next_workers) / 2


def test_no_worker_has_more_than_its_slots_and_its_queue(run_dir: Path) -> None:
    slots = 2  # groups of four requests in an engine of eight
    held: dict[str, set[str]] = {"w0": set(), "w1": set()}
    # A lease counts until its group is handed in, and as many may be scored as there are slots.
    for note in json_lines(run_dir / "watched.jsonl"):
        if note["kind"] == "lease":
            held[note["worker"]].add(note["lease"])
            assert len(held[note["worker"]]) <= 2 * slots + THETA
        elif note["kind"] in ("submit", "hand over"):
            held[note["worker"]].discard(note["lease"])
