"""Workers that come and go while the loop runs."""

from __future__ import annotations

import pytest

from echo_planes.loop import events as ev
from echo_planes.testing.simulation import replace_section
from echo_planes.types import InstallReport
from tests.unit.test_controller import Loop, manifest, settings


def test_a_worker_that_is_wanted_is_started_and_gets_the_newest_version() -> None:
    loop = Loop(settings())
    loop.tell(ev.LearnerReady(0))
    loop.tell(ev.Published(manifest(0)))
    assert loop.tell(ev.WorkerWanted("w7")) == [ev.StartWorker("w7", 0, 0.0)]
    assert loop.tell(ev.WorkerReady("w7", 0)) == [ev.Install("w7", 0, fresh=False)]


def test_a_worker_that_is_to_leave_hands_over_first_and_is_asked_for_nothing_more() -> None:
    loop = Loop(settings(), ("w0", "w1"))
    loop.tell(ev.LearnerReady(0))
    loop.tell(ev.Published(manifest(0)))
    for worker in ("w0", "w1"):
        loop.tell(ev.WorkerReady(worker, 0))
    assert loop.tell(ev.WorkerUnwanted("w1", "surplus", 30.0)) == [ev.LeaveWorker("w1", 0, 30.0)]
    assert loop.tell(ev.WorkerUnwanted("w1", "surplus", 30.0)) == []
    asked = loop.tell(ev.Published(manifest(1, 0)))
    asked += loop.tell(ev.Installed(InstallReport("w0", 0, "d0", True, 0.1), 0))
    asked += loop.tell(ev.Installed(InstallReport("w1", 0, "d0", True, 0.1), 0))
    workers = [action.worker_ids for action in asked if isinstance(action, ev.Evaluate)]
    assert all("w1" not in ids for ids in workers)
    assert not [action for action in asked if isinstance(action, ev.Install) and action.worker_id == "w1"]
    assert loop.tell(ev.WorkerLeft("w1", 0)) == [ev.StopWorker("w1")]
    assert loop.tell(ev.WorkerLost("w1", 0, "too late")) == []
    assert loop.tell(ev.Installed(InstallReport("w1", 1, "d1", True, 0.1), 0)) == []


def test_a_worker_that_is_not_up_yet_or_dies_while_it_leaves_is_ended_at_once() -> None:
    loop = Loop(settings(), ("w0", "w1"))
    assert loop.tell(ev.WorkerUnwanted("w0", "too slow to come", 30.0)) == [ev.StopWorker("w0")]
    loop.tell(ev.WorkerReady("w1", 0))
    loop.tell(ev.WorkerUnwanted("w1", "surplus", 30.0))
    assert loop.tell(ev.WorkerLost("w1", 0, "its machine went")) == [ev.StopWorker("w1")]
    assert loop.controller.restarts == {"w0": 0, "w1": 0}


@pytest.mark.parametrize("scale", ["static", "ray"])
def test_in_a_fleet_that_follows_need_a_lost_worker_is_the_fleets_to_replace(scale: str) -> None:
    config = settings()
    config = replace_section(config, fleet={**config.fleet.model_dump(), "scale": scale})
    loop = Loop(config, ())
    loop.tell(ev.WorkerWanted("w0"))
    loop.tell(ev.WorkerReady("w0", 0))
    assert loop.tell(ev.WorkerLost("w0", 0, "it died")) == [ev.StopWorker("w0")]
