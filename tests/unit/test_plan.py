"""The planner command: the formulas' numbers, the marks of estimates, advice, and mistakes in one line."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from echo_planes.fleet.plan_config import PlanConfig
from echo_planes.fleet.prices import read_prices
from echo_planes.plan import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "configs" / "prices" / "example.csv"
DATA = Path(os.environ.get("ECHO_PLANES_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
REAL = DATA / "gpu_prices" / "gpu_prices.csv"
LINKS = ("uplink_mbit=800", "worker_mbit=100")
# One instance type of 1 trajectory/s at $2/h, a learner at $6/h: what comes out can be worked out by hand.
PRICES = "provider,sku,gpus,region,usd_per_hour,spot_usd_per_hour\nc,H100,1,r,2.0,\n"
BY_HAND = (
    "params_b=8",
    *LINKS,
    "mu.H100=1",
    "t_train_s=20",
    "prompts_per_step=8",
    "samples_per_prompt=8",
    "payload_mib=100",
    "chunk_kib=1024",
    "rtt_ms=100",
    "learner_usd_per_hour=6",
    "steps=180",
)


@pytest.fixture
def one(tmp_path: Path) -> str:
    path = tmp_path / "one.csv"
    path.write_text(PRICES)
    return f"prices={path}"


def told(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(words) == status
    out, err = capsys.readouterr()
    assert not err
    return out


def tree(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    found = json.loads(told(capsys, "--json", *words, status=status))
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


# --- numbers -------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_formulas(capsys: pytest.CaptureFixture[str], one: str) -> None:
    found = tree(capsys, one, *BY_HAND)
    # Five workers are five chains of one hop at 100 Mbit/s: M/B + C/B + RTT/2.
    t_bcast_s = 8 * 101 * 2**20 / 100e6 + 0.05
    mu_min = 2 * 64 / (2 * 20 - t_bcast_s)
    assert found["kappa"] == 2
    assert found["estimated"]["t_bcast_s"] == pytest.approx(t_bcast_s)
    assert found["estimated"]["mu_min"] == pytest.approx(mu_min)
    assert found["estimated"]["mu_target"] == pytest.approx(1.1 * mu_min)
    assert 4 < 1.1 * mu_min < 5
    for fleet in found["fleets"]:
        assert fleet["counts"] == {"c/r/H100/on_demand": 5}
        assert fleet["usd_per_hour"] == 10.0
        expected = fleet["estimated"]
        assert expected["bubble"] == 0.0
        # 20 s a step at $10/h of workers and $6/h of learner; 180 steps are an hour.
        assert expected["usd_per_step"] == pytest.approx(16 * 20 / 3600)
        assert (expected["usd_run"], expected["hours"]) == (pytest.approx(16.0), pytest.approx(1.0))
        assert expected["staleness_bound"] == min(3, 2 + math.ceil((t_bcast_s + 64 / 5) / 20) - 1)
    assert [fleet["method"] for fleet in found["fleets"]] == ["greedy", "exact"]


def test_what_a_worker_holds_is_told_by_part(capsys: pytest.CaptureFixture[str], one: str) -> None:
    lengths = ("kv_kib_per_token=1024", "prompt_tokens=512", "answer_tokens=1024")
    words = [word for word in BY_HAND if word.partition("=")[0] != "params_b"]
    said = told(capsys, one, *words, f"params_b={2**33 / 1e9}", *lengths)
    (line,) = [line for line in said.splitlines() if line.startswith("Worker ")]
    assert "16 GiB of weights" in line
    assert "1 GiB of KV cache for each of up to 256 answers" in line


def test_a_broadcast_along_fewer_chains_takes_more_hops(capsys: pytest.CaptureFixture[str], one: str) -> None:
    found = tree(capsys, one, *BY_HAND, "uplink_mbit=150")  # one chain of five, 1/1.1 of which are five
    assert found["estimated"]["t_bcast_s"] == pytest.approx(8 * 105 * 2**20 / 100e6 + 5 * 0.05)
    slow = tree(capsys, one, *BY_HAND, "uplink_mbit=50")  # the uplink itself is what holds it up
    assert slow["estimated"]["t_bcast_s"] > 2 * found["estimated"]["t_bcast_s"] - 1


def test_a_whole_number_of_served_workers_is_not_rounded_up(
    capsys: pytest.CaptureFixture[str], one: str
) -> None:
    """69 / 1.15 in floats is a bit more than 60, for which sixty chains of one hop are enough."""
    words = ("uplink_mbit=6000", "gamma=1.15", "min_workers=69", "max_per_instance_type=69")
    found = tree(capsys, one, *BY_HAND, *words)
    assert found["estimated"]["t_bcast_s"] == pytest.approx(8 * 101 * 2**20 / 100e6 + 0.05)


def test_the_target_counts_the_broadcast_to_the_whole_fleet(
    capsys: pytest.CaptureFixture[str], one: str
) -> None:
    words = (one, *BY_HAND, "uplink_mbit=100", "mu.H100=0.2")
    found = tree(capsys, *words)
    workers = found["fleets"][-1]["workers"]
    served = math.ceil(workers / 1.1)
    t_bcast_s = 8 * (100 + served) * 2**20 / 100e6 + served * 0.05
    assert found["estimated"]["t_bcast_s"] == pytest.approx(t_bcast_s)
    assert workers * 0.2 >= found["estimated"]["mu_target"]
    assert workers > math.ceil(4.48 / 0.2)  # more than if five workers had to be reached


def test_a_payload_is_a_patch_where_the_changed_share_is_known(
    capsys: pytest.CaptureFixture[str], one: str
) -> None:
    words = [word for word in BY_HAND if not word.startswith("payload")]
    patch = tree(capsys, one, *words, "changed_share=0.01")
    assert patch["estimated"]["payload_bytes"] == pytest.approx(8e9 * 0.01 * 1.27)
    whole = tree(capsys, one, *words, "uplink_mbit=80000", "worker_mbit=80000")
    assert whole["payload_bytes"] == 16e9


def test_spot_is_left_out_where_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"prices={EXAMPLE}", "params_b=8", "t_train_s=20", *LINKS, "changed_share=0.01")
    both = tree(capsys, *words)
    assert [fleet["title"] for fleet in both["fleets"]] == ["cheapest"] * 2 + ["cheapest without spot"] * 2
    assert any("/spot" in name for name in both["fleets"][1]["counts"])
    assert not any("/spot" in name for fleet in both["fleets"][2:] for name in fleet["counts"])
    steady = tree(capsys, *words, "spot=false")
    assert [fleet["title"] for fleet in steady["fleets"]] == ["cheapest"] * 2
    assert steady["fleets"][1]["counts"] == both["fleets"][3]["counts"]
    for greedy, exact in (both["fleets"][:2], both["fleets"][2:]):
        assert exact["usd_per_hour"] <= greedy["usd_per_hour"]


def test_spot_that_is_dearer_than_on_demand_is_told(capsys: pytest.CaptureFixture[str], one: str) -> None:
    path = Path(one.partition("=")[2])
    path.write_text(PRICES.replace("2.0,", "2.0,3.5"))
    assert "than on demand: c/r/H100, $3.5 instead of $2 an hour (line 2)." in told(capsys, one, *BY_HAND)
    assert len(tree(capsys, one, *BY_HAND)["dear_spot"]) == 1
    path.write_text(PRICES.replace("2.0,", "2.0,1.5"))
    assert "dearer" not in told(capsys, one, *BY_HAND)


def test_quotas_and_minimums_hold(capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"prices={EXAMPLE}", "params_b=8", "t_train_s=20", *LINKS, "changed_share=0.01")
    kept = "example-rental/west/RTX-4090/on_demand"
    found = tree(capsys, *words, "max_per_instance_type=1", "quota.A100-80GB=0", f"minimum.{kept}=1")
    for fleet in found["fleets"]:
        assert fleet["counts"][kept] == 1
        assert not any("A100" in name for name in fleet["counts"])
        assert set(fleet["counts"].values()) == {1}


def test_a_gpu_without_bf16_or_room_is_left_out_unless_it_was_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "old.csv"
    path.write_text(PRICES + "c,V100-32GB,1,r,0.1,\nc,L4,1,r,0.2,\n")
    words = (f"prices={path}", *BY_HAND, "params_b=14")
    found = tree(capsys, *words)
    assert {instance_type["sku"] for instance_type in found["instance_types"]} == {"H100"}
    assert len(found["left_out"]) == 2
    assert found["left_out"][0].startswith("V100-32GB: no bf16 arithmetic")
    assert found["left_out"][1] == "L4: 14 B weights do not fit (estimated)"
    measured = tree(capsys, *words, "mu.V100-32GB=0.5", "mu.L4=0.1")
    assert {instance_type["sku"] for instance_type in measured["instance_types"]} == {
        "H100",
        "V100-32GB",
        "L4",
    }


def test_names_may_have_dots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "dots.csv"
    path.write_text(PRICES.replace("c,H100", "c.d,H100"))
    found = tree(capsys, f"prices={path}", *BY_HAND, "minimum.c.d/r/H100/on_demand=7")
    assert found["fleets"][0]["counts"] == {"c.d/r/H100/on_demand": 7}


@pytest.mark.skipif(not REAL.is_file(), reason=f"{REAL} is not there: set ECHO_PLANES_DATA")
def test_a_plan_from_the_real_list(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"prices={REAL}",
        "params_b=8",
        *LINKS,
        "changed_share=0.02",
        "learner_sku=H100",
        "prompts_per_step=64",
    )
    found = tree(capsys, *words)
    assert found["feasible"]
    assert len(found["fleets"]) == 4
    prices = {row.spot_usd_per_hour for row in read_prices(REAL)}
    assert {
        instance_type["usd_per_hour"]
        for instance_type in found["instance_types"]
        if instance_type["name"].endswith("/spot")
    } <= prices
    assert found["fleets"][1]["usd_per_hour"] <= found["fleets"][3]["usd_per_hour"]


# --- marks and forms -----------------------------------------------------------------------------


def test_every_estimate_is_marked_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"prices={EXAMPLE}", "params_b=8", *LINKS, "changed_share=0.01", "mu.H100=9.5")
    text = told(capsys, *words, "learner_sku=H100")
    assert re.search(r"T_train [\d.]+ s \(estimated\)", text)
    assert re.search(r"KV cache 128 KiB a token \(estimated\)", text)
    assert re.search(r"H100/spot +\$1.10 +9.5 +\$", text)  # measured
    assert re.search(r"L40S/spot +\$0.40 +[\d.]+ \(estimated\) +\$[\d.]+ \(estimated\)", text)
    assert text.count("T_bcast") == len(re.findall(r"T_bcast [\d.]+ s \(estimated\)", text)) == 1
    given = told(capsys, *words, "t_train_s=20", "kv_kib_per_token=128")
    assert "T_train 20 s;" in given
    assert "KV cache 128 KiB a token\n" in given


def test_tokens_per_second_that_are_given_count_by_the_answers_length(
    capsys: pytest.CaptureFixture[str], one: str
) -> None:
    words = [word for word in BY_HAND if not word.startswith("mu.")]
    found = tree(capsys, one, *words, "tokens_per_s.H100=3000", "answer_tokens=1000")
    (instance_type,) = found["instance_types"]
    assert (instance_type["mu"], instance_type["mu_source"]) == (3.0, "given")


def test_the_page_is_self_contained_and_shows_the_fleets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    told(
        capsys,
        "--html",
        str(page),
        f"prices={EXAMPLE}",
        "params_b=8",
        "t_train_s=20",
        *LINKS,
        "changed_share=0.01",
    )
    html = page.read_text()
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", html)
    assert "Content-Security-Policy" in html
    assert html.count('class="mark"') == 4  # the fleets of the table, in the plot
    assert html.count('class="dot f1"') > 4
    assert "cheapest without spot" in html


def test_what_a_list_says_is_escaped_on_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prices, page = tmp_path / "odd.csv", tmp_path / "plan.html"
    prices.write_text(PRICES.replace("c,H100", "<script>x</script>,H100"))
    told(capsys, f"prices={prices}", *BY_HAND, "--html", str(page))
    assert "<script>x" not in page.read_text()


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--help")
    for key in PlanConfig.model_fields:
        assert f"  {key}" in text
    assert "convert-skypilot" in text


def test_a_catalogue_is_converted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, target = tmp_path / "vms.csv", tmp_path / "prices.csv"
    source.write_text(
        "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region\n"
        "a,H100,1.0,2.5,,r\nb,,,0.1,,r\nc,L4,1.0,,0.2,r\n"
    )
    text = told(capsys, "convert-skypilot", str(source), str(target), "--provider", "cloud")
    assert "2 rows. Left out: 1 without a whole GPU" in text
    assert [(row.sku, row.provider) for row in read_prices(target)] == [("H100", "cloud"), ("L4", "cloud")]


# --- no fleet ------------------------------------------------------------------------------------


def test_without_a_fleet_there_is_advice_and_the_best_there_is(
    capsys: pytest.CaptureFixture[str], one: str
) -> None:
    found = tree(capsys, one, *BY_HAND, "usd_per_hour=6", status=1)
    assert not found["feasible"]
    assert found["advice"]
    for fleet in found["fleets"]:
        assert fleet["title"] == "fastest within the limits"
        assert fleet["counts"] == {"c/r/H100/on_demand": 3}
        expected = fleet["estimated"]
        # Two steps wait for 128 trajectories at 3/s, after the broadcast.
        cycle_s = 8 * 101 * 2**20 / 100e6 + 0.05 + 128 / 3
        assert expected["bubble"] == pytest.approx(1 - 40 / cycle_s)
        assert expected["step_s"] == pytest.approx(cycle_s / 2)
        assert expected["usd_per_step"] == pytest.approx(12 * cycle_s / 2 / 3600)
    text = told(capsys, one, *BY_HAND, "usd_per_hour=6", status=1)
    assert "No fleet within the limits reaches mu_target. What would help:\n  - " in text


def test_a_fleet_too_large_to_broadcast_to_is_no_fleet(capsys: pytest.CaptureFixture[str], one: str) -> None:
    words = (one, *BY_HAND, "uplink_mbit=100", "mu.H100=0.02", "max_per_instance_type=100000")
    text = told(capsys, *words, status=1)
    assert "no fleet is enough: T_bcast is not below kappa T_train (estimated)" in text
    assert "What would help:\n  - " in text
    assert tree(capsys, *words, status=1)["estimated"]["mu_min"] is None


def test_a_total_budget_limits_what_an_hour_may_cost(capsys: pytest.CaptureFixture[str], one: str) -> None:
    # An hour's run whose learner costs $6 leaves $10 of $16 for workers: just enough for the five.
    assert tree(capsys, one, *BY_HAND, "usd_total=18", "usd_spent=2")["fleets"][0]["workers"] == 5
    found = tree(capsys, one, *BY_HAND, "usd_total=17.9", "usd_spent=2", status=1)
    assert found["fleets"][0]["workers"] == 4
    assert found["fleets"][0]["estimated"]["within_usd_total"]
    # $7 an hour are three workers; but they take 1.28 hours, $15.40 with the learner.
    assert "the run costs more than is left" in told(capsys, one, *BY_HAND, "usd_total=13", status=1)


def test_a_kind_of_fleet_that_is_not_to_be_had_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"prices={EXAMPLE}", "params_b=8", "t_train_s=20", *LINKS, "changed_share=0.01")
    budget = tree(capsys, *words)["fleets"][1]["usd_per_hour"]
    found = tree(capsys, *words, f"usd_per_hour={budget}")
    assert {fleet["title"] for fleet in found["fleets"]} == {"cheapest"}
    assert (
        "cheapest without spot, exact: no such fleet within the limits reaches mu_target" in found["left_out"]
    )


def test_an_allowance_of_interruptions_keeps_spot_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"prices={EXAMPLE}", "params_b=8", "t_train_s=20", *LINKS, "changed_share=0.01")
    found = tree(capsys, *words, "interruptions_per_hour=0")
    assert found["fleets"][0]["counts"] == found["fleets"][2]["counts"]


def test_the_plot_shows_what_a_larger_budget_would_bring(
    capsys: pytest.CaptureFixture[str], one: str, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    told(capsys, one, *BY_HAND, "usd_per_hour=6", "--html", str(page), status=1)
    assert "5 workers, $0.0889 a step, bubble 0 % (estimated)" in page.read_text()


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["uplink=3"], "uplink=3: unknown key; did you mean 'uplink_mbit'?"),
        (["fleet=single"], "fleet=single: unknown key"),
        (["steps"], "'steps' is not of the form key=value"),
        (["steps=0"], "steps=0: input should be greater than or equal to 1"),
        (["steps=many"], "steps=many: input should be a valid integer"),
        (["t_train_s=nan"], "t_train_s=nan: input should be a finite number"),
        (["changed_share=1.5"], "changed_share=1.5"),
        (["mu.H100=0"], "mu.H100=0: input should be greater than 0"),
        (["mu.H10=1"], "mu.H10: not in the list of prices; did you mean 'H100'?"),
        (["tokens_per_s.X=1"], "tokens_per_s.X: not in the list of prices; it has H100"),
        (["skus=H200"], "skus=H200: not in the list of prices; did you mean 'H100'?"),
        (["providers=d"], "providers=d: not in the list of prices; it has c"),
        (["model=builtin:tiny-math"], "give one of model=FOLDER and params_b=N"),
        (["changed_share=0.1"], "give one of changed_share and payload_mib"),
        (["publish_every=5"], "publish_every=5 is larger than max_staleness + 1 = 4"),
        (["max_staleness=0"], "max_staleness=0: nothing overlaps"),
        (
            ["quota.c/r/H100/on_demand=1", "minimum.c/r/H100/on_demand=2"],
            "1 workers are fewer than its minimum",
        ),
        (["t_train_s=2"], "max_staleness=6 publish_every=5"),  # T_bcast 8.5 s: five steps of 2 s are longer
        (["usd_total=5", "usd_spent=5"], "the budget is spent already"),
        (["usd_total=5"], "the learner alone costs $6.00"),
        (["usd_per_hour=0"], "usd_per_hour=0: input should be greater than 0"),
        (["gpus_per_worker=2"], "has no machine that can be used: 1 of 1 machines"),
        (["prices=none.csv"], "none.csv cannot be read"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], one: str, words: list[str], said: str
) -> None:
    assert said in refused(capsys, one, *BY_HAND, *words)


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("params_b", "params_b=BILLIONS (or model=FOLDER): needed"),
        ("t_train_s", "learner_sku=GPU (or t_train_s=SECONDS): needed"),
        ("uplink_mbit", "uplink_mbit=...: needed"),
    ],
)
def test_what_is_needed_is_asked_for(
    capsys: pytest.CaptureFixture[str], one: str, left_out: str, said: str
) -> None:
    assert said in refused(capsys, one, *(word for word in BY_HAND if not word.startswith(left_out)))


def test_all_that_is_needed_is_asked_for_in_one_line_with_an_example_that_works(
    capsys: pytest.CaptureFixture[str], one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refused(capsys, one)
    for key in ("uplink_mbit", "worker_mbit", "params_b", "learner_sku"):
        assert f"{key}=" in message.split("for example")[0], key
    monkeypatch.chdir(ROOT)
    assert main(message.split("for example: ")[1].split()) == 0
    assert "Needed" in capsys.readouterr().out


def test_a_key_that_plan_does_not_have_is_told_before_one_that_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "fleet=colocated: unknown key" in refused(capsys, "fleet=colocated")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("c,H100,1,r,0,", "usd_per_hour=0: nothing is for hire at $0"),
        ("c,H100,1,r,-2,", "usd_per_hour=-2 is not a number above 0"),
        ("c,H100,1,r,NaN,", "usd_per_hour=NaN is not a number above 0"),
        ("c,H100,1,r,,", "H100 has no price at all"),
        ("c,RTX4090,1,r,1,", "nothing is known of SKU 'RTX4090'; did you mean 'RTX-4090'?"),
    ],
)
def test_a_wrong_list_is_told_in_one_line_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, row: str, said: str
) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(PRICES.replace("c,H100,1,r,2.0,", row))
    words = [word for word in BY_HAND if not word.startswith("mu.")]
    message = refused(capsys, f"prices={path}", *words)
    assert "wrong.csv:2: " in message
    assert said in message


def test_a_learner_that_nobody_knows_is_told(capsys: pytest.CaptureFixture[str], one: str) -> None:
    words = [word for word in BY_HAND if not word.startswith("t_train_s")]
    assert "learner_sku=H10: unknown GPU; did you mean 'H100'?" in refused(
        capsys, one, *words, "learner_sku=H10"
    )


def test_a_page_that_cannot_be_written_is_told(
    capsys: pytest.CaptureFixture[str], one: str, tmp_path: Path
) -> None:
    assert "cannot be written" in refused(
        capsys, one, *BY_HAND, "--html", str(tmp_path / "none" / "plan.html")
    )


def test_a_learners_memory_is_told_where_model_and_card_are_known(
    capsys: pytest.CaptureFixture[str], one: str
) -> None:
    words = [word for word in BY_HAND if word.partition("=")[0] != "params_b"]
    said = told(capsys, one, *words, "model=builtin:tiny-math", "learner_sku=H100", "learner_gpus=2")
    (line,) = [line for line in said.splitlines() if line.startswith("Learner ")]
    assert "of 80 GiB on each of 2 GPUs under ZeRO-3 (estimated)" in line
    assert "too much" not in line
    long = ("answer_tokens=90000000", "learner_sku=T4")  # inputs of its layers alone fill the card
    said = told(capsys, one, *words, "model=builtin:tiny-math", "learner_gpus=1", *long)
    assert "under ZeRO-3 (inputs " in said
    assert "that is too much: see learner.sequence_ranks" in said
    assert "\nLearner " not in told(capsys, one, *BY_HAND)
