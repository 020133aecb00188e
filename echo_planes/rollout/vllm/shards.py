"""Location of the weights in a vLLM engine over several devices, and the messages between its ranks.

Tensor parallelism cuts matrices by columns or rows and vocabulary tables by tokens; pipeline parallelism
gives each rank some of the layers. Before any install, `check_loaded` compares the locations with the files
from which vLLM loaded the model, element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from echo_planes.errors import RunError, WeightsError
from echo_planes.types import ByteArray, TensorSpec
from echo_planes.weights.digest import BIT_DTYPES, bit_tensor
from echo_planes.weights.shards import Shard

WAIT_S = 120.0  # longest wait of one rank for another, whose longest step is the digest of one tensor


@dataclass(frozen=True)
class Piece:
    """Published tensor, or the shard of it that this rank holds."""

    name: str  # in the checkpoint
    view: torch.Tensor  # shares the memory of the live parameter
    module: torch.nn.Module
    leaf: str  # "weight" or "bias"
    part: int  # index among the tensors that are fused into the module's parameter


def hugging_face_pieces(model: torch.nn.Module) -> Iterator[Piece]:
    """Yield every parameter of a vLLM model under its checkpoint name, as views that share its memory.

    Fused layers are cut by the model's `packed_modules_mapping`, the padding of vocabulary tables is left
    out, and a tied tensor appears once, under its first name. In an engine over several devices the pieces
    are the shards of this rank.

    Raises:
        WeightsError: a parameter cannot be mapped; the message names it.
    """
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for full_name, parameter in model.named_parameters():
        module_name, _, leaf = full_name.rpartition(".")
        parent, _, child = module_name.rpartition(".")
        module = model.get_submodule(module_name)
        tensor = parameter.data
        if hasattr(module, "org_vocab_size"):
            tensor = tensor[: module.num_org_embeddings_per_partition]
        _check_mappable(full_name, leaf, module, tensor)
        parts = packed.get(child, [child])
        if list(parts) == [child]:
            yield Piece(full_name, tensor, module, leaf, 0)
            continue
        sizes = [size // module.tp_size for size in getattr(module, "output_sizes", [])]
        if len(sizes) != len(parts) or sum(sizes) != tensor.shape[0]:
            raise WeightsError(
                f"cannot cut parameter {full_name} of shape {tuple(tensor.shape)} into {', '.join(parts)}: "
                f"its layer {type(module).__name__} says {sizes}"
            )
        for part, piece in enumerate(torch.split(tensor, sizes)):
            name = ".".join(filter(None, (parent, parts[part], leaf)))
            yield Piece(name, piece, module, leaf, part)


def _check_mappable(full_name: str, leaf: str, module: torch.nn.Module, tensor: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if leaf not in ("weight", "bias") or dtype not in BIT_DTYPES or not tensor.is_contiguous():
        raise WeightsError(
            f"cannot map parameter {full_name} ({dtype}, shape {tuple(tensor.shape)}, layer "
            f"{type(module).__name__}) to a Hugging Face name: only unquantized dense layers are supported"
        )


def placed(pieces: Iterable[Piece]) -> dict[str, tuple[TensorSpec, Shard]]:
    """Return, by name, the whole tensor of each piece and the location of the piece's shard in it."""
    found = {}
    for piece in pieces:
        shape, dim, start = whole(piece)
        dtype = str(piece.view.dtype).removeprefix("torch.")
        shard = Shard.along(shape, dim, start, start + piece.view.shape[dim])
        found[piece.name] = TensorSpec(piece.name, dtype, shape), shard
    return found


def whole(piece: Piece) -> tuple[tuple[int, ...], int, int]:
    """Return the whole tensor's shape, the dimension of the cut, and the start of this rank's shard."""
    module: Any = piece.module
    dim, num_shards, index = 0, 1, 0
    if isinstance(module, VocabParallelEmbedding):  # its shards differ in length: the last is shorter
        shape = (module.org_vocab_size, *piece.view.shape[1:])
        return shape, 0, module.shard_indices.org_vocab_start_index
    if isinstance(module, QKVParallelLinear) and piece.part > 0:
        replicas = module.num_kv_head_replicas  # ranks with the same keys and values
        num_shards, index = module.tp_size // replicas, module.tp_rank // replicas
    elif isinstance(module, ColumnParallelLinear):
        num_shards, index = module.tp_size, module.tp_rank
    elif isinstance(module, RowParallelLinear) and piece.leaf == "weight":
        dim, num_shards, index = 1, module.tp_size, module.tp_rank
    size = piece.view.shape[dim]
    whole = list(piece.view.shape)
    whole[dim] = size * num_shards
    return tuple(whole), dim, index * size


def check_loaded(
    folder: Path, pieces: Iterable[Piece], where: Mapping[str, tuple[TensorSpec, Shard]]
) -> None:
    """Check that each shard equals the model folder's values at its location, which proves the location.

    No later check finds a wrong location: an install writes there, and the digest reads from there.

    Raises:
        WeightsError: a shard differs, or the folder does not have its tensor; the message names it.
    """
    views = {piece.name: piece.view for piece in pieces}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in sorted(views.keys() & set(stored.keys())):
                view, (spec, shard) = views.pop(name), where[name]
                loaded = bit_tensor(stored.get_tensor(name).to(view.dtype))
                if loaded.shape != spec.shape or not np.array_equal(
                    shard.cut(loaded.bits), bit_tensor(view).bits
                ):
                    raise WeightsError(
                        f"tensor {name!r} was not loaded where its shards were thought to lie ({shard} of "
                        f"{spec.shape}): this model cannot be served by several ranks; set "
                        "tensor_parallel_size and pipeline_parallel_size to 1"
                    )
    if views:
        raise WeightsError(
            f"tensor {min(views)!r} is in no *.safetensors file of {folder}: where its shards lie cannot be "
            "checked; set tensor_parallel_size and pipeline_parallel_size to 1"
        )


class GlooRanks:
    """All ranks of an engine, as `weights.shards.Ranks`, over a separate gloo group on the CPU."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        self._size = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        self._broken = ""

    @property
    def rank(self) -> int:
        return self._rank

    def tell(self, message: str) -> list[str]:
        mine = np.frombuffer(message.encode(), np.uint8)
        lengths = [int(length) for length in self._gathered(np.array([mine.size]))]
        if not any(lengths):
            return [""] * self._size
        padded = np.zeros(max(lengths), np.uint8)
        padded[: mine.size] = mine
        told = self._gathered(padded)
        return [row[:length].tobytes().decode() for row, length in zip(told, lengths, strict=True)]

    def collect(self, part: ByteArray, sizes_bytes: Sequence[int]) -> list[ByteArray]:
        try:
            self._check()
            if self._rank:
                if part.size:
                    dist.send(torch.from_numpy(part), 0, self._group)
                return []
            parts = [part]
            for rank in range(1, self._size):
                parts.append(np.empty(sizes_bytes[rank], np.uint8))
                if sizes_bytes[rank]:
                    dist.recv(torch.from_numpy(parts[rank]), rank, self._group)
            return parts
        except RuntimeError as error:
            raise self._lost(error) from error

    def _gathered(self, row: np.ndarray) -> list[np.ndarray]:
        try:
            self._check()
            rows = [np.empty_like(row) for _ in range(self._size)]
            dist.all_gather([torch.from_numpy(r) for r in rows], torch.from_numpy(row), self._group)
            return rows
        except RuntimeError as error:
            raise self._lost(error) from error

    def _check(self) -> None:
        if self._broken:
            raise RuntimeError(self._broken)

    def _lost(self, error: RuntimeError) -> RunError:
        self._broken = self._broken or str(error)
        return RunError(
            f"rank {self._rank} of the engine: another rank did not answer within {WAIT_S:g} s, or is gone "
            f"({self._broken}); restart this engine"
        )
