"""The trajectory record as Arrow columns, and its files on disk.

`trajectories/<lineage>-<number>.arrow` are Arrow IPC files that pandas (`read_feather`), DuckDB and
polars open as they are. One row is one trajectory; `fate` says what became of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from echo_planes.errors import ClusterError, DataError
from echo_planes.types import Episode, Group, Prompt, Reward, Span, Trajectory

SCHEMA_VERSION = 1

SCHEMA = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("step", pa.int64()),  # t of the batch it was trained in; -1: not trained
        ("fate", pa.string()),  # "trained", "dropped", "buffered"
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
    ],
    metadata={"echo_planes.schema_version": str(SCHEMA_VERSION)},
)


def to_row(trajectory: Trajectory, *, step: int, fate: str) -> dict[str, Any]:
    """One trajectory as a row of `SCHEMA`."""
    prompt, episode, reward = trajectory.prompt, trajectory.episode, trajectory.reward
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "step": step,
        "fate": fate,
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
        "finish_reason": episode.finish_reason,
        "num_turns": episode.num_turns,
        "reward": reward.value,
        "correct": reward.correct,
        "reward_parts": json.dumps(dict(reward.parts)),
        "version": trajectory.version,
        "worker_id": trajectory.worker_id,
        "lineage": trajectory.lineage,
    }


def from_row(row: dict[str, Any]) -> Trajectory:
    """The trajectory a row holds; the exact inverse of `to_row`."""
    stops = row["span_stops"]
    spans = tuple(
        Span(start, stop, version, digest)
        for start, stop, version, digest in zip(
            [0, *stops][: len(stops)], stops, row["span_versions"], row["span_digests"], strict=True
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
        ),
        reward=Reward(row["reward"], row["correct"], json.loads(row["reward_parts"])),
        worker_id=row["worker_id"],
        lineage=row["lineage"],
    )


def write_groups(path: Path, groups: Iterable[Group], *, fate: str) -> None:
    """Write groups to one Arrow file."""
    write_rows(path, [to_row(t, step=-1, fate=fate) for g in groups for t in g.trajectories])


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows of `SCHEMA` to one Arrow IPC file; see `write_table`."""
    write_table(path, pa.Table.from_pylist(list(rows), schema=SCHEMA))


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table of `SCHEMA` to one Arrow IPC file: whole and durable, or not there.

    Raises:
        ClusterError: the disk is full or cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as sink:
            with pa.ipc.new_file(sink, SCHEMA) as writer:
                writer.write_table(table.combine_chunks())
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(path)
    except OSError as error:
        raise ClusterError(
            f"cannot write {path}: {error.strerror}; free some space or set run.dir"
        ) from error


def read_groups(path: Path) -> list[Group]:
    """The groups of a file written by `write_groups`, in order.

    Raises:
        DataError: the file is unreadable, or its schema is not exactly ours.
    """
    rows = _read_rows(path)
    groups: dict[str, list[Trajectory]] = {}
    for row in rows:
        try:
            groups.setdefault(row["group_id"], []).append(from_row(row))
        except (TypeError, ValueError) as error:
            raise _unreadable(path, error) from error
    return [Group(group_id, tuple(members)) for group_id, members in groups.items()]


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with pa.OSFile(str(path), "rb") as source:
            reader = pa.ipc.open_file(source)
            # Compared before any row is read: a schema can carry extension types that run code.
            if not reader.schema.equals(SCHEMA, check_metadata=True):
                raise DataError(f"{path} has another schema than version {SCHEMA_VERSION}; not read")
            table = reader.read_all()
        table.validate(full=True)  # a damaged offset would read beyond its buffer and end the process
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    return rows


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is not a readable trajectory file ({error}); restore it or remove it")


class TrajectoryLog:
    """Collects the fate of trajectories and writes them out in files of many rows (Arrow appends are dear).

    Args:
        folder: where the files go; created.
        lineage: first part of the file names.
        rows_per_file: rows kept in memory before a file is written.
    """

    def __init__(self, folder: Path, lineage: str, rows_per_file: int = 8192) -> None:
        self._folder = folder
        self._lineage = lineage
        self._rows_per_file = rows_per_file
        # Kept as columns: thousands of rows as dicts would be scanned by every garbage collection.
        self._tables: list[pa.Table] = []
        self._num_rows = 0
        self._files = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, groups: Iterable[Group], *, step: int, fate: str) -> None:
        """Enter groups that were trained at `step`, or dropped (step -1)."""
        rows = [to_row(t, step=step, fate=fate) for g in groups for t in g.trajectories]
        if rows:
            self._tables.append(pa.Table.from_pylist(rows, schema=SCHEMA))
            self._num_rows += len(rows)
        if self._num_rows >= self._rows_per_file:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory to a new file."""
        if self._tables:
            name = f"{self._lineage}-{self._files:05d}.arrow"
            write_table(self._folder / name, pa.concat_tables(self._tables))
            self._files += 1
            self._tables, self._num_rows = [], 0

    @staticmethod
    def quarantine(folder: Path, beyond_step: int) -> int:
        """After a crash: set aside rows trained at or after `beyond_step`, which the resume does again.

        Returns how many rows were moved to `quarantined/`.

        Raises:
            DataError: a file is unreadable, or its schema is not exactly ours.
        """
        moved = 0
        for path in sorted(folder.glob("*.arrow")):
            rows = _read_rows(path)
            kept: list[dict[str, Any]] = []
            beyond: list[dict[str, Any]] = []
            for row in rows:
                later = row["step"] >= beyond_step or row["version"] > beyond_step
                (beyond if later else kept).append(row)
            if beyond:
                aside = folder / "quarantined"
                aside.mkdir(exist_ok=True)
                # Named after the step too: a later resume may go back further in the same file.
                write_rows(aside / f"{path.stem}-from-{beyond_step}.arrow", beyond)
                write_rows(path, kept)
                moved += len(beyond)
        return moved
