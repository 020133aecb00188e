"""echo_planes: RL post-training for LLMs with learning in one place and rollouts wherever GPUs are cheap.

It exports the names that a task needs. Importing them loads neither torch nor ray nor vllm.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions
    from echo_planes.data.tasks.environment import Environment, EpisodeTask, Turn
    from echo_planes.types import Episode, Prompt, Reward

__version__ = "0.1.0"
__all__ = [
    "Environment",
    "Episode",
    "EpisodeTask",
    "Prompt",
    "Reward",
    "TaskAdapter",
    "TaskOptions",
    "Turn",
]
_HOMES = {
    "Environment": "data.tasks.environment",
    "Episode": "types",
    "EpisodeTask": "data.tasks.environment",
    "Prompt": "types",
    "Reward": "types",
    "TaskAdapter": "data.tasks.adapter",
    "TaskOptions": "data.tasks.adapter",
    "Turn": "data.tasks.environment",
}


def __getattr__(name: str) -> Any:
    """Import an exported name at its first use, so that processes that import one module start quickly."""
    if name not in _HOMES:
        raise AttributeError(f"module 'echo_planes' has no attribute '{name}'")
    return getattr(import_module(f"echo_planes.{_HOMES[name]}"), name)
