"""Records of the replay buffer: the reason for no batch, an accepted group, and the buffer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo_planes.types import BufferCounts, Group, PartialRollout


@dataclass(frozen=True, slots=True)
class NotReady:
    """Reason for which no batch can be formed now.

    `starved`: buffered and leased groups are too few, and no worker serves a new enough version.
    `holding`: forming the batch would make a live lease's work too old (policy `wait`).
    `filling`: too few groups are buffered, and workers can still deliver more.
    """

    reason: Literal["starved", "holding", "filling"]
    detail: str = ""
    moves: int = 0  # `ReplayBuffer.moves`


@dataclass(frozen=True, slots=True)
class Accepted:
    """Record that the buffer keeps of an accepted group."""

    group_id: str
    prompt_index: int
    version: int  # oldest version of any token
    share_correct: float  # share of correct samples, 0 to 1: the prompt's difficulty for this policy

    @classmethod
    def of(cls, group: Group) -> Accepted:
        correct = sum(t.reward.correct for t in group.trajectories)
        index = group.trajectories[0].prompt.index
        return cls(group.group_id, index, group.version, correct / len(group.trajectories))


@dataclass(frozen=True, slots=True)
class BufferState:
    """Consistent state between two batches: enough to continue without skipping or repeating a prompt.

    The rows of `groups` are in the store; `checkpoint_state.rejoin` combines the two on a resume.
    """

    step: int
    next_index: int
    returned: tuple[int, ...]
    issued: int
    groups: tuple[Accepted, ...]  # buffered
    counts: BufferCounts
    published: tuple[tuple[str, int, str], ...]  # lineage, version, digest
    # Partial rollouts by index of a returned prompt.
    partials: Mapping[int, tuple[PartialRollout, ...]] = field(default_factory=dict)
    replaced: int = 0  # groups set aside as uninformative for the next batch
