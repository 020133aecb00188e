"""Model folder of a worker whose machine has none: files from the run, weights from the chain.

The driver sends every worker the model's settings and tokenizer, a few MiB. Where the machine has no such
folder, or one with other files, the worker writes them to a folder of its own. The engine loads its weights
there: the newest version that the worker's weight node has received.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from echo_planes.config.hub import SMALL_FILES
from echo_planes.config.schema import Config
from echo_planes.errors import ClusterError, ModelError
from echo_planes.rollout.vllm.environment import staging_parent

MAX_BYTES = 256 * 1024**2  # the largest tokenizers take 40 MiB
WEIGHTS = "*.safetensors"
_INDEX = "*.safetensors.index.json"  # names the files of weights, which differ in a worker's own folder


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model folder without its weights: name -> content."""

    contents: Mapping[str, bytes]

    @classmethod
    def of(cls, folder: Path) -> ModelFiles:
        """Read them.

        Raises:
            ModelError: they cannot be read, or are larger than `MAX_BYTES` together.
        """
        paths = {path for pattern in SMALL_FILES for path in folder.glob(pattern) if path.is_file()}
        paths -= set(folder.glob(_INDEX))
        try:
            if sum(path.stat().st_size for path in paths) > MAX_BYTES:
                raise ModelError(
                    f"model.path={folder}: its files {', '.join(SMALL_FILES)}, which every worker gets, are "
                    f"larger than {MAX_BYTES // 1024**2} MiB; move those that are not the model's"
                )
            return cls({path.name: path.read_bytes() for path in sorted(paths)})
        except OSError as error:
            raise ModelError(
                f"model.path={folder}: {error.filename} cannot be read: {error.strerror}"
            ) from error

    def local(self, config: Config) -> Config:
        """Return the settings with a model folder that this machine has, made if need be.

        Raises:
            ClusterError: the folder cannot be written.
        """
        with suppress(ModelError):  # a hub that this machine does not reach, or a folder that it cannot read
            folder = config.model.folder
            if has_weights(folder) and ModelFiles.of(folder) == self:
                return config
        try:
            own = Path(tempfile.mkdtemp(prefix="model-", dir=staging_parent()))  # mode 0700
            for name, content in self.contents.items():
                (own / name).write_bytes(content)
        except OSError as error:
            raise ClusterError(f"the model's files cannot be written: {error}; free some space") from error
        return config.model_copy(update={"model": config.model.model_copy(update={"path": str(own)})})


def has_weights(folder: Path) -> bool:
    """Return whether a model folder holds weights."""
    return any(folder.glob(WEIGHTS))


@asynccontextmanager
async def with_weights(folder: Path, weights: Path) -> AsyncIterator[None]:
    """Let a model folder hold the weights of a safetensors file, which may be removed, for the context.

    Raises:
        ClusterError: they cannot be copied. Where both lie in shared memory, as they do if it has room, a
            link takes the place of a copy.
    """
    held = folder / "model.safetensors"
    try:
        try:
            os.link(weights, held)
        except OSError:
            await asyncio.to_thread(shutil.copyfile, weights, held)
    except OSError as error:
        held.unlink(missing_ok=True)
        raise ClusterError(f"the weights cannot be copied to {held}: {error}; free some space") from error
    try:
        yield
    finally:
        held.unlink()
