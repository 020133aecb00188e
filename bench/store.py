"""The durable replay store: `python -m bench.store [--json FILE] [--folder FOLDER] [--rounds N] [--small]`.

Append: against plain writes of as many bytes (one of our messages), one write per batch, in turn with ours in
one run; once with no sync on either side (what our work costs beside the copy into the page cache) and once
with one sync per batch on both sides. Ratios are of wall time and, as `cpu`, of the thread's own time, user
and system.
Choose and open: a store of 1,000,000 short rows (62,500 groups of 16, one message each, about 0.4 GB; rows
of 512 tokens would be 10 GB, and neither reads rows), its files in the page cache. Gather: 512 rows of 512
response tokens, 32 groups from as many messages, at first touch (hashes and structure checked) and again.
Budget: a store that may hold 64 MiB takes in many times as much; the most it holds on disk (segments are
written anew when half of them is gone, so up to twice the budget and a segment), and how its memory grows in
the second half of that beyond the first.
All figures are medians. The folder must lie on a disk, not in memory; what is written there is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echo_planes.data.store.choose import Selector
from echo_planes.data.store.files import Files
from echo_planes.data.store.index import Fate
from echo_planes.data.store.retention import Retention
from echo_planes.data.store.schema import SCHEMA
from echo_planes.data.store.store import ReplayStore

TOKENS = 512
SAMPLES = 16
GROUPS_CHOSEN = 32
GROUPS_PER_VERSION = 64
BLOCK = 4  # batches appended before as many are written plainly
STALENESS = 8  # versions that are admissible in the narrow case
SELECTORS: tuple[Selector, ...] = ("fifo", "freshest", "uniform", "staleness", "reward")
BUDGET_BYTES = 64 * 2**20
BARS = {
    "append_ratio_16": (0.5, "at least"),
    "append_ratio_128": (0.5, "at least"),
    "append_durable_ratio_16": (0.8, "at least"),
    "append_durable_ratio_128": (0.8, "at least"),
    "choose_us": (100.0, "at most"),
    "gather_ms": (5.0, "at most"),
    "gather_first_ms": (5.0, "at most"),
    "open_s": (2.0, "at most"),
    "budget_on_disk": (2.5, "at most"),
}


class Unsynced(Files):
    """A disk that promises nothing."""

    def sync(self, fd: int) -> None:
        """Leave it to the system."""


def rows(tokens: int, rng: np.random.Generator) -> pa.RecordBatch:
    """One group of `SAMPLES` rows as a run makes them, with `tokens` response tokens."""
    records = [
        {
            "trajectory_id": f"lineage.0/{row}",
            "group_id": "lineage.0",
            "step": -1,
            "fate": "buffered",
            "prompt_index": 0,
            "prompt_ids": list(range(min(tokens, 64))),
            "prompt_text": "p" * min(tokens, 200),
            "answer": "7",
            "response_ids": rng.integers(0, 150_000, tokens).tolist(),
            "response_mask": [True] * tokens,
            "response_text": "word " * (tokens * 4 // 5),
            "logprobs": (-rng.random(tokens)).tolist(),
            "top_ids": [],
            "top_logprobs": [],
            "span_stops": [tokens],
            "span_versions": [0],
            "span_digests": ["xxh3:" + "0" * 32],
            "finish_reason": "stop",
            "num_turns": 1,
            "reward": float(row % 2),
            "correct": bool(row % 2),
            "reward_parts": '{"exact": 1.0}',
            "version": 0,
            "worker_id": "worker-0",
            "lineage": "lineage",
        }
        for row in range(SAMPLES)
    ]
    return pa.RecordBatch.from_pylist(records, schema=SCHEMA)


def renamed(batch: pa.RecordBatch, first: int, *, version: int = 0, reward: float = 0.5) -> pa.RecordBatch:
    """The same rows as other groups, of one version."""
    count = batch.num_rows
    names = pa.array([f"lineage.{first + row // SAMPLES}" for row in range(count)])
    columns = dict(zip(SCHEMA.names, batch.columns, strict=True))
    columns["group_id"] = names
    columns["version"] = pa.array(np.full(count, version))
    columns["reward"] = pa.array(np.full(count, reward))
    # With the very schema object, as `schema.to_batch` does.
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=SCHEMA)


def timed(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


class Stopwatch:
    """Wall seconds, and seconds of this thread in user and system mode, of one block after another."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, float]] = []

    def time(self, action: Callable[[], object]) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        action()
        self.blocks.append((time.perf_counter() - wall_s, time.thread_time() - cpu_s))

    def medians(self) -> tuple[float, float]:
        """Of a block, the first left out: it is a warm-up."""
        wall_s, cpu_s = zip(*self.blocks[1:], strict=True)
        return statistics.median(wall_s), statistics.median(cpu_s)


def append_round(here: Path, batches: list[pa.RecordBatch], files: Files) -> tuple[Stopwatch, Stopwatch]:
    """Append `batches` and write the bytes of one plainly, in turn, `BLOCK` at a time."""
    here.mkdir()
    store = ReplayStore(here / "store", holder="bench", files=files, segment_bytes=1 << 40)
    store.append(batches[0], created_s=0.0)  # the segment is made
    size_bytes = int(store.index.messages["size_bytes"][0])
    data = (here / "store" / "segments" / "00000000.arrows").read_bytes()[-size_bytes:]
    fd = os.open(here / "plain", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    ours, plain = Stopwatch(), Stopwatch()

    def append(block: list[pa.RecordBatch]) -> None:
        for batch in block:
            store.append(batch, created_s=0.0)

    def write() -> None:
        for _ in range(BLOCK):
            os.write(fd, data)
            files.sync(fd)

    # The page cache of what went before is not to be written back during this.
    os.sync()
    for first in range(1, len(batches), BLOCK):
        block = batches[first : first + BLOCK]
        ours.time(lambda b=block: append(b))  # type: ignore[misc]
        plain.time(write)
    os.close(fd)
    store.close()
    shutil.rmtree(here)
    return ours, plain


def measure_append(folder: Path, batch: pa.RecordBatch, count: int, rounds: int, name: str) -> dict[str, Any]:
    """Plain time over ours per batch, for `count` appends of `batch` in each round."""
    groups = batch.num_rows // SAMPLES
    files: Files = Files() if name == "append_durable" else Unsynced()
    batches = [renamed(batch, number * groups) for number in range(count + 1)]
    found = [append_round(folder / "append", batches, files) for _ in range(rounds)]
    ours = np.median([ours.medians() for ours, _ in found], axis=0)
    plain = np.median([plain.medians() for _, plain in found], axis=0)
    ratios = [plain.medians()[0] / ours.medians()[0] for ours, plain in found]
    rows = batch.num_rows
    return {
        f"{name}_ratio_{rows}": float(plain[0] / ours[0]),
        f"{name}_cpu_ratio_{rows}": float(plain[1] / ours[1]),
        f"{name}_ratio_{rows}_rounds": ratios,
        f"{name}_us_{rows}": (1e6 * ours / BLOCK).tolist(),
        f"{name}_plain_us_{rows}": (1e6 * plain / BLOCK).tolist(),
    }


def fill(folder: Path, groups: int) -> float:
    """The large store; bytes of a row on disk."""
    store = ReplayStore(folder, holder="bench", files=Unsynced())
    batch = rows(1, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    for first in range(0, groups, GROUPS_PER_VERSION):
        version = first // GROUPS_PER_VERSION
        rewards = rng.random(GROUPS_PER_VERSION)
        members = range(first, min(first + GROUPS_PER_VERSION, groups))
        store.append(
            *(renamed(batch, n, version=version, reward=rewards[n - first]) for n in members), created_s=0.0
        )
    size_bytes = int(store.index.messages["size_bytes"].sum())
    store.close()
    return size_bytes / groups / SAMPLES


def measure_choose(store: ReplayStore, rounds: int) -> dict[str, float]:
    """Median microseconds of choosing, by selector, over all versions and over the newest few."""
    rng = np.random.default_rng(2)
    newest = int(store.index.groups["version"].max())
    found = {}
    for selector in SELECTORS:
        for name, min_version in (("all", 0), ("narrow", newest - STALENESS)):
            found[f"{selector}_{name}"] = 1e6 * statistics.median(
                timed(
                    lambda s=selector, v=min_version: store.choose(  # type: ignore[misc]
                        GROUPS_CHOSEN, selector=s, min_version=v, rng=rng
                    )
                )
                for _ in range(rounds * 40)
            )
    return found


def anonymous_bytes() -> int:
    """Memory of this process that is not a mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def measure_large(folder: Path, groups: int, rounds: int) -> dict[str, Any]:
    """Opening and choosing."""
    told: dict[str, Any] = {"rows": groups * SAMPLES, "bytes_per_row": fill(folder, groups)}
    opened = []
    for _ in range(rounds):
        before = anonymous_bytes()
        start_s = time.perf_counter()
        store = ReplayStore(folder, holder="bench")
        opened.append(time.perf_counter() - start_s)
        told.setdefault("index_bytes_per_group", (anonymous_bytes() - before) / groups)
        store.close()
        del store
    told["open_s"] = statistics.median(opened)
    store = ReplayStore(folder, holder="bench", files=Unsynced())
    told["choose_by_selector_us"] = measure_choose(store, rounds)
    gone = np.random.default_rng(3).permutation(groups)[: groups // 2]
    told["settle_half_s"] = timed(lambda: store.settle(gone, Fate.TRAINED, step=1))
    told["choose_by_selector_half_trained_us"] = measure_choose(store, rounds)
    store.close()
    told["choose_us"] = max(
        *told["choose_by_selector_us"].values(), *told["choose_by_selector_half_trained_us"].values()
    )
    return told


def measure_gather(folder: Path, batch: pa.RecordBatch, groups: int, rounds: int) -> dict[str, float]:
    """Median milliseconds for 512 rows."""
    store = ReplayStore(folder, holder="bench", files=Unsynced())
    for number in range(groups):
        store.append(renamed(batch, number), created_s=0.0)
    store.close()
    store = ReplayStore(folder, holder="bench")
    order = np.random.default_rng(4).permutation(groups)
    parts = [order[at : at + GROUPS_CHOSEN] for at in range(0, groups, GROUPS_CHOSEN)]
    first = [timed(lambda p=part: store.gather(p)) for part in parts]  # type: ignore[misc]
    again = [timed(lambda p=part: store.gather(p)) for part in parts for _ in range(rounds)]  # type: ignore[misc]
    store.close()
    return {"gather_first_ms": 1e3 * statistics.median(first), "gather_ms": 1e3 * statistics.median(again)}


def measure_budget(folder: Path, batch: pa.RecordBatch, appends: int) -> dict[str, float]:
    """A store that takes in many times its budget: what it holds on disk and in memory meanwhile."""
    store = ReplayStore(folder, holder="bench", files=Unsynced(), segment_bytes=BUDGET_BYTES // 8)
    keep = Retention(max_bytes=BUDGET_BYTES)
    on_disk, anonymous = [], []
    for number in range(appends):
        store.append(renamed(batch, number), created_s=float(number))
        if number % 32 == 0:
            sequences = np.flatnonzero(store.index.groups["fate"] == Fate.BUFFERED)
            store.settle(sequences, Fate.TRAINED, step=number)
            store.retain(keep, now_s=float(number))
            store.compact()
            on_disk.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
            anonymous.append(anonymous_bytes())
    written = int(store.index.messages["size_bytes"][-1]) * appends
    store.close()
    half = len(anonymous) // 2
    return {
        "budget_written": written / BUDGET_BYTES,
        "budget_on_disk": max(on_disk) / BUDGET_BYTES,
        "budget_rss_growth_mb": (max(anonymous[half:]) - max(anonymous[:half])) / 1e6,
    }


def measure(folder: Path, rounds: int, *, small: bool) -> dict[str, Any]:
    """All figures."""
    group = rows(TOKENS, np.random.default_rng(0))
    told: dict[str, Any] = measure_large(folder / "large", 2_000 if small else 62_500, rounds)
    shutil.rmtree(folder / "large")
    told |= measure_gather(folder / "gather", group, 128 if small else 1024, rounds)
    shutil.rmtree(folder / "gather")
    told |= measure_budget(folder / "budget", group, 512 if small else 8192)
    shutil.rmtree(folder / "budget")
    count = 64 if small else 256
    for groups in (1, 8):
        batch = renamed(pa.Table.from_batches([group] * groups).combine_chunks().to_batches()[0], 0)
        for name in ("append", "append_durable"):
            told |= measure_append(folder, batch, count // groups, rounds, name)
    for name in ("append_ratio", "append_durable_ratio"):
        told[name] = min(told[f"{name}_16"], told[f"{name}_128"])
    told["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return told


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a small store, to see that all of it works")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        told = measure(Path(folder), arguments.rounds, small=arguments.small)
    met = {
        name: told[name] >= bar if side == "at least" else told[name] <= bar
        for name, (bar, side) in BARS.items()
    }
    for name, value in told.items():
        shown = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
        bar = (
            f"  ({BARS[name][1]} {BARS[name][0]:g}: {'met' if met[name] else 'MISSED'})"
            if name in met
            else ""
        )
        print(f"{name:36} {shown}{bar}")
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=2))
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
