"""Calls to actors, with stand-ins for Ray's handles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from echo_planes.loop import launch
from echo_planes.loop.launch import RemoteWorker


def test_a_worker_that_does_not_stop_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(launch, "ray", SimpleNamespace(kill=killed.append, is_initialized=lambda: True))

    async def story() -> None:
        asked = asyncio.Event()

        def stop() -> asyncio.Future[None]:
            asked.set()
            return asyncio.get_running_loop().create_future()

        handle = SimpleNamespace(stop=SimpleNamespace(remote=stop))
        learner: Any = None
        stopping = asyncio.create_task(RemoteWorker(handle, "w0", learner).stop())
        await asked.wait()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert killed == [handle]

    asyncio.run(story())
