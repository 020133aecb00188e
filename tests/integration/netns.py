"""A network of hosts on one machine: a network namespace each, shaped uplinks, and a delay between any two.

Each namespace has one TUN device, behind a token bucket (tc tbf) of the host's uplink rate. A process of its
own (`tests/integration/netns_switch.py`) carries packets between them: it holds each back by half a
round trip, loses a share of them, shapes every host's downlink, drops what would wait longer than `QUEUE_S`
there, and cuts hosts off when told to. It exists because this kernel may lack netem. Needs root and
/dev/net/tun.

A namespace has the machine's default congestion control; only root's own connections may choose cubic, as
the plain one does that the link's rate is measured with.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"  # host i has address NETWORK.(i + 1)
QUEUE_S = 0.1  # a shaped link holds so much at most
READY_S = 60.0  # the switch may have to be compiled, and on busy cores
CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02


def missing() -> str:
    """Why no such network can be made here; "" when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"there is no {lacking[0]}"
    name = f"ep-probe-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class ShapedNetwork:
    """Hosts 0, 1, ... with an uplink and a downlink each. Use as a context manager.

    Args:
        uplinks_mbit, downlinks_mbit: one for each host.
        rtt_s: round trip between any two hosts.
        loss: share of packets that is lost on the way, in each direction.
    """

    def __init__(
        self,
        uplinks_mbit: Sequence[float],
        downlinks_mbit: Sequence[float],
        rtt_s: float,
        loss: float = 0.0,
    ) -> None:
        self.rtt_s = rtt_s
        self._loss = loss
        self._uplinks_mbit = list(uplinks_mbit)
        self._downlinks_mbit = list(downlinks_mbit)
        self._tag = secrets.token_hex(3)
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> ShapedNetwork:
        descriptors = []
        try:
            for host, mbit in enumerate(self._uplinks_mbit):
                descriptors.append(self._make_host(host, mbit))
            self._start_switch(descriptors)
        except BaseException:
            self.__exit__()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return self

    def __exit__(self, *why: object) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
        for host in range(len(self._uplinks_mbit)):
            subprocess.run(["ip", "netns", "delete", self.namespace(host)], capture_output=True)

    def namespace(self, host: int) -> str:
        """Its name, for `ip netns exec`."""
        return f"ep-{self._tag}-{host}"

    def address(self, host: int) -> str:
        """Its IPv4 address."""
        return f"{NETWORK}.{host + 1}"

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Processes that this thread starts meanwhile live on `host`."""
        with open("/proc/thread-self/ns/net") as outside:
            _enter(f"/run/netns/{self.namespace(host)}")
            try:
                yield
            finally:
                _setns(outside.fileno())

    def set_uplink(self, host: int, mbit: float) -> None:
        """Change a host's uplink rate."""
        self._shape("change", host, mbit)

    def cut(self, host: int) -> None:
        """From now on no packet goes to or from `host`."""
        self._tell({"cut": host})

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        self._tell({"heal": host})

    def plain_rate_bytes_per_s(
        self, sender: int, receiver: int, seconds: float = 4.0, congestion: str = "cubic"
    ) -> float:
        """Bytes a second of one plain TCP connection from host to host, once it has reached its rate."""
        script = [sys.executable, "-m", "tests.integration.netns"]
        with self.inside(receiver):
            sink = subprocess.Popen([*script, "sink"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        with self.inside(sender):
            options = ["source", self.address(receiver), str(seconds), congestion]
            source = subprocess.Popen([*script, *options], cwd=ROOT)
        out, _ = sink.communicate(timeout=seconds + 30)
        source.wait()
        return float(out)

    def _start_switch(self, tuns: list[int]) -> None:
        rates, delay_s = self._downlinks_mbit, self.rtt_s / 2
        plan = {"tuns": tuns, "downlinks_mbit": rates, "delay_s": delay_s, "queue_s": QUEUE_S}
        plan["loss"] = self._loss
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.netns", "switch", json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=tuns,
            cwd=ROOT,
        )
        assert self._switch.stdout is not None
        if not select.select([self._switch.stdout], [], [], READY_S)[0]:
            raise RuntimeError(f"the switch was not ready within {READY_S:.0f} s")
        if self._switch.stdout.readline() != "ready\n":
            raise RuntimeError("the switch ended before it was ready")

    def _make_host(self, host: int, mbit: float) -> int:
        name, device = self.namespace(host), f"ep{self._tag}{host}"
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        # Segments stay whole up to 64 KiB on their way through the switch: it moves few, large packets. But
        # where packets are lost they are of the usual size, or a share of them would be lost too seldom.
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM if self._loss else TUN_F_CSUM | TUN_F_TSO4)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "set", device, "netns", name)
        _run("ip", "-n", name, "link", "set", device, "name", "eth0", "txqueuelen", "2000")
        _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", link, "up")
        self._shape("add", host, mbit)
        return descriptor

    def _shape(self, verb: str, host: int, mbit: float) -> None:
        limit = ["latency", f"{QUEUE_S * 1e3:.0f}ms"]
        shape = ["tbf", "rate", f"{mbit * 1000:.0f}kbit", "burst", "128kb", *limit]
        _run("tc", "-n", self.namespace(host), "qdisc", verb, "dev", "eth0", "root", *shape)

    def _tell(self, order: dict[str, int]) -> None:
        if self._switch is None or self._switch.stdin is None:
            raise RuntimeError("the network is not up")
        self._switch.stdin.write(json.dumps(order) + "\n")
        self._switch.stdin.flush()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _enter(path: str) -> None:
    with open(path) as namespace:
        _setns(namespace.fileno())


def _setns(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _sink() -> None:
    """Receive one connection; print its rate over the second half of the time."""
    with socket.create_server(("0.0.0.0", 5201)) as server:
        connection, _ = server.accept()
    taken: list[tuple[float, int]] = []
    total = 0
    while data := connection.recv(1 << 20):
        total += len(data)
        taken.append((time.monotonic(), total))
    middle_s = (taken[0][0] + taken[-1][0]) / 2
    half = next(point for point in taken if point[0] >= middle_s)
    print((taken[-1][1] - half[1]) / (taken[-1][0] - half[0]))


def _source(address: str, seconds: float, congestion: str) -> None:
    """Send for so long."""
    block = os.urandom(1 << 18)
    give_up_s = time.monotonic() + READY_S
    while True:
        try:
            connection = socket.create_connection((address, 5201), timeout=10)
            break
        except ConnectionRefusedError:
            if time.monotonic() > give_up_s:
                raise
        time.sleep(0.05)
    deadline_s = time.monotonic() + seconds
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    while time.monotonic() < deadline_s:
        connection.sendall(block)
    connection.close()


def main(role: str, *rest: str) -> None:
    """Play a role of the network's own processes: `sink`, `source` or the switch."""
    if role == "sink":
        _sink()
    elif role == "source":
        _source(rest[0], float(rest[1]), rest[2])
    else:
        # Loads numba, which the other roles need not wait for.
        from tests.integration.netns_switch import run

        run(rest[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
