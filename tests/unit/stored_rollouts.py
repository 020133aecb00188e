"""Trajectory groups with tokens, turns and notes, and runs whose store holds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echo_planes.data.store.index import Fate
from echo_planes.data.store.schema import SCHEMA
from echo_planes.data.store.store import ReplayStore

EVIL = "<script>window.hacked = 1</script>\"'><img src=x onerror='window.hacked = 2'> &amp; </pre></style>"


def a_row(group: str, sample: int = 0, text: str = "3+4=7", **values: Any) -> dict[str, Any]:
    """One trajectory whose tokens are the characters of `text`, and an end token."""
    tokens = len(text) + 1
    return {
        "trajectory_id": f"{group}/{sample}",
        "group_id": group,
        "step": -1,
        "fate": "buffered",
        "prompt_index": 5,
        "prompt_ids": [10, 11, 12],
        "prompt_text": f"prompt of {group}",
        "answer": "7",
        "response_ids": [100 + i for i in range(tokens)],
        "response_mask": [True] * tokens,
        "response_text": text,
        "logprobs": [-0.25 * i for i in range(tokens)],
        "top_ids": [],
        "top_logprobs": [],
        "span_stops": [2, tokens],
        "span_versions": [3, 4],
        "span_digests": ["d", "e"],
        "finish_reason": "stop",
        "num_turns": 1,
        "reward": float(sample % 2),
        "correct": sample % 2 == 1,
        "reward_parts": json.dumps({"exact": float(sample % 2)}),
        "version": 3,
        "worker_id": "w0",
        "lineage": "L0",
        "status": "ok",
        "turn_rewards": [],
        "notes": "",
        "created_s": 1.7e9,
        **values,
    }


def a_group(group: str, samples: int = 2, **values: Any) -> list[dict[str, Any]]:
    return [a_row(group, sample, **values) for sample in range(samples)]


def a_batch(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)


def store_rows(
    run: Path, groups: Sequence[Sequence[dict[str, Any]]], trained: dict[int, int] | None = None
) -> Path:
    """Put groups into the store of a run folder, one message each; `trained`: sequence number -> step."""
    store = ReplayStore(run / "replay", holder="test")
    try:
        for rows in groups:
            store.append(a_batch(rows), created_s=1.7e9)
        for sequence, step in (trained or {}).items():
            store.settle(np.array([sequence]), Fate.TRAINED, step=step)
    finally:
        store.close()
    return run
