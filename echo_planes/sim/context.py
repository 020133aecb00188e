"""The parts of a simulated run that its workers and its fleet share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from echo_planes.loop import events as ev
from echo_planes.sim.kernel import Kernel
from echo_planes.sim.lengths import LengthModel
from echo_planes.sim.scenario import Scenario
from echo_planes.sim.trace import Trace
from echo_planes.sim.worker import Answers
from echo_planes.types import Manifest


@dataclass(frozen=True, slots=True)
class Context:
    """One run.

    Args:
        rng: for what befalls machines.
        tell: gives the controller an event.
        manifest: the newest that was committed.
    """

    scenario: Scenario
    kernel: Kernel
    trace: Trace
    rng: random.Random
    lengths: LengthModel
    answers: Answers
    tell: Callable[[ev.Event], None]
    manifest: Callable[[], Manifest | None]
