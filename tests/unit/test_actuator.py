"""Machines as the fleet sees them: fixed ones, and what is made of a cluster's report."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.errors import ClusterError
from echo_planes.fleet.actuators.actuator import (
    Actuator,
    Machine,
    Sighting,
    StaticActuator,
    node_type,
    picture,
)

INSTANCE_TYPES = ("cheap", "dear")


def up(actuator: Actuator) -> dict[str, int]:
    nodes = asyncio.run(actuator.nodes())
    return {
        name: sum(n.instance_type_name == name and n.state == "up" for n in nodes) for name in INSTANCE_TYPES
    }


def want(actuator: Actuator, **counts: int) -> None:
    asyncio.run(actuator.want(counts))


# --- fixed machines ------------------------------------------------------------------------------


def test_fixed_machines_are_used_as_far_as_there_are_any() -> None:
    machines = StaticActuator({"cheap": 3, "dear": 1})
    assert asyncio.run(machines.nodes()) == ()
    want(machines, cheap=2)
    assert up(machines) == {"cheap": 2, "dear": 0}
    want(machines, cheap=9, dear=1)
    assert up(machines) == {"cheap": 3, "dear": 1}


def test_a_lower_want_takes_no_machine_from_its_worker() -> None:
    machines = StaticActuator({"cheap": 2, "dear": 1})
    want(machines, cheap=2)
    want(machines, cheap=0)
    assert up(machines)["cheap"] == 2
    first, second = asyncio.run(machines.nodes())
    asyncio.run(machines.release(first.node_id))
    assert asyncio.run(machines.nodes()) == (second,)
    want(machines, cheap=1)
    assert asyncio.run(machines.nodes()) == (second,)  # the floor is there already


def test_a_parked_machine_comes_back_without_its_worker() -> None:
    machines = StaticActuator({"cheap": 1})
    want(machines, cheap=1)
    (node,) = asyncio.run(machines.nodes())
    machines.assign(node.node_id, "w0")
    assert asyncio.run(machines.nodes()) == (Machine(node.node_id, "cheap", "up", worker_id="w0"),)
    asyncio.run(machines.release(node.node_id))
    want(machines, cheap=1)
    assert asyncio.run(machines.nodes()) == (node,)


def test_a_machine_with_notice_is_replaced() -> None:
    machines = StaticActuator({"cheap": 2})
    want(machines, cheap=1)
    (node,) = asyncio.run(machines.nodes())
    asyncio.run(machines.notice(node.node_id, 12.5))
    want(machines, cheap=1)
    leaving, fresh = asyncio.run(machines.nodes())
    assert (leaving.node_id, leaving.state, leaving.notice_deadline_s) == (node.node_id, "draining", 12.5)
    assert (fresh.state, fresh.notice_deadline_s) == ("up", None)


def test_after_closing_none_is_used() -> None:
    machines = StaticActuator({"cheap": 2})
    want(machines, cheap=2)
    asyncio.run(machines.close())
    assert asyncio.run(machines.nodes()) == ()


@pytest.mark.parametrize(("counts", "named"), [({"chaep": 1}, "'chaep'"), ({"cheap": -1}, "-1")])
def test_what_is_not_offered_is_refused(counts: dict[str, int], named: str) -> None:
    with pytest.raises(ClusterError, match=named):
        asyncio.run(StaticActuator({"cheap": 1}).want(counts))


def test_a_machine_that_is_not_in_use_is_refused() -> None:
    machines = StaticActuator({"cheap": 1})
    with pytest.raises(ClusterError, match="cheap/0"):
        machines.assign("cheap/0", "w0")


# --- a cluster's report --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["H100/us-east-1/spot", "RTX 4090/on_demand", "/a__B/"])
def test_the_name_of_a_node_type_fits_clouds_and_kubernetes(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", node_type(name))
    assert re.sub(r"\W|_", "", name.lower()) == node_type(name).replace("-", "")


def test_a_report_is_told_on_the_runs_clock() -> None:
    seen = [
        Sighting("b", "cheap", "draining", deadline_unix_s=1_000_030.0),
        Sighting("c", "dear", "up"),
        Sighting("a", "cheap", "dead"),
    ]
    nodes = picture(seen, {}, {}, {"b": "w1"}, clock_offset_s=50.0 - 1_000_000.0)
    assert nodes == (
        Machine("a", "cheap", "dead"),
        Machine("b", "cheap", "draining", notice_deadline_s=80.0, worker_id="w1"),
        Machine("c", "dear", "up"),
    )


def test_a_machine_that_has_come_is_not_pending_too() -> None:
    seen = [Sighting("a", "cheap", "up"), Sighting("b", "cheap", "draining")]
    nodes = picture(seen, {"cheap": 2}, {"cheap": 2}, {}, 0.0)
    assert [node.state for node in nodes] == ["up", "draining", "pending"]


counts = st.dictionaries(st.sampled_from(INSTANCE_TYPES), st.integers(0, 4))
sightings = st.lists(
    st.builds(
        Sighting,
        node_id=st.uuids().map(str),
        instance_type_name=st.sampled_from(INSTANCE_TYPES),
        state=st.sampled_from(["up", "draining", "dead"]),
    )
)


@given(seen=sightings, coming=counts, wanted=counts)
def test_pending_are_those_that_come_and_are_missing(
    seen: list[Sighting], coming: dict[str, int], wanted: dict[str, int]
) -> None:
    nodes = picture(seen, coming, wanted, {}, 0.0)
    assert len({node.node_id for node in nodes}) == len(nodes)
    assert {n.node_id for n in nodes if n.state != "pending"} == {s.node_id for s in seen}
    for instance_type_name in INSTANCE_TYPES:
        mine = [node.state for node in nodes if node.instance_type_name == instance_type_name]
        missing = max(0, wanted.get(instance_type_name, 0) - mine.count("up"))
        assert mine.count("pending") == min(coming.get(instance_type_name, 0), missing)
