"""Threads of processes that share a machine, on a clock of the test's own."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from echo_planes.cluster.processor import INTERVAL_S, Threads, used_s


class Machine:
    """Cores that processes share evenly, each with as many threads as it takes."""

    def __init__(self, cores: int, processes: int) -> None:
        self.cores, self.now_s = cores, 0.0
        self.own_s = [0.0] * processes
        self.threads = [
            Threads(
                cores,
                cores,
                clock=lambda: self.now_s,
                machine_s=lambda: sum(self.own_s),
                own_s=lambda i=i: self.own_s[i],
            )
            for i in range(processes)
        ]

    def run(self, computing: list[bool], rounds: int = 10) -> list[int]:
        """Let processes compute or wait, and return the threads that each takes in the end."""
        for _ in range(rounds):
            asked = [one.now() * yes for one, yes in zip(self.threads, computing, strict=True)]
            share = min(1.0, self.cores / max(sum(asked), 1))
            self.now_s += 1.5 * INTERVAL_S
            for i, number in enumerate(asked):
                self.own_s[i] += 1.5 * INTERVAL_S * number * share
        return [one.now() for one in self.threads]


@given(st.integers(1, 64))
def test_a_process_alone_takes_all_cores_and_gives_them_up_to_another(cores: int) -> None:
    machine = Machine(cores, 2)
    assert machine.run([True, False])[0] == cores
    both = machine.run([True, True])
    assert min(both) >= 1
    assert sum(both) <= max(cores + 1, 2)
    assert machine.run([False, True])[1] == cores


@given(st.integers(2, 16), st.lists(st.booleans(), min_size=2, max_size=6))
def test_those_that_compute_do_not_crowd_each_other(cores: int, computing: list[bool]) -> None:
    machine = Machine(cores, len(computing))
    found = [number for number, yes in zip(machine.run(computing, 20), computing, strict=True) if yes]
    assert all(1 <= number <= cores for number in found)
    # A thread more than there are cores for each process, at most: its share is rounded.
    assert sum(found) <= cores + len(found)


def test_a_number_that_is_set_stays() -> None:
    reads: list[float] = []
    threads = Threads(8, 3, 3, clock=lambda: float(len(reads)), machine_s=lambda: reads.append(0.0) or 80.0)
    before = len(reads)
    assert [threads.now(), threads.now()] == [3, 3]
    assert len(reads) == before


def test_nothing_is_measured_twice_within_an_interval() -> None:
    now_s, used = [0.0], [0.0]
    threads = Threads(2, 2, clock=lambda: now_s[0], machine_s=lambda: used[0], own_s=lambda: 0.0)
    used[0], now_s[0] = 1.0, INTERVAL_S / 2
    assert threads.now() == 2
    now_s[0] = 1.0
    assert threads.now() == 1


def test_what_this_process_uses_is_used_of_the_machine() -> None:
    machine_s, own_s = used_s(), time.process_time()
    while time.process_time() < own_s + 0.3:
        pass
    assert used_s() - machine_s > 0.2
