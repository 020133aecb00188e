"""Refill: groups without a signal do not count towards a batch, and others replace them (`sampling.refill`).

Dynamic sampling of DAPO (2503.14476, section 3.2, eq. 11), inside the staleness bound: a group that is set
aside returns its permit, so that another prompt of the same version can be leased in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echo_planes.config.schema import Config
from echo_planes.data.replay.overlong import KEPT, Overlong
from echo_planes.data.tasks.adapter import TaskAdapter, by_batch, by_initial_state
from echo_planes.errors import ConfigError
from echo_planes.types import Group


@dataclass(frozen=True, slots=True)
class Refill:
    """Rule by which groups are set aside, and their largest number."""

    by: Literal["reward", "correct"]  # the answers of a group must differ in this one
    max_groups: int  # most groups set aside for one batch; further ones count towards it
    overlong: Overlong = KEPT

    def carries_signal(self, group: Group) -> bool:
        """Return whether a group has a gradient: its answers differ, and at least one of them is trained."""
        answers = group.trajectories
        if all(self.overlong.is_masked(answer.episode) for answer in answers):
            return False
        if self.by == "correct":
            return len({answer.reward.correct for answer in answers}) > 1
        return len(set(self.overlong.trained_rewards(answers).tolist())) > 1


def refill_of(config: Config, overlong: Overlong) -> Refill | None:
    """Return the refill rule that a run's settings ask for; None: every group counts."""
    by = config.refill
    if by == "off":
        return None
    return Refill(by, int(config.sampling.refill_limit * config.sampling.prompts_per_step), overlong)


def check_companions(config: Config, task: type[TaskAdapter]) -> None:
    """Refuse refill and parts of steps for a task whose advantages also come from companions elsewhere.

    Raises:
        ConfigError: the task's `materialize` is `by_batch` or `by_initial_state`, and the run refills, or
            trains its steps in parts.
    """
    if task.materialize not in (by_batch, by_initial_state):
        return
    name = task.materialize.__name__
    compares = f"task {config.task.name} compares answers beyond their group (materialize = {name})"
    if config.refill != "off":
        raise ConfigError(
            f"sampling.refill={config.refill}: {compares}, where a group of equal rewards has a gradient "
            "too; set sampling.refill=off"
        )
    if config.learner.micro_batch_groups is not None:
        raise ConfigError(
            f"learner.micro_batch_groups={config.learner.micro_batch_groups}: {compares}, of which a part "
            "of a step has only some; leave it out"
        )
