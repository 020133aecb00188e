"""echo_planes: RL post-training for LLMs with learning in one place and rollouts wherever GPUs are cheap.

It exports the names that a task needs. Importing them loads neither torch nor ray nor vllm.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo_planes.data.tasks.adapter import (
        EpisodeBuilder,
        Policy,
        RewardWeights,
        TaskAdapter,
        TaskOptions,
        by_batch,
        by_group,
        by_initial_state,
    )
    from echo_planes.data.tasks.environment import Environment, EpisodeOptions, EpisodeTask, Turn
    from echo_planes.types import Episode, Prompt, Reward

__version__ = "0.1.0"
__all__ = [
    "Environment",
    "Episode",
    "EpisodeBuilder",
    "EpisodeOptions",
    "EpisodeTask",
    "Policy",
    "Prompt",
    "Reward",
    "RewardWeights",
    "TaskAdapter",
    "TaskOptions",
    "Turn",
    "by_batch",
    "by_group",
    "by_initial_state",
]
_HOMES = {
    "Environment": "data.tasks.environment",
    "Episode": "types",
    "EpisodeBuilder": "data.tasks.adapter",
    "EpisodeOptions": "data.tasks.environment",
    "EpisodeTask": "data.tasks.environment",
    "Policy": "data.tasks.adapter",
    "Prompt": "types",
    "Reward": "types",
    "RewardWeights": "data.tasks.adapter",
    "TaskAdapter": "data.tasks.adapter",
    "TaskOptions": "data.tasks.adapter",
    "Turn": "data.tasks.environment",
    "by_batch": "data.tasks.adapter",
    "by_group": "data.tasks.adapter",
    "by_initial_state": "data.tasks.adapter",
}


def __getattr__(name: str) -> Any:
    """Import an exported name at its first use, so that processes that import one module start quickly."""
    if name not in _HOMES:
        raise AttributeError(f"module 'echo_planes' has no attribute '{name}'")
    return getattr(import_module(f"echo_planes.{_HOMES[name]}"), name)
