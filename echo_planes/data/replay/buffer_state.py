"""Records of the replay buffer: the reason for no batch, an accepted group, and the buffer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo_planes.types import BufferCounts, Group, PartialRollout


@dataclass(frozen=True, slots=True)
class NotReady:
    """Why no batch can be formed now.

    `starved`: nothing admissible is coming, because no worker serves a snapshot that is new enough.
    `holding`: forming the batch would make a live lease's work too old (policy `wait`).
    `filling`: work is on its way.
    """

    reason: Literal["starved", "holding", "filling"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Record that the buffer keeps of an accepted group."""

    group_id: str
    prompt_index: int
    version: int  # oldest of any token
    share_correct: float  # of its samples: how difficult its prompt is for this policy

    @classmethod
    def of(cls, group: Group) -> Accepted:
        correct = sum(t.reward.correct for t in group.trajectories)
        index = group.trajectories[0].prompt.index
        return cls(group.group_id, index, group.version, correct / len(group.trajectories))


@dataclass(frozen=True, slots=True)
class BufferState:
    """Consistent state between two batches: enough to continue without skipping or repeating a prompt.

    The rows of `groups` are in the store; `checkpoint_state.py` brings the two together again.
    """

    step: int
    next_index: int
    returned: tuple[int, ...]
    issued: int
    groups: tuple[Accepted, ...]  # buffered
    counts: BufferCounts
    published: tuple[tuple[str, int, str], ...]  # lineage, version, digest
    # By index of a returned prompt.
    partials: Mapping[int, tuple[PartialRollout, ...]] = field(default_factory=dict)
    replaced: int = 0  # groups that were set aside as uninformative for the batch to come
