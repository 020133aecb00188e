"""Tasks whose code ends the process, or raises what `except Exception` does not catch."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

from echo_planes.errors import ConfigError, TaskError
from echo_planes.loop.loading import load_config
from echo_planes.loop.task_probe import PROBE_PROMPTS, probe_task

HOSTILE = """
import sys
from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions
from examples.own_task import OwnTask
{at_import}

class Options(TaskOptions):
    def model_post_init(self, context):
        {in_options}

class Task(OwnTask):
    Options = Options
    def __init__(self, options, tokenizer, seed):
        super().__init__(OwnTask.Options(), tokenizer, seed)
        {in_init}
    def prompt(self, index):
        {in_prompt}
        return super().prompt(index)
    def preflight(self):
        {in_preflight}
        return ""
"""


@pytest.mark.parametrize("place", ["at_import", "in_options", "in_init", "in_prompt", "in_preflight"])
@pytest.mark.parametrize(
    "raises",
    [
        "sys.exit('bye')",
        "sys.exit(0)",
        "raise GeneratorExit",
        "raise type('Mine', (BaseException,), {})('a\\nb')",
    ],
)
def test_a_task_that_ends_its_process_is_told_in_one_line(
    place: str,
    raises: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"hostile_{place}_{zlib.crc32(raises.encode())}"
    places = ("at_import", "in_options", "in_init", "in_prompt", "in_preflight")
    (tmp_path / f"{name}.py").write_text(
        HOSTILE.format(**{other: raises if other == place else "pass" for other in places})
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((ConfigError, TaskError)) as told:
        probe_task(load_config([f"task={name}:Task"]))
    assert f"{name}.py:" in str(told.value)
    assert str(told.value).isprintable()


OWN = """
from echo_planes.data.tasks.adapter import by_batch
from examples.own_task import OwnTask

class Task(OwnTask):
    def materialize(self, trajectories):
        {does}
"""


@pytest.mark.parametrize(
    ("does", "error", "told"),
    [
        ("return by_batch(self, trajectories)", ConfigError, "(materialize = Task.materialize)"),
        ("return [] + by_batch(self, trajectories)[:1]", TaskError, "returned 1 records for 2"),
        ("raise KeyError('half')", TaskError, "materialize of made-up answers to prompt 0: KeyError"),
    ],
)
def test_a_task_of_its_own_companions_is_tried_before_the_run_where_they_matter(
    does: str, error: type[Exception], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_companions_{zlib.crc32(does.encode())}"
    (tmp_path / f"{name}.py").write_text(OWN.format(does=does))
    monkeypatch.syspath_prepend(str(tmp_path))
    probe_task(load_config([f"task={name}:Task"]))  # without refill they may be anything
    with pytest.raises(error, match=re.escape(told)):
        probe_task(load_config([f"task={name}:Task", "sampling.refill=reward"]))


LONG = """
from dataclasses import replace
from examples.own_task import OwnTask

class Task(OwnTask):
    def eval_prompt(self, index):
        prompt = super().eval_prompt(index)
        return replace(prompt, token_ids=prompt.token_ids * 1000) if index == 40 else prompt
"""


def test_a_held_out_prompt_that_is_too_long_is_told_before_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long_task.py").write_text(LONG)
    monkeypatch.syspath_prepend(str(tmp_path))
    _, prompts = probe_task(load_config(["task=long_task:Task", "eval.num_prompts=40"]))
    assert len(prompts) == 2 * PROBE_PROMPTS
    with pytest.raises(ConfigError, match=r"held-out prompt \d+ has \d+ tokens, but model.max_model_len"):
        probe_task(load_config(["task=long_task:Task", "eval.num_prompts=41"]))


def test_an_interruption_while_a_task_is_imported_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted_task.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        load_config(["task=interrupted_task:Task"])
