"""Readers of safetensors files and model folders as bit tensors: files are mapped into memory, not copied."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from echo_planes.config.files import check_regular
from echo_planes.errors import DataError, WeightsError
from echo_planes.types import ByteArray, TensorSpec
from echo_planes.weights.digest import BIT_DTYPES, BitArray, BitTensor

T = TypeVar("T")
SUFFIX = ".safetensors"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_LENGTH_BYTES = 8  # the header's length, little-endian, before the header
_METADATA = "__metadata__"


def specs_in(head: ByteArray, total_bytes: int) -> dict[str, TensorSpec]:
    """Return the specs of the tensors of a safetensors file, in the order of the header.

    Args:
        head: first bytes of the file with at least the whole header, shape (bytes,).
        total_bytes: size of the whole file.

    Raises:
        WeightsError: no such header, other dtypes than bf16, fp16 and fp32, or sizes beyond the file's.
    """
    return {name: spec for name, (spec, _) in _header(head, total_bytes).items()}


def load_tensors(path: Path) -> dict[str, BitTensor]:
    """Return the tensors of a safetensors file, or of all such files in a model folder.

    Raises:
        DataError: no such file, a folder without safetensors files, or a file that is unreadable or invalid.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no {SUFFIX} files; give a file, a model folder or a store")
    tensors: dict[str, BitTensor] = {}
    for file in files:
        tensors |= _mapped(file, tensors_in)
    return tensors


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a file of a model folder, to be read in parts. The file may change meanwhile."""

    path: Path
    spec: TensorSpec
    offset_bytes: int

    def read(self, start: int, stop: int) -> BitArray:
        """Return a copy of elements [start, stop).

        Raises:
            DataError: the file is gone or has become shorter.
        """
        dtype = BIT_DTYPES[self.spec.dtype]
        offset_bytes = self.offset_bytes + start * dtype.itemsize
        try:
            bits: BitArray = np.fromfile(self.path, dtype, stop - start, offset=offset_bytes)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        if bits.size != stop - start:
            raise DataError(f"{self.path} has become shorter: tensor {self.spec.name!r} is not whole")
        return bits


def places_in(folder: Path) -> dict[str, Place]:
    """Return the place of each tensor of a model folder, by name. Only the files' headers are read.

    Raises:
        DataError: a file is unreadable or invalid.
    """
    places: dict[str, Place] = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        header = _mapped(file, lambda data: _header(data, data.size))
        places |= {name: Place(file, spec, start) for name, (spec, start) in header.items()}
    return places


def _mapped(file: Path, use: Callable[[ByteArray], T]) -> T:
    """Return what `use` makes of a safetensors file's bytes.

    Raises:
        DataError: the file is unreadable or invalid.
    """
    check_regular(file, sys.maxsize, advice="give a safetensors file")
    try:
        return use(np.memmap(file, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, WeightsError) as error:  # ValueError: an empty file cannot be mapped
        raise DataError(f"{file} is not a safetensors file: {error}") from error


def tensors_in(data: ByteArray) -> dict[str, BitTensor]:
    """Return the tensors of one safetensors byte string, as views into it that may be unaligned.

    Raises:
        WeightsError: as `specs_in`.
    """
    tensors = {}
    for name, (spec, start) in _header(data, data.size).items():
        dtype = BIT_DTYPES[spec.dtype]
        raw = data[start : start + math.prod(spec.shape) * dtype.itemsize]
        tensors[name] = BitTensor(raw.view(dtype), spec.dtype, spec.shape)
    return tensors


def _header(head: ByteArray, total_bytes: int) -> dict[str, tuple[TensorSpec, int]]:
    """Return the spec and the offset in the file of each tensor, by name."""
    length = int.from_bytes(head[:_LENGTH_BYTES].tobytes(), "little")
    first = _LENGTH_BYTES + length
    if head.size < _LENGTH_BYTES or first > head.size:
        raise WeightsError(f"its header of {length} bytes is not within the {head.size} bytes at hand")
    try:
        fields = json.loads(head[_LENGTH_BYTES:first].tobytes())
        return {
            name: _entry(name, entry, first, total_bytes)
            for name, entry in fields.items()
            if name != _METADATA
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"its header cannot be read: {type(error).__name__}: {error}") from error


def _entry(name: str, fields: Mapping[str, Any], first: int, total_bytes: int) -> tuple[TensorSpec, int]:
    code, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise WeightsError(f"tensor {name!r} is {code}; only {', '.join(_DTYPES)} are weights here")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise WeightsError(f"tensor {name!r} has sizes that are no counts")
    if stop - start != math.prod(shape) * BIT_DTYPES[dtype].itemsize or first + stop > total_bytes:
        raise WeightsError(f"tensor {name!r}: {shape} does not fit bytes [{start}, {stop})")
    return TensorSpec(name, dtype, shape), first + start
