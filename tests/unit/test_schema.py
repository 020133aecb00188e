"""The trajectory record on disk: what is written is read back equal, and anything else is not read at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.data.schema import (
    SCHEMA,
    TrajectoryLog,
    from_row,
    read_groups,
    to_row,
    write_groups,
    write_rows,
)
from echo_planes.errors import ClusterError, DataError
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
def test_groups_are_read_back_equal_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, first: Group, second: Group
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.arrow"
    write_groups(path, [first, second], fate="buffered")
    assert read_groups(path) == [first, second]


@settings(max_examples=50, deadline=None)
@given(group=groups())
def test_from_row_undoes_to_row(group: Group) -> None:
    for trajectory in group.trajectories:
        assert from_row(to_row(trajectory, step=3, fate="trained")) == trajectory


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
    )
    prompt = Prompt(7, (1, 2), answer="42", text="6 * 7")
    return Group(
        name,
        tuple(
            Trajectory(f"{name}/{i}", name, prompt, episode, Reward(0.5, True, {"exact": 1.0}), "w0", "L0")
            for i in range(size)
        ),
    )


def test_other_tools_read_the_files_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    write_groups(path, [make_group()], fate="dropped")
    table = feather.read_table(path)
    row = table.to_pylist()[0]
    assert table.num_rows == 2
    assert (row["fate"], row["step"], row["version"]) == ("dropped", -1, 4)
    assert row["response_mask"] == [True, False, True]
    assert row["logprobs"] == [-0.1, 0.0, -0.3]
    assert row["top_ids"] == [[10, 11], [], [12, 13]]
    assert row["top_logprobs"] == [[-0.1, -2.5], [], [-0.3, -1.5]]
    assert (row["span_stops"], row["span_versions"], row["span_digests"]) == ([1, 3], [4, 5], ["d4", "d5"])
    assert (row["num_turns"], row["reward_parts"]) == (2, '{"exact": 1.0}')


def test_no_groups_are_an_empty_file(tmp_path: Path) -> None:
    write_groups(tmp_path / "t.arrow", [], fate="buffered")
    assert read_groups(tmp_path / "t.arrow") == []


# --- what is refused -----------------------------------------------------------------------------


def write_table(path: Path, schema: pa.Schema, rows: list[dict[str, Any]]) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def rows() -> list[dict[str, Any]]:
    return [to_row(t, step=-1, fate="buffered") for t in make_group().trajectories]


def without_a_column() -> pa.Schema:
    return SCHEMA.remove(SCHEMA.get_field_index("logprobs"))


def with_another_type() -> pa.Schema:
    return SCHEMA.set(SCHEMA.get_field_index("reward"), pa.field("reward", pa.float32()))


def with_a_column_more() -> pa.Schema:
    return SCHEMA.append(pa.field("more", pa.string()))


def of_another_version() -> pa.Schema:
    return SCHEMA.with_metadata({"echo_planes.schema_version": "2"})


def without_a_version() -> pa.Schema:
    return SCHEMA.with_metadata(None)


def with_an_unknown_extension() -> pa.Schema:
    metadata = {"ARROW:extension:name": "somebody.elses", "ARROW:extension:metadata": "{}"}
    return SCHEMA.set(0, pa.field("trajectory_id", pa.string(), metadata=metadata))


@pytest.mark.parametrize(
    "change",
    [
        without_a_column,
        with_another_type,
        with_a_column_more,
        of_another_version,
        without_a_version,
        with_an_unknown_extension,
    ],
)
def test_a_file_with_another_schema_is_not_read(tmp_path: Path, change: Callable[[], pa.Schema]) -> None:
    path = tmp_path / "foreign.arrow"
    write_table(path, change(), rows())
    with pytest.raises(DataError, match="another schema") as caught:
        read_groups(path)
    assert str(path) in str(caught.value)


class Telltale(pa.ExtensionType):  # type: ignore[misc]
    """An extension type that tells when a value of it is made."""

    made = 0

    def __init__(self) -> None:
        super().__init__(pa.string(), "echo_planes.tests.telltale")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Telltale:
        return cls()

    def __arrow_ext_scalar_class__(self) -> type[pa.ExtensionScalar]:
        class Scalar(pa.ExtensionScalar):  # type: ignore[misc]
            def as_py(self, **options: Any) -> str:
                Telltale.made += 1
                return str(self.value)

        return Scalar


def test_an_extension_type_is_refused_before_a_row_is_read(tmp_path: Path) -> None:
    pa.register_extension_type(Telltale())
    try:
        storage = pa.array([row["trajectory_id"] for row in rows()])
        table = pa.Table.from_pylist(rows(), schema=SCHEMA)
        table = table.set_column(0, "trajectory_id", pa.ExtensionArray.from_storage(Telltale(), storage))
        path = tmp_path / "telltale.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        for read in (read_groups, lambda p: TrajectoryLog.quarantine(p.parent, 0)):
            with pytest.raises(DataError, match="another schema"):
                read(path)
        assert Telltale.made == 0
        assert table["trajectory_id"].to_pylist() == ["g/0", "g/1"]
        assert Telltale.made == 2  # it would have told
    finally:
        pa.unregister_extension_type("echo_planes.tests.telltale")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.9, -1])
def test_a_torn_file_names_itself(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "torn.arrow"
    write_groups(path, [make_group()], fate="buffered")
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(DataError) as caught:
        read_groups(path)
    assert str(path) in str(caught.value)
    assert "restore it or remove it" in str(caught.value)


def test_a_file_that_is_missing_or_something_else(tmp_path: Path) -> None:
    (tmp_path / "text.arrow").write_text("these are not trajectories\n" * 100)
    for name in ("missing.arrow", "text.arrow", "."):
        with pytest.raises(DataError) as caught:
            read_groups(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_damaged_bytes_are_an_error_or_another_record_but_never_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "damaged.arrow"
    write_groups(path, [make_group(size=4)], fate="buffered")
    content = path.read_bytes()
    refused = 0
    rng = np.random.default_rng(0)
    for position in rng.integers(8, len(content), 300):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            read_groups(path)
        except DataError:
            refused += 1
    assert refused > 20


def test_a_null_where_a_value_belongs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "null.arrow"
    write_table(path, SCHEMA, [{**rows()[0], "response_ids": None}])
    with pytest.raises(DataError, match=r"null\.arrow"):
        read_groups(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    write_groups(path, [make_group("old")], fate="buffered")
    (tmp_path / "t.partial").mkdir()  # the temporary file cannot be made
    with pytest.raises(ClusterError, match=r"t\.arrow"):
        write_groups(path, [make_group("new")], fate="buffered")
    assert [g.group_id for g in read_groups(path)] == ["old"]


# --- the log -------------------------------------------------------------------------------------


def steps_on_disk(folder: Path) -> list[tuple[str, int]]:
    return [
        (row["group_id"], row["step"])
        for path in sorted(folder.glob("*.arrow"))
        for row in feather.read_table(path).to_pylist()
    ]


def test_the_log_writes_full_files_and_the_rest_on_flush(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path / "new" / "folder", "L3", rows_per_file=4)
    log.flush()
    log.add([make_group("a")], step=0, fate="trained")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    log.add([make_group("b")], step=1, fate="trained")
    log.add([make_group("c")], step=-1, fate="dropped")
    log.flush()
    log.flush()
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == ["L3-00000.arrow", "L3-00001.arrow"]
    assert steps_on_disk(tmp_path / "new" / "folder") == [("a", 0)] * 2 + [("b", 1)] * 2 + [("c", -1)] * 2


def test_what_a_resume_does_again_is_set_aside_and_what_it_keeps_stays(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, "L0", rows_per_file=4)
    for step in range(4):
        log.add([make_group(f"g{step}", step)], step=step, fate="trained")
    log.add([make_group("old", 0)], step=-1, fate="dropped")
    log.add([make_group("future", 3)], step=-1, fate="dropped")  # of a version the resume makes again
    log.flush()
    assert TrajectoryLog.quarantine(tmp_path, 2) == 6
    assert steps_on_disk(tmp_path) == [("g0", 0)] * 2 + [("g1", 1)] * 2 + [("old", -1)] * 2
    assert steps_on_disk(tmp_path / "quarantined") == [("g2", 2)] * 2 + [("g3", 3)] * 2 + [("future", -1)] * 2
    assert TrajectoryLog.quarantine(tmp_path, 2) == 0
    assert len(steps_on_disk(tmp_path / "quarantined")) == 6


def test_a_second_quarantine_keeps_what_the_first_set_aside(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, "L0")
    for step in range(6):
        log.add([make_group(f"g{step}", 0)], step=step, fate="trained")
    log.flush()
    TrajectoryLog.quarantine(tmp_path, 4)
    TrajectoryLog.quarantine(tmp_path, 2)
    assert sorted({step for _, step in steps_on_disk(tmp_path)}) == [0, 1]
    assert sorted({step for _, step in steps_on_disk(tmp_path / "quarantined")}) == [2, 3, 4, 5]


def test_a_torn_log_file_is_named_by_the_quarantine(tmp_path: Path) -> None:
    write_rows(tmp_path / "L0-00000.arrow", rows())
    content = (tmp_path / "L0-00000.arrow").read_bytes()
    (tmp_path / "L0-00000.arrow").write_bytes(content[:-50])
    with pytest.raises(DataError, match=r"L0-00000\.arrow"):
        TrajectoryLog.quarantine(tmp_path, 0)
