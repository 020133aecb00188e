"""Model folder of a worker: the machine's own where its files are the run's, else one that the run sent."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from echo_planes.config.schema import BUILTIN_MODELS, Config
from echo_planes.errors import ClusterError, ModelError
from echo_planes.rollout import model_folder
from echo_planes.rollout.model_folder import ModelFiles, has_weights, with_weights

MODEL = BUILTIN_MODELS["builtin:tiny-math"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a worker makes its folder."""
    made = tmp_path / "scratch"
    made.mkdir()
    monkeypatch.setattr(model_folder, "staging_parent", lambda: str(made))
    return made


def config_of(path: Path | str) -> Config:
    return Config.model_validate({"model": {"path": str(path)}})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_with_the_runs_files_is_used(folder: Path, scratch: Path) -> None:
    config = config_of(folder)
    assert ModelFiles.of(folder).local(config) is config
    (folder / "README.md").write_text("not the model's")
    assert ModelFiles.of(MODEL).local(config) is config
    assert not any(scratch.iterdir())


@pytest.mark.parametrize("damage", ["gone", "other tokenizer", "one file less", "no weights"])
def test_else_the_worker_makes_its_own(folder: Path, scratch: Path, damage: str) -> None:
    files = ModelFiles.of(folder)
    match damage:
        case "gone":
            shutil.rmtree(folder)
        case "other tokenizer":
            path = folder / "tokenizer.json"
            path.write_bytes(path.read_bytes() + b" ")
        case "one file less":
            (folder / "tokenizer_config.json").unlink()
        case "no weights":
            (folder / "model.safetensors").unlink()
    config = config_of(folder)
    local = files.local(config)
    (own,) = scratch.iterdir()
    assert local.model.folder == own
    assert local.model_copy(update={"model": config.model}) == config
    expected = contents(MODEL)
    del expected["model.safetensors"]
    assert contents(own) == expected
    assert not has_weights(own)
    assert own.stat().st_mode & 0o777 == 0o700
    assert ModelFiles.of(own) == files


def test_a_hub_that_the_machine_does_not_reach(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str) -> Path:
        raise ModelError(f"model.path={name}: the hub does not give it")

    monkeypatch.setattr("echo_planes.config.schema.fetch", fetch)
    local = ModelFiles.of(MODEL).local(config_of(f"org/tiny@{'a' * 40}"))
    assert local.model.folder.parent == scratch


def test_the_list_of_weight_files_is_not_sent(folder: Path) -> None:
    """The weights come as one file, which that list does not name, and vLLM would read none."""
    files = ModelFiles.of(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80pickle")
    assert ModelFiles.of(folder) == files


def test_files_too_large_to_send_are_refused(folder: Path) -> None:
    with (folder / "traces.json").open("wb") as file:
        os.truncate(file.fileno(), model_folder.MAX_BYTES)
    with pytest.raises(ModelError, match=rf"model\.path={folder}: .*larger than 256 MiB; move"):
        ModelFiles.of(folder)


def test_no_room_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "staging_parent", lambda: str(folder / "nowhere"))
    with pytest.raises(ClusterError, match=r"cannot be written.*free some space"):
        ModelFiles.of(folder).local(config_of("/nowhere"))


@pytest.mark.parametrize("same_file_system", [True, False])
def test_weights_stay_while_they_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_file_system: bool
) -> None:
    """The weight node removes its file after staging two newer ones, while the engine still reads it."""
    own, staged = tmp_path / "own", tmp_path / "staged"
    own.mkdir()
    shutil.copy(folder / "model.safetensors", staged)

    def refuse(*_: object) -> None:
        raise OSError("Invalid cross-device link")

    if not same_file_system:
        monkeypatch.setattr(os, "link", refuse)

    async def read() -> bytes:
        async with with_weights(own, staged):
            staged.unlink()
            return (own / "model.safetensors").read_bytes()

    assert asyncio.run(read()) == (MODEL / "model.safetensors").read_bytes()
    assert not has_weights(own)


def test_weights_that_cannot_be_copied_are_told(folder: Path, tmp_path: Path) -> None:
    async def read() -> None:
        async with with_weights(tmp_path, tmp_path / "nowhere"):
            raise AssertionError("there are none")

    with pytest.raises(ClusterError, match=r"cannot be copied.*free some space"):
        asyncio.run(read())
    assert not has_weights(tmp_path)
