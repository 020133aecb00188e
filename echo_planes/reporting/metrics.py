"""Writers and readers of a run's own records: metrics.jsonl, events.jsonl and summary.json in its folder.

Without third-party packages. `GAUGES` describes each number of a learner step, for Prometheus and for users.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_planes.config.files import LOG_BYTES, parse_json, read_bytes, read_json
from echo_planes.errors import ClusterError, DataError, shown

Record = dict[str, Any]  # one JSON object
_LARGEST = 1e150  # no measured value is as large
_RESTORE = "put the original back, or take the file away"
# Shapes of structured fields that readers rely on: NUMBER, {} with fields, [] with items.
NUMBER = 0.0
_SUMMARY_SHAPE: Record = {
    "evals": [{"step": NUMBER, "pass_at": {}}],
    "workers": [{}],
    "publications": [{}],
    "versions_unstored": [NUMBER],
    "seconds_startup": {},
}
_STEP_SHAPE: Record = {
    "step": NUMBER,
    "lags": [{"lag": NUMBER, "drift": NUMBER, "tokens": NUMBER}],
    "reward_parts": {},
}
_SPARSITY_SHAPE: list[Record] = [{"changed_shares": [NUMBER]}]

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
SUMMARY_FILE = "summary.json"
SPARSITY_FILE = "sparsity.json"  # share of weights changed, one object per layer

# Kinds of events with numbers, from which the report makes its fleet section.
PUBLICATION = "publication"  # of `version` of `lineage`
WORKER_STATE = "worker state"  # a worker is `booting`, `serving` or `gone` from now on
FLEET_STATE = "fleet state"  # `fleet.record`


@dataclass(frozen=True, slots=True)
class Gauge:
    """One number of a learner step: `key` in metrics.jsonl, `name` in Prometheus."""

    key: str
    description: str

    @property
    def name(self) -> str:
        return f"echo_planes_{self.key}"


GAUGES: tuple[Gauge, ...] = (
    Gauge("step", "learner steps completed"),
    Gauge("policy_version", "newest policy version, made by this step"),
    Gauge("reward_mean", "mean reward of the step's trajectories, as the task gave it"),
    Gauge("reward_trained_mean", "the same, with the penalty of overlong answers"),
    Gauge("reward_std", "standard deviation of the rewards of the step's trajectories"),
    Gauge(
        "level",
        "level of the curriculum that most accepted answers of the step are of; what follows is of it",
    ),
    Gauge("reward_level_mean", "mean reward of all its accepted answers, those that a refill set aside too"),
    Gauge("reward_level_std", "standard deviation of their rewards"),
    Gauge("correct_mean", "fraction of the step's trajectories that are exactly right"),
    Gauge("loss", "objective, mean over trained tokens"),
    Gauge("grad_norm", "global gradient norm before clipping"),
    Gauge("learning_rate", "learning rate of the step"),
    Gauge("staleness_max", "largest staleness in the batch, versions"),
    Gauge("staleness_mean", "mean staleness in the batch, versions"),
    Gauge("t_train_s", "time the learner computed, seconds"),
    Gauge("t_idle_s", "time the learner waited for a batch, seconds"),
    Gauge("t_seed_s", "T_seed: planned window at the begin of the step, seconds (seeding)"),
    Gauge("seeded_s", "time in which seeders sampled in the step, seconds; without remote workers all of it"),
    Gauge("t_train_wait_s", "time the learner waited for answers while no seeder sampled, seconds (seeding)"),
    Gauge("t_remote_wait_s", "time from the last answer of the step to its end, seconds (seeding)"),
    Gauge("num_parts", "parts that the step was trained in (seeding)"),
    Gauge("t_step_s", "time from the end of the last step to the end of this one, seconds"),
    Gauge("tokens", "tokens trained in the step"),
    Gauge("tokens_per_s", "trained tokens per second of step time"),
    Gauge("usd", "cost of the step, all machines, US dollars"),
    Gauge("usd_per_million_tokens", "cost so far per million trained tokens, US dollars"),
    Gauge("tokens_generated", "tokens sampled so far for training, trained or not, without those in flight"),
    Gauge("usd_per_million_generated_tokens", "cost so far per million of these, US dollars"),
    Gauge("usd_wasted", "of the cost so far: machines that booted or waited, tokens of no use; US dollars"),
    Gauge("wasted_share", "share of the cost so far that was wasted"),
    Gauge("usd_projected", "cost of the whole run at the price of its recent steps, US dollars"),
    Gauge("rate_factor", "what drift control multiplied the step's learning rate by"),
    Gauge("tokens_scored", "trained tokens that went through the model; what follows is of these"),
    Gauge("mismatch_mean", "drift: mean |learner logprob - sampler logprob|, nats"),
    Gauge("mismatch_sparse", "sparse attention's part of it: mean |log dense - log sparse| of audits, nats"),
    Gauge("mismatch_p99", "99th percentile of |learner logprob - sampler logprob|, nats"),
    Gauge("log_weight_p50", "median of |log importance weight|, nats"),
    Gauge("log_weight_p99", "99th percentile of |log importance weight|, nats"),
    Gauge("log_weight_p999", "99.9th percentile of |log importance weight|, nats"),
    Gauge("log_weight_max", "largest |log importance weight|, nats"),
    Gauge("k3", "mean of w - 1 - log w of the importance weights w, nats"),
    Gauge("effective_samples", "share of the tokens that carries the weight: (sum w)^2 / (M sum w^2)"),
    Gauge("clip_fraction", "fraction of tokens whose ratio was clipped"),
    Gauge("masked_fraction", "fraction of tokens that a mask left out"),
    Gauge(
        "truncated_fraction",
        "fraction of tokens whose importance weight was cut: at tis_cap, of cispo at its clip",
    ),
    Gauge("tis_mean", "mean importance weight of the updates made, cut; 1 where the objective has none"),
    Gauge("entropy", "mean entropy of the policy, nats per token"),
    Gauge("kl_reference", "mean KL to the reference policy, nats per token"),
    Gauge("groups_skipped", "groups of the batch without reward variance"),
    Gauge("groups_all_right", "share of the batch's groups whose answers are all correct"),
    Gauge("groups_all_wrong", "share of the batch's groups without a correct answer"),
    Gauge("groups_mixed", "share of the batch's groups with correct and other answers"),
    Gauge("response_tokens_mean", "tokens of an answer, an environment's included, mean of the batch"),
    Gauge("response_tokens_p95", "tokens of an answer, an environment's included, 95th percentile"),
    Gauge("cut_off_share", "share of the batch's answers that ended at their token limit"),
    Gauge("num_updates", "optimizer updates so far"),
    Gauge("updates_skipped", "updates of the step left out for want of a finite gradient"),
    Gauge("eval_step", "step of the newest evaluation; what follows is of it"),
    Gauge("eval_version", "version that the held-out prompts were answered by, or the oldest of several"),
    Gauge("eval_newest_version", "the newest version that answered, where there were several"),
    Gauge("eval_accuracy", "fraction of the scored held-out answers that are exactly right"),
    Gauge("eval_unscored", "held-out answers without a reward, which are left out"),
    Gauge("eval_pass_at_n", "held-out prompts with a right answer among n, eval.samples_per_prompt"),
    Gauge("buffered", "accepted trajectories waiting in the buffer"),
    Gauge("leased", "trajectories out on leases"),
    Gauge("accepted", "trajectories accepted so far"),
    Gauge("trained", "trajectories trained so far"),
    Gauge("dropped_stale", "accepted trajectories dropped as too old so far"),
    Gauge("dropped_hard", "of the dropped: no sample of their group was right"),
    Gauge("dropped_middling", "of the dropped: some samples of their group were right"),
    Gauge("dropped_easy", "of the dropped: all samples of their group were right"),
    Gauge("removed", "accepted trajectories let go by the replay limits before they were trained, so far"),
    Gauge("uninformative", "accepted trajectories whose groups had no signal, replaced by others, so far"),
    Gauge("reused", "trajectories trained again so far"),
    Gauge("refused", "submissions refused so far"),
    Gauge("malformed", "messages of workers that were refused for what they held, so far"),
    Gauge("reward_timeout", "answers whose reward took too long, so far; their groups were not trained"),
    Gauge("reward_error", "answers whose reward raised, so far"),
    Gauge("reward_invalid", "answers whose reward was none: not finite, or of another type; so far"),
    Gauge("damaged", "places in the replay store that are not what was written"),
    Gauge("bubble_ratio", "idle / (idle + train) of the learner so far"),
    Gauge("published_version", "newest version that 1/gamma of the workers serve; what follows is of it"),
    Gauge("changed_share", "share of the weights that the publication changed"),
    Gauge("bytes_per_changed", "bytes on the wire per changed weight"),
    Gauge("patch_ratio", "bytes of all weights per byte on the wire"),
    Gauge("t_extract_s", "time to scan, encode and sign it, seconds"),
    Gauge("t_bcast_s", "time until 1/gamma of the active workers had installed it, seconds"),
    Gauge("hop_mbit_min", "receiving rate of the slowest worker, Mbit/s"),
    Gauge("repairs", "times a worker was given another parent in mid-broadcast"),
    Gauge("mu_min", "trajectories per second that keep the learner busy, given T_train and T_bcast"),
    Gauge("pause_s", "time generation stood still for the update, median of the workers, seconds"),
    Gauge("guard_rung", "what the guard has in force: 1 outliers masked, 2 S lowered too, 3 rate halved too"),
    Gauge("guard_max_staleness", "the S in force, versions"),
    Gauge("guard_rate_scale", "what the guard multiplies the learning rate by"),
    Gauge("guard_alarms", "alarms of the guard so far"),
    Gauge("guard_rollbacks", "times the guard went back to a good checkpoint"),
    Gauge("time_s", "time since the start of this part of the run, seconds"),
)


# Fractions of a step's scored tokens -> names of the same fractions of the whole run.
SHARES = {
    "clip_fraction": "tokens_clipped_share",
    "masked_fraction": "tokens_masked_share",
    "truncated_fraction": "tokens_truncated_share",
}


class MetricsWriter:
    """Writer of one run folder's records. A resumed run opens the same folder again.

    A call writes each line to the file system before it returns, so a crash of the process loses at most the
    last line. The constructor cuts off a torn last line of an earlier run.

    Args:
        folder: the run folder; made if missing.
        forward: called with a file's name and the record written to it, which it may keep.

    Raises:
        ClusterError: the disk is full.
    """

    def __init__(self, folder: Path, forward: Callable[[str, Record], None] | None = None) -> None:
        self.folder = folder
        self._forward = forward
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, EVENTS_FILE):
            _cut_torn_line(folder / name)
        self.aggregates = Aggregates(read_metrics(folder))

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Append one learner step to metrics.jsonl. Non-finite numbers become null."""
        self._append(METRICS_FILE, metrics)
        self.aggregates.add(metrics)

    def event(
        self,
        time_s: float,
        kind: str,
        text: str,
        *,
        worker: str | None = None,
        version: int | None = None,
        **more: Any,
    ) -> None:
        """Append one event to events.jsonl, with `more` fields. `time_s`: since the start of this part."""
        record: Record = {"time_s": round(time_s, 3), "kind": kind, "text": text}
        if worker is not None:
            record["worker"] = worker
        if version is not None:
            record["version"] = version
        self._append(EVENTS_FILE, {**record, **more})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json as a whole: a reader sees the old one or the new one."""
        text = json.dumps(finite(dict(summary)), indent=2, allow_nan=False) + "\n"
        write_atomic(self.folder / SUMMARY_FILE, text)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        written: Record = finite(dict(record))
        line = json.dumps(written, separators=(",", ":"), allow_nan=False) + "\n"

        def append() -> None:
            with open(self.folder / name, "ab") as file:
                file.write(line.encode())

        _or_full_disk(self.folder / name, append)
        if self._forward is not None:
            self._forward(name, written)


class Aggregates:
    """Running totals over the steps of a run, for summary.json. None: no step has the value."""

    def __init__(self, steps: Sequence[Mapping[str, Any]] = ()) -> None:
        self.rewards: list[float] = []  # mean of every step's batch
        # Of every step: level, and mean and standard deviation of its accepted answers' rewards.
        self.judged: list[tuple[int, float, float]] = []
        self._mean_staleness: list[float] = []
        self._totals = dict.fromkeys(("t_train_s", "t_idle_s", "tokens", "usd", "updates_skipped"), 0.0)
        self._drift: list[float] = []
        self._rate_factor_min: float | None = None
        self._scored = dict.fromkeys(SHARES, 0.0)  # scored tokens of the steps that have the fraction
        self._shares = dict.fromkeys(SHARES, 0.0)  # those of them that the fraction counts
        self.num_steps = 0
        self.max_staleness_observed = 0
        self.max_staleness_allowed = 0  # the largest S that was in force
        for step in steps:
            self.add(step)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add one step. Missing and non-finite values are left out."""
        self.num_steps += 1
        for key in self._totals:
            self._totals[key] += number(metrics.get(key)) or 0.0
        for key, values in (
            ("reward_mean", self.rewards),
            ("staleness_mean", self._mean_staleness),
            ("mismatch_mean", self._drift),
        ):
            value = number(metrics.get(key))
            if value is not None:
                values.append(value)
        mean, spread = number(metrics.get("reward_level_mean")), number(metrics.get("reward_level_std"))
        if mean is not None and spread is not None:
            self.judged.append((int(number(metrics.get("level")) or 0), mean, spread))
        tokens = number(metrics.get("tokens_scored")) or 0.0
        for key in SHARES:
            share = number(metrics.get(key))
            if share is not None:
                self._scored[key] += tokens
                self._shares[key] += share * tokens
        factor = number(metrics.get("rate_factor"))
        if factor is not None:
            self._rate_factor_min = min(factor, self._rate_factor_min or factor)
        self.max_staleness_observed = max(
            self.max_staleness_observed, int(number(metrics.get("staleness_max")) or 0)
        )
        self.max_staleness_allowed = max(
            self.max_staleness_allowed, int(number(metrics.get("guard_max_staleness")) or 0)
        )

    @property
    def reward_first(self) -> float | None:
        """Mean reward over the first tenth of the steps, at least one."""
        return _mean(self.rewards[: self._tenth()])

    @property
    def reward_last(self) -> float | None:
        """Mean reward over the last tenth of the steps, at least one."""
        return _mean(self.rewards[-self._tenth() :])

    @property
    def staleness_mean(self) -> float | None:
        return _mean(self._mean_staleness)

    @property
    def bubble_ratio(self) -> float | None:
        """Learner bubble ratio, T_idle / (T_idle + T_train) (ECHO-2)."""
        idle_s, train_s = self._totals["t_idle_s"], self._totals["t_train_s"]
        return idle_s / (idle_s + train_s) if idle_s + train_s > 0 else None

    def bubble_ratio_with(self, t_train_s: float, t_idle_s: float) -> float:
        """Return the ratio with one more step of these times."""
        idle_s, train_s = self._totals["t_idle_s"] + t_idle_s, self._totals["t_train_s"] + t_train_s
        return idle_s / max(idle_s + train_s, 1e-9)

    @property
    def tokens_trained(self) -> int:
        return int(self._totals["tokens"])

    @property
    def usd_total(self) -> float:
        return self._totals["usd"]

    def summary(self) -> Record:
        """Return the keys of summary.json that follow from the steps alone."""
        return {
            "steps": self.num_steps,
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "staleness_mean": self.staleness_mean,
            "max_staleness_observed": self.max_staleness_observed,
            "bubble_ratio": self.bubble_ratio,
            "tokens_trained": self.tokens_trained,
            "usd_total": self.usd_total,
            "drift_mean": _mean(self._drift),
            "rate_factor_min": self._rate_factor_min,
            "updates_skipped": int(self._totals["updates_skipped"]),
            **{
                name: self._shares[key] / self._scored[key] if self._scored[key] else None
                for key, name in SHARES.items()
            },
        }

    def _tenth(self) -> int:
        return max(1, len(self.rewards) // 10)


def read_metrics(folder: Path) -> list[Record]:
    """Return the steps of a run, in order. Steps that a resume has repeated replace the abandoned ones.

    Raises:
        DataError: a line is not a JSON object, or its fields have other shapes than those of steps. A torn
            last line is left out instead.
    """
    steps: list[Record] = []
    for record in _read_lines(folder / METRICS_FILE, _STEP_SHAPE):
        step = record.get("step")
        while steps and step is not None and (steps[-1].get("step") or 0) >= step:
            steps.pop()
        steps.append(record)
    return steps


def read_events(folder: Path) -> list[Record]:
    """Return the events of a run, in the order they were written.

    Raises:
        DataError: as for `read_metrics`.
    """
    return _read_lines(folder / EVENTS_FILE, {})


def read_summary(folder: Path) -> Record:
    """Return summary.json, or an empty dict if the run has not written one yet.

    Raises:
        DataError: it is not readable, or its fields have other shapes.
    """
    path = folder / SUMMARY_FILE
    if not path.exists():
        return {}
    summary: Record = read_json(path, LOG_BYTES, advice=_RESTORE)
    check_shape(summary, _SUMMARY_SHAPE, str(path))
    return summary


def read_rows(path: Path) -> list[Record]:
    """Return the rows of a run's sparsity.json, or an empty list if there is none.

    Raises:
        DataError: the file is not readable, or its fields have other shapes.
    """
    if not path.exists():
        return []
    rows: list[Record] = read_json(path, LOG_BYTES, advice=_RESTORE)
    check_shape(rows, _SPARSITY_SHAPE, str(path))
    return rows


def check_shape(value: object, shape: object, where: str) -> None:
    """Check that a value read from JSON has the shape that readers rely on. Null or absent means unknown.

    Args:
        shape: NUMBER; an object with the shapes of the fields that are read; a list with its items' shape.
        where: the file, and the field in it.

    Raises:
        DataError: the value has another shape.
    """
    if isinstance(shape, dict) and isinstance(value, dict):
        for key, inner in shape.items():
            if value.get(key) is not None:
                check_shape(value[key], inner, f"{where}: '{key}'")
    elif isinstance(shape, list) and isinstance(value, list):
        for item in value:
            if item is not None or shape[0] != NUMBER:
                check_shape(item, shape[0], f"{where}: an item")
    elif isinstance(shape, dict | list) or number(value) is None:
        kind = "an object" if isinstance(shape, dict) else "a list" if isinstance(shape, list) else "a number"
        raise DataError(f"{where} is {shown(value)}, not {kind}; {_RESTORE}")


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` as a whole, through a temporary file beside it.

    Raises:
        ClusterError: the disk is full; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")

    def replace() -> None:
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    _or_full_disk(path, replace)


def number(value: object) -> float | None:
    """Return `value` as a float whose sums and differences are finite; None if it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    return None


def finite(value: Any) -> Any:
    """Return `value` with every non-finite float replaced by None, because JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def step_fields(metrics: Mapping[str, Any], total_steps: int) -> list[str]:
    """Return a learner step as fields of text, most important first. A missing value shows as `-`.

    The cost is left out where it is 0, for then no price is set.
    """

    def show(key: str, spec: str, scale: float = 1.0) -> str:
        value = number(metrics.get(key))
        return "-" if value is None else format(value * scale, spec)

    width = len(str(total_steps))
    whole_run = "" if number(metrics.get("usd_projected")) is None else f" of ${show('usd_projected', '.4f')}"
    return [
        f"step {show('step', '.0f'):>{width}}/{total_steps}",
        f"v{show('policy_version', '.0f')}",
        f"reward {show('reward_mean', '.2f')}",
        f"correct {show('correct_mean', '.2f')}",
        f"stale {show('staleness_max', '.0f')}/{show('staleness_mean', '.1f')}",
        f"bubble {show('bubble_ratio', '.0f', 100.0)}%",
        f"{show('tokens_per_s', ',.0f')} tok/s",
        *([] if number(metrics.get("usd")) == 0.0 else [f"${show('usd', '.4f')}{whole_run}"]),
    ]


def step_line(metrics: Mapping[str, Any], total_steps: int) -> str:
    """Return a learner step as one line; staleness is shown as max/mean."""
    return "  ".join(step_fields(metrics, total_steps))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _or_full_disk(path: Path, action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ClusterError(
                f"cannot write {path}: the disk is full; free some space and resume"
            ) from error
        raise


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)


def _read_lines(path: Path, shape: Record) -> list[Record]:
    if not path.exists():
        return []
    records = []
    # The text after the last newline is empty, or a line that a crash cut short.
    for place, line in enumerate(read_bytes(path, LOG_BYTES, advice=_RESTORE).split(b"\n")[:-1], 1):
        if line.strip():
            where = f"{path}, line {place}"
            record: Record = parse_json(line.decode("utf-8", errors="replace"), where, advice=_RESTORE)
            check_shape(record, shape, where)
            records.append(record)
    return records
