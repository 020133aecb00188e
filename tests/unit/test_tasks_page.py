"""docs/tasks.md: its programs are written to files, and its commands are run on them, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from echo_planes.loop.loading import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tasks.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
PROGRAMS = {text.split()[1].rstrip(":"): text for kind, text in BLOCKS if kind == "python"}
COMMANDS = [line for kind, text in BLOCKS if kind != "python" for line in text.splitlines()]
OWN = [line for line in COMMANDS if any(f"{name[:-3]}:" in line for name in PROGRAMS)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the page's programs, and of what they write, as the working directory."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    for line in COMMANDS:
        if match := re.fullmatch(r"python ([a-z_]+\.py) > ([a-z_.]+)", line):
            run = subprocess.run([sys.executable, match[1]], cwd=tmp_path, check=True, capture_output=True)
            (tmp_path / match[2]).write_bytes(run.stdout)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_every_program_of_the_page_is_in_a_file_that_a_command_uses() -> None:
    assert len(PROGRAMS) == PAGE.count("```python") >= 2
    for name in PROGRAMS:
        checked, run = (
            [w for w in OWN if w.startswith(f"python -m echo_planes.{c} ")] for c in ("task", "run")
        )
        assert any(f"{name[:-3]}:" in line for line in checked), name
        assert any(f"{name[:-3]}:" in line for line in run), name


@pytest.mark.parametrize("line", [line for line in OWN if " check " in line])
def test_a_task_of_the_page_keeps_its_contract(line: str, folder: Path) -> None:
    words = line.split()
    told = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "0 warnings, 0 failed" in told.stdout, told.stdout


@pytest.mark.parametrize("line", [line for line in OWN if ".run " in line])
def test_a_run_of_the_page_has_valid_settings(line: str, folder: Path) -> None:
    config = load_config(line.split()[3:])
    assert config.task.adapter.endswith("Task")
