"""The trajectory record as Arrow columns: its schema versions, and the conversion to rows and back.

One row is one trajectory. In the replay store `fate` and `step` hold the state at acceptance; the store's
fate log holds the later fate (see `store/store.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from echo_planes.errors import DataError
from echo_planes.types import Episode, Group, Prompt, Reward, Span, Trajectory

SCHEMA_VERSION = 3

_FIELDS_1 = [
    ("trajectory_id", pa.string()),
    ("group_id", pa.string()),
    ("step", pa.int64()),  # t of the batch it was trained in or set aside for; -1: none
    ("fate", pa.string()),  # name of an `index.Fate` in lower case
    ("prompt_index", pa.int64()),
    ("prompt_ids", pa.list_(pa.int32())),
    ("prompt_text", pa.string()),
    ("answer", pa.string()),
    ("response_ids", pa.list_(pa.int32())),
    ("response_mask", pa.list_(pa.bool_())),
    ("response_text", pa.string()),
    ("logprobs", pa.list_(pa.float64())),  # after temperature and top-p; 0 on environment tokens
    ("top_ids", pa.list_(pa.list_(pa.int32()))),  # per token, k alternatives; empty unless asked for
    ("top_logprobs", pa.list_(pa.list_(pa.float64()))),
    ("span_stops", pa.list_(pa.int32())),
    ("span_versions", pa.list_(pa.int64())),
    ("span_digests", pa.list_(pa.string())),
    ("finish_reason", pa.string()),
    ("num_turns", pa.int32()),
    ("reward", pa.float64()),
    ("correct", pa.bool_()),
    ("reward_parts", pa.string()),  # JSON object
    ("version", pa.int64()),  # oldest version of any token
    ("worker_id", pa.string()),
    ("lineage", pa.string()),
]
_FIELDS_2 = [
    *_FIELDS_1,
    ("status", pa.string()),
    ("turn_rewards", pa.list_(pa.float64())),  # of each turn, if the task gives them
    ("notes", pa.string()),  # notes of the environment (JSON)
    ("created_s", pa.float64()),  # time of acceptance, seconds since 1970; NaN: not known
]
_FIELDS_3 = [
    *_FIELDS_2,
    ("span_schedules", pa.list_(pa.int64())),  # numbers of schedules of KV budgets; -1: dense attention
]


def _schema(fields: list[tuple[str, pa.DataType]], version: int) -> pa.Schema:
    return pa.schema(fields, metadata={"echo_planes.schema_version": str(version)})


SCHEMA = _schema(_FIELDS_3, SCHEMA_VERSION)


@dataclass(frozen=True, slots=True)
class OlderSchema:
    """Schema of an earlier version, and the conversion of its rows to SCHEMA."""

    version: int
    schema: pa.Schema
    upgrade: Callable[[pa.RecordBatch], pa.RecordBatch]  # to SCHEMA; shares the unchanged columns


def _upgrade_1(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows = batch.num_rows
    turn_rewards = pa.ListArray.from_arrays(
        pa.array([0] * (rows + 1), pa.int32()), pa.array([], pa.float64())
    )
    added = [
        pa.array(["ok"] * rows, pa.string()),  # only such trajectories were accepted
        turn_rewards,
        pa.array([""] * rows, pa.string()),
        pa.array([float("nan")] * rows, pa.float64()),
    ]
    return _upgrade_2(pa.RecordBatch.from_arrays([*batch.columns, *added], schema=_SCHEMA_2))


def _upgrade_2(batch: pa.RecordBatch) -> pa.RecordBatch:
    stops = batch.column("span_stops")
    dense = pa.array(np.full(len(stops.flatten()), -1, np.int64))
    offsets = np.zeros(batch.num_rows + 1, np.int32)
    np.cumsum(stops.value_lengths().to_numpy(zero_copy_only=False), out=offsets[1:])
    schedules = pa.ListArray.from_arrays(offsets, dense)
    return pa.RecordBatch.from_arrays([*batch.columns, schedules], schema=SCHEMA)


_SCHEMA_2 = _schema(_FIELDS_2, 2)
OLDER_SCHEMAS: tuple[OlderSchema, ...] = (
    OlderSchema(1, _schema(_FIELDS_1, 1), _upgrade_1),
    OlderSchema(2, _SCHEMA_2, _upgrade_2),
)


def to_row(trajectory: Trajectory, *, created_s: float) -> dict[str, Any]:
    """Convert an accepted trajectory to a row of `SCHEMA`."""
    prompt, episode, reward = trajectory.prompt, trajectory.episode, trajectory.reward
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "step": -1,
        "fate": "buffered",
        "prompt_index": prompt.index,
        "prompt_ids": prompt.token_ids,
        "prompt_text": prompt.text,
        "answer": prompt.answer,
        "response_ids": episode.response_ids,
        "response_mask": episode.response_mask,
        "response_text": episode.text,
        "logprobs": episode.logprobs,
        "top_ids": [[i for i, _ in pairs] for pairs in episode.top_logprobs],
        "top_logprobs": [[p for _, p in pairs] for pairs in episode.top_logprobs],
        "span_stops": [s.stop for s in episode.spans],
        "span_versions": [s.version for s in episode.spans],
        "span_digests": [s.digest for s in episode.spans],
        "span_schedules": [s.schedule for s in episode.spans],
        "finish_reason": episode.finish_reason,
        "num_turns": episode.num_turns,
        "reward": reward.value,
        "correct": reward.correct,
        "reward_parts": json.dumps(dict(reward.parts), default=float),  # a task may compute them with numpy
        "version": trajectory.version,
        "worker_id": trajectory.worker_id,
        "lineage": trajectory.lineage,
        "status": trajectory.status,
        "turn_rewards": episode.turn_rewards,
        "notes": episode.notes,
        "created_s": created_s,
    }


def from_row(row: Mapping[str, Any]) -> Trajectory:
    """Convert a row to its trajectory; the exact inverse of `to_row`."""
    stops = row["span_stops"]
    spans = tuple(
        Span(*fields)
        for fields in zip(
            [0, *stops][: len(stops)],
            stops,
            row["span_versions"],
            row["span_digests"],
            row["span_schedules"],
            strict=True,
        )
    )
    tops = tuple(
        tuple(zip(ids, logprobs, strict=True))
        for ids, logprobs in zip(row["top_ids"], row["top_logprobs"], strict=True)
    )
    return Trajectory(
        trajectory_id=row["trajectory_id"],
        group_id=row["group_id"],
        prompt=Prompt(row["prompt_index"], tuple(row["prompt_ids"]), row["answer"], row["prompt_text"]),
        episode=Episode(
            response_ids=tuple(row["response_ids"]),
            response_mask=tuple(row["response_mask"]),
            logprobs=tuple(row["logprobs"]),
            spans=spans,
            finish_reason=row["finish_reason"],
            text=row["response_text"],
            top_logprobs=tops,
            num_turns=row["num_turns"],
            turn_rewards=tuple(row["turn_rewards"]),
            notes=row["notes"],
        ),
        reward=Reward(row["reward"], row["correct"], json.loads(row["reward_parts"])),
        worker_id=row["worker_id"],
        lineage=row["lineage"],
        status=row["status"],
    )


def to_batch(groups: Iterable[Group], *, created_s: float) -> pa.RecordBatch:
    """Convert accepted groups to rows of `SCHEMA`, each group's together."""
    rows = [to_row(t, created_s=created_s) for group in groups for t in group.trajectories]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def to_groups(table: pa.Table) -> list[Group]:
    """Convert a table of `SCHEMA` to its groups, in order.

    Raises:
        DataError: a row is none that `to_row` writes.
    """
    groups: dict[str, list[Trajectory]] = {}
    for row in table.to_pylist():
        try:
            groups.setdefault(row["group_id"], []).append(from_row(row))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the rows of group {row['group_id']} are no trajectories ({error}); they were not served"
            ) from error
    return [Group(group_id, tuple(members)) for group_id, members in groups.items()]
