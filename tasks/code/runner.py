"""Sandbox for synchronous code: judges several programs side by side in one blocking call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from echo_planes.sandbox.model import Limits
from echo_planes.sandbox.pool import SandboxPool

from .judging import Verdict, programs, verdict

T = TypeVar("T")


class ProgramRunner:
    """Sandbox pool with an event loop in a separate thread, started at the first use.

    Args:
        num_slots: answers judged at once; each takes two programs, the judge's and the answer's.
        limits: limits of each program.
        interpreter: as of `SandboxPool`.
    """

    def __init__(self, num_slots: int, limits: Limits, interpreter: str | None = None) -> None:
        self._num_slots = num_slots
        self._limits = limits
        self._interpreter = interpreter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: SandboxPool | None = None

    def judge(self, codes: Sequence[str], tests: str, head: str, solution: str) -> dict[str, Verdict]:
        """Judge each answer by the tests of a problem; see `judging.programs`.

        Raises:
            SandboxError: this machine offers no protection; nothing ran.
        """
        return self._call(self._judge(codes, tests, head, solution))

    @property
    def protection(self) -> str:
        """Description of the sandbox around the programs. Raises as `judge` does."""
        return self._call(self._started()).protection

    def close(self) -> None:
        """End the pool. The next `judge` starts another."""
        if self._pool is not None:
            self._call(self._pool.close())
            self._pool = None

    async def _started(self) -> SandboxPool:
        if self._pool is None:
            pool = SandboxPool(2 * self._num_slots, self._limits, self._interpreter)
            await pool.start()
            self._pool = pool
        return self._pool

    async def _judge(self, codes: Sequence[str], tests: str, head: str, solution: str) -> dict[str, Verdict]:
        pool = await self._started()

        async def one(code: str) -> Verdict:
            judge, answer = await pool.run_joined(*programs(code, tests, head, solution))
            return verdict(judge, answer, tests)

        return dict(zip(codes, await asyncio.gather(*map(one, codes)), strict=True))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon thread, because the process may end at any time: the wardens then clean up.
            threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
