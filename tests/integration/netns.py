"""A network of hosts on one machine: a network namespace each, shaped uplinks, and a delay between any two.

Each namespace has one TUN device, behind a token bucket (tc tbf) of the host's uplink rate. A process of its
own (`python -m tests.integration.netns switch`) carries packets between them: it holds each back by half a
round trip, shapes every host's downlink, drops what would wait longer than `QUEUE_S` there, and cuts hosts
off when told to. It exists because this kernel may lack netem. Needs root and /dev/net/tun.

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
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"  # host i has address NETWORK.(i + 1)
QUEUE_S = 0.1  # a shaped link holds so much at most
TICK_S = 0.004  # packets are delivered together so often, as network cards do: it spares wake-ups
CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
VNET_HEADER_BYTES = 10
MAX_PACKET_BYTES = 65536 + VNET_HEADER_BYTES


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
    """

    def __init__(self, uplinks_mbit: Sequence[float], downlinks_mbit: Sequence[float], rtt_s: float) -> None:
        self.rtt_s = rtt_s
        self._uplinks_mbit = list(uplinks_mbit)
        self._downlinks_mbit = list(downlinks_mbit)
        self._tag = secrets.token_hex(3)
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> ShapedNetwork:
        descriptors = []
        try:
            for host, mbit in enumerate(self._uplinks_mbit):
                descriptors.append(self._make_host(host, mbit))
            plan = {"tuns": descriptors, "downlinks_mbit": self._downlinks_mbit, "delay_s": self.rtt_s / 2}
            self._switch = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.netns", "switch", json.dumps(plan)],
                stdin=subprocess.PIPE,
                text=True,
                pass_fds=descriptors,
                cwd=ROOT,
            )
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
            self._switch.wait()
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
        """What one plain TCP connection carries from host to host, once it has reached its rate."""
        script = [sys.executable, "-m", "tests.integration.netns"]
        with self.inside(receiver):
            sink = subprocess.Popen([*script, "sink"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        with self.inside(sender):
            options = ["source", self.address(receiver), str(seconds), congestion]
            source = subprocess.Popen([*script, *options], cwd=ROOT)
        out, _ = sink.communicate(timeout=seconds + 30)
        source.wait()
        return float(out)

    def _make_host(self, host: int, mbit: float) -> int:
        name, device = self.namespace(host), f"ep{self._tag}{host}"
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        # Segments stay whole up to 64 KiB on their way through the switch: it moves few, large packets.
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
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


class Switch:
    """Carries packets between TUN devices: delay, downlink shaping, cuts."""

    def __init__(self, tuns: Sequence[int], downlinks_mbit: Sequence[float], delay_s: float) -> None:
        self._tuns = list(tuns)
        self._seconds_per_byte = [8e-6 / mbit for mbit in downlinks_mbit]
        self._delay_s = delay_s - TICK_S  # what a packet waits on its way in and out, on average
        self._free_s = [0.0] * len(self._tuns)  # when each downlink has sent all that it was given
        self._waiting: list[deque[tuple[float, bytes]]] = [deque() for _ in self._tuns]
        self._cut: set[int] = set()

    def obey(self) -> None:
        """Follow orders on stdin; ends the process with it."""
        for line in sys.stdin:
            order = json.loads(line)
            if "cut" in order:
                self._cut.add(order["cut"])
            else:
                self._cut.discard(order["heal"])
        os._exit(0)

    def run(self) -> None:
        """For ever."""
        poll = select.epoll()
        hosts = {tun: host for host, tun in enumerate(self._tuns)}
        for tun in self._tuns:
            poll.register(tun, select.EPOLLIN)
        next_s = 0.0
        while True:
            for tun, _ in poll.poll(TICK_S if any(self._waiting) else 0.05):
                self._take(tun, hosts[tun])
            now_s = time.monotonic()
            if now_s >= next_s:
                self._deliver(now_s)
                next_s = now_s + TICK_S
            time.sleep(max(0.0, next_s - time.monotonic()))

    def _take(self, tun: int, host: int) -> None:
        for _ in range(64):  # then others have their turn
            try:
                packet = os.read(tun, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            target = packet[VNET_HEADER_BYTES + 19] - 1  # last byte of the destination's IPv4 address
            if packet[VNET_HEADER_BYTES] >> 4 != 4 or not 0 <= target < len(self._tuns):
                continue
            if host in self._cut or target in self._cut:
                continue
            arrival_s = time.monotonic() + self._delay_s
            done_s = max(arrival_s, self._free_s[target]) + len(packet) * self._seconds_per_byte[target]
            if done_s - arrival_s <= QUEUE_S:
                self._free_s[target] = done_s
                self._waiting[target].append((done_s, packet))

    def _deliver(self, now_s: float) -> None:
        for target, queue in enumerate(self._waiting):
            while queue and queue[0][0] <= now_s:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._tuns[target], queue.popleft()[1])


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
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection((address, 5201), timeout=10)
            break
        time.sleep(0.05)
    deadline_s = time.monotonic() + seconds
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    while time.monotonic() < deadline_s:
        connection.sendall(block)
    connection.close()


def main(role: str, *rest: str) -> None:
    """What the network's own processes do."""
    if role == "sink":
        _sink()
    elif role == "source":
        _source(rest[0], float(rest[1]), rest[2])
    else:
        plan = json.loads(rest[0])
        switch = Switch(plan["tuns"], plan["downlinks_mbit"], plan["delay_s"])
        threading.Thread(target=switch.obey, daemon=True).start()
        switch.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
