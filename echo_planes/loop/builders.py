"""Builders that a worker's process calls: one makes the task adapter, one the reward processes."""

from __future__ import annotations

import json
from dataclasses import dataclass

from echo_planes.config.schema import Config
from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.data.tasks.registry import build_adapter, load_tokenizer
from echo_planes.rollout.scoring import ProcessScorer


@dataclass(frozen=True, slots=True)
class TaskBuilder:
    """Builds the run's task adapter in the process that calls it."""

    config: Config

    def __call__(self) -> TaskAdapter:
        config = self.config
        return build_adapter(config.task, load_tokenizer(config.model.folder), config.run.seed)


@dataclass(frozen=True, slots=True)
class ScorerBuilder:
    """Builds the scorer, whose processes compute each answer's reward within `limit_s` seconds."""

    config: Config

    def __call__(self, limit_s: float) -> ProcessScorer:
        config = self.config
        setup = {
            "task": config.task.model_dump(mode="json"),
            "model_folder": str(config.model.folder.absolute()),
            "seed": config.run.seed,
        }
        return ProcessScorer("echo_planes.data.tasks.reward_child", json.dumps(setup), limit_s)
