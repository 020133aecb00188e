"""Scan for changed weights on the accelerator, so that only the changes are copied to the host.

A `DeviceMirror` keeps the newest bits of every tensor twice. The copy in host memory is digested and encoded;
the copy on the device is compared with the live tensor. About one weight in a hundred changes between
publications, so only a few per cent of the bytes leave the accelerator. The speed on a GPU has not been
measured: the tests show only that the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from echo_planes.weights.codec.changes import Change, apply, index_dtype
from echo_planes.weights.digest import BIT_DTYPES, BitTensor, bit_tensor

# Bounds the memory of a scan on the device: a mask, and positions (first of 8, then of 4 bytes) and values
# of at most a third of the piece (one that changed more is sent whole). About 100 MB for 16-bit weights.
PIECE_ELEMENTS = 1 << 24


def changes(
    name: str, old: torch.Tensor, new: torch.Tensor, piece_elements: int = PIECE_ELEMENTS
) -> Iterator[Change]:
    """Yield the changes that turn `old` into `new`, in host memory: one per differing piece, in rising order.

    A piece comes whole (`indices` None) where positions and values would take at least as many bytes. Bits
    are compared, not numbers, so -0.0 and NaNs count.

    Args:
        old, new: bits as signed integers, shape (elements,), on one device; neither is written to. Where
            `new` lies on the CPU, a change may share its memory: use each change before taking the next.
        piece_elements: elements scanned at once.
    """
    position = torch.int32 if index_dtype(new.numel()) == "int32" else torch.int64
    unsigned = BIT_DTYPES["bfloat16" if new.element_size() == 2 else "float32"]
    change_bytes = position.itemsize + new.element_size()
    for start in range(0, new.numel(), piece_elements):
        piece = new[start : start + piece_elements]
        differs = piece != old[start : start + piece_elements]
        count = int(differs.sum())
        if count == 0:
            continue
        if count * change_bytes >= piece.numel() * piece.element_size():
            yield Change(name, start, None, piece.cpu().numpy().view(unsigned))
            continue
        where = differs.nonzero().squeeze(1)
        values = piece[where].cpu().numpy().view(unsigned)
        indices = where.add_(start).to(position).cpu().numpy()
        yield Change(name, int(indices[0]), indices, values)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Newest bits of one tensor, equal on host and device."""

    host: BitTensor
    device: torch.Tensor  # shape (elements,), signed integers of the width of the bits


class DeviceMirror:
    """Host bits of tensors on one device, updated by the changes since the previous call.

    A mirror takes as much memory on the device as the tensors themselves, plus that of one piece's scan.
    Without room for that, the mirror copies a tensor whole, as at the first call and after an error.

    Args:
        piece_elements: elements scanned at once; other than `PIECE_ELEMENTS` in tests only.
    """

    def __init__(self, piece_elements: int = PIECE_ELEMENTS) -> None:
        self._piece_elements = piece_elements
        self._kept: dict[str, _Kept] = {}

    def bits(self, name: str, tensor: torch.Tensor) -> BitTensor:
        """Return the bits of a tensor in host memory, equal to `bit_tensor` of it.

        The mirror owns the bits: the next call for this name writes new bits into the same memory, and
        no other code may write there.

        Raises:
            WeightsError: a dtype other than bfloat16, float16 and float32.
        """
        # The entry returns only when both copies are whole: an error before that costs one full copy.
        kept = self._kept.pop(name, None)
        try:
            if kept is None or not _fits(kept, tensor):
                kept = None  # frees the old copies before the new ones are made
                kept = _copied(tensor)
            else:
                new = _as_integers(tensor)
                for change in changes(name, kept.device, new, self._piece_elements):
                    apply(change, kept.host.bits)
                kept.device.copy_(new)
        except torch.OutOfMemoryError:  # the publication needs the bits, not the mirror
            return host_copy(tensor)
        self._kept[name] = kept
        return kept.host


def host_copy(tensor: torch.Tensor) -> BitTensor:
    """Copy all bits of a tensor, on any device, to new host memory.

    Raises:
        WeightsError: a dtype other than bfloat16, float16 and float32.
    """
    return bit_tensor(tensor.detach().to("cpu", copy=True))


def leaves_room(
    free_bytes: int, total_bytes: int, reserved_bytes: int, peak_bytes: int, wanted_bytes: int
) -> bool:
    """Return whether a device can permanently hold `wanted_bytes` more beside training at its peak.

    A tenth of the device stays free, for fragmentation and for batches larger than those so far.

    Args:
        free_bytes, total_bytes: free and total memory of the device (`torch.cuda.mem_get_info`).
        reserved_bytes: memory that this process's allocator holds, in use or not.
        peak_bytes: the most memory in use at once, training included.
    """
    return wanted_bytes <= free_bytes + reserved_bytes - peak_bytes - total_bytes // 10


def _fits(kept: _Kept, tensor: torch.Tensor) -> bool:
    same = kept.host.dtype == str(tensor.dtype).removeprefix("torch.") and kept.host.shape == tensor.shape
    return same and kept.device.device == tensor.device


def _copied(tensor: torch.Tensor) -> _Kept:
    host = host_copy(tensor)
    return _Kept(host, _as_integers(tensor).clone())


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View the bits in place, shape (elements,). Signed: torch does little with unsigned integers."""
    signed = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.detach().reshape(-1).view(signed)
