"""Playing and scoring of the samples of one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from echo_planes.errors import RunError
from echo_planes.rollout.engine import Engine
from echo_planes.rollout.group_policy import GroupPolicy
from echo_planes.rollout.scoring import Scorer
from echo_planes.rollout.sources import Task
from echo_planes.types import (
    Draw,
    Episode,
    Group,
    PartialRollout,
    Prompt,
    Reward,
    RewardFailure,
    Sample,
    Trajectory,
)


class Player:
    """Player of a task's groups on an engine.

    Args:
        worker_id, lineage: marks of the trajectories.
        engine: the inference engine.
        task: the task adapter.
        scorer: the task's rewards.
        max_new_tokens: most tokens of one answer of the policy.
    """

    def __init__(
        self, worker_id: str, lineage: str, engine: Engine, task: Task, scorer: Scorer, max_new_tokens: int
    ) -> None:
        self._id = worker_id
        self._lineage = lineage
        self._engine = engine
        self._task = task
        self._scorer = scorer
        self._max_new_tokens = max_new_tokens

    async def group(
        self,
        group_id: str,
        prompt: Prompt,
        num_samples: int,
        on_piece: Callable[[int, tuple[int, ...], Sample], None],
        on_sampled: Callable[[], None],
        partials: Sequence[PartialRollout] = (),
        draw: Draw | None = None,
        on_asks: Callable[[int], None] = lambda change: None,
    ) -> Group:
        """Play and score all samples of one prompt.

        A failed rollout marks every sample of the group as failed; a failed reward marks its own sample, and
        those that the scorer then left out. `on_sampled` is called when all samples are complete, before they
        are scored. `on_piece`, `partials`, `draw` and `on_asks`: see `GroupPolicy`.

        Raises:
            RunError: the engine hangs or died, or no process for rewards starts: replace this worker.
        """
        policy = GroupPolicy(self._engine, self._max_new_tokens, on_piece, partials, draw, on_asks)
        error = ""
        scored: list[tuple[Episode, Reward | RewardFailure]] = []
        plays = [asyncio.ensure_future(self._task.rollout(prompt, policy)) for _ in range(num_samples)]
        try:
            episodes = await asyncio.gather(*plays)
            on_sampled()
            scored = list(zip(episodes, await self._scorer.score(prompt, episodes), strict=True))
        except RunError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = f"prompt {prompt.index}: the task cancelled its own rollout"  # no caller cancelled us
        except Exception as why:  # noqa: BLE001  a user's adapter may raise anything: counted as a status
            error = f"{type(why).__name__} in prompt {prompt.index}: {why}"
        finally:
            for play in plays:
                play.cancel()
            policy.close()
        if error:
            nothing = Episode((), (), (), (), "abort")
            scored = [(nothing, RewardFailure("failed", error))] * num_samples
        members = [
            self._trajectory(f"{group_id}/{i}", group_id, prompt, episode, outcome)
            for i, (episode, outcome) in enumerate(scored)
        ]
        return Group(group_id, tuple(members))

    def _trajectory(
        self,
        trajectory_id: str,
        group_id: str,
        prompt: Prompt,
        episode: Episode,
        outcome: Reward | RewardFailure,
    ) -> Trajectory:
        failure = outcome if isinstance(outcome, RewardFailure) else None
        error = failure.error if failure else ""
        if failure and failure.status != "failed":
            error = f"the reward of prompt {prompt.index}: {error}"
        reward = Reward(0.0, False) if isinstance(outcome, RewardFailure) else outcome
        return Trajectory(
            trajectory_id=trajectory_id,
            group_id=group_id,
            prompt=prompt,
            episode=replace(episode, notes=reward.notes or episode.notes),
            reward=replace(reward, notes=""),
            worker_id=self._id,
            lineage=self._lineage,
            status=failure.status if failure else "ok",
            error=error,
        )
