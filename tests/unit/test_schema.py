"""The trajectory record as rows: what is written is read back equal, and older rows become today's."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.data.store.schema import OLDER_SCHEMAS, SCHEMA, from_row, to_batch, to_groups, to_row
from echo_planes.errors import DataError
from echo_planes.types import Episode, Group, Prompt, Reward, Span, Trajectory

TOKEN = st.integers(0, 2**31 - 1)
LOGPROB = st.floats(max_value=0.0, allow_nan=False, width=64)
NAME = st.text(max_size=8)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    """Several turns, several versions, with or without alternatives per token."""
    ids = draw(st.lists(TOKEN, max_size=8))
    n = len(ids)
    stops = [*sorted(draw(st.sets(st.integers(1, max(1, n - 1)), max_size=n // 2))), n] if n else []
    spans = [
        Span(start, stop, draw(st.integers(0, 2**40)), draw(NAME))
        for start, stop in zip([0, *stops], stops, strict=False)
    ]
    pairs = st.lists(st.tuples(TOKEN, LOGPROB), max_size=3).map(tuple)
    tops = draw(st.one_of(st.just([]), st.lists(pairs, min_size=n, max_size=n)))
    return Episode(
        response_ids=tuple(ids),
        response_mask=tuple(draw(st.lists(st.booleans(), min_size=n, max_size=n))),
        logprobs=tuple(draw(st.lists(LOGPROB, min_size=n, max_size=n))),
        spans=tuple(spans),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(st.text(max_size=12)),
        top_logprobs=tuple(tops),
        num_turns=draw(st.integers(0, 5)),
        turn_rewards=tuple(draw(st.lists(st.floats(allow_nan=False), max_size=3))),
        notes=draw(st.text(max_size=8)),
    )


@st.composite
def groups(draw: st.DrawFn, name: str = "g") -> Group:
    prompt = Prompt(
        draw(st.integers(0, 2**60)), tuple(draw(st.lists(TOKEN, max_size=4))), draw(NAME), draw(NAME)
    )
    members = [
        Trajectory(
            trajectory_id=f"{name}/{i}",
            group_id=name,
            prompt=prompt,
            episode=draw(episodes()),
            reward=Reward(
                draw(st.floats(allow_nan=False)),
                draw(st.booleans()),
                draw(st.dictionaries(NAME, st.floats(allow_nan=False), max_size=3)),
            ),
            worker_id=draw(NAME),
            lineage=draw(NAME),
        )
        for i in range(draw(st.integers(1, 3)))
    ]
    return Group(name, tuple(members))


# --- round trips ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(first=groups("one"), second=groups("two"))
def test_groups_are_read_back_equal_and_in_order(first: Group, second: Group) -> None:
    batch = to_batch([first, second], created_s=12.5)
    assert batch.column("created_s").to_pylist() == [12.5] * batch.num_rows
    assert to_groups(pa.Table.from_batches([batch])) == [first, second]


@settings(max_examples=50, deadline=None)
@given(group=groups())
def test_from_row_undoes_to_row(group: Group) -> None:
    for trajectory in group.trajectories:
        assert from_row(to_row(trajectory, created_s=0.0)) == trajectory


def test_a_row_says_everything_of_an_episode() -> None:
    """A new field of a message needs its place in the schema; one with a default is easily forgotten."""
    fields = {f.name for kind in (Trajectory, Episode, Reward) for f in dataclasses.fields(kind)}
    not_stored = {"error", "prompt", "episode", "reward"}  # accepted ones have no error; the rest are parts
    renamed = {"text": "response_text", "spans": "span_stops", "value": "reward", "parts": "reward_parts"}
    assert {renamed.get(name, name) for name in fields - not_stored} <= {*SCHEMA.names, "logprobs"}


def make_group(name: str = "g", *versions: int, size: int = 2) -> Group:
    """Two turns with an environment token between them; a span per version."""
    versions = versions or (4, 5)
    n = max(3, len(versions))
    stops = [*range(1, len(versions)), n]
    starts = [0, *stops[:-1]]
    episode = Episode(
        response_ids=tuple(range(10, 10 + n)),
        response_mask=(True, False, *[True] * (n - 2)),
        logprobs=(-0.1, 0.0, *[-0.3] * (n - 2)),
        spans=tuple(Span(a, b, v, f"d{v}") for a, b, v in zip(starts, stops, versions, strict=True)),
        finish_reason="stop",
        text="a!b",
        top_logprobs=(((10, -0.1), (11, -2.5)), (), *[((12, -0.3), (13, -1.5))] * (n - 2)),
        num_turns=2,
        turn_rewards=(0.25, -1.0),
        notes='{"seat": 1}',
    )
    prompt = Prompt(7, (1, 2), answer="42", text="6 * 7")
    return Group(
        name,
        tuple(
            Trajectory(f"{name}/{i}", name, prompt, episode, Reward(0.5, True, {"exact": 1.0}), "w0", "L0")
            for i in range(size)
        ),
    )


def test_other_tools_see_plain_columns() -> None:
    row = to_batch([make_group()], created_s=3.0).to_pylist()[0]
    assert (row["fate"], row["step"], row["version"], row["status"]) == ("buffered", -1, 4, "ok")
    assert row["response_mask"] == [True, False, True]
    assert row["logprobs"] == [-0.1, 0.0, -0.3]
    assert row["top_ids"] == [[10, 11], [], [12, 13]]
    assert row["top_logprobs"] == [[-0.1, -2.5], [], [-0.3, -1.5]]
    assert (row["span_stops"], row["span_versions"], row["span_digests"]) == ([1, 3], [4, 5], ["d4", "d5"])
    assert (row["num_turns"], row["turn_rewards"], row["notes"]) == (2, [0.25, -1.0], '{"seat": 1}')
    assert (row["reward_parts"], row["created_s"]) == ('{"exact": 1.0}', 3.0)


def test_a_null_where_a_value_belongs_names_the_group() -> None:
    rows: list[dict[str, Any]] = to_batch([make_group("torn")], created_s=0.0).to_pylist()
    rows[1]["response_ids"] = None
    with pytest.raises(DataError, match="group torn"):
        to_groups(pa.Table.from_pylist(rows, schema=SCHEMA))


@pytest.mark.parametrize("older", OLDER_SCHEMAS, ids=lambda older: f"version {older.version}")
def test_rows_of_an_older_schema_become_rows_of_this_one(older: Any) -> None:
    whole = to_batch([make_group("a"), make_group("b", 1)], created_s=5.0)
    old = pa.RecordBatch.from_pylist(whole.select(older.schema.names).to_pylist(), schema=older.schema)
    upgraded = older.upgrade(old)
    upgraded.validate(full=True)
    assert upgraded.schema.equals(SCHEMA, check_metadata=True)
    assert upgraded.select(older.schema.names).to_pylist() == old.to_pylist()
    first, second = to_groups(pa.Table.from_batches([upgraded]))
    assert (first.group_id, second.version, first.trajectories[0].status) == ("a", 1, "ok")
    if older.version == 1:
        assert all(math.isnan(seconds) for seconds in upgraded.column("created_s").to_pylist())
    assert {
        span.schedule for one in (first, second) for t in one.trajectories for span in t.episode.spans
    } == {-1}
    assert to_groups(pa.Table.from_batches([older.upgrade(old.slice(2))]))[0].group_id == "b"
    assert older.upgrade(old.slice(0, 0)).num_rows == 0


def test_every_schema_has_its_own_version() -> None:
    versions = [older.schema.metadata for older in OLDER_SCHEMAS] + [SCHEMA.metadata]
    assert len({str(version) for version in versions}) == len(versions)
