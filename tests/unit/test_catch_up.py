"""The cheapest way to a version, and the next best when something on it fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import WeightsError
from echo_planes.weights.node.catch_up import in_short
from echo_planes.weights.store.catch_up import CatchUp, plan_path
from echo_planes.weights.store.paths import Entry, Position
from tests.unit.store_publications import digest_of, entry_of

SNAPSHOT_BYTES, PATCH_BYTES = 1000, 90


def at(version: int, lineage: str = "L0") -> Position:
    return Position(lineage, version, digest_of(version, lineage))


def store(last: int, *snapshots: int) -> list[Entry]:
    """Patches up to `last`, and these snapshots."""
    patches = [entry_of(v, v - 1, payload_bytes=PATCH_BYTES) for v in range(1, last + 1)]
    return [*patches, *(entry_of(v, payload_bytes=SNAPSHOT_BYTES) for v in snapshots)]


def steps(path: list[Entry]) -> list[tuple[int, int]]:
    return [(entry.manifest.base_version, entry.manifest.version) for entry in path]


def test_from_nothing_the_nearest_snapshot_and_the_patches_after_it() -> None:
    assert steps(plan_path(None, "L0", 7, store(9, 0, 5))) == [(-1, 5), (5, 6), (6, 7)]


def test_from_near_by_only_patches() -> None:
    assert steps(plan_path(at(4), "L0", 7, store(9, 0, 5))) == [(4, 5), (5, 6), (6, 7)]


def test_from_far_away_an_snapshot_costs_less() -> None:
    assert steps(plan_path(at(0), "L0", 30, store(30, 0, 25)))[0] == (-1, 25)
    assert steps(plan_path(at(20), "L0", 30, store(30, 0, 25)))[0] == (20, 21)


def test_the_caller_s_own_costs_count() -> None:
    path = plan_path(at(4), "L0", 7, store(9, 0, 7), cost=lambda entry: 1.0)
    assert steps(path) == [(-1, 7)]


def test_a_patch_over_several_versions_is_taken_where_it_is_cheaper() -> None:
    entries = [*store(4, 0), entry_of(4, 1, payload_bytes=200)]
    assert steps(plan_path(at(1), "L0", 4, entries)) == [(1, 4)]


def test_there_already() -> None:
    assert plan_path(at(3), "L0", 3, []) == []


def test_equal_version_of_another_state_or_lineage_is_no_base() -> None:
    entries = store(3, 0)
    strange = Position("L0", 2, "xxh3:other")
    assert steps(plan_path(strange, "L0", 3, entries))[0] == (-1, 0)
    assert steps(plan_path(at(2, "L9"), "L0", 3, entries))[0] == (-1, 0)
    assert steps(plan_path(at(3, "L9"), "L0", 3, entries))[0] == (-1, 0)


def test_only_the_very_state_that_is_wanted_is_the_goal() -> None:
    strange = entry_of(3, payload_bytes=1, digest="xxh3:other")
    entries = [strange, *store(3, 0)]
    assert plan_path(None, "L0", 3, entries) == [strange]
    assert steps(plan_path(None, "L0", 3, entries, digest=at(3).digest))[0] == (-1, 0)
    assert steps(plan_path(strange.position, "L0", 3, entries, digest=at(3).digest))[0] == (-1, 0)
    with pytest.raises(WeightsError, match="no way leads to version 3"):
        plan_path(None, "L0", 3, [strange], digest=at(3).digest)


def test_no_way_says_what_there_is() -> None:
    broken = [entry for entry in store(9, 5) if entry.manifest.version != 7]
    with pytest.raises(
        WeightsError, match=r"version 9 of lineage L0 from version 2.*snapshots at versions 5"
    ):
        plan_path(at(2), "L0", 9, broken)
    with pytest.raises(WeightsError, match="nothing of this lineage"):
        plan_path(None, "L1", 9, broken)


@given(st.integers(0, 12), st.sets(st.integers(0, 12), min_size=1), st.data())
@settings(deadline=None)
def test_the_path_is_the_cheapest_of_all(want: int, snapshots: set[int], data: st.DataObject) -> None:
    sizes = st.integers(1, 50)
    entries = [entry_of(v, payload_bytes=data.draw(st.integers(50, 300))) for v in sorted(snapshots)]
    entries += [entry_of(v, v - 1, payload_bytes=data.draw(sizes)) for v in range(1, 13)]
    entries += [entry_of(v, v - 3, payload_bytes=data.draw(sizes), codec="fast") for v in range(3, 13)]

    def cheapest(version: int) -> float:
        """By recursion over everything that leads to `version`."""
        costs = [
            entry.manifest.payload_bytes + (0 if entry.is_snapshot else cheapest(entry.manifest.base_version))
            for entry in entries
            if entry.manifest.version == version
        ]
        return min(costs, default=float("inf"))

    if cheapest(want) == float("inf"):
        with pytest.raises(WeightsError):
            plan_path(None, "L0", want, entries)
        return
    path = plan_path(None, "L0", want, entries)
    assert sum(entry.manifest.payload_bytes for entry in path) == cheapest(want)
    assert path[0].is_snapshot
    assert all(a.position == b.base for a, b in itertools.pairwise(path))
    assert path[-1].manifest.version == want


# --- the driver ----------------------------------------------------------------------------------


class Worker:
    """Fetches and applies in the order it is asked, and fails where it is told to."""

    def __init__(self, bad_fetch: Iterable[str] = (), bad_apply: Iterable[str] = ()) -> None:
        self.log: list[str] = []
        self.bad_fetch, self.bad_apply = set(bad_fetch), set(bad_apply)
        self.state: Position | None = None
        self.fetching = self.most_fetching = 0
        self.during_apply: Callable[[], None] = lambda: None

    async def fetch(self, entry: Entry) -> str:
        self.log.append(f"fetch {entry.name}")
        self.fetching += 1
        self.most_fetching = max(self.most_fetching, self.fetching)
        try:
            await asyncio.sleep(0)
            if entry.name in self.bad_fetch:
                raise WeightsError(f"{entry.name} is damaged")
            return entry.name
        finally:
            self.fetching -= 1

    async def apply(self, entry: Entry, fetched: str) -> None:
        assert fetched == entry.name
        self.log.append(f"apply {entry.name}")
        for _ in range(5):
            await asyncio.sleep(0)
        self.during_apply()
        if entry.name in self.bad_apply:
            raise WeightsError(f"{entry.name} does not fit")
        assert entry.is_snapshot or entry.base == self.state
        self.state = entry.position
        self.log.append(f"done {entry.name}")


def catch_up(worker: Worker, entries: list[Entry], have: Position | None, want: int) -> Position:
    worker.state = have
    return asyncio.run(CatchUp(entries, worker.fetch, worker.apply).run(have, at(want)))


def test_the_next_is_fetched_while_one_is_applied() -> None:
    worker = Worker()
    assert catch_up(worker, store(3, 0), None, 3) == at(3) == worker.state
    names = [entry_of(0).name, *(entry_of(v, v - 1).name for v in (1, 2, 3))]
    for this, following in itertools.pairwise(names):
        assert worker.log.index(f"fetch {following}") < worker.log.index(f"done {this}")
        assert worker.log.index(f"fetch {following}") > worker.log.index(f"fetch {this}")
    assert worker.most_fetching == 1
    assert worker.log.count("fetch " + names[1]) == 1


def test_an_entry_that_cannot_be_fetched_costs_a_detour() -> None:
    bad = entry_of(2, 1).name
    worker = Worker(bad_fetch={bad})
    entries = [*store(4, 0), entry_of(3, payload_bytes=9000)]
    assert catch_up(worker, entries, None, 4) == at(4)
    done = [line for line in worker.log if line.startswith("done")]
    assert done == [f"done {entry_of(0).name}", f"done {entry_of(1, 0).name}", f"done {entry_of(3).name}",
                    f"done {entry_of(4, 3).name}"]  # fmt: skip


def test_an_entry_that_does_not_fit_costs_a_detour() -> None:
    worker = Worker(bad_apply={entry_of(6, 5).name})
    entries = [*store(7, 0), entry_of(6, 5, payload_bytes=500, codec="fast")]
    assert catch_up(worker, entries, at(4), 7) == at(7)
    assert worker.log.count(f"apply {entry_of(6, 5).name}") == 1


def test_when_nothing_is_left_the_reasons_are_told_and_what_was_applied_stays() -> None:
    bad = entry_of(2, 1).name
    worker = Worker(bad_fetch={bad})
    with pytest.raises(WeightsError, match=rf"from version 1.*1 entries failed: {bad}: {bad} is damaged"):
        catch_up(worker, store(3, 0), None, 3)
    assert worker.state == at(1)


def test_nothing_to_do_fetches_nothing() -> None:
    worker = Worker()
    assert catch_up(worker, store(3, 0), at(3), 3) == at(3)
    assert worker.log == []


def test_a_cancelled_catch_up_leaves_no_fetch_behind() -> None:
    worker = Worker()
    started, never = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def slow_fetch(entry: Entry) -> str:
        if entry.is_snapshot:
            return entry.name
        started.set()
        try:
            await never.wait()
        finally:
            ended.append(entry.name)
        return entry.name

    async def slow_apply(entry: Entry, fetched: str) -> None:
        await never.wait()

    async def scenario() -> None:
        task = asyncio.create_task(CatchUp(store(2, 0), slow_fetch, slow_apply).run(None, at(2)))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [entry_of(1, 0).name]

    asyncio.run(scenario())
    assert worker.log == []


def test_another_error_than_a_refusal_goes_through() -> None:
    worker = Worker()

    def fail() -> None:
        raise OSError("the spool is full")

    worker.during_apply = fail
    with pytest.raises(OSError, match="spool"):
        catch_up(worker, store(3, 0), None, 3)


def test_a_long_way_is_told_in_one_short_line() -> None:
    steps = ["v0 full", *(f"v{version} compact" for version in range(2, 78, 2))]
    assert in_short(steps) == "v0 full, v2 compact, 36 more, v76 compact"
    assert in_short(steps[:4]) == "v0 full, v2 compact, v4 compact, v6 compact"
    assert in_short([]) == ""
