"""The ledger of dollars: what an hour costs, where the money went, what is left."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import ConfigError, RefusedError
from echo_planes.fleet.money import FATES, Accounting, Budget


def at_work(usd_per_hour: float = 3.6) -> Accounting:
    """One worker, busy since 0 s: 0.001 $/s."""
    book = Accounting()
    book.start("w0", usd_per_hour, 0.0, sku="L4", market="spot")
    book.mark("w0", "busy", 0.0)
    return book


def parts(book: Accounting, now_s: float) -> dict[str, Fraction]:
    """Those that are not zero."""
    return {part: value for part, value in book.parts(now_s).items() if value}


# --- machines ------------------------------------------------------------------------------------


def test_an_hour_costs_its_price_and_a_stopped_machine_nothing_more() -> None:
    book = Accounting()
    assert book.total_usd(0.0) == 0.0
    book.start("w0", 2.5, 100.0)
    assert book.usd("w0", 3700.0) == 2.5
    book.stop("w0", 3700.0)
    book.stop("w0", 9000.0)
    assert book.usd("w0", 99_999.0) == 2.5
    assert book.usd("w1", 99_999.0) == 0.0
    assert book.total_usd(99_999.0) == 2.5


def test_a_machine_started_again_settles_the_time_before_at_the_price_and_sku_before() -> None:
    book = Accounting()
    book.start("w0", 1.0, 0.0, sku="L4", market="spot")
    book.start("w0", 4.0, 3600.0, sku="H100")
    assert book.usd("w0", 7200.0) == 5.0
    assert book.usd_by_sku(7200.0) == {"H100 on_demand": 4.0, "L4 spot": 1.0}


def test_prices_are_the_decimals_that_were_written() -> None:
    """0.07 is not a binary fraction, nor is 0.1 s: ten thousand hours of it are 700 dollars all the same."""
    book = Accounting()
    book.start("w0", 0.07, 0.1)
    assert book.total(36_000_000.1) == 700


def test_a_dear_machine_does_not_hide_a_cheap_one() -> None:
    book = Accounting()
    book.start("dear", 1e6, 0.0)
    book.start("cheap", 1e-9, 0.0)
    assert book.total(3600.0) == 10**6 + Fraction(1, 10**9)


@pytest.mark.parametrize("price", [-0.01, math.nan, math.inf, -math.inf])
def test_what_is_not_a_price_is_refused_and_changes_nothing(price: float) -> None:
    book = at_work()
    with pytest.raises(ConfigError, match=r"machine w0: price .* \$/h; give"):
        book.start("w0", price, 1000.0)
    assert book.total_usd(2000.0) == 2.0


def test_a_clock_that_stands_still_or_falls_back_costs_nothing() -> None:
    book = Accounting()
    book.start("w0", 3600.0, 50.0)
    book.start("w0", 3600.0, 50.0)
    assert book.total_usd(50.0) == 0.0
    book.mark("w0", "busy", 60.0)
    book.stop("w0", 20.0)
    assert book.total_usd(0.0) == 10.0


# --- where it went -------------------------------------------------------------------------------


def test_booting_idle_and_busy_seconds_are_told_apart() -> None:
    book = Accounting()
    book.start("w0", 3600.0, 0.0)
    book.mark("w0", "idle", 5.0)
    book.mark("w0", "busy", 7.0)
    book.mark("w0", "idle", 17.0)
    assert parts(book, 20.0) == {"booting": 5, "idle": 5, "open": 10}
    book.start("w0", 3600.0, 20.0)  # its successor boots anew
    assert parts(book, 21.0) == {"booting": 6, "idle": 5, "open": 10}


def test_news_of_a_machine_that_is_gone_changes_nothing() -> None:
    book = at_work()
    book.stop("w0", 1000.0)
    book.mark("w0", "idle", 1001.0)
    book.mark("unknown", "busy", 1002.0)
    book.settle("unknown", "stale", 10)
    book.made("unknown", 10)
    assert parts(book, 2000.0) == {"lost": 1}


def test_dollars_at_work_are_shared_out_over_the_tokens() -> None:
    book = at_work()
    book.made("w0", 1000)
    book.settle("w0", "trained", 400)
    book.settle("w0", "evaluated", 50)
    book.settle("w0", "stale", 300)
    book.settle("w0", "failed", 100)
    book.settle("w0", "lost", 50)
    assert {part: round(float(value), 12) for part, value in parts(book, 1000.0).items()} == {
        "trained": 0.4,
        "evaluated": 0.05,
        "stale": 0.3,
        "failed": 0.1,
        "lost": 0.05,
        "open": 0.1,
    }


def test_a_dollar_that_cannot_be_shared_evenly_is_shared_whole() -> None:
    book = at_work()
    book.made("w0", 7)
    book.settle("w0", "trained", 3)
    book.settle("w0", "stale", 2)
    shares = book.parts(1000.0)
    assert sum(shares.values()) == 1
    assert [float(shares[part]) for part in ("trained", "stale", "open")] == [3 / 7, 2 / 7, 2 / 7]


def test_idle_dollars_are_not_shared_out() -> None:
    book = at_work()
    book.mark("w0", "idle", 1000.0)
    book.settle("w0", "stale", 7)
    assert parts(book, 3000.0) == {"stale": 1, "idle": 2}


def test_more_settled_than_was_reported_made_is_believed() -> None:
    """Statistics come late; fates do not wait for them."""
    book = at_work()
    book.made("w0", 10)
    book.settle("w0", "trained", 30)
    book.settle("w0", "failed", 10)
    assert parts(book, 1000.0) == {"trained": Fraction(3, 4), "failed": Fraction(1, 4)}


def test_a_machine_that_goes_without_a_token_lost_its_dollars() -> None:
    book = at_work()
    assert parts(book, 500.0) == {"open": Fraction(1, 2)}
    book.stop("w0", 1000.0)
    assert parts(book, 5000.0) == {"lost": 1}


def test_a_negative_count_of_tokens_is_refused() -> None:
    book = at_work()
    with pytest.raises(RefusedError, match="-1 tokens"):
        book.made("w0", -1)
    with pytest.raises(RefusedError):
        book.settle("w0", "stale", -1)
    with pytest.raises(RefusedError):
        book.step(10.0, -1, 0.0)
    assert parts(book, 1000.0) == {"open": 1}
    assert book.recent_step_usd() is None


def test_the_learner_is_idle_for_its_share_of_the_step() -> None:
    book = Accounting()
    book.start("learner-0", 3600.0, 0.0, role="learner")
    book.start("learner-1", 3600.0, 0.0, role="learner")
    assert book.step(10.0, 5, 2.5) == 20.0
    assert parts(book, 10.0) == {"learner": 15, "learner_idle": 5}
    book.step(20.0, 5, 99.0)  # longer than the step: all of it
    assert parts(book, 20.0) == {"learner": 15, "learner_idle": 25}
    book.step(20.0, 5, 1.0)  # a step of no time
    book.step(30.0, 5, -1.0)
    assert parts(book, 30.0) == {"learner": 35, "learner_idle": 25}


def test_a_name_that_passes_from_the_learner_to_the_rollouts_loses_no_dollar() -> None:
    book = Accounting()
    book.start("m", 3600.0, 0.0)
    book.start("m", 3600.0, 1.0, role="learner")
    assert parts(book, 3.0) == {"booting": 1, "learner": 2}


# --- what a worker says of its time --------------------------------------------------------------


def serving(usd_per_hour: float = 3600.0) -> Accounting:
    """One worker, serving since 0 s: 1 $/s."""
    book = Accounting()
    book.start("w0", usd_per_hour, 0.0)
    book.mark("w0", "serving", 0.0)
    return book


def test_a_worker_s_own_account_tells_busy_from_idle_seconds() -> None:
    book = serving()
    book.worked("w0", 4.0, 10.0)
    assert parts(book, 10.0) == {"open": 4, "idle": 6}
    book.worked("w0", 12.0, 20.0)  # cumulative: 8 of the last 10
    book.worked("w0", 12.0, 20.0)  # the same again
    assert parts(book, 20.0) == {"open": 12, "idle": 8}


def test_no_more_than_passed_was_busy_and_what_came_early_is_not_lost() -> None:
    book = serving()
    book.worked("w0", 10.5, 10.0)  # a message took its time
    assert parts(book, 10.0) == {"open": 10}
    book.worked("w0", 19.5, 20.0)
    assert parts(book, 20.0) == {"open": Fraction(39, 2), "idle": Fraction(1, 2)}
    book.worked("w0", 3.0, 30.0)  # less than before: no time comes back
    assert parts(book, 30.0) == {"open": Fraction(39, 2), "idle": Fraction(21, 2)}


def test_time_without_an_account_is_as_busy_as_the_rest() -> None:
    book = serving()
    assert parts(book, 10.0) == {"open": 10}  # nobody has said anything yet
    book.worked("w0", 2.5, 10.0)
    assert parts(book, 20.0) == {"open": 5, "idle": 15}
    book.stop("w0", 20.0)
    book.worked("w0", 12.5, 21.0)  # too late
    assert parts(book, 30.0) == {"lost": 5, "idle": 15}


def test_a_successor_s_account_begins_anew() -> None:
    book = serving()
    book.worked("w0", 5.0, 10.0)
    book.start("w0", 3600.0, 20.0)  # the ten seconds before are half busy
    book.worked("w0", 0.0, 25.0)  # it boots: there is nothing to tell apart
    book.mark("w0", "serving", 30.0)
    book.worked("w0", 10.0, 40.0)
    assert parts(book, 40.0) == {"open": 20, "idle": 10, "booting": 10}


def test_a_new_price_is_shared_out_like_the_old_one() -> None:
    book = serving()
    book.worked("w0", 5.0, 10.0)
    book.start("w0", 7200.0, 10.0, state="serving")
    book.worked("w0", 10.0, 20.0)
    assert parts(book, 20.0) == {"open": 25, "idle": 5}


def test_another_price_holds_from_now_on_and_its_account_goes_on() -> None:
    book = serving()
    book.worked("w0", 5.0, 10.0)
    book.reprice("w0", 7200.0, 10.0)
    assert parts(book, 10.0) == {"open": 5, "idle": 5}
    book.worked("w0", 10.0, 20.0)  # of 20 s so far: 5 s more than before
    assert parts(book, 20.0) == {"open": 15, "idle": 15}
    book.stop("w0", 20.0)
    assert book.total(30.0) == 30


@settings(max_examples=200, deadline=None)
@given(
    prices=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0.0, 1e4)), min_size=1, max_size=30),
    rest_s=st.integers(0, 10**6),
)
def test_what_was_spent_stays_whatever_the_prices_that_come(
    prices: list[tuple[int, float]], rest_s: int
) -> None:
    """To the last unit: a price in billionths of a dollar an hour times whole seconds, and the next one."""
    book, now_s, expected, billionths = Accounting(), 0, Fraction(0), 0
    book.start("w0", 0.0, 0.0, state="serving")
    for passed_s, usd_per_hour in prices:
        now_s += passed_s
        expected += Fraction(billionths * passed_s, 3600 * 10**9)
        assert book.total(now_s) == expected
        book.reprice("w0", usd_per_hour, now_s)
        assert book.total(now_s) == expected
        billionths = round(usd_per_hour * 10**9)
    assert book.total(now_s + rest_s) == expected + Fraction(billionths * rest_s, 3600 * 10**9)


MOVES = st.lists(
    st.tuples(
        st.floats(0.0, 1000.0),  # seconds since the last move
        st.sampled_from(
            ["start", "reprice", "stop", "booting", "idle", "busy", "serving", "serving", "worked", "worked"]
        ),
        st.sampled_from(["a", "b"]),
        st.floats(0.0, 3000.0),  # $/h, or busy seconds
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(moves=MOVES, tokens=st.lists(st.integers(0, 10**6), min_size=7, max_size=7))
def test_whatever_is_said_of_their_time_the_parts_add_up(moves: list[Any], tokens: list[int]) -> None:
    book = Accounting()
    *fates, left = tokens
    for fate, number in zip(FATES, fates, strict=True):
        book.settle(None, fate, number)
    book.undecided(left)
    now_s = 0.0
    for passed_s, what, machine, value in [(0.0, "start", "a", 3.6), (0.0, "serving", "a", 0.0), *moves]:
        now_s += passed_s
        idle = book.parts(now_s)["idle"]
        if what == "start":
            book.start(machine, value, now_s)
        elif what == "reprice":
            book.reprice(machine, value, now_s)
        elif what == "stop":
            book.stop(machine, now_s)
        elif what == "worked":
            book.worked(machine, value, now_s)
        else:
            book.mark(machine, what, now_s)
        shares = book.parts(now_s)
        assert sum(shares.values()) == book.total(now_s)
        assert min(shares.values()) >= 0
        if what != "worked":  # only an account changes what is known of the time before
            assert abs(shares["idle"] - idle) < 1e-8  # times are rounded to nanoseconds


# --- tokens of nobody in particular --------------------------------------------------------------


def test_where_nobody_knows_whose_tokens_the_fleet_s_dollars_are_shared_out() -> None:
    book = Accounting()
    for machine, price in (("dear", 5400.0), ("cheap", 1800.0)):
        book.start(machine, price, 0.0, state="busy")
    book.settle(None, "trained", 50)
    book.settle(None, "stale", 30)
    book.undecided(20)
    assert parts(book, 10.0) == {"trained": 10, "stale": 6, "open": 4}
    book.undecided(0)
    book.stop("dear", 10.0)  # its work is not lost with it
    assert parts(book, 10.0) == {"trained": Fraction(25, 2), "stale": Fraction(15, 2)}


def test_a_machine_with_tokens_of_its_own_keeps_its_dollars_to_them() -> None:
    book = Accounting()
    book.start("known", 3600.0, 0.0, state="busy")
    book.start("unknown", 3600.0, 0.0, state="busy")
    book.settle("known", "failed", 5)
    book.settle(None, "trained", 1)
    book.settle(None, "lost", 1)
    assert parts(book, 2.0) == {"failed": 2, "trained": 1, "lost": 1}


# --- the learner's time, and the steps' price ----------------------------------------------------


def test_a_learner_that_boots_does_not_learn_yet() -> None:
    book = Accounting()
    book.start("learner-0", 3600.0, 0.0, role="learner", state="booting")
    book.mark("learner-0", "busy", 30.0)
    book.step(40.0, 5, 4.0)
    assert parts(book, 40.0) == {"booting": 30, "learner": 6, "learner_idle": 4}


def test_what_was_spent_on_getting_ready_is_no_step_s_price() -> None:
    book = at_work(3600.0)
    book.ready(100.0)
    assert book.step(110.0, 5, 0.0) == 110.0
    assert book.projected_usd(110.0, 9) == 200.0
    assert book.step(115.0, 5, 0.0) == 5.0


# --- steps, projection, budget -------------------------------------------------------------------


def test_a_step_costs_what_was_spent_since_the_one_before() -> None:
    book = at_work(3600.0)
    assert [book.step(now_s, 10, 0.0) for now_s in (10.0, 15.0, 15.0, 16.0)] == [10.0, 5.0, 0.0, 1.0]


def test_the_projection_goes_by_the_median_of_the_recent_steps() -> None:
    book = at_work(3600.0)
    assert book.projected_usd(5.0, 3) is None
    for now_s in (1.0, 2.0, 102.0, 103.0, 104.0):  # one step took long
        book.step(now_s, 10, 0.0)
    assert book.projected_usd(104.0, 6) == 110.0
    for now_s in range(105, 125):
        book.step(float(now_s), 10, 0.0)
    for now_s in range(126, 166, 2):  # twenty of two seconds: the earlier ones no longer count
        book.step(float(now_s), 10, 0.0)
    assert book.projected_usd(164.0, 6) == 176.0


def test_a_budget_is_spent_exactly_when_nothing_is_left() -> None:
    book = at_work(3600.0)
    budget = Budget(10.1, book, earlier_usd=0.1)
    assert budget.steps_left(0.0) is None
    assert budget.left(4.0) == 6.0
    assert not budget.spent(10.0 - 1e-9)
    assert budget.spent(10.0)
    book.step(4.0, 1, 0.0)
    assert budget.steps_left(4.0) == 1
    assert budget.steps_left(20.0) == 0
    assert budget.left(20.0) == -10.0


def test_a_free_fleet_spends_no_budget() -> None:
    book = at_work(0.0)
    book.step(10.0, 1, 0.0)
    budget = Budget(1.0, book)
    assert budget.steps_left(10.0) is None
    assert not budget.spent(1e9)
    assert Budget(0.0, book).spent(0.0)


@pytest.mark.parametrize("usd", [-1.0, math.nan, math.inf])
def test_what_is_not_a_budget_is_refused(usd: float) -> None:
    with pytest.raises(ConfigError, match="budget: "):
        Budget(usd, Accounting())
    with pytest.raises(ConfigError, match="spent before: "):
        Budget(1.0, Accounting(), earlier_usd=usd)


def test_the_summary_says_all_of_it_in_plain_numbers() -> None:
    book = Accounting()
    empty = book.summary(0.0)
    assert (empty["usd_total"], empty["usd_per_step"], empty["usd_per_million_tokens"]) == (0.0, None, None)
    assert empty["wasted_share"] == 0.0
    book.start("learner-0", 36.0, 0.0, sku="H100", role="learner")
    book.start("w0", 3.6, 0.0, sku="L4", market="spot")
    book.mark("w0", "busy", 25.0)
    book.settle("w0", "trained", 300)
    book.settle("w0", "stale", 100)
    book.step(100.0, 50_000, 20.0)
    assert book.summary(100.0, steps_left=9) == {
        "usd_total": 1.1,
        "usd_per_step": 1.1,
        "usd_per_million_tokens": pytest.approx(22.0),
        "usd_useful": pytest.approx(0.8 + 0.05625),
        "usd_wasted": pytest.approx(0.2 + 0.025 + 0.01875),
        "wasted_share": pytest.approx(0.24375 / 1.1),
        "usd_by_part": {
            "learner": 0.8,
            "trained": 0.05625,
            "evaluated": 0.0,
            "open": 0.0,
            "booting": 0.025,
            "idle": 0.0,
            "stale": 0.01875,
            "uninformative": 0.0,
            "failed": 0.0,
            "lost": 0.0,
            "learner_idle": 0.2,
        },
        "usd_by_sku": {"H100 on_demand": 1.0, "L4 spot": 0.1},
        "usd_projected": 11.0,
    }
