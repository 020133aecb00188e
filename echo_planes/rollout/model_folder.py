"""Model folder of a worker whose machine has none: files from the run, weights from the chain.

The driver sends every worker the model's settings and tokenizer, a few MiB. Where the machine has no such
folder, or one with other files, the worker writes them to a folder of its own. The engine loads its weights
there: the newest version that the worker's weight node has received. A worker would need that version anyway,
so no worker downloads weights from the hub.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from echo_planes.config.hub import cached_folder, is_pinned
from echo_planes.config.schema import Config, ModelConfig
from echo_planes.errors import ClusterError, ModelError, RunError
from echo_planes.weights.tensor_files import SUFFIX

MAX_BYTES = 256 * 1024**2  # the largest tokenizers take 40 MiB
# What vLLM and transformers read of a model folder beside its weights.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.jinja",
    "*.model",
)
_TIED = "lm_head.weight"  # published under this name unless it is the embedding


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model folder without the bits of its weights.

    Args:
        contents: name -> content of its other files.
        weight_files: names of its weight files.
        tensors: names of the tensors in them.
    """

    contents: Mapping[str, bytes]
    weight_files: frozenset[str]
    tensors: frozenset[str] = field(compare=False)

    @classmethod
    def of(cls, folder: Path) -> ModelFiles:
        """Read a folder.

        Raises:
            ModelError: a file cannot be read, or the files are larger than `MAX_BYTES` together.
        """
        try:
            paths = sorted({path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()})
            if sum(path.stat().st_size for path in paths) > MAX_BYTES:
                raise ModelError(
                    f"model.path={folder}: its files {', '.join(PATTERNS)}, which every worker gets, are "
                    f"larger than {MAX_BYTES // 1024**2} MiB; move those that are not the model's"
                )
            contents = {path.name: path.read_bytes() for path in paths}
            weight_files = sorted(folder.glob(f"*{SUFFIX}"))
            tensors = {name for path in weight_files for name in _tensors_in(path)}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model.path={folder}: a file cannot be read: {error}") from error
        return cls(contents, frozenset(path.name for path in weight_files), frozenset(tensors))

    def local(self, config: Config) -> Config:
        """Return the settings with a model folder that this machine has, made if need be.

        Raises:
            ClusterError: the folder cannot be written.
        """
        with suppress(ModelError, OSError):  # a folder that this machine has not, or that it cannot read
            folder = _folder_here(config.model)
            if folder is not None and ModelFiles.of(folder) == self:
                return _with_folder(config, folder) if is_pinned(config.model.path) else config
        try:
            own = Path(tempfile.mkdtemp(prefix="model-"))  # mode 0700
            for name, content in self.contents.items():
                (own / name).write_bytes(content)
        except OSError as error:
            raise ClusterError(f"the model's files cannot be written: {error}; free some space") from error
        return _with_folder(config, own)

    @contextmanager
    def weights_in(self, folder: Path, weights: Path) -> Iterator[None]:
        """Let a model folder hold the weights of a staged safetensors file for the context.

        The file's owner may remove it meanwhile. A link beside it takes no room.

        Raises:
            RunError: the weights lack tensors of the model, or the folder cannot be written.
        """
        missing = self.tensors - _tensors_in(weights) - {_TIED}
        if missing:
            raise RunError(
                f"this machine lacks the model's folder, of which {min(missing)!r} is not trained and so not "
                "published: put the folder at the same path"
            )
        held, link = weights.with_name(f"{weights.name}.held"), folder / f"model{SUFFIX}"
        try:
            os.link(weights, held)
            link.symlink_to(held)
        except OSError as error:
            held.unlink(missing_ok=True)
            raise RunError(f"the staged weights cannot be linked into {folder}: {error}") from error
        try:
            yield
        finally:
            link.unlink()
            held.unlink(missing_ok=True)


def has_weights(folder: Path) -> bool:
    """Return whether a model folder holds weights."""
    return any(folder.glob(f"*{SUFFIX}"))


def _tensors_in(path: Path) -> set[str]:
    """Return the names of the tensors in a safetensors file."""
    with safe_open(path, framework="np") as file:
        return set(file.keys())


def _with_folder(config: Config, folder: Path) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def _folder_here(model: ModelConfig) -> Path | None:
    return cached_folder(model.path) if is_pinned(model.path) else model.folder
