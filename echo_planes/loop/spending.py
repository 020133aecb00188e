"""Spending of a run: its dollars over all its parts, what they went into, and the budget that ends it.

A run that is resumed goes on with what `spending.json` of its folder says, so that the dollars of steps that
it makes again, and of everything after its last step, are not forgotten.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
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
LOOK_S = 2.0
FEW_STEPS = 3  # fewer left in the budget are worth a warning
_RESTORE = "put the original back, or remove it to count the dollars of its steps alone"
_OF_A_STEP = (
    "usd_per_million_tokens",
    "tokens_generated",
    "usd_per_million_generated_tokens",
    "usd_wasted",
    "wasted_share",
)


class Spending:
    """The dollars of one run.

    Machines: every learner rank costs from the start of the run, every worker from when it is started, on
    a machine that is there, until it is gone. The learner boots until the first worker serves, a worker until
    its first good install. From then on the worker's own account of its busy seconds tells busy from idle
    time.

    Tokens: it is not known which worker sampled what was trained, dropped or lost. So the dollars of all busy
    time are shared out evenly over the fleet's tokens, at its average price of a token:

    - `trained`: tokens that the loss was taken over, when their group is trained first. Exact.
    - `evaluated`: from the mean length of the answers that an evaluation's report holds.
    - `stale`: trajectories dropped as too old, `lost`: those removed before they were trained, and `open`:
      those buffered; each as long as the mean of the batch trained last. Dropped ones are often longer than
      that, so that `stale` is rather too small.
    - `uninformative`: what the replay buffer counts as tokens of groups that others replaced. Exact.
    - `failed`, `lost`: what the replay buffer counts as discarded tokens. So much of it as the failed
      trajectories would have, at that mean length, is `failed`.

    What is in flight counts when it ends; until then its dollars are shared out over the others.

    Args:
        config: the run's settings.
        folder: of the run.
        start_s: when it began.
        totals: of its steps so far; those there now are of its earlier parts.

    Raises:
        DataError: the folder's spending.json is damaged.
    """

    def __init__(self, config: Config, folder: Path, start_s: float, totals: Aggregates) -> None:
        self._path = folder / SPENDING_FILE
        self._steps = config.run.steps
        self._totals = totals
        self._ranks = [f"learner-{rank}" for rank in range(config.learner.num_ranks)]
        self._serving = False  # some worker does
        is_resumed = totals.num_steps > 0
        # Of a resumed run the ledger goes on from a number that is known after its first step.
        self._counts = None if is_resumed else BufferCounts()
        self._generated = None if is_resumed else 0  # tokens that found their end, trained or not
        self._earlier = _read(self._path, totals.usd_total) if is_resumed else {}
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
        """Dollars of all parts of the run."""
        return self.earlier_usd + self.book.total_usd(now_s)

    def way_on(self, now_s: float) -> str:
        """Advice on going on where the budget is spent: a command, if there is a checkpoint to go on from.

        The budget in it is what the whole run will have cost at the recent price of a step, and a tenth more;
        twice what was spent where no step tells its price.
        """
        done = self._totals.num_steps
        projected = self.book.projected_usd(now_s, self._steps - done)
        usd = 2 * self.total_usd(now_s) if projected is None else 1.1 * (self.earlier_usd + projected)
        unit = 10.0 ** (math.floor(math.log10(usd)) - 1)
        budget = f"budget.usd={math.ceil(usd / unit) * unit:.6g}"
        if not done:
            return f"nothing was trained, so there is no checkpoint: start anew, with {budget} or more"
        return f"python -m echo_planes.run {shlex.quote(f'run.resume={self._path.parent}')} {budget}"

    # --- what happens ----------------------------------------------------------------------------

    def worker(self, info: WorkerInfo, now_s: float, *, alive: bool) -> None:
        """A worker is started, or gone."""
        if alive:
            self.book.start(info.worker_id, info.usd_per_hour, now_s, sku=info.sku, market=info.market)
        else:
            self.book.stop(info.worker_id, now_s)

    def serves(self, worker_id: str, now_s: float) -> None:
        """A worker has weights."""
        self.book.mark(worker_id, "serving", now_s)
        if not self._serving:
            self._serving = True
            self.book.ready(now_s)
            for rank in self._ranks:
                self.book.mark(rank, "busy", now_s)

    def evaluated(self, report: EvalReport) -> None:
        """Held-out prompts were answered."""
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
        """A learner step ended; returns what metrics.jsonl says of its dollars.

        Args:
            batch: what was trained.
            is_first: which of its trajectories were never trained before.
            stats: of the step.
            idle_s: seconds that the learner waited for it.
            counts: the ledger after it.
            now_s: when.
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

    # --- what it came to -------------------------------------------------------------------------

    def summary(self, now_s: float, num_steps: int, tokens: int) -> Record:
        """Dollars of all parts of the run, as summary.json wants them; spending.json is brought up to date.

        Args:
            now_s: when.
            num_steps: of all parts.
            tokens: trained in them.

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
        """Settle the tokens that found their end since the last step."""
        before, self._counts = self._counts or counts, counts
        self._generated = counts.accepted_tokens + counts.discarded_tokens
        until = np.concatenate([[0], np.cumsum(batch.loss_mask)])  # trained tokens before each place
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
    """Has a run stop when its budget is spent, and says so when that is near.

    It looks at the budget after every step, and every few seconds: a start may be dear too. What is under way
    then is finished, so that a little more is spent.

    Args:
        config: the run's settings.
        budget: what is left of `budget.usd`.
        clock: seconds.
        stop: has the run finish its step, save a checkpoint and end, for a reason.
        journal: told, once, when few steps are left, and when it stops the run.
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
        """Until it is cancelled."""
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
    """Return the budget that is left of `budget.usd`; None: no budget was given.

    Raises:
        ConfigError: the earlier parts of the run have spent it.
    """
    usd = config.budget.usd
    if usd is None:
        return None
    _refuse_spent(usd, spending.earlier_usd)
    return Budget(usd, spending.book, earlier_usd=spending.earlier_usd)


def check_budget(usd: float, folder: Path) -> None:
    """Something of `budget.usd` is left, as far as the spending.json of a run that is resumed can say.

    Raises:
        ConfigError: the earlier parts of the run have spent it.
        DataError: spending.json is damaged.
    """
    path = folder / SPENDING_FILE
    if path.exists():  # otherwise only the steps that the checkpoint keeps tell it: see `open_budget`
        _refuse_spent(usd, sum(_read(path, 0.0)["usd_by_part"].values()))


def _refuse_spent(usd: float, earlier_usd: float) -> None:
    if earlier_usd >= usd:
        raise ConfigError(
            f"budget.usd={usd:g}: the run has spent ${earlier_usd:.4g} already; give more, or "
            "budget.usd=null for no limit"
        )


def _read(path: Path, total_usd: float) -> dict[str, dict[str, float]]:
    """Read what earlier parts of a run spent, by SKU and by part; where it has no file, the steps' sum."""
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
    """Dollars of both, by name."""
    return {name: earlier.get(name, 0.0) + now.get(name, 0.0) for name in {**earlier, **now}}
