"""Sockets of a run with two learner ranks, which meet over one of torch's; what a dead driver leaves behind.

Of a run with one rank they are looked at in test_run.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import leftovers, listeners
from tests.integration.harness import SMALL, program
from tests.integration.leftovers import KILLED_S, Left, Room, left_within
from tests.thorough import takes_minutes

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(leftovers.missing()), reason=leftovers.missing()),
    takes_minutes,
]

TWO_RANKS = ("learner.num_ranks=2", "learner.resources.CPU=0.5")


def test_every_socket_is_local_and_nothing_is_left_after_a_kill_of_the_driver(tmp_path: Path) -> None:
    words = (*SMALL, "run.steps=1000", *TWO_RANKS)
    with Room() as room, program(tmp_path / "work", tmp_path / "run", *words, room=room) as run:
        found = listeners.of(run, room)
        run.process.kill()
        # Beside other tests; `bench.chaos kills` holds it to the limit itself.
        left = left_within(room.look, 6 * KILLED_S)
    listeners.check(found)
    assert left == Left(), str(left)
