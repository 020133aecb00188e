"""Refill: groups without a signal do not count towards a batch, and others replace them (`sampling.refill`).

Dynamic sampling of DAPO (2503.14476, section 3.2, eq. 11), inside the staleness bound: a group that is set
aside returns its permit, so that another prompt of the same version can be leased in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echo_planes.config.schema import Config
from echo_planes.data.replay.batch import Materialize, omegas_of
from echo_planes.data.replay.overlong import KEPT, Overlong
from echo_planes.data.tasks.adapter import EpisodeBuilder, TaskAdapter, train_everything
from echo_planes.errors import ConfigError
from echo_planes.types import Group, Prompt, Reward, Sample, Span, Trajectory


@dataclass(frozen=True, slots=True)
class Refill:
    """Rule by which groups are set aside, and their largest number."""

    by: Literal["reward", "correct"]  # the companions of an answer must differ in this one
    max_groups: int  # most groups set aside for one batch; further ones count towards it
    overlong: Overlong = KEPT
    materialize: Materialize = train_everything  # the task's, by `omegas_of`

    def carries_signal(self, group: Group) -> bool:
        """Return whether a group has a gradient: a trained answer whose companions differ.

        Where the task gives an answer's advantage, that must not be 0.
        """
        answers, omegas = group.trajectories, self.materialize(group.trajectories)
        rewards = self.overlong.trained_rewards(answers).tolist()
        found: dict[str, set[float]] = {}
        for answer, omega, reward in zip(answers, omegas, rewards, strict=True):
            value = float(answer.reward.correct) if self.by == "correct" else reward
            found.setdefault(omega.advantage_group, set()).add(value)
        return any(
            len(found[omega.advantage_group]) > 1 if omega.advantage is None else omega.advantage != 0.0
            for answer, omega in zip(answers, omegas, strict=True)
            if any(omega.loss_mask) and not self.overlong.is_masked(answer.episode)
        )


def refill_of(config: Config, overlong: Overlong, materialize: Materialize) -> Refill | None:
    """Return the refill rule that a run's settings ask for; None: every group counts."""
    by = config.refill
    if by == "off":
        return None
    most = int(config.sampling.refill_limit * config.sampling.prompts_per_step)
    return Refill(by, most, overlong, materialize)


def check_companions(config: Config, task: TaskAdapter, prompt: Prompt) -> None:
    """Refuse refill and parts of steps for a task whose advantages also come from companions elsewhere.

    Two made-up groups of answers to `prompt` tell: none of their companions may be in the other one.

    Raises:
        ConfigError: some are, and the run refills, or trains its steps in parts.
    """
    if config.refill == "off" and config.learner.micro_batch_groups is None:
        return
    first, second = (_companions(task, prompt, group_id) for group_id in ("g0", "g1"))
    if not first & second:
        return
    name = type(task).materialize.__qualname__
    compares = f"task {config.task.name} compares answers beyond their group (materialize = {name})"
    if config.refill != "off":
        raise ConfigError(
            f"sampling.refill={config.refill}: {compares}, where a group of equal rewards has a gradient "
            "too; set sampling.refill=off"
        )
    raise ConfigError(
        f"learner.micro_batch_groups={config.learner.micro_batch_groups}: {compares}, of which a part "
        "of a step has only some; leave it out"
    )


def _companions(task: TaskAdapter, prompt: Prompt, group_id: str) -> set[str]:
    """Return the tags by which two made-up answers, a wrong and a right one, are to be normalised."""
    builder, said = EpisodeBuilder(), prompt.token_ids[-1:]
    builder.add_sample(Sample(said, (0.0,) * len(said), (Span(0, len(said), 0, ""),), "stop"))
    episode = builder.build(task.tokenizer)
    answers = tuple(
        Trajectory(f"{group_id}/{i}", group_id, prompt, episode, Reward(float(i), bool(i)), "w0", "probe")
        for i in range(2)
    )
    omegas = omegas_of(answers, task.materialize)
    return {omega.advantage_group for omega in omegas if omega.advantage is None}
