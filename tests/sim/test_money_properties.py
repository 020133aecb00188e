"""Accounting of dollars under any events of the machines, in any order: each is somewhere, and only once."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.fleet.money import FATES, USEFUL, WASTED, Accounting, Budget

MACHINES = ("m0", "m1", "m2", "m3")
PRICES = st.one_of(st.floats(0.0, 100.0), st.sampled_from([0.0, 0.07, 3.6, 1e-30, 1e30]))
SECONDS = st.one_of(st.floats(0.0, 10_000.0), st.just(0.0), st.floats(-100.0, 0.0))
WHO = st.sampled_from(MACHINES)
COUNTS = st.integers(0, 10**9)
EVENTS = st.one_of(
    st.tuples(
        st.just("start"),
        WHO,
        PRICES,
        st.sampled_from(["L4", "H100"]),
        st.sampled_from(["spot", "on_demand"]),
        st.sampled_from(["rollout", "rollout", "learner"]),
    ),
    st.tuples(st.just("stop"), WHO),
    st.tuples(st.just("mark"), WHO, st.sampled_from(["booting", "idle", "busy", "busy"])),
    st.tuples(st.just("made"), WHO, COUNTS),
    st.tuples(st.just("settle"), WHO, st.sampled_from(FATES), COUNTS),
    st.tuples(st.just("step"), COUNTS, st.floats(0.0, 10_000.0)),
)
SCHEDULES = st.lists(st.tuples(SECONDS, EVENTS), max_size=40)


AT_WORK = [("start", "m0", 3.6, "L4", "spot", "rollout"), ("mark", "m0", "busy")]


def apply(book: Accounting, event: tuple[Any, ...], now_s: float) -> None:
    kind, *rest = event
    if kind == "start":
        machine, price, sku, market, role = rest
        book.start(machine, price, now_s, sku=sku, market=market, role=role)
    elif kind == "stop":
        book.stop(rest[0], now_s)
    elif kind == "mark":
        book.mark(rest[0], rest[1], now_s)
    elif kind == "made":
        book.made(*rest)
    elif kind == "settle":
        book.settle(*rest)
    else:
        book.step(now_s, rest[0], rest[1])


class Reference:
    """Every paid interval on its own, in exact fractions."""

    def __init__(self) -> None:
        self.now = Fraction(0)
        self.running: dict[str, tuple[Fraction, Fraction, tuple[str, str]]] = {}
        self.paid: list[tuple[str, tuple[str, str], Fraction]] = []

    def see(self, event: tuple[Any, ...], now_s: float) -> None:
        if event[0] in ("start", "stop", "mark", "step"):
            self.now = max(self.now, grid(now_s, 9))
        if event[0] in ("start", "stop"):
            self.paid = self.intervals()
            self.running = {
                name: (price, self.now, sku)
                for name, (price, _, sku) in self.running.items()
                if name != event[1]
            }
        if event[0] == "start":
            self.running[event[1]] = (grid(event[2], 9), self.now, (event[3], event[4]))

    def intervals(self, now: Fraction | None = None) -> list[tuple[str, tuple[str, str], Fraction]]:
        now = self.now if now is None else max(now, self.now)
        return self.paid + [
            (name, sku, price * (now - since) / 3600) for name, (price, since, sku) in self.running.items()
        ]


def grid(value: float, digits: int) -> Fraction:
    return Fraction(round(value * 10**digits), 10**digits)


@settings(max_examples=300, deadline=None)
@given(schedule=SCHEDULES)
def test_every_dollar_is_somewhere_and_only_once(schedule: list[Any]) -> None:
    book, reference = Accounting(), Reference()
    now_s, total_usd, total = 0.0, 0.0, Fraction(0)
    for passed_s, event in [*((0.0, event) for event in AT_WORK), *schedule]:
        now_s = max(0.0, now_s + passed_s)
        reference.see(event, now_s)
        apply(book, event, now_s)
        # The total is the sum over the intervals, exactly, and never falls, even as a float.
        intervals = reference.intervals(grid(now_s, 9))
        assert book.total(now_s) == sum(usd for *_, usd in intervals)
        if passed_s >= 0:
            assert book.total(now_s) >= total
            assert book.total_usd(now_s) >= total_usd
        total, total_usd = book.total(now_s), book.total_usd(now_s)
        # Over the machines, over the SKUs, over the parts.
        for machine in MACHINES:
            assert book.usd(machine, now_s) == float(
                sum(usd for name, _, usd in intervals if name == machine)
            )
        by_sku = book.usd_by_sku(now_s)
        for name, usd in by_sku.items():
            assert usd == float(sum(paid for _, sku, paid in intervals if " ".join(sku) == name))
        assert math.isclose(math.fsum(by_sku.values()), total_usd, rel_tol=1e-12, abs_tol=1e-300)
        parts = book.parts(now_s)
        assert set(parts) == {*USEFUL, *WASTED}
        assert sum(parts.values()) == total
        assert min(parts.values()) >= 0


@settings(max_examples=100, deadline=None)
@given(schedule=SCHEDULES, later_s=st.floats(0.0, 1e6))
def test_reading_changes_nothing(schedule: list[Any], later_s: float) -> None:
    read, unread = Accounting(), Accounting()
    now_s = 0.0
    for passed_s, event in schedule:
        now_s = max(0.0, now_s + passed_s)
        apply(read, event, now_s)
        apply(unread, event, now_s)
        read.summary(now_s + later_s, steps_left=3)
        read.usd("m0", now_s + later_s)
    assert read.summary(now_s, steps_left=3) == unread.summary(now_s, steps_left=3)


@settings(max_examples=100, deadline=None)
@given(schedule=SCHEDULES, usd=st.floats(0.0, 1e6))
def test_a_budget_is_spent_when_nothing_is_left_and_for_good(schedule: list[Any], usd: float) -> None:
    book = Accounting()
    budget = Budget(usd, book)
    now_s, spent = 0.0, False
    for passed_s, event in schedule:
        now_s = max(0.0, now_s + passed_s)
        apply(book, event, now_s)
        assert budget.spent(now_s) == (book.total(now_s) >= Fraction(str(usd)))
        assert budget.spent(now_s) >= spent or passed_s < 0
        assert budget.spent(now_s) == (budget.left(now_s) <= 0)
        spent = budget.spent(now_s)
        steps = budget.steps_left(now_s)
        if steps:
            step_usd = book.recent_step_usd()
            assert step_usd is not None
            assert steps * step_usd <= budget.left(now_s) * (1 + 1e-12)
