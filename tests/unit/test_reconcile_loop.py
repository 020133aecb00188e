"""The reconcile loop between its machines, its runner and its decisions, on machines that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from echo_planes.config.fleet import FleetConfig, WorkerConfig
from echo_planes.config.schema import Config
from echo_planes.errors import ClusterError, RunError, WaitTimeoutError
from echo_planes.fleet.actuators.actuator import Machine, MachineState
from echo_planes.fleet.instance_record import MOST_BACK_OFF_S
from echo_planes.loop.reconcile import (
    MAX_FAILED_LOOKS,
    NODE_LABEL,
    ReconcileLoop,
    instance_types_of,
    limits_of,
)
from echo_planes.reporting.broadcasts import BroadcastLog
from echo_planes.testing.fakes import FakeLearner, Faults
from echo_planes.testing.simulation import replace_section, tiny_config
from echo_planes.testing.virtual_time import VirtualTimeLoop, run_virtual
from echo_planes.types import (
    BufferCounts,
    InstallReport,
    Manifest,
    StepStats,
    TrainBatch,
    WorkerInfo,
    WorkerStats,
)

TICK_S = 1.0
T_TRAIN_S = 10.0


class Machines:
    """An `Actuator` whose machines come after `boot_s`, and do otherwise what a test says."""

    def __init__(self, boot_s: Mapping[str, float] | float = 2.0) -> None:
        self.boot_s = boot_s  # inf: they never come
        self.there: dict[str, Machine] = {}
        self.wanted: dict[str, int] = {}
        self.calls: list[str] = []
        self.fail_with: Exception | None = None
        self.when_seen: Callable[[], None] = lambda: None  # what happens while somebody looks
        self._issued = 0
        self._coming: dict[str, tuple[str, float]] = {}  # node -> instance type, when

    async def want(self, counts: Mapping[str, int]) -> None:
        self._check()
        self.wanted = {name: count for name, count in counts.items() if count}
        self.calls.append(f"want {sum(counts.values())}")
        for name, count in counts.items():
            boot_s = self.boot_s if isinstance(self.boot_s, float) else self.boot_s[name]
            up = sum(node.state == "up" and node.instance_type_name == name for node in self.there.values())
            coming = [node for node, (instance_type, _) in self._coming.items() if instance_type == name]
            for _ in range(count - up - len(coming)):
                self._coming[f"n{self._issued}"] = (name, self._now_s() + boot_s)
                self._issued += 1
            for node in coming[max(0, count - up) :]:
                del self._coming[node]

    async def nodes(self) -> tuple[Machine, ...]:
        self._check()
        for node, (instance_type, at_s) in list(self._coming.items()):
            if self._now_s() >= at_s:
                del self._coming[node]
                self.there[node] = Machine(node, instance_type, "up")
        self.when_seen()
        pending = (
            Machine(f"pending/{instance_type}/{i}", instance_type, "pending")
            for i, (instance_type, _) in enumerate(self._coming.values())
        )
        return (*self.there.values(), *pending)

    def assign(self, node_id: str, worker_id: str) -> None:
        self.there[node_id] = replace(self.there[node_id], worker_id=worker_id)

    async def notice(self, node_id: str, deadline_s: float) -> None:
        self._check()
        self.calls.append(f"notice {node_id}")
        self.change(node_id, "draining", deadline_s)

    async def release(self, node_id: str) -> None:
        self._check()
        self.calls.append(f"release {node_id}")
        del self.there[node_id]

    async def close(self) -> None:
        self.calls.append("close")
        self._check()

    def change(self, node_id: str, state: MachineState, deadline_s: float | None = None) -> None:
        self.there[node_id] = replace(self.there[node_id], state=state, notice_deadline_s=deadline_s)

    def of(self, worker_id: str) -> str:
        return next(node.node_id for node in self.there.values() if node.worker_id == worker_id)

    def _check(self) -> None:
        if self.fail_with is not None:
            raise self.fail_with

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


@dataclass
class Scene:
    """A keeper with everybody it talks to. It is also its runner and its roster."""

    config: Config
    machines: Machines = field(default_factory=Machines)
    usd_left: Callable[[], float | None] | None = None
    told: list[str] = field(default_factory=list)
    records: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    wanted: dict[str, WorkerInfo] = field(default_factory=dict)
    unwanted: dict[str, float] = field(default_factory=dict)  # worker -> limit
    kinds: dict[str, WorkerConfig] = field(default_factory=dict)
    stats: dict[str, WorkerStats] = field(default_factory=dict)  # answered at the next tick
    parked: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # instance types, and why

    @property
    def data(self) -> Scene:
        """It is its data plane, too."""
        return self

    def play(self, act: Callable[[Scene], Coroutine[object, object, None]]) -> None:
        """Run the keeper in virtual time until `act` has ended; its failure is raised."""

        async def main(loop: VirtualTimeLoop) -> None:
            self.books = BroadcastLog()
            self.keeper = ReconcileLoop(
                self.config,
                self.machines,
                self,
                self.books,
                loop,
                lambda kind, text: self.told.append(f"{kind}: {text}"),
                self.usd_left,
                lambda text, numbers: self.records.append((text, numbers)),
            )
            running = asyncio.ensure_future(self.keeper.run(self))
            acting = asyncio.ensure_future(act(self))
            await asyncio.wait({running, acting}, return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            acting.cancel()
            for result in await asyncio.gather(running, acting, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

        run_virtual(main)

    def want_worker(self, info: WorkerInfo) -> None:
        assert info.worker_id not in self.wanted, "one name, one worker"
        assert info.worker_id in self.kinds, "its kind must be known before it is started"
        self.wanted[info.worker_id] = info

    def unwant_worker(self, worker_id: str, reason: str, limit_s: float) -> None:
        assert worker_id in self.wanted
        assert worker_id not in self.unwanted, "asked to leave once"
        self.unwanted[worker_id] = limit_s

    async def collect_worker_stats(self) -> None:
        for stats in self.stats.values():
            self.keeper.on_stats(0, stats)

    def enlist(self, worker_id: str, kind: WorkerConfig) -> None:
        self.kinds[worker_id] = kind

    async def park(self, worker_id: str, parked: bool) -> None:
        assert parked == (worker_id not in self.wanted), "parked before it is started, and only then"
        (self.parked.append if parked else self.parked.remove)(worker_id)

    # --- what a runner would tell ---

    def serve(self, *worker_ids: str, version: int = 0) -> None:
        for worker_id in worker_ids:
            report = InstallReport(worker_id, version, f"d{version}", True, 0.1)
            self.keeper.on_installed(report)
            self.books.on_installed(report, len(worker_ids), asyncio.get_running_loop().time())

    async def publish(self, version: int = 0) -> None:
        learner = FakeLearner(T_TRAIN_S, Faults(), "L")
        manifest: Manifest = await learner.publish(version)
        self.keeper.on_published(manifest, 0.1)
        self.books.on_published(manifest, 0.1, asyncio.get_running_loop().time())

    async def publish_and_serve(self) -> None:
        """Twice: how long the first broadcast took depends on when engines were built."""
        for version in range(2):
            await self.publish(version)
            self.serve("w0", version=version)

    def step(self, idle_s: float = 0.0, t_train_s: float = T_TRAIN_S) -> None:
        zeros = dict.fromkeys((f for f in StepStats.__dataclass_fields__ if f != "t_train_s"), 0)
        stats = StepStats(t_train_s=t_train_s, **zeros)
        ints, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
        bools = np.zeros(0, np.bool_)
        batch = TrainBatch(0, (), ints, ints, bools, floats, floats, ints, floats, ints, bools, ints, bools)
        self.keeper.on_step(batch, stats, idle_s, BufferCounts())

    def gone(self, worker_id: str) -> None:
        self.keeper.on_worker(self.wanted[worker_id], alive=False)


def settings(*kinds: WorkerConfig, max_staleness: int = 3, **fleet: object) -> Config:
    given = {"scale": "ray", "tick_s": TICK_S, "sustain_s": 5.0, "boot_limit_s": 60.0, **fleet}
    config = tiny_config(max_staleness=max_staleness)
    section = FleetConfig(workers=list(kinds), **given)  # type: ignore[arg-type]
    return config.model_copy(update={"fleet": section})


def kind(sku: str = "a", count: int = 1, **values: object) -> WorkerConfig:
    known = {"usd_per_hour": 1.0, "max_count": 4, "mu": 1.0, **values}
    return WorkerConfig(sku=sku, count=count, **known)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool], limit_s: float = 1000.0) -> None:
    deadline_s = asyncio.get_running_loop().time() + limit_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, "it never happened"
        await asyncio.sleep(TICK_S / 4)


# --- a life --------------------------------------------------------------------------------------


def test_a_worker_is_started_on_the_machine_that_came_for_it_and_the_machine_goes_after_it() -> None:
    scene = Scene(settings(kind(labels={"pool": "x"}, resources={"GPU": 1.0}, region="r")))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        node = scene.machines.of("w0")
        assert scene.kinds["w0"].labels == {"pool": "x", NODE_LABEL: node}
        assert scene.kinds["w0"].resources == {"GPU": 1.0, scene.kinds["w0"].instance_type: 1.0}
        assert scene.wanted["w0"].usd_per_hour == 1.0
        await scene.publish_and_serve()
        before = len(scene.machines.calls)
        scene.gone("w0")
        scene.gone("w0")
        await until(lambda: f"release {node}" in scene.machines.calls)
        # Asked for less before it goes, else another one would come in its place.
        assert scene.machines.calls[before:][:2] == ["want 0", f"release {node}"]

    scene.play(act)
    assert scene.machines.calls[-1] == "close"
    assert scene.unwanted == {}


def test_less_is_asked_for_before_a_machine_goes_whose_worker_ends_while_it_is_looked_at() -> None:
    scene = Scene(settings(kind()))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        before = len(scene.machines.calls)
        scene.machines.when_seen = lambda: scene.gone("w0")
        await until(lambda: "release n0" in scene.machines.calls)
        assert scene.machines.calls[before:][:2] == ["want 0", "release n0"]

    scene.play(act)


def test_a_fleet_of_nobody_asks_for_no_machines_at_once() -> None:
    """The request of a run that was killed stands until another request replaces it."""
    scene = Scene(settings(kind(count=0)))

    async def act(scene: Scene) -> None:
        await until(lambda: scene.machines.calls == ["want 0"], limit_s=TICK_S)

    scene.play(act)


def test_machines_there_anyway_are_taken_without_the_labels_of_a_node() -> None:
    scene = Scene(settings(kind(), scale="static"))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        assert scene.kinds["w0"] == scene.config.fleet.workers[0]

    scene.play(act)


def test_a_machine_that_dies_with_its_worker_is_not_asked_for_any_more() -> None:
    """The floor outlives what it was for: another machine would come for nobody, and stay."""
    scene = Scene(settings(kind(market="spot")))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        scene.machines.change(scene.machines.of("w0"), "dead")
        scene.gone("w0")  # young: its instance type is backed off
        await until(lambda: scene.machines.wanted == {})

    scene.play(act)


def test_an_engine_that_never_serves_is_ended_and_a_machine_that_never_comes_is_forgotten() -> None:
    kinds = [kind("a", max_count=1), kind("b", max_count=1)]
    scene = Scene(settings(*kinds), Machines({"a/on_demand": 2.0, "b/on_demand": float("inf")}))

    async def act(scene: Scene) -> None:
        await scene.publish()
        await until(lambda: "w0" in scene.unwanted)
        await until(lambda: scene.keeper.fleet.counts == {})
        assert set(scene.wanted) == {"w0"}
        await until(lambda: scene.machines.wanted == {})

    scene.play(act)


def test_no_machine_of_a_type_that_cannot_serve_is_bought_again() -> None:
    scene = Scene(settings(kind("a"), kind("b")))

    async def act(scene: Scene) -> None:
        await until(lambda: set(scene.wanted) == {"w0", "w1"})
        scene.refused["a/on_demand"] = "page size"
        scene.gone("w0")
        scene.gone("w1")  # it died: others of its type follow
        await until(lambda: "w2" in scene.wanted)
        await asyncio.sleep(2 * MOST_BACK_OFF_S)  # a type that may serve is left out no longer than this
        assert {one.instance_type for name, one in scene.wanted.items() if name > "w1"} == {"b/on_demand"}
        scene.refused["b/on_demand"] = "no kernel"
        await asyncio.sleep(10 * TICK_S)
        pytest.fail("it went on without a worker that could serve")

    with pytest.raises(RunError, match=r"no instance type is left that can serve; .*: (page size|no kernel)"):
        scene.play(act)


def test_engines_are_not_given_up_while_the_learner_starts() -> None:
    scene = Scene(settings(kind()))

    async def act(scene: Scene) -> None:
        await asyncio.sleep(10 * scene.config.fleet.boot_limit_s)
        assert scene.unwanted == {}
        await scene.publish()
        await until(lambda: "w0" in scene.unwanted)

    scene.play(act)


def test_what_is_bought_is_written_down_with_what_is_needed_and_paid() -> None:
    scene = Scene(settings(kind()))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        assert scene.wanted["w0"].instance_type == "a/on_demand"
        await scene.publish_and_serve()
        scene.step(t_train_s=1.0)  # more than one worker can make
        await until(lambda: "w1" in scene.wanted)

    scene.play(act)  # up to its quota of four
    bought = [(text, numbers) for text, numbers in scene.records if numbers.get("launched")]
    [text, numbers] = bought[0]
    assert f"fleet: {text}" in scene.told
    need = scene.keeper._need()
    assert need is not None
    assert need.mu_target is not None
    assert numbers["mu_target"] == pytest.approx(need.mu_target, rel=1e-3)
    assert (numbers["mu"], numbers["usd_per_hour"]) == (1.0, 1.0)
    assert numbers["workers"] == {"serving": 1, "asked": 3}


# --- notices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("serves", [True, False])
def test_the_notice_a_cloud_gave_its_worker_is_told_to_the_cluster_once(serves: bool) -> None:
    scene = Scene(settings(kind(market="spot")))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        if serves:
            scene.serve("w0")
        scene.stats["w0"] = WorkerStats("w0", 0, "", 0, 0, 0, 0.0, leaves_in_s=25.0)
        await until(lambda: "w0" in scene.unwanted)
        assert 20.0 < scene.unwanted["w0"] <= 25.0
        node = scene.machines.of("w0")
        await asyncio.sleep(5 * TICK_S)  # the worker goes on saying so
        assert scene.machines.calls.count(f"notice {node}") == 1
        scene.gone("w0")
        assert scene.keeper.fleet.counts.get("a/spot", 0) <= 1

    scene.play(act)


@pytest.mark.parametrize(
    ("state", "deadline_s", "limit_s"),
    [("draining", 40.0, 30.0), ("draining", None, 30.0), ("dead", None, 1.0)],
)
def test_a_worker_whose_machine_goes_or_is_gone_leaves(
    state: MachineState, deadline_s: float | None, limit_s: float
) -> None:
    scene = Scene(settings(kind()))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        await asyncio.sleep(10.0 - asyncio.get_running_loop().time())
        scene.machines.change(scene.machines.of("w0"), state, deadline_s)
        await until(lambda: "w0" in scene.unwanted)
        assert scene.unwanted["w0"] == pytest.approx(limit_s, abs=2 * TICK_S)
        # It is the machine's own end: nobody asks the autoscaler for it.
        assert not [call for call in scene.machines.calls if call.startswith("release")]

    scene.play(act)


def test_a_notice_is_not_lost_where_the_cluster_does_not_answer() -> None:
    scene = Scene(settings(kind(market="spot")))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        scene.machines.fail_with = RunError("the head does not answer")
        scene.stats["w0"] = WorkerStats("w0", 0, "", 0, 0, 0, 0.0, leaves_in_s=25.0)
        await asyncio.sleep(2 * TICK_S)
        scene.machines.fail_with = None
        await until(lambda: "w0" in scene.unwanted)
        await until(lambda: f"notice {scene.machines.of('w0')}" in scene.machines.calls)

    scene.play(act)


# --- machines that take their time to go ---------------------------------------------------------


class Reluctant(Machines):
    """A machine is seen up, and with nobody on it, for `release_s` after it was to go."""

    def __init__(self, release_s: float) -> None:
        super().__init__()
        self.release_s = release_s
        self.released: list[str] = []
        self.refusal: Exception | None = None

    async def release(self, node_id: str) -> None:
        self.calls.append(f"release {node_id}")
        try:
            await asyncio.sleep(self.release_s)
        except asyncio.CancelledError:
            self.calls.append(f"cancelled {node_id}")
            raise
        if self.refusal is not None:
            raise self.refusal
        del self.there[node_id]
        self.released.append(node_id)


def test_machines_that_are_slow_to_go_stand_in_nobodys_way() -> None:
    machines = Reluctant(release_s=10.0)
    scene = Scene(settings(kind(count=3, market="spot")), machines)

    async def act(scene: Scene) -> None:
        await until(lambda: len(scene.wanted) == 3)
        now_s = asyncio.get_running_loop().time
        scene.gone("w0")
        scene.gone("w1")
        await until(lambda: sum(call.startswith("release") for call in machines.calls) == 2)
        begun_s = now_s()
        scene.stats["w2"] = WorkerStats("w2", 0, "", 0, 0, 0, 0.0, leaves_in_s=25.0)
        await until(lambda: f"notice {machines.of('w2')}" in machines.calls)
        assert now_s() - begun_s <= 2 * TICK_S
        assert machines.released == []
        await until(lambda: len(machines.released) == 2)
        assert now_s() - begun_s <= machines.release_s + TICK_S  # one beside the other
        assert sum(call.startswith("release") for call in machines.calls) == 2

    scene.play(act)


def test_a_machine_that_is_let_go_is_not_given_to_the_next_worker() -> None:
    machines = Reluctant(release_s=10.0)
    scene = Scene(settings(kind(max_count=1)), machines)

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        await scene.publish_and_serve()
        scene.gone("w0")
        await until(lambda: "release n0" in machines.calls)
        machines.there["n0"] = replace(machines.there["n0"], worker_id=None)  # as Ray's actuator sees it
        scene.step()
        await until(lambda: "w1" in scene.wanted)
        assert machines.of("w1") != "n0"

    scene.play(act)


def test_what_keeps_a_machine_from_going_is_told_and_it_is_tried_again() -> None:
    machines = Reluctant(release_s=3 * TICK_S)
    machines.refusal = RunError("drain refused")
    scene = Scene(settings(kind(count=2)), machines)

    async def act(scene: Scene) -> None:
        await until(lambda: len(scene.wanted) == 2)
        scene.gone("w0")
        await until(lambda: "release n0" in machines.calls)
        await until(lambda: any("(1 in a row): drain refused" in text for text in scene.told))
        machines.refusal = None
        await until(lambda: machines.released == ["n0"])
        assert machines.calls.count("release n0") >= 2

    scene.play(act)


def test_a_cluster_that_can_never_let_a_machine_go_ends_the_run() -> None:
    machines = Reluctant(release_s=TICK_S)
    machines.refusal = ClusterError("no such machine")
    scene = Scene(settings(kind()), machines)

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        scene.gone("w0")
        await asyncio.sleep(100 * TICK_S)

    with pytest.raises(ClusterError, match="no such machine"):
        scene.play(act)


def test_the_end_of_a_run_does_not_wait_for_machines_to_go() -> None:
    machines = Reluctant(release_s=float("inf"))
    scene = Scene(settings(kind()), machines)

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        scene.gone("w0")
        await until(lambda: "release n0" in machines.calls)

    scene.play(act)
    assert machines.calls[-2:] == ["cancelled n0", "close"]


# --- standbys -------------------------------------------------------------------------------------


def test_a_standby_is_parked_before_it_starts_and_takes_part_when_a_machine_goes() -> None:
    scene = Scene(settings(kind(market="spot"), standby=1))

    async def act(scene: Scene) -> None:
        await until(lambda: len(scene.wanted) == 2)
        assert scene.parked == ["w1"]
        scene.serve("w0", "w1")
        assert (scene.keeper.fleet.num_serving, scene.keeper.fleet.num_standby) == (1, 1)
        scene.machines.change(scene.machines.of("w0"), "draining", 500.0)
        await until(lambda: "w0" in scene.unwanted)
        assert "w1" not in scene.parked
        assert scene.keeper.fleet.num_serving == 1
        await until(lambda: "w2" in scene.wanted)
        assert scene.parked == ["w2"]
        assert any(text == "fleet: standby w1 takes part: in place of w0, which goes" for text in scene.told)

    scene.play(act)


# --- a cluster that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RunError("the head is gone"), WaitTimeoutError("cluster status", 20.0)])
def test_a_cluster_that_is_away_for_a_while_is_told_and_survived(error: RunError) -> None:
    scene = Scene(settings(kind()))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        for _ in range(3):
            scene.machines.fail_with = error
            await until(lambda: any(f"({MAX_FAILED_LOOKS} in a row)" in text for text in scene.told))
            scene.machines.fail_with = None
            await asyncio.sleep(2 * TICK_S)
            scene.told.clear()
        scene.machines.fail_with = error
        scene.gone("w0")
        await asyncio.sleep(2 * TICK_S)
        scene.machines.fail_with = None
        # A request that failed is made again later.
        await until(lambda: scene.machines.wanted == {} and scene.machines.there == {})

    scene.play(act)


def test_a_cluster_that_stays_away_ends_the_run_and_says_why() -> None:
    scene = Scene(settings(kind()))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        scene.machines.fail_with = RunError("the head is gone")
        await asyncio.sleep(100 * TICK_S)
        pytest.fail("it went on without a cluster")

    with pytest.raises(RunError, match=rf"{MAX_FAILED_LOOKS + 1} looks .* in a row failed: the head is gone"):
        scene.play(act)
    assert scene.machines.calls[-1] == "close"


def test_what_a_cluster_can_never_give_ends_the_run_at_once() -> None:
    scene = Scene(settings(kind()))

    async def act(scene: Scene) -> None:
        scene.machines.fail_with = ClusterError("the cluster can never have 1 a")
        await asyncio.sleep(100 * TICK_S)

    with pytest.raises(ClusterError, match="can never have"):
        scene.play(act)


# --- what it decides with ------------------------------------------------------------------------


def test_no_worker_is_added_when_the_money_is_spent() -> None:
    left = [1.0]
    scene = Scene(settings(kind(mu=0.1)), usd_left=lambda: left[0])

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        await scene.publish_and_serve()
        left[0] = 0.0
        scene.step()  # 8 trajectories in 10 s and more are needed, 0.1/s are there
        await asyncio.sleep(60.0)
        assert set(scene.wanted) == {"w0"}
        assert any("usd_left" in text for text in scene.told)
        left[0] = 5.0
        await until(lambda: len(scene.wanted) > 1)

    scene.play(act)


@pytest.mark.parametrize(("steps", "bought"), [(1, False), (100, True)])
def test_no_worker_is_added_that_the_run_would_end_before(steps: int, bought: bool) -> None:
    config = settings(kind(mu=0.1))
    scene = Scene(config.model_copy(update={"run": replace_section(config.run, steps=steps)}))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        await scene.publish_and_serve()
        scene.step()  # 8 trajectories in 10 s and more are needed, 0.1/s are there
        await asyncio.sleep(60.0)
        assert (len(scene.wanted) > 1) == bought
        assert any("seconds_left" in text for text in scene.told) != bought

    scene.play(act)


def test_it_says_once_that_no_fleet_is_enough_and_what_would_help() -> None:
    scene = Scene(settings(kind(mu=0.2, max_count=1)))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        await scene.publish_and_serve()
        scene.step()
        await asyncio.sleep(300.0)

    scene.play(act)
    (said,) = [text for text in scene.told if "no fleet within the limits is enough" in text]
    assert "quota" in said
    assert "what would help: train on 1 trajectories a step instead of 8" in said


@pytest.mark.parametrize(("idle_s", "num_wanted"), [(30.0, 3), (2000.0, 4), (0.0, 1)])
def test_without_staleness_as_many_workers_as_sampling_takes_steps_of_the_learner(
    idle_s: float, num_wanted: int
) -> None:
    """N_prem: one worker samples a batch in 30 s, the learner trains it in 10 s; the quota is 4."""
    scene = Scene(settings(kind(), max_staleness=0))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        await scene.publish_and_serve()
        for _ in range(8):
            scene.step(idle_s)
        await asyncio.sleep(40.0)
        assert len(scene.wanted) == num_wanted

    scene.play(act)


def test_without_staleness_the_last_worker_is_replaced() -> None:
    scene = Scene(settings(kind(), max_staleness=0))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        await scene.publish_and_serve()
        scene.step(5.0)
        await asyncio.sleep(150.0)
        scene.gone("w0")
        await until(lambda: "w1" in scene.wanted)

    scene.play(act)


def test_the_setting_is_the_most_workers_whatever_is_useful() -> None:
    scene = Scene(settings(kind(), max_staleness=0, max_workers=2))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        await scene.publish_and_serve()
        scene.step(2000.0)
        await asyncio.sleep(40.0)
        assert len(scene.wanted) == 2

    scene.play(act)


def test_counters_that_cannot_be_are_refused_and_the_run_goes_on() -> None:
    scene = Scene(settings(kind()))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        scene.stats["w0"] = WorkerStats("w0", 0, "", 0, 0, -5, 0.0)
        await until(lambda: any(text.startswith("refused: ") and "w0" in text for text in scene.told))
        scene.stats.clear()
        await asyncio.sleep(5 * TICK_S)

    scene.play(act)


def test_instance_types_and_limits_are_those_of_the_settings() -> None:
    config = settings(
        kind("a", mu=2.0, region="r", market="spot", interruptions_per_hour=0.5, min_count=1),
        kind("b", 2, mu=None, max_count=None),
        usd_per_hour=9.0,
        interruptions_per_hour=3.0,
        max_workers=5,
    )
    a, b = instance_types_of(config)
    assert (a.name, a.mu, a.max_count, a.min_count, a.market) == ("a/r/spot", 2.0, 4, 1, "spot")
    assert a.interruptions_per_hour == 0.5
    assert (b.name, b.mu, b.max_count) == ("b/on_demand", 2.0, 2)  # as the slowest that is known
    limits = limits_of(config)
    assert (limits.usd_per_hour, limits.interruptions_per_hour, limits.max_workers) == (9.0, 3.0, 5)
    assert replace_section(config.fleet, scale="static").fixed() == {}
