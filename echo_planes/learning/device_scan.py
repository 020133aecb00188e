"""Weights that lie on an accelerator are compared there; only what changed is copied to the host.

A `DeviceMirror` keeps the newest bits of every tensor twice: in host memory, from which they are digested
and encoded, and beside the live tensor, against which it is scanned. About one weight in a hundred changes
between publications, so only a few per cent of the bytes leave the accelerator. This has not been timed on a
GPU: the tests show that the bits are the same, not that they come sooner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from echo_planes.weights.codec.changes import Change, apply, index_dtype
from echo_planes.weights.digest import BIT_DTYPES, BitTensor, bit_tensor

# Bounds what a scan takes on the device: a mask and, where nearly so much changed that the piece is sent
# whole, positions (first of 8, then of 4 bytes) and values of a third of it. About 100 MB for 16-bit weights.
PIECE_ELEMENTS = 1 << 24


def changes(
    name: str, old: torch.Tensor, new: torch.Tensor, piece_elements: int = PIECE_ELEMENTS
) -> Iterator[Change]:
    """Changes that turn `old` into `new`, in host memory: one per piece that differs, in rising order.

    A piece in which so much changed that positions and values would be longer than all of its bits comes
    whole (`indices` None). Bits are compared, not numbers: -0.0 and NaNs count.

    Args:
        old, new: bits as signed integers, shape (elements,), on one device; neither is written to. A change
            may share memory with `new` where that lies on the CPU: use it before the next one is asked for.
        piece_elements: scanned at once.
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
    """The newest bits of one tensor, the same in both places."""

    host: BitTensor
    device: torch.Tensor  # shape (elements,), signed integers of the width of the bits


class DeviceMirror:
    """Host bits of tensors on one device, brought up to date by what changed since they were last asked for.

    It takes as much memory on the device as the tensors themselves, and that of one piece's scan. Where there
    is no room for that, a tensor is copied whole, as it is the first time and after an error.

    Args:
        piece_elements: scanned at once; other than `PIECE_ELEMENTS` in tests only.
    """

    def __init__(self, piece_elements: int = PIECE_ELEMENTS) -> None:
        self._piece_elements = piece_elements
        self._kept: dict[str, _Kept] = {}

    def bits(self, name: str, tensor: torch.Tensor) -> BitTensor:
        """The bits of a tensor in host memory, equal to `bit_tensor` of it.

        They belong to the mirror: the next call for this name writes new bits into the same memory, and
        nothing else may write there.

        Raises:
            WeightsError: a dtype other than bfloat16, float16 and float32.
        """
        # Kept again only when both copies are whole, so that an error on the way costs one full copy.
        kept = self._kept.pop(name, None)
        try:
            if kept is None or not _fits(kept, tensor):
                kept = None  # lets go of the old copies before there are new ones
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
    """All bits of a tensor on any device, in host memory of their own.

    Raises:
        WeightsError: a dtype other than bfloat16, float16 and float32.
    """
    return bit_tensor(tensor.detach().to("cpu", copy=True))


def leaves_room(
    free_bytes: int, total_bytes: int, reserved_bytes: int, peak_bytes: int, wanted_bytes: int
) -> bool:
    """Whether a device can hold `wanted_bytes` more for good beside what training needs at its peak.

    A tenth of the device stays free, for fragments and for batches larger than those so far.

    Args:
        free_bytes, total_bytes: of the device (`torch.cuda.mem_get_info`).
        reserved_bytes: held by this process's allocator, in use or not.
        peak_bytes: the most that was in use at once, training included.
    """
    return wanted_bytes <= free_bytes + reserved_bytes - peak_bytes - total_bytes // 10


def _fits(kept: _Kept, tensor: torch.Tensor) -> bool:
    same = kept.host.dtype == str(tensor.dtype).removeprefix("torch.") and kept.host.shape == tensor.shape
    return same and kept.device.device == tensor.device


def _copied(tensor: torch.Tensor) -> _Kept:
    host = host_copy(tensor)
    return _Kept(host, _as_integers(tensor).clone())


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits where they are, shape (elements,). Signed, since torch does little with unsigned integers."""
    signed = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.detach().reshape(-1).view(signed)
