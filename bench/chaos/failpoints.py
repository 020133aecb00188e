"""Named places at which a process is killed, and what is written down of a run meanwhile.

A campaign's folder holds `plan.json` (which place is armed) and `seen.jsonl` (what happened). Every process
of a run reads the plan as it starts, changes the classes named in it as they are imported, and appends to the
record: one line a write, so that lines of several processes never mix.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

Side = Literal["before", "during", "after"]
SIDES: tuple[Side, ...] = ("before", "during", "after")
Victim = Literal["driver", "learner", "learner's node", "worker", "worker's node", "data plane", "reward"]
PLAN, SEEN, FIRED = "plan.json", "seen.jsonl", "fired"
LEASES = "ECHO_CHAOS_LEASES"  # in the environment: what the data plane is told of leases is written down too


@dataclass(frozen=True, slots=True)
class Place:
    """A function of the product."""

    victim: Victim
    name: str
    module: str
    function: str  # `Class.method`, or a function of the module


PLACES = (
    Place("driver", "batch", "echo_planes.loop.launch", "RemoteData.next_batch"),
    Place("driver", "publish", "echo_planes.loop.launch", "RemoteData.publish"),
    Place("driver", "commit", "echo_planes.loop.launch", "RemoteLearner.commit"),
    Place("driver", "install", "echo_planes.loop.launch", "RemoteWorker.install"),
    Place("driver", "fsync", "echo_planes.loop.checkpoint", "_sync"),
    Place("driver", "checkpoint rename", "echo_planes.loop.checkpoint", "save_checkpoint"),
    Place("learner", "batch", "echo_planes.learning.actor", "LearnerProcess.train_step"),
    Place("learner", "publish", "echo_planes.learning.actor", "LearnerProcess.publish"),
    Place("learner", "hand-over", "echo_planes.weights.node.client", "SenderNode.add_segment"),
    Place("learner", "commit", "echo_planes.learning.actor", "LearnerProcess.commit"),
    Place("learner", "checkpoint", "echo_planes.learning.actor", "LearnerProcess.save"),
    Place("learner's node", "hand-over", "echo_planes.weights.node.roles", "SenderRole._segment"),
    Place("learner's node", "commit", "echo_planes.weights.node.roles", "SenderRole._commit"),
    Place("learner's node", "publish", "echo_planes.weights.node.store", "StoreUploader._put"),
    Place("worker", "acknowledge", "echo_planes.loop.launch", "RemoteData.submit"),
    Place("worker", "hand-over", "echo_planes.loop.launch", "RemoteData.stream"),
    Place("worker", "batch", "echo_planes.loop.launch", "RemoteData.pull"),
    Place("worker", "install", "echo_planes.rollout.worker", "RolloutWorker.install"),
    Place("worker's node", "install", "echo_planes.weights.node.roles", "WorkerRole._staged"),
    Place("worker's node", "commit", "echo_planes.weights.node.roles", "WorkerRole._settled"),
    Place("data plane", "acknowledge", "echo_planes.data.service", "DataService.submit"),
    Place("data plane", "fsync", "echo_planes.data.store.files", "Files.sync"),
    Place("data plane", "fate", "echo_planes.data.store.store", "ReplayStore.settle"),
    Place("data plane", "batch", "echo_planes.data.service", "DataService.next_batch"),
    Place("data plane", "publish", "echo_planes.data.service", "DataService.publish"),
    Place("data plane", "checkpoint", "echo_planes.data.service", "DataService.save"),
    Place("reward", "reward", "bench.chaos.parts", "ChaosTask.reward"),
)


@dataclass(frozen=True, slots=True)
class Armed:
    """A place whose n-th visit from now on in one process ends that process."""

    place: Place
    side: Side
    visit: int = 1
    delay_s: float = 0.0  # of a kill during the visit: from its beginning on


def arm(folder: Path, armed: Armed | None, *, real_engine: bool = False) -> None:
    """Say what every process of the run does from its next visit of any place on; `None`: go by."""
    (folder / FIRED).unlink(missing_ok=True)
    plan: dict[str, Any] = {"engine": "vllm" if real_engine else "hash", "token": time.time_ns()}
    if armed is not None:
        plan |= {"at": f"{armed.place.module}:{armed.place.function}"}
        plan |= {"side": armed.side, "visit": armed.visit, "delay_s": armed.delay_s}
    partial = folder / (PLAN + ".new")
    partial.write_text(json.dumps(plan))
    partial.replace(folder / PLAN)


def fired(folder: Path) -> bool:
    """Whether the armed place has ended a process."""
    return (folder / FIRED).exists()


def note(folder: Path, kind: str, **what: Any) -> None:
    """Append one line to the record."""
    line = json.dumps({"at_s": time.time(), "pid": os.getpid(), "kind": kind, **what}) + "\n"
    descriptor = os.open(folder / SEEN, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def seen(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The record's whole lines of one kind."""
    path = folder / SEEN
    if not path.exists():
        return []
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


# --- in the processes of a run -------------------------------------------------------------------


def install(folder_name: str) -> None:
    """Watch this process, and arm it as the plan in that folder says."""
    folder = Path(folder_name)
    changes: dict[str, list[Callable[[ModuleType], None]]] = {}

    def change(module: str, function: str, make: Callable[[Any], Any]) -> None:
        changes.setdefault(module, []).append(lambda loaded: _replace(loaded, function, make))

    if _plan(folder)["engine"] == "hash":
        change("echo_planes.rollout.actor", "VllmEngine", lambda _: _engine())
    change("echo_planes.loop.launch", "RemoteData.submit", lambda plain: _watch_submit(plain, folder))
    actor = "echo_planes.learning.actor"
    change(actor, "LearnerProcess.train_step", lambda plain: _watch_step(plain, folder))
    change(actor, "LearnerProcess.publish", lambda plain: _watch_publish(plain, folder))
    change(actor, "LearnerProcess.start", lambda plain: _watch_start(plain, folder))
    if os.environ.get(LEASES):
        for name, watch in (("pull", _watch_pull), ("stream", _watch_stream), ("submit", _watch_accept)):
            change("echo_planes.data.service", f"DataService.{name}", functools.partial(watch, folder=folder))
        change("echo_planes.data.service", "DataService.lose", lambda plain: _watch_lose(plain, folder))
    for place in PLACES:
        change(place.module, place.function, functools.partial(_kill_at, place=place, folder=folder))
    sys.meta_path.insert(0, _Changing(changes))
    _watch_unpickling(folder)


class _Changing(importlib.abc.MetaPathFinder):
    """Finds modules as usual, and changes some as they have been executed."""

    def __init__(self, changes: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        changes, plain = self._changes[fullname], spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            plain(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _replace(module: ModuleType, function: str, make: Callable[[Any], Any]) -> None:
    *owners, name = function.split(".")
    owner = functools.reduce(getattr, owners, module)
    setattr(owner, name, make(getattr(owner, name)))


def _watch_unpickling(folder: Path) -> None:
    """Note who looks a class up while bytes are unpickled: the nearest caller outside pickle itself."""
    note(folder, "watched", process=" ".join(sys.orig_argv[:6])[:200])
    known: set[tuple[str, str]] = set()

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "pickle.find_class":
            return
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PICKLERS:
            frame = frame.f_back  # type: ignore[assignment]
        by = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        what = ".".join(str(one) for one in arguments)
        if (by, what.split(".")[0]) not in known:
            known.add((by, what.split(".")[0]))
            note(folder, "unpickled", by=by, what=what)

    sys.addaudithook(hear)


_PICKLERS = ("pickle", "_pickle", "_compat_pickle", "cloudpickle")


def _plan(folder: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((folder / PLAN).read_text())
    return plan


def _kill_at(plain: Any, place: Place, folder: Path) -> Any:
    visits: dict[int, int] = {}  # by the plan's token

    def visit(*sides: Side) -> None:
        plan = _plan(folder)
        if plan.get("at") != f"{place.module}:{place.function}" or plan["side"] not in sides:
            return
        visits[plan["token"]] = visits.get(plan["token"], 0) + 1
        if visits[plan["token"]] != plan["visit"]:
            return
        try:  # whoever makes the file first is the one that dies
            os.close(os.open(folder / FIRED, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        note(folder, "killed", victim=place.victim, place=place.name, side=plan["side"])
        if plan["side"] == "during":
            threading.Timer(plan["delay_s"], os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    if inspect.iscoroutinefunction(plain):

        @functools.wraps(plain)
        async def awaited(*arguments: Any, **options: Any) -> Any:
            visit("before", "during")
            result = await plain(*arguments, **options)
            visit("after")
            return result

        return awaited

    @functools.wraps(plain)
    def called(*arguments: Any, **options: Any) -> Any:
        visit("before", "during")
        result = plain(*arguments, **options)
        visit("after")
        return result

    return called


def _engine() -> Any:
    from bench.chaos.parts import ChaosEngine

    return ChaosEngine


def _watch_submit(plain: Any, folder: Path) -> Any:
    async def submit(self: Any, worker_id: str, epoch: int, groups: list[Any]) -> Any:
        receipts = await plain(self, worker_id, epoch, groups)
        taken = [g.group_id for r, (_, g) in zip(receipts, groups, strict=True) if r.accepted]
        refused = [r.reason for r in receipts if not r.accepted]
        note(folder, "acknowledged", groups=taken, refused=refused)
        return receipts

    return submit


def _watch_step(plain: Any, folder: Path) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        note(folder, "batch", step=int(batch.step), ids=list(batch.trajectory_ids))
        return plain(self, batch)

    return train_step


def _watch_start(plain: Any, folder: Path) -> Any:
    def start(self: Any, checkpoint: Path | None, *more: Any) -> Any:
        from bench.chaos.checkpoints import digests_of

        if checkpoint is not None:  # its learner's part
            note(folder, "loaded", name=checkpoint.parent.name, digests=digests_of(checkpoint.parent))
        return plain(self, checkpoint, *more)

    return start


def _watch_publish(plain: Any, folder: Path) -> Any:
    def publish(self: Any, version: int) -> Any:
        manifest = plain(self, version)
        if manifest is not None:
            note(folder, "weights", version=int(manifest.version), digest=str(manifest.digest))
        return manifest

    return publish


def _watch_pull(plain: Any, folder: Path) -> Any:
    async def pull(self: Any, worker_id: str, epoch: int, room: int, wait_s: float) -> Any:
        leases = await plain(self, worker_id, epoch, room, wait_s)
        if leases:
            given = {one.lease_id: one.prompt.index for one in leases}
            note(folder, "leased", worker=worker_id, epoch=epoch, leases=given)
        return leases

    return pull


def _watch_stream(plain: Any, folder: Path) -> Any:
    async def stream(self: Any, worker_id: str, epoch: int, messages: list[Any]) -> Any:
        unwanted = await plain(self, worker_id, epoch, messages)
        heard = [one.lease_id for one in messages if one.pieces and one.lease_id not in unwanted]
        if heard:
            note(folder, "heard", worker=worker_id, epoch=epoch, leases=heard)
        return unwanted

    return stream


def _watch_accept(plain: Any, folder: Path) -> Any:
    async def submit(self: Any, worker_id: str, epoch: int, groups: list[Any]) -> Any:
        receipts = await plain(self, worker_id, epoch, groups)
        taken = [lease for one, (lease, _) in zip(receipts, groups, strict=True) if one.accepted]
        refused = [one.reason for one in receipts if not one.accepted]
        note(folder, "taken", worker=worker_id, epoch=epoch, leases=taken, refused=refused)
        return receipts

    return submit


def _watch_lose(plain: Any, folder: Path) -> Any:
    async def lose(self: Any, worker_id: str) -> Any:
        note(folder, "lost", worker=worker_id)
        return await plain(self, worker_id)

    return lose
