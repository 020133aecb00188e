"""A folder's tokenizer is the one that the library's own look-up finds, however it is loaded."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from echo_planes.config.files import MODEL_JSON_BYTES
from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.data.tasks import chat
from echo_planes.data.tasks.registry import load_tokenizer
from echo_planes.errors import ConfigError, DataError, ModelError
from echo_planes.loop.builders import build_task
from echo_planes.loop.loading import dump_config, load_config
from echo_planes.loop.task_probe import probe_task
from echo_planes.run import dated

transformers = pytest.importorskip("transformers")


def folder_with(parent: Path, change: dict[str, Any]) -> Path:
    """A built-in model's tokenizer, with other settings; None takes one away."""
    folder = parent / "model"
    shutil.copytree(BUILTIN_MODELS["builtin:tiny-math"], folder, ignore=lambda *_: ["model.safetensors"])
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    return folder


@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2TokenizerFast", None])
def test_it_is_the_one_that_the_look_up_finds(name: str | None, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"tokenizer_class": name})
    ours: Any = load_tokenizer(folder)
    looked_up = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert type(ours) is type(looked_up)
    assert ours.backend_tokenizer.to_str() == looked_up.backend_tokenizer.to_str()
    assert ours.init_kwargs == looked_up.init_kwargs
    assert ours.special_tokens_map == looked_up.special_tokens_map
    assert ours.chat_template == looked_up.chat_template


def test_what_is_wrong_with_a_folder_is_said_in_one_line(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"eos_token": None})
    with pytest.raises(ModelError, match="has no end token"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json is not JSON.*save the tokenizer again"):
        load_tokenizer(folder)
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match="cannot be loaded") as told:
        load_tokenizer(folder)
    assert "\n" not in str(told.value)


def changed(parent: Path, name: str, change: str | bytes | dict[str, Any]) -> Path:
    """As `folder_with`, with another file, or other fields in it."""
    folder = folder_with(parent, {})
    if isinstance(change, dict):
        change = json.dumps(json.loads((folder / name).read_text()) | change)
    (folder / name).write_bytes(change if isinstance(change, bytes) else change.encode())
    return folder


BROKEN: dict[str, tuple[str, str | bytes | dict[str, Any]]] = {
    f"{name} {what}": (name, content)
    for name in ("tokenizer.json", "tokenizer_config.json")
    for what, content in {
        "not JSON": "{",
        "empty": "",
        "list": "[]",
        "number": "5",
        "deep": "[" * 100_000,
        "digits": "9" * 5000,
        "bytes": b"\xff\xfe",
    }.items()
} | {
    "no fields": ("tokenizer.json", "{}"),
    "no model": ("tokenizer.json", {"model": 5}),
    "vocabulary as a list": ("tokenizer.json", {"model": {"type": "BPE", "vocab": [1], "merges": []}}),
    "negative token": ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}),
    "merges of nothing": ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 1}, "merges": ["x y"]}}),
    "added tokens": ("tokenizer_config.json", {"added_tokens_decoder": 5}),
    "end token": ("tokenizer_config.json", {"eos_token": 5}),
    "class": ("tokenizer_config.json", {"tokenizer_class": 5}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tokenizer_files_are_told_in_one_line(name: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, *BROKEN[name])
    with pytest.raises(ModelError, match=r"save the tokenizer again") as told:
        load_tokenizer(folder)
    assert str(folder) in str(told.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_files_that_never_end_are_not_opened(name: str, kind: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        with (folder / name).open("wb") as file:
            file.truncate(MODEL_JSON_BYTES + 1)
    with pytest.raises(ModelError, match=rf"{name} cannot be read: it (is a|has more)"):
        load_tokenizer(folder)


# As Llama 3.1's and 3.2's templates find their date, in our own words.
DATED = """
{%- if date_string is not defined -%}
    {%- if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}
    {%- else %}{% set date_string = '1 Feb 2003' %}{% endif -%}
{%- endif -%}
{{- date_string }}{% for message in messages %}:{{ message.content }}{% endfor -%}
"""


def test_prompts_tell_the_date_of_the_run_on_every_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, {"chat_template": DATED})
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "answer": ""}}\n' for i in range(40)))
    words = ["task=function", f"task.data={tmp_path / 'rows.jsonl'}", "task.reward=operator:eq"]
    words += [f"model={folder}", "model.max_model_len=128"]
    config = dated(load_config(words), dt.date(2003, 2, 1))
    begun = probe_task(config)[1]
    (tmp_path / "config.yaml").write_text(dump_config(config))

    class Tomorrow(dt.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2003, 2, 2)

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Tomorrow)
    resumed = dated(load_config([f"run.resume={tmp_path}"]), dt.date(2003, 2, 2))
    assert resumed.run.date == dt.date(2003, 2, 1)
    assert probe_task(resumed)[1] == begun
    assert build_task(resumed).prompt(0) == begun[0]  # as workers make it
    text = load_tokenizer(folder).decode(begun[0].token_ids)
    assert text.startswith("01 Feb 2003:")
    another = load_config([*words, "run.date=2003-02-02"])
    assert probe_task(another)[1] != begun
    with pytest.raises(ConfigError, match=r"run\.date"):
        load_config([*words, "run.date=2003-02-30"])


def test_a_tokenizer_of_another_model_is_found_by_its_first_prompts(tmp_path: Path) -> None:
    folder = changed(tmp_path, "tokenizer_config.json", {"eos_token": "<one more>"})
    with pytest.raises(ModelError, match=r"makes token \d+, but config.json has vocab_size=\d+"):
        probe_task(load_config([f"model={folder}", "model.max_model_len=512"]))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if", "cannot write a question"),
        ("{{ 1 // 0 }}", "cannot write a question"),
        ("{{ messages[0].content.x.y.z }}", "cannot write a question"),
        ("{{ " + "(" * 5000 + " }}", "cannot write a question"),
        (5, "cannot write a question"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
            "{% endfor %}{% endfor %}",
            "does not come to an end",
        ),
    ],
)
def test_a_chat_template_that_cannot_be_used(
    template: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_LIMIT_S", 0.2)
    folder = folder_with(tmp_path, {})
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer: Any = load_tokenizer(folder)
    tokenizer.chat_template = template
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ModelError, match=f"the chat template {says}.*task.template=plain"):
        chat.Chat(tokenizer)
    assert signal.getsignal(signal.SIGALRM) is before


# --- rows of a file ------------------------------------------------------------------------------

ALTERNATING = """
{%- for m in messages -%}
    {%- set expected = 'user' if loop.index0 % 2 == 0 else 'assistant' -%}
    {%- if m.role != expected %}{{ raise_exception('roles must alternate') }}{% endif -%}
    {{- m.role }}: {{ m.content + eos_token }}
{%- endfor -%}
"""


def rows_of(path: Path, bad: dict[int, object]) -> Path:
    """A file of 60 rows, some of them with other prompts, by their numbers in the file."""
    prompts = [bad.get(i, f"{i}+1=") for i in range(1, 61)]
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    return path


@pytest.mark.parametrize("task", ["function task.reward=operator:eq", "gym task.env=types:SimpleNamespace"])
def test_rows_that_a_template_cannot_write_are_told_before_anything_is_paid(
    task: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, {"chat_template": ALTERNATING})
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    path = rows_of(tmp_path / "rows.jsonl", {43: twice, 55: twice})
    words = [*f"task={task}".split(), f"task.data={path}", "task.template=chat", f"model={folder}"]
    with pytest.raises(DataError, match="TemplateError: roles must alternate") as told:
        probe_task(load_config([*words, "model.max_model_len=128"]))
    assert re.match(f"{path}: row (43|55): its prompt cannot be made: ", str(told.value))
    assert str(told.value).endswith("(2 of 60 rows cannot be asked)")


@pytest.mark.parametrize(
    ("words", "longest"),
    [
        (["task=function", "task.reward=operator:eq", "task.template=plain"], 448),
        (["task=gym", "task.env=types:SimpleNamespace"], 383),  # of an episode of 384 tokens
    ],
)
def test_a_row_that_is_too_long_is_told_before_anything_is_paid(
    words: list[str], longest: int, tmp_path: Path
) -> None:
    path = rows_of(tmp_path / "rows.jsonl", {43: "9" * (longest + 1), 44: "9" * longest})
    with pytest.raises(
        DataError, match=rf"rows\.jsonl: row 43: its prompt has {longest + 1} tokens.*1 of 60"
    ):
        probe_task(load_config([*words, f"task.data={path}"]))


@pytest.mark.parametrize("task", ["math task.dataset=gsm8k", "code task.dataset=mbpp"])
def test_a_row_of_a_benchmark_that_is_too_long_is_told_too(task: str, tmp_path: Path) -> None:
    questions = ["9" * (600 if i == 43 else 3) + f" {i}" for i in range(1, 61)]
    gsm8k = [{"question": text, "answer": "#### 2"} for text in questions]
    mbpp = [{"text": q, "code": "x = 1", "test_list": ["x"], "test_setup_code": ""} for q in questions]
    path = tmp_path / "rows.jsonl"
    rows: list[Any] = gsm8k if "gsm8k" in task else mbpp
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"rows\.jsonl: row 43: its prompt has \d+ tokens.*1 of 60"):
        probe_task(load_config([*f"task={task}".split(), "task.template=plain", f"task.data={path}"]))
