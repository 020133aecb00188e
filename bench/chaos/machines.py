"""A Ray cluster over several machines of one: each has its own network, its own /tmp/ray and /dev/shm.

Machine 0 holds the head and whoever drives, the others a worker each. Packets between any two take the delay
of the link, and a share of them is lost. To be used in namespaces of their own (`shut_off`): nothing outlives
them, and no other Ray is seen or touched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.chaos.lives import wait_for
from tests.integration.fake_cluster import GCS_PORT, NAMESPACES, STORE_BYTES
from tests.integration.netns import ShapedNetwork

RTT_S, LOSS = 0.16, 0.02
MBIT = 100.0  # of every link, up and down
UP_S = 120.0  # for a machine to join, on a busy one
GONE_S = 10.0  # for the processes of a machine that was killed to be gone
PRIVATE = ("/tmp/ray", "/dev/shm")
# Ray's own choice is the lowest priority but four: beside other work an actor would take minutes to start.
USUAL = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}


def shut_off(words: Sequence[str]) -> list[str]:
    """Command that runs `words` in namespaces of their own. When the first process ends, all end.

    Interfaces have other names there than a learner of the caller's own process may have left for gloo.
    """
    unset = "-u GLOO_SOCKET_IFNAME -u NCCL_SOCKET_IFNAME"
    mounts = " && ".join(_mounts("/run/netns", *PRIVATE))
    script = f'{mounts} && ip link set lo up && exec env {unset} "$@"'
    return ["unshare", *NAMESPACES, "--", "sh", "-c", script, "sh", *words]


def _mounts(*folders: str) -> list[str]:
    return [f"mkdir -p {folder} && mount -t tmpfs tmpfs {folder}" for folder in folders]


class Machines:
    """The cluster, once `up` has made it. Machine i has one unit of the resource `machine<i>`.

    Args:
        net: a host for each machine.
        environment: of all processes of Ray, and so of every actor.
        hidden: folders that are empty on all machines but machine 0.
    """

    def __init__(
        self, net: ShapedNetwork, environment: Mapping[str, str], hidden: Sequence[Path] = ()
    ) -> None:
        self.net = net
        self._private = (*PRIVATE, *map(str, hidden))
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._environment = {**plain, **USUAL, **environment}
        self.address = f"{net.address(0)}:{GCS_PORT}"

    def start(self, machine: int) -> None:
        """Have it join the cluster; machine 0 makes the cluster.

        Raises:
            CalledProcessError, TimeoutExpired: Ray did not start.
        """
        role = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
        command = [
            *(str(Path(sys.executable).parent / "ray"), "start", "--num-cpus=2", "--disable-usage-stats"),
            *(f"--node-ip-address={self.net.address(machine)}", f"--object-store-memory={STORE_BYTES}"),
            f"--resources={json.dumps({f'machine{machine}': 1})}",
            *(role if machine == 0 else [f"--address={self.address}"]),
        ]
        if machine > 0:  # a file system of its own, as far as Ray looks
            script = " && ".join((*_mounts(*self._private), 'exec "$@"'))
            command = ["unshare", "--mount", "--", "sh", "-c", script, "sh", *command]
        with self.net.inside(machine):
            started = subprocess.run(
                command, env=self._environment, capture_output=True, text=True, timeout=UP_S, check=False
            )
        if started.returncode:
            raise RuntimeError(f"machine {machine} does not start: {started.stdout}{started.stderr}")

    def processes(self, machine: int) -> list[tuple[str, psutil.Process]]:
        """All that lives on it, with its name."""
        home = os.stat(f"/run/netns/{self.net.namespace(machine)}").st_ino
        found = []
        for process in psutil.process_iter():
            try:
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == home:
                    found.append((process.name(), process))
            except (OSError, psutil.NoSuchProcess):
                continue  # gone meanwhile, or a zombie
        return found

    def has_raylet(self, machine: int) -> bool:
        """Whether Ray's daemon lives there. One that hears that it was given up ends itself."""
        return any(name == "raylet" for name, _ in self.processes(machine))

    def signal(self, machine: int, number: signal.Signals) -> None:
        """To every process of the machine, the raylet first, so that it tells nobody of the others' ends."""
        for _, process in sorted(self.processes(machine), key=lambda one: one[0] != "raylet"):
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def clear(self, machine: int) -> None:
        """End whatever lives on it, and heal its link."""
        self.net.heal(machine)

        def gone() -> bool:
            self.signal(machine, signal.SIGKILL)
            return not self.processes(machine)

        wait_for(gone, GONE_S, f"the end of what lives on machine {machine}")


@contextmanager
def up(
    count: int,
    environment: Mapping[str, str],
    *,
    rtt_s: float = RTT_S,
    loss: float = LOSS,
    hidden: Sequence[Path] = (),
) -> Iterator[Machines]:
    """A cluster of so many machines, the head's among them."""
    with ShapedNetwork([MBIT] * count, [MBIT] * count, rtt_s, loss) as net:
        machines = Machines(net, environment, hidden)
        try:
            for machine in range(count):
                machines.start(machine)
            yield machines
        finally:
            for machine in range(count):
                machines.clear(machine)
