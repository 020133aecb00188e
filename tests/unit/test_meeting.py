"""Rendezvous of the learner's ranks: at one address, that of loopback where one machine has them all."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from echo_planes.errors import ClusterError, ConfigError
from echo_planes.learning import meeting
from echo_planes.learning.meeting import alone, interface, join_store, master_address, open_store

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables set, and all as they were afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_one_rank_meets_nobody_and_listens_nowhere() -> None:
    before = listening()
    store = alone()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert listening() == before


def test_several_ranks_of_one_machine_meet_on_loopback_alone() -> None:
    before = listening()
    first, port = open_store("127.0.0.1", None, 2)
    assert listening() - before == {("127.0.0.1", port)}  # so the others may be told
    second = join_store("127.0.0.1", port, 2)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert listening() - before == {("127.0.0.1", port)}
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"


def test_what_the_environment_names_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    alone()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ClusterError, match=f"learner.master_port={port}: .* choose another"):
            open_store("127.0.0.1", port, 2)


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1"), ("localhost", "::1"), ("node0", "10.1.2.3")]
)
def test_rank_0_listens_where_others_find_it(host: str, address: str) -> None:
    assert master_address(host, address) == address


def test_a_name_that_means_this_machine_here_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=node0: that is 127\.0\.1\.1 on this machine"):
        master_address("node0", "127.0.1.1")


def test_collectives_keep_to_the_interface_of_the_address() -> None:
    owned = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.1.2.3", "fe80::1"], "eth1": ["10.9.0.1"]}
    assert interface("10.1.2.3", owned) == "eth0"
    assert interface("::1", owned) == "lo"
    with pytest.raises(ConfigError, match=r"10\.7\.7\.7 is not an address of this machine"):
        interface("10.7.7.7", owned)


def test_a_host_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(meeting.socket, "getaddrinfo", fails)
    with pytest.raises(ConfigError, match="MASTER_ADDR=nowhere: no such host"):
        open_store("nowhere", None, 2)
