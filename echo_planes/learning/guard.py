"""The guard: figures of a step in, what is done about them out. No clock, no randomness, no torch.

::

    figures of a step -> signals, each with a limit -> alarm, once one persists -> the next rung

    1 mask      tokens whose ratio lies far outside are left out
    2 limit     S is halved, and every step published
    3 slow      the learning rate is halved
    4 rollback  back to the newest good checkpoint, at half of both
    5 stop      the run is over, as `collapsed`

A signal beyond its limit counts one up, two where it is twice beyond, and one down within it; an alarm is
`patience`. So single outliers are no alarm, and a signal that comes and goes is. After a rung that stale data
outlives, S steps do not count. After `calm` steps without any signal the last rung is taken back.

A checkpoint is good where no signal counted when it was written, and no alarm came in the `good_after` steps
after it: alarms come late. That of the start is good.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from echo_planes.config.schema import GuardConfig
from echo_planes.learning.fall import fall_of, root_mean_square
from echo_planes.types import Adjustment, GuardReport, StepStats, TrainBatch

WINDOW = 10  # steps of a slope, and of a mean reward
HISTORY = 50  # steps that a figure is compared with
FEW_TOKENS = 100  # k3 of fewer is noise

Rung = Literal["mask", "limit", "slow", "rollback", "stop"]
MASKED, LIMITED, SLOWED = 1, 2, 3
DRIFT_ADVICE = "lower learner.lr, staleness.max_staleness or learner.drift_target"


@dataclass(frozen=True, slots=True)
class GuardFigures:
    """Figures of one step that the guard looks at. None: nothing was scored."""

    k3: float | None = None  # nats, largest of any lag
    effective_samples: float | None = None
    truncated: float | None = None  # share of the scored tokens
    log_weight: float | None = None  # nats, 99.9th percentile
    entropy: float | None = None  # nats
    grad_norm: float | None = None
    cut_off: float | None = None  # share of the answers
    reward: float | None = None  # mean
    spread: float | None = None  # standard deviation of the rewards


@dataclass(frozen=True, slots=True)
class Signal:
    """A figure with a limit. `below`: it is beyond the limit where it is less."""

    setting: str  # `guard.<setting>` is its limit
    name: str
    unit: str
    advice: str  # what to change
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
        "raise sampling.max_new_tokens, or set sampling.overlong=penalty",
    ),
    Signal("reward_drop", "fall of the reward from its best", " of its gain, or spreads", DRIFT_ADVICE),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a step. `rung`: the action taken now; None: none, or the last rung is taken back."""

    text: str
    rung: Rung | None = None


@dataclass(slots=True)
class _State:
    """State of the guard that a resume needs; lists are the newest last."""

    rung: int = 0  # 0 to SLOWED, in force
    scores: dict[str, int] = field(default_factory=dict)  # of each signal
    calm: int = 0  # steps without any signal
    deaf: int = 0  # steps that do not count, still
    alarms: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    rollbacks: int = 0
    good_step: int = -1  # newest good checkpoint
    candidate: int = -1  # checkpoint that may become it
    candidate_age: int = 0  # steps without an alarm since
    entropies: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    cut_offs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    reward_start: float | None = None  # mean of the first WINDOW steps
    reward_best: float = 0.0  # best mean of so many


class Guard:
    """Watches one run.

    Args:
        settings: mode, limits and patience.
        max_staleness: the configured S.
        record: of the guard that a checkpoint was written with; see `record`.
    """

    def __init__(
        self, settings: GuardConfig, max_staleness: int, record: Mapping[str, Any] | None = None
    ) -> None:
        self._settings = settings
        self._max_staleness = max_staleness
        self._state = _State(**(record or {}))

    # --- where it stands -------------------------------------------------------------------------

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
        """Adjustment that the learner is to make."""
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
        """Everything a resume needs, as JSON can hold it."""
        return asdict(self._state)

    def record_after_rollback(self) -> dict[str, Any]:
        """The record to go on with from the good checkpoint.

        Nothing is in force any more. What was done is known still, and how good the policy once was: so a
        checkpoint that was not good after all is told by its rewards.
        """
        state = self._state
        return asdict(
            _State(
                alarms=state.alarms,
                actions=state.actions,
                rollbacks=state.rollbacks,
                good_step=state.good_step,
                spreads=state.spreads,
                reward_start=state.reward_start,
                reward_best=state.reward_best,
            )
        )

    # --- what happens ----------------------------------------------------------------------------

    def saved(self, step: int) -> None:
        """A checkpoint is there. One is looked at at a time: then at most two outlive their turn."""
        state = self._state
        if step == 0:  # what the run was given
            state.good_step = 0
        is_calm = state.calm > 0 and not any(state.scores.values())
        if is_calm and state.candidate < 0 and step > state.good_step:
            state.candidate, state.candidate_age = step, 0

    def compare(self, mismatch: float) -> str:
        """In words, how learner and sampler differ on the version that both hold; "" if they do not.

        Args:
            mismatch: mean |log pi_learner - log pi_sampler|, nats.
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
        """One step more; None: nothing is to be said."""
        settings, state = self._settings, self._state
        if settings.mode == "off":
            return None
        values = self._measure(figures)
        if state.deaf:
            state.deaf -= 1
            return None
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
        # A history that an alarm has emptied says nothing until it is full again, which is not calm.
        is_blind = state.reward_start is not None and len(state.rewards) < WINDOW
        state.calm = 0 if beyond or is_blind else state.calm + 1
        alarms = [s for s in beyond if state.scores[s.setting] >= settings.patience]
        if alarms:
            worst = max(alarms, key=lambda s: self._excess(s, values[s.setting] or 0.0))
            return self._alarm(worst, values[worst.setting] or 0.0)
        self._age_candidate()
        return self._relax() if state.rung and state.calm >= settings.calm else None

    # --- inside ----------------------------------------------------------------------------------

    def _limit(self, signal: Signal) -> float:
        return float(getattr(self._settings, signal.setting))

    def _is_beyond(self, signal: Signal, value: float) -> bool:
        limit = self._limit(signal)
        return value < limit if signal.below else value > limit

    def _excess(self, signal: Signal, value: float) -> float:
        """Ratio by which a signal lies beyond its limit."""
        limit = self._limit(signal)
        return limit / max(value, 1e-9) if signal.below else value / limit

    def _measure(self, figures: GuardFigures) -> dict[str, float | None]:
        """Every signal's value, by setting; the figures are entered into the histories."""
        state = self._state
        values: dict[str, float | None] = {
            "k3": figures.k3,
            "effective_samples": figures.effective_samples,
            "truncated": figures.truncated,
            "log_weight": figures.log_weight,
            "grad_norm": None,
            "cut_off": None,
        }
        if figures.grad_norm is not None:
            if len(state.grad_norms) >= WINDOW and (usual := statistics.median(state.grad_norms)) > 0:
                values["grad_norm"] = figures.grad_norm / usual
            _enter(state.grad_norms, figures.grad_norm, HISTORY)
        if figures.cut_off is not None:
            if len(state.cut_offs) >= WINDOW:
                values["cut_off"] = figures.cut_off - statistics.median(state.cut_offs)
            _enter(state.cut_offs, figures.cut_off, HISTORY)
        if figures.entropy is not None:
            _enter(state.entropies, figures.entropy, WINDOW)
        fits = figures.entropy is not None and len(state.entropies) == WINDOW
        values["entropy_slope"] = abs(_slope(state.entropies)) if fits else None
        values["reward_drop"] = self._reward_drop(figures)
        return values

    def _reward_drop(self, figures: GuardFigures) -> float | None:
        state = self._state
        if figures.reward is None or figures.spread is None:
            return None
        _enter(state.rewards, figures.reward, WINDOW)
        _enter(state.spreads, figures.spread, HISTORY)
        if len(state.rewards) < WINDOW:
            return None
        recent = statistics.fmean(state.rewards)
        if state.reward_start is None:
            state.reward_start = state.reward_best = recent
        state.reward_best = max(state.reward_best, recent)
        return fall_of(state.reward_start, state.reward_best, recent, root_mean_square(state.spreads))

    def _alarm(self, signal: Signal, value: float) -> Verdict:
        settings, state = self._settings, self._state
        state.alarms[signal.setting] = state.alarms.get(signal.setting, 0) + 1
        state.scores, state.calm, state.candidate = {}, 0, -1
        state.entropies, state.rewards = [], []  # what led to it must not tell again
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


def figures_of(batch: TrainBatch, stats: StepStats) -> GuardFigures:
    """The figures of a step."""
    lags = stats.lags
    by_lag = [lag.k3 for lag in lags if lag.tokens >= FEW_TOKENS]
    return GuardFigures(
        k3=max(by_lag, default=stats.k3),
        effective_samples=stats.effective_samples,
        truncated=stats.truncated_fraction,
        log_weight=stats.log_weight[2] if stats.log_weight else None,
        entropy=stats.entropy,
        grad_norm=stats.grad_norm,
        cut_off=float(batch.cut_off.mean()) if len(batch.cut_off) else None,
        reward=float(batch.task_rewards.mean()) if len(batch.rewards) else None,
        spread=float(batch.task_rewards.std()) if len(batch.rewards) else None,
    )


def _enter(history: list[float], value: float, length: int) -> None:
    history.append(value)
    del history[:-length]


def _slope(values: Sequence[float]) -> float:
    """Of the least-squares line through equidistant values, per step."""
    middle = (len(values) - 1) / 2
    above = sum((i - middle) * value for i, value in enumerate(values))
    return above / sum((i - middle) ** 2 for i in range(len(values)))
