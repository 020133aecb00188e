"""After a resume every figure is of the whole run, or says of which part it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_planes.errors import DataError
from echo_planes.loop.checkpoint import rewind_metrics
from echo_planes.reporting.metrics import read_summary
from echo_planes.reporting.parts import PARTS_FILE, read_parts, whole_run
from echo_planes.reporting.report import render
from echo_planes.reporting.terminal import closing_lines
from echo_planes.testing.simulation import tiny_config
from echo_planes.types import EvalReport, InstallReport, Manifest
from tests.unit.test_journal import Books, info


def evaluated(books: Books, step: int, accuracy: float, mismatch: float | None = None) -> None:
    books.journal.on_eval(EvalReport(step, step, 8, 2, accuracy, accuracy / 2), mismatch)


def published(books: Books, *versions: int) -> None:
    for version in versions:
        manifest = Manifest("L0", version, version, "overwrite", 0, "d0", "d2", "", 1234, 9, 5, 20)
        books.journal.on_published(manifest, 0.5)


def worked(books: Books, worker: str, trajectories: int) -> None:
    books.journal.on_worker(info(worker), alive=True)
    books.accepted[worker, 0] = (10 * trajectories, trajectories)
    books.journal.on_accepted(books.accepted)


def first_part(folder: Path) -> Books:
    """Four steps in 40 s, evaluated at 0 and at 4; nobody writes a summary of it: it is killed."""
    books = Books(folder)
    worked(books, "w0", 8)
    worked(books, "w1", 4)
    books.journal.on_installed(InstallReport("w0", 0, "d0", True, 2.0, digest_mismatches=1))
    evaluated(books, 0, 0.25, mismatch=0.01)
    for step in range(4):
        books.step(step, f"a{step}", versions=[max(0, step - 3)] * 2)
        published(books, step + 1)
    evaluated(books, 4, 0.5)
    return books


def second_part(folder: Path, **more: Any) -> Books:
    """Goes on from step 2, with another bound: three steps in 30 s, evaluated at 2 and 5."""
    rewind_metrics(folder, 2)
    books = Books(folder, tiny_config(steps=5, max_staleness=1), start_step=2)
    worked(books, "w0", 6)
    published(books, 2)
    evaluated(books, 2, 0.375)
    for step in range(2, 5):
        books.step(step, f"b{step}", versions=[step] * 2)
        published(books, step + 1)
    books.journal.on_installed(InstallReport("w0", 5, "d5", True, 4.0))
    evaluated(books, 5, 0.75, mismatch=0.03)
    return books


def test_a_run_that_was_killed_and_resumed_is_summed_up_as_one(tmp_path: Path) -> None:
    first_part(tmp_path)
    told = second_part(tmp_path).summary()
    assert (told["parts"], told["seconds"], told["seconds_last_part"]) == (2, 70.0, 30.0)
    assert (told["eval_first"], told["eval_last"]) == (0.25, 0.75)
    assert [row["step"] for row in told["evals"]] == [0, 2, 5]  # that of step 4 was of a policy given up
    assert told["steps"] == 5
    assert told["max_staleness"] == 3  # the bound that was in force when it was used
    assert told["max_staleness_observed"] <= told["max_staleness"]
    assert told["versions_published"] == 4 + 4
    assert told["digest_mismatches"] == 0 + 1
    assert told["mismatch_same_version_mean"] == pytest.approx(0.02)
    assert told["install_seconds_mean"] == pytest.approx(3.0)
    rows = {row["id"]: row for row in told["workers"]}
    assert (rows["w0"]["trajectories"], rows["w0"]["tokens"]) == (14, 140)
    assert rows["w1"]["trajectories"] == 4  # it is not in the fleet any more
    assert told["usd_total"] == pytest.approx(sum(told["usd_by_part"].values()))
    assert read_summary(tmp_path) == json.loads(json.dumps(told))


def test_publications_of_a_part_that_ended_by_itself_are_listed_with_the_next(tmp_path: Path) -> None:
    first_part(tmp_path).summary(status="stopped")
    told = second_part(tmp_path).summary()
    # Versions 3 and 4 of the first part are of a policy that was given up.
    assert [row["published_version"] for row in told["publications"]] == [1, 2, 2, 3, 4, 5]
    assert told["t_extract_s_median"] == 0.5


def test_what_a_later_part_gave_up_does_not_count_in_any_earlier_one(tmp_path: Path) -> None:
    """The third part begins before the second one did: at step 1, not 2."""
    first = first_part(tmp_path)
    evaluated(first, 2, 0.375)
    first.summary(status="stopped")
    second_part(tmp_path).summary(status="stopped")
    rewind_metrics(tmp_path, 1)
    told = Books(tmp_path, start_step=1).summary()
    assert [row["step"] for row in told["evals"]] == [0]
    assert told["eval_last"] == 0.25
    assert [row["published_version"] for row in told["publications"]] == [1]


def test_a_run_of_one_part_is_as_it_was(tmp_path: Path) -> None:
    told = first_part(tmp_path).summary()
    assert (told["parts"], told["seconds"], told["seconds_last_part"]) == (1, 40.0, 40.0)
    assert (told["eval_first"], told["eval_last"], told["versions_published"]) == (0.25, 0.5, 4)
    (line,) = [line for line in closing_lines(told, None, 4) if line.startswith("done: ")]
    assert line.endswith("4 steps in 40.0 s")


def test_terminal_and_report_say_of_which_part(tmp_path: Path) -> None:
    first_part(tmp_path)
    told = second_part(tmp_path).summary()
    lines = closing_lines(told, None, 5)
    assert "5 steps in 70.0 s (30.0 s of it in the last of 2 parts)" in lines[1]
    assert any("0.250 -> 0.750 held-out" in line for line in lines)
    assert any("(bound 3)" in line for line in lines)
    assert "in 70.0 s and 2 parts" in render(tmp_path)


def test_a_report_of_a_part_that_runs_has_the_earlier_ones(tmp_path: Path) -> None:
    first_part(tmp_path)
    second_part(tmp_path)
    assert not (tmp_path / "summary.json").exists()
    page = render(tmp_path)
    assert "in 70.0 s and 2 parts" in page
    assert "0.250" in page


@pytest.mark.parametrize(
    "content", ["", "{}", "[3]", '[{"step": 0}]', "nonsense", '[{"step": 0, "seconds": "a"}]']
)
def test_a_damaged_record_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / PARTS_FILE).write_text(content)
    with pytest.raises(DataError, match=r"parts\.json does not say .* or remove it"):
        read_parts(tmp_path)


def test_a_list_that_holds_something_else_is_damage(tmp_path: Path) -> None:
    first_part(tmp_path)
    (part,) = read_parts(tmp_path)
    for key, wrong in (("evals", [3]), ("evals", 5), ("workers", {}), ("startup", []), ("installs", None)):
        (tmp_path / PARTS_FILE).write_text(json.dumps([{**part, key: wrong}]))
        with pytest.raises(DataError, match=r"parts\.json"):
            read_parts(tmp_path)


def test_nothing_is_known_of_a_part_that_did_nothing(tmp_path: Path) -> None:
    books = Books(tmp_path)
    published(books, 0)
    whole = whole_run(read_parts(tmp_path))
    assert (whole["eval_first"], whole["install_seconds_mean"], whole["mismatch_same_version_mean"]) == (
        None,
        None,
        None,
    )
