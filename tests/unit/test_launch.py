"""Calls to actors, with stand-ins for Ray's handles."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_planes.config.kv_schedule import Schedule
from echo_planes.errors import LearnerLostError
from echo_planes.learning.actor import LearnerProcess
from echo_planes.loop import launch
from echo_planes.loop.launch import RemoteLearner, RemoteWorker
from echo_planes.rollout.actor import FIRST_WEIGHTS, WorkerProcess
from echo_planes.types import Adjustment
from echo_planes.weights.sparse_adapter import SparseAdapter


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


class Handle:
    """Handle of an actor that is in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> SimpleNamespace:
        async def remote(*arguments: Any) -> Any:
            answer = getattr(self._actor, method)(*arguments)
            return await answer if inspect.isawaitable(answer) else answer

        return SimpleNamespace(remote=remote)


SCHEDULE = Schedule(pages=(8,))


@pytest.mark.parametrize(
    ("method", "argument"), [("set_schedule", SCHEDULE), ("set_adapter", SparseAdapter(3, b"tensors"))]
)
def test_what_a_worker_is_to_have_reaches_the_worker_in_its_process(
    method: str, argument: object, tmp_path: Path
) -> None:
    told: list[object] = []

    async def tell(given: object) -> None:
        told.append(given)

    process: Any = object.__new__(WorkerProcess)  # the constructor needs Ray
    process._started = SimpleNamespace(**{method: tell})
    learner: Any = None
    asyncio.run(getattr(RemoteWorker(Handle(process), "w0", learner, tmp_path), method)(argument))
    assert told == [argument]


@pytest.mark.parametrize(
    ("method", "arguments"), [("adjust", (Adjustment(0.5, True),)), ("distil", (SCHEDULE, 7))]
)
def test_what_the_learner_is_to_do_reaches_every_rank(method: str, arguments: tuple[object, ...]) -> None:
    told: list[tuple[object, ...]] = []

    def rank(number: int) -> Any:
        def tell(*given: object) -> int:
            told.append((number, *given))
            return number

        process: Any = object.__new__(LearnerProcess)
        process._learner_or_none = SimpleNamespace(**{method: tell})
        return launch._Actor(Handle(process), f"learner rank {number}", LearnerLostError, None)

    learner: Any = object.__new__(RemoteLearner)
    learner._ranks = [rank(0), rank(1)]
    answer = asyncio.run(getattr(learner, method)(*arguments))
    assert told == [(0, *arguments), (1, *arguments)]
    assert answer == (0 if method == "distil" else None)  # rank 0 has the adapter
