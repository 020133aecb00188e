"""The switch of a shaped network, with datagram sockets for its devices, and the network that it makes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.integration.netns import ShapedNetwork, missing
from tests.integration.netns_switch import (
    SHORTEST_BYTES,
    VNET_HEADER_BYTES,
    State,
    Switch,
    _deliver,
    _record_words,
    _take,
)

pytestmark = pytest.mark.integration

LIMIT_S = 20.0


def packet(target: int, number: int, size: int) -> bytes:
    """An IPv4 packet as far as the switch looks at it, told apart by its number."""
    made = bytearray(size)
    made[VNET_HEADER_BYTES] = 0x45
    made[VNET_HEADER_BYTES + 19] = target + 1
    made[SHORTEST_BYTES:] = number.to_bytes(4, "big") * ((size - SHORTEST_BYTES) // 4)
    return bytes(made)


@contextlib.contextmanager
def resting_hosts(
    count: int, mbit: float, delay_s: float, queue_s: float
) -> Iterator[tuple[Switch, list[socket.socket]]]:
    """A switch, and its hosts' ends."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    for inner, outer in pairs:
        inner.setblocking(False)
        outer.settimeout(LIMIT_S)
        for end in (inner, outer):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    try:
        switch = Switch([inner.fileno() for inner, _ in pairs], [mbit] * count, delay_s, queue_s)
        yield switch, [outer for _, outer in pairs]
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


@contextlib.contextmanager
def hosts(
    count: int, mbit: float, delay_s: float, queue_s: float
) -> Iterator[tuple[Switch, list[socket.socket]]]:
    """A switch at work, and its hosts' ends."""
    with resting_hosts(count, mbit, delay_s, queue_s) as (switch, ends):
        switch.carry(0.0)
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                switch.carry(0.05)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            yield switch, ends
        finally:
            ended.set()
            worker.join(LIMIT_S)


def test_packets_come_whole_and_in_order_many_times_round_the_ring() -> None:
    sizes = [34, 1510, 65_534, 50, 40_002]
    with hosts(2, mbit=80, delay_s=0.002, queue_s=0.05) as (_, (left, right)):
        expected: list[bytes] = []
        for number in range(150):  # 16 MB; the ring has 3
            sent = [packet(1, 10 * number + i, size) for i, size in enumerate(sizes)]
            for one in sent:
                left.send(one)
            assert [right.recv(1 << 17) for _ in expected] == expected
            expected = sent


def test_a_packet_takes_the_delay() -> None:
    with hosts(2, mbit=800, delay_s=0.3, queue_s=0.1) as (_, (left, right)):
        start_s = time.monotonic()
        left.send(packet(1, 1, 50))
        right.recv(1 << 17)
        assert time.monotonic() - start_s >= 0.295


def test_a_downlink_has_its_rate_and_drops_what_would_wait_too_long() -> None:
    burst = [packet(1, number, 10_002) for number in range(30)]  # a queue holds 10: 1 MB/s for 0.1 s
    with hosts(2, mbit=8, delay_s=0.3, queue_s=0.1) as (_, (left, right)):
        start_s = time.monotonic()
        for one in burst:
            left.send(one)
        arrived = [right.recv(1 << 17)]
        arrived += [right.recv(1 << 17) for _ in range(8)]
        assert time.monotonic() - start_s >= 0.06
        last = packet(1, 100, 50)
        left.send(last)
        while (one := right.recv(1 << 17)) != last:
            arrived.append(one)
    assert arrived == burst[: len(arrived)]
    assert len(arrived) < len(burst)


def test_a_host_that_is_cut_off_neither_sends_nor_receives_until_it_is_healed() -> None:
    with hosts(3, mbit=800, delay_s=0.002, queue_s=0.1) as (switch, (first, second, third)):
        switch.cut(1)
        second.send(packet(2, 1, 50))
        first.send(packet(1, 2, 50))
        first.send(packet(2, 3, 50))
        assert third.recv(1 << 17) == packet(2, 3, 50)
        switch.heal(1)
        second.send(packet(2, 4, 50))
        first.send(packet(1, 5, 50))
        assert third.recv(1 << 17) == packet(2, 4, 50)
        assert second.recv(1 << 17) == packet(1, 5, 50)


def test_what_is_no_packet_to_a_host_is_dropped() -> None:
    other_version = bytearray(packet(1, 1, 50))
    other_version[VNET_HEADER_BYTES] = 0x60
    with hosts(2, mbit=800, delay_s=0.002, queue_s=0.1) as (_, (left, right)):
        for one in (b"short", bytes(other_version), packet(2, 2, 50), packet(-1, 3, 50), packet(1, 4, 50)):
            left.send(one)
        assert right.recv(1 << 17) == packet(1, 4, 50)


def test_a_host_that_takes_nothing_does_not_hold_up_the_others() -> None:
    with hosts(3, mbit=800, delay_s=0.002, queue_s=0.1) as (_, (first, second, third)):
        for number in range(100):  # 6 MB for the second, far more than its device holds
            first.send(packet(1, number, 65_534))
            first.send(packet(2, number, 50))
            assert third.recv(1 << 17) == packet(2, number, 50)
        assert second.recv(1 << 17) == packet(1, 0, 65_534)


def is_taken(state: State, sender: socket.socket, one: bytes, target: int) -> bool:
    """Whether what host 0 sends gets into the target's ring."""
    before = state.waiting[target]
    sender.send(one)
    assert _take(state, 0) == 0
    return bool(state.waiting[target] == before + 1)


def delivered(state: State, receiver: socket.socket, target: int) -> bytes:
    """The next packet for a host, at the time that it is due."""
    assert _deliver(state, state.times[state.heads[target]]) == 0
    return receiver.recv(1 << 17)


def test_a_ring_that_is_full_drops_what_comes_and_keeps_what_it_has() -> None:
    sizes = [34, 1510, 40_002, 50, 20_002]
    with resting_hosts(3, mbit=8, delay_s=0.002, queue_s=0.05) as (switch, (first, second, third)):
        state = switch._state._replace(queue_s=1e6)  # no packet waits too long: only the ring is in the way
        ring_words = state.ends[1] - state.starts[1]
        held: list[bytes] = []
        number = 0
        for turn in range(60):  # with nothing delivered meanwhile, as while the switch has no processor
            while number < 10_000:
                number += 1
                one = packet(1, number, sizes[number % len(sizes)])
                free_s = state.free_s[1]
                if not is_taken(state, first, one, 1):
                    break
                held.append(one)
            else:
                raise AssertionError("the ring is never full")
            assert state.free_s[1] == free_s  # what is dropped takes no time of the downlink
            words = [_record_words(len(each)) for each in (*held, one)]
            assert sum(words[:-1]) <= ring_words + max(words)  # one may run into the margin
            assert sum(words) > ring_words  # there was no room
            if turn == 0:
                assert is_taken(state, first, packet(2, 1, 50), 2)  # the others' rings have room
            for _ in range(1 + turn % 5):
                assert delivered(state, second, 1) == held.pop(0)
        while held:
            assert delivered(state, second, 1) == held.pop(0)
        assert _deliver(state, state.free_s.max()) == 0
        assert third.recv(1 << 17) == packet(2, 1, 50)


def test_a_share_of_the_packets_is_lost() -> None:
    with resting_hosts(2, mbit=800, delay_s=0.002, queue_s=0.1) as (switch, (first, _)):
        state = switch._state._replace(queue_s=1e6, loss=0.2)
        kept = sum(is_taken(state, first, packet(1, number, 50), 1) for number in range(2000))
    assert 1500 <= kept <= 1700  # five times the spread on each side


@pytest.mark.parametrize("target", [2, -1])
def test_a_packet_to_an_address_that_no_host_has_goes_into_no_ring(target: int) -> None:
    with resting_hosts(3, mbit=800, delay_s=0.002, queue_s=0.1) as (switch, (first, _, _)):
        whole = switch._state
        state = whole._replace(polls=whole.polls[:2])  # the third's memory, but not the third
        before = whole.tails.copy()
        assert not is_taken(state, first, packet(target, 1, 50), target)
        assert whole.waiting.tolist() == [0, 0, 0]
        assert whole.tails.tolist() == before.tolist()
        assert whole.free_s.tolist() == [0, 0, 0]
        assert is_taken(state, first, packet(1, 2, 50), 1)


def test_a_device_that_fails_ends_it() -> None:
    with pytest.raises(OSError, match="descriptor"):
        Switch([1 << 20], [100.0], 0.01, 0.1).carry(LIMIT_S)


def connect_s(net: ShapedNetwork, address: str) -> float | None:
    """Seconds until a host without a listener refuses a connection of host 0; None if it says nothing."""
    with net.inside(0), socket.socket() as probe:
        probe.settimeout(1.0)
        start_s = time.monotonic()
        try:
            probe.connect((address, 9))
        except ConnectionRefusedError:
            return time.monotonic() - start_s
        except TimeoutError:
            return None
    raise AssertionError("somebody listens")


@pytest.mark.skipif(bool(missing()), reason=f"not shown: {missing()}")
def test_a_network_has_its_round_trip_and_rate_and_obeys_orders() -> None:
    with ShapedNetwork([100.0, 100.0], [100.0, 100.0], rtt_s=0.08) as net:
        address = net.address(1)
        taken_s = connect_s(net, address)
        assert taken_s is not None
        assert taken_s >= 0.075
        rate = net.plain_rate_bytes_per_s(0, 1, seconds=3.0)
        assert 0 < rate <= 1.05 * 12.5e6
        net.cut(1)
        deadline_s = time.monotonic() + LIMIT_S
        while connect_s(net, address) is not None:  # the order is on its way
            assert time.monotonic() < deadline_s
        net.heal(1)
        while connect_s(net, address) is None:
            assert time.monotonic() < deadline_s
