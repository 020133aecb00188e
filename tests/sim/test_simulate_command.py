"""`python -m echo_planes.simulate`: what it prints, what it writes, and how it says what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from echo_planes.config.plain_yaml import read_yaml
from echo_planes.reporting.metrics import FLEET_STATE, WORKER_STATE
from echo_planes.sim.scenario import InstanceTypeModel
from echo_planes.simulate import main
from tests.unit.test_report_fleet import table

SHORT = ["scenario=steady", "run.hours=1.25", "network.snapshot_mb=500"]


def test_what_is_written_says_that_it_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "here"
    faults = 'faults=[{at_s: 3000, kind: kill, worker: w1}, {at_s: 4000, kind: slow, worker: "w2"}]'
    assert main([*SHORT, faults, f"out={out}"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("SIMULATED: steady")
    assert "kill w1 at 3,000 s" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert summary["simulated"] is True
    assert [fault["what"] for fault in summary["faults"]] == ["kill w1", "slow w2"]
    lines = [json.loads(line) for line in (out / "trace.jsonl").read_text().splitlines()]
    assert all(line["simulated"] for line in lines)
    assert len([line for line in lines if "t_train_s" in line]) == summary["steps"] > 10
    assert (out / "scenario.yaml").read_text().startswith("# simulated")
    page = (out / "report.html").read_text()
    assert "<title>steady (simulated)</title>" in page
    assert "Nothing on this page was measured" in page
    assert "kill w1" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_page_shows_the_fleet_as_the_trace_has_it(tmp_path: Path) -> None:
    assert main(["scenario=provisioned", "run.hours=2", f"out={tmp_path}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    came = Counter(
        e["instance_type"] for e in lines if (e.get("kind"), e.get("text")) == (WORKER_STATE, "booting")
    )
    decided = [e for e in lines if e.get("kind") == FLEET_STATE and (e.get("launched") or e.get("released"))]
    assert came["spot"] > 1
    assert decided
    page = (tmp_path / "report.html").read_text()
    assert {row["Instance type"]: int(row["Came"]) for row in table(page, "Hours served")} == came
    rows = table(page, "Launched")
    assert [row["Why"] for row in rows] == [event["text"] for event in decided]
    assert [float(row["Provided"]) for row in rows] == pytest.approx([e["mu"] for e in decided], rel=0.01)
    assert WORKER_STATE not in page
    # Whoever leaves is said to do so where it can be read why.
    left = [row["How"] for row in table(page, "How") if row["How"] != "was there at the end"]
    assert left
    assert all("its machine" in how or "margin" in how for how in left), left


def test_a_fleet_of_fixed_size_shows_who_was_lost(tmp_path: Path) -> None:
    faults = "faults=[{at_s: 3000, kind: kill, worker: w1}]"
    assert main([*SHORT, faults, f"out={tmp_path}"]) == 0
    page = (tmp_path / "report.html").read_text()
    lives = [row for row in table(page, "How") if row["Worker"] == "w1"]
    assert [row["How"] == "was there at the end" for row in lives] == [False, True]
    assert lives[0]["How"].startswith("lost")
    assert lives[0]["Went"] == "0:50:00"
    assert "Decisions" not in page


def test_a_hostile_name_is_text_on_the_page(tmp_path: Path) -> None:
    assert main([*SHORT, "name=<script>alert(1)</script>", f"out={tmp_path}"]) == 0
    assert "<script>alert" not in (tmp_path / "report.html").read_text()


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["simulated"] is True
    assert summary["lost_trajectories"] == 0


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for key in (
        "learner.t_train_s=60.0",
        "instance_types.0.usd_per_hour=",
        "faults",
        "staleness.max_staleness=3",
    ):
        assert key in shown


def test_the_resolved_scenario_can_be_simulated_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "seed=3", "--print"]) == 0
    path = tmp_path / "again.yaml"
    path.write_text(capsys.readouterr().out)
    assert main([f"scenario={path}", "--json"]) == 0
    again = capsys.readouterr().out
    assert main([*SHORT, "seed=3", "--json"]) == 0
    assert capsys.readouterr().out == again


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["scenario=stedy"], "did you mean 'steady'"),
        ([*SHORT, "learner.t_train=1"], "learner.t_train=1: unknown key"),
        ([*SHORT, "instance_types.0.trace=no.csv"], "no.csv"),
        (["scenario=no.yaml"], "no.yaml cannot be read"),
        ([*SHORT, "instance_types.3.count=1"], "'3' is not an index"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ECHO_PLANES_DATA", raising=False)
    assert main(words) == 2
    heard = capsys.readouterr()
    assert heard.out == ""
    assert why in heard.err
    assert heard.err.count("\n") == 1


def test_a_run_that_fails_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHORT, "fleet.restarts=0", "faults=[{at_s: 2000, kind: kill, count: 10}]"]
    assert main(words) == 1
    heard = capsys.readouterr()
    assert "failed" in heard.out
    assert "no worker is left" in heard.err


def test_a_schedule_makes_engines_faster_by_what_they_do_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All answers have 4,000 tokens: a token reads 2,000.5 densely, and 256 or 512 and half of its pages."""
    (tmp_path / "mine.yaml").write_text("schedule: [16, 32]\nbin_tokens: 2000\n")
    words = [*SHORT, "lengths.median_tokens=4000", "lengths.sigma=0", "instance_types.0.kv_share=0.5"]
    slow = ["instance_types.0.peak_tokens_per_s=500", "learner.t_train_s=1"]  # the learner waits
    steps = {}
    for name, more in (("dense", []), ("sparse", [f"sparse={tmp_path / 'mine.yaml'}"])):
        assert main([*words, *slow, *more, f"out={tmp_path / name}"]) == 0
        steps[name] = json.loads((tmp_path / name / "summary.json").read_text())["trajectories_per_s"]
    typed = read_yaml(tmp_path / "sparse" / "scenario.yaml")["instance_types"][0]
    # A budget of 16 pages reads 248 tokens on average (its last page is half full), one of 32 504. Scores of
    # pages cost half a token each: 62 pages at 1,000 tokens, 187 at 3,000. Shorter answers read everything.
    expected = ((248 + 63 / 2) + (504 + 188 / 2)) / 2 / 2000.5
    assert typed["read_share"] == pytest.approx(expected, rel=0.03)
    assert 1.2 < steps["sparse"] / steps["dense"] < 1 / (1 - 0.5 * (1 - typed["read_share"])) + 0.05
    assert main([*SHORT, f"sparse={tmp_path / 'mine.yaml'}"]) == 2
    assert "kv_share" in capsys.readouterr().err


def test_what_a_batch_shares_costs_the_same_however_little_a_sample_reads() -> None:
    """A token of a batch takes (half + b) / peak s, of which b x kv_share / peak is for reading."""
    dense = InstanceTypeModel(name="x", count=1, peak_tokens_per_s=1000, half_batch=10, kv_share=0.4)
    sparse = dense.model_copy(update={"read_share": 0.25})
    for batch in (1, 8, 64):
        token_s = (10 + batch * (0.6 + 0.4 * 0.25)) / 1000
        assert batch / sparse.engine.tokens_per_s(batch) == pytest.approx(token_s)
    assert dense.engine.tokens_per_s(8) == pytest.approx(8 / 0.018)
