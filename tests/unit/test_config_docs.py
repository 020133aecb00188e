"""Agreement of what people read about the settings with the settings: --help, configs/ and the README."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from echo_planes.config.fields import Section
from echo_planes.config.fleet import FleetConfig
from echo_planes.config.schema import Config
from echo_planes.data.tasks.registry import adapter_options
from echo_planes.errors import ConfigError
from echo_planes.loop.loading import GROUPS, config_dir, describe, load_config
from echo_planes.run import USAGE, main
from tasks.math.options import MathOptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")))
MADE_UP = ("my_task.py", "test_my_task.py")  # files that a page has its reader make
GROUP_FILES = sorted(path for group in GROUPS for path in (config_dir() / group).glob("*.yaml"))


def keys(name: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Every settable key below a section, dotted, with its field; list items as number 0."""
    for key, field in model.model_fields.items():
        path = f"{name}.{key}" if name else key
        inner = typing.get_args(field.annotation)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(path, field.annotation)
        elif inner and isinstance(inner[0], type) and issubclass(inner[0], BaseModel):
            yield from keys(f"{path}.0", inner[0])
        else:
            yield path, field


# Settings that only a task's user can give.
NEEDED = {"function": ("reward", "data"), "gym": ("env", "data"), "reasoning_gym": ("dataset",)}
ALL_KEYS = [*keys("", Config), *keys("task", MathOptions)]


def test_the_walk_finds_keys_at_every_depth() -> None:
    found = {path for path, _ in ALL_KEYS}
    assert {"run.steps", "fleet.workers.0.sku", "fleet.workers.0.engine.max_num_seqs"} <= found
    assert {"task.adapter", "task.dataset", "task.weights.correct"} <= found


def test_help_shows_every_key_with_its_default_and_its_meaning() -> None:
    rows = {
        match[1]: (match[2], match[3].strip())
        for line in describe().splitlines()
        if (match := re.match(r"  ([a-z_0-9.]+)=(\{.*?\}|\S*)(.*)", line))
    }
    assert sorted(rows) == sorted(path for path, _ in ALL_KEYS)
    config = load_config([])
    options = adapter_options(config.task)[1]
    for path, _ in ALL_KEYS:
        value: Any = config
        for part in path.split("."):
            if isinstance(value, list):
                value = value[int(part)]
            else:
                value = getattr(options if value is config.task and hasattr(options, part) else value, part)
        default, meaning = rows[path]
        assert default == str(value), path
        assert meaning, f"{path} is not explained"


def test_help_is_of_the_task_and_the_fleet_that_are_named() -> None:
    text = describe(["task=code", "fleet=single", "run.steps=7"])
    for part in ("task.name=code", "model.path=builtin:tiny-code", "run.steps=7", "options of task=code"):
        assert part in text
    assert "fleet.workers.0.sku=cpu-large" in text
    (mode,) = [line for line in text.splitlines() if line.startswith("  guard.mode=")]
    assert all(choice in mode for choice in ("off", "warn", "act"))
    assert "task.reward=..." in describe(["task=function"])
    with pytest.raises(ConfigError, match="nosuch"):
        describe(["task=nosuch"])


def test_help_names_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for path in GROUP_FILES:
        assert path.stem in text
    assert "staleness.max_staleness=3" in text


def test_help_refuses_a_key_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "learner.rate=1"]) == 2
    assert "learner.rate" in capsys.readouterr().err


def test_the_commands_that_help_shows_can_be_given() -> None:
    lines = [line for line in USAGE.splitlines() if line.startswith("  python -m echo_planes.run ")]
    assert len(lines) >= 3
    for line in lines:
        words = re.findall(r"\b[a-z_.]+=\S+", line)
        if any("package.module" in word or word.startswith("run.resume") for word in words):
            continue  # placeholders that must exist
        assert load_config(words).task.name == "math"


def test_print_shows_the_resolved_settings_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print", "run.steps=7", "fleet=single"]) == 0
    text = capsys.readouterr().out
    assert "steps: 7" in text
    assert "sku: cpu-large" in text


def test_help_and_print_are_of_the_task_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "task=poker"]) == 0
    text = capsys.readouterr().out
    assert "options of task=poker:" in text
    assert "options of task=math:" not in text
    assert "  task.level=" not in text
    assert main(["--print", "task=math", "task.level=carry"]) == 0
    text = capsys.readouterr().out
    assert "level: carry" in text
    assert "dataset: " in text  # by its default
    assert main(["--help", "task=pokker"]) == 2
    assert "did you mean 'poker'?" in capsys.readouterr().err


def test_a_mistake_is_one_line_and_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run.step=7"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: run.step=7: unknown key; did you mean 'steps'?\n"


@pytest.mark.parametrize("path", GROUP_FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_group_file_validates(path: Path) -> None:
    needed = [f"task.{key}=module:name" for key in NEEDED.get(path.stem, ())]
    config = load_config([f"{path.parent.name}={path.stem}", *needed])
    assert isinstance(config, Config)
    if path.parent.name == "fleet":
        assert config.first_workers() or config.fleet.num_workers


def test_the_default_files_set_only_keys_that_exist_and_the_package_defaults_agree() -> None:
    """A run from code, `Config()`, and a run without words differ only in the fleet."""
    default, built_in = load_config([]), Config()
    assert default.model_copy(update={"fleet": FleetConfig(), "task": built_in.task}) == built_in


def test_a_setting_that_only_the_user_knows_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=function", "task.data=x.jsonl"]) == 2
    assert capsys.readouterr().err == "error: task.reward=...: this setting is needed, it has no default\n"


def test_a_task_brings_settings_that_suit_it_unless_others_are_asked_for() -> None:
    code = load_config(["task=code"])
    assert (code.model.path, code.sampling.prompts_per_step) == ("builtin:tiny-code", 16)
    assert code.sampling.samples_per_prompt == load_config([]).sampling.samples_per_prompt
    other = load_config(["task=code", "model=tiny", "run.steps=7"])
    assert (other.model.path, other.run.steps) == ("builtin:tiny-math", 7)


def test_every_section_refuses_unknown_keys() -> None:
    sections = [field.annotation for name, field in Config.model_fields.items() if name != "task"]
    assert len(sections) == 15
    for section in sections:
        assert isinstance(section, type)
        assert issubclass(section, Section)
        assert section.model_config["extra"] == "forbid"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_only_settings_files_and_pages_that_exist(page: Path) -> None:
    text = page.read_text()
    groups = {f"{path.parent.name}={path.stem}" for path in GROUP_FILES}
    for group, name in re.findall(
        rf"\b({'|'.join(GROUPS)})=([a-z][a-z0-9_-]*(?:\.[0-9][a-z0-9-]*)*)(?![.:/\w])", text
    ):
        assert f"{group}={name}" in groups, f"{page.name}: {group}={name}"
    sections = "|".join(set(Config.model_fields) - {"task"})  # a task has keys of its own
    known = {re.sub(r"\.\d+\.", ".0.", path) for path, _ in ALL_KEYS}
    for path in re.findall(rf"(?<![.\w])((?:{sections})\.[a-z_0-9.]+)=", text):
        assert re.sub(r"\.\d+\.", ".0.", path) in known, f"{page.name}: {path}"
    for path in re.findall(r"configs/[a-z_/0-9]+\.yaml", text):
        assert (ROOT / path).is_file(), f"{page.name}: {path}"
    for path in re.findall(r"\]\(([a-z/-]+\.md)\)", text):
        assert (page.parent / path).is_file(), f"{page.name}: {path}"
    files = [one.relative_to(ROOT).as_posix() for one in ROOT.rglob("*.py") if ".venv" not in one.parts]
    for path in re.findall(r"`([a-z_/]+\.py)`", text):
        assert any(f"/{one}".endswith(f"/{path}") for one in files) or path in MADE_UP, f"{page.name}: {path}"


def test_jobs_that_pages_submit_keep_their_run() -> None:
    """Ray removes the folder that a job works in."""
    text = "\n".join(page.read_text().replace("\\\n", " ") for page in PAGES)
    jobs = [line for line in text.splitlines() if line.startswith("ray job submit")]
    assert len(jobs) >= 2
    assert all(re.search(r"-- +python -m echo_planes\.run .*run\.dir=\$PWD/", job) for job in jobs), jobs


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
