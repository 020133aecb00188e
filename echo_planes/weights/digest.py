"""Canonical digests of weights, taken over bit patterns: -0.0, NaN payloads and dtypes all count."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, TensorSpec

if TYPE_CHECKING:
    import torch

BitArray = npt.NDArray[np.unsignedinteger[Any]]

# Little-endian on every host, so that equal weights have equal digests and payloads everywhere.
BIT_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<u2"),
    "float32": np.dtype("<u4"),
}
# By algorithm: the prefix of its digests, and the constructor of its hash.
_HASHERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "xxh3": ("xxh3", xxhash.xxh3_128),
    "blake3": ("b3", blake3),
    "sha256": ("sha256", hashlib.sha256),
}


@dataclass(frozen=True, slots=True, eq=False)
class BitTensor:
    """A tensor as the bit pattern of its elements.

    `bits` has shape (elements,), contiguous, in C order; uint16 for bfloat16 and float16, uint32 for float32.
    It may be a view of memory that later changes: copy it to keep it.

    Raises:
        WeightsError: unknown dtype, or bits that do not fit dtype and shape.
    """

    bits: BitArray
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        expected = BIT_DTYPES.get(self.dtype)
        if expected is None:
            raise WeightsError(f"dtype {self.dtype!r} is not one of {', '.join(BIT_DTYPES)}")
        flat = self.bits.ndim == 1 and self.bits.flags.c_contiguous
        if not flat or self.bits.dtype != expected or self.bits.size != math.prod(self.shape):
            raise WeightsError(
                f"bits of shape {self.bits.shape} and type {self.bits.dtype} do not make a {self.dtype} "
                f"tensor of shape {self.shape}"
            )

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, self.dtype, self.shape)


def run_of(tensor: BitTensor, start: int, stop: int | None) -> BitTensor:
    """Return a view of the flat elements [start, stop); of all, in their shape, for 0 and None."""
    if start == 0 and stop is None:
        return tensor
    bits = tensor.bits[start:stop]
    return BitTensor(bits, tensor.dtype, bits.shape)


def bit_tensor(tensor: torch.Tensor) -> BitTensor:
    """Return the bits of a torch tensor. They share its memory if it is contiguous and on the CPU.

    Raises:
        WeightsError: a dtype other than bfloat16, float16 and float32.
    """
    import torch  # imported here, so that processes without torch tensors do not load torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in BIT_DTYPES:
        raise WeightsError(f"dtype {dtype!r} is not one of {', '.join(BIT_DTYPES)}")
    unsigned = torch.uint32 if tensor.element_size() == 4 else torch.uint16
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(unsigned)
    return BitTensor(flat.numpy(), dtype, tuple(tensor.shape))


def state_digest(tensors: Mapping[str, BitTensor], algorithm: str = "xxh3") -> str:
    """Digest a whole state: names, dtypes, shapes and bits, in order of names. "<prefix>:" + hex digits.

    xxh3 (128 bits) tells versions apart and finds damage, but does not detect deliberately forged weights.
    blake3 (prefix "b3") and sha256 do, provided that the digest itself is signed.

    Raises:
        WeightsError: an unknown algorithm.
    """
    hasher = StateHasher(algorithm)
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.begin(name, tensor.dtype, tensor.shape)
        hasher.update(tensor.bits)
    return hasher.digest()


class StateHasher:
    """Incremental `state_digest`: `begin` each tensor in order of names, then `update` with all its bits.

    Raises:
        WeightsError: an unknown algorithm, names out of order, or more or fewer bits than a tensor has.
    """

    def __init__(self, algorithm: str = "xxh3") -> None:
        if algorithm not in _HASHERS:
            raise WeightsError(f"digest algorithm {algorithm!r} is not one of {', '.join(_HASHERS)}")
        self._prefix, make = _HASHERS[algorithm]
        self._hash = make()
        self._name: str | None = None
        self._missing = 0  # elements of the current tensor that are still to come

    def begin(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Begin the next tensor. A tensor without elements must be begun too."""
        self._check_whole()
        if self._name is not None and name <= self._name:
            raise WeightsError(f"tensor {name!r} cannot be digested after {self._name!r}")
        self._name, self._missing = name, math.prod(shape)
        # JSON never contains a NUL byte, so header and bits cannot be mistaken for one another.
        self._hash.update(json.dumps([name, dtype, list(shape)]).encode() + b"\0")

    def update(self, bits: BitArray) -> None:
        """Add the tensor's next bits, shape (elements,)."""
        if bits.size > self._missing:
            raise WeightsError(f"tensor {self._name!r} has {bits.size - self._missing} elements too many")
        self._missing -= bits.size
        self._hash.update(np.ascontiguousarray(bits).view(np.uint8).data)

    def digest(self) -> str:
        """Return the digest of all tensors so far, equal to their `state_digest`."""
        self._check_whole()
        return f"{self._prefix}:{self._hash.hexdigest()}"

    def _check_whole(self) -> None:
        if self._missing:
            raise WeightsError(f"{self._missing} elements of tensor {self._name!r} were not digested")


def bytes_digest(data: ByteArray) -> str:
    """Return the BLAKE3 digest of raw bytes: "b3:" + 64 hex digits."""
    return f"b3:{blake3(np.ascontiguousarray(data).data).hexdigest()}"
