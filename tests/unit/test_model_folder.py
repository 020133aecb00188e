"""Model folder of a worker: the machine's own where its files are the run's, else one that the run sent."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_planes.config.schema import BUILTIN_MODELS, Config
from echo_planes.errors import ClusterError, ModelError, RunError
from echo_planes.rollout import model_folder
from echo_planes.rollout.model_folder import ModelFiles, has_weights

MODEL = BUILTIN_MODELS["builtin:tiny-math"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which a worker makes its own."""
    made = tmp_path / "scratch"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


def config_of(path: Path | str) -> Config:
    return Config.model_validate({"model": {"path": str(path)}})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_with_the_runs_files_is_used(folder: Path, scratch: Path) -> None:
    config = config_of(folder)
    assert ModelFiles.of(folder).local(config) == config
    (folder / "README.md").write_text("not the model's")
    (folder / "trainer_state.json").write_text("{}")
    assert ModelFiles.of(MODEL).local(config) == config
    assert not any(scratch.iterdir())


@pytest.mark.parametrize(
    "damage",
    ["gone", "other tokenizer", "one file less", "no weights", "other weight files", "not to be read"],
)
def test_else_the_worker_makes_its_own(
    folder: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
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
        case "other weight files":
            (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        case "not to be read":

            def refuse(_: object) -> ModelFiles:
                raise PermissionError(13, "Permission denied", str(folder))

            monkeypatch.setattr(ModelFiles, "of", refuse)
    config = config_of(folder)
    local = files.local(config)
    monkeypatch.undo()
    (own,) = scratch.iterdir()
    assert local.model.folder == own
    assert local.model_copy(update={"model": config.model}) == config
    expected = contents(MODEL)
    del expected["model.safetensors"]
    assert contents(own) == expected
    assert not has_weights(own)
    assert own.stat().st_mode & 0o777 == 0o700
    assert ModelFiles.of(own).contents == files.contents


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_model_of_the_hub_is_taken_from_the_cache_or_the_run(
    folder: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """The chain brings the weights to every worker: it downloads none."""

    def fetch(name: str) -> Path:
        raise AssertionError("a worker asked the hub")

    monkeypatch.setattr("echo_planes.config.schema.fetch", fetch)
    monkeypatch.setattr(model_folder, "cached_folder", lambda name: folder if is_cached else None)
    config = config_of(f"org/tiny@{'a' * 40}")
    local = ModelFiles.of(MODEL).local(config)
    assert local.model.folder == folder if is_cached else local.model.folder.parent == scratch


def test_the_list_of_weight_files_is_not_sent(folder: Path) -> None:
    """The weights come as one file, which that list does not name, and vLLM would read none."""
    files = ModelFiles.of(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80pickle")
    assert ModelFiles.of(folder) == files


def test_files_too_large_to_send_are_refused(folder: Path) -> None:
    with (folder / "tokenizer.model").open("wb") as file:
        os.truncate(file.fileno(), model_folder.MAX_BYTES)
    with pytest.raises(ModelError, match=rf"model\.path={folder}: .*larger than 256 MiB; move"):
        ModelFiles.of(folder)


def test_no_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ClusterError, match=r"cannot be written.*free some space"):
        ModelFiles.of(MODEL).local(config_of("/nowhere"))


def test_weights_stay_while_they_are_read(tmp_path: Path) -> None:
    """The weight node removes its file after staging two newer ones, while the engine still reads it."""
    own, node = tmp_path / "own", tmp_path / "node"
    own.mkdir()
    node.mkdir()
    staged = node / "staged.v3"
    shutil.copy(MODEL / "model.safetensors", staged)
    with ModelFiles.of(MODEL).weights_in(own, staged):
        staged.unlink()
        assert (own / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    assert not has_weights(own)
    assert not any(node.iterdir())


def test_a_tensor_that_is_never_published_is_missed(folder: Path, tmp_path: Path) -> None:
    """Engines would compute with a value of their own, and digests are of what is published."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "staged")
    save_file({**tensors, "lm_head.weight": torch.ones(1)}, folder / "model.safetensors")
    with ModelFiles.of(folder).weights_in(folder / "..", tmp_path / "staged"):  # the embedding, if it is tied
        pass
    save_file({**tensors, "model.scale": torch.ones(1)}, folder / "model.safetensors")
    missing = ModelFiles.of(folder).weights_in(folder / "..", tmp_path / "staged")
    with pytest.raises(RunError, match=r"'model\.scale' is not trained and so not published"), missing:
        pass


def test_weights_that_cannot_be_linked_are_told(tmp_path: Path) -> None:
    shutil.copy(MODEL / "model.safetensors", tmp_path / "staged")
    with (
        pytest.raises(RunError, match="cannot be linked into"),
        ModelFiles.of(MODEL).weights_in(tmp_path / "nowhere", tmp_path / "staged"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["staged"]
