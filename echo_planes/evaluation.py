"""What the answers to the held-out prompts come to."""

from __future__ import annotations

from collections.abc import Sequence

from echo_planes.config import EvalConfig
from echo_planes.errors import RunError
from echo_planes.types import EvalReport, Trajectory


def report_of(step: int, settings: EvalConfig, answers: Sequence[Trajectory]) -> EvalReport:
    """The report of an evaluation.

    Raises:
        RunError: an answer's rollout failed, or none has a reward.
    """
    failed = [t.error for t in answers if t.status == "failed" and not t.episode.response_ids]
    if failed:
        raise RunError(f"{len(failed)} of {len(answers)} evaluation samples failed: {failed[0]}")
    unscored = [t.error for t in answers if t.status != "ok"]
    scored = [t for t in answers if t.status == "ok"]
    if not scored:
        raise RunError(f"not one of {len(answers)} evaluation samples has a reward: {unscored[0]}")
    return EvalReport(
        step=step,
        version=min(t.version for t in answers),
        num_prompts=settings.num_prompts,
        samples_per_prompt=settings.samples_per_prompt,
        accuracy=sum(t.reward.correct for t in scored) / len(scored),
        reward_mean=sum(t.reward.value for t in scored) / len(scored),
        num_unscored=len(unscored),
        prompt_rewards=_by_prompt(scored),
        trajectories=tuple(answers[: 8 * settings.samples_per_prompt]),
    )


def _by_prompt(answers: Sequence[Trajectory]) -> tuple[tuple[int, float], ...]:
    """Mean reward of every prompt, in the order of their indices."""
    rewards: dict[int, list[float]] = {}
    for answer in answers:
        rewards.setdefault(answer.prompt.index, []).append(answer.reward.value)
    return tuple((index, sum(found) / len(found)) for index, found in sorted(rewards.items()))
