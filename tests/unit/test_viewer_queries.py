"""Choice of the groups that a list shows, their order, and how much it reads for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.errors import DataError
from echo_planes.reporting.viewer import queries
from echo_planes.reporting.viewer.listing import summaries
from echo_planes.reporting.viewer.queries import Page, find, parse_query
from echo_planes.types import IntArray
from tests.unit.stored_rollouts import a_group, store_rows


def a_store(folder: Path, num: int = 8, trained: int = 4) -> StoreSnapshot:
    """Group i has version i // 2, rewards of mean i / 10, worker w<i % 3>."""
    groups = [
        a_group(
            f"g{i}",
            version=i // 2,
            reward=i / 10,
            worker_id=f"w{i % 3}",
            prompt_text=f"Question {i}?",
            response_text=f"Answer {i}!",
            notes='{"seen": "Needle"}' if i == 5 else "",
            status="reward_error" if i == 6 else "ok",
        )
        for i in range(num)
    ]
    store_rows(folder, groups, {i: i // 2 for i in range(trained)})
    return StoreSnapshot(folder / "replay")


def asked(snapshot: StoreSnapshot, **fields: str) -> list[int]:
    found: list[int] = find(snapshot, parse_query(fields)).sequences.tolist()
    return found


def test_filters_the_index_decides(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert asked(store) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert asked(store, order="up", version_min="1", version_max="2") == [2, 3, 4, 5]
    # Step 1 is the first, t = 0; what was never trained has none.
    assert asked(store, order="up", step_max="1") == [0, 1]
    assert asked(store, order="up", step_min="2") == [2, 3]
    assert asked(store, reward_min="0.45", reward_max=" 0.65 ") == [6, 5]
    assert asked(store, fate="trained", version_min="1") == [3, 2]
    assert asked(store, fate="lost") == []


def test_filters_the_rows_decide(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert asked(store, worker="w1") == [7, 4, 1]
    assert asked(store, status="reward_error") == [6]
    assert asked(store, text="question 3") == [3]
    assert asked(store, text="ANSWER 4!") == [4]
    assert asked(store, text="needle") == [5]
    assert asked(store, text="g7") == [7]
    assert asked(store, text="question", worker="w0", version_max="1") == [3, 0]
    assert asked(store, text=".*") == []  # a text, no pattern


def test_everything_must_fit_one_and_the_same_row(tmp_path: Path) -> None:
    rows = a_group("g0")
    rows[0] |= {"worker_id": "wa", "response_text": "one"}
    rows[1] |= {"worker_id": "wb", "response_text": "two"}
    store_rows(tmp_path, [rows])
    store = StoreSnapshot(tmp_path / "replay")
    assert asked(store, worker="wa", text="one") == [0]
    assert asked(store, worker="wa", text="two") == []


def test_orders(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert asked(store, sort="reward_mean") == [7, 6, 5, 4, 3, 2, 1, 0]
    assert asked(store, sort="step") == [2, 3, 0, 1, 4, 5, 6, 7]
    assert asked(store, sort="step", order="up") == [4, 5, 6, 7, 0, 1, 2, 3]


def pages(snapshot: StoreSnapshot, **fields: str) -> list[Page]:
    """All pages, as somebody who always goes on sees them."""
    found = [find(snapshot, parse_query(fields))]
    while found[-1].next_start is not None:
        found.append(find(snapshot, parse_query({**fields, "start": str(found[-1].next_start)})))
        assert len(found) < 100
    return found


@pytest.mark.parametrize("fields", [{}, {"worker": "w1"}, {"text": "question"}, {"text": "nothing"}])
def test_pages_hold_every_group_once(
    tmp_path: Path, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = a_store(tmp_path, 40)
    monkeypatch.setattr(queries, "LOOK_BYTES", 2**40)
    whole = asked(store, **fields)
    assert len(pages(store, **fields)) == 1
    for name, value in (("PAGE_GROUPS", 7), ("LOOK_GROUPS", 16), ("_CHUNK_GROUPS", 5)):
        monkeypatch.setattr(queries, name, value)
    split = pages(store, **fields)
    assert len(split) >= 2
    assert [s for page in split for s in page.sequences.tolist()] == whole
    assert all(len(page.sequences) <= 7 for page in split)
    assert all(page.looked <= 20 for page in split)


def test_a_page_reads_no_more_than_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store(tmp_path, 40)
    monkeypatch.setattr(queries, "_CHUNK_GROUPS", 5)
    monkeypatch.setattr(queries, "LOOK_BYTES", int(store.index.groups["num_bytes"][:12].sum()))
    read: list[int] = []
    gather = store.gather

    def counted(sequences: IntArray) -> object:
        read.extend(sequences.tolist())
        return gather(sequences)

    monkeypatch.setattr(store, "gather", counted)
    page = find(store, parse_query({"text": "nothing"}))
    assert (len(read), page.looked, page.next_start) == (15, 15, 15)
    read.clear()
    find(store, parse_query({}))
    assert read == []  # the index knows it all


def test_rows_that_are_gone_fit_nothing(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    path = tmp_path / "replay" / "segments" / "00000000.arrows"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    assert asked(store, text="question") == [6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"step_min": "x"}, "step_min='x' is no number"),
        ({"reward_max": "nan"}, "is no number"),
        ({"fate": "eaten"}, "fate='eaten' is not one of buffered, trained"),
        ({"sort": "secret"}, "sort='secret'"),
        ({"text": "x" * 201}, "text has 201 characters; search for 200 at most"),
    ],
)
def test_a_mistake_is_one_line(fields: dict[str, str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        parse_query(fields)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["start", "step_min", "reward_max", "fate", "sort", "text"]), st.text())
)
def test_any_other_query_is_read_or_refused(fields: dict[str, str]) -> None:
    try:
        query = parse_query(fields)
    except DataError:
        return
    assert query.start >= 0


def test_what_rows_say_of_their_group(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = a_group("g0", 4)
    rows[3] |= {"worker_id": "w9", "status": "failed"}
    store_rows(tmp_path, [rows])
    store = StoreSnapshot(tmp_path / "replay")
    (summary,) = summaries(store.gather(find(store, parse_query({})).sequences)).values()
    assert summary.rewards == (0.0, 1.0, 0.0, 1.0)
    assert (summary.num_correct, summary.tokens_mean) == (2, 6.0)
    assert (summary.workers, summary.statuses) == (("w0", "w9"), ("failed",))
