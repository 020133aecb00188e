"""Every file that a person can name to a command: where it never ends, the command says so in one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from echo_planes import plan, run, simulate
from echo_planes.config.files import open_regular, read_bytes, read_json, read_text
from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.data.replay.checkpoint_state import load_checkpoint_state
from echo_planes.errors import DataError, UserError
from echo_planes.loop import warm_start
from echo_planes.loop.checkpoint import CheckpointMeta, open_lineage, read_meta
from echo_planes.loop.spending import check_budget
from echo_planes.reporting.viewer.run_folder import RunFolder
from echo_planes.reporting.weights import cli as weights
from echo_planes.sim.spot import read_trace

Command = Callable[[list[str]], int]
# What stands for the path of the file is @; for its folder, which has a model in it, is #.
NAMED: dict[str, tuple[Command, str, str]] = {
    "fleet": (run.main, "mine.yaml", "fleet=@"),
    "task": (run.main, "mine.yaml", "task=@"),
    "resumed settings": (run.main, "config.yaml", "run.resume=#"),
    "model settings": (run.main, "config.json", "model.path=#"),
    "tokenizer": (run.main, "tokenizer.json", "model.path=#"),
    "tokenizer settings": (run.main, "tokenizer_config.json", "model.path=#"),
    "template": (run.main, "chat_template.jinja", "model.path=#"),
    "weights": (run.main, "model.safetensors", "model.path=#"),
    "key": (run.main, "key.pem", "weights.key_file=@"),
    "certificate": (run.main, "cert.pem", "weights.tls_cert=@ weights.tls_key=@ weights.tls_ca=@"),
    "prices": (plan.main, "prices.csv", "prices=@ params_b=1 uplink_mbit=1 worker_mbit=1 t_train_s=1"),
    "catalogue": (plan.main, "vms.csv", "convert-skypilot @ out.csv --provider x"),
    "scenario": (simulate.main, "mine.yaml", "scenario=@"),
    "table": (warm_start.main, "offline.arrow", "--reader x:y --table @ --model x --out y --steps 1"),
    "tensors": (weights.main, "mine.safetensors", "inspect @"),
    "compared": (weights.main, "mine.safetensors", "diff @ @"),
    "public key": (weights.main, "key", "verify # --key @"),
}
NEVER_ENDS = ("pipe", "device", "loop")


def never_ending(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)


@pytest.mark.parametrize("kind", NEVER_ENDS[:2])
@pytest.mark.parametrize("name", NAMED)
def test_a_command_does_not_wait_for_it(
    name: str,
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    command, file, words = NAMED[name]
    folder = tmp_path / "folder"
    shutil.copytree(BUILTIN_MODELS["builtin:tiny-math"], folder)
    (folder / "publications").mkdir()
    never_ending(folder / file, kind)
    given = [word.replace("@", str(folder / file)).replace("#", str(folder)) for word in words.split()]
    assert command(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert file in line
    assert "a named pipe" in line or "a device" in line or "not a regular file" in line


META = CheckpointMeta(step=1, lineage_number=0, next_epoch=0)
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "checkpoint": ("meta.json", lambda path: read_meta(path.parent)),
    "cut": ("state.json", load_checkpoint_state),
    "lineage": ("lineage", lambda path: open_lineage(path.parent, META)),
    "spending": ("spending.json", lambda path: check_budget(1.0, path.parent)),
    "trace": ("trace.csv", read_trace),
    "viewed settings": ("config.yaml", lambda path: RunFolder(path.parent).tokenizer),
    "bytes": ("x", lambda path: read_bytes(path, 10)),
    "json": ("x", lambda path: read_json(path, 10)),
}


@pytest.mark.parametrize("kind", NEVER_ENDS[:2])
@pytest.mark.parametrize("name", READERS)
def test_a_reader_does_not_wait_for_it(name: str, kind: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    never_ending(tmp_path / file, kind)
    with pytest.raises(UserError, match=f"{file} cannot be read: it is a"):
        read(tmp_path / file)


def test_what_a_file_may_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbftext")
    assert read_text(path, 7) == "text"
    with pytest.raises(DataError, match=r"file cannot be read: it has more than 6 bytes; cut it$"):
        read_bytes(path, 6, advice="cut it")
    with pytest.raises(DataError, match="it is a folder, not a regular file"):
        open_regular(tmp_path, 1)
    never_ending(tmp_path / "loop", "loop")
    with pytest.raises(DataError, match="Too many levels of symbolic links"):
        read_bytes(tmp_path / "loop", 1)
    with pytest.raises(DataError, match="File name too long"):
        read_bytes(tmp_path / ("x" * 300), 1)
    with pytest.raises(DataError, match="null byte"):
        read_bytes(tmp_path / "x\0", 1)
    assert read_bytes(Path("/proc/self/stat"), 1 << 16)  # which says that it is empty
    with pytest.raises(DataError, match="more than 3 bytes"):
        read_bytes(Path("/proc/self/stat"), 3)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "5",
        "[]",
        '{"step": 1}',
        '{"step": "x", "lineage_number": 0, "next_epoch": 0}',
        "[" * 100_000,
        '{"step": 1, "lineage_number": 0, "next_epoch": 0, "guard": 5}',
        "9" * 5000,
        '{"a": 1}',
    ],
)
def test_a_checkpoint_that_says_something_else(text: str, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(DataError, match=r"meta\.json is not (JSON|readable).*remove the folder"):
        read_meta(tmp_path)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 5000, "\u00b2"])
def test_a_lineage_that_is_no_number(text: str, tmp_path: Path) -> None:
    (tmp_path / "lineage").write_text(text)
    with pytest.raises(DataError, match="not a number"):
        open_lineage(tmp_path, META)


@pytest.mark.parametrize(
    "word",
    [
        "run.dir=" + "x" * 300,
        "model.path=" + "x" * 300,
        "weights.store=" + "x" * 300,
        "run.dir=/proc/x",
        "run.resume=" + "x" * 5000,
    ],
)
def test_places_that_cannot_be(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([word]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
