"""Evaluation on held-out prompts: how answers are drawn, and the scores of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from echo_planes.config.schema import Config, EvalConfig
from echo_planes.errors import RunError
from echo_planes.reporting.formats import count
from echo_planes.types import Draw, EvalReport, Trajectory


def eval_draw(config: Config) -> Draw | None:
    """Return the draw of answers to held-out prompts; None if it equals that of training."""
    draw = drawn(config)
    return None if draw == Draw(config.sampling.temperature, config.sampling.top_p) else draw


def drawn(config: Config) -> Draw:
    """Return the draw of answers to held-out prompts."""
    temperature, top_p = config.eval.temperature, config.eval.top_p
    return Draw(
        config.sampling.temperature if temperature is None else temperature,
        config.sampling.top_p if top_p is None else top_p,
    )


def pass_at(counts: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """Return pass@k for k = 1, 2, ...: the probability that at least one of k answers to a prompt is right.

    The mean over prompts of the unbiased estimate 1 - C(n - c, k) / C(n, k) (Codex, 2107.03374, section 2.1,
    equation 1). A prompt with fewer than k scored answers does not count for k.

    Args:
        counts: n and c of each prompt: answers that have a reward, and those of them that are right.
    """
    longest = max((n for n, _ in counts), default=0)
    curve = []
    for k in range(1, longest + 1):
        known = [_any_right(n, c, k) for n, c in counts if n >= k]
        curve.append(sum(known) / len(known))
    return tuple(curve)


def _any_right(n: int, c: int, k: int) -> float:
    # C(n - c, k) / C(n, k) as a product: the binomials themselves may be too large for a float.
    return 1.0 - prod(max(n - c - i, 0) / (n - i) for i in range(k))


def doublings(curve: Sequence[float]) -> dict[str, float]:
    """Return k (as text) and pass@k of a `pass_at` curve, for k = 1, 2, 4, ... and the last."""
    last = len(curve)
    return {str(k): curve[k - 1] for k in range(1, last + 1) if k == last or not k & (k - 1)}


def in_words(report: EvalReport) -> str:
    """Return the report as one line of text."""
    curve = "".join(f", pass@{k} {value:.3f}" for k, value in doublings(report.pass_at).items() if k != "1")
    of_two = f" to v{report.newest_version}: newer weights came meanwhile"
    return (
        f"held-out accuracy {report.accuracy:.3f} at step {report.step} "
        f"(avg@{report.samples_per_prompt}{curve}; "
        f"v{report.version}{'' if report.newest_version is None else of_two})"
        + (
            f"; {count(report.num_unscored, 'answer')} of {report.num_prompts * report.samples_per_prompt} "
            f"without a reward left out, the first for: {report.unscored_error or 'unknown'}"
            if report.num_unscored
            else ""
        )
    )


def report_of(step: int, settings: EvalConfig, answers: Sequence[Trajectory]) -> EvalReport:
    """Return the report of an evaluation. Its versions are the oldest and newest of any token of any answer.

    Raises:
        RunError: no answer has a reward.
    """
    unscored = [t.error for t in answers if t.status != "ok"]
    scored = [t for t in answers if t.status == "ok"]
    if not scored:
        raise RunError(f"not one of {len(answers)} evaluation samples has a reward: {unscored[0]}")
    versions = {span.version for t in answers for span in t.episode.spans}
    return EvalReport(
        step=step,
        version=min(versions, default=-1),
        num_prompts=settings.num_prompts,
        samples_per_prompt=settings.samples_per_prompt,
        accuracy=sum(t.reward.correct for t in scored) / len(scored),
        reward_mean=sum(t.reward.value for t in scored) / len(scored),
        num_unscored=len(unscored),
        unscored_error=unscored[0] if unscored else "",
        prompt_rewards=_by_prompt(scored),
        trajectories=tuple(answers[: 8 * settings.samples_per_prompt]),
        newest_version=max(versions) if len(versions) > 1 else None,
        pass_at=pass_at(_right(scored)),
    )


def comparable(
    config: Config, report: EvalReport, answers: Sequence[Trajectory], version: int
) -> list[Trajectory]:
    """Return the answers whose logprobs the learner, which holds `version` or makes it, can compare.

    It can where it holds the sampler's version (before the first update, unless that has begun meanwhile, or
    after the last one), and where answers are drawn as in training.
    """
    same = report.version == report.step == version and report.newest_version is None
    if not same or report.step not in (0, config.run.steps) or eval_draw(config) is not None:
        return []
    return [answer for answer in answers if answer.episode.response_ids]


def _right(answers: Sequence[Trajectory]) -> list[tuple[int, int]]:
    """Return for every prompt how many answers it has and how many of them are right."""
    number = Counter(answer.prompt.index for answer in answers)
    right = Counter(answer.prompt.index for answer in answers if answer.reward.correct)
    return [(n, right[index]) for index, n in number.items()]


def _by_prompt(answers: Sequence[Trajectory]) -> tuple[tuple[int, float], ...]:
    """Return the mean reward of every prompt, in order of prompt indices."""
    rewards: dict[int, list[float]] = {}
    for answer in answers:
        rewards.setdefault(answer.prompt.index, []).append(answer.reward.value)
    return tuple((index, sum(found) / len(found)) for index, found in sorted(rewards.items()))
