"""The whole loop in one process, on fakes and a virtual clock: two minutes of training in a second.

    python examples/one_process.py

The controller, the runner, the replay buffer and the workers are the real ones; engines, learner and time
are modelled, so every figure printed here is simulated. One worker is four times slower than the other and
dies on the way; staleness stays within its bound and nothing is lost.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from echo_planes.testing.simulation import Faults, Simulation, tiny_config


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(
            tiny_config(steps=40, max_staleness=3),
            Path(folder),
            seconds_per_token=(0.1, 0.4),
            faults=Faults(die_at_s={("w1", 0): 12.0}),
        )
        outcome, trace = simulation.run()
    for line in trace.lines:
        if line.startswith(("worker", "eval", "worker lost")):
            print(line)
    staleness = [int((batch.step - batch.versions).max()) for batch in trace.batches]
    bubble = trace.idle_s / (trace.idle_s + trace.train_s)
    counts = outcome.counts
    print(f"{outcome.status}: {len(trace.batches)} steps, staleness at most {max(staleness)} (bound 3)")
    print(f"held-out accuracy {trace.evals[0].accuracy:.2f} -> {trace.evals[-1].accuracy:.2f} (simulated)")
    print(f"learner bubble {bubble:.1%} (simulated)")
    print(f"{counts.accepted} accepted = {counts.trained} trained + {counts.dropped_stale} dropped", end=" ")
    print(f"+ {counts.buffered} buffered")


if __name__ == "__main__":
    main()
