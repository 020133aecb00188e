"""Bits patched by what changed on a device equal those of the whole copy: `learning/device_scan.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from echo_planes.errors import WeightsError
from echo_planes.learning.device_scan import DeviceMirror, changes, leaves_room
from echo_planes.weights.digest import BIT_DTYPES, BitTensor, bit_tensor
from tests.unit.codec_states import model_state, random_bits, same_bits, states, updated

State = dict[str, BitTensor]
GIB = 2**30


class Failing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first `survived` calls of one operation work, all later ones raise."""

    def __init__(self, operation: Any, error: Exception, survived: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operation, self._error, self._left = operation, error, survived

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket is self._operation:
            if not self._left:
                raise self._error
            self._left -= 1
        return func(*args, **(kwargs or {}))


def as_torch(tensor: BitTensor, device: str = "cpu") -> torch.Tensor:
    """A tensor of these bits, in memory of its own."""
    signed = np.int16 if tensor.bits.itemsize == 2 else np.int32
    integers = torch.from_numpy(tensor.bits.view(signed).copy())
    return integers.view(getattr(torch, tensor.dtype)).reshape(tensor.shape).to(device)


def write(live: dict[str, torch.Tensor], state: State) -> None:
    """Write new values over the old ones, as an optimizer does. By bits, so that NaNs stay as they are."""
    for name, tensor in state.items():
        integers = torch.int16 if tensor.bits.itemsize == 2 else torch.int32
        live[name].view(integers).copy_(as_torch(tensor).view(integers))


def gathered(mirror: DeviceMirror, live: dict[str, torch.Tensor]) -> State:
    return {name: mirror.bits(name, tensor) for name, tensor in live.items()}


@st.composite
def histories(draw: st.DrawFn) -> list[State]:
    """States of one model: after each, some elements, all or none of a tensor are others."""
    history = [draw(states())]
    for _ in range(draw(st.integers(1, 4))):
        new = {}
        for name, tensor in history[-1].items():
            bits, size = tensor.bits.copy(), tensor.bits.size
            how = draw(st.sampled_from(["none", "some", "all"]))
            if how == "all":
                bits = ~bits
            elif how == "some" and size:
                where = draw(st.lists(st.integers(0, size - 1), max_size=4))
                bits[where] = random_bits(draw, tensor.dtype, len(where))
            new[name] = BitTensor(bits, tensor.dtype, tensor.shape)
        history.append(new)
    return history


@settings(deadline=None)  # a busy machine is no failure
@given(histories(), st.integers(1, 70))
def test_patched_bits_equal_those_of_the_whole_copy(history: list[State], piece_elements: int) -> None:
    mirror = DeviceMirror(piece_elements)
    live = {name: as_torch(tensor) for name, tensor in history[0].items()}
    for state in history:
        write(live, state)
        bits = gathered(mirror, live)
        assert same_bits(bits, state)
        assert same_bits(bits, {name: bit_tensor(tensor) for name, tensor in live.items()})


@pytest.mark.parametrize("dtype", sorted(BIT_DTYPES))
def test_zeros_of_either_sign_and_nans_are_told_apart(dtype: str) -> None:
    top = 8 * BIT_DTYPES[dtype].itemsize
    nan = ((1 << (top - 1)) - 1) & ~1
    old = np.array([0, 1 << (top - 1), nan, nan, 5], BIT_DTYPES[dtype])
    new = np.array([1 << (top - 1), 0, nan + 1, nan, 5], BIT_DTYPES[dtype])
    before, after = (torch.from_numpy(bits.view(f"i{bits.itemsize}")) for bits in (old, new))
    (change,) = changes("w", before, after)
    assert change.indices is None or change.indices.tolist() == [0, 1, 2]
    live = as_torch(BitTensor(old, dtype, (5,)))
    mirror = DeviceMirror()
    mirror.bits("w", live)
    write({"w": live}, {"w": BitTensor(new, dtype, (5,))})
    assert mirror.bits("w", live).bits.tolist() == new.tolist()


@pytest.mark.parametrize("width", [2, 4])
def test_only_what_changed_leaves_the_device_and_never_more_than_all_of_it(width: int) -> None:
    old = torch.zeros(1000, dtype=torch.int16 if width == 2 else torch.int32)
    for count in (0, 1, 9, 100, 300, 334, 500, 1000):
        new = old.clone()
        new[torch.randperm(1000, generator=torch.Generator().manual_seed(count))[:count]] = -1
        sent = 0
        for change in changes("w", old, new, 100):
            positions = 0 if change.indices is None else change.indices.nbytes
            sent += positions + change.values.nbytes
            assert change.values.size <= 100
        assert sent <= min(count * (4 + width), 1000 * width)


def test_pieces_come_in_order_with_positions_in_the_tensor() -> None:
    old = torch.zeros(250, dtype=torch.int16)
    new = old.clone()
    new[[3, 99, 210, 211]] = torch.tensor([7, 8, 9, -1], dtype=torch.int16)
    found = list(changes("w", old, new, 100))
    assert [change.start for change in found] == [3, 210]
    positions = [change.indices.tolist() for change in found if change.indices is not None]
    assert positions == [[3, 99], [210, 211]]
    assert [change.values.tolist() for change in found] == [[7, 8], [9, 0xFFFF]]


def test_the_host_bits_stay_in_one_place_and_are_not_the_live_ones() -> None:
    live = {name: as_torch(tensor) for name, tensor in model_state().items()}
    mirror = DeviceMirror()
    first = gathered(mirror, live)
    write(live, updated(model_state(), 1))
    assert same_bits(first, model_state())  # the optimizer wrote, nobody asked yet
    second = gathered(mirror, live)
    assert all(second[name].bits is first[name].bits for name in first)


@pytest.mark.parametrize("survived", [0, 1, 2])
def test_after_a_failure_on_the_way_the_next_bits_are_right(survived: int) -> None:
    old, new = model_state(), updated(model_state(), 1)
    live = {name: as_torch(tensor) for name, tensor in old.items()}
    mirror = DeviceMirror(piece_elements=700)  # the largest tensor has several pieces
    gathered(mirror, live)
    write(live, new)
    with (
        Failing(torch.ops.aten.nonzero, RuntimeError("the device is gone"), survived),
        pytest.raises(RuntimeError, match="the device is gone"),
    ):
        gathered(mirror, live)
    # Back to the old values: what was patched into one copy only would now pass for unchanged.
    write(live, old)
    assert same_bits(gathered(mirror, live), old)


@pytest.mark.parametrize("operation", [torch.ops.aten.clone, torch.ops.aten.nonzero])
def test_a_device_without_room_gives_whole_copies(operation: Any) -> None:
    mirror, live = DeviceMirror(), {name: as_torch(tensor) for name, tensor in model_state().items()}
    for seed in range(3):
        new = updated(model_state(), seed)
        write(live, new)
        with Failing(operation, torch.OutOfMemoryError("no room")):
            assert same_bits(gathered(mirror, live), new)
    write(live, model_state())
    assert same_bits(gathered(mirror, live), model_state())


def test_another_tensor_under_the_name_is_copied_whole() -> None:
    mirror = DeviceMirror()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((6, 4), (4, 6), (0,), (), (24,)):
            tensor = torch.full(shape, 0.5, dtype=dtype)
            bits = mirror.bits("w", tensor)
            assert same_bits({"w": bits}, {"w": bit_tensor(tensor)})


def test_tensors_that_are_no_contiguous_memory_are_read_in_their_order() -> None:
    mirror, live = DeviceMirror(), torch.arange(24, dtype=torch.bfloat16).reshape(4, 6).t()
    for _ in range(2):
        assert mirror.bits("w", live).bits.tolist() == bit_tensor(live).bits.tolist()
        live[2, 3] += 1


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(WeightsError, match="'int32' is not one of"):
        DeviceMirror().bits("w", torch.zeros(3, dtype=torch.int32))


def test_a_mirror_never_takes_what_training_needs() -> None:
    # 80 GiB, of which other processes hold 4 and this one has reserved 50; 40 were in use at the peak.
    room = 80 - 4 - 40 - 8
    assert leaves_room(26 * GIB, 80 * GIB, 50 * GIB, 40 * GIB, room * GIB)
    assert not leaves_room(26 * GIB, 80 * GIB, 50 * GIB, 40 * GIB, room * GIB + 1)
    assert not leaves_room(0, 80 * GIB, 79 * GIB, 79 * GIB, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_bits_of_tensors_on_a_gpu_are_those_of_the_whole_copy() -> None:
    rng = np.random.default_rng(0)
    state = model_state()
    bits = rng.integers(0, 2**16, 3_000_001, np.uint16, endpoint=False)
    state["large"] = BitTensor(bits, "bfloat16", (3_000_001,))
    live = {name: as_torch(tensor, "cuda") for name, tensor in state.items()}
    mirror = DeviceMirror(piece_elements=1 << 20)
    for seed, share in enumerate((0.0, 0.01, 0.01, 0.2, 0.9, 0.01)):
        state = updated(state, seed, share)
        write(live, state)
        patched = gathered(mirror, live)
        assert same_bits(patched, state)
        assert same_bits(patched, {name: bit_tensor(tensor) for name, tensor in live.items()})
