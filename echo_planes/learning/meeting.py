"""Rendezvous of the learner's ranks, which listens only on the address in use.

The store that torch makes by default listens on every address of the machine. It asks for no credentials, so
it would answer every caller.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import psutil
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from echo_planes.cluster.process import LOOPBACK
from echo_planes.errors import ClusterError, ConfigError

# Of one wait of a rank for the others. The run's own limits, which progress renews, are far shorter.
MEETING_LIMIT = timedelta(days=1)


def alone() -> Store:
    """Return the store of a group of one rank. It is in memory, and nothing listens."""
    _keep_to(LOOPBACK)
    return HashStore()


def open_store(host: str, port: int | None, world_size: int) -> tuple[Store, int]:
    """Open the store at which `world_size` ranks meet; return it with its port. Rank 0 only.

    It listens when this returns, so the others are told where only then. A rank that comes before would try
    again after ever longer pauses (27 s after 100 s), and look up the address's name for each try, which
    takes 10 s where no name server answers.

    Args:
        host: MASTER_ADDR: this machine, as the others reach it.
        port: a port; None: one that is free.
        world_size: number of ranks.

    Raises:
        ConfigError: `host` cannot be resolved, or is not an address at which other machines find rank 0.
        ClusterError: the port is taken.
    """
    address = master_address(host, _resolved(host))
    _keep_to(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port or 0), family=family, backlog=world_size)
    except OSError as error:
        raise ClusterError(
            f"learner.master_port={port}: rank 0 cannot listen on {address} ({error.strerror}); choose "
            "another port, or leave it out for a free one"
        ) from error
    number = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        number,
        world_size,
        is_master=True,
        timeout=MEETING_LIMIT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, number


def join_store(host: str, port: int, world_size: int) -> Store:
    """Join the store that rank 0 has opened.

    Raises:
        ConfigError: `host` cannot be resolved.
    """
    address = _resolved(host)
    _keep_to(_own_address(address))
    return TCPStore(address, port, world_size, is_master=False, timeout=MEETING_LIMIT)


def _keep_to(address: str) -> None:
    """Restrict gloo and NCCL to the interface of an address, unless the environment names another one."""
    name = interface(address, _addresses())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL takes a name without = as a prefix


def master_address(host: str, address: str) -> str:
    """Return the address on which rank 0 listens.

    Args:
        host: MASTER_ADDR.
        address: the address that `host` resolves to on this machine.

    Raises:
        ConfigError: `host` is a name that resolves to loopback here, where other machines do not find it.
    """
    if ipaddress.ip_address(address).is_loopback and host not in (address, "localhost"):
        raise ConfigError(
            f"MASTER_ADDR={host}: that is {address} on this machine, where no other finds it; set it to the "
            "address of the machine of rank 0"
        )
    return address


def interface(address: str, addresses: Mapping[str, Sequence[str]]) -> str:
    """Return the name of the interface that has `address`.

    Raises:
        ConfigError: no interface of this machine has it.
    """
    for name, owned in addresses.items():
        if address in owned:
            return name
    raise ConfigError(f"MASTER_ADDR: {address} is not an address of this machine, which was to be rank 0's")


def _resolved(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR={host}: no such host ({error.strerror})") from error


def _own_address(master: str) -> str:
    """Return the address from which this machine reaches rank 0."""
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # on a datagram socket this sends nothing
        return str(probe.getsockname()[0])


def _addresses() -> dict[str, list[str]]:
    return {
        name: [one.address.partition("%")[0] for one in owned]
        for name, owned in psutil.net_if_addrs().items()
    }
