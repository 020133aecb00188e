"""Leases: who holds one, until when, and who may end it."""

from __future__ import annotations

import pytest

from echo_planes.data.replay.leases import LeaseTable
from echo_planes.errors import LeaseError
from echo_planes.types import Lease, Prompt

LEASE_S = 10.0


def book(epoch: int = 0) -> LeaseTable:
    leases = LeaseTable(LEASE_S, LEASE_S)
    leases.register("w0", epoch)
    return leases


def issue(
    leases: LeaseTable, name: str = "l0", worker: str = "w0", epoch: int = 0, now_s: float = 0.0
) -> Lease:
    ends_s = now_s + leases.lasts_s(0)
    return leases.issue(Lease(name, name, epoch, worker, Prompt(0, (1,)), 2, 0, ends_s), now_s)


def close(
    leases: LeaseTable, worker: str = "w0", epoch: int = 0, now_s: float = 0.0, name: str = "l0"
) -> str:
    try:
        leases.close(name, worker, epoch, now_s)
    except LeaseError as why:
        return str(why)
    return "closed"


def test_a_lease_runs_from_its_issue_and_ends_at_its_expiry() -> None:
    leases = book()
    assert issue(leases, now_s=5.0).expires_s == 15.0
    assert leases.expire(14.999) == []
    assert close(leases, now_s=14.999) == "closed"
    issue(leases, now_s=5.0)
    assert close(leases, now_s=15.0) == "expired"
    assert [lease.lease_id for lease in leases.expire(15.0)] == ["l0"]
    assert len(leases) == 0


def test_a_lease_ends_once() -> None:
    leases = book()
    issue(leases)
    assert close(leases) == "closed"
    assert close(leases) == "unknown"
    assert leases.expire(100.0) == []
    issue(leases)
    with pytest.raises(LeaseError, match="l0 was issued twice"):
        issue(leases)


def test_a_lease_is_held_by_its_own_worker_alone() -> None:
    leases = book()
    leases.register("w1", 0)
    issue(leases)
    assert leases.holds("l0", "w0", 0, 1.0)
    assert not leases.holds("l0", "w1", 0, 1.0)
    assert not leases.holds("l0", "w0", 0, 1.0 + leases.lease_s)


@pytest.mark.parametrize(("worker", "epoch"), [("w1", 0), ("w0", 1), ("w1", 1)])
def test_only_the_holder_closes_a_lease(worker: str, epoch: int) -> None:
    leases = book()
    leases.register("w1", 0)
    issue(leases)
    assert close(leases, worker, epoch) == "fenced"
    assert close(leases) == "closed"  # the attempt changed nothing


def test_a_new_incarnation_fences_the_old_one() -> None:
    leases = book()
    issue(leases)
    leases.register("w0", 1)
    assert leases.is_current("w0", 1)
    assert not leases.is_current("w0", 0)
    assert close(leases, epoch=0) == "fenced"
    assert close(leases, epoch=1) == "fenced"  # it does not inherit the lease either


def test_an_old_incarnation_cannot_come_back() -> None:
    leases = book(epoch=3)
    with pytest.raises(LeaseError, match="w0 registered epoch 2 after 3"):
        leases.register("w0", 2)
    leases.forget("w0")
    assert not leases.is_current("w0", 3)
    with pytest.raises(LeaseError, match="w0 registered epoch 2 after 3"):
        leases.register("w0", 2)
    leases.register("w0", 4)
    assert leases.is_current("w0", 4)


def test_forgetting_a_worker_ends_its_leases_and_no_others() -> None:
    leases = book()
    leases.register("w1", 0)
    issue(leases, "l0")
    issue(leases, "l1", "w1")
    assert [lease.lease_id for lease in leases.forget("w0")] == ["l0"]
    assert [lease.lease_id for lease in leases.live] == ["l1"]
    assert close(leases, name="l0") == "unknown"
    assert leases.forget("w0") == []


def test_renewal_counts_from_now() -> None:
    leases = book()
    issue(leases)
    leases.renew("w0", 0, ["l0", "no such lease"], 9.0)
    assert close(leases, now_s=18.9) == "closed"


@pytest.mark.parametrize(("worker", "epoch", "now_s"), [("w1", 0, 9.0), ("w0", 1, 9.0), ("w0", 0, 10.0)])
def test_a_renewal_by_somebody_else_or_too_late_does_nothing(worker: str, epoch: int, now_s: float) -> None:
    leases = book()
    issue(leases)
    leases.renew(worker, epoch, ["l0"], now_s)
    assert close(leases, now_s=10.0) == "expired"


def test_who_comes_back_neither_holds_nor_renews_what_it_had_before() -> None:
    leases = book()
    issue(leases)
    leases.register("w0", 1)
    for epoch in (0, 1):
        assert not leases.holds("l0", "w0", epoch, 1.0)
        leases.renew("w0", epoch, ["l0"], 9.0)
    assert [lease.lease_id for lease in leases.expire(LEASE_S)] == ["l0"]


def test_a_lost_worker_is_fenced_until_it_registers_again() -> None:
    """A partition: it is taken for lost, lives on, and hears of it only when it next asks."""
    leases = book()
    issue(leases)
    leases.forget("w0")
    assert not leases.is_current("w0", 0)
    issue(leases, "l1")  # a pull of it was under way
    assert not leases.holds("l1", "w0", 0, 1.0)
    assert close(leases, name="l1") == "fenced"
    leases.register("w0", 1)
    assert not leases.is_current("w0", 0)
    issue(leases, "l2", epoch=1)
    assert close(leases, epoch=1, name="l2") == "closed"


def test_a_renewed_lease_ends_when_its_worker_falls_silent() -> None:
    leases = book()
    issue(leases)
    leases.renew("w0", 0, ["l0"], 6.0)
    assert leases.expire(LEASE_S) == []
    assert leases.holds("l0", "w0", 0, 15.9)
    assert leases.expire(15.9) == []
    assert [lease.lease_id for lease in leases.expire(16.0)] == ["l0"]


def test_live_leases_are_counted_by_version_and_worker() -> None:
    leases = book()
    leases.register("w1", 0)
    issue(leases, "l0", now_s=2.0)
    issue(leases, "l1", now_s=1.0)
    issue(leases, "l2", "w1")
    assert dict(leases.versions) == {0: 3}
    assert [lease.lease_id for lease in leases.of_worker("w0")] == ["l1", "l0"]  # the oldest first
    close(leases, name="l0", now_s=3.0)
    assert dict(leases.versions) == {0: 2}
    assert [lease.lease_id for lease in leases.of_worker("w0")] == ["l1"]
    leases.give_up("l1")
    leases.expire(LEASE_S)
    assert (dict(leases.versions), leases.live, leases.of_worker("w1")) == ({}, (), [])


def test_what_was_recalled_is_asked_of_its_holder_alone_and_no_longer_once_it_ended() -> None:
    leases = book()
    leases.register("w1", 0)
    for name in ("l0", "l1", "l2"):
        issue(leases, name)
    chosen = leases.recall("w0", 2, lambda lease: 1, lambda lease: False, spare={"l2"})
    assert sorted(chosen) == ["l0", "l1"]
    assert leases.recalled_from("w0", 0) == ["l0", "l1"]
    assert leases.recalled_from("w1", 0) == []
    assert leases.recalled_from("w0", 1) == []
    leases.give_up("l0")
    assert leases.recalled_from("w0", 0) == ["l1"]
