"""Export of a published version as a Hugging Face model folder, for transformers, vLLM and `model.path`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from echo_planes.config.files import MODEL_JSON_BYTES, read_json
from echo_planes.errors import DataError
from echo_planes.weights.codec.dense import encode_full
from echo_planes.weights.digest import state_digest
from echo_planes.weights.receiver import algorithm_of
from echo_planes.weights.store.replay import State
from echo_planes.weights.tensor_files import SUFFIX, load_tensors
from echo_planes.weights.wire.manifest import SEGMENT_BYTES

FILE_BYTES = 5 * 10**9  # of one file of weights; larger models get several
WEIGHTS = (SUFFIX, ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
DTYPE_KEYS = ("dtype", "torch_dtype")  # in config.json: of transformers 5, and of earlier ones


@dataclass(frozen=True, slots=True)
class Exported:
    """Figures of a finished export."""

    num_tensors: int
    num_files: int
    num_bytes: int  # of weights


def export_state(
    state: State, digest: str, model: Path, folder: Path, *, file_bytes: int = FILE_BYTES
) -> Exported:
    """Write a state as a model folder: weights, and the other files of the model that was trained.

    `folder` appears when it is complete and its weights, read back, have the digest of the publication.

    Args:
        state: the tensors under the names of the model's own files.
        digest: the manifest's.
        model: the model folder that the run began with.
        folder: must not exist.
        file_bytes: most bytes of weights in one file, unless a single tensor is larger.

    Raises:
        DataError: `folder` exists or cannot be written, `model` has no config.json, or what was written does
            not read back.
    """
    if folder.exists():
        raise DataError(f"{folder} exists; give the name of a new folder")
    settings = read_json(model / "config.json", MODEL_JSON_BYTES)
    if not isinstance(settings, dict):
        raise DataError(f"{model / 'config.json'} holds no settings; restore it")
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)  # of an export that was killed
        part.mkdir(parents=True)
        for file in sorted(model.iterdir()):
            if file.is_file() and not file.name.endswith(WEIGHTS):
                shutil.copyfile(file, part / file.name)
        (part / "config.json").write_text(json.dumps(_in_bf16(settings), indent=2) + "\n")
        names = _write_weights(state, part, file_bytes)
        found = state_digest(load_tensors(part), algorithm_of(digest))
        if found != digest:
            raise DataError(f"the weights in {part} have digest {found}, not {digest}: is the disk sound?")
        part.rename(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Exported(len(state), len(set(names.values())), sum(t.nbytes for t in state.values()))


def _in_bf16(settings: dict[str, object]) -> dict[str, object]:
    """Return the settings of a model with weights in bf16, which is what is published."""
    changed: dict[str, object] = {"dtype": "bfloat16"}
    for key, value in settings.items():
        if isinstance(value, dict) and any(name in value for name in DTYPE_KEYS):
            value = value | {name: "bfloat16" for name in DTYPE_KEYS if name in value}
        changed[key] = "bfloat16" if key in DTYPE_KEYS else value
    return changed


def _write_weights(state: State, folder: Path, file_bytes: int) -> dict[str, str]:
    """Write the tensors, and an index if there are several files; return the file of each tensor."""
    files = list(_files(state, file_bytes))
    names: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}{SUFFIX}" if len(files) > 1 else f"model{SUFFIX}"
        with (folder / name).open("wb") as file:
            for segment in encode_full(None, tensors, None, SEGMENT_BYTES):
                file.write(segment.payload.data)
        names |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / f"model{SUFFIX}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _files(state: State, file_bytes: int) -> Iterator[State]:
    tensors: State = {}
    size = 0
    for name, tensor in state.items():
        if tensors and size + tensor.nbytes > file_bytes:
            yield tensors
            tensors, size = {}, 0
        tensors[name] = tensor
        size += tensor.nbytes
    yield tensors
