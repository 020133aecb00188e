"""Entropy coding of small numbers: order-0 range ANS (Duda 2013, arXiv 1311.2540) over logarithmic tokens.

The encoder splits a number into a token and its remaining bits. The token holds the number of bits and the
first `mantissa` bits after the leading one. The remaining bits are not coded: gaps between changes are
distributed geometrically, so within a token they are nearly uniform. Four interleaved states code the tokens,
so that their dependency chains overlap. The caller sizes all arrays that a decoder fills. Damaged input gives
wrong numbers or an error, never an access out of bounds.

Layout of a stream of n numbers, n known to the reader: mantissa, scale (u8 each), num_tokens (u8), the
frequencies (LEB128), num_words and num_extra (u32), four states (u32), words (u16), extra bits (u32 words).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint32, uint64

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray
from echo_planes.weights.codec.kernels import bit_length, kernel

_STATES = 4
_LOW = 1 << 16  # a state lies in [_LOW, 2^32) between symbols; words of 16 bits move in and out
_MAX_TOKENS = 255
_MAX_SCALE = 12
_MAX_MANTISSA = 2
_MAX_EXTRA = 28  # remaining bits of one number
_FIXED_BYTES = 3 + 2 * 4 + _STATES * 4


def encode_numbers(values: Any) -> bytes:
    """Return the stream of these numbers.

    Args:
        values: shape (n,), unsigned, below 2^28; n >= 1.
    """
    num = values.size
    # For few numbers, the larger table of a finer alphabet costs more than it saves.
    mantissa, scale = (0, 9) if num < 2048 else (1, 11) if num < 16384 else (_MAX_MANTISSA, _MAX_SCALE)
    tokens, extra, counts = np.empty(num, np.uint8), np.empty(num + 2, np.uint32), np.zeros(256, np.int64)
    num_extra = _tokenise(values, mantissa, tokens, extra, counts)
    num_tokens = int(np.flatnonzero(counts)[-1]) + 1
    frequencies = _normalised(counts[:num_tokens], scale)
    words, states = np.empty(num, np.uint16), np.empty(_STATES, np.uint32)
    first = _encode_tokens(tokens, frequencies, scale, words, states)
    sizes = np.array([num - first, num_extra], np.uint32)
    head = bytearray((mantissa, scale, num_tokens))
    for frequency in frequencies.tolist():
        head += bytes((frequency,)) if frequency < 128 else bytes((frequency & 127 | 128, frequency >> 7))
    parts = (sizes, states, words[first:num], extra[:num_extra])
    return bytes(head) + b"".join(part.tobytes() for part in parts)


def decode_numbers(data: ByteArray, at: int, out: Any) -> int:
    """Fill `out`, shape (n,) uint32, from the stream at `data[at:]`. Return the position of its end.

    Raises:
        WeightsError: the bytes are no stream of n numbers.
    """
    if data.size - at < _FIXED_BYTES:
        raise WeightsError("an entropy-coded stream is cut short")
    mantissa, scale, num_tokens = (int(n) for n in data[at : at + 3])
    if mantissa > _MAX_MANTISSA or scale > _MAX_SCALE or not 1 <= num_tokens <= _MAX_TOKENS:
        raise WeightsError(f"an entropy-coded stream has parameters {mantissa}, {scale}, {num_tokens}")
    frequencies = np.empty(num_tokens, np.uint32)
    at = _read_frequencies(data, at + 3, frequencies)
    if at < 0 or int(frequencies.sum()) != 1 << scale:
        raise WeightsError("an entropy-coded stream has a damaged table")
    end = at + 8 + 4 * _STATES
    if end > data.size:
        raise WeightsError("an entropy-coded stream is cut short")
    num_words, num_extra = (int(n) for n in _copied(data, at, 2, "<u4", spare=0))
    if 2 * num_words + 4 * num_extra > data.size - end:
        raise WeightsError("an entropy-coded stream claims more bytes than there are")
    states = _copied(data, at + 8, _STATES, "<u4", spare=0)
    words = _copied(data, end, num_words, "<u2")
    extra = _copied(data, end + 2 * num_words, num_extra, "<u4")
    tokens = np.empty(out.size, np.uint8)
    if not _decode_tokens(words, states, frequencies, scale, tokens):
        raise WeightsError("an entropy-coded stream does not end where it should")
    if not _untokenise(tokens, mantissa, extra, out):
        raise WeightsError("an entropy-coded stream has too many or too few bits")
    return end + 2 * num_words + 4 * num_extra


def _copied(data: ByteArray, at: int, num: int, dtype: str, spare: int = 1) -> Any:
    """Copy `num` elements from any byte offset to aligned memory, before `spare` zeros for the kernels."""
    out = np.zeros(num + spare, dtype)
    used = num * out.itemsize
    out.view(np.uint8)[:used] = data[at : at + used]
    return out


@kernel
def _tokenise(values: Any, mantissa: int, tokens: Any, extra: Any, counts: Any) -> Any:
    """Split numbers into tokens, counted in `counts`, and bits, packed in `extra`. Return its words used."""
    # Branch-free, because the CPU would mispredict a branch for about every third number.
    held, filled, num_extra = uint64(0), uint64(0), 0
    lead_bits = uint64(mantissa + 1)
    for i in range(values.size):
        value = uint64(values[i])
        num_bits = max(bit_length(value | uint64(1)), lead_bits) - lead_bits
        token = (num_bits << uint64(mantissa)) + (value >> num_bits)
        held |= (value & ((uint64(1) << num_bits) - uint64(1))) << filled
        filled += num_bits
        extra[num_extra] = uint32(held)
        full = uint64(filled >> uint64(5))  # 0 or 1 words of 32 bits
        num_extra += full
        held >>= full << uint64(5)
        filled &= uint64(31)
        tokens[i] = token
        counts[token] += 1
    if filled > uint64(0):
        extra[num_extra] = uint32(held)
        num_extra += 1
    return num_extra


@kernel
def _untokenise(tokens: Any, mantissa: int, extra: Any, out: Any) -> Any:
    """Invert `_tokenise`; `extra` ends with a spare word. Return whether it has exactly the bits needed."""
    held, filled, at = uint64(0), uint64(0), 0
    num_extra = extra.size - 1
    lead = uint64(1) << uint64(mantissa)
    longest = beyond = uint64(0)
    for i in range(tokens.size):
        token = uint64(tokens[i])
        num_bits = max(token >> uint64(mantissa), uint64(1)) - uint64(1)
        longest = max(longest, num_bits)
        num_bits &= uint64(31)
        more = uint64(filled < num_bits)
        held |= (uint64(extra[at]) * more) << filled
        beyond |= more & uint64(at == num_extra)
        at = min(at + more, num_extra)
        filled += more << uint64(5)
        first = token if token < lead else (token & (lead - uint64(1))) + lead
        out[i] = (first << num_bits) | (held & ((uint64(1) << num_bits) - uint64(1)))
        held >>= num_bits
        filled -= num_bits
    return longest <= uint64(_MAX_EXTRA) and not beyond and at == num_extra


def _normalised(counts: Any, scale: int) -> Any:
    """Return frequencies that sum to 2^scale, zero only where the count is. Shape as counts, uint32."""
    total = 1 << scale
    exact = counts * (total / counts.sum())
    frequencies = np.where(counts > 0, np.maximum(np.rint(exact), 1), 0).astype(np.int64)
    while (excess := int(frequencies.sum()) - total) != 0:
        # Correct the largest frequency, because that changes the code length least.
        i = int(np.argmax(frequencies))
        frequencies[i] -= min(excess, max(int(frequencies[i]) // 2, 1))
    return frequencies.astype(np.uint32)


@kernel
def _read_frequencies(data: ByteArray, at: int, frequencies: Any) -> Any:
    """Fill `frequencies`. Return the position of the table's end, or -1 if `data` is too short."""
    for i in range(frequencies.size):
        if at + 2 > data.size:
            return -1
        value = uint32(data[at])
        at += 1
        if value >= uint32(128):
            value = (value & uint32(127)) | (uint32(data[at]) << uint32(7))
            at += 1
        frequencies[i] = value
    return at


@kernel
def _encode_one(state: Any, entry: Any, shift: Any, words: Any, at: Any) -> Any:
    """Return (next state, next position). A table entry is frequency | start << 16."""
    frequency = entry & uint64(0xFFFF)
    # Branch-free: write the word always, but advance only if the state would leave its range.
    words[at - 1] = np.uint16(state & uint64(0xFFFF))
    full = state >= (frequency << (uint64(32) - shift))
    state = state >> uint64(16) if full else state
    quotient = uint64(uint32(state) // uint32(frequency))
    return (quotient << shift) + (state - quotient * frequency) + (entry >> uint64(16)), at - full


@kernel
def _encode_tokens(tokens: Any, frequencies: Any, scale: int, words: Any, states: Any) -> Any:
    """Write words backwards, so that the decoder reads forwards. Return the position of the first.

    `words` is as long as `tokens`, because each token makes at most one word.
    """
    table = np.empty(frequencies.size, np.uint64)
    start = uint64(0)
    for token in range(frequencies.size):
        table[token] = uint64(frequencies[token]) | (start << uint64(16))
        start += uint64(frequencies[token])
    shift = uint64(scale)
    s0 = s1 = s2 = s3 = uint64(_LOW)
    num = tokens.size
    at: Any = num
    rest = num & 3
    if rest > 2:
        s2, at = _encode_one(s2, table[tokens[num - 1]], shift, words, at)
    if rest > 1:
        s1, at = _encode_one(s1, table[tokens[num - rest + 1]], shift, words, at)
    if rest > 0:
        s0, at = _encode_one(s0, table[tokens[num - rest]], shift, words, at)
    for i in range(num - rest - 4, -1, -4):
        s3, at = _encode_one(s3, table[tokens[i + 3]], shift, words, at)
        s2, at = _encode_one(s2, table[tokens[i + 2]], shift, words, at)
        s1, at = _encode_one(s1, table[tokens[i + 1]], shift, words, at)
        s0, at = _encode_one(s0, table[tokens[i]], shift, words, at)
    states[0], states[1], states[2], states[3] = s0, s1, s2, s3
    return at


@kernel
def _decode_one(state: Any, table: Any, mask: Any, shift: Any, words: Any, at: Any, num_words: Any) -> Any:
    """Return (token, next state, next position). A table entry is token | start << 8 | frequency << 20."""
    slot = state & mask
    entry = table[slot]
    state = (entry >> uint64(20)) * (state >> shift) + slot - ((entry >> uint64(8)) & uint64(0xFFF))
    low = state < uint64(_LOW)
    filled = (state << uint64(16)) | uint64(words[at])
    state = filled if low else state
    at = min(at + low, num_words)
    return entry & uint64(0xFF), state, at


@kernel
def _decode_tokens(words: Any, states: Any, frequencies: Any, scale: int, tokens: Any) -> Any:
    """Fill `tokens`; `words` ends with a spare one.

    Return whether the decoder used all words, and every state ended at `_LOW`.
    """
    table = np.empty(1 << scale, np.uint64)
    start = 0
    for token in range(frequencies.size):
        entry = uint64(token) | (uint64(start) << uint64(8)) | (uint64(frequencies[token]) << uint64(20))
        for slot in range(start, start + frequencies[token]):
            table[slot] = entry
        start += frequencies[token]
    mask, shift = uint64((1 << scale) - 1), uint64(scale)
    s0, s1, s2, s3 = uint64(states[0]), uint64(states[1]), uint64(states[2]), uint64(states[3])
    num, num_words = tokens.size, words.size - 1
    at = 0
    for i in range(0, num - 3, 4):
        tokens[i], s0, at = _decode_one(s0, table, mask, shift, words, at, num_words)
        tokens[i + 1], s1, at = _decode_one(s1, table, mask, shift, words, at, num_words)
        tokens[i + 2], s2, at = _decode_one(s2, table, mask, shift, words, at, num_words)
        tokens[i + 3], s3, at = _decode_one(s3, table, mask, shift, words, at, num_words)
    rest = num & 3
    if rest > 0:
        tokens[num - rest], s0, at = _decode_one(s0, table, mask, shift, words, at, num_words)
    if rest > 1:
        tokens[num - rest + 1], s1, at = _decode_one(s1, table, mask, shift, words, at, num_words)
    if rest > 2:
        tokens[num - 1], s2, at = _decode_one(s2, table, mask, shift, words, at, num_words)
    home = uint64(_LOW)
    return at == num_words and s0 == home and s1 == home and s2 == home and s3 == home
