"""bench.cost: what is compared with what. Small markets of which the answer is known by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cost import Outcome, Run, compare, judge, main
from bench.cost_fleets import (
    Priced,
    cheapest_fleets,
    cheapest_single,
    homogeneous,
    optimum,
    random_fleet,
    target_of,
    work_s,
)
from bench.cost_market import (
    Assumptions,
    Case,
    SpotMarket,
    engine_fields,
    from_first_machine,
    listed,
    read_assumptions,
    scenario,
    shifted,
    spot_market,
)
from bench.cost_papers import papers_own
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.instance_types import InstanceType
from echo_planes.fleet.prices import COLUMNS, PriceRow, read_prices
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.fleet.throughput import Answers, estimated_tokens_per_s, size_of_params
from echo_planes.sim.engine_model import EngineSpec
from echo_planes.sim.spot import SpotTrace
from echo_planes.sim.world import World

NEED = Need(3, 2, 100, 100.0, 0.0, gamma=1.0)  # one trajectory/s
STEPS = 9  # with the first batch 1,000 s of work
TRACE = SpotTrace("t", (0.0, 100.0, 250.0), (4, 1, 3), 400.0, "repeat")
PRICES = """provider,sku,gpus,vcpus,mem_gib,gpu_mem_mib,region,usd_per_hour,spot_usd_per_hour,catalog_commit
a,H100,1,8,100,81920,x,2.0,0.5,c
a,A100-80GB,1,8,100,81920,x,1.2,0.4,c
a,A100-80GB,4,8,100,81920,x,0.1,,c
b,V100,1,8,100,16384,y,0.1,,c
"""
PAPERS = """source,item,gpus,usd_per_hour
E,A100-80GB on demand,1,3.06
E,RTX-5090 on demand,1,0.35
E,H100 rollout,1,2.90
R,8xH100 on demand (training),8,83.79
R,2xH100 spot (rollout),2,5.32
"""


def instance_type(name: str, usd: float, mu: float, count: int, spot: bool = False) -> InstanceType:
    return InstanceType(name, name, usd, mu, count, market="spot" if spot else "on_demand")


def small_market() -> SpotMarket:
    """Half a trajectory/s a worker; spot at 1 $/h: 2 until 500 s and none after, steady at 4 $/h."""
    spot = SpotTrace("s", (0.0, 500.0), (2, 0), 2000.0, "repeat")
    return SpotMarket(
        (instance_type("spot", 1.0, 0.5, 2, spot=True), instance_type("steady", 4.0, 0.5, 9)), {"spot": spot}
    )


def slow_market() -> SpotMarket:
    market = small_market()
    return replace(
        market,
        instance_types=tuple(replace(instance_type, boot_s=100.0) for instance_type in market.instance_types),
    )


def best_of(market: SpotMarket, install_s: float = 0.0) -> Priced:
    return optimum(market.instance_types, cheapest_fleets(market, NEED, STEPS), install_s)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "gpu_prices").mkdir()
    (tmp_path / "gpu_prices" / "gpu_prices.csv").write_text(PRICES)
    (tmp_path / "gpu_prices" / "papers.csv").write_text(PAPERS)
    (tmp_path / "trace.csv").write_text("0,0\n50,4\n4000,4\n4000,1\n8000,1\n")
    return tmp_path


@pytest.fixture
def assumptions() -> Assumptions:
    fields = read_assumptions().model_dump()
    fields["workload"] |= {"prompts_per_step": 32, "samples_per_prompt": 4}
    fields["learner"] |= {"gpus": 1}
    fields |= {"traces": {"small": "trace.csv"}, "random_seeds": 3}
    return Assumptions.model_validate(fields)


def rows_of(data: Path) -> tuple[PriceRow, ...]:
    return read_prices(data / "gpu_prices" / "gpu_prices.csv")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.9, 1.3])
def test_a_shifted_trace_is_the_same_market_from_another_moment(share: float) -> None:
    moved = shifted(TRACE, share)
    for at_s in range(0, 1200, 7):
        assert moved.count(at_s) == TRACE.count(at_s + (share % 1) * TRACE.end_s)


def test_the_time_before_the_first_machine_is_left_out() -> None:
    late = SpotTrace("t", (0.0, 60.0, 100.0), (0, 2, 0), 200.0)
    cut = from_first_machine(late)
    assert (cut.times_s, cut.counts, cut.end_s) == ((0.0, 40.0), (2, 0), 140.0)
    assert cut.count(140.0) == 2  # it repeats


def test_the_optimum_changes_with_the_market() -> None:
    best = best_of(small_market())
    assert best.seconds == work_s(NEED, STEPS) == 1000.0
    assert best.usd == pytest.approx((2 * 1.0 * 500 + 2 * 4.0 * 500) / 3600)
    assert best.workers == pytest.approx(2.0)
    booted = best_of(slow_market(), install_s=20.0)
    assert booted.usd == best.usd
    assert booted.boot_usd == pytest.approx(2 * 4.0 * (100 + 20) / 3600)  # the second two; not the first


def test_the_optimum_never_costs_more_than_a_random_fleet() -> None:
    rng = random.Random(3)
    instance_types = [
        instance_type(f"o{i}", rng.uniform(0.5, 5), rng.uniform(0.1, 0.6), 4, spot=i % 2 == 0)
        for i in range(6)
    ]
    instance_types.append(instance_type("enough", 3.0, 0.5, 9))
    traces = {o.name: shifted(TRACE, i / 6) for i, o in enumerate(instance_types) if o.market == "spot"}
    market = SpotMarket(tuple(instance_types), traces)
    best = best_of(market)
    draws = [random_fleet(market, NEED, STEPS, random.Random(seed)).usd for seed in range(30)]
    assert best.usd <= min(draws) < max(draws)


def test_a_random_fleet_makes_up_for_what_is_taken_away() -> None:
    few = replace(
        small_market(),
        instance_types=(small_market().instance_types[0], instance_type("steady", 4.0, 0.5, 2)),
    )
    draws = [random_fleet(few, NEED, STEPS, random.Random(seed)) for seed in range(20)]
    for drawn in draws:
        assert drawn.workers == pytest.approx(2.0)  # always two of half a trajectory/s, whichever they are
    # Two spot workers as long as they are there is the least that one can draw.
    assert min(drawn.usd for drawn in draws) == pytest.approx((2 * 1.0 * 500 + 2 * 4.0 * 500) / 3600)


def test_the_cheapest_single_instance_type_counts_whole_workers_and_only_on_demand() -> None:
    instance_types = [
        instance_type("large", 5.0, 0.9, 9),  # two of them: 10; its rho is the least
        instance_type("small", 3.0, 0.5, 9),  # two of them: 6
        instance_type("spot", 0.1, 1.0, 9, spot=True),
    ]
    assert cheapest_single(instance_types, NEED).name == "small"
    assert homogeneous(instance_types[1], NEED) == 2
    assert target_of(replace(NEED, gamma=1.1)) == pytest.approx(1.1)


def test_an_engine_is_the_roofline_of_the_planner(data: Path, assumptions: Assumptions) -> None:
    work, row = assumptions.workload, rows_of(data)[1]
    engine = engine_fields(work, row, throughput=1.0)
    assert engine is not None
    mean = round(work.median_tokens * math.exp(work.sigma**2 / 2))
    spec = EngineSpec(engine["peak_tokens_per_s"], engine["half_batch"])
    facts, size = SKU_FACTS["A100-80GB"], size_of_params(work.num_params, work.kv_bytes_per_token)
    batch = int(engine["max_groups"]) * work.samples_per_prompt
    planned = estimated_tokens_per_s(size, Answers(work.prompt_tokens, mean, batch), facts, 80, 1)
    assert spec.tokens_per_s(batch) == pytest.approx(planned, rel=1e-3)


def test_only_single_gpus_that_run_the_model_are_offered(data: Path, assumptions: Assumptions) -> None:
    instance_types = [
        one.instance_type for one in listed(assumptions, rows_of(data), Case("small", spot_price=2.0))
    ]
    prices = {instance_type.name: instance_type.usd_per_hour for instance_type in instance_types}
    assert prices == {
        "a/H100/on_demand": 2.0,
        "a/H100/spot": 1.0,
        "a/A100-80GB/on_demand": 1.2,
        "a/A100-80GB/spot": 0.8,
    }
    target = target_of(assumptions.need(2.0))
    for one in instance_types:
        share = 0.5 if one.market == "spot" else 1.5
        assert (
            one.mu * (one.max_count - 1) < share * target * (1 + 1e-9) <= one.mu * one.max_count * (1 + 1e-6)
        )


def test_the_simulator_has_the_market_that_the_optimum_sees(
    data: Path, assumptions: Assumptions, tmp_path: Path
) -> None:
    instance_types = listed(assumptions, rows_of(data), Case("small"))
    market = spot_market(assumptions, [one.instance_type for one in instance_types], Case("small"), data)
    what = scenario(
        assumptions,
        [one.model for one in instance_types],
        {instance_types[0].instance_type.name: 1},
        mode="provisioned",
        steps=1,
        market=market,
        folder=tmp_path,
    )
    world = World(what)
    for at_s in (*market.moments(20_000.0), 1.0, 3999.0, 4001.0):
        world.kernel.now_s = at_s
        for one in market.at(at_s):
            if one.market == "spot":
                assert world.workers.market.available(one.name) == one.max_count


def test_a_small_market_is_compared_whole(data: Path, assumptions: Assumptions) -> None:
    outcome = compare(assumptions, rows_of(data), Case("small"), data, simulate_single=True, most_steps=4)
    assert outcome.usual is not None
    assert outcome.policy is not None
    for run in (outcome.ours, outcome.single, outcome.usual, outcome.drawn, outcome.best, outcome.policy):
        assert run.steps == 4
        assert run.rollout_usd > 0
    assert outcome.best.per_step < outcome.ours.per_step
    assert sum(outcome.ours.usd_by_part.values()) == pytest.approx(
        outcome.ours.rollout_usd + outcome.ours.learner_usd
    )
    beyond = outcome.beyond_best
    assert sum(beyond.values()) == pytest.approx(outcome.ours.rollout_usd - outcome.best.rollout_usd)
    assert abs(beyond["rounding of moments"]) < 0.02 * outcome.ours.rollout_usd
    assert beyond["boots"] > 0
    # Nothing happens to a fleet of one SKU, so its price says for how long it ran.
    single = outcome.single
    assert single.rollout_usd / single.hours == pytest.approx(single.workers * single_price(single), rel=1e-6)


def single_price(run: Run) -> float:
    return {"a/H100/on_demand": 2.0, "a/A100-80GB/on_demand": 1.2}[run.name.split()[-1]]


@pytest.mark.parametrize(
    ("ours", "learner", "expected"),
    [
        (1.02, 5.0, [True, True, True, True, True]),
        (1.04, 5.0, [True, False, True, True, True]),
        (1.45, 5.0, [False, False, False, False, False]),
        (0.8, 6.5, [True, True, False, True, False]),  # a small fleet that the learner waits for
    ],
)
def test_the_bars(ours: float, learner: float, expected: list[bool], assumptions: Assumptions) -> None:
    mine = Run("ours", 1, 1.0, ours, learner)
    single, best = Run("single", 1, 1.0, 2.0, 5.0), Run("best", 1, 1.0, 1.0, 5.0)
    policy = Run("policy", 1, 1.0, 1.1, 5.1)
    outcome = Outcome(Case("t"), mine, single, None, single, best, policy, {}, 0.0)
    assert [holds for _, holds in judge([outcome], assumptions)] == expected


def test_the_papers_prices_give_the_papers_saving(data: Path) -> None:
    lines = papers_own(data / "gpu_prices" / "papers.csv")
    assert lines[0][0].startswith("E.3, 32 B: 76 RTX-5090")
    assert "total 4.6% below" in lines[0][1]  # table 6


def test_without_data_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path)]) == 2
    assert "gpu_prices.csv is not there: set ECHO_PLANES_DATA" in capsys.readouterr().err


def test_the_price_list_here_has_the_columns_of_a_price_list() -> None:
    assert tuple(PRICES.splitlines()[0].split(",")) == COLUMNS
