"""The `ray` actuator against Ray's own autoscaler: machines come, are taken, are replaced and let go.

`python -m tests.integration.test_ray_autoscaler scenario` runs inside the fake cluster, told in JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from echo_planes.cluster.clock import MonotonicClock
from echo_planes.config.fleet import WorkerConfig
from echo_planes.errors import ClusterError
from echo_planes.fleet.actuators.actuator import Actuator, Machine, node_type
from tests.integration import fake_cluster
from tests.integration.fake_cluster import Kind, Plan
from tests.integration.harness import json_lines, wait_until
from tests.thorough import takes_minutes

pytestmark = pytest.mark.integration
SPOT, SURE = "cheap/spot", "dear/on_demand"
LABELS = {SPOT: {"market": "spot"}, SURE: {"market": "on_demand"}}
KINDS = [Kind(SPOT, 3, LABELS[SPOT]), Kind(SURE, 1, LABELS[SURE])]
NOTICE_S = 8.0  # what the fake cloud gives a machine
LIMIT_S = 90.0  # of any one wait, on busy cores

TOLD = 1  # where the program inside tells what it sees
CLOCK = MonotonicClock()

Told = dict[str, dict[str, Any]]


# --- inside --------------------------------------------------------------------------------------


def tell(event: str, **facts: Any) -> None:
    os.write(TOLD, json.dumps({"event": event, **facts}).encode() + b"\n")


def shown(nodes: tuple[Machine, ...]) -> list[list[Any]]:
    return [[node.node_id, node.instance_type_name, node.state, node.worker_id] for node in nodes]


async def old() -> None:
    """Tell the error of a cluster with Ray's old autoscaler; then nothing, until the process is killed."""
    import ray

    from echo_planes.fleet.actuators.ray_nodes import RayNodes

    ray.init(log_to_driver=False, logging_level="ERROR")
    try:
        await RayNodes(LABELS, CLOCK).check()
    except ClusterError as error:
        tell("old", error=str(error), namespace=os.readlink("/proc/self/ns/pid"))
    await asyncio.get_running_loop().create_future()


def up(nodes: tuple[Machine, ...], instance_type_name: str) -> list[str]:
    return [n.node_id for n in nodes if n.state == "up" and n.instance_type_name == instance_type_name]


async def until(
    actuator: Actuator, condition: Callable[[tuple[Machine, ...]], bool], what: str
) -> tuple[Machine, ...]:
    """Wait until the condition holds; return the machines that there are then."""
    deadline_s = CLOCK.now_s() + LIMIT_S
    while not condition(nodes := await actuator.nodes()):
        if CLOCK.now_s() > deadline_s:
            raise AssertionError(f"waited in vain for {what}: {shown(nodes)}")
        await asyncio.sleep(0.2)
    return nodes


def idle_ones_are_gone(nodes: tuple[Machine, ...]) -> bool:
    return all(node.state == "dead" for node in nodes)


class Occupant:
    """An actor that says where it is."""

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


async def scenario() -> None:
    """The life of a few machines."""
    import ray

    from echo_planes.fleet.actuators.ray_nodes import RayNodes

    ray.init(log_to_driver=False, logging_level="ERROR")
    machines = RayNodes(LABELS, CLOCK)
    await machines.check()
    tell("empty", namespace=os.readlink("/proc/self/ns/pid"), nodes=shown(await machines.nodes()))
    occupants = await two_come(machines)
    first, second = occupants
    await one_is_preempted(machines, first)
    await what_is_told_goes(machines, second, occupants[second])
    await impossible_wishes(machines, RayNodes({SPOT: {"market": "elsewhere"}}, CLOCK))
    await machines.want({SPOT: 1})
    await until(machines, lambda nodes: len(up(nodes, SPOT)) == 1, "one more machine")
    await machines.close()
    nodes = await until(machines, idle_ones_are_gone, "the end of what is idle")
    tell("closed", nodes=shown(nodes))


async def two_come(machines: Actuator) -> dict[str, Any]:
    """Two spot machines, with an actor on each; returns the actors by machine."""
    import ray

    await machines.want({SPOT: 2, SURE: 0})
    coming = await until(
        machines, lambda nodes: any(n.state == "pending" for n in nodes), "machines on their way"
    )
    tell("coming", nodes=shown(coming))
    nodes = await until(machines, lambda nodes: len(up(nodes, SPOT)) == 2, "two spot machines")
    occupants = {}
    for worker_id, node_id in zip(("w0", "w1"), up(nodes, SPOT), strict=True):
        placed = {"resources": {SPOT: 1}, "label_selector": {"ray.io/node-id": node_id}}
        occupants[node_id] = ray.remote(Occupant).options(num_cpus=0, **placed).remote()
        machines.assign(node_id, worker_id)
    where = [await occupant.node.remote() for occupant in occupants.values()]
    tell("two", nodes=shown(await machines.nodes()), where=where)
    return occupants


async def one_is_preempted(machines: Actuator, doomed: str) -> None:
    """The test gives `doomed` its notice, from outside, and ends it at its deadline."""
    nodes = await until(machines, lambda nodes: any(n.state == "draining" for n in nodes), "the notice")
    (leaving,) = (node for node in nodes if node.state == "draining")
    tell("notice", node_id=leaving.node_id, left_s=(leaving.notice_deadline_s or 0.0) - CLOCK.now_s())
    nodes = await until(
        machines, lambda nodes: len(up(nodes, SPOT)) == 2, "a machine instead of the one that leaves"
    )
    tell("replaced", nodes=shown(nodes), dead_already=any(n.state == "dead" for n in nodes))
    nodes = await until(
        machines,
        lambda nodes: any(n.node_id == doomed and n.state == "dead" for n in nodes),
        "the end of a machine",
    )
    tell("preempted", nodes=shown(nodes))


async def what_is_told_goes(machines: Actuator, released: str, occupant: Any) -> None:
    """A dear machine comes; one is released, one gets a notice, and then nobody wants any."""
    import ray

    await machines.want({SPOT: 2, SURE: 1})
    nodes = await until(machines, lambda nodes: len(up(nodes, SURE)) == 1, "the dear machine")
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    tell("dear", nodes=shown(nodes), market=labels[up(nodes, SURE)[0]].get("market"))

    # The one with a worker may go; the one that nobody released stays.
    await machines.want({SPOT: 1, SURE: 1})
    ray.kill(occupant)
    await machines.release(released)
    nodes = await until(
        machines, lambda nodes: released not in up(nodes, SPOT), "the end of the released machine"
    )
    tell("released", nodes=shown(nodes), released=released)

    sure = up(nodes, SURE)[0]
    await machines.notice(sure, CLOCK.now_s() + 1000.0)  # it is idle: Ray ends it at once
    nodes = await until(
        machines,
        lambda nodes: sure not in up(nodes, SURE),
        "the drain of a machine whose cloud spoke up",
    )
    tell("noticed", nodes=shown(nodes), node_id=sure)

    await machines.want({})
    tell("none", nodes=shown(await until(machines, idle_ones_are_gone, "the end of what is idle")))


async def impossible_wishes(machines: Actuator, elsewhere: Actuator) -> None:
    """More than there can be, and labels that no machine has."""
    for event, actuator, wanted in (
        ("impossible", machines, {SPOT: 99}),
        ("mislabelled", elsewhere, {SPOT: 1}),
    ):
        try:
            await actuator.want(wanted)
            await until(actuator, lambda nodes: False, "a refusal")
        except ClusterError as error:
            tell(event, error=str(error))


# --- outside -------------------------------------------------------------------------------------


@contextmanager
def cluster(folder: Path, role: str, autoscaler: str = "v2") -> Iterator[subprocess.Popen[bytes]]:
    """The fake cluster with this file as a program in it; output in `folder`."""
    why_not = fake_cluster.missing()
    if why_not:
        pytest.skip(why_not)
    plan = Plan(KINDS, autoscaler=autoscaler, idle_s=3.0)
    words = [sys.executable, "-m", "tests.integration.test_ray_autoscaler", role]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            fake_cluster.command(plan, words), cwd=fake_cluster.ROOT, stdout=out, stderr=err
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def living_in(namespace: str) -> list[int]:
    """Processes of a process namespace."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            if os.readlink(link) == namespace:
                found.append(int(link.parts[2]))
        except OSError:
            continue  # ended meanwhile
    return found


def states(told: dict[str, Any]) -> dict[str, str]:
    return {node_id: state for node_id, _, state, _ in told["nodes"]}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Facts that the script inside saw, by event."""
    folder = tmp_path_factory.mktemp("autoscaler")

    def heard(event: str) -> dict[str, Any] | None:
        lines = json_lines(folder / "out")
        if process.poll() not in (None, 0):
            raise AssertionError(f"it ended early:\n{lines}\n{(folder / 'err').read_text()[-4000:]}")
        return next((line for line in lines if line["event"] == event), None)

    with cluster(folder, "scenario") as process:
        two = wait_until(lambda: heard("two"), 2 * LIMIT_S, "two machines")
        assert two is not None
        preempt = [sys.executable, "-m", "tests.integration.fake_cluster", "preempt"]
        doomed = two["nodes"][0][0]
        cloud = [*fake_cluster.enter(process.pid), *preempt, doomed, str(NOTICE_S)]
        subprocess.run(cloud, check=True, timeout=LIMIT_S + NOTICE_S)
        wait_until(lambda: heard("closed"), 5 * LIMIT_S, "the end")
        process.wait(LIMIT_S)
    return {line["event"]: line for line in json_lines(folder / "out")}


def test_what_is_wanted_comes(told: Told) -> None:
    assert told["empty"]["nodes"] == []  # the head is not a rollout machine
    assert {state for _, _, state, _ in told["coming"]["nodes"]} <= {"pending", "up"}
    assert len(told["coming"]["nodes"]) <= 2
    two = told["two"]
    assert [(instance_type, state) for _, instance_type, state, _ in two["nodes"]] == [(SPOT, "up")] * 2
    assert {node_id: worker_id for node_id, _, _, worker_id in two["nodes"]} == {
        two["where"][0]: "w0",
        two["where"][1]: "w1",
    }


def test_a_preempted_machine_is_seen_with_its_deadline_and_replaced(told: Told) -> None:
    doomed, other = (node_id for node_id, _, _, _ in told["two"]["nodes"])
    assert told["notice"]["node_id"] == doomed
    assert 0 < told["notice"]["left_s"] <= NOTICE_S
    after = states(told["preempted"])
    assert after.pop(doomed) == "dead"
    assert after.pop(other) == "up"
    assert list(after.values()) == ["up"]


def test_an_instance_type_is_its_resource_and_its_label(told: Told) -> None:
    dear = [row for row in told["dear"]["nodes"] if row[1] == SURE]
    assert [row[2] for row in dear] == ["up"]
    assert told["dear"]["market"] == "on_demand"
    assert sum(row[1] == SPOT and row[2] == "up" for row in told["dear"]["nodes"]) == 2


def test_what_is_released_goes_and_nothing_else(told: Told) -> None:
    released = told["released"]["released"]
    before = {row[0] for row in told["dear"]["nodes"] if row[2] == "up"}
    after = {row[0] for row in told["released"]["nodes"] if row[2] == "up"}
    assert after == before - {released}


def test_a_notice_is_passed_on_to_ray(told: Told) -> None:
    assert states(told["noticed"])[told["noticed"]["node_id"]] in ("draining", "dead")


def test_what_nobody_wants_goes(told: Told) -> None:
    assert set(states(told["none"]).values()) == {"dead"}
    assert set(states(told["closed"]).values()) == {"dead"}


def test_an_impossible_wish_is_told(told: Told) -> None:
    assert f"99 {SPOT}" in told["impossible"]["error"]
    assert "max_workers" in told["impossible"]["error"]
    assert "label" in told["mislabelled"]["error"]


@pytest.mark.parametrize("name", ["aws_spot", "gcp_spot", "kuberay"])
def test_ray_reads_the_cluster_files_as_they_are_meant(name: str) -> None:
    """Ray's own readers find every instance type, with its resource, its labels and its most."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepare = _derive_autoscaling_config_from_ray_cr if name == "kuberay" else prepare_config
    config = prepare(yaml.safe_load((fake_cluster.ROOT / f"configs/cluster/{name}.yaml").read_text()))
    validate_config(config)
    kinds = config["available_node_types"]
    found = {key: kind for key, kind in kinds.items() if key != config["head_node_type"]}
    assert len(found) == 3
    for type_name, kind in found.items():
        instance_type = WorkerConfig(**kind["labels"]).instance_type
        assert node_type(instance_type) == type_name
        assert kind["resources"][instance_type] == 1
        assert kind["min_workers"] == 0 < kind["max_workers"]


def test_nothing_outlives_the_cluster(told: Told) -> None:
    assert living_in(told["empty"]["namespace"]) == []


@takes_minutes
def test_an_autoscaler_that_ignores_labels_is_refused_and_a_killed_cluster_leaves_nothing(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, "old", autoscaler="v1") as process:
        wait_until(lambda: json_lines(tmp_path / "out"), 2 * LIMIT_S, "the refusal")
        (line,) = json_lines(tmp_path / "out")
        assert "RAY_enable_autoscaler_v2=1" in line["error"]
        assert len(living_in(line["namespace"])) > 3  # the head's processes, and who waits for ever
        process.kill()
        process.wait()
        wait_until(lambda: not living_in(line["namespace"]), 10.0, "the end of all that is inside")


if __name__ == "__main__":
    TOLD = os.dup(1)
    os.dup2(2, 1)  # whatever Ray has to say goes elsewhere
    asyncio.run({"scenario": scenario, "old": old}[sys.argv[1]]())
