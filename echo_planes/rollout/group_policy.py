"""Policy shared by the samples of one group, which also continues partial rollouts of other workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from echo_planes.errors import WorkerGoneError
from echo_planes.rollout.engine import Engine
from echo_planes.types import Draw, PartialRollout, Sample, joined


class GroupPolicy:
    """Policy that joins calls for the same tokens, made by the samples of one group, into one engine request.

    A call that another worker had begun continues from its last token (one prefill). A call that the other
    worker had finished gets that answer at once. When the task plays an episode again, it therefore gets the
    same answers as before.

    Args:
        engine: the inference engine.
        max_new_tokens: most tokens of one call's answer.
        on_piece: called with a call's number within the group, its context (empty after the first piece), and
            the tokens that arrived.
        partials: calls of an earlier worker, numbered 0, 1, ...; new calls get the numbers after them.
        draw: temperature and top-p; None: as for training.
        on_asks: called with 1 when a request to the engine begins, and with -1 when it ends.
    """

    def __init__(
        self,
        engine: Engine,
        max_new_tokens: int,
        on_piece: Callable[[int, tuple[int, ...], Sample], None],
        partials: Sequence[PartialRollout] = (),
        draw: Draw | None = None,
        on_asks: Callable[[int], None] = lambda change: None,
    ) -> None:
        self._engine = engine
        self._on_asks = on_asks
        self._draw = draw
        self._max_new_tokens = max_new_tokens
        self._on_piece = on_piece
        self._partials: dict[tuple[int, ...], list[tuple[int, Sample]]] = {}
        for number, partial in enumerate(partials):
            # A resume may have lowered the limit: an unfinished call that is too long now begins again.
            if partial.sample.finish_reason or len(partial.sample.token_ids) < max_new_tokens:
                self._partials.setdefault(partial.context, []).append((number, partial.sample))
        self._num_calls = len(partials)
        self._waiting: dict[tuple[int, ...], list[asyncio.Future[Sample]]] = {}
        self._requests: set[asyncio.Task[None]] = set()

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        key = tuple(token_ids)
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        if key not in self._waiting:
            self._waiting[key] = []
            # The request has its own task: a cancelled sample must not end it for the samples that joined.
            self._requests.add(asyncio.create_task(self._request(key)))
        self._waiting[key].append(future)
        return await future

    def close(self) -> None:
        """Cancel the requests that still run. Call when the group is over and no sample waits for them."""
        for request in self._requests:
            request.cancel()

    async def _request(self, key: tuple[int, ...]) -> None:
        joining = self._waiting.pop(key)  # a new task runs after all samples that are ready to join
        begun = self._partials.get(key, [])[: len(joining)]
        if begun:
            del self._partials[key][: len(begun)]
        work: list[Coroutine[Any, Any, list[Sample]]] = [self._go_on(key, *partial) for partial in begun]
        if len(joining) > len(begun):
            work.append(self._begin(key, len(joining) - len(begun)))
        self._on_asks(1)
        try:
            answers = [sample for samples in await _together(work) for sample in samples]
            if len(answers) != len(joining):  # otherwise some samples would wait for ever
                raise WorkerGoneError(
                    f"the engine gave {len(answers)} samples where {len(joining)} were asked for"
                )
        except Exception as why:  # noqa: BLE001  raised again by every sample that asked
            for future in joining:
                if not future.done():
                    future.set_exception(why)
            return
        finally:
            self._on_asks(-1)
        for future, sample in zip(joining, answers, strict=True):
            if not future.done():
                future.set_result(sample)

    async def _begin(self, key: tuple[int, ...], num_samples: int) -> list[Sample]:
        numbers: dict[int, int] = {}  # number of each sample's call, in the order of their first tokens

        def on_tokens(index: int, piece: Sample) -> None:
            is_new = index not in numbers
            if is_new:
                numbers[index] = self._num_calls
                self._num_calls += 1
            self._on_piece(numbers[index], key if is_new else (), piece)

        return await self._engine.generate(
            key,
            num_samples=num_samples,
            max_new_tokens=self._max_new_tokens,
            on_tokens=on_tokens,
            draw=self._draw,
        )

    async def _go_on(self, key: tuple[int, ...], number: int, sample: Sample) -> list[Sample]:
        if sample.finish_reason:
            return [sample]
        rest = await self._engine.generate(
            key + sample.token_ids,
            num_samples=1,
            max_new_tokens=self._max_new_tokens - len(sample.token_ids),
            on_tokens=lambda _, piece: self._on_piece(number, (), piece),
            draw=self._draw,
        )
        return [joined([sample, rest[0]])]


async def _together(work: Sequence[Coroutine[Any, Any, list[Sample]]]) -> list[list[Sample]]:
    """Return all results, in order. If one fails or the caller is cancelled, cancel the rest."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
