"""The ledger of dollars: what every machine has cost so far, what it went into, and what is left.

Money is whole numbers: prices in billionths of a dollar an hour, times in nanoseconds. Costs are exact
products and sums of them; only answers are rounded, once, to a float. So the parts always add up to the
total, in whatever order things happen.

Every dollar is in exactly one part:

- `booting`: paid for a machine before it can work;
- `learner`, `learner_idle`: machines of the learner, while it trains and while it waits;
- `idle`: a rollout machine serves and has nothing in flight;
- and while it has work, its dollars are shared out evenly over its tokens: `trained`, `evaluated`, `stale`
  (dropped as too old), `uninformative` (of groups without a signal, which others replaced), `failed` (no
  usable answer), `lost` (no worker could go on from them), `open` (not decided yet). Where it is not known
  which machine made which tokens, the dollars of all these machines are shared out over all these tokens:
  each costs the fleet's average.

Booting, idle, stale, uninformative, failed, lost and learner_idle are wasted; the rest, open tokens too, is
useful so far.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from echo_planes.errors import ConfigError, RefusedError
from echo_planes.types import Market

Role = Literal["rollout", "learner"]
State = Literal["booting", "idle", "busy", "serving"]  # serving: idle or busy, `Accounting.worked` says which
Fate = Literal["trained", "evaluated", "stale", "uninformative", "failed", "lost"]
FATES: tuple[Fate, ...] = ("trained", "evaluated", "stale", "uninformative", "failed", "lost")

USEFUL = ("learner", "trained", "evaluated", "open")
WASTED = ("booting", "idle", "stale", "uninformative", "failed", "lost", "learner_idle")
RECENT_STEPS = 20  # the price of a step is the median of so many

_PRICE_UNITS = 10**9  # of 1 $/h
_TIME_UNITS = 10**9  # of 1 s
_UNITS_PER_USD = 3600 * _PRICE_UNITS * _TIME_UNITS


class _Accrual:
    """Units spent by whatever runs: rate x now - offset, so that reading it takes no loop."""

    __slots__ = ("_offset", "rate")

    def __init__(self) -> None:
        self.rate = 0
        self._offset = 0

    def add(self, price: int, now: int) -> None:
        """`price` more is paid from `now` on; a negative one ends what was added before."""
        self.rate += price
        self._offset += price * now

    def at(self, now: int) -> int:
        return self.rate * now - self._offset


@dataclass(slots=True)
class _Machine:
    role: Role
    sku: str
    market: Market
    price: int  # 0: stopped, or free
    state: State
    total: _Accrual = field(default_factory=_Accrual)
    states: dict[State, _Accrual] = field(default_factory=dict)  # as a rollout machine, or booting
    made: int = 0  # tokens
    fates: Counter[Fate] = field(default_factory=Counter)
    # While it serves. What is accounted for is known to be busy or idle.
    served: _Accrual = field(default_factory=_Accrual)  # time
    accounted: int = 0  # of it
    busy: int = 0  # of that
    life_busy: int = 0  # of that, since it was last started
    accounted_units: int = 0
    busy_units: int = 0  # of them

    def spent_in(self, state: State, now: int) -> int:
        return self.states[state].at(now) if state in self.states else 0

    def account(self, busy: int, now: int) -> None:
        """Of the time not accounted for, so much was busy."""
        if passed := self.served.at(now) - self.accounted:
            fresh = self.spent_in("serving", now) - self.accounted_units
            self.busy_units += fresh * busy // passed
            self.accounted_units += fresh
            self.accounted += passed
            self.busy += busy
            self.life_busy += busy

    def likely_busy(self, time: int) -> int:
        """Of a time, or of its dollars, that is not accounted for: as much as of what was; at first all."""
        return time * self.busy // self.accounted if self.accounted else time

    def settle_life(self, now: int) -> None:
        """It stops, or starts anew: no account of its last moments will come."""
        self.account(self.likely_busy(self.served.at(now) - self.accounted), now)
        self.life_busy = 0

    def at_work(self, now: int) -> tuple[int, int]:
        """Cost of its busy and of its idle time."""
        serving = self.spent_in("serving", now)
        busy = self.busy_units + self.likely_busy(serving - self.accounted_units)
        return self.spent_in("busy", now) + busy, self.spent_in("idle", now) + serving - busy


class Accounting:
    """Dollars by machine, by SKU, by step, and by what they went into.

    Pure: the clock is passed in. Where it is behind the last event, that event's time is taken, so that
    nothing is ever paid back.
    """

    def __init__(self) -> None:
        self._now = 0  # of the last event
        self._machines: dict[str, _Machine] = {}
        self._total = _Accrual()
        self._learner = _Accrual()
        self._skus: dict[tuple[str, Market], _Accrual] = {}
        self._learner_idle = 0
        self._step_total = self._step_learner = 0  # spent until the last step ended
        self._ready_total = 0  # spent until the first step could begin
        self._step_usd: deque[float] = deque(maxlen=RECENT_STEPS)
        self._trained_tokens = 0
        self._fates: Counter[Fate] = Counter()  # tokens of the fleet, of no known machine
        self._undecided = 0

    # --- what happens ----------------------------------------------------------------------------

    def start(
        self,
        machine: str,
        usd_per_hour: float,
        now_s: float,
        *,
        sku: str = "",
        market: Market = "on_demand",
        role: Role = "rollout",
        state: State | None = None,
    ) -> None:
        """A machine costs money from now on. Starting it again settles the time before at its price then.

        Args:
            machine: its name.
            usd_per_hour: its price; 0: paid for already.
            now_s: when.
            sku, market: what it is, and how it was bought.
            role: whom it works for.
            state: from now on; default: booting, and busy for a machine of the learner.

        Raises:
            ConfigError: the price is negative or not a number.
        """
        if not (math.isfinite(usd_per_hour) and usd_per_hour >= 0):
            raise ConfigError(
                f"machine {machine}: price {usd_per_hour} $/h; give a number of dollars, 0 or more"
            )
        now = self._advance(now_s)
        state = state or ("busy" if role == "learner" else "booting")
        known = self._machines.get(machine)
        if known is None:
            known = self._machines[machine] = _Machine(role, sku, market, 0, state)
        self._pay(known, -known.price, now)
        known.settle_life(now)
        known.role, known.sku, known.market, known.state = role, sku, market, state
        known.price = _whole(usd_per_hour, _PRICE_UNITS)
        self._pay(known, known.price, now)

    def stop(self, machine: str, now_s: float) -> None:
        """A machine costs nothing from now on."""
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is not None:
            self._pay(known, -known.price, now)
            known.settle_life(now)
            known.price = 0

    def mark(self, machine: str, state: State, now_s: float) -> None:
        """Set a machine's state from now on: `booting`, `idle` (nothing in flight), `busy`, or `serving`.

        News of a machine that is not running comes too late and changes nothing.
        """
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is not None and known.state != state:
            self._pay(known, -known.price, now)
            known.state = state
            self._pay(known, known.price, now)

    def worked(self, machine: str, busy_s: float, now_s: float) -> None:
        """Account for a machine's busy time while it was `serving`: the rest of that time was idle.

        The time since the last account gets what is new of `busy_s`, and never more than passed. Time of
        which there is no account, yet or ever, counts as busy in the same share.

        Args:
            machine: its name.
            busy_s: seconds with something in flight, from its last start until `now_s`.
        """
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is not None:
            new = max(0, _whole(busy_s, _TIME_UNITS) - known.life_busy)
            known.account(min(new, known.served.at(now) - known.accounted), now)

    def made(self, machine: str, tokens: int) -> None:
        """A machine sampled so many more tokens. One that never started has no dollars to share out."""
        if machine in self._machines:
            self._machines[machine].made += _tokens(tokens)

    def settle(self, machine: str | None, fate: Fate, tokens: int) -> None:
        """So many of its tokens ended like this. Each is to be settled once, however often it is trained.

        None: tokens of no known machine; they are shared among machines that have none of their own.
        """
        if machine is None:
            self._fates[fate] += _tokens(tokens)
        elif machine in self._machines:
            self._machines[machine].fates[fate] += _tokens(tokens)

    def undecided(self, tokens: int) -> None:
        """So many more tokens, of no known machine, have no fate as of now."""
        self._undecided = _tokens(tokens)

    def ready(self, now_s: float) -> None:
        """The first step can begin: what was spent until now is in its dollars, but in no step's price."""
        self._ready_total = self._total.at(self._advance(now_s))

    def step(self, now_s: float, trained_tokens: int, learner_idle_s: float) -> float:
        """A training step ended; returns its dollars, of all machines, since the step before.

        Args:
            now_s: when.
            trained_tokens: in its batch.
            learner_idle_s: seconds of it in which the learner waited.
        """
        self._trained_tokens += _tokens(trained_tokens)
        now = self._advance(now_s)
        total, learner = self._total.at(now), self._learner.at(now)
        idle = _whole(max(0.0, learner_idle_s), _TIME_UNITS)
        self._learner_idle += min(self._learner.rate * idle, learner - self._step_learner)
        self._step_usd.append((total - max(self._step_total, self._ready_total)) / _UNITS_PER_USD)
        spent, self._step_total, self._step_learner = total - self._step_total, total, learner
        return spent / _UNITS_PER_USD

    # --- what it came to -------------------------------------------------------------------------

    def usd(self, machine: str, now_s: float) -> float:
        """Spent on one machine."""
        known = self._machines.get(machine)
        return known.total.at(self._at(now_s)) / _UNITS_PER_USD if known is not None else 0.0

    def total(self, now_s: float) -> Fraction:
        """Dollars spent on all machines, exactly."""
        return Fraction(self._total.at(self._at(now_s)), _UNITS_PER_USD)

    def total_usd(self, now_s: float) -> float:
        """Dollars spent on all machines. Takes no longer with more machines."""
        return self._total.at(self._at(now_s)) / _UNITS_PER_USD

    def usd_by_sku(self, now_s: float) -> dict[str, float]:
        """Dollars by SKU and market ("L4 spot")."""
        now, skus = self._at(now_s), sorted(self._skus.items())
        return {f"{sku} {market}".strip(): spent.at(now) / _UNITS_PER_USD for (sku, market), spent in skus}

    def parts(self, now_s: float) -> dict[str, Fraction]:
        """Dollars by what they went into (`USEFUL` and `WASTED`), exactly: they add up to `total`."""
        now = self._at(now_s)
        units = dict.fromkeys((*USEFUL, *WASTED), 0)
        units["learner_idle"] = self._learner_idle
        units["learner"] = self._learner.at(now) - self._learner_idle
        of_all = self._fates.total() + self._undecided
        pooled = 0
        for known in self._machines.values():
            units["booting"] += known.spent_in("booting", now)
            busy, idle = known.at_work(now)
            units["idle"] += idle
            tokens = max(known.made, known.fates.total())
            if tokens:
                _share_out(busy, known.fates, tokens, units)
            elif of_all:
                pooled += busy
            else:  # nothing came of it: of a machine that is gone, nothing will
                units["open" if known.price else "lost"] += busy
        if of_all:
            _share_out(pooled, self._fates, of_all, units)
        return {part: Fraction(value, _UNITS_PER_USD) for part, value in units.items()}

    def recent_step_usd(self) -> float | None:
        """Median dollars of the recent steps; None before the first."""
        return statistics.median(self._step_usd) if self._step_usd else None

    def projected_usd(self, now_s: float, steps_left: int) -> float | None:
        """Projected cost of the whole run: dollars so far and the steps left at the recent price."""
        usd = self.recent_step_usd()
        return None if usd is None else self.total_usd(now_s) + steps_left * usd

    def summary(self, now_s: float, steps_left: int | None = None) -> dict[str, Any]:
        """All of it as plain numbers, for metrics, report and step line. None: not known yet."""
        parts = self.parts(now_s)
        total = self.total_usd(now_s)
        wasted = float(sum(parts[part] for part in WASTED))
        return {
            "usd_total": total,
            "usd_per_step": self.recent_step_usd(),
            "usd_per_million_tokens": total / (self._trained_tokens / 1e6) if self._trained_tokens else None,
            "usd_useful": float(sum(parts[part] for part in USEFUL)),
            "usd_wasted": wasted,
            "wasted_share": wasted / total if total else 0.0,
            "usd_by_part": {part: float(value) for part, value in parts.items()},
            "usd_by_sku": self.usd_by_sku(now_s),
            "usd_projected": None if steps_left is None else self.projected_usd(now_s, steps_left),
        }

    # --- inside ----------------------------------------------------------------------------------

    def _at(self, now_s: float) -> int:
        return max(self._now, _whole(now_s, _TIME_UNITS))

    def _advance(self, now_s: float) -> int:
        self._now = self._at(now_s)
        return self._now

    def _pay(self, machine: _Machine, price: int, now: int) -> None:
        """From now on `price` more for this machine as it is, everywhere it counts."""
        if price:
            machine.total.add(price, now)
            self._total.add(price, now)
            self._skus.setdefault((machine.sku, machine.market), _Accrual()).add(price, now)
            if machine.state == "serving":
                machine.served.add(1 if price > 0 else -1, now)
            if machine.role == "learner" and machine.state != "booting":
                self._learner.add(price, now)
            else:
                machine.states.setdefault(machine.state, _Accrual()).add(price, now)


class Budget:
    """Dollars a run may spend.

    Args:
        usd: in total.
        book: what it spends.
        earlier_usd: spent before the book was opened, by the same run before it was resumed.

    Raises:
        ConfigError: the budget is negative or not a number.
    """

    def __init__(self, usd: float, book: Accounting, *, earlier_usd: float = 0.0) -> None:
        for name, value in (("budget", usd), ("spent before", earlier_usd)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: {value} $; give a number of dollars, 0 or more")
        self._left = _decimal(usd) - _decimal(earlier_usd)
        self._book = book

    def left(self, now_s: float) -> float:
        """Dollars; negative where more was spent."""
        return float(self._left - self._book.total(now_s))

    def spent(self, now_s: float) -> bool:
        """Whether nothing is left."""
        return self._book.total(now_s) >= self._left

    def steps_left(self, now_s: float) -> int | None:
        """Whole steps that what is left pays for, at the recent price; None where that is not known."""
        step_usd, left = self._book.recent_step_usd(), self._left - self._book.total(now_s)
        return max(0, math.floor(left / Fraction(step_usd))) if step_usd else None


def _share_out(units: int, fates: Mapping[Fate, int], tokens: int, parts: dict[str, int]) -> None:
    """Add the units to the parts by the fate of so many tokens; those without one are open."""
    rest = units
    for fate in FATES:
        parts[fate] += (share := units * fates.get(fate, 0) // tokens)
        rest -= share
    parts["open"] += rest


def _decimal(value: float) -> Fraction:
    """The decimal number that was written, where the float nearest to it is what came."""
    return Fraction(str(value))


def _whole(value: float, units: int) -> int:
    return round(value * units)


def _tokens(count: int) -> int:
    if count < 0:
        raise RefusedError(f"{count} tokens were reported; a count cannot be negative")
    return int(count)
