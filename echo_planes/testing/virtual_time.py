"""Event loop whose time passes only while every task waits: simulates hours in milliseconds, reproducibly."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from echo_planes.errors import RunError

T = TypeVar("T")


class _VirtualSelector(selectors.SelectSelector):
    """Selector that moves its loop's clock forward instead of sleeping."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RunError("deadlock: every task waits for another one")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose time passes only while every task waits; deterministic, never sleeps."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def now_s(self) -> float:
        """Return the virtual time, seconds. By this method the loop is a `Clock`."""
        return self._virtual.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func` inline, because threads would depend on real time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as why:  # noqa: BLE001  passed to the awaiter, as a thread pool does
            future.set_exception(why)
        return future


def run_virtual(make: Callable[[VirtualTimeLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end in virtual time."""
    loop = VirtualTimeLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(make(loop))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
