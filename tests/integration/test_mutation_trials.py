"""A module's tests against changes of it, in forked processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import mutation_trials
from bench.mutation_trials import ROOT, Bench
from tests.thorough import takes_minutes

pytestmark = pytest.mark.integration

MODULE = "echo_planes/learning/advantages.py"
TEST = "tests/unit/test_advantages.py"


@takes_minutes
def test_what_a_change_does_is_told_and_no_file_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (ROOT / MODULE).read_text()
    files = {path: path.stat().st_mtime_ns for path in (ROOT / "echo_planes" / "learning").rglob("*")}
    bench = Bench(MODULE, [TEST])

    assert bench.run(source).outcome == "survived"
    centred = bench.run(source.replace("centred = values - mean", "centred = values + mean"))
    assert (centred.outcome, centred.by) == ("killed", f"{TEST}::test_normalised_by_population_std")
    broken = bench.run("import nothing_of_this_name\n")
    assert (broken.outcome, broken.by) == ("killed", TEST)
    assert bench.run(source).outcome == "survived"  # nothing of it stayed

    monkeypatch.setattr(bench, "_cpu_s", 1.0)
    busy = bench.run(source.replace("    values =", "    while True:\n        pass\n    values ="))
    assert (busy.outcome, busy.by) == ("timed out", "")
    monkeypatch.setattr(bench, "_wall_s", 3.0)
    waits = bench.run(source.replace("    values =", "    __import__('time').sleep(600)\n    values ="))
    assert (waits.outcome, waits.by) == ("timed out", "")
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_tests_that_fail_without_a_change_judge_nothing(tmp_path: Path) -> None:
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_that_fails():\n    assert False\n")
    with pytest.raises(RuntimeError, match="fails without a change"):
        Bench(MODULE, [str(failing)])


def test_a_change_reaches_who_imports_the_module_and_nobody_else() -> None:
    reached = mutation_trials.reached_by("echo_planes.data.replay.leases")
    assert {
        "echo_planes.data.replay.leases",
        "echo_planes.data.replay.partial_rollouts",
        "echo_planes.data.replay.buffer",
    } <= reached
    assert "echo_planes.types" not in reached
    assert "echo_planes.data.replay.staleness" not in reached
