"""Compiled loops of the codecs: scans over bit patterns at memory speed.

Scans work on blocks of 64 elements. The properties of a block's elements ("changed", "at least this
magnitude") are 64-bit masks. The mask operations are machine-independent LLVM vector code, because plain
loops reach a quarter of the speed; LLVM compiles them to AVX-512, AVX2, SSE2 or NEON. Only the search for the
n-th set bit has two forms, because its one-instruction form (`pdep`) exists only on x86 with BMI2.

Vector operations and their callers share this file, because numba's cache detects changes by file.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import binding, ir
from numba import config, njit, types
from numba.extending import intrinsic

from echo_planes.weights.digest import BitArray

BLOCK = 64  # elements per mask
NUM_CLASSES = 6  # magnitude classes of `compact`; unused ones are empty
MAGNITUDE = 0x7FFF  # mask of a 16-bit float without its sign
KEY_SHIFT, MAX_KEY, NO_THRESHOLD = 6, 255, 255  # no key is above NO_THRESHOLD
_BITS = ir.IntType(64)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
NEVER = 1 << 62  # `left` of a class without further changes; larger than any tensor
_NEVER = np.uint64(NEVER)
_FAR = 2048  # elements prefetched ahead: hardware prefetching stops at pages and mispredicted branches

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile at the first call; keep the result on disk (NUMBA_CACHE_DIR or the user's cache folder)."""
    return cast(_Function, njit(cache=True, nogil=True, error_model="numpy")(function))


@kernel
def upper_halves(words: BitArray, upper: BitArray) -> Any:
    """Write the upper halves of 32-bit words to `upper`, and return the union of the lower halves' bits."""
    lower = np.uint32(0)
    for at in range(words.size):
        word = words[at]
        upper[at] = word >> np.uint32(16)
        lower |= word & np.uint32(0xFFFF)
    return lower


# --- vector operations ---------------------------------------------------------------------------


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [at])


def _load_block(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    vector = ir.VectorType(context.get_data_type(kind.dtype), BLOCK)
    pointer = builder.bitcast(_address(context, builder, kind, array, at), vector.as_pointer())
    return builder.load(pointer, align=kind.dtype.bitwidth // 8)


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, BLOCK)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), lanes)


@intrinsic  # type: ignore[untyped-decorator]
def changed_mask(typing: Any, old: Any, new: Any, at: Any) -> Any:
    """Return a mask; bit i: old[at + i] != new[at + i]."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left = _load_block(context, builder, old, args[0], args[2])
        right = _load_block(context, builder, new, args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _BITS)

    return types.uint64(old, new, types.intp), code


@intrinsic  # type: ignore[untyped-decorator]
def key_mask(typing: Any, bits: Any, at: Any, threshold: Any) -> Any:
    """Return a mask; bit i: the key of bits[at + i] is above `threshold`.

    A key is the upper 9 bits of a magnitude, at most 255; for bfloat16 it counts half octaves (exponent and
    one more bit). Keys are bytes, so that one AVX-512 register and instruction compare a whole block.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = _load_block(context, builder, bits, args[0], args[1])
        wide = block.type
        key = builder.and_(block, ir.Constant(wide, [MAGNITUDE] * BLOCK))
        key = builder.lshr(key, ir.Constant(wide, [KEY_SHIFT] * BLOCK))
        highest = ir.Constant(wide, [MAX_KEY] * BLOCK)
        key = builder.select(builder.icmp_unsigned("<", key, highest), key, highest)
        key = builder.trunc(key, ir.VectorType(ir.IntType(8), BLOCK))
        return builder.bitcast(builder.icmp_unsigned(">", key, _splat(builder, args[2])), _BITS)

    return types.uint64(bits, types.intp, types.uint8), code


@intrinsic  # type: ignore[untyped-decorator]
def popcount(typing: Any, mask: Any) -> Any:
    """Return the number of set bits."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@intrinsic  # type: ignore[untyped-decorator]
def lowest(typing: Any, mask: Any) -> Any:
    """Return the position of the lowest set bit; the mask must not be 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), code


@intrinsic  # type: ignore[untyped-decorator]
def bit_length(typing: Any, value: Any) -> Any:
    """Return the position of the highest set bit, plus one; the value must not be 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sub(_BITS(64), builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1)))

    return types.uint64(types.uint64), code


def _fetch(context: Any, builder: Any, kind: Any, args: Any, num_bytes: int, write: int) -> Any:
    small = ir.IntType(32)
    start = builder.bitcast(_address(context, builder, kind, *args), ir.IntType(8).as_pointer())
    called = ir.FunctionType(ir.VoidType(), [start.type, small, small, small])
    function = builder.module.declare_intrinsic("llvm.prefetch", [start.type], called)
    for offset in range(0, num_bytes, 64):
        builder.call(function, [builder.gep(start, [_BITS(offset)]), small(write), small(3), small(1)])
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Prefetch the cache line of array[at] for writing."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fetch(context, builder, array, args, 1, 1)

    return types.none(array, types.intp), code


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_block(typing: Any, array: Any, at: Any) -> Any:
    """Prefetch the cache lines of a block for reading. The block may lie beyond the array's end."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fetch(context, builder, array, args, BLOCK * array.dtype.bitwidth // 8, 0)

    return types.none(array, types.intp), code


@intrinsic  # type: ignore[untyped-decorator]
def _deposit(typing: Any, source: Any, mask: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.module.declare_intrinsic(
            "llvm.x86.bmi.pdep.64", [], ir.FunctionType(_BITS, [_BITS, _BITS])
        )
        return builder.call(function, args)

    return types.uint64(types.uint64, types.uint64), code


@kernel
def nth_bit_portable(mask: Any, n: Any) -> Any:
    """Return a mask of the n-th set bit (from 0); the mask must have more than n."""
    for _ in range(n):
        mask &= mask - _ONE
    return mask & (_ZERO - mask)


@kernel
def nth_bit_deposit(mask: Any, n: Any) -> Any:
    """Return the same as `nth_bit_portable`, in one instruction of x86 with BMI2."""
    return _deposit(_ONE << n, mask)


def _has_deposit() -> bool:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if config.CPU_NAME or config.CPU_FEATURES:  # numba compiles for another machine than this one
        return "+bmi2" in (config.CPU_FEATURES or "")
    return bool(binding.get_host_cpu_features().get("bmi2"))


nth_bit = nth_bit_deposit if _has_deposit() else nth_bit_portable


# --- finding changes -----------------------------------------------------------------------------


@kernel
def find_changes(
    old: BitArray, new: BitArray, start: int, stop: int, origin: int, where: Any, steps: Any, count: Any
) -> Any:
    """Append the changes in [start, stop) to `where` (origin + position) and `steps` (new - old, modulo).

    Return the new count. The caller provides room for stop - start more changes.
    """
    at: Any = start
    while at + BLOCK <= stop:
        prefetch_block(old, at + _FAR)
        prefetch_block(new, at + _FAR)
        mask = changed_mask(old, new, at)
        while mask:
            position = at + np.int64(lowest(mask))
            mask &= mask - _ONE
            where[count] = origin + position
            steps[count] = new[position] - old[position]
            count += 1
        at += BLOCK
    for position in range(at, stop):
        if old[position] != new[position]:
            where[count] = origin + position
            steps[count] = new[position] - old[position]
            count += 1
    return count


@kernel
def count_changes(old: BitArray, new: BitArray, start: int, stop: int) -> Any:
    """Return the number of elements in [start, stop) that differ."""
    count: Any = 0
    at: Any = start
    while at + BLOCK <= stop:
        count += np.int64(popcount(changed_mask(old, new, at)))
        at += BLOCK
    for position in range(at, stop):
        count += old[position] != new[position]
    return count


# --- classes of magnitude ------------------------------------------------------------------------


@kernel
def _emit_changes(
    mask: Any, old: BitArray, new: BitArray, at: Any, kinds: Any, members: Any, before: Any, following: Any,
    gaps: Any, steps: Any, counts: Any,
) -> None:  # fmt: skip
    """Append the changes of a block, given each class's elements in it (`members`) and `before` it."""
    while mask:
        bit = lowest(mask)
        mask &= mask - _ONE
        position = at + np.int64(bit)
        was = old[position]
        # Not min(): numba compares it as float.
        kind = kinds[(was & np.uint16(MAGNITUDE)) >> np.uint16(KEY_SHIFT)]
        rank = before[kind] + popcount(members[kind] & ((_ONE << bit) - _ONE))
        i = counts[kind]
        gaps[kind, i] = rank - following[kind]
        steps[kind, i] = new[position] - was
        following[kind] = rank + _ONE
        counts[kind] = i + 1


@kernel
def _scan_blocks(
    old: BitArray, new: BitArray, start: int, stop: int, thresholds: Any, kinds: Any, passed: Any,
    following: Any, gaps: Any, steps: Any, counts: Any,
) -> None:  # fmt: skip
    """Do `scan_classes` for whole blocks. The loop binds no arrays: numba would count references."""
    t1, t2, t3, t4, t5 = thresholds[0], thresholds[1], thresholds[2], thresholds[3], thresholds[4]
    p0, p1, p2, p3, p4, p5 = passed[0], passed[1], passed[2], passed[3], passed[4], passed[5]
    members, before = np.zeros(NUM_CLASSES, np.uint64), np.zeros(NUM_CLASSES, np.uint64)
    for at in range(start, stop, BLOCK):
        prefetch_block(old, at + _FAR)
        prefetch_block(new, at + _FAR)
        m1, m2, m3 = key_mask(old, at, t1), key_mask(old, at, t2), key_mask(old, at, t3)
        m4, m5 = key_mask(old, at, t4), key_mask(old, at, t5)
        mask = changed_mask(old, new, at)
        if mask:
            members[0], members[1], members[2] = ~m1, m1 & ~m2, m2 & ~m3
            members[3], members[4], members[5] = m3 & ~m4, m4 & ~m5, m5
            before[0], before[1], before[2] = p0 - p1, p1 - p2, p2 - p3
            before[3], before[4], before[5] = p3 - p4, p4 - p5, p5
            _emit_changes(mask, old, new, at, kinds, members, before, following, gaps, steps, counts)
        p0 += np.uint64(BLOCK)
        p1, p2, p3 = p1 + popcount(m1), p2 + popcount(m2), p3 + popcount(m3)
        p4, p5 = p4 + popcount(m4), p5 + popcount(m5)
    passed[0], passed[1], passed[2], passed[3], passed[4], passed[5] = p0, p1, p2, p3, p4, p5


@kernel
def scan_classes(
    old: BitArray, new: BitArray, start: int, stop: int, thresholds: Any, passed: Any, following: Any,
    gaps: Any, steps: Any, counts: Any,
) -> None:  # fmt: skip
    """Append the changes of 16-bit elements [start, stop), by class of the old magnitude.

    Args:
        thresholds: shape (NUM_CLASSES - 1,) uint8, rising: class k holds keys above thresholds[k - 1].
            Classes above a threshold of 255 are empty.
        passed, following: shape (NUM_CLASSES + 1,) uint64, zero at first: the state between calls.
            passed[k] counts elements of class k and above; following[k] is the rank in class k after its
            latest change.
        gaps, steps: shape (NUM_CLASSES, room) uint32, uint16. Number of elements of the class between a
            change and the one before, and new - old modulo 2^16; with room for stop - start more.
        counts: shape (NUM_CLASSES,) int64, number of changes in each class.
    """
    whole = (stop - start) // BLOCK * BLOCK + start
    kinds = np.zeros((MAGNITUDE >> KEY_SHIFT) + 1, np.uint8)  # class by the upper 9 bits of the magnitude
    for threshold in thresholds:
        if threshold < NO_THRESHOLD:
            kinds[np.int64(threshold) + 1 :] += np.uint8(1)
    _scan_blocks(old, new, start, whole, thresholds, kinds, passed, following, gaps, steps, counts)
    if whole < stop:
        # The padding is zero in both, so it has no changes; its keys are above no threshold.
        last_old, last_new = np.zeros(BLOCK, np.uint16), np.zeros(BLOCK, np.uint16)
        last_old[: stop - whole], last_new[: stop - whole] = old[whole:stop], new[whole:stop]
        _scan_blocks(last_old, last_new, 0, BLOCK, thresholds, kinds, passed, following, gaps, steps, counts)
        passed[0] -= np.uint64(BLOCK - (stop - whole))


@kernel
def _take_class(
    mask: Any, kind: int, ahead: Any, cursors: Any, ends: Any, gaps: Any, steps: Any, pending: Any
) -> Any:
    """Find the changes of one class in a block; `mask` holds the block's elements of that class.

    Write their steps to pending[bit]. Return their mask, and the class's elements before its next change.
    """
    num = popcount(mask)
    found = _ZERO
    while ahead < num:
        bit = nth_bit(mask, ahead)
        found |= bit
        i = cursors[kind]
        pending[lowest(bit)] = steps[i]
        i += 1
        cursors[kind] = i
        ahead = ahead + _ONE + np.uint64(gaps[i]) if i < ends[kind] else _NEVER
    return found, ahead - num


@kernel
def _apply_blocks(
    bits: BitArray, start: int, stop: int, shift: int, valid: Any, thresholds: Any, left: Any, cursors: Any,
    ends: Any, gaps: Any, steps: Any, indices: Any, olds: Any, news: Any, count: Any, write: bool,
) -> Any:  # fmt: skip
    """Do `apply_classes` for the `valid` elements of whole blocks; add `shift` to reported positions."""
    t1, t2, t3, t4, t5 = thresholds[0], thresholds[1], thresholds[2], thresholds[3], thresholds[4]
    l0, l1, l2, l3, l4, l5 = left[0], left[1], left[2], left[3], left[4], left[5]
    pending = np.zeros(BLOCK, np.uint16)
    for at in range(start, stop, BLOCK):
        prefetch_block(bits, at + _FAR)
        m1, m2, m3 = key_mask(bits, at, t1), key_mask(bits, at, t2), key_mask(bits, at, t3)
        m4, m5 = key_mask(bits, at, t4), key_mask(bits, at, t5)
        f0, l0 = _take_class(valid & ~m1, 0, l0, cursors, ends, gaps, steps, pending)
        f1, l1 = _take_class(m1 & ~m2, 1, l1, cursors, ends, gaps, steps, pending)
        f2, l2 = _take_class(m2 & ~m3, 2, l2, cursors, ends, gaps, steps, pending)
        f3, l3 = _take_class(m3 & ~m4, 3, l3, cursors, ends, gaps, steps, pending)
        f4, l4 = _take_class(m4 & ~m5, 4, l4, cursors, ends, gaps, steps, pending)
        f5, l5 = _take_class(m5, 5, l5, cursors, ends, gaps, steps, pending)
        mask = f0 | f1 | f2 | f3 | f4 | f5
        while mask:
            bit = np.int64(lowest(mask))
            mask &= mask - _ONE
            old = bits[at + bit]
            value = old + pending[bit]
            indices[count], olds[count], news[count] = at + bit + shift, old, value
            count += 1
            if write:
                bits[at + bit] = value
    left[0], left[1], left[2], left[3], left[4], left[5] = l0, l1, l2, l3, l4, l5
    return count


@kernel
def apply_classes(
    bits: BitArray, start: int, stop: int, thresholds: Any, left: Any, cursors: Any, ends: Any, gaps: Any,
    steps: Any, indices: Any, olds: Any, news: Any, count: Any, write: bool,
) -> Any:  # fmt: skip
    """Invert `scan_classes`: report the changes of [start, stop), and write them if `write`.

    Args:
        left: shape (NUM_CLASSES,) uint64, elements of each class before its next change (NEVER: none).
        cursors, ends: shape (NUM_CLASSES,), index in `gaps` and `steps` of the class's next change, and of
            the end of its changes.
        indices, olds, news: filled from `count` on, in order of position.

    Returns:
        The new count.
    """
    whole = (stop - start) // BLOCK * BLOCK + start
    count = _apply_blocks(
        bits, start, whole, 0, ~_ZERO, thresholds, left, cursors, ends, gaps, steps, indices, olds, news,
        count, write,
    )  # fmt: skip
    if whole < stop:
        width = stop - whole
        last = np.zeros(BLOCK, np.uint16)
        last[:width] = bits[whole:stop]
        valid = (_ONE << np.uint64(width)) - _ONE
        count = _apply_blocks(
            last, 0, BLOCK, whole, valid, thresholds, left, cursors, ends, gaps, steps, indices, olds, news,
            count, write,
        )  # fmt: skip
        if write:
            bits[whole:stop] = last[:width]
    return count
