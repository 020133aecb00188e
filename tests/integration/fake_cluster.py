"""A Ray cluster with the real autoscaler (v2) whose machines are processes, shut off from everything else.

::

    python -m tests.integration.fake_cluster --nodes cpu/spot=3,market=spot --nodes dear=1 -- COMMAND ...

starts a head, runs COMMAND with RAY_ADDRESS set, and exits with its status. Each `--nodes
NAME=MAX,LABEL=VALUE` is a kind of machine: the autoscaler may start MAX of it, each with CPUs, a unit of a
custom resource NAME, and the labels. All of it lives in namespaces of its own (processes, network, mounts),
with its own /tmp/ray and /dev/shm: no port is taken outside, no other Ray is seen or touched, and nothing
outlives the command.

From outside, `enter` gives the words that run a program inside; `python -m tests.integration.fake_cluster
preempt NODE_ID DEADLINE_S` is one: notice to a machine, as a cloud gives it, and its end at the deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from echo_planes.fleet.actuators.actuator import node_type

ROOT = Path(__file__).resolve().parents[2]
HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # what Ray's fake provider calls it
GCS_PORT = 6379  # of a network that nobody else is in
STORE_BYTES = 80_000_000  # of each node's object store; Ray's least is 75 MiB
HEAD_LIMIT_S = 120.0  # until the head is up, on busy cores
HEAD_ATTEMPTS = 3  # Ray gives its own raylet 30 s, which busy cores have exceeded once
NAMESPACES = ("--pid", "--net", "--mount", "--ipc", "--fork", "--mount-proc", "--kill-child")
PROVIDER = {
    "type": "external",
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "head_node_id": HEAD_ID,
    "launch_multiple": True,
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
}
# Steps of `ray up` on a machine: none; but Ray misses the keys otherwise.
NOTHING: dict[str, Any] = {
    **{f"{kind}_commands": [] for kind in ("initialization", "setup", "head_setup", "worker_setup")},
    **{f"{role}_start_ray_commands": [] for role in ("head", "worker")},
    **{key: [] for key in ("rsync_exclude", "rsync_filter", "cluster_synced_files")},
    **{key: {} for key in ("file_mounts", "auth", "docker")},
    "file_mounts_sync_continuously": False,
    "upscaling_speed": 1.0,
}
# For whoever talks to the cluster. No token: nobody else can reach it.
CLIENT = {"RAY_ADDRESS": f"127.0.0.1:{GCS_PORT}", "RAY_AUTH_MODE": "disabled"}
# Nodes that were killed are missed after about 3 s, not 15.
HEAD = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True)
class Kind:
    """A kind of machine."""

    name: str  # of an instance type
    max_count: int
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, words: str) -> Kind:
        """NAME=MAX[,LABEL=VALUE...]"""
        (name, most), *labels = (word.split("=", 1) for word in words.split(","))
        return cls(name, int(most), dict(labels))


@dataclass(frozen=True)
class Plan:
    """The cluster."""

    kinds: list[Kind]
    head_cpus: int = 2
    node_cpus: int = 1
    autoscaler: str = "v2"  # or v1
    idle_s: float = 5.0  # after which the autoscaler lets go of a machine that nobody asks for
    logs: str = ""  # folder that Ray's logs are copied to at the end; "": none


def missing() -> str:
    """Why no such cluster can be had here; "" when it can."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "there is no unshare or no ip"
    tried = subprocess.run(
        [*_unshare(), "sh", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link set lo up"],
        capture_output=True,
        text=True,
    )
    return f"no namespace of its own: {tried.stderr.strip()}" if tried.returncode else ""


def command(plan: Plan, inside: Sequence[str]) -> list[str]:
    """Command that, from outside, runs `inside` on the cluster. Killing its process ends it all."""
    role = [sys.executable, "-m", "tests.integration.fake_cluster", "inside", json.dumps(asdict(plan))]
    return [*_unshare(), *role, *inside]


def enter(process_id: int) -> list[str]:
    """The words that put a command into the cluster that process `process_id` is, started by `command`."""
    (first,) = psutil.Process(process_id).children()
    client = [f"{name}={value}" for name, value in CLIENT.items()] + [f"PYTHONPATH={ROOT}"]
    return ["nsenter", "--target", str(first.pid), "--pid", "--net", "--mount", "--ipc", "env", *client]


def _unshare() -> list[str]:
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *NAMESPACES, "--"]


# --- inside --------------------------------------------------------------------------------------


def _run_inside(plan: Plan, inside: Sequence[str]) -> int:
    """The first process of the namespaces: when it ends, the kernel ends all others."""
    Path("/tmp/ray").mkdir(exist_ok=True)
    for mount in ("/tmp/ray", "/dev/shm"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mount], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    _start_head(plan)
    child = subprocess.Popen(inside, env=_environment())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda heard, _: child.send_signal(heard))
    status = None
    while status is None:  # orphans are the first process's to bury
        process_id, ended = os.wait()
        if process_id == child.pid:
            status = os.waitstatus_to_exitcode(ended)
    if plan.logs:
        shutil.copytree(
            "/tmp/ray/session_latest/logs", plan.logs, dirs_exist_ok=True, ignore_dangling_symlinks=True
        )
    return status if status >= 0 else 128 - status


def _environment(**own: str) -> dict[str, str]:
    """This process's, less what belongs to another Ray. Actors of any machine find this checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**kept, **CLIENT, "PYTHONPATH": str(ROOT), **own}


def _start_head(plan: Plan) -> None:
    head = {"CPU": plan.head_cpus, "object_store_memory": STORE_BYTES}
    types: dict[str, Any] = {"ray.head.default": {"resources": head, "node_config": {}, "max_workers": 0}}
    for kind in plan.kinds:
        types[node_type(kind.name)] = {
            "resources": {"CPU": plan.node_cpus, kind.name: 1, "object_store_memory": STORE_BYTES},
            "labels": kind.labels,
            "node_config": {},
            "min_workers": 0,
            "max_workers": kind.max_count,
        }
    config = {
        "cluster_name": "fake",
        "max_workers": sum(kind.max_count for kind in plan.kinds),
        "idle_timeout_minutes": plan.idle_s / 60,
        "provider": PROVIDER,
        "head_node_type": "ray.head.default",
        "available_node_types": types,
        **NOTHING,
    }
    path = Path("/tmp/ray/autoscaling.json")
    path.write_text(json.dumps(config))
    environment = _environment(**HEAD, RAY_enable_autoscaler_v2=str(int(plan.autoscaler == "v2")))
    del environment["RAY_ADDRESS"]  # `ray start` refuses it
    ray = str(Path(sys.executable).parent / "ray")
    start = [
        *(ray, "start", "--head", f"--autoscaling-config={path}"),
        *(f"--port={GCS_PORT}", "--node-ip-address=127.0.0.1", f"--num-cpus={plan.head_cpus}"),
        *(f"--object-store-memory={STORE_BYTES}", "--include-dashboard=false", "--disable-usage-stats"),
    ]
    for attempts_left in reversed(range(HEAD_ATTEMPTS)):
        # The command's own output is what stdout is for.
        started = subprocess.run(
            start, env=environment, stdout=sys.stderr.fileno(), check=not attempts_left, timeout=HEAD_LIMIT_S
        )
        if started.returncode == 0:
            return
        subprocess.run([ray, "stop", "--force"], stdout=sys.stderr.fileno(), check=True, timeout=HEAD_LIMIT_S)


# --- what a cloud does to its machines -----------------------------------------------------------


def give_notice(node_id: str, deadline_s: float) -> None:
    """Tell Ray that a machine will be gone in `deadline_s`, as a cloud's own agent would. From inside."""
    from ray.autoscaler.v2.sdk import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + deadline_s) * 1000)
    client = GcsClient(address=f"127.0.0.1:{GCS_PORT}")
    accepted, why = client.drain_node(node_id, reason, "spot notice", deadline_ms)
    if not accepted:
        raise RuntimeError(f"node {node_id} refuses its notice: {why}")


def kill_machine(node_id: str) -> None:
    """The end of a machine: its raylet first, then all that belonged to it. From inside."""
    for process in psutil.process_iter(["name", "environ"]):
        variables = process.info["environ"] or {}
        if process.info["name"] == "raylet" and variables.get("RAY_OVERRIDE_NODE_ID_FOR_TESTING") == node_id:
            rest = process.children(recursive=True)
            for doomed in (process, *rest):
                try:
                    doomed.kill()
                except psutil.NoSuchProcess:
                    continue  # it went with its parent
            return
    raise RuntimeError(f"no machine {node_id}")


def preempt(node_id: str, deadline_s: float) -> None:
    """Notice, and the end when its time is up. From inside."""
    give_notice(node_id, deadline_s)
    threading.Event().wait(deadline_s)
    kill_machine(node_id)


def main(words: Sequence[str]) -> int:
    """See the head of this file."""
    if words[:1] == ["inside"]:
        plan = json.loads(words[1])
        return _run_inside(Plan(**{**plan, "kinds": [Kind(**kind) for kind in plan["kinds"]]}), words[2:])
    if words[:1] == ["preempt"]:
        preempt(words[1], float(words[2]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.integration.fake_cluster")
    parser.add_argument("--nodes", action="append", required=True, type=Kind.parse, metavar="NAME=MAX,...")
    parser.add_argument("--head-cpus", type=int, default=Plan.head_cpus)
    parser.add_argument("--node-cpus", type=int, default=Plan.node_cpus)
    parser.add_argument("--idle-s", type=float, default=Plan.idle_s)
    parser.add_argument("--logs", default="", help="copy Ray's logs to this folder at the end")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    plan = Plan(given.nodes, given.head_cpus, given.node_cpus, idle_s=given.idle_s, logs=given.logs)
    inside = given.command[1:] if given.command[:1] == ["--"] else given.command
    why_not = missing()
    if why_not or not inside:
        print(f"error: {why_not or 'no COMMAND after --'}", file=sys.stderr)
        return 2
    whole = command(plan, inside)
    os.execvp(whole[0], whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
