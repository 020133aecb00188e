"""Counters of workers reach whoever does the accounting in the order in which they were read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from echo_planes.loop.observers import QuietObserver
from echo_planes.loop.planes import Accepted
from echo_planes.loop.runner import Runner
from echo_planes.testing.simulation import tiny_config
from echo_planes.testing.virtual_time import VirtualTimeLoop, run_virtual
from echo_planes.types import WorkerInfo, WorkerStats


class Data:
    """Accepts more and more."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def accepted(self) -> dict[tuple[str, int], tuple[int, int]]:
        self.num_asked += 1
        return {("w0", 0): (100 * self.num_asked, self.num_asked), ("w1", 0): (70, 7)}


class Worker:
    """Answers the first time late."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def start(self) -> str:
        return ""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def stats(self) -> WorkerStats:
        self.num_asked += 1
        await asyncio.sleep(1.0 if self.num_asked == 1 else 0.0)
        return WorkerStats("w0", 0, "", 0, 0, 0, 0.0)


class Books(QuietObserver):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.accepted: Accepted = {}

    def on_accepted(self, accepted: Accepted) -> None:
        self.accepted = accepted

    def on_stats(self, epoch: int, stats: WorkerStats) -> None:
        self.tokens.append(stats.tokens)


class Planes:
    def __init__(self) -> None:
        self.data = Data()


def test_two_that_ask_at_once_are_told_in_order(tmp_path: Path) -> None:
    books = Books()

    async def save(*_: Any) -> None:
        return None

    async def main(loop: VirtualTimeLoop) -> None:
        info = WorkerInfo("w0", "fake", 1.0, 0)
        planes: Any = Planes()
        runner = Runner(tiny_config(), planes, books, fleet={"w0": info}, save_checkpoint=save, clock=loop)
        worker: Any = Worker()
        runner._workers["w0"] = (0, worker)
        runner._built.add(("w0", 0))
        await asyncio.gather(runner.collect_worker_stats(), runner.collect_worker_stats())

    run_virtual(main)
    assert books.tokens == [100, 200]
    assert books.accepted == {("w0", 0): (200, 2), ("w1", 0): (70, 7)}  # w1 has ended: its work still counts
