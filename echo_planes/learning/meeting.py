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


def meet(rank: int, world_size: int, port: int, timeout: timedelta) -> Store:
    """Return the store of a process group: in memory for one rank, else at MASTER_ADDR (default: loopback).

    Also restrict gloo and NCCL to the interface of that address, unless the environment names another.

    Raises:
        ConfigError: MASTER_ADDR cannot be resolved, or is not an address at which other machines find rank 0.
        ClusterError: the port is taken.
    """
    host = os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    address = LOOPBACK if world_size == 1 else master_address(host, _resolved(host))
    name = interface(_own_address(rank, address), _addresses())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL takes a name without = as a prefix
    if world_size == 1:
        return HashStore()
    if rank > 0:
        return TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=world_size)
    except OSError as error:
        raise ClusterError(
            f"learner.master_port={port}: rank 0 cannot listen on {address} ({error.strerror}); choose "
            "another port, or leave it out for a free one"
        ) from error
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


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


def _own_address(rank: int, master: str) -> str:
    """Return the address from which this machine reaches rank 0."""
    if rank == 0:
        return master
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # on a datagram socket this sends nothing
        return str(probe.getsockname()[0])


def _addresses() -> dict[str, list[str]]:
    return {
        name: [one.address.partition("%")[0] for one in owned]
        for name, owned in psutil.net_if_addrs().items()
    }
