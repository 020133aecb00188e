"""Spending of a run: its dollars over all its parts, what they went into, and the budget that ends it.

A resumed run adds to the figures in `spending.json` of its folder. They include the dollars of steps that the
resume repeats, and those spent after the last step.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from echo_planes.cluster.clock import Clock
from echo_planes.config.files import SETTINGS_BYTES, read_json
from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError, DataError
from echo_planes.fleet.money import WASTED, Accounting, Budget
from echo_planes.loop.observers import QuietObserver
from echo_planes.loop.planes import Observer
from echo_planes.reporting.metrics import Aggregates, Record, number, write_atomic
from echo_planes.types import (
    BufferCounts,
    EvalReport,
    StepStats,
    TrainBatch,
    WorkerInfo,
)

SPENDING_FILE = "spending.json"
EARLIER = "earlier"  # part and SKU of dollars of which only the sum is known
LOOK_S = 2.0  # between two checks of the budget
FEW_STEPS = 3  # a budget that pays for fewer further steps causes a warning
_RESTORE = "put the original back, or remove it to count the dollars of its steps alone"
_OF_A_STEP = (
    "usd_per_million_tokens",
    "tokens_generated",
    "usd_per_million_generated_tokens",
    "usd_wasted",
    "wasted_share",
)


class Spending:
    """Dollars of one run.

    Machines: every learner rank costs from the start of the part, every worker from its start on a machine
    until it is gone. The learner counts as booting until the first worker serves, a worker until its first
    good install. After that the busy seconds that the worker reports divide its time into busy and idle.

    Tokens: the accounting does not know which worker sampled the tokens that were trained, dropped or lost.
    It therefore shares the dollars of all busy time over the fleet's tokens, at their average price:

    - `trained`: tokens in the loss of groups that are trained for the first time. Exact.
    - `evaluated`: estimated from the mean length of the answers that an evaluation's report holds.
    - `stale`: trajectories dropped as too old, `lost`: those removed before they were trained, and `open`:
      those buffered. Each counts with the mean length in the newest batch. Dropped ones are often longer,
      so that `stale` is an underestimate.
    - `uninformative`: tokens of groups that refill replaced, as the replay buffer counts them. Exact.
    - `failed`, `lost`: discarded tokens, as the replay buffer counts them. The number of failed trajectories
      times that mean length is `failed`, but at most all of them; the rest is `lost`.

    Tokens in flight count when they end; until then the other tokens carry their dollars.

    Args:
        config: the run's settings.
        folder: the run folder.
        start_s: when this part of the run began, seconds.
        totals: running totals over the run's steps; at construction those of its earlier parts.
        from_checkpoint: the part continues from a checkpoint. That of step 0 has dollars before it, and no
            steps.

    Raises:
        DataError: the folder's spending.json is damaged.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        start_s: float,
        totals: Aggregates,
        *,
        from_checkpoint: bool = False,
    ) -> None:
        self._path = folder / SPENDING_FILE
        self._steps = config.run.steps
        self._totals = totals
        self._ranks = [f"learner-{rank}" for rank in range(config.learner.num_ranks)]
        self._serving = False  # some worker serves
        is_resumed = from_checkpoint or totals.num_steps > 0
        # The ledger of a resumed run continues from counts that are known only after its first step.
        self._counts = None if is_resumed else BufferCounts()
        self._generated = None if is_resumed else 0  # tokens accepted or discarded so far; None: unknown
        self._earlier = _read(self._path, totals.usd_total) if is_resumed else {}
        self._alive: dict[str, str] = {}  # workers that cost money -> instance type
        self._prices: dict[str, float] = {}  # instance type -> dollars an hour, where it has changed
        self.book = Accounting()
        for rank in self._ranks:
            self.book.start(
                rank, config.learner.usd_per_hour, start_s, sku="learner", role="learner", state="booting"
            )

    @property
    def earlier_usd(self) -> float:
        """Dollars of the earlier parts of a resumed run."""
        return sum(self._earlier.get("usd_by_part", {}).values())

    def total_usd(self, now_s: float) -> float:
        """Return the dollars of all parts of the run."""
        return self.earlier_usd + self.book.total_usd(now_s)

    def larger_budget(self, now_s: float) -> str:
        """Return the setting of a budget with which the run can go on once its own is spent.

        It is the projected cost of the whole run, at the recent price of a step, plus a tenth. Where that
        price is unknown, it is twice the dollars spent.
        """
        projected = self.book.projected_usd(now_s, self._steps - self._totals.num_steps)
        usd = 2 * self.total_usd(now_s) if projected is None else 1.1 * (self.earlier_usd + projected)
        unit = 10.0 ** (math.floor(math.log10(usd)) - 1)
        return f"budget.usd={math.ceil(usd / unit) * unit:.6g}"

    # --- events ----------------------------------------------------------------------------------

    def worker(self, info: WorkerInfo, now_s: float, *, alive: bool) -> None:
        """Count a worker's machine from its start (`alive`), or until it is gone."""
        if alive:
            self.book.start(info.worker_id, info.usd_per_hour, now_s, sku=info.sku, market=info.market)
            self._alive[info.worker_id] = info.instance_type
        else:
            self.book.stop(info.worker_id, now_s)
            self._alive.pop(info.worker_id, None)

    def priced(self, info: WorkerInfo) -> WorkerInfo:
        """Return `info` with the current price of its instance type."""
        return replace(info, usd_per_hour=self._prices.get(info.instance_type, info.usd_per_hour))

    def reprice(self, usd_per_hour: Mapping[str, float], now_s: float) -> None:
        """Apply new prices, dollars an hour by instance type, to present and future workers from now on."""
        self._prices |= usd_per_hour
        for worker_id, instance_type in self._alive.items():
            if instance_type in usd_per_hour:
                self.book.reprice(worker_id, usd_per_hour[instance_type], now_s)

    def serves(self, worker_id: str, now_s: float) -> None:
        """Count a worker as serving; the first one also ends the learner's boot time."""
        self.book.mark(worker_id, "serving", now_s)
        if not self._serving:
            self._serving = True
            self.book.ready(now_s)
            for rank in self._ranks:
                self.book.mark(rank, "busy", now_s)

    def evaluated(self, report: EvalReport) -> None:
        """Count the tokens of an evaluation, estimated from the answers in its report."""
        sampled = [sum(t.episode.response_mask) for t in report.trajectories]
        if sampled:
            answers = report.num_prompts * report.samples_per_prompt
            self.book.settle(None, "evaluated", round(sum(sampled) / len(sampled) * answers))

    def step(
        self,
        batch: TrainBatch,
        is_first: Sequence[bool],
        stats: StepStats,
        idle_s: float,
        counts: BufferCounts,
        now_s: float,
    ) -> Record:
        """Count the dollars of a learner step; return their columns for metrics.jsonl.

        Args:
            batch: the trained batch.
            is_first: whether each of its trajectories is trained for the first time.
            stats: of the step.
            idle_s: seconds that the learner waited for the batch.
            counts: the ledger after the step.
            now_s: when the step ended.
        """
        self._share_out(batch, is_first, counts)
        usd = self.book.step(now_s, stats.tokens, idle_s)
        projected = self.book.projected_usd(now_s, self._steps - stats.step - 1)
        summary = self.summary(now_s, self._totals.num_steps + 1, self._totals.tokens_trained + stats.tokens)
        return {
            "usd": usd,
            **{key: summary[key] for key in _OF_A_STEP},
            "usd_projected": None if projected is None else self.earlier_usd + projected,
        }

    # --- results ---------------------------------------------------------------------------------

    def summary(self, now_s: float, num_steps: int, tokens: int) -> Record:
        """Update spending.json; return the dollars of all parts of the run, as keys of summary.json.

        Args:
            now_s: time up to which machines cost.
            num_steps: learner steps of all parts.
            tokens: tokens trained in all parts.

        Raises:
            ClusterError: the disk is full.
        """
        total = self.total_usd(now_s)
        spent = {
            "usd_by_sku": _added(self._earlier.get("usd_by_sku", {}), self.book.usd_by_sku(now_s)),
            "usd_by_part": _added(
                self._earlier.get("usd_by_part", {}),
                {part: float(usd) for part, usd in self.book.parts(now_s).items()},
            ),
        }
        write_atomic(self._path, json.dumps(spent, indent=2) + "\n")
        wasted = sum(spent["usd_by_part"][part] for part in WASTED)
        return {
            "usd_total": total,
            "usd_per_step": total / num_steps if num_steps else None,
            "usd_per_million_tokens": total / tokens * 1e6 if tokens else None,
            "tokens_generated": self._generated,
            "usd_per_million_generated_tokens": total / self._generated * 1e6 if self._generated else None,
            "usd_wasted": wasted,
            "wasted_share": wasted / total if total else 0.0,
            **spent,
        }

    # --- inside ----------------------------------------------------------------------------------

    def _share_out(self, batch: TrainBatch, is_first: Sequence[bool], counts: BufferCounts) -> None:
        """Settle the tokens that met their fate since the last step, and count those still buffered."""
        before, self._counts = self._counts or counts, counts
        self._generated = counts.accepted_tokens + counts.discarded_tokens
        until = np.concatenate([[0], np.cumsum(batch.loss_mask)])  # trained tokens before each position
        lengths = until[batch.offsets[1:]] - until[batch.offsets[:-1]]
        mean = float(lengths.mean())
        failed = round((counts.failed - before.failed) * mean)
        discarded = counts.discarded_tokens - before.discarded_tokens
        removed = round((counts.removed - before.removed) * mean)
        settle = self.book.settle
        settle(None, "trained", int(lengths[np.asarray(is_first)].sum()))
        settle(None, "stale", round((counts.dropped_stale - before.dropped_stale) * mean))
        settle(None, "uninformative", counts.uninformative_tokens - before.uninformative_tokens)
        settle(None, "failed", min(failed, discarded))
        settle(None, "lost", removed + discarded - min(failed, discarded))
        self.book.undecided(round(counts.buffered * mean))


class BudgetGuard(QuietObserver):
    """Watch that stops a run when its budget is spent, and warns shortly before.

    It checks the budget after every step and every `LOOK_S` seconds, because the start-up costs money too.
    The run still finishes its current step, so that it spends slightly more than the budget.

    Args:
        config: the run's settings.
        budget: what is left of `budget.usd`.
        clock: the run's clock, seconds.
        stop: called with a reason; has the run finish its step, save a checkpoint and end.
        journal: receives one event when few steps are left, and one when the run is stopped.
    """

    def __init__(
        self,
        config: Config,
        budget: Budget,
        clock: Clock,
        stop: Callable[[str], None],
        journal: Observer,
    ) -> None:
        self._name = f"budget.usd={config.budget.usd:g}"
        self._budget = budget
        self._steps = config.run.steps
        self._clock = clock
        self._stop = stop
        self._journal = journal
        self._stopped = self._warned = False

    async def run(self, hands: object) -> None:
        """Check the budget at intervals until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def on_step(self, batch: TrainBatch, stats: StepStats, idle_s: float, counts: BufferCounts) -> None:
        self._look()
        to_do, left = self._steps - stats.step - 1, self._budget.steps_left(self._clock.now_s())
        if left is not None and left < min(to_do, FEW_STEPS) and not (self._warned or self._stopped):
            self._warned = True
            steps = f"{left} step{'' if left == 1 else 's'}"
            self._journal.on_event("budget", f"{self._name} pays for {steps} more; {to_do} are to do")

    def _look(self) -> None:
        now_s = self._clock.now_s()
        if not self._stopped and self._budget.spent(now_s):
            self._stopped = True
            text = f"{self._name} is spent; give a larger one to go on"
            self._journal.on_event("budget", text)
            self._stop(text)


def open_budget(config: Config, spending: Spending) -> Budget | None:
    """Return what is left of `budget.usd`; None: there is no budget.

    Raises:
        ConfigError: the earlier parts of the run have spent it.
    """
    usd = config.budget.usd
    if usd is None:
        return None
    _refuse_spent(usd, spending.earlier_usd)
    return Budget(usd, spending.book, earlier_usd=spending.earlier_usd)


def check_budget(usd: float, folder: Path) -> None:
    """Check that a resumed run has some of `budget.usd` left, as far as its spending.json tells.

    Raises:
        ConfigError: the earlier parts of the run have spent it.
        DataError: spending.json is damaged.
    """
    path = folder / SPENDING_FILE
    if path.exists():  # without it only metrics.jsonl has dollars, which `open_budget` checks
        _refuse_spent(usd, sum(_read(path, 0.0)["usd_by_part"].values()))


def _refuse_spent(usd: float, earlier_usd: float) -> None:
    if earlier_usd >= usd:
        raise ConfigError(
            f"budget.usd={usd:g}: the run has spent ${earlier_usd:.4g} already; give more, or "
            "budget.usd=null for no limit"
        )


def _read(path: Path, total_usd: float) -> dict[str, dict[str, float]]:
    """Return the dollars of earlier parts by SKU and by part; without a file, `total_usd` as a whole."""
    keys = ("usd_by_sku", "usd_by_part")
    if not path.exists():
        return {key: {EARLIER: total_usd} for key in keys}
    try:
        written: Any = read_json(path, SETTINGS_BYTES, advice=_RESTORE)
        spent = {key: {str(name): number(usd) for name, usd in written[key].items()} for key in keys}
    except (ValueError, TypeError, KeyError, AttributeError) as why:
        raise _damaged(path) from why
    known = {key: {name: usd for name, usd in spent[key].items() if usd is not None} for key in keys}
    if known != spent or any(usd < 0 for key in keys for usd in known[key].values()):
        raise _damaged(path)
    return known


def _damaged(path: Path) -> DataError:
    return DataError(f"{path} does not say what the run has spent so far: {_RESTORE}")


def _added(earlier: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of two tables of dollars, by name."""
    return {name: earlier.get(name, 0.0) + now.get(name, 0.0) for name in {**earlier, **now}}
