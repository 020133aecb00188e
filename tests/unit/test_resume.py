"""A resume's changes: told where they may be, refused by name where not, before anything starts."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from echo_planes.config.fields import Free, on_resume
from echo_planes.config.schema import Config, TaskConfig
from echo_planes.data.tasks.adapter import TaskOptions
from echo_planes.data.tasks.registry import adapter_options
from echo_planes.errors import ConfigError
from echo_planes.loop import preflight
from echo_planes.loop.checkpoint import CheckpointMeta
from echo_planes.loop.loading import dump_config, load_config, recorded_config
from echo_planes.loop.resume import Change, changes_of, check_changes, check_unfinished
from echo_planes.run import main


def options(task: TaskConfig) -> BaseModel:
    return adapter_options(task)[1]


def run_of(folder: Path, *words: str, step: int = 10, status: str = "stopped") -> Path:
    """The folder of a run that was started with these words, with one checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(load_config(words)))
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    saved = folder / "checkpoints" / f"step-{step:06d}"
    saved.mkdir(parents=True)
    meta = CheckpointMeta(step, 1, 1)
    (saved / "meta.json").write_text(json.dumps({"step": meta.step, "lineage_number": 1, "next_epoch": 1}))
    return folder


def changes(folder: Path, *words: str) -> list[Change]:
    return changes_of(recorded_config(folder), load_config([f"run.resume={folder}", *words]), options)


def told(folder: Path, *words: str) -> list[str]:
    found = changes(folder, *words)
    check_changes(found, str(folder))
    return [str(change) for change in found]


# --- every setting is one or the other -----------------------------------------------------------


def fields(name: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Every setting below a section; sections and lists of them are gone into."""
    for key, field in model.model_fields.items():
        path = f"{name}.{key}" if name else key
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner is None:
            yield path, field
        else:
            yield from fields(path, inner)


def test_every_setting_says_whether_a_resume_may_change_it() -> None:
    marks = {path: on_resume(field) for path, field in fields("", Config)}
    assert len(marks) > 140
    silent = [path for path, mark in marks.items() if mark not in ("fixed", "free")]
    assert not silent, f"declare them Fixed or Free in config.py: {silent}"
    assert {path for path, mark in marks.items() if mark == "fixed"} == {
        "run.seed",
        "task.name",
        "task.adapter",
        "model.path",
        "sampling.samples_per_prompt",
        "sampling.temperature",
        "sampling.top_p",
        "learner.num_ranks",
        "learner.offload_optimizer",
        "learner.offload_weights",
        "learner.zero_stage",
        "learner.dtype",
        "learner.lora_rank",
        "learner.lora_alpha",
        "learner.lora_targets",
    }


def test_a_setting_that_does_not_say_is_found() -> None:
    class Silent(BaseModel):
        new: int = Field(3, description="somebody forgot")

    ((_, field),) = fields("", Silent)
    assert on_resume(field) == ""


# --- what may not change -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "path", "before", "now"),
    [
        ("model.path=builtin:tiny-code", "model.path", "builtin:tiny-math", "builtin:tiny-code"),
        ("model=tiny_code", "model.path", "builtin:tiny-math", "builtin:tiny-code"),
        ("run.seed=3", "run.seed", "0", "3"),
        ("task=guess", "task.name", "math", "guess"),
        ("task.dataset=gsm8k", "task.dataset", "addition", "gsm8k"),
        ("task.max_operand=50", "task.max_operand", "100", "50"),
        ("sampling.samples_per_prompt=4", "sampling.samples_per_prompt", "8", "4"),
        ("sampling.temperature=0.7", "sampling.temperature", "1.0", "0.7"),
        ("sampling.top_p=0.9", "sampling.top_p", "1.0", "0.9"),
        ("learner.num_ranks=2", "learner.num_ranks", "1", "2"),
        ("learner.dtype=fp32", "learner.dtype", "auto", "fp32"),
    ],
)
def test_what_a_run_is_may_not_change(tmp_path: Path, word: str, path: str, before: str, now: str) -> None:
    folder = run_of(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        told(folder, word)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"run.resume={folder}: {path} was ")
    assert before in message.partition(" and is now ")[0]
    assert now in message.partition(" and is now ")[2]
    assert "start a new run" in message


def test_the_same_words_again_are_no_change(tmp_path: Path) -> None:
    words = ("task=code", "run.seed=5", "learner.lr=1e-4", "fleet=single")
    folder = run_of(tmp_path / "run", *words)
    assert told(folder) == told(folder, *words) == []
    assert told(folder, f"run.dir={tmp_path / 'other'}") == []  # a resume goes on in its own folder


def test_a_task_s_option_that_is_left_out_is_its_default(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", "task.max_operand=100")  # as it is anyway
    (folder / "config.yaml").write_text(
        "".join(line for line in (folder / "config.yaml").open() if "max_operand" not in line)
    )
    assert told(folder, "task.max_operand=100") == []


def test_a_task_may_declare_an_option_free() -> None:
    class Options(TaskOptions):
        rows: int = Field(3, description="which rows")
        slots: int = Free(2, description="at once")

    def made(task: TaskConfig) -> BaseModel:
        return Options.model_validate(task.options)

    base = load_config([])
    now = base.model_copy(update={"task": TaskConfig(rows=4, slots=9)})  # type: ignore[call-arg]
    rows, slots = changes_of(base.model_copy(update={"task": TaskConfig()}), now, made)
    assert (rows.path, rows.is_fixed, slots.path, slots.is_fixed) == ("task.rows", True, "task.slots", False)


# --- what may ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("learner.lr=1e-4",), ["learner.lr 0.00025 -> 0.0001"]),  # what it came to, where it was not set
        (("run.steps=500",), ["run.steps 120 -> 500"]),
        (
            ("staleness.max_staleness=1",),
            ["staleness.max_staleness 3 -> 1", "staleness.publish_every 2 -> 1"],
        ),
        (("staleness.publish_every=2",), []),
        (("objective.name=dapo",), ["objective.name grpo -> dapo", "sampling.refill off -> correct"]),
        (("fleet.workers.1.count=5",), ["fleet.workers.1.count 1 -> 5"]),
        (("fleet=single",), ["fleet.workers 2 instance types -> 1 instance type"]),
        (("budget.usd=3",), ["budget.usd null -> 3.0"]),
    ],
)
def test_what_may_change_is_told(tmp_path: Path, words: tuple[str, ...], lines: list[str]) -> None:
    found = told(run_of(tmp_path / "run"), *words)
    assert set(lines) <= set(found)
    if not words[0].startswith("objective"):
        assert sorted(found) == sorted(lines)


def test_a_long_value_is_cut() -> None:
    assert len(str(Change("x", "a" * 5000, "b", is_fixed=False))) < 200


# --- a run that is finished ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "steps", "step", "goes_on"),
    [
        ("done", 120, 120, False),
        ("done", 200, 120, True),  # raised
        ("collapsed", 120, 120, False),
        ("failed", 120, 120, True),  # while it evaluated
        ("stopped", 120, 60, True),
        ("", 120, 60, True),  # killed
        ("stopped", 40, 60, False),
    ],
)
def test_a_run_that_is_finished_says_so(status: str, steps: int, step: int, goes_on: bool) -> None:
    config = load_config([f"run.steps={steps}"])
    if goes_on:
        check_unfinished(config, step, status)
        return
    with pytest.raises(ConfigError, match=f"{step} steps, and run.steps={steps}; give a larger"):
        check_unfinished(config, step, status)


def test_a_finished_run_whose_last_weights_are_not_in_the_store_may_publish_them_again() -> None:
    check_unfinished(load_config(["run.steps=120"]), 120, "done", is_stored=False)
    with pytest.raises(ConfigError, match="nothing is left to do"):
        check_unfinished(load_config(["run.steps=100"]), 120, "done", is_stored=False)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("run.seed=3",), "run.seed was 0 and is now 3"),
        (("model.path=builtin:tiny-code",), "model.path was builtin:tiny-math"),
        ((), "nothing is left to do"),
    ],
)
def test_nothing_starts_and_nothing_is_written_where_a_resume_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    part: str,
) -> None:
    def too_late(*_: Any) -> None:
        raise AssertionError("it was not refused before everything else")

    monkeypatch.setattr(preflight, "check", too_late)
    folder = run_of(tmp_path / "run", step=120, status="done")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main([f"run.resume={folder}", *words]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert part in line
    assert printed.out == ""
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_record_that_this_program_does_not_take_is_named(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run")
    (folder / "config.yaml").write_text("run: {stepz: 3}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: run\.stepz=3: unknown key"):
        recorded_config(folder)
