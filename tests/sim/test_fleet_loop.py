"""The whole loop with a fleet that follows price and need: real reconciler, runner and data plane."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from echo_planes.config.fleet import FleetConfig, WorkerConfig
from echo_planes.config.schema import Config
from echo_planes.fleet.actuators.actuator import Machine
from echo_planes.testing.simulation import Faults, Simulation, Trace, tiny_config
from tests.sim.test_loop import check
from tests.thorough import examples
from tests.unit.test_reconcile_loop import Machines

CHEAP, DEAR = "cheap/spot", "dear/on_demand"


def fleet_config(
    steps: int = 40, *, max_staleness: int = 3, counts: tuple[int, int] = (1, 1), **fleet: object
) -> Config:
    kinds = [
        WorkerConfig(sku="cheap", market="spot", usd_per_hour=0.2, count=counts[0], max_count=3),
        WorkerConfig(sku="dear", usd_per_hour=1.0, count=counts[1], max_count=3),
    ]
    config = tiny_config(steps=steps, max_staleness=max_staleness)
    given = {"scale": "static", "tick_s": 1.0, "sustain_s": 5.0, **fleet}
    settings = FleetConfig(workers=kinds, **given)  # type: ignore[arg-type]
    return config.model_copy(update={"fleet": settings})


def started(trace: Trace) -> list[str]:
    return [
        line.split()[1] for line in trace.lines if line.startswith("worker ") and line.endswith("alive=True")
    ]


def ended(trace: Trace) -> list[str]:
    return [
        line.split()[1] for line in trace.lines if line.startswith("worker ") and line.endswith("alive=False")
    ]


def check_fleet(trace: Trace, machines: Machines | None = None) -> None:
    """Check what must hold however the fleet went: no worker starts or ends twice, or ends unstarted."""
    assert max(Counter(started(trace)).values()) == 1
    assert max(Counter(ended(trace)).values(), default=1) == 1
    assert set(ended(trace)) <= set(started(trace))
    if machines is not None:
        assert machines.calls[-1] == "close"


class Stormy(Machines):
    """Machines that are announced to go and then go, at times drawn from a seed."""

    def __init__(self, seed: int, mean_s: float, notice_s: float, boot_s: Mapping[str, float]) -> None:
        super().__init__(boot_s)
        self._rng = random.Random(f"storm/{seed}")
        self._mean_s = mean_s
        self._notice_s = notice_s
        self._ends_s: dict[str, float] = {}
        self.num_gone = 0

    async def nodes(self) -> tuple[Machine, ...]:
        now_s = self._now_s()
        for node in list(self.there.values()):
            if node.instance_type_name != CHEAP:
                continue
            end_s = self._ends_s.setdefault(node.node_id, now_s + self._rng.expovariate(1 / self._mean_s))
            if now_s >= end_s + self._notice_s and node.state == "draining":
                self.change(node.node_id, "dead")
                self.num_gone += 1
            elif now_s >= end_s and node.state == "up":
                self.change(node.node_id, "draining", end_s + self._notice_s)
        return await super().nodes()


@pytest.mark.parametrize("seed", range(examples(8)))
def test_lost_workers_are_replaced_and_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    config = fleet_config()
    faults = Faults(die_at_s={("w0", 0): 12.0, ("w1", 0): 20.0})
    outcome, trace = Simulation(config, tmp_path, faults=faults, seed=seed).run()
    check(config, outcome, trace)
    check_fleet(trace)
    assert outcome.status == "done", outcome.error
    assert len(started(trace)) > 2


@pytest.mark.parametrize("seed", range(examples(12)))
def test_workers_that_die_at_any_time(tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"deaths/{seed}")
    deaths = {(f"w{i}", 0): rng.uniform(0.0, 120.0) for i in range(8)}
    config = fleet_config(60, counts=(2, 1))
    machines = Machines(3.0)
    simulation = Simulation(config, tmp_path, faults=Faults(die_at_s=deaths), seed=seed, actuator=machines)
    outcome, trace = simulation.run()
    check(config, outcome, trace)
    check_fleet(trace, machines)
    assert outcome.status == "done", outcome.error
    assert len(trace.batches) == 60
    assert ended(trace), "nobody died"


@pytest.mark.parametrize("max_staleness", [0, 3])
@pytest.mark.parametrize("seed", range(examples(8)))
def test_machines_that_are_announced_to_go(tmp_path: Path, seed: int, max_staleness: int) -> None:
    config = fleet_config(60, max_staleness=max_staleness, counts=(3, 1), scale="ray")
    machines = Stormy(seed, mean_s=20.0, notice_s=10.0, boot_s={CHEAP: 3.0, DEAR: 5.0})
    outcome, trace = Simulation(config, tmp_path, seed=seed, actuator=machines).run()
    check(config, outcome, trace)
    check_fleet(trace, machines)
    assert outcome.status == "done", outcome.error
    assert machines.num_gone > 0
    assert [line for line in trace.lines if line.startswith("worker left") and "go on elsewhere" in line]


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_an_instance_type_that_never_comes_is_passed_over_for_the_next(
    tmp_path: Path, max_staleness: int
) -> None:
    """Nobody ever served, so nothing is known of the need, and the dearer type is tried all the same."""
    config = fleet_config(max_staleness=max_staleness, counts=(2, 0), scale="ray", boot_limit_s=20.0)
    machines = Machines({CHEAP: float("inf"), DEAR: 3.0})
    outcome, trace = Simulation(config, tmp_path, actuator=machines).run()
    check(config, outcome, trace)
    check_fleet(trace, machines)
    assert outcome.status == "done", outcome.error
    assert {node.instance_type_name for node in machines.there.values()} == {DEAR}


def test_a_run_whose_machines_never_come_ends_and_asks_for_nothing_more(tmp_path: Path) -> None:
    config = fleet_config(scale="ray", boot_limit_s=20.0)
    machines = Machines(float("inf"))
    outcome, trace = Simulation(config, tmp_path, actuator=machines).run()
    assert outcome.status == "failed"
    assert "timed out" in outcome.error
    assert started(trace) == []
    assert machines.calls[-1] == "close"


def test_the_optimum_is_gone_over_to_without_a_moment_of_nobody(tmp_path: Path) -> None:
    """Cheap machines take longer to come than a surplus must last: the dear one stays until they serve."""
    config = fleet_config(60, counts=(0, 1), scale="ray", boot_limit_s=100.0)
    machines = Machines({CHEAP: 60.0, DEAR: 2.0})
    simulation = Simulation(config, tmp_path, actuator=machines, t_train_s=8.0, seconds_per_token=(0.2,))
    outcome, trace = simulation.run()
    check(config, outcome, trace)
    check_fleet(trace, machines)
    assert outcome.status == "done", outcome.error
    assert ended(trace)[0] == "w0.0"
    assert {node.instance_type_name for node in machines.there.values()} == {CHEAP}
    others = [line for line in trace.lines if line.startswith("installed ") and " w0 " not in line]
    assert trace.lines.index("worker w0.0 alive=False") > trace.lines.index(others[0])


@pytest.mark.parametrize("stop_at_s", [0.5, 2.5, 4.0, 30.0])
def test_a_stop_while_workers_boot_ends_cleanly_and_can_be_resumed(tmp_path: Path, stop_at_s: float) -> None:
    config = fleet_config(40, scale="ray")
    machines = Machines({CHEAP: 2.0, DEAR: 3.0})
    outcome, trace = Simulation(config, tmp_path, actuator=machines, stop_at_s=stop_at_s).run()
    check(config, outcome, trace)
    assert outcome.status == "stopped"
    assert machines.calls[-1] == "close"
    saved = sorted((tmp_path / "checkpoints").glob("step-*"))
    if not saved:
        assert not trace.batches  # nothing was done yet
        return
    machines = Machines({CHEAP: 2.0, DEAR: 3.0})
    again = Simulation(config, tmp_path, actuator=machines, seed=1)
    outcome, rest = again.run(resume_dir=saved[-1], lineage="sim2")
    check(config, outcome, rest)
    check_fleet(rest, machines)
    assert outcome.status == "done", outcome.error
    assert [batch.step for batch in trace.batches + rest.batches] == list(range(40))
    assert outcome.counts.trained == 40 * 8


def test_without_staleness_the_fleet_grows_to_what_is_useful(tmp_path: Path) -> None:
    """One worker samples a batch in several times what the learner takes to train it."""
    config = fleet_config(60, max_staleness=0, counts=(1, 0), scale="ray")
    machines = Machines(3.0)
    simulation = Simulation(
        config, tmp_path, actuator=machines, t_train_s=2.0, seconds_per_token=(0.5,), max_groups=1
    )
    outcome, trace = simulation.run()
    check(config, outcome, trace)
    check_fleet(trace, machines)
    assert outcome.status == "done", outcome.error
    assert 2 <= len(machines.there) <= 4
    steps = [line for line in trace.lines if line.startswith("step ")]
    first_s, last_s = (float(line.split()[-1]) for line in (steps[1], steps[-1]))
    assert last_s < 0.7 * first_s  # the learner waits less for its samples


@pytest.mark.parametrize("seed", range(examples(4)))
def test_same_seed_same_fleet(tmp_path: Path, seed: int) -> None:
    lines = []
    for i in range(2):
        machines = Stormy(seed, mean_s=20.0, notice_s=10.0, boot_s={CHEAP: 3.0, DEAR: 5.0})
        config = fleet_config(counts=(3, 1), scale="ray")
        lines.append(Simulation(config, tmp_path / str(i), seed=seed, actuator=machines).run()[1].lines)
    assert lines[0] == lines[1]


def test_workers_that_are_too_many_leave_and_their_machines_go(tmp_path: Path) -> None:
    """The learner needs an hour for what one worker samples in seconds."""
    config = fleet_config(30, counts=(2, 2), scale="ray")
    machines = Machines(2.0)
    simulation = Simulation(config, tmp_path, actuator=machines, t_train_s=30.0, seconds_per_token=(0.05,))
    outcome, trace = simulation.run()
    check(config, outcome, trace)
    check_fleet(trace, machines)
    assert outcome.status == "done", outcome.error
    assert len(started(trace)) == 4
    assert len(ended(trace)) == 3  # one is enough
    assert len(machines.there) == 1
    assert sum(call.startswith("release") for call in machines.calls) == 3
    assert outcome.counts.dropped_stale == 0
