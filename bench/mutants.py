"""Bugs that the fault campaign must find: each one line of the real code, as somebody might get it wrong.

A mutant is put into its class or module in this process only, and taken out again. It names the line that it
changes, so one whose line is no longer there says so, and does not pass for found.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from echo_planes.data import claims
from echo_planes.data.replay.buffer import ReplayBuffer
from echo_planes.data.replay.leases import LeaseTable
from echo_planes.data.replay.partial_rollouts import LeasePartials, Partials
from echo_planes.data.replay.prompts import PromptCursor
from echo_planes.fleet.instance_record import BackOffs
from echo_planes.fleet.money import Accounting, Budget
from echo_planes.fleet.reconciler import Reconciler
from echo_planes.fleet.workers import FleetWorker
from echo_planes.loop.controller import Controller
from echo_planes.sim.flow import Flow
from echo_planes.sim.workers import SimWorkers


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug."""

    name: str
    owner: type | ModuleType
    method: str
    right: str  # text of the method, once in it
    wrong: str  # what stands there instead

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the class has the bug.

        Raises:
            ValueError: the method does not have that text once.
        """
        found = self.owner.__dict__[self.method]
        source = _source(self.owner, self.method)
        if source.count(self.right) != 1:
            raise ValueError(
                f"mutant '{self.name}': {self.method} has not '{self.right}' once; write it anew"
            )
        module = self.owner if isinstance(self.owner, ModuleType) else sys.modules[self.owner.__module__]
        names = dict(vars(module))
        code = "from __future__ import annotations\n" + source.replace(self.right, self.wrong)
        exec(compile(code, f"<mutant: {self.name}>", "exec"), names)
        # A property's source begins with its decorator, so what comes of it is one, too.
        setattr(self.owner, self.method, names[self.method])
        try:
            yield
        finally:
            setattr(self.owner, self.method, found)


@cache
def _source(owner: type | ModuleType, method: str) -> str:
    found = owner.__dict__[method]
    function: Any = found.fget if isinstance(found, property) else found
    return textwrap.dedent(inspect.getsource(function))


_HELD = "held = self._keep_tokens(worker_id, epoch, messages, now_s)"
_KNOWN = "[m.lease_id for m in messages if m.lease_id in {x.lease_id for x in self._leases.live}]"

MUTANTS = (
    # leases
    Mutant(
        "a lease is accepted after its end",
        LeaseTable,
        "close",
        "self._expires_s[lease_id] <= now_s",
        "False",
    ),
    Mutant("the epoch is not checked on stream", ReplayBuffer, "stream", _HELD, f"{_HELD} + {_KNOWN}"),
    Mutant("the epoch is not checked on hand_over", ReplayBuffer, "hand_over", _HELD, f"held = {_KNOWN}"),
    Mutant(
        "the epoch is not checked on pull",
        LeaseTable,
        "is_current",
        "self._epochs.get(worker_id) == epoch",
        "True",
    ),
    Mutant("a lease is renewed from when it was issued", LeaseTable, "renew", "now_s + self._lease_s", "0.0"),
    Mutant(
        "permits are not returned on expiry",
        LeaseTable,
        "_remove",
        "self._versions[lease.version] -= 1",
        "pass",
    ),
    Mutant(
        "a recalled lease is forgotten",
        LeaseTable,
        "recall",
        "self._recalled.update(chosen)",
        "self._recalled = set(chosen)",
    ),
    Mutant(
        "leases of a lost worker live on",
        ReplayBuffer,
        "lose",
        "ended = self._leases.forget(worker_id)",
        "ended = self._leases.expire(0.0)",
    ),
    Mutant("a lost worker is not fenced", LeaseTable, "forget", "self._gone.add(worker_id)", "pass"),
    # partial rollouts
    Mutant(
        "partial rollouts are attached twice", Partials, "take", "self._waiting.pop(", "self._waiting.get("
    ),
    Mutant(
        "a partial rollout's version is not counted in its lease",
        ReplayBuffer,
        "lease",
        "min(version, oldest_version(partials)) if partials else version",
        "version",
    ),
    Mutant(
        "a piece that came twice is kept twice",
        LeasePartials,
        "add",
        "piece.first != lengths[number]",
        "piece.first > lengths[number]",
    ),
    Mutant(
        "a piece whose predecessor is missing is kept",
        LeasePartials,
        "add",
        "piece.first != lengths[number]",
        "piece.first < lengths[number]",
    ),
    Mutant(
        "partial rollouts go on however old",
        ReplayBuffer,
        "_take_partials",
        "self._permits(oldest_version(partials)) < 1",
        "False",
    ),
    # admission
    Mutant(
        "S is off by one when leases are issued",
        ReplayBuffer,
        "_permits",
        "step=self._step",
        "step=self._step - 1",
    ),
    Mutant(
        "S is off by one when a batch is formed",
        ReplayBuffer,
        "next_batch",
        "oldest = oldest_admissible(step, self._staleness.max_staleness)",
        "oldest = oldest_admissible(step, self._staleness.max_staleness + 1)",
    ),
    Mutant(
        "the learner does not hold for live leases",
        ReplayBuffer,
        "next_batch",
        'waiting = self._staleness.policy == "wait"',
        "waiting = False",
    ),
    Mutant(
        "a group is trained twice",
        ReplayBuffer,
        "next_batch",
        "self._groups.pop(self._index.ids[sequence])",
        "self._groups[self._index.ids[sequence]]",
    ),
    Mutant(
        "a group is trained once too often",
        ReplayBuffer,
        "next_batch",
        "uses < self._staleness.reuse",
        "uses <= self._staleness.reuse",
    ),
    Mutant(
        "spans need not be published",
        claims,
        "_check_claim",
        "not has_made(sample)",
        "False",
    ),
    Mutant(
        "a group of fewer samples is taken",
        claims,
        "_check_group",
        "len(samples) != lease.num_samples",
        "False",
    ),
    Mutant(
        "a group without a signal counts all the same",
        ReplayBuffer,
        "submit",
        "elif self._is_to_be_replaced(group)",
        "elif False",
    ),
    Mutant(
        "refill has no limit",
        ReplayBuffer,
        "_is_to_be_replaced",
        "self._replaced < refill.max_groups",
        "True",
    ),
    Mutant(
        "the limit of refill is for the whole run", ReplayBuffer, "next_batch", "self._replaced = 0", "pass"
    ),
    # prompts and the ledger
    Mutant(
        "a prompt is not given back on failure",
        ReplayBuffer,
        "_attempt_failed",
        "attempts >= MAX_ATTEMPTS",
        "attempts >= 2",
    ),
    Mutant("a dropped group is not counted", ReplayBuffer, "_drop", "dropped_stale=self._samples, ", ""),
    Mutant(
        "a dropped prompt is forgotten",
        ReplayBuffer,
        "_drop",
        "self._cursor.give_back(group.prompt_index)",
        "pass",
    ),
    Mutant(
        "a returned prompt goes out twice",
        PromptCursor,
        "take",
        "heapq.heappop(self._returned)",
        "self._returned[0]",
    ),
    # versions and workers
    Mutant(
        "an install of an older version is taken",
        SimWorkers,
        "_installed",
        "manifest.version > engine.version",
        "manifest.version != engine.version",
    ),
    Mutant(
        "a version is published before it exists",
        Controller,
        "_on_step_done",
        "self._todo.append(Publish(self._step))",
        "self._todo.append(Publish(self._step + 1))",
    ),
    Mutant(
        "a starved learner never publishes again",
        Controller,
        "_on_not_ready",
        "self._todo.append(Publish(self._step))",
        "pass",
    ),
    Mutant(
        "a publication of every kappa is one late",
        Controller,
        "_on_step_done",
        "self._step % self._kappa == 0",
        "self._step % (self._kappa + 1) == 0",
    ),
    Mutant("a replaced worker keeps its epoch", Controller, "_replace", "worker.epoch += 1", "pass"),
    Mutant(
        "events of an old epoch are believed",
        Controller,
        "_living",
        "worker is not None and worker.epoch == epoch",
        "worker is not None",
    ),
    Mutant(
        "a worker is started again for ever",
        Controller,
        "_replace",
        "worker.in_a_row >= self._config.fleet.restarts",
        "False",
    ),
    Mutant("a leaving worker gets leases", Flow, "ask", "member.leaving", "False"),
    Mutant(
        "a leaving worker gets installs",
        Controller,
        "_on_published",
        "_takes_weights(worker)",
        "worker.up and worker.installing < 0",
    ),
    # the fleet and its dollars
    Mutant(
        "the fleet launches above its quota",
        FleetWorker,
        "counts",
        'self.state != "leaving"',
        'self.state == "serving"',
    ),
    Mutant("a fleet of nobody stays one", Reconciler, "tick", "if not self.counts:", "if False:"),
    Mutant("a back-off never ends", BackOffs, "holds", " and now_s < self._of[instance_type].until_s", ""),
    Mutant(
        "the fleet's limits are ignored",
        Reconciler,
        "tick",
        "self._provisioner.limits = limits if",
        "self._provisioner.limits = type(limits)() if",
    ),
    Mutant(
        "a machine that is gone costs on", Accounting, "stop", "self._pay(known, -known.price, now)", "pass"
    ),
    Mutant(
        "a taken machine is billed on",
        SimWorkers,
        "on_taken",
        "self._trace.money.stop(worker_id, self._kernel.now_s)",
        "pass",
    ),
    Mutant("the budget is ignored", Budget, "spent", ">= self._left", ">= 2 * self._left"),
)

for _mutant in MUTANTS:  # as they were imported: a campaign is long, and somebody may edit them meanwhile
    _source(_mutant.owner, _mutant.method)
