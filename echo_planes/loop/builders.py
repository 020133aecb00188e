"""Builders that a worker's process calls: one makes the task adapter, one the reward processes."""

from __future__ import annotations

import json

from echo_planes.config.schema import Config
from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.data.tasks.registry import build_adapter, load_tokenizer
from echo_planes.rollout.scoring import ProcessScorer


def build_task(config: Config) -> TaskAdapter:
    """Build the run's task adapter in the calling process."""
    return build_adapter(config.task, load_tokenizer(config.model.folder, config.run.date), config.run.seed)


def build_scorer(config: Config, limit_s: float) -> ProcessScorer:
    """Build the scorer, whose processes compute each answer's reward within `limit_s` seconds."""
    setup = {
        "task": config.task.model_dump(mode="json"),
        "model_folder": str(config.model.folder.absolute()),
        "date": config.run.date and config.run.date.isoformat(),
        "seed": config.run.seed,
    }
    return ProcessScorer("echo_planes.data.tasks.reward_child", json.dumps(setup), limit_s)
