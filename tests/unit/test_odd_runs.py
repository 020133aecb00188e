"""Run folders with odd values in their books: whoever reads them is told in one line, or shown the rest."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_planes.errors import DataError
from echo_planes.reporting import metrics, report
from echo_planes.reporting.metrics import MetricsWriter, read_summary
from tests.unit.test_report import a_run, outline

ODD: dict[str, Any] = {
    "number": 5,
    "minus": -1,
    "large": 1e308,
    "beyond floats": 10**400,
    "text": "<x>",
    "true": True,
    "list": [5],
    "lists": [[]],
    "object": {"a": 5},
    "list of objects": [{"a": [5], "step": "x", "pass_at": {"x": "y"}, "lag": "x"}],
}
FILES = ("summary.json", "metrics.jsonl", "events.jsonl", "sparsity.json")


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a tree; of a list, to its first."""
    if path:
        yield path
    inner = (
        tree.items()
        if isinstance(tree, dict)
        else list(enumerate(tree))[:1]
        if isinstance(tree, list)
        else []
    )
    for key, value in inner:
        yield from places(value, (*path, key))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(tree)
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return changed


def a_full_run(folder: Path) -> Path:
    run = a_run(folder, steps=2)
    writer = MetricsWriter(run)
    writer.event(4.0, metrics.WORKER_STATE, "serving", worker="w0", instance_type="L4/spot")
    writer.event(
        5.0, metrics.FLEET_STATE, "more", mu=1.0, mu_min=1.0, workers={"serving": 1}, launched={"L4": 1}
    )
    writer.event(6.0, metrics.WORKER_STATE, "gone", worker="w0", version=3)
    row = {"layer": "all", "changed_shares": [0.1, None, 0.2, 0.3], "predicted_share": 0.1}
    (run / "sparsity.json").write_text(json.dumps([row]))
    writer.write_summary(
        {"publications": [{"published_version": 1, "payload_bytes": 10, "codec": "x"}], **read_summary(run)}
        | {"usd_by_part": {"trained": 1.0}, "usd_by_sku": {"cpu": 1.0}}
    )
    return run


def with_value(run: Path, name: str, path: tuple[Any, ...], value: Any) -> None:
    file = run / name
    if name.endswith(".json"):
        file.write_text(json.dumps(put(json.loads(file.read_text()), path, value)))
    else:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in put(lines, path, value)))


def ways(run: Path, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Places to change together: each that holds more than one value alone, the single values at once."""
    text = (run / name).read_text()
    tree = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
    single = []
    for way in places(tree):
        value = tree
        for key in way:
            value = value[key]
        if isinstance(value, dict | list) or way[-1] in ("step", "status", "kind", "time_s"):
            yield [way]
        elif way:
            single.append(way)
    yield single


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts and settings are the same in all of these."""
    monkeypatch.setattr(report, "_rollouts", lambda *_: {"rollouts": [], "problem": ""})
    monkeypatch.setattr(report, "parse_config", lambda _: {})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", FILES)
def test_any_value_of_any_field_is_drawn_or_told_in_one_line(name: str, kind: str, tmp_path: Path) -> None:
    run = a_full_run(tmp_path)
    whole = (run / name).read_bytes()
    for together in ways(run, name):
        (run / name).write_bytes(whole)
        for way in together:
            with_value(run, name, way, ODD[kind])
        try:
            page = report.render(run)
        except DataError as error:
            told(error, name)
        except Exception as error:
            raise AssertionError(f"{name} {together} = {ODD[kind]!r:.50}") from error
        else:
            outline(page)


def told(error: DataError, name: str) -> None:
    assert name in str(error)
    assert str(error).isprintable()


@pytest.mark.parametrize(
    "content", [b"", b"5\n", b"[]\n", b"[" * 100_000 + b"\n", b"9" * 5000 + b"\n", b"\xff\n", b"{\n"]
)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_something_else_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    run = a_full_run(tmp_path)
    (run / name).write_bytes(content)
    if (name, content) in (("sparsity.json", b"[]\n"), ("metrics.jsonl", b""), ("events.jsonl", b"")):
        return
    with pytest.raises(DataError, match=name) as caught:
        report.render(run)
    told(caught.value, name)


@pytest.mark.parametrize("name", [*FILES, "config.yaml"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_never_ends_is_named(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_full_run(tmp_path)
    (run / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to("/dev/zero")
    assert report.main([str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name} cannot be read: it is a " in line


def test_a_summary_whose_evaluations_are_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_full_run(tmp_path)
    (run / "summary.json").write_text('{"evals": 5}')
    assert report.main([str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "summary.json: 'evals' is 5, not a list; put the original back, or take the file away"
    )
