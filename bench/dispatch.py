"""Dispatches a second of the router: `python -m bench.dispatch [--json FILE] [--workers N] [--rounds N]`.

10,000 workers with random queues below Theta and random rooms. Batches of several sizes go to the shortest
queues (`jsq`), each on the same state, so that every round does the same work: the figure is requests over
this thread's own seconds, user and system, median over the rounds. Beside it, on the same state and with the
same result, checked before anything is timed:

- the loop as the paper writes it, one request after another, the shortest queue looked up with `argmin`;
- the same with a heap, which is the best that one at a time can do here;
- the limit: numpy writing one worker number per request (`repeat`), which whoever sends them needs anyway;
- `proportional`, for comparison.

The bar holds for a batch of as many requests as there are workers. Small ones are bound by reading the state,
which costs the same whatever the size: `assign_us` says how much.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from echo_planes.data.replay.dispatch import DispatchPolicy, Ints, Proportional, ShortestQueue, Workers

THETA = 16
BATCHES = (1, 64, 1_000, 10_000, 100_000)
BAR_BATCH = 10_000
BAR_PER_S = 500_000.0


def fleet(num_workers: int, seed: int) -> Workers:
    """Workers at the newest publication, in random states."""
    rng = np.random.default_rng(seed)
    workers = Workers.named(*(f"w{row}" for row in range(num_workers)))
    workers.newest = 1
    workers.version[:] = 1
    workers.pending[:] = rng.integers(0, THETA, num_workers)
    workers.running[:] = rng.integers(0, 256, num_workers)
    workers.slots[:] = 256
    workers.room[:] = rng.integers(0, 2 * THETA, num_workers)
    workers.tokens_per_s[:] = rng.uniform(500.0, 5_000.0, num_workers)
    return workers


def one_at_a_time(num_requests: int, workers: Workers, theta: int) -> Ints:
    """SELECTINSTANCE of RLBoost's Algorithm 2, called for each request; counts, shape (n,)."""
    pending = workers.pending.copy()
    room = np.where(workers.version >= 0, workers.room, 0)
    blocked = np.iinfo(np.int64).max
    queue = np.where((pending < theta) & (room > 0), pending, blocked)
    for _ in range(num_requests):
        row = int(np.argmin(queue)) if len(queue) else -1
        if row < 0 or queue[row] == blocked:
            break  # the others wait
        pending[row] += 1
        room[row] -= 1
        queue[row] = pending[row] if pending[row] < theta and room[row] > 0 else blocked
    counts: Ints = pending - workers.pending
    return counts


def with_a_heap(num_requests: int, workers: Workers, theta: int) -> Ints:
    """The same, with the queues in a heap."""
    able = np.flatnonzero(workers.able & (workers.pending < theta)).tolist()
    room = workers.room.tolist()
    queues = [(int(workers.pending[row]), row) for row in able]
    heapq.heapify(queues)
    counts = [0] * len(workers.ids)
    for _ in range(num_requests):
        if not queues:
            break
        pending, row = queues[0]
        counts[row] += 1
        if pending + 1 < theta and counts[row] < room[row]:
            heapq.heapreplace(queues, (pending + 1, row))
        else:
            heapq.heappop(queues)
    return np.array(counts, np.int64)


def median_s(action: Callable[[], object], rounds: int) -> float:
    """Seconds of this thread for one call, the first left out."""
    found = []
    for _ in range(rounds + 1):
        start_s = time.thread_time()
        action()
        found.append(time.thread_time() - start_s)
    return statistics.median(found[1:])


def measure(num_workers: int, rounds: int) -> dict[str, float]:
    """All figures: requests/s by name and batch size, and microseconds of one `jsq` batch."""
    workers = fleet(num_workers, seed=0)
    policies: dict[str, DispatchPolicy] = {
        "jsq": ShortestQueue(THETA),
        "proportional": Proportional(),
    }
    rows = np.arange(num_workers)
    told: dict[str, float] = {}
    for batch in BATCHES:
        counts = policies["jsq"].assign(batch, workers).counts
        for reference in (one_at_a_time, with_a_heap):
            if not np.array_equal(counts, reference(batch, workers, THETA)):
                raise SystemExit(f"{reference.__name__} hands out {batch} requests differently")
        for name, policy in policies.items():
            given = int(policy.assign(batch, workers).counts.sum())
            seconds = median_s(lambda p=policy, b=batch: p.assign(b, workers), rounds)  # type: ignore[misc]
            told[f"{name}_{batch}_per_s"] = given / seconds
            if name == "jsq":
                told[f"assign_us_{batch}"] = 1e6 * seconds
        seconds = median_s(lambda c=counts: np.repeat(rows, c), rounds)  # type: ignore[misc]
        told[f"limit_{batch}_per_s"] = int(counts.sum()) / seconds
    few = max(1, rounds // 20)
    for reference in (one_at_a_time, with_a_heap):
        seconds = median_s(lambda r=reference: r(BAR_BATCH, workers, THETA), few)  # type: ignore[misc]
        told[f"{reference.__name__}_{BAR_BATCH}_per_s"] = BAR_BATCH / seconds
    return told


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    told = measure(arguments.workers, arguments.rounds)
    bar = f"jsq_{BAR_BATCH}_per_s"
    met = told[bar] >= BAR_PER_S
    for name, value in told.items():
        note = f"  (at least {BAR_PER_S:,.0f}: {'met' if met else 'MISSED'})" if name == bar else ""
        print(f"{name:28} {value:16,.1f}{note}")
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=2))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
