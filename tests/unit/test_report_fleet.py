"""A report's fleet section: its numbers are those of the record; it is safe and small whatever that holds."""

from __future__ import annotations

import json
import random
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from echo_planes.reporting.metrics import FLEET_STATE, WORKER_STATE, MetricsWriter, read_events
from echo_planes.reporting.report import render
from echo_planes.reporting.sections.fleet import MAX_LANES, MAX_ROWS, NUM_POINTS, fleet
from echo_planes.reporting.sections.fleet_history import RESUMED, Life, over_time, read_history
from echo_planes.testing.fakes import Faults
from tests.unit.test_budget import Job
from tests.unit.test_report import EVIL, a_run, outline

Event = dict[str, Any]


def state(time_s: float, worker: str, text: str, instance_type: str = "L4/spot") -> Event:
    return {
        "time_s": time_s,
        "kind": WORKER_STATE,
        "text": text,
        "worker": worker,
        "instance_type": instance_type,
    }


def said(time_s: float, worker: str, kind: str, text: str) -> Event:
    return {"time_s": time_s, "kind": kind, "text": text, "worker": worker}


def standing(time_s: float, text: str = "", **numbers: Any) -> Event:
    known = {"mu_min": 4.0, "mu_target": 4.4, "mu": 3.25, "usd_per_hour": 7.5, "workers": {"serving": 3}}
    return {"time_s": time_s, "kind": FLEET_STATE, "text": text, **known, **numbers}


class Tables(HTMLParser):
    """The cells of a page's tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[-1][-1][-1] += data


def table(section: str, column: str) -> list[dict[str, str]]:
    """The rows of the table that has a column of this name."""
    parser = Tables()
    parser.feed(section)
    [found] = [rows for rows in parser.tables if column in rows[0]]
    return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


def series(section: str, title: str) -> dict[str, list[str]]:
    """Values that a chart shows when it is pointed at, by series."""
    hover = re.search(rf'aria-label="{title}" data-hover="([^"]*)"', section)
    assert hover is not None, title
    rows = json.loads(unescape(hover[1]))["rows"]
    return {row["n"]: row["v"] for row in rows}


A_LIFE = [
    state(0.0, "w0", "booting"),
    state(10.0, "w1", "booting", "H100/eu/on_demand"),
    state(40.0, "w0", "serving"),
    standing(45.0, "too few: +1 L4/spot", launched={"L4/spot": 1}, released={}),
    state(50.0, "w2", "booting"),
    state(60.0, "w1", "serving", "H100/eu/on_demand"),
    state(70.0, "w2", "serving"),
    standing(75.0, mu=5.5),
    said(90.0, "w1", "worker leaves", "more than the margin"),
    standing(90.0, "more than the margin", launched={}, released={"H100/eu/on_demand": 1}, usd_per_hour=9.25),
    said(95.0, "w1", "worker left", "3 prompts go on elsewhere"),
    state(96.0, "w1", "gone", "H100/eu/on_demand"),
    state(100.0, "w2", "gone"),
    said(100.0, "w2", "worker lost", "its process died"),
]


# --- the numbers ---------------------------------------------------------------------------------


def test_a_life_is_what_the_events_say() -> None:
    w0, w1, w2 = read_history(A_LIFE, 120.0).lives
    assert [(s.state, s.begin_s, s.end_s) for s in w1.stretches] == [
        ("booting", 10.0, 60.0),
        ("serving", 60.0, 90.0),
        ("leaving", 90.0, 96.0),
    ]
    assert (w1.instance_type, w1.end, w1.served_s) == ("H100/eu/on_demand", "left", 30.0)
    assert w1.reasons == ["more than the margin", "3 prompts go on elsewhere"]
    assert (w2.end, w2.reasons, w2.end_s) == ("lost", ["its process died"], 100.0)
    assert (w0.end, w0.end_s, w0.served_from_s) == ("here", 120.0, 40.0)


def test_the_section_shows_the_numbers_of_the_record() -> None:
    section = fleet(A_LIFE, 120.0)
    outline(section)
    kinds = {row["Instance type"]: row for row in table(section, "Hours served")}
    l4 = kinds["L4/spot"]
    assert (l4["Came"], l4["Lost"], l4["Left"], l4["At the end"]) == ("2", "1", "0", "1")
    assert l4["At once, at most"] == "2"
    assert float(l4["Hours served"]) == pytest.approx((80 + 30) / 3600, rel=0.01)
    assert l4["Served after, median"] == "30.0 s"
    workers = {row["Worker"]: row for row in table(section, "How")}
    assert workers["w1"]["How"] == "left: more than the margin; 3 prompts go on elsewhere"
    assert (workers["w1"]["Came"], workers["w1"]["Served from"], workers["w1"]["Went"]) == (
        "10.0 s",
        "60.0 s",
        "96.0 s",
    )
    assert workers["w2"]["How"] == "lost: its process died"
    bought, let_go = table(section, "Launched")
    assert (bought["When"], bought["Launched"], bought["Released"]) == ("45.0 s", "+1 L4/spot", "-")
    assert (bought["Why"], bought["Target, trajectories/s"], bought["Provided"]) == (
        "too few: +1 L4/spot",
        "4.4",
        "3.25",
    )
    assert (let_go["Released"], let_go["$/hour"]) == ("-1 H100/eu/on_demand", "$9.25")
    assert let_go["Workers then"] == "3 serving"
    needed = series(section, "Needed and provided")
    assert needed == {"provided": ["3.25", "5.5", "3.25"], "target": ["4.4"] * 3, "mu_min": ["4"] * 3}
    by_kind = series(section, "Workers by instance type")
    assert {name: max(float(v) for v in values) for name, values in by_kind.items()} == {
        "L4/spot": 2.0,
        "H100/eu/on_demand": 1.0,
    }
    assert {name: values[-1] for name, values in by_kind.items()} == {
        "L4/spot": "1",
        "H100/eu/on_demand": "0",
    }
    assert set(series(section, "Workers by state")) == {"serving", "booting", "leaving"}


def test_who_serves_only_after_it_was_told_to_leave_is_leaving() -> None:
    late = [
        state(0.0, "w0", "booting"),
        said(5.0, "w0", "worker leaves", "too late"),
        state(6.0, "w0", "serving"),
    ]
    [life] = read_history(late, 10.0).lives
    assert [s.state for s in life.stretches] == ["booting", "leaving"]


def test_a_fleet_of_fixed_size_has_lanes_and_no_decisions() -> None:
    section = fleet([event for event in A_LIFE if event["kind"] != FLEET_STATE], 120.0)
    assert "Worker by worker" in section
    assert "Decisions" not in section
    assert "Needed and provided" not in section


def test_a_state_of_a_later_version_is_shown() -> None:
    section = fleet([state(0.0, "w0", "serving"), state(5.0, "w0", "parked")], 10.0)
    assert series(section, "Workers by state")["parked"][-1] == "1"
    assert "w0 L4/spot: parked 5.0 s to 10.0 s" in section


def test_the_parts_of_a_resumed_run_follow_one_another() -> None:
    events = [*A_LIFE, state(1.0, "w0", "booting", "A10/spot"), state(21.0, "w0", "serving", "A10/spot")]
    history = read_history(events, 50.0)
    first, *_, second = history.lives
    assert (first.instance_type, first.end, first.end_s, first.reasons) == (
        "L4/spot",
        "gone",
        100.0,
        [RESUMED],
    )
    assert (second.instance_type, second.part, second.begin_s, second.end_s) == ("A10/spot", 1, 101.0, 150.0)
    assert "w0 (part 2) A10/spot" in fleet(events, 50.0)


def test_many_instance_types_share_the_last_color() -> None:
    events = [state(float(i), f"w{i}", "serving", f"kind{i}") for i in range(9)]
    by_kind = series(fleet(events, 100.0), "Workers by instance type")
    assert list(by_kind) == ["kind0", "kind1", "kind2", "kind3", "others"]
    assert [values[-1] for values in by_kind.values()] == ["1", "1", "1", "1", "5"]


@pytest.mark.parametrize("most_points", [12, 400])
def test_counts_over_time_are_those_of_the_spans(most_points: int) -> None:
    draw = random.Random(7)
    for _ in range(30):
        begins = [draw.randrange(50) for _ in range(12)]
        spans = [(float(b), float(draw.randrange(b, 101)), draw.choice("xyz")) for b in begins]
        times, counts = over_time(spans, 100.0, most_points)
        assert len(times) <= most_points
        assert times == sorted(times)
        assert (times[0], times[-1]) == (0.0, 100.0)
        for i, at_s in enumerate(times):
            before = i + 1 < len(times) and times[i + 1] == at_s  # this point says what was so until then
            for name, values in counts.items():
                mine = [(b, e) for b, e, n in spans if n == name and (b < e or e == 100.0)]
                until = sum(b < at_s <= e for b, e in mine)
                there = sum(b <= at_s and (at_s < e or e == 100.0) for b, e in mine)
                assert values[i] == (until if before else there), (spans, at_s, name)


# --- runs ----------------------------------------------------------------------------------------


def test_a_run_on_fakes_and_its_resumption_show_who_served(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.run(12.0)
    job.run(100.0, resume=True)
    lives = read_history(read_events(job.folder), 1.0).lives
    assert [(life.part, life.worker, life.instance_type) for life in lives] == [
        (part, worker, instance_type)
        for part in (0, 1)
        for worker, instance_type in (("w0", "fast/on_demand"), ("w1", "slow/on_demand"))
    ]
    assert all(life.served_s > 0 for life in lives)
    page = render(job.folder)
    outline(page)
    assert "<h2>Fleet</h2>" in page
    shown = page.split("<h2>Data and events</h2>")[1]
    assert WORKER_STATE not in shown  # they have a section of their own
    assert "checkpoint" in shown


def test_a_worker_that_was_lost_and_came_again_is_one_lane_with_a_mark(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", Faults(die_at_s={("w1", 0): 4.0}))
    job.run(None)
    lives = [life for life in read_history(read_events(job.folder), 1.0).lives if life.worker == "w1"]
    assert [life.end for life in lives] == ["lost", "here"]
    assert lives[0].reasons
    section = render(job.folder).split("<h2>Fleet</h2>")[1].split("<h2>")[0]
    assert section.count("fbad") == 1
    assert section.count(">w1 slow/on_demand</text>") == 1


def test_a_folder_without_such_events_has_no_fleet_section(tmp_path: Path) -> None:
    assert "<h2>Fleet</h2>" not in render(a_run(tmp_path))
    assert fleet([], 10.0) == ""


# --- what is hostile, damaged or large -----------------------------------------------------------


def test_hostile_names_and_reasons_are_text(tmp_path: Path) -> None:
    writer = MetricsWriter(a_run(tmp_path))
    writer.event(4.0, WORKER_STATE, "booting", worker=EVIL, instance_type=EVIL)
    writer.event(5.0, WORKER_STATE, EVIL, worker=EVIL, instance_type=EVIL)
    writer.event(6.0, "worker lost", EVIL, worker=EVIL)
    writer.event(6.0, WORKER_STATE, "gone", worker=EVIL, instance_type=EVIL)
    writer.event(7.0, FLEET_STATE, EVIL, launched={EVIL: 1}, workers={EVIL: 2}, mu=1.0)
    page = render(tmp_path)
    parsed = outline(page)
    assert "<h2>Fleet</h2>" in page
    assert "<script>alert" not in page
    assert parsed.seen.count("script") == 1
    assert parsed.seen.count("img") == 0
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]


def test_events_without_their_fields_are_not_an_error() -> None:
    events: list[Event] = [
        {"kind": WORKER_STATE},
        {"kind": WORKER_STATE, "time_s": "soon", "text": "serving", "worker": 3, "instance_type": None},
        {"kind": "worker lost", "worker": "nobody"},
        {"kind": FLEET_STATE, "workers": [1], "launched": {"a": "many"}, "mu": None, "time_s": 3.0},
    ]
    outline(fleet(events, 5.0))


def test_thousands_of_workers_make_a_section_of_bounded_size() -> None:
    draw = random.Random(3)
    events = []
    for i in range(4000):
        begin_s, name, instance_type = draw.uniform(0, 80_000), f"w{i}", f"kind{i % 7}"
        events += [
            state(begin_s, name, "booting", instance_type),
            state(begin_s + 200, name, "serving", instance_type),
        ]
        events += [
            state(begin_s + 4000, name, "gone", instance_type),
            said(begin_s + 4000, name, "worker lost", "x" * 5000),
        ]
    events += [standing(20.0 * i, "y" * 5000, launched={"kind1": 1}) for i in range(4000)]
    events.sort(key=lambda event: event["time_s"])
    section = fleet(events, 86_400.0)
    assert len(section) < 1_000_000
    assert "Worker by worker" not in section  # a table instead
    assert len(table(section, "How")) == len(table(section, "Launched")) == MAX_ROWS
    assert f"the last {MAX_ROWS} of 4,000" in section
    assert all(len(values) <= NUM_POINTS for values in series(section, "Workers by instance type").values())
    assert sum(int(row["Came"].replace(",", "")) for row in table(section, "Hours served")) == 4000


def test_lanes_are_drawn_up_to_a_number_of_workers() -> None:
    def of(count: int) -> str:
        return fleet([state(1.0, f"w{i}", "serving") for i in range(count)], 10.0)

    assert "Worker by worker" in of(MAX_LANES)
    assert "Worker by worker" not in of(MAX_LANES + 1)


def test_a_life_without_a_reason_says_how_it_ended() -> None:
    [row] = table(fleet([state(0.0, "w0", "booting"), state(9.0, "w0", "gone")], 10.0), "How")
    assert (row["How"], row["Served from"], row["Went"]) == ("ended", "never", "9.0 s")
    life: Life = read_history([state(0.0, "w0", "booting"), state(9.0, "w0", "gone")], 10.0).lives[0]
    assert life.served_s == 0.0
