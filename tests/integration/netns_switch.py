"""Moves the packets of a shaped network (`tests/integration/netns.py`): delay, loss, downlink shaping, cuts.

Compiled, since it shares few cores with what it carries packets for: in Python it would take so much of
them that it changes what is measured. Its C library calls are external symbols of the compiled code, which
numba can keep on disk; ctypes functions are addresses of this process, which it cannot.

A packet waits in the ring of its downlink as a record: when it has been sent, its length, its bytes. Records
are whole: one may run past its ring's end into a margin, and the next then starts at the ring's beginning.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

TICK_S = 0.001  # packets are moved together so often, as network cards do: it spares wake-ups
IDLE_MS = 50  # with nothing under way, it looks up so often
TURN = 64  # packets that one host may send before others have their turn
STALL_S = 0.1  # a ring holds what comes in so long while the switch gets no processor; then it drops packets
VNET_HEADER_BYTES = 10
SHORTEST_BYTES = VNET_HEADER_BYTES + 20  # with the IPv4 header
MAX_PACKET_BYTES = 65536 + VNET_HEADER_BYTES
WORD = 8
HEAD_WORDS = 2  # of a record: when it is sent, its length
MAX_RECORD_WORDS = HEAD_WORDS + -(-MAX_PACKET_BYTES // WORD)
SMALL_RECORDS = 2  # times its packet's bytes is what a record takes, at most
POLLIN = 1
POLL = np.dtype([("fd", np.int32), ("events", np.int16), ("revents", np.int16)])
WOULD_BLOCK, INTERRUPTED = errno.EAGAIN, errno.EINTR
CLOCK_MONOTONIC = 1

_read = types.ExternalFunction("read", types.int64(types.int32, types.uintp, types.uint64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.uintp, types.uint64))
_poll = types.ExternalFunction("poll", types.int32(types.uintp, types.uint64, types.int32))
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_errno_location = types.ExternalFunction("__errno_location", types.uintp())
_memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uint64))


class State(NamedTuple):
    """All that the compiled code works on; arrays are by host unless said otherwise."""

    polls: NDArray[np.void]  # of dtype POLL
    is_cut: NDArray[np.bool_]
    seconds_per_byte: NDArray[np.float64]  # of the downlink
    free_s: NDArray[np.float64]  # when the downlink has sent all that it was given
    delay_s: float
    queue_s: float
    loss: float  # share of packets
    words: NDArray[np.int64]  # every ring, one after the other
    times: NDArray[np.float64]  # the same memory
    starts: NDArray[np.int64]  # word at which a ring starts
    ends: NDArray[np.int64]  # word at which it ends, before its margin
    heads: NDArray[np.int64]  # word where the first record starts
    tails: NDArray[np.int64]  # word where the next one will
    waiting: NDArray[np.int64]  # records
    packet: NDArray[np.uint8]  # the one at hand
    clock: NDArray[np.int64]  # a timespec
    error: NDArray[np.int32]  # one errno


class Switch:
    """Carries packets between TUN devices.

    Args:
        tuns: descriptors, non-blocking, of packets with a VNET header; host i has an address ending in i + 1.
        downlinks_mbit: one for each host.
        delay_s: from host to host.
        queue_s: what would wait longer for its downlink is dropped.
        loss: share of packets that is dropped beside, each by itself.
    """

    def __init__(
        self,
        tuns: Sequence[int],
        downlinks_mbit: Sequence[float],
        delay_s: float,
        queue_s: float,
        loss: float = 0.0,
    ) -> None:
        hosts = len(tuns)
        rates = np.array(downlinks_mbit, np.float64) / 8e-6
        held_bytes = rates * (delay_s + queue_s + STALL_S)
        sizes = (held_bytes * SMALL_RECORDS / WORD).astype(np.int64) + MAX_RECORD_WORDS
        ends = np.cumsum(sizes + MAX_RECORD_WORDS) - MAX_RECORD_WORDS
        words = np.empty(ends[-1] + MAX_RECORD_WORDS, np.int64)
        polls = np.zeros(hosts, POLL)
        polls["fd"], polls["events"] = tuns, POLLIN
        self._state = State(
            polls=polls,
            is_cut=np.zeros(hosts, np.bool_),
            seconds_per_byte=1 / rates,
            free_s=np.zeros(hosts),
            delay_s=delay_s - TICK_S,  # what a packet waits on its way in and out, on average
            queue_s=queue_s,
            loss=loss,
            words=words,
            times=words.view(np.float64),
            starts=ends - sizes,
            ends=ends,
            heads=ends - sizes,
            tails=ends - sizes,
            waiting=np.zeros(hosts, np.int64),
            packet=np.zeros(MAX_PACKET_BYTES, np.uint8),
            clock=np.zeros(2, np.int64),
            error=np.zeros(1, np.int32),
        )

    def cut(self, host: int) -> None:
        """From now on no packet goes to or from `host`."""
        self._state.is_cut[host] = True

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        self._state.is_cut[host] = False

    def carry(self, seconds: float) -> None:
        """For so long; other threads can run meanwhile.

        Raises:
            OSError: a device failed.
        """
        failed = _carry(self._state, seconds)
        if failed:
            raise OSError(failed, os.strerror(failed))


def run(plan: str) -> None:
    """Carry packets for ever, by a plan that `ShapedNetwork` makes; says "ready" on stdout once it can.

    The process ends with its stdin, where orders come from.
    """
    switch = Switch(**json.loads(plan))
    switch.carry(0.0)  # compiles it, or loads it from disk
    print("ready", flush=True)
    threading.Thread(target=_obey, args=(switch,), daemon=True).start()
    while True:
        switch.carry(1.0)  # then Python can look at signals


def _obey(switch: Switch) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "cut" in order:
            switch.cut(order["cut"])
        else:
            switch.heal(order["heal"])
    os._exit(0)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _carry(state: State, seconds: float) -> int:
    """Returns the errno of a device that failed, or 0."""
    hosts = state.polls.size
    now_s = _now_s(state)
    end_s = now_s + seconds
    while now_s < end_s:
        ready = _poll(state.polls.ctypes.data, hosts, 0 if state.waiting.any() else IDLE_MS)
        failed: int = _errno(state) if ready < 0 else 0
        if failed and failed != INTERRUPTED:
            return failed
        tick_s = _now_s(state)
        failed = _deliver(state, tick_s)  # first, for the rings to have room after a stall
        for host in range(hosts):
            if ready > 0 and state.polls[host].revents and not failed:
                failed = _take(state, host)
        if failed:
            return failed
        now_s = _now_s(state)
        if now_s < tick_s + TICK_S:
            _usleep(np.uint32((tick_s + TICK_S - now_s) * 1e6))
    return 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _take(state: State, host: int) -> int:
    """Take what a host sends; returns an errno or 0."""
    packet = state.packet
    for _ in range(TURN):
        size = _read(state.polls[host].fd, packet.ctypes.data, MAX_PACKET_BYTES)
        if size < 0:
            failed: int = _errno(state)
            return 0 if failed == WOULD_BLOCK else failed
        if size < SHORTEST_BYTES:
            continue
        target = np.int64(packet[VNET_HEADER_BYTES + 19]) - 1  # last byte of the destination's IPv4 address
        if packet[VNET_HEADER_BYTES] >> 4 != 4 or target < 0 or target >= state.polls.size:
            continue
        if state.is_cut[host] or state.is_cut[target] or np.random.random() < state.loss:
            continue
        arrival_s = _now_s(state) + state.delay_s
        done_s = max(arrival_s, state.free_s[target]) + size * state.seconds_per_byte[target]
        if done_s - arrival_s <= state.queue_s and _append(state, target, done_s, size):
            state.free_s[target] = done_s
    return 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _append(state: State, target: int, done_s: float, size: int) -> bool:
    """Put the packet at hand into a ring, if there is room."""
    start, head = state.tails[target], state.heads[target]
    after = start + _record_words(size)
    if state.waiting[target] and start <= head < after:
        return False
    state.times[start] = done_s
    state.words[start + 1] = size
    _memcpy(_address(state, start + HEAD_WORDS), state.packet.ctypes.data, size)
    state.tails[target] = after if after < state.ends[target] else state.starts[target]
    state.waiting[target] += 1
    return True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _deliver(state: State, now_s: float) -> int:
    """Give hosts what has reached them by now; returns an errno or 0."""
    for target in range(state.polls.size):
        while state.waiting[target]:
            head = state.heads[target]
            if state.times[head] > now_s:
                break
            size = state.words[head + 1]
            after = head + _record_words(size)
            state.heads[target] = after if after < state.ends[target] else state.starts[target]
            state.waiting[target] -= 1
            if _write(state.polls[target].fd, _address(state, head + HEAD_WORDS), size) < 0:
                failed: int = _errno(state)
                if failed != WOULD_BLOCK:
                    return failed
    return 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _record_words(size: int) -> int:
    return HEAD_WORDS + (size + WORD - 1) // WORD


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _address(state: State, word: int) -> int:
    return state.words.ctypes.data + word * WORD


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _now_s(state: State) -> float:
    _clock_gettime(CLOCK_MONOTONIC, state.clock.ctypes.data)
    return float(state.clock[0] + state.clock[1] * 1e-9)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _errno(state: State) -> int:
    _memcpy(state.error.ctypes.data, _errno_location(), state.error.itemsize)
    return int(state.error[0])
