"""Conversion of whole groups into the flat columns that the learner takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from echo_planes.data.replay.overlong import KEPT, Overlong, is_cut_off
from echo_planes.errors import TaskError
from echo_planes.types import Group, Omega, Reward, TrainBatch, Trajectory

MOST_PARTS = 32  # reward parts whose means a step's row holds; workers' messages must not make the row large

Materialize = Callable[[Sequence[Trajectory]], list[Omega]]


def make_batch(
    step: int,
    groups: Sequence[Group],
    materialize: Materialize,
    overlong: Overlong = KEPT,
    longest_answer: int = 0,
) -> TrainBatch:
    """Materialise Omega (ECHO-2 appendix F.5) and lay the groups out as one `TrainBatch`.

    `overlong` masks answers that were cut off, or lowers the rewards of long ones.

    Raises:
        TaskError: the task's masks do not fit the responses, or train tokens that the policy did not sample.
    """
    ids: list[str] = []
    tokens: list[int] = []
    offsets = [0]
    mask: list[bool] = []
    logprobs: list[float] = []
    scores: list[float] = []
    tags: dict[str, int] = {}
    advantage_groups: list[int] = []
    advantages: list[float] = []
    versions: list[int] = []
    correct: list[bool] = []
    token_versions: list[int] = []
    cut_off: list[bool] = []
    for group in groups:
        omegas = omegas_of(group.trajectories, materialize)
        for trajectory, omega in zip(group.trajectories, omegas, strict=True):
            episode = trajectory.episode
            num_prompt = len(trajectory.prompt.token_ids)
            ids.append(trajectory.trajectory_id)
            tokens += trajectory.prompt.token_ids + episode.response_ids
            offsets.append(len(tokens))
            masked = overlong.is_masked(episode)
            mask += (False,) * num_prompt
            mask += (False,) * len(omega.loss_mask) if masked else omega.loss_mask
            logprobs += (0.0,) * num_prompt + episode.logprobs
            token_versions += [-1] * num_prompt
            for span in episode.spans:
                token_versions += [span.version] * (span.stop - span.start)
            cut_off.append(is_cut_off(episode))
            scores.append(trajectory.reward.value)
            advantage_groups.append(tags.setdefault(omega.advantage_group, len(tags)))
            advantages.append(math.nan if omega.advantage is None else omega.advantage)
            versions.append(trajectory.version)
            correct.append(trajectory.reward.correct)
    return TrainBatch(
        step=step,
        trajectory_ids=tuple(ids),
        token_ids=np.asarray(tokens, np.int64),
        offsets=np.asarray(offsets, np.int64),
        loss_mask=np.asarray(mask, np.bool_),
        sampler_logprobs=np.asarray(logprobs, np.float32),
        rewards=overlong.trained_rewards([t for group in groups for t in group.trajectories]),
        advantage_groups=np.asarray(advantage_groups, np.int64),
        advantages=np.asarray(advantages, np.float32),
        versions=np.asarray(versions, np.int64),
        correct=np.asarray(correct, np.bool_),
        token_versions=np.asarray(token_versions, np.int64),
        cut_off=np.asarray(cut_off, np.bool_),
        scores=np.asarray(scores, np.float32),
        longest_answer=longest_answer,
        reward_parts=part_means([t.reward for group in groups for t in group.trajectories]),
    )


def omegas_of(trajectories: Sequence[Trajectory], materialize: Materialize) -> list[Omega]:
    """Return the training metadata of one group's trajectories, in order.

    Raises:
        TaskError: as `make_batch`.
    """
    omegas = materialize(trajectories)
    if len(omegas) != len(trajectories):
        raise TaskError(f"materialize returned {len(omegas)} records for {len(trajectories)}")
    for trajectory, omega in zip(trajectories, omegas, strict=True):
        episode = trajectory.episode
        if len(omega.loss_mask) != len(episode.response_ids):
            raise TaskError(f"{trajectory.trajectory_id}: the loss mask does not fit the response")
        if any(m and not r for m, r in zip(omega.loss_mask, episode.response_mask, strict=True)):
            raise TaskError(f"{trajectory.trajectory_id}: the loss mask covers tokens nobody sampled")
    return omegas


def with_accepted(batch: TrainBatch, groups: Sequence[Group], level: Callable[[int], int]) -> TrainBatch:
    """Return a batch with the columns of all answers accepted for it.

    Args:
        groups: the batch's own and those set aside.
        level: returns the level of a prompt, given its index.
    """
    answers = [answer for group in groups for answer in group.trajectories]
    return replace(
        batch,
        accepted_scores=np.asarray([answer.reward.value for answer in answers], np.float32),
        accepted_cut_off=np.asarray([is_cut_off(answer.episode) for answer in answers], np.bool_),
        accepted_levels=np.asarray([level(answer.prompt.index) for answer in answers], np.int64),
    )


def part_means(rewards: Sequence[Reward]) -> tuple[tuple[str, float, int], ...]:
    """Return each part's mean over the rewards with it, and their number; only `MOST_PARTS` commonest."""
    counts = Counter(name for reward in rewards for name in reward.parts)
    sums = dict.fromkeys(sorted(name for name, _ in counts.most_common(MOST_PARTS)), 0.0)
    for reward in rewards:
        for name in sums.keys() & reward.parts.keys():
            sums[name] += reward.parts[name] / counts[name]
    return tuple((name, mean, counts[name]) for name, mean in sums.items())
