"""Interfaces to the other planes, as a rollout worker needs them: prompts, weights and a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from echo_planes.types import (
    Episode,
    Group,
    Lease,
    LeaseTokens,
    Manifest,
    Prompt,
    Publication,
    Receipt,
    Sample,
    WorkerStats,
)


class WorkSource(Protocol):
    """The data plane, as a worker sees it."""

    async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]: ...

    async def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]: ...

    async def tell(self, epoch: int, stats: WorkerStats) -> None: ...

    async def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int: ...

    async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]: ...


class WeightSource(Protocol):
    """Source of published weights (`echo_planes.weights.node.client`)."""

    async def staged(self, manifest: Manifest, fresh: bool) -> Publication:
        """Return the manifest's version, or a newer one, verified and ready for the engine.

        Args:
            manifest: manifest of the wanted version.
            fresh: include every weight, not only those that changed.

        Raises:
            WeightsError: the version is not available, or does not match its manifest.
        """
        ...

    async def settled(self, version: int, ok: bool) -> str:
        """Record whether the engine installed the staged version (`ok`) or refused it.

        Returns:
            The publications that the version was caught up from, in words; "" for a single publication, or if
            not `ok`.
        """
        ...


class Policy(Protocol):
    """Policy that a task adapter's `rollout` calls."""

    async def generate(self, token_ids: Sequence[int]) -> Sample: ...


class Task(Protocol):
    """The part of a task adapter that runs in the rollout plane (`data.tasks.adapter.TaskAdapter`)."""

    max_new_tokens: int | None
    reward_limit_s: float

    def eval_prompt(self, index: int) -> Prompt: ...

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode: ...
