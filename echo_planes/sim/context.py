"""Parts of a simulated run that its workers and its fleet share."""

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
    """Shared parts of one run.

    Args:
        rng: draws interruptions of machines and the machines that a market takes.
        tell: passes an event to the controller.
        manifest: returns the newest committed manifest, or None.
    """

    scenario: Scenario
    kernel: Kernel
    trace: Trace
    rng: random.Random
    lengths: LengthModel
    answers: Answers
    tell: Callable[[ev.Event], None]
    manifest: Callable[[], Manifest | None]
