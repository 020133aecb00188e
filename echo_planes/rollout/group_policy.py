"""What the samples of one group share: their calls of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from echo_planes.rollout.generate import Engine
from echo_planes.types import Sample


class GroupPolicy:
    """Joins calls for the same tokens, made by the samples of one group, into one engine request."""

    def __init__(self, engine: Engine, max_new_tokens: int, on_tokens: Callable[[int], None]) -> None:
        self._engine = engine
        self._max_new_tokens = max_new_tokens
        self._on_tokens = on_tokens
        self._waiting: dict[tuple[int, ...], list[asyncio.Future[Sample]]] = {}
        self._requests: set[asyncio.Task[None]] = set()

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        key = tuple(token_ids)
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        if key not in self._waiting:
            self._waiting[key] = []
            # In a task of its own: a sample that gives up must not end it for those who joined.
            self._requests.add(asyncio.create_task(self._request(key)))
        self._waiting[key].append(future)
        return await future

    def close(self) -> None:
        """The group is over: nobody waits for what is still running."""
        for request in self._requests:
            request.cancel()

    async def _request(self, key: tuple[int, ...]) -> None:
        joined = self._waiting.pop(key)  # a new task starts after every sample that is ready now
        try:
            samples = await self._engine.generate(
                key,
                num_samples=len(joined),
                max_new_tokens=self._max_new_tokens,
                on_tokens=self._on_tokens,
            )
            answers = list(zip(joined, samples, strict=True))
        except Exception as why:  # noqa: BLE001  raised again by every sample that asked
            for future in joined:
                if not future.done():
                    future.set_exception(why)
            return
        for future, sample in answers:
            if not future.done():
                future.set_result(sample)
