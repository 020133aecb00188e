"""Watch on prices that change during a run: asks `fleet.prices` at intervals, and informs its followers."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from echo_planes.cluster.clock import Clock
from echo_planes.config.extensions import extension, in_words
from echo_planes.config.schema import Config
from echo_planes.errors import RunError
from echo_planes.fleet.price_source import Prices, PriceSource, looked_through
from echo_planes.loop.observers import QuietObserver
from echo_planes.loop.planes import Observer

ANSWER_LIMIT_S = 10.0
MakePriceSource = Callable[[Config, Clock], PriceSource]
PRICE_SOURCES: dict[str, MakePriceSource] = {}  # besides `fixed`, the prices in the fleet's settings
_SOURCE = ""  # stands for the source as a whole, in the place of an instance type's name


class PriceWatch(QuietObserver):
    """Asks a price source. If a price is missing or invalid, the last one stays; the watch reports it once.

    A thread makes and calls the source, so that a blocking source delays nothing. The watch does not call it
    again before it has answered. If the answer is awaitable, the event loop awaits it.

    Args:
        config: the run's settings.
        clock: passed to the source.
        journal: receives an event when a trouble begins, and one when none is left.
        followers: called with the prices that changed, dollars an hour by instance type.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        journal: Observer,
        followers: Sequence[Callable[[Mapping[str, float]], None]],
    ) -> None:
        self._name = f"fleet.prices={config.fleet.prices}"
        self._every_s = config.fleet.prices_every_s
        self._journal = journal
        self._followers = followers
        make = extension("fleet.prices", config.fleet.prices, PRICE_SOURCES)
        self._make: Callable[[], PriceSource] = lambda: make(config, clock)
        self._source: PriceSource | None = None
        self._is_asked = False  # the source was called and has not answered yet
        self._prices = {one.instance_type: one.usd_per_hour for one in config.fleet.workers}
        self._troubled: set[str] = set()  # instance types, or `_SOURCE`, whose trouble was reported

    async def run(self, hands: object) -> None:
        """Ask at intervals until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()

    async def look(self) -> None:
        """Ask once, for at most `ANSWER_LIMIT_S` seconds, and pass changed prices to the followers."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                found = looked_through(await self._ask(), self._prices)
        except TimeoutError:
            found = Prices({}, {_SOURCE: f"no answer within {ANSWER_LIMIT_S:g} s"})
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except RunError as why:
            found = Prices({}, {_SOURCE: str(why)})
        except BaseException as error:  # noqa: BLE001  user code may raise anything, SystemExit too
            found = Prices({}, {_SOURCE: in_words(error)})
        self._tell(found.refused)
        changed = {
            instance_type: usd
            for instance_type, usd in found.usd_per_hour.items()
            if usd != self._prices[instance_type]
        }
        if changed:
            moves = [
                f"{instance_type} ${self._prices[instance_type]:g} -> ${usd:g}/h"
                for instance_type, usd in changed.items()
            ]
            self._prices |= changed
            self._journal.on_event("price", ", ".join(moves))
            for follow in self._followers:
                follow(changed)

    def _tell(self, refused: Mapping[str, str]) -> None:
        fresh = {
            instance_type: why
            for instance_type, why in refused.items()
            if instance_type not in self._troubled
        }
        is_over = self._troubled and not refused
        self._troubled = set(refused)
        if fresh:
            text = _joined(
                f"{instance_type}: {why}" if instance_type else why for instance_type, why in fresh.items()
            )
            self._journal.on_event("prices", f"{self._name}: {text}; the last prices stay")
        elif is_over:
            self._journal.on_event("prices", f"{self._name}: the prices are there again")

    async def _ask(self) -> object:
        if self._is_asked:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()

        def ask() -> None:
            found: object = None
            error: Exception | None = None
            try:
                if self._source is None:
                    self._source = self._make()
                found = self._source()
            except BaseException as why:  # noqa: BLE001  as above; `_ask` raises it again
                error = RunError(in_words(why))
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._settle, answer, found, error)

        self._is_asked = True
        threading.Thread(target=ask, daemon=True, name="price source").start()
        found = await answer
        return await found if inspect.isawaitable(found) else found

    def _settle(self, answer: asyncio.Future[object], found: object, error: Exception | None) -> None:
        self._is_asked = False
        if answer.done():  # the wait has timed out or was cancelled
            if inspect.iscoroutine(found):
                found.close()
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found)


def _joined(reasons: Iterable[str]) -> str:
    shown = list(reasons)
    return "; ".join(shown[:3]) + (f"; and {len(shown) - 3} more" if len(shown) > 3 else "")
