"""A folder's tokenizer is the one that the library's own look-up finds, however it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from echo_planes.config import BUILTIN_MODELS
from echo_planes.data.registry import load_tokenizer
from echo_planes.errors import ModelError

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
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(folder)
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match="cannot be loaded") as told:
        load_tokenizer(folder)
    assert "\n" not in str(told.value)
