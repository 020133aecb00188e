"""Digests of a run's inputs: the files behind an unchanged path may have changed.

A new run writes them to `inputs.json` in its folder, and every resume compares its own with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from echo_planes.errors import ConfigError, DataError, ModelError
from echo_planes.reporting.metrics import write_atomic
from echo_planes.types import Prompt

INPUTS_FILE = "inputs.json"
_WHAT = {
    "model": "the files of model.path={model}",
    "prompts": "the first prompts of the task (its data, its code, the tokenizer, or run.date)",
}


def digest_of_prompts(prompts: Iterable[Prompt]) -> str:
    """Return a SHA-256 hex digest of the indices, tokens and answers of prompts, in order."""
    total = hashlib.sha256()
    for prompt in prompts:
        total.update(repr((prompt.index, tuple(prompt.token_ids), prompt.answer)).encode("utf-8", "replace"))
    return total.hexdigest()


def digest_of_model(folder: Path) -> str:
    """Return a digest of a model's settings, its tokenizer, and the names and sizes of its weight files.
    To read the weights would take minutes, and a resume loads them from its checkpoint.

    Raises:
        ModelError: a file cannot be read.
    """
    total = hashlib.sha256()
    try:
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            is_weights = path.suffix == ".safetensors"
            if is_weights or path.suffix in (".json", ".model", ".txt", ".jinja"):
                content = str(path.stat().st_size).encode() if is_weights else path.read_bytes()
                total.update(path.name.encode() + hashlib.sha256(content).digest())
    except OSError as error:
        raise ModelError(f"model.path={folder}: {error.filename} cannot be read: {error.strerror}") from error
    return total.hexdigest()


def keep_inputs(folder: Path, inputs: Mapping[str, str]) -> None:
    """Write inputs.json for a new run; a resumed run keeps its own.

    Raises:
        ClusterError: the disk is full.
    """
    if not (folder / INPUTS_FILE).exists():
        write_atomic(folder / INPUTS_FILE, json.dumps(dict(inputs), indent=2) + "\n")


def check_inputs(folder: Path, inputs: Mapping[str, str], model: str) -> None:
    """Check that a resume finds the inputs that its run started with, as far as inputs.json records them.

    Raises:
        ConfigError: an input has changed.
        DataError: inputs.json is damaged.
    """
    path = folder / INPUTS_FILE
    if not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name, digest in inputs.items() if before.get(name, digest) != digest]
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged: put the original back, or remove it to resume without a comparison"
        ) from error
    if changed:
        raise ConfigError(
            f"run.resume={folder}: {_WHAT[changed[0]].format(model=model)} are not those that the run was "
            "started with; put them back, or start a new run"
        )
