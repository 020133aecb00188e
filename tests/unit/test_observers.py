"""Several listeners as one: each is told everything, in order, by what an `Observer` is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from echo_planes.loop.observers import Observers, QuietObserver
from echo_planes.loop.planes import Observer
from echo_planes.types import WorkerInfo

TOLD = [name for name in vars(Observer) if name.startswith("on_")]


class Listener:
    """Writes down whatever it is told."""

    def __init__(self, name: str, book: list[tuple[Any, ...]]) -> None:
        self._name = name
        self._book = book

    def __getattr__(self, what: str) -> Any:
        return lambda *args, **kwargs: self._book.append((self._name, what, args, kwargs))

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._phase(name)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._book.append((self._name, "begin", name))
        yield
        self._book.append((self._name, "end", name))


def arguments(what: str) -> tuple[list[object], dict[str, object]]:
    """One marker for each argument of a method."""
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for name, parameter in list(inspect.signature(getattr(Observer, what)).parameters.items())[1:]:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = object()
        else:
            args.append(object())
    return args, kwargs


@pytest.mark.parametrize("what", TOLD)
def test_everybody_is_told_everything_unchanged_and_in_order(what: str) -> None:
    book: list[tuple[Any, ...]] = []
    observers: Observer = Observers(*(Listener(name, book) for name in "abc"))
    args, kwargs = arguments(what)
    getattr(observers, what)(*args, **kwargs)
    assert book == [(name, what, tuple(args), kwargs) for name in "abc"]


def test_phases_are_those_of_the_first() -> None:
    book: list[tuple[Any, ...]] = []
    observers = Observers(Listener("a", book), Listener("b", book))
    with observers.phase("learner"):
        book.append(("inside",))
    assert book == [("a", "begin", "learner"), ("inside",), ("a", "end", "learner")]


@pytest.mark.parametrize("what", TOLD)
def test_a_quiet_observer_takes_everything(what: str) -> None:
    args, kwargs = arguments(what)
    assert getattr(QuietObserver(), what)(*args, **kwargs) is None


def test_a_part_is_heard_by_one_who_hears_a_part() -> None:
    heard: list[str] = []

    class Door(QuietObserver):
        def on_worker(self, info: WorkerInfo, *, alive: bool) -> None:
            heard.append(f"{info.worker_id} {alive}")

    observers = Observers(QuietObserver(), Door())
    with observers.phase("nothing"):
        observers.on_event("kind", "text")
        observers.on_worker(WorkerInfo("w0", "cpu", 0.0, 0), alive=False)
    assert heard == ["w0 False"]
