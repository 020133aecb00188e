"""The bench of the papers' claims, on small versions of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import (
    papers,
    papers_ablation,
    papers_faults,
    papers_overlap,
    papers_split,
    papers_spot,
    papers_staleness,
)
from bench.papers_base import (
    ASSUMPTIONS,
    BASE,
    Claim,
    Row,
    Variation,
    instance_type,
    lengths_of,
    load,
    measured_mu,
    run,
    scenario,
)
from echo_planes.sim.engine_model import EngineSpec
from echo_planes.sim.scenario import DATA_VARIABLE

DATA = Path(os.environ.get(DATA_VARIABLE, Path(__file__).resolve().parents[3] / "shared" / "data"))
needs_traces = pytest.mark.skipif(
    not (DATA / "spot_traces" / "bamboo").is_dir(), reason=f"no recorded spot traces in {DATA}"
)


@pytest.fixture
def assumed() -> dict[str, dict[str, Any]]:
    """The assumptions, with steps so small that a run takes a moment."""
    sections = load()
    sections["echo2"] |= {"prompts_per_step": 32, "samples_per_prompt": 4, "max_groups": 1, "mu": 0.29 / 16}
    sections["knee"] |= {"steps": 24, "warm_up_steps": 8}
    return sections


def test_every_assumption_has_a_source() -> None:
    tree = yaml.safe_load(ASSUMPTIONS.read_text())
    for change in tree.pop("changed"):
        assert set(change) == {"what", "from", "to", "why"}
    for section, rows in tree.items():
        for name, row in rows.items():
            assert set(row) == {"value", "source"}, f"{section}.{name}"
            assert row["source"]


def test_mu_of_equal_answers_is_what_the_engine_model_says() -> None:
    lengths = lengths_of({"samples_per_prompt": 4, "median_tokens": 500, "sigma": 0.0, "max_tokens": 500})
    spec = EngineSpec(1000.0, 8.0)
    assert measured_mu(spec, 2, lengths) == pytest.approx(spec.tokens_per_s(8) / 500)


def test_a_worker_makes_what_was_measured(assumed: dict[str, dict[str, Any]]) -> None:
    values = assumed["echo2"] | {"t_train_s": 1.0, "sigma": 0.0}
    simulated = scenario(
        values,
        staleness={"max_staleness": 8, "queue_batches": 9.0},
        network={"snapshot_mb": 0.001, "install_s": 0.0},
        run={"steps": 30},
        instance_types=[instance_type(values, "worker", 0.5, count=1)],
    )
    result = run(simulated)
    seconds = result.steps[-1]["time_s"] - result.steps[9]["time_s"]
    assert 20 * simulated.per_step / seconds == pytest.approx(0.5, rel=0.01)


# --- claims ----------------------------------------------------------------------------------------


def test_the_knee_is_where_the_bubble_stays_small() -> None:
    assert papers_overlap.knee({5: 0.3, 6: 0.1, 7: 0.01, 8: 0.0}, 0.02) == 7
    assert papers_overlap.knee({5: 0.3, 6: 0.01, 7: 0.1, 8: 0.0}, 0.02) == 8  # a dip is no knee
    assert papers_overlap.knee({5: 0.3, 6: 0.1}, 0.02) is None


def test_bubble_vanishes_near_the_predicted_count(assumed: dict[str, dict[str, Any]]) -> None:
    values, steps = assumed["echo2"], assumed["knee"]
    count, bubbles = papers_overlap.curve(values, steps, (3, 2), BASE, beside=1)
    found = papers_overlap.knee(bubbles, steps["bubble"])
    assert found is not None
    assert abs(found - count) <= 1
    few = papers_overlap.bubble_with(values, steps, (3, 2), values["mu"], count // 2)
    assert few == pytest.approx(0.4, abs=0.15)


def test_figure_4_tells_a_star_from_chains() -> None:
    claim = papers_ablation.figure_4((1, 6))
    assert claim.holds
    limited = next(row for row in claim.figures["t_bcast"] if row["n"] == 6 and row["b0_mbit"] == 300)
    assert limited["star_s"] == pytest.approx(2 * limited["chains_s"], rel=0.02)


def test_prices_change_dollars_alone(assumed: dict[str, dict[str, Any]]) -> None:
    values, setting = assumed["echo2"], assumed["ablation"] | {"steps": 12, "warm_up_steps": 4}
    fleet = [0.35] * 5 + [1.4] * 4
    once = papers_ablation.simulate(values, setting, BASE, "star", fleet)
    twice = papers_ablation.simulate(values, setting, BASE, "star", [2 * usd for usd in fleet])
    assert twice.usd_per_step == pytest.approx(once.repriced(2.0).usd_per_step)
    assert once.t_bcast_s == pytest.approx(9 * values["snapshot_mb"] * 8 / 700 + 127, rel=0.01)
    assert once.machines == 9


def test_without_cost_machines_are_drawn_from_the_whole_pool(assumed: dict[str, dict[str, Any]]) -> None:
    values, setting = load()["echo2"], assumed["ablation"] | {"draws": 400}
    fleet = papers_ablation.random_fleet(values, setting, BASE, 1437.0)
    assert len(fleet) == 9
    assert fleet[0] == pytest.approx((0.35 + 0.70 + 1.40) / 3, rel=0.03)


def test_a_lost_worker_is_made_good_after_boot_and_fetch(assumed: dict[str, dict[str, Any]]) -> None:
    values = assumed["echo2"] | assumed["faults"] | {"steps": 8, "fault_step": 4}
    for boot in (1.0, 2.0):
        found = papers_faults.recoveries(values, Variation(boot=boot), False, papers_faults.DROP_OUTS)
        rollout = found["rollout: worker drops out"]
        fetch_s = values["snapshot_mb"] * 8 / values["worker_mbit"]
        away_s = values["detection_s"] + boot * values["boot_s"] + fetch_s + values["install_s"]
        assert rollout.seconds == pytest.approx(away_s, abs=16.0)  # the fleet looks every 15 s
        assert rollout.drop == pytest.approx(1 / 8)
        assert found["broadcast: forwarder drops out"].seconds == pytest.approx(away_s, abs=16.0)


def test_bound_on_staleness_holds_and_can_be_broken(assumed: dict[str, dict[str, Any]]) -> None:
    assert papers_staleness.claim(assumed, every=30).holds
    values = assumed["staleness"]
    assert len(list(papers_staleness.settings(values))) >= 200
    queued = papers_staleness.observe(values, (6, 1, 0.3, 2.5), queue_batches=7.0)
    assert queued.bound < queued.observed <= queued.max_staleness


def test_a_split_by_speed_beats_an_equal_one_only_where_speeds_differ(
    assumed: dict[str, dict[str, Any]],
) -> None:
    values = assumed["split"] | {"requests": 512, "steps": 6, "warm_up_steps": 3}
    mixed = papers_split.throughputs(values, (1500, 0.3, 8192), BASE)
    assert 1.25 < mixed["proportional"] / mixed["uniform"] < 1.5
    alike = papers_split.throughputs(values | {"slow_tokens_per_s": 2500}, (1500, 0.3, 8192), BASE)
    assert alike["proportional"] == pytest.approx(alike["uniform"], rel=0.05)
    ideal = 4 * (values["fast_tokens_per_s"] + values["slow_tokens_per_s"])
    assert mixed["pull"] < ideal
    assert mixed["proportional"] < ideal


def test_without_migration_answers_begin_anew(assumed: dict[str, dict[str, Any]]) -> None:
    row = papers_spot.migration(assumed["spot"] | {"prompts_per_step": 48}, 100)
    assert row.holds
    values = assumed["spot"] | {"prompts_per_step": 48}
    machines = papers_spot._instance_type(values, BASE, "spot", 2, 1.0)
    fault = {"at_s": 200.0, "kind": "preempt", "count": 1}
    simulated = papers_spot.market_scenario(values, 1, [machines], run={"steps": 2}, faults=[fault])
    migrated, again = run(simulated).summary, papers_spot.recompute(simulated).summary
    assert migrated["continued_tokens"] > 0 == again["continued_tokens"]
    assert again["lost_tokens"] > 10 * migrated["lost_tokens"]
    assert migrated["lost_trajectories"] == again["lost_trajectories"] == 0


@needs_traces
def test_spot_machines_make_more_of_a_dollar(
    assumed: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(DATA))
    values = assumed["spot"] | {"prompts_per_step": 32, "t_train_s": 40.0, "hours": 1}
    assert papers_spot.traces_are_there()
    own = papers_spot.yielded(run(papers_spot.reserved_only(values, BASE)), 4)
    for price, least in ((1.0, 1.0), (2.0, 0.5)):
        simulated = papers_spot.spot(values, Variation(price=price), "p3-trace.csv", 0.25)
        found = papers_spot.yielded(run(simulated), 4)
        assert found.tokens_per_s > own.tokens_per_s
        assert found.tokens_per_usd > least * own.tokens_per_usd
    assert 5 < papers_spot.mean_machines(values, "p3-trace.csv", 0.25) <= 8


def test_traces_that_are_not_there_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert not list(papers.claims([7]))
    assert "set ECHO_PLANES_DATA" in capsys.readouterr().out


# --- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("holds", [True, False])
def test_status_says_whether_claims_hold(
    holds: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (Row("a", "1", "2", holds), Row("b", "-", "3"))
    made = Claim("6. split", "a paper", rows, (Row("x2", "1", "4"),), ("a note",), ("split",))
    monkeypatch.setattr(papers_split, "claim", lambda assumed: made)
    monkeypatch.setattr("sys.argv", ["papers", "--only", "6", "--json", str(tmp_path / "out.json")])
    assert papers.main() == (0 if holds else 1)
    text = capsys.readouterr().out
    assert ("DOES NOT HOLD" in text) != holds
    assert "6. split (a paper), simulated" in text
    assert "slow_tokens_per_s = 1250  [assumed: half]" in text
    written = yaml.safe_load((tmp_path / "out.json").read_text())
    assert written["simulated"]
    assert written["claims"][0]["simulated"]
    assert written["claims"][0]["holds"] is holds
