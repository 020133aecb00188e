"""Fault campaign: thousands of small simulated runs, each with its own faults, all drawn from its seed.

Every run executes the real decision code on modelled machines (`world.py`) with the faults of `chaos.py`. The
campaign checks invariants at every event: those of the data plane in `invariants.py`, those of controller and
fleet here. It compares the dollars whenever the learner gets work, and at the end. A run must end within a
day of virtual time: when all steps are done, when it was asked to stop, when its disk is full, or when no
worker is left that may be started again.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from echo_planes.errors import ClusterError, EchoPlanesError
from echo_planes.fleet.money import Budget
from echo_planes.loop import events as ev
from echo_planes.loop.controller import STEADY_S
from echo_planes.sim.chaos import ChaosDataPlane, ChaosMarket, Ghost
from echo_planes.sim.data_plane import SimDataPlane
from echo_planes.sim.draws import Disturbance, Plan, draw
from echo_planes.sim.flow import SimMember
from echo_planes.sim.log import InvariantError, require
from echo_planes.sim.scenario import Scenario
from echo_planes.sim.worker import SimWorker
from echo_planes.sim.world import LINEAGE, Result, World
from echo_planes.types import InstallReport, Manifest

GHOST_WORDS = 5  # late messages of a worker that was cut off
GHOST_S = 60.0  # seconds within which they arrive
SAME_USD = 1e-9
CLOCK_RATES = (0.1, 0.5, 2.0, 10.0)  # seconds that a wrong clock counts in a second

LearnerWork = ev.FormBatch | ev.Train | ev.Publish | ev.Checkpoint


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one seed. `violation` is empty if every invariant held."""

    seed: int
    status: str  # way in which the run ended
    violation: str
    last: tuple[str, ...]  # log lines before the violation or the end
    checksum: int  # of the whole log
    num_events: int


def run_seed(seed: int) -> Outcome:
    """Simulate one seed."""
    scenario, plan = draw(seed)
    world = ChaosWorld(scenario, plan)
    status, violation, result = "", "", None
    try:
        result = world.run()
        status = str(result.summary["status"])
        world.check_end(result)
    except ClusterError as error:
        status = "disk full"
        if world.kernel.now_s < plan.disk_full_s or "\n" in str(error) or not str(error):
            violation = f"the run ended with ClusterError: {error}"
    except EchoPlanesError as error:
        violation = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  any exception of the code under test is a violation
        violation = f"{type(error).__name__}: {error}"
    log = world.plane.watched.log
    log.add(status, result.lines() if result is not None else "")
    last = tuple(log.lines()[:-1])
    return Outcome(seed, status, violation, last, log.checksum, world.kernel.num_events)


def replays(seed: int, first: Outcome) -> bool:
    """Run a seed again and return whether its outcome is the same, to the last byte of trace and log."""
    return run_seed(seed) == first


class ChaosWorld(World):
    """Simulated run with faults of every kind and checks of its invariants.

    Args:
        scenario: settings of the run, with its own faults.
        plan: further faults.
    """

    plane: ChaosDataPlane

    def __init__(self, scenario: Scenario, plan: Plan) -> None:
        super().__init__(scenario)
        self.plan = plan
        self.chaos = random.Random(f"{scenario.seed}/chaos")
        self.plane.begin(plan, self.chaos)
        self._log = self.plane.watched.log
        instance_types = {instance_type.name: instance_type for instance_type in scenario.instance_types}
        self.market = ChaosMarket(instance_types, self.kernel, self.workers, self.rng)
        self.workers.market = self.market
        self._instance_types = instance_types
        self._steps_done = 0
        self._published_steps = -1  # newest published version
        self._work: LearnerWork | None = None  # current work of the learner
        self._epochs: dict[str, int] = {}  # newest started epoch of each worker
        self._starts: Counter[str] = Counter()  # starts in a row of each worker
        self._ready_s: dict[tuple[str, int], float] = {}  # by worker and epoch
        self._no_installs_until_s = 0.0
        self._streamed_s: dict[str, float] = {}  # time of each worker's last stream
        self._stop_due_s: float | None = None  # time at which the budget was found spent
        self.kernel.after_each = self._check
        self.kernel.after(plan.stream_every_s, self._stream)
        for disturbance in plan.disturbances:
            self.kernel.at(disturbance.at_s, partial(self._disturb, disturbance))
        self._budget = None if plan.budget_usd is None else Budget(plan.budget_usd, self.trace.money)
        if self._budget is not None:
            self.kernel.after(1.0, self._look_at_budget)

    def make_data_plane(self) -> SimDataPlane:
        self.plane = ChaosDataPlane(
            self.scenario,
            self.kernel,
            LINEAGE,
            on_leases=self._on_leases,
            on_dropped=self.trace.dropped,
            on_uninformative=self.trace.uninformative,
        )
        return self.plane

    # --- events for the controller ---------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        match event:
            case ev.StepDone():
                self._done(ev.Train)
                self._steps_done += 1
            case ev.Published(manifest):
                self._done(ev.Publish)
                self._published_steps = manifest.version
            case ev.BatchReady() | ev.BatchNotReady():
                self._done(ev.FormBatch)
            case ev.Checkpointed():
                self._done(ev.Checkpoint)
            case ev.WorkerLeft() if self.plan.leave_s:
                late_s = self.chaos.uniform(0.0, self.plan.leave_s)
                self.kernel.after(late_s, partial(super().tell, event))
                return
            case ev.WorkerReady(worker_id, epoch):
                self._ready_s[worker_id, epoch] = self.kernel.now_s
            case ev.WorkerLost() if self.chaos.random() < self.plan.twice:
                super().tell(event)
        super().tell(event)

    def _done(self, kind: type[LearnerWork]) -> None:
        has = type(self._work).__name__
        require(has == kind.__name__, f"the learner has {has} in hand, not {kind.__name__}")
        self._work = None

    # --- actions of the controller ---------------------------------------------------------------

    def _carry_out(self, action: ev.Action) -> None:
        self._log.add(type(action).__name__, *_words(action))
        match action:
            case ev.FormBatch(step) | ev.Checkpoint(step) | ev.Publish(step):
                self._check_learner(action, step)
            case ev.Train(batch):
                self._check_learner(action, batch.step)
            case ev.StartWorker(worker_id, epoch, _):
                self._check_start(worker_id, epoch)
            case ev.LeaveWorker(worker_id, epoch, _):
                self.plane.watched.leaving.add((worker_id, epoch))
            case ev.Install(worker_id, epoch, _):
                self._check_present(worker_id, epoch, "install")
                if self.kernel.now_s < self._no_installs_until_s:
                    limit_s = self.scenario.run.wait_limit_s
                    self.kernel.after(limit_s, partial(self._no_install, worker_id, epoch))
                    return
            case ev.Evaluate(_, worker_ids):
                for worker_id in worker_ids:
                    self._check_present(worker_id, self._epochs[worker_id], "evaluate")
        super()._carry_out(action)

    def _check_learner(self, work: LearnerWork, step: int) -> None:
        name, has = type(work).__name__, type(self._work).__name__
        require(self._work is None, f"the learner is asked for {name} and has {has} in hand")
        require(step == self._steps_done, f"{name} {step} after {self._steps_done} steps were done")
        self._check_money()
        self._work = work
        if isinstance(work, ev.FormBatch):
            newest = step - step % self.scenario.staleness.kappa
            require(
                self._published_steps >= newest,
                f"step {step} begins, and the newest version published is {self._published_steps}",
            )

    def _check_start(self, worker_id: str, epoch: int) -> None:
        before = self._epochs.get(worker_id, -1)
        require(epoch > before, f"{worker_id} is started with epoch {epoch} after {before}")
        self._epochs[worker_id] = epoch
        if self.kernel.now_s - self._ready_s.get((worker_id, before), math.inf) >= STEADY_S:
            self._starts[worker_id] = 1
        self._starts[worker_id] += 1
        most = self.scenario.fleet.restarts + 1
        require(self._starts[worker_id] <= most, f"{worker_id} is started {self._starts[worker_id]} times")

    def _check_present(self, worker_id: str, epoch: int, what: str) -> None:
        known = self._epochs.get(worker_id)
        require(known == epoch, f"{what}: {worker_id} epoch {epoch}, and {known} is the newest")
        leaves = (worker_id, epoch) in self.plane.watched.leaving
        require(not leaves, f"{what}: {worker_id} epoch {epoch}, which leaves")

    # --- checks at every event -------------------------------------------------------------------

    def _check(self) -> None:
        self.plane.watched.check()
        if self.scenario.fleet.mode == "fixed":
            return
        # A leaving or lost worker has a cause and does not count.
        counts: dict[str, int] = {}
        for member in self.workers.members.values():
            if not member.cause:
                counts[member.instance_type.name] = counts.get(member.instance_type.name, 0) + 1
        for name, count in counts.items():
            quota = self._instance_types[name].quota
            if count > quota:
                raise InvariantError(f"{count} workers of {name} are wanted: its quota is {quota}")
        self._check_price(counts)

    def _check_price(self, counts: Mapping[str, int]) -> None:
        """Check the fleet's price limit."""
        limit = self.scenario.fleet.usd_per_hour
        rate = sum(self._instance_types[name].usd_per_hour * count for name, count in counts.items())
        if limit is not None and rate > limit + SAME_USD:
            raise InvariantError(f"the fleet costs {rate} $/h, the limit is {limit}")

    def _spent_usd(self) -> float:
        """Return the dollars spent on all machines, from the market's holdings and the learner's price."""
        learner = self.scenario.learner.usd_per_hour * self.kernel.now_s / 3600.0
        return self.market.spent_usd() + learner

    def _check_money(self) -> None:
        spent, booked = self._spent_usd(), self.trace.money.total_usd(self.kernel.now_s)
        require(abs(spent - booked) <= SAME_USD, f"{booked} $ are booked, machines have cost {spent} $")

    def check_end(self, result: Result) -> None:
        """Check the end of the run, and that every dollar is in exactly one part.

        Raises:
            InvariantError: the run ended in an unknown way or too late, or the dollars do not add up.
        """
        now_s = self.kernel.now_s
        self._check_money()
        parts, total = self.trace.money.parts(now_s), self.trace.money.total(now_s)
        require(sum(parts.values()) == total, f"the parts {parts} are not the {total} $ that were spent")
        status, error = result.summary["status"], result.summary["error"]
        said = f"the run ended as '{status}' ({error}) at {now_s:.0f} s after {self._steps_done} steps"
        if status == "failed":
            left = [n for n in self._epochs if self._starts[n] <= self.scenario.fleet.restarts]
            require("no worker is left" in error and not left, said)
        elif status == "stopped":
            require(self._stop_due_s is not None, said)
        else:
            require(status == "done" and self._steps_done == self.scenario.run.steps, said)

    def _look_at_budget(self) -> None:
        """Check the budget every second and ask the run to stop once it is spent, as a real run does."""
        budget, now_s = self._budget, self.kernel.now_s
        if budget is None or self._stop_due_s is not None:
            return
        if budget.spent(now_s):
            self._stop_due_s = now_s
            self.tell(ev.StopRequested("the budget is spent"))
        else:
            spent = self._spent_usd()
            most = self.plan.budget_usd or 0.0
            require(
                spent <= most + SAME_USD, f"{spent} $ are spent, the budget of {most} $ is said not to be"
            )
            self.kernel.after(1.0, self._look_at_budget)

    # --- faults ----------------------------------------------------------------------------------

    def _stream(self) -> None:
        for member in self.workers.serving():
            if self._streams_now(member):
                self.workers.flow.stream(member)
        if self.kernel.now_s < self.plan.calm_s:
            self.kernel.after(self.plan.stream_every_s, self._stream)

    def _disturb(self, what: Disturbance) -> None:
        serving, until_s = self.workers.serving(), self.kernel.now_s + what.lasts_s
        self._log.add("disturbance", what.kind, f"{what.lasts_s:.1f} s")
        if what.kind == "no installs":
            self._no_installs_until_s = until_s
        elif what.kind == "no machines":
            names = list(self._instance_types)
            self.market.dry_up(names[int(what.pick * len(names))], what.lasts_s)
        elif serving:
            member = serving[int(what.pick * len(serving))]
            match what.kind:
                case "cut off":
                    self._cut_off(member)
                case "recall":
                    for one in serving:
                        self.plane.watched.recall(one.name, 1 + int(what.lasts_s) % 3)
                case "wrong clock" if member.engine is not None:
                    self._set_clock(member, member.engine, self.chaos.choice(CLOCK_RATES))
                    self.kernel.after(what.lasts_s, partial(self._set_clock, member, member.engine, 1.0))
                case "old install" if self.manifest is not None:
                    late = partial(self._install_old, member, self.manifest)
                    self.kernel.after(what.lasts_s, late)

    def _set_clock(self, member: SimMember, engine: SimWorker, rate: float) -> None:
        """Set the rate of a worker's clock from now on."""
        if member.engine is engine:
            self.workers.flow.advance(member)
            engine.engine.clock_rate = rate

    def _streams_now(self, member: SimMember) -> bool:
        """Return whether a worker streams now: not silent, and its interval is over by its own clock."""
        engine, now_s = member.engine, self.kernel.now_s
        if engine is None or now_s < member.silent_until_s:
            return False
        passed_s = (now_s - self._streamed_s.get(member.name, -math.inf)) * engine.engine.clock_rate
        if engine.engine.clock_rate < 1 and passed_s < self.plan.stream_every_s:
            return False
        self._streamed_s[member.name] = now_s
        return True

    def _no_install(self, worker_id: str, epoch: int) -> None:
        """Lose a worker whose install did not end in time."""
        member = self.workers.members.get(worker_id)
        if member is not None and member.engine is not None and member.epoch == epoch:
            self.workers.lose(member, "its install timed out")

    def _install_old(self, member: SimMember, manifest: Manifest) -> None:
        """Begin a late install of a publication that was the newest when the disturbance began."""
        if member.engine is not None and member.install is None:
            member.wanted = manifest
            member.install = self.kernel.after(0.0, partial(self.workers.arrived, member, member.engine))

    def _cut_off(self, member: SimMember) -> None:
        """Lose a worker, and let its old incarnation send messages later."""
        engine = member.engine
        if engine is None:
            return
        self.workers.flow.advance(member)
        sampling = self.scenario.sampling
        works = [(work, engine.group(work, sampling)) for work in engine.work.values()]
        span = self.answers.span(0, 1, engine.version)
        ghost = Ghost(member.name, engine.epoch, works, span)
        self.workers.lose(member, "it was cut off")
        for _ in range(GHOST_WORDS):
            late_s = self.chaos.uniform(0.0, GHOST_S)
            self.kernel.after(late_s, partial(ghost.speak, self.plane, self.chaos))
        self.kernel.after(self.chaos.uniform(0.0, GHOST_S), partial(self._old_events, ghost))

    def _old_events(self, ghost: Ghost) -> None:
        """Tell the controller late events of an incarnation, if a newer one has replaced it."""
        if self._epochs.get(ghost.worker_id, -1) <= ghost.epoch:
            return
        report = InstallReport(ghost.worker_id, ghost.span.version, ghost.span.digest, ok=True, seconds=1.0)
        for event in (
            ev.Installed(report, ghost.epoch),
            ev.WorkerReady(ghost.worker_id, ghost.epoch),
            ev.WorkerLost(ghost.worker_id, ghost.epoch, "it was cut off"),
            ev.WorkerLeft(ghost.worker_id, ghost.epoch),
        ):
            World.tell(self, event)


def _words(action: ev.Action) -> tuple[object, ...]:
    """Return the fields of an action that the log shows."""
    match action:
        case ev.Train(batch):
            return (batch.step,)
        case ev.StartWorker(worker_id, epoch, _) | ev.LeaveWorker(worker_id, epoch, _):
            return worker_id, epoch
        case ev.Install(worker_id, epoch, _):
            return worker_id, epoch
        case ev.StopWorker(worker_id):
            return (worker_id,)
        case ev.OpenWindow(seeders) | ev.CloseWindow(seeders):
            return seeders
        case ev.Finish(status, error):
            return status, error
        case ev.Evaluate(step, worker_ids):
            return step, worker_ids
        case ev.FormBatch(step) | ev.Checkpoint(step) | ev.Publish(step):
            return (step,)
        case ev.AdjustLearner(adjustment):
            return adjustment.rate_scale, adjustment.mask_outliers
        case ev.LimitStaleness(max_staleness):
            return (max_staleness,)
        case ev.TellGuard(report, text):
            return report.rung, text
