"""Accounting of a run: the step line, metrics.jsonl, events, money, the ledger and summary.json.

`Journal` is the `Observer` of a real run: the runner and the other observers report to it.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from echo_planes.cluster.clock import Clock
from echo_planes.config.schema import Config
from echo_planes.fleet.capacity import UninformativeShare, needed_capacity
from echo_planes.learning.fall import collapse_of, level_figures
from echo_planes.loop.evaluation import doublings, drawn, in_words
from echo_planes.loop.planes import Accepted
from echo_planes.loop.spending import Spending
from echo_planes.reporting.broadcasts import BroadcastLog, summary_of
from echo_planes.reporting.figures import batch_figures, learner_figures
from echo_planes.reporting.ledger import LEDGER_DETAILS
from echo_planes.reporting.metrics import FLEET_STATE, PUBLICATION, WORKER_STATE, MetricsWriter, Record
from echo_planes.reporting.parts import RunParts, whole_run
from echo_planes.reporting.terminal import View
from echo_planes.types import (
    BroadcastStats,
    BufferCounts,
    EvalReport,
    GuardReport,
    InstallReport,
    Manifest,
    SeedReport,
    StepStats,
    TrainBatch,
    WorkerInfo,
    WorkerStats,
)

RECENT_STEPS = 20  # newest steps whose median is T_train


class Journal:
    """Accounting of one part of a run. Figures of the whole run include the earlier parts.

    Args:
        config: the run's settings.
        writer: writes metrics and events to the run folder.
        view: the terminal.
        clock: the run's clock, seconds.
        export: called with every step's numbers (Prometheus).
        start_s: when the part began, on `clock`.
        start_step: step of the checkpoint that the part continues from; None: there is none.

    Raises:
        DataError: parts.json or spending.json of the earlier parts is damaged.
    """

    def __init__(
        self,
        config: Config,
        writer: MetricsWriter,
        view: View,
        clock: Clock,
        export: Callable[[Mapping[str, float]], None],
        start_s: float,
        start_step: int | None = None,
    ) -> None:
        self._config = config
        self._writer = writer
        self._view = view
        self._clock = clock
        self._export = export
        self._start_s = start_s
        self._last_step_s = start_s
        self._infos: dict[str, WorkerInfo] = {}
        self._serving: set[str] = set()  # workers whose current incarnation serves
        self._t_train_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._uninformative = UninformativeShare(config.sampling.trajectories_per_step)
        self._accepted: Accepted = {}
        self._evals: list[dict[str, Any]] = []
        self._newest_version, self._num_versions = -1, 0
        self._num_installs, self._install_s = 0, 0.0
        self._mismatches: list[float] = []
        self._uses = GroupUses()
        self._duplicates = 0
        self._digest_mismatches = 0
        self._restarts: Mapping[str, int] = {}
        self._parts = RunParts(writer.folder, start_step or 0)
        self.broadcasts = BroadcastLog()
        self.spending = Spending(
            config, writer.folder, start_s, writer.aggregates, from_checkpoint=start_step is not None
        )
        self.counts = BufferCounts()  # the ledger, as of the last step
        self._guard = GuardReport(0, config.staleness.max_staleness, 1.0)
        self._seeding: SeedReport | None = None  # of the present step
        self._sparse_drift: float | None = None  # of the audits since the last step

    # --- Observer --------------------------------------------------------------------------------

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._view.phase(name)

    def on_event(self, kind: str, text: str, *, worker: str = "", version: int | None = None) -> None:
        self._writer.event(self._elapsed_s(), kind, text, worker=worker or None, version=version)
        if kind not in ("eval", "price"):
            self._view.event(f"{kind}{' ' + worker if worker else ''}: {text}")

    def on_worker(self, info: WorkerInfo, *, alive: bool) -> None:
        info = self.spending.priced(info)
        known = self._infos.get(info.worker_id, info)
        if info.epoch < known.epoch:
            return  # a late report of an incarnation that its successor has replaced
        self._infos[info.worker_id] = info
        self._serving.discard(info.worker_id)
        self._worker_state(info, "booting" if alive else "gone")
        self.spending.worker(info, self._clock.now_s(), alive=alive)

    def on_stats(self, epoch: int, stats: WorkerStats) -> None:
        if stats.worker_id in self._infos and self._infos[stats.worker_id].epoch == epoch:
            self.spending.book.worked(stats.worker_id, stats.busy_s, self._clock.now_s())

    def on_accepted(self, accepted: Accepted) -> None:
        self._accepted = accepted

    def on_published(self, manifest: Manifest, seconds: float) -> None:
        self._num_versions += manifest.version > self._newest_version  # a repeated publication does not count
        self._newest_version = max(self._newest_version, manifest.version)
        self.broadcasts.on_published(manifest, seconds, self._clock.now_s())
        share = manifest.changed_elements / max(1, manifest.total_elements)
        self._writer.event(
            self._elapsed_s(),
            PUBLICATION,
            f"{manifest.codec}, {manifest.payload_bytes:,} bytes, {share:.1%} changed, {seconds:.2f} s",
            version=manifest.version,
            lineage=manifest.lineage,
        )
        self._write_part([])

    def on_broadcasts(self, stats: Sequence[BroadcastStats]) -> None:
        for version, peer in self.broadcasts.on_broadcasts(stats):
            text = f"{peer} while v{version} is on its way: others take its place in the chains"
            self.on_event("peer at fault", text, version=version)

    def on_installed(self, report: InstallReport) -> None:
        self._digest_mismatches += report.digest_mismatches
        if report.caught_up:
            self.on_event("caught up", report.caught_up, worker=report.worker_id, version=report.version)
        if report.ok:
            info = self._infos.get(report.worker_id)
            if info is not None and report.worker_id not in self._serving:
                self._worker_state(info, "serving")
            self._serving.add(report.worker_id)
            self.spending.serves(report.worker_id, self._clock.now_s())
            self.broadcasts.on_installed(report, len(self._serving), self._clock.now_s())
            if not self._num_installs:
                self._last_step_s = self._clock.now_s()  # the first step is measured from here
            self._num_installs += 1
            self._install_s += report.seconds

    def on_step(self, batch: TrainBatch, stats: StepStats, idle_s: float, counts: BufferCounts) -> None:
        now_s = self._clock.now_s()
        step_s, self._last_step_s = now_s - self._last_step_s, now_s
        self.counts = counts
        groups = [trajectory_id.rpartition("/")[0] for trajectory_id in batch.trajectory_ids]
        uses = {group: self._uses.add(group) for group in dict.fromkeys(groups)}
        is_first = [uses[group] == 1 for group in groups]
        self._duplicates += sum(uses[group] > self._config.staleness.reuse for group in groups)
        staleness = batch.step - batch.versions
        judged = level_figures(batch)
        metrics: dict[str, Any] = {
            "step": stats.step + 1,
            "policy_version": stats.step + 1,
            "reward_mean": float(batch.task_rewards.mean()),
            "reward_trained_mean": float(batch.rewards.mean()),
            "reward_std": float(batch.task_rewards.std()),
            "level": judged.level if judged else None,
            "reward_level_mean": judged.reward if judged else None,
            "reward_level_std": judged.spread if judged else None,
            "correct_mean": float(batch.correct.mean()),
            **(
                {"reward_parts": {name: mean for name, mean, _ in parts}}
                if (parts := batch.reward_parts)
                else {}
            ),
            **batch_figures(batch),
            **learner_figures(stats),
            "staleness_max": int(staleness.max()),
            "staleness_mean": float(staleness.mean()),
            "t_train_s": stats.t_train_s,
            "t_idle_s": idle_s,
            "t_step_s": step_s,
            "tokens": stats.tokens,
            "tokens_per_s": stats.tokens / max(step_s, 1e-9),
            **self.spending.step(batch, is_first, stats, idle_s, counts, now_s),
            "buffered": counts.buffered,
            "leased": counts.leased,
            "accepted": counts.accepted,
            "trained": counts.trained,
            "dropped_stale": counts.dropped_stale,
            "refused": counts.refused,
            **_details(counts),
            **_guarded(self._guard),
            **_seeded(self._seeding),
            **({} if self._sparse_drift is None else {"mismatch_sparse": self._sparse_drift}),
            "time_s": self._elapsed_s(),
            **self.broadcasts.newest(),
            **self._newest_eval(),
        }
        self._sparse_drift = None
        self._t_train_s.append(stats.t_train_s)
        self._uninformative.observe(counts.uninformative)
        if metrics.get("t_bcast_s") is not None:
            metrics["mu_min"] = needed_capacity(
                self._config.staleness.kappa,
                self._config.sampling.trajectories_per_step,
                statistics.median(self._t_train_s),
                metrics["t_bcast_s"],
                uninformative=self._uninformative.share,
            )
        metrics["bubble_ratio"] = self._writer.aggregates.bubble_ratio_with(stats.t_train_s, idle_s)
        self._writer.step(metrics)
        self._export(metrics)
        self._view.step({**metrics, "usd": self.spending.total_usd(now_s)})

    def on_eval(self, report: EvalReport, mismatch: float | None) -> None:
        draw = drawn(self._config)
        self._evals.append(
            {
                "step": report.step,
                "version": report.version,
                "newest_version": report.newest_version,
                "samples_per_prompt": report.samples_per_prompt,
                "temperature": draw.temperature,
                "top_p": draw.top_p,
                "accuracy": report.accuracy,
                "num_unscored": report.num_unscored,
                "pass_at": doublings(report.pass_at),
                "reward_mean": report.reward_mean,
                "prompt_rewards": [list(pair) for pair in report.prompt_rewards],
            }
        )
        self.spending.evaluated(report)
        if mismatch is not None:
            self._mismatches.append(mismatch)
        text = in_words(report)
        self.on_event("eval", text, version=report.version)
        self._view.event(text)
        self._write_part([])

    def on_prices(self, usd_per_hour: Mapping[str, float]) -> None:
        """Apply new prices, dollars an hour by instance type, from now on."""
        self.spending.reprice(usd_per_hour, self._clock.now_s())
        self._infos = {worker_id: self.spending.priced(info) for worker_id, info in self._infos.items()}

    def on_guard(self, report: GuardReport) -> None:
        self._guard = report

    def on_audited(self, drift: float) -> None:
        self._sparse_drift = drift

    def on_seeding(self, report: SeedReport) -> None:
        self._seeding = report

    @property
    def collapse(self) -> str:
        """Description of a reward that ended far below its best; "" if it did not."""
        totals = self._writer.aggregates
        levels, rewards, spreads = zip(*totals.judged, strict=True) if totals.judged else ((), (), ())
        return collapse_of(rewards, spreads, levels)

    def on_fleet(self, text: str, numbers: Mapping[str, Any]) -> None:
        """Log the state of a fleet that follows price and need, and its actions (`fleet.record`)."""
        self._writer.event(self._elapsed_s(), FLEET_STATE, text, **numbers)

    # --- the end ---------------------------------------------------------------------------------

    def summary(
        self,
        *,
        status: str,
        error: str,
        counts: BufferCounts,
        digest_mismatches: int,
        restarts: Mapping[str, int],
        unstored: Sequence[int],
    ) -> dict[str, Any]:
        """Write summary.json and return its contents: the whole run, except keys that name its last part."""
        now_s, totals = self._clock.now_s(), self._writer.aggregates
        self._digest_mismatches, self._restarts = digest_mismatches, restarts
        whole = whole_run(self._write_part(self.broadcasts.rows()))
        summary = {
            "task": self._config.task.name,
            "model": self._config.model.path,
            "status": status,
            "error": error,
            **totals.summary(),
            **self.spending.summary(now_s, totals.num_steps, totals.tokens_trained),
            # The largest S that was in force: a rollback halves it, and a resume may set another.
            "max_staleness": max(self._config.staleness.max_staleness, totals.max_staleness_allowed),
            "publish_every": self._config.staleness.kappa,
            "versions_unstored": list(unstored),
            "lost_trajectories": counts.lost,
            "accepted": counts.accepted,
            "trained": counts.trained,
            "dropped_stale": counts.dropped_stale,
            "buffered": counts.buffered,
            "refused": counts.refused,
            **_details(counts),
            **summary_of(whole["publications"]),
            "guard": {
                "mode": self._config.guard.mode,
                "alarms": dict(self._guard.alarms),
                "actions": dict(self._guard.actions),
                "good_step": self._guard.good_step if self._guard.good_step >= 0 else None,
                **_guarded(self._guard),
            },
            **whole,
        }
        self._writer.write_summary(summary)
        return summary

    # --- inside ----------------------------------------------------------------------------------

    def _write_part(self, publications: Sequence[Record]) -> list[Record]:
        """Update parts.json and return its records. Publications are many, so only the end passes them."""
        now_s = self._clock.now_s()
        return self._parts.write(
            {
                "seconds": round(now_s - self._start_s, 3),
                "startup": self._view.phase_seconds,
                "versions_published": self._num_versions,
                "digest_mismatches": self._digest_mismatches,
                "duplicates": self._duplicates,
                "installs": self._num_installs,
                "install_s": self._install_s,
                "mismatches": self._mismatches,
                "evals": self._evals,
                "publications": list(publications),
                "workers": [self._worker_row(info, now_s) for _, info in sorted(self._infos.items())],
            }
        )

    def _worker_row(self, info: WorkerInfo, now_s: float) -> dict[str, Any]:
        lives = [counts for (worker_id, _), counts in self._accepted.items() if worker_id == info.worker_id]
        return {
            "id": info.worker_id,
            "sku": info.sku,
            "usd_per_hour": info.usd_per_hour,
            "trajectories": sum(trajectories for _, trajectories in lives),
            "tokens": sum(tokens for tokens, _ in lives),
            "usd": self.spending.book.usd(info.worker_id, now_s),
            "restarts": self._restarts.get(info.worker_id, 0),
        }

    def _newest_eval(self) -> dict[str, Any]:
        """Return the newest evaluation's numbers for metrics.jsonl; {} before the first."""
        if not self._evals:
            return {}
        newest = self._evals[-1]
        return {
            "eval_step": newest["step"],
            "eval_version": newest["version"],
            "eval_newest_version": newest["newest_version"],
            "eval_accuracy": newest["accuracy"],
            "eval_unscored": newest["num_unscored"],
            "eval_pass_at": newest["pass_at"],
            "eval_pass_at_n": next(reversed(newest["pass_at"].values()), None),
        }

    def _worker_state(self, info: WorkerInfo, state: str) -> None:
        """Log a worker's state for the report; the terminal does not show it."""
        instance_type = info.instance_type or info.sku
        self._writer.event(
            self._elapsed_s(),
            WORKER_STATE,
            state,
            worker=info.worker_id,
            instance_type=instance_type,
            epoch=info.epoch,
        )

    def _elapsed_s(self) -> float:
        return self._clock.now_s() - self._start_s


FAR = 1 << 24  # largest jump in a lineage's numbers: a resumed run continues those of its checkpoint


class GroupUses:
    """Counter of how often each group was trained: a byte per group, up to 255, as a run trains millions."""

    def __init__(self) -> None:
        self._by_number: dict[str, bytearray] = {}  # lineage -> uses, by the number at the end of a group id
        self._others: Counter[str] = Counter()

    def add(self, group_id: str) -> int:
        """Count one training of a group; return how often it was trained so far."""
        lineage, _, number = group_id.rpartition(".")
        uses = self._by_number.setdefault(lineage, bytearray())
        place = int(number) if number.isdecimal() and len(number) < 12 else -1
        if not 0 <= place < len(uses) + FAR:  # no number, or too far beyond those before
            self._others[group_id] += 1
            return self._others[group_id]
        if place >= len(uses):
            uses.extend(bytes(place + 1 - len(uses)))
        uses[place] = min(uses[place] + 1, 255)
        return uses[place]


def _seeded(report: SeedReport | None) -> dict[str, Any]:
    """Return the seeding columns of a step; {} without seeding."""
    if report is None:
        return {}
    return {
        "t_seed_s": report.t_seed_s,
        "seeded_s": report.seeded_s,
        "t_train_wait_s": report.train_wait_s,
        "t_remote_wait_s": report.remote_wait_s,
        "num_parts": sum(one.what == "train" for one in report.intervals),
        "timeline": [
            *([["remote", 0.0, round(report.remote_s, 4)]] if report.mean_remote else []),
            *([one.what, round(one.start_s, 4), round(one.stop_s, 4)] for one in report.intervals),
        ],
    }


def _guarded(report: GuardReport) -> dict[str, float]:
    """Return the guard columns of a step: the settings in force, and counts of alarms and rollbacks."""
    return {
        "guard_rung": report.rung,
        "guard_max_staleness": report.max_staleness,
        "guard_rate_scale": report.rate_scale,
        "guard_alarms": sum(count for _, count in report.alarms),
        "guard_rollbacks": report.rollbacks,
    }


def _details(counts: BufferCounts) -> dict[str, int]:
    """Return the ledger's counts besides its main terms: `LEDGER_DETAILS`."""
    return {key: getattr(counts, key) for key in LEDGER_DETAILS}
