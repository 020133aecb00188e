"""Time that weights take to reach N workers: `python -m bench.broadcast [--json FILE] [--quick]`.

Real node processes, each in a network namespace of its own with a shaped uplink and downlink and 80 ms of
round trip between any two (`tests/integration/netns.py`; needs root). Payloads are random bytes, signed; the
nodes only relay, since staging is measured elsewhere (`bench.install`).

Each fleet sends two small snapshots to get warm (peers ranked, TCP at its rate), one large one, then patches
over the same connections. Beside each time stands
the ideal, M/B + H (C/B + RTT/2) for a chain of H hops and N M/B0 + C/B + RTT/2 for a star, with B the rate
that a plain TCP connection reached between two workers of the same network just before.

The bars: chain <= 1.15 x ideal; with a forwarder of 8 killed, slowed by half or cut off in mid-broadcast,
all survivors have the same bytes, detection <= 3 s, and the time <= 1.25 x unfaulted + detection.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from echo_planes.weights.chain.plan import ideal_broadcast_s
from echo_planes.weights.node.client import SenderNode, WorkerNode
from echo_planes.weights.wire.signing import Signer
from tests.integration.netns import ShapedNetwork, missing
from tests.integration.weight_nodes import Signed, publication, settings

RTT_S = 0.08
SNAPSHOT_BYTES = 100_000_000
WARM_UPS, WARM_UP_BYTES = 2, 20_000_000
PATCH_BYTES = (1_000_000, 3_000_000, 10_000_000)
SNAPSHOT_CHUNK_BYTES = 256 * 1024
PATCH_CHUNK_BYTES = 64 * 1024
BAR = 1.15
FAULT_BAR = 1.25
DETECTION_BAR_S = 3.0
POLL_S = 0.2
SLOW_POLL_S = 1.0
FAULT_AFTER = 0.35  # of the unfaulted time

Topology = Literal["chain", "star"]
Fault = Literal["none", "killed", "slowed", "partitioned"]


@dataclass(frozen=True, slots=True)
class Case:
    """One broadcast."""

    n: int
    b0_mbit: float
    bw_mbit: float
    topology: Topology
    payload_bytes: int
    chunk_bytes: int
    hops: int
    rate_mbit: float  # B, of a plain connection
    seconds: float  # until the last surviving worker had it whole, verified
    ideal_s: float
    fault: Fault = "none"
    unfaulted_s: float | None = None
    detection_s: float | None = None  # from the fault until somebody was given another parent

    @property
    def bar_s(self) -> float:
        """Upper bound of `seconds`."""
        if self.unfaulted_s is not None:
            return FAULT_BAR * self.unfaulted_s + (self.detection_s or 0.0)
        return BAR * self.ideal_s


class Fleet:
    """A sender on host 0 and workers on the others. Made by `fleet`."""

    def __init__(self, net: ShapedNetwork, sender: SenderNode, workers: list[WorkerNode]) -> None:
        self.net = net
        self.sender = sender
        self.workers = workers
        self._asking = threading.Lock()  # the sender's client is of one thread at a time

    def parents(self) -> dict[str, str]:
        """Parent of each worker, as the tracker has it."""
        with self._asking:
            parents: dict[str, str] = self.sender.status()["peers"]
        return parents

    def hops(self) -> int:
        """Length of the longest chain."""
        parents = self.parents()

        def depth(peer: str) -> int:
            return 0 if peer == "sender" else 1 + depth(parents[peer])

        return max(depth(peer) for peer in parents)

    async def settle(self) -> None:
        """Wait until every worker has the parent that the tracker gave it, and the chains stand still."""
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            want = await asyncio.to_thread(self.parents)
            states = [await worker.status() for worker in self.workers]
            connected = len(want) == len(states) and all(state["connected"] for state in states)
            if connected and all(want.get(state["node_id"]) == state["parent"] for state in states):
                await asyncio.sleep(1.0)
                return
            await asyncio.sleep(POLL_S)
        raise RuntimeError("the fleet did not settle within 30 s")

    async def warm_up(self, signer: Signer) -> None:
        """Two snapshots that do not count: after them the peers are ranked and the connections warm."""
        for version in range(WARM_UPS):
            await self.send(publication(signer, version, WARM_UP_BYTES))
            await self.settle()

    async def send(
        self, signed: Signed, among: Callable[[], list[WorkerNode]] | None = None, limit_s: float = 300.0
    ) -> float:
        """Seconds from the first segment until the last of the workers `among` has it all."""
        start_s = time.monotonic()

        def hand_over() -> None:
            for segment, payload in signed.segments:
                with self._asking:
                    self.sender.add_segment(segment, payload)
            with self._asking:
                self.sender.commit(signed.manifest)

        await asyncio.to_thread(hand_over)
        finished: dict[int, float] = {}
        while True:
            waiting = [w for w in (among() if among else self.workers) if id(w) not in finished]
            if not waiting:
                return max(finished[id(w)] for w in (among() if among else self.workers)) - start_s
            if time.monotonic() - start_s > limit_s:
                raise RuntimeError(f"{len(waiting)} workers did not get everything within {limit_s:.0f} s")
            # The workers' own clocks say when they had it: asking often would only take CPU time from them.
            await asyncio.sleep(POLL_S if signed.manifest.manifest.payload_bytes < 2e7 else SLOW_POLL_S)
            for worker in waiting:
                done = _completed(await worker.status(), signed)
                if done is not None:
                    finished[id(worker)] = done


Check = Callable[[Fleet, Signed, list[int]], None]  # is called with the numbers of the workers that have it


def _completed(status: dict[str, Any], signed: Signed) -> float | None:
    for held in status["publications"]:
        if held["complete"] and held["payload_digest"] == signed.payload_digest:
            return float(held["completed_s"])
    return None


@asynccontextmanager
async def fleet(
    signer: Signer, n: int, b0_mbit: float, bw_mbit: float, topology: Topology
) -> AsyncIterator[Fleet]:
    """A network with a sender and `n` workers on it, all connected."""
    with ShapedNetwork([b0_mbit] + [bw_mbit] * n, [b0_mbit] + [bw_mbit] * n, RTT_S) as net:
        rates: dict[str, Any] = {
            "uplink_mbit": b0_mbit,
            "worker_mbit": bw_mbit,
            "direct": topology == "star",
        }
        with net.inside(0):
            sender = SenderNode.spawn(settings(signer, "sender", host=net.address(0), **rates))
        workers: list[WorkerNode] = []
        try:
            for index in range(n):
                with net.inside(index + 1):
                    options = settings(signer, f"w{index:02d}", sender.address, host=net.address(index + 1))
                    workers.append(await WorkerNode.spawn(options))
            group = Fleet(net, sender, workers)
            await group.settle()
            yield group
        finally:
            for worker in workers:
                await worker.close()
            sender.close()


def ideal_s(
    topology: Topology, n: int, payload_bytes: int, chunk_bytes: int, hops: int, b0_mbit: float, rate: float
) -> float:
    """The time that only the links would take. `rate`: B, bytes/s."""
    if topology == "chain":
        return ideal_broadcast_s(payload_bytes, hops, chunk_bytes, rate, RTT_S)
    slowest = min(rate, b0_mbit * 1e6 / 8 / n)
    return ideal_broadcast_s(payload_bytes, 1, chunk_bytes, slowest, RTT_S)


async def unfaulted(
    n: int,
    b0_mbit: float,
    bw_mbit: float,
    topology: Topology,
    sizes: list[int],
    check: Check | None = None,
) -> list[Case]:
    """One fleet, one broadcast of each size: the first a snapshot, the others patches."""
    signer = Signer.generate()
    cases = []
    async with fleet(signer, n, b0_mbit, bw_mbit, topology) as group:
        rate = group.net.plain_rate_bytes_per_s(1, 2) if n > 1 else group.net.plain_rate_bytes_per_s(0, 1)
        await group.warm_up(signer)
        for number, size in enumerate(sizes):
            chunk = PATCH_CHUNK_BYTES if number else SNAPSHOT_CHUNK_BYTES
            codec: Literal["full", "compact"] = "compact" if number else "full"
            signed = publication(signer, WARM_UPS + number, size, chunk_bytes=chunk, codec=codec)
            await group.settle()
            hops = group.hops()
            seconds = await group.send(signed)
            if check is not None:
                await asyncio.to_thread(check, group, signed, list(range(n)))
            ideal = ideal_s(topology, n, size, chunk, hops, b0_mbit, rate)
            mbit = rate * 8e-6
            case = Case(n, b0_mbit, bw_mbit, topology, size, chunk, hops, mbit, seconds, ideal)
            cases.append(case)
            _show(case)
    return cases


async def faulted(
    fault: Fault, n: int, b0_mbit: float, bw_mbit: float, size: int, check: Check | None = None
) -> Case:
    """A snapshot without a fault, then one in which a forwarder fails, over the same fleet."""
    signer = Signer.generate()
    async with fleet(signer, n, b0_mbit, bw_mbit, "chain") as group:
        rate = group.net.plain_rate_bytes_per_s(1, 2)
        await group.warm_up(signer)
        plain_s = await group.send(publication(signer, WARM_UPS, size, chunk_bytes=SNAPSHOT_CHUNK_BYTES))
        await group.settle()
        hops, parents = group.hops(), group.parents()
        victim = next(p for p in sorted(parents) if parents[p] == "sender" and p in parents.values())
        index = int(victim[1:])
        broken = group.workers[index]
        survivors = [w for w in group.workers if w is not broken or fault == "slowed"]
        detected: list[float] = []

        async def harm() -> None:
            await asyncio.sleep(FAULT_AFTER * plain_s)
            start_s = time.monotonic()
            if fault == "killed":
                os.kill(broken.pid, signal.SIGKILL)
            elif fault == "slowed":
                group.net.set_uplink(index + 1, bw_mbit / 2)
            else:
                group.net.cut(index + 1)
            orphans = [peer for peer in parents if parents[peer] == victim]
            while True:
                now = await asyncio.to_thread(group.parents)
                if any(now.get(peer) != victim for peer in orphans):
                    detected.append(time.monotonic() - start_s)
                    return
                await asyncio.sleep(0.05)

        task = asyncio.create_task(harm())
        signed = publication(signer, WARM_UPS + 1, size, chunk_bytes=SNAPSHOT_CHUNK_BYTES)
        seconds = await group.send(signed, among=lambda: survivors)
        await asyncio.wait({task}, timeout=1.0)
        task.cancel()
        if check is not None:
            whole = [number for number in range(n) if group.workers[number] in survivors]
            await asyncio.to_thread(check, group, signed, whole)
        ideal = ideal_broadcast_s(size, hops, SNAPSHOT_CHUNK_BYTES, rate, RTT_S)
        chunk, mbit = SNAPSHOT_CHUNK_BYTES, rate * 8e-6
        case = dataclasses.replace(
            Case(n, b0_mbit, bw_mbit, "chain", size, chunk, hops, mbit, seconds, ideal, fault),
            unfaulted_s=plain_s,
            detection_s=detected[0] if detected else None,
        )
        _show(case)
        return case


def _show(case: Case) -> None:
    ratio = case.seconds / case.bar_s
    detection = "" if case.detection_s is None else f", detected after {case.detection_s:.2f} s"
    plain = "" if case.unfaulted_s is None else f", unfaulted {case.unfaulted_s:.2f} s"
    print(
        f"{case.topology:5} n={case.n:2} B0={case.b0_mbit:.0f} B={case.rate_mbit:.1f} Mbit/s "
        f"{case.payload_bytes / 1e6:5.0f} MB over {case.hops} hops, {case.fault}: {case.seconds:.2f} s, "
        f"ideal {case.ideal_s:.2f} s ({case.seconds / case.ideal_s:.2f}){plain}{detection}, "
        f"{'within' if ratio <= 1 else 'BEYOND'} the bar of {case.bar_s:.2f} s",
        flush=True,
    )


async def run(quick: bool) -> AsyncIterator[Case]:
    """All cases, or with `quick` a few small ones."""
    sizes = [20_000_000, 1_000_000] if quick else [SNAPSHOT_BYTES, *PATCH_BYTES]
    for b0_mbit in (400.0,) if quick else (300.0, 800.0):
        for n in (1, 4) if quick else (1, 4, 8, 16):
            topologies: tuple[Topology, ...] = ("chain", "star")
            for topology in topologies:
                wanted = sizes if topology == "chain" else sizes[:1]
                for case in await unfaulted(n, b0_mbit, 100.0, topology, wanted):
                    yield case
    faults: tuple[Fault, ...] = ("killed",) if quick else ("killed", "slowed", "partitioned")
    for fault in faults:
        yield await faulted(fault, 8, 300.0, 100.0, 40_000_000 if quick else SNAPSHOT_BYTES)


async def record(quick: bool, path: Path | None) -> None:
    """Write the cases so far after each: a long run that is stopped leaves what it has."""
    records = []
    async for case in run(quick):
        records.append({**dataclasses.asdict(case), "bar_s": case.bar_s})
        if path:
            path.write_text(json.dumps(records, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="How long weights take to reach N workers.")
    parser.add_argument("--json", type=Path, help="write the cases to this file")
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(f"bench.broadcast cannot run here: {why}")
    asyncio.run(record(options.quick, options.json))


if __name__ == "__main__":
    main()
