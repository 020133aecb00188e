"""ECHO-2's figure 4 over simulated links: `python -m bench.figure4 [--json FILE]`.

T_bcast, the time until the fraction 1/gamma = 1/1.1 of the workers has a snapshot of 16 GB, against the
number of workers, as in section 5.5.1 of the paper:

- unlimited star: every worker pulls from a learner whose uplink is never full: the lower bound;
- star: the same with an uplink B0 of 300, 600, 700 or 800 Mbit/s;
- chains: floor(B0 / Bw) peer chains under the same B0.

Every worker has Bw = 100 Mbit/s. SIMULATED: the planner is the one that runs (`weights.chain.tracker`), the
relays follow the transport's rules (`weights.chain.simulated`), but links, and time, are virtual: no TCP, no
hashing.
Chunks are of 16 MiB, so that an hour takes a second; smaller ones bring the chains nearer to the lower bound.

The bar is that chains take at most 1.15 of the unlimited star at every number of workers, where the star
takes at least N Bw / B0 of it, less a tenth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from echo_planes.weights.chain.plan import ideal_broadcast_s, num_chains
from echo_planes.weights.chain.simulated import MBIT, BroadcastSim, SimSettings
from echo_planes.weights.wire.manifest import PublicationKey

SNAPSHOT_BYTES = 16_000_000_000
CHUNK_BYTES = 16 * 1024**2
WORKER_MBIT = 100
UPLINKS_MBIT = (300, 600, 700, 800)
WORKERS = (1, 2, 4, 8, 16, 32, 64)
RTT_S = 0.08
SHARE = 1 / 1.1
BAR = 1.15
WIDTH = 48  # characters of the longest bar


def broadcast_s(num_workers: int, uplink_mbit: float, *, direct: bool) -> float:
    """T_bcast of one snapshot, seconds of virtual time."""
    sim = BroadcastSim(
        SimSettings(uplink_mbit * MBIT, WORKER_MBIT * MBIT, RTT_S, CHUNK_BYTES, direct=direct, reports=False)
    )
    for number in range(num_workers):
        sim.join(f"w{number}")
    sim.publish(PublicationKey("figure4", 0, "full", -1), -(-SNAPSHOT_BYTES // CHUNK_BYTES))
    sim.run(limit_s=1e6)
    return sim.seconds(share=SHARE)


def measure() -> list[dict[str, Any]]:
    """One row per number of workers and uplink."""
    rows = []
    for num_workers in WORKERS:
        unlimited_s = broadcast_s(num_workers, num_workers * WORKER_MBIT, direct=True)
        for uplink_mbit in UPLINKS_MBIT:
            hops = -(-num_workers // num_chains(uplink_mbit, WORKER_MBIT))
            rows.append(
                {
                    "n": num_workers,
                    "b0_mbit": uplink_mbit,
                    "bw_mbit": WORKER_MBIT,
                    "simulated": True,
                    "unlimited_star_s": unlimited_s,
                    "star_s": broadcast_s(num_workers, uplink_mbit, direct=True),
                    "chains_s": broadcast_s(num_workers, uplink_mbit, direct=False),
                    "ideal_chains_s": ideal_broadcast_s(
                        SNAPSHOT_BYTES, hops, CHUNK_BYTES, WORKER_MBIT * MBIT, RTT_S
                    ),
                }
            )
    return rows


def is_reached(row: dict[str, Any]) -> bool:
    """The bar, for one row."""
    share_of_star = max(1.0, row["n"] * row["bw_mbit"] / row["b0_mbit"])
    flat = row["chains_s"] <= BAR * row["unlimited_star_s"]
    return bool(flat and row["star_s"] >= 0.9 * share_of_star * row["unlimited_star_s"])


def show(rows: list[dict[str, Any]]) -> None:
    """The table, then bars for the smallest and the largest uplink."""
    print("T_bcast of a 16 GB snapshot in s, SIMULATED links, 100 Mbit/s per worker, 80 ms round trip")
    print(
        f"{'N':>3} {'B0 Mbit/s':>9} {'unlimited star':>15} {'star':>9} {'chains':>9} {'chains/unlimited':>17}"
    )
    for row in rows:
        ratio = row["chains_s"] / row["unlimited_star_s"]
        mark = "" if is_reached(row) else "  bar not reached"
        print(
            f"{row['n']:>3} {row['b0_mbit']:>9} {row['unlimited_star_s']:>15.0f} {row['star_s']:>9.0f} "
            f"{row['chains_s']:>9.0f} {ratio:>17.3f}{mark}"
        )
    for uplink_mbit in (UPLINKS_MBIT[0], UPLINKS_MBIT[-1]):
        picked = [row for row in rows if row["b0_mbit"] == uplink_mbit]
        longest = max(row["star_s"] for row in picked)
        print(f"\nB0 = {uplink_mbit} Mbit/s (one # is {longest / WIDTH:.0f} s)")
        for row in picked:
            for name in ("unlimited_star_s", "star_s", "chains_s"):
                bar = "#" * max(1, round(WIDTH * row[name] / longest))
                label = name.removesuffix("_s").replace("_", " ")
                print(f"  N={row['n']:<3} {label:<15} {bar} {row[name]:.0f}")


def main() -> None:
    """Measure, print, and write what was asked for. Ends with status 1 where the bar is not reached."""
    parser = argparse.ArgumentParser(description="ECHO-2's figure 4 over simulated links")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    rows = measure()
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if not all(map(is_reached, rows)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
