"""Calls to actors, with stand-ins for Ray's handles."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_planes.loop import launch
from echo_planes.loop.launch import RemoteWorker
from echo_planes.rollout.actor import FIRST_WEIGHTS


@pytest.mark.parametrize("has_started", [True, False])
def test_a_worker_is_killed_if_it_does_not_stop_in_time_or_has_never_started(
    has_started: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While it builds its engine it hears nothing: whoever ends a run would wait for that in vain."""
    killed: list[Any] = []
    monkeypatch.setattr(launch, "ray", SimpleNamespace(kill=killed.append, is_initialized=lambda: True))

    async def story() -> None:
        asked = asyncio.Event()

        async def at_once(*_: Any) -> str:
            return "an address"

        def stop() -> asyncio.Future[None]:
            asked.set()
            return asyncio.get_running_loop().create_future()

        called = SimpleNamespace(remote=at_once)
        handle = SimpleNamespace(start=called, join=called, stop=SimpleNamespace(remote=stop))
        learner: Any = SimpleNamespace(sender=at_once)
        worker = RemoteWorker(handle, "w0", learner, tmp_path)
        if has_started:
            await worker.start()
        stopping = asyncio.create_task(worker.stop())
        if has_started:
            await asked.wait()
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
        else:
            await stopping
            assert not asked.is_set()
        assert killed == [handle]

    asyncio.run(asyncio.wait_for(story(), 10))


@pytest.mark.parametrize("has_published", [False, True])
def test_a_worker_without_weights_moves_with_the_learner_until_it_publishes(
    has_published: bool, tmp_path: Path
) -> None:
    """Before that nothing can come to it; after that only bytes are progress."""

    async def story() -> dict[str, str]:
        async def of_worker() -> dict[str, str]:
            return {"engine start": "0 bytes of weights received", FIRST_WEIGHTS: ""}

        async def of_learner() -> dict[str, str]:
            return {"": "rank 0 loading the model, 7 MiB read"}

        handle = SimpleNamespace(progress=SimpleNamespace(remote=of_worker))
        learner: Any = SimpleNamespace(has_published=has_published, progress=of_learner)
        return await RemoteWorker(handle, "w0", learner, tmp_path).progress()

    told = asyncio.run(story())["engine start"]
    assert told == (
        "0 bytes of weights received" if has_published else "rank 0 loading the model, 7 MiB read"
    )
