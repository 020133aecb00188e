"""The guard: maps the figures of each step to an action. No clock, no randomness, no torch.

::

    figures of a step -> signals, each with a limit -> alarm, once one persists -> the next rung

    1 mask      leave out tokens whose ratio is an outlier
    2 limit     halve S, and publish every step
    3 slow      halve the learning rate
    4 rollback  return to the newest good checkpoint, with half of S and of the learning rate
    5 stop      end the run as `collapsed`

From k3, effective samples, truncated share and log-weights the noise is taken off first: the difference of
engine and learner on equal weights (`rate.DriftControl`). Each signal has a score. A step beyond the limit
adds one to it, a step beyond twice the limit two; a step within the limit subtracts one. A score of
`patience` is an alarm. Single outliers therefore raise no alarm, but a signal that returns often does.
After the rungs `limit` and `slow`, S steps are not scored, because
their data is older than the rung. After `calm` steps without any signal the last rung is taken back.

Rewards, answers cut off, entropy and gradient are compared with those of the same level of the task's
curriculum. A harder level lowers the reward, and is no fall.

A checkpoint is good if all scores were 0 when it was written and, since alarms come late, no alarm came in
the `good_after` steps after it. The checkpoint of step 0 is good.

A learning rate that drift control holds far below its schedule is told with its cause; it calls for no action
here, since it is one itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from echo_planes.config.schema import GuardConfig
from echo_planes.learning.fall import fall_of, level_figures, root_mean_square
from echo_planes.types import Adjustment, GuardReport, Noise, StepStats, TrainBatch

WINDOW = 10  # steps of a slope and of a mean reward; fewest steps of a median
HISTORY = 50  # most steps of a median
FEW_TOKENS = 100  # k3 of fewer tokens is noise
SLOW = 0.1  # factor of drift control below which the rate is far below its schedule
SLOW_STEPS = 10  # in a row, until it is told

Rung = Literal["mask", "limit", "slow", "rollback", "stop"]
MASKED, LIMITED, SLOWED = 1, 2, 3
DRIFT_ADVICE = "lower learner.lr, staleness.max_staleness or learner.drift_target"


@dataclass(frozen=True, slots=True)
class GuardFigures:
    """Figures of one step that the guard watches. None: the step has no such figure."""

    k3: float | None = None  # nats, largest over the lags
    effective_samples: float | None = None
    truncated: float | None = None  # share of the scored tokens
    log_weight: float | None = None  # nats, 99.9th percentile
    entropy: float | None = None  # nats
    grad_norm: float | None = None
    cut_off: float | None = None  # share of the answers
    reward: float | None = None  # mean of all accepted answers, those that a refill set aside too
    spread: float | None = None  # standard deviation of the rewards
    level: int = 0  # of the task's curriculum
    rate_factor: float | None = None  # of drift control
    drift: float | None = None  # mean |log w|, nats, noise included
    noise: float | None = None  # of it, on equal weights
    lag: float | None = None  # mean, steps


@dataclass(frozen=True, slots=True)
class Signal:
    """Figure with a limit. `below`: values less than the limit are beyond it."""

    setting: str  # `guard.<setting>` is its limit
    name: str
    unit: str
    advice: str  # settings to change
    below: bool = False


SIGNALS = (
    Signal("k3", "k3 of the tokens of one lag", " nats", DRIFT_ADVICE),
    Signal("effective_samples", "effective sample size", "", DRIFT_ADVICE, below=True),
    Signal("truncated", "share of truncated weights", "", DRIFT_ADVICE),
    Signal("log_weight", "99.9th percentile of |log weight|", " nats", DRIFT_ADVICE),
    Signal("entropy_slope", "slope of entropy", " nats a step", "lower learner.lr, or set objective.kl_beta"),
    Signal("grad_norm", "gradient norm", " medians", "lower learner.lr or learner.grad_clip"),
    Signal(
        "cut_off",
        "rise of the share of answers cut off",
        "",
        "lower learner.lr; if answers have reason to grow, raise sampling.max_new_tokens",
    ),
    Signal("reward_drop", "fall of the reward from its best", " of its gain, or spreads", DRIFT_ADVICE),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a step. `rung`: the action to take now; None: no action, or the last rung is taken back."""

    text: str
    rung: Rung | None = None


@dataclass(slots=True)
class _Level:
    """Histories of the steps of one level; lists are ordered, newest last."""

    entropies: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    cut_offs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    reward_start: float | None = None  # mean of the first WINDOW steps
    reward_best: float = 0.0  # best mean of WINDOW steps


@dataclass(slots=True)
class _State:
    """State of the guard that a resume needs."""

    rung: int = 0  # rung in force, 0 to SLOWED
    scores: dict[str, int] = field(default_factory=dict)  # of each signal
    calm: int = 0  # consecutive steps without any signal
    deaf: int = 0  # steps from now on that are not scored
    alarms: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    rollbacks: int = 0
    good_step: int = -1  # newest good checkpoint
    candidate: int = -1  # checkpoint that may become the good one
    candidate_age: int = 0  # steps without an alarm since the candidate
    slow: int = 0  # steps in a row with a rate far below its schedule
    levels: dict[str, _Level] = field(default_factory=dict)  # by number, in digits as JSON has its keys


class Guard:
    """Watcher of one run.

    Args:
        settings: mode, limits and patience.
        max_staleness: the configured S.
        record: result of `record` that was saved with a checkpoint; None: a new run.
    """

    def __init__(
        self, settings: GuardConfig, max_staleness: int, record: Mapping[str, Any] | None = None
    ) -> None:
        self._settings = settings
        self._max_staleness = max_staleness
        self._state = _state_of(record or {})

    # --- state -----------------------------------------------------------------------------------

    @property
    def limits_staleness(self) -> bool:
        """Whether S is lowered, and every step published."""
        return self._state.rung >= LIMITED and self._max_staleness > 0

    @property
    def max_staleness(self) -> int:
        """The S in force."""
        return self._max_staleness // 2 if self.limits_staleness else self._max_staleness

    @property
    def adjustment(self) -> Adjustment:
        """Changes that the rung in force makes to training."""
        rung = self._state.rung
        return Adjustment(rate_scale=0.5 if rung >= SLOWED else 1.0, mask_outliers=rung >= MASKED)

    @property
    def kept_checkpoints(self) -> frozenset[int]:
        """Steps of the checkpoints that must not be removed: the good one, and the one that may become it."""
        return frozenset({self._state.good_step, self._state.candidate} - {-1})

    @property
    def report(self) -> GuardReport:
        state = self._state
        return GuardReport(
            rung=state.rung,
            max_staleness=self.max_staleness,
            rate_scale=self.adjustment.rate_scale,
            alarms=tuple(state.alarms.items()),
            actions=tuple(state.actions.items()),
            rollbacks=state.rollbacks,
            good_step=state.good_step,
        )

    def record(self) -> dict[str, Any]:
        """Return everything that a resume needs, in types that JSON supports."""
        return asdict(self._state)

    def record_after_rollback(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record with which the run continues from the good checkpoint.

        No rung is in force any more. The counts stay. The best reward is that of the checkpoint: the policy
        that was given up may have gained more since, which the run has yet to learn again. If the checkpoint
        is not good after all, its rewards raise the next alarm.

        Args:
            saved: the record in the checkpoint.
        """
        state = self._state
        levels = {
            number: _Level(spreads=one.spreads, reward_start=one.reward_start, reward_best=one.reward_best)
            for number, one in _state_of(saved).levels.items()
        }
        return asdict(
            _State(
                alarms=state.alarms,
                actions=state.actions,
                rollbacks=state.rollbacks,
                good_step=state.good_step,
                levels=levels,
            )
        )

    # --- events ----------------------------------------------------------------------------------

    def saved(self, step: int) -> None:
        """Record that the checkpoint of `step` was written. At most one candidate is watched at a time."""
        state = self._state
        if step == 0:  # the checkpoint of the model that the run began with
            state.good_step = 0
        is_calm = state.calm > 0 and not any(state.scores.values())
        if is_calm and state.candidate < 0 and step > state.good_step:
            state.candidate, state.candidate_age = step, 0

    def compare(self, mismatch: float) -> str:
        """Describe how learner and sampler differ on the version that both hold; "" within the limit.

        Args:
            mismatch: mean |log pi_learner - log pi_sampler| on that version, nats.
        """
        limit = self._settings.mismatch
        if self._settings.mode == "off" or mismatch <= limit:
            return ""
        return (
            f"learner and sampler differ by {mismatch:.3g} nats a token on the same weights, more than "
            f"guard.mismatch={limit:g}; likely causes: the engine's dtype and learner.dtype, temperature or "
            "top_p not applied to the logprobs (logprobs mode), another tokenizer or chat template"
        )

    def observe(self, figures: GuardFigures) -> Verdict | None:
        """Take in the figures of the next step and return a verdict; None: there is nothing to report."""
        settings, state = self._settings, self._state
        if settings.mode == "off":
            return None
        level = state.levels.setdefault(str(figures.level), _Level())
        values = _measure(figures, level)
        state.slow = state.slow + 1 if (figures.rate_factor or 1.0) < SLOW else 0
        slow = Verdict(_why_slow(figures)) if state.slow == SLOW_STEPS else None
        if state.deaf:
            state.deaf -= 1
            return slow
        beyond = [
            s for s in SIGNALS if (value := values[s.setting]) is not None and self._is_beyond(s, value)
        ]
        for signal in SIGNALS:
            score = state.scores.get(signal.setting, 0)
            if signal in beyond:
                score += 2 if self._excess(signal, values[signal.setting] or 0.0) >= 2 else 1
            elif values[signal.setting] is not None:
                score = max(score - 1, 0)
            state.scores[signal.setting] = score
        # An alarm empties the reward history. Until it is full again a fall of the reward would go unseen, so
        # those steps are not calm.
        is_blind = level.reward_start is not None and len(level.rewards) < WINDOW
        state.calm = 0 if beyond or is_blind else state.calm + 1
        alarms = [s for s in beyond if state.scores[s.setting] >= settings.patience]
        if alarms:
            state.slow -= slow is not None  # to be told at the next step: an alarm comes first
            worst = max(alarms, key=lambda s: self._excess(s, values[s.setting] or 0.0))
            return self._alarm(worst, values[worst.setting] or 0.0)
        self._age_candidate()
        return slow or (self._relax() if state.rung and state.calm >= settings.calm else None)

    # --- internals -------------------------------------------------------------------------------

    def _limit(self, signal: Signal) -> float:
        return float(getattr(self._settings, signal.setting))

    def _is_beyond(self, signal: Signal, value: float) -> bool:
        limit = self._limit(signal)
        return value < limit if signal.below else value > limit

    def _excess(self, signal: Signal, value: float) -> float:
        """Return the ratio of value to limit, or its inverse for a `below` signal; above 1: beyond."""
        limit = self._limit(signal)
        return limit / max(value, 1e-9) if signal.below else value / limit

    def _alarm(self, signal: Signal, value: float) -> Verdict:
        settings, state = self._settings, self._state
        state.alarms[signal.setting] = state.alarms.get(signal.setting, 0) + 1
        state.scores, state.calm, state.candidate = {}, 0, -1
        for level in state.levels.values():
            level.entropies, level.rewards = [], []  # the steps behind an alarm must not raise another
        side = "below" if signal.below else "above"
        alarm = (
            f"{signal.name} {value:.3g}{signal.unit}, {side} guard.{signal.setting}={self._limit(signal):g} "
            f"too often (guard.patience={settings.patience})"
        )
        if settings.mode == "warn":
            return Verdict(f"{alarm}; guard.mode=warn, so nothing is done: {signal.advice}")
        rung = self._next_rung()
        state.actions[rung] = state.actions.get(rung, 0) + 1
        match rung:
            case "mask":
                state.rung = MASKED
                done = "outliers are masked"
            case "limit":
                state.rung, state.deaf = LIMITED, self._max_staleness
                done = (
                    f"S is lowered from {self._max_staleness} to {self.max_staleness}, every step published"
                )
            case "slow":
                state.rung, state.deaf = SLOWED, self._max_staleness
                done = "the learning rate is halved"
            case "rollback":
                state.rollbacks += 1
                done = (
                    f"back to the checkpoint of step {state.good_step}, at half of S and of the learning rate"
                )
            case "stop":
                done = f"the run stops, {self._why_not_back()}; {signal.advice}"
                if state.good_step >= 0:
                    done += f"; a resume begins at the good checkpoint, of step {state.good_step}"
        return Verdict(f"{alarm}: {done}", rung)

    def _next_rung(self) -> Rung:
        state = self._state
        if state.rung < MASKED:
            return "mask"
        if state.rung < LIMITED and self._max_staleness > 0:
            return "limit"
        if state.rung < SLOWED:
            return "slow"
        can_go_back = state.good_step >= 0 and state.rollbacks < self._settings.max_rollbacks
        return "rollback" if can_go_back else "stop"

    def _why_not_back(self) -> str:
        if self._state.rollbacks >= self._settings.max_rollbacks:
            return f"after {self._state.rollbacks} rollbacks (guard.max_rollbacks)"
        return "for there is no good checkpoint to go back to (checkpoint.every, guard.good_after)"

    def _relax(self) -> Verdict:
        state = self._state
        state.calm = 0
        if state.rung == SLOWED:
            done = "the learning rate is as it was"
            state.rung = LIMITED if self._max_staleness > 0 else MASKED
        elif state.rung == LIMITED:
            done = f"S is {self._max_staleness} again"
            state.rung = MASKED
        else:
            done = "outliers are no longer masked"
            state.rung = 0
        state.actions["relax"] = state.actions.get("relax", 0) + 1
        return Verdict(f"calm for {self._settings.calm} steps: {done}")

    def _age_candidate(self) -> None:
        state = self._state
        if state.candidate < 0:
            return
        state.candidate_age += 1
        if state.candidate_age >= self._settings.good_after and not any(state.scores.values()):
            state.good_step, state.candidate = state.candidate, -1


def figures_of(
    batch: TrainBatch, stats: StepStats, *, is_sparse: bool = False, cuts_weight: bool = False
) -> GuardFigures:
    """Return the guard's figures of a step.

    In a run that decodes sparsely the tail of |log weight| is sparse attention's, however young the tokens: a
    few that dense attention would all but never have taken. Their weights are near 0, so they hardly train,
    and the sharper the policy, the longer that tail. Sparse attention has a guard of its own for them.

    Args:
        is_sparse: whether rollouts decode by a schedule of KV budgets.
        cuts_weight: whether the cut of the weights is the objective's clip (CISPO), and so no sign of drift.
    """
    lags, noise = stats.lags, stats.noise or Noise(0.0, 0.0, 1.0, 0.0, 0.0)
    tokens = sum(one.tokens for one in lags)
    k3 = max((lag.k3 for lag in lags if lag.tokens >= FEW_TOKENS), default=stats.k3)
    effective, truncated, tail = stats.effective_samples, stats.truncated_fraction, stats.log_weight
    judged = level_figures(batch)
    return GuardFigures(
        k3=None if k3 is None else max(k3 - noise.k3, 0.0),
        effective_samples=None if effective is None else min(effective / noise.effective_samples, 1.0),
        truncated=None if truncated is None or cuts_weight else max(truncated - noise.truncated, 0.0),
        log_weight=_without(tail[2], noise.log_weight) if tail and not is_sparse else None,
        entropy=stats.entropy,
        grad_norm=stats.grad_norm,
        cut_off=judged.cut_off if judged else None,
        reward=judged.reward if judged else None,
        spread=judged.spread if judged else None,
        level=judged.level if judged else 0,
        rate_factor=stats.rate_factor,
        drift=stats.mismatch_mean,
        noise=stats.noise.drift if stats.noise else None,
        lag=sum(one.lag * one.tokens for one in lags) / tokens if tokens else None,
    )


def _without(size: float, noise: float) -> float:
    """Return the size of what is left of a sum of two independent parts without one of them."""
    return math.sqrt(max(size**2 - noise**2, 0.0))


def _why_slow(figures: GuardFigures) -> str:
    text = f"drift control has held the learning rate below {SLOW:g} of its schedule for {SLOW_STEPS} steps"
    if figures.drift is None or figures.lag is None:
        return f"{text}: {DRIFT_ADVICE}"
    moved = _without(figures.drift, figures.noise or 0.0)
    text += f": the policy moves {moved:.2g} nats under tokens of {figures.lag:.1f} steps"
    if figures.noise is not None and figures.noise > moved:
        return (
            f"{text}, and engine and learner differ by {figures.noise:.2g} nats on equal weights, which "
            "hides the movement: raise learner.drift_target, or give both the same dtype"
        )
    return f"{text} (learner.drift_target): {DRIFT_ADVICE}"


def _state_of(record: Mapping[str, Any]) -> _State:
    """Return the state of a guard from its record; {}: of a new run. Keys of older code are left out."""
    levels = {number: _Level(**one) for number, one in record.get("levels", {}).items()}
    known = {one.name: record[one.name] for one in fields(_State) if one.name in record}
    return _State(**{**known, "levels": levels})


def _measure(figures: GuardFigures, level: _Level) -> dict[str, float | None]:
    """Enter the figures into the histories of their level and return every signal's value, by setting."""
    values: dict[str, float | None] = {
        "k3": figures.k3,
        "effective_samples": figures.effective_samples,
        "truncated": figures.truncated,
        "log_weight": figures.log_weight,
        "grad_norm": None,
        "cut_off": None,
    }
    if figures.grad_norm is not None:
        if len(level.grad_norms) >= WINDOW and (usual := statistics.median(level.grad_norms)) > 0:
            values["grad_norm"] = figures.grad_norm / usual
        _enter(level.grad_norms, figures.grad_norm, HISTORY)
    if figures.cut_off is not None:
        if len(level.cut_offs) >= WINDOW:
            values["cut_off"] = figures.cut_off - statistics.median(level.cut_offs)
        _enter(level.cut_offs, figures.cut_off, HISTORY)
    if figures.entropy is not None:
        _enter(level.entropies, figures.entropy, WINDOW)
    fits = figures.entropy is not None and len(level.entropies) == WINDOW
    values["entropy_slope"] = abs(_slope(level.entropies)) if fits else None
    values["reward_drop"] = _reward_drop(figures, level)
    return values


def _reward_drop(figures: GuardFigures, level: _Level) -> float | None:
    if figures.reward is None or figures.spread is None:
        return None
    _enter(level.rewards, figures.reward, WINDOW)
    _enter(level.spreads, figures.spread, HISTORY)
    if len(level.rewards) < WINDOW:
        return None
    recent = statistics.fmean(level.rewards)
    if level.reward_start is None:
        level.reward_start = level.reward_best = recent
    level.reward_best = max(level.reward_best, recent)
    return fall_of(level.reward_start, level.reward_best, recent, root_mean_square(level.spreads))


def _enter(history: list[float], value: float, length: int) -> None:
    history.append(value)
    del history[:-length]


def _slope(values: Sequence[float]) -> float:
    """Return the slope, per step, of the least-squares line through equidistant values."""
    middle = (len(values) - 1) / 2
    above = sum((i - middle) * value for i, value in enumerate(values))
    return above / sum((i - middle) ** 2 for i in range(len(values)))
