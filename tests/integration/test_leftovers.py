"""Whole runs that end well, or by kill -9 of one of their processes: nothing of them stays on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration import leftovers
from tests.integration.harness import SMALL, Program, program, wait_until
from tests.integration.leftovers import Left, Room

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(leftovers.missing()), reason=leftovers.missing()),
]

KILLED_S = 5.0  # after a kill -9, until nothing is left
STEPS = 4


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    with Room() as opened:
        yield opened


def left_after(room: Room, limit_s: float) -> Left:
    """What is still there when it should have gone; nothing, if it goes in time."""
    try:
        wait_until(lambda: room.look().count == 0, limit_s, "everything of the run to go")
    except AssertionError:
        return room.look()
    return Left()


def test_a_run_that_ends_well_leaves_nothing(room: Room, tmp_path: Path) -> None:
    with program(tmp_path / "work", tmp_path / "run", *SMALL, f"run.steps={STEPS}", room=room) as run:
        assert run.wait() == 0, run.tail()
        assert room.look() == Left()


def pick(run: Program, who: str) -> psutil.Process:
    """The process that is killed."""
    if who == "driver":
        return psutil.Process(run.process.pid)
    return run.actor(who)


@pytest.mark.parametrize("who", ["driver", "raylet"])
def test_nothing_is_left_seconds_after_a_kill(room: Room, tmp_path: Path, who: str) -> None:
    with program(tmp_path / "work", tmp_path / "run", *SMALL, "run.steps=1000", room=room) as run:
        run.wait_for_step(2)
        pick(run, who).kill()
        left = left_after(room, KILLED_S)
    assert left == Left(), str(left)
