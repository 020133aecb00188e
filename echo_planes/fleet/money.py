"""Ledger of dollars: the cost of every machine so far, the part each dollar belongs to, and the budget left.

Money is integer arithmetic: prices in billionths of a dollar an hour, times in nanoseconds. Costs are exact
products and sums; a float result is rounded once, at the end. So the parts always add up to the total, in
any order of events.

Every dollar is in exactly one part:

- `booting`: price of a machine before it can work;
- `learner`, `learner_idle`: machines of the learner, while it trains and while it waits;
- `idle`: a rollout machine that serves and has nothing in flight;
- the dollars of a busy rollout machine are divided evenly over its tokens: `trained`, `evaluated`, `stale`
  (dropped as too old), `uninformative` (of groups without a signal, which others replaced), `failed` (no
  usable answer), `lost` (no worker could go on from them), `open` (not decided yet). If it is not known which
  machine made which tokens, the dollars of all these machines are divided evenly over all these tokens.

Booting, idle, stale, uninformative, failed, lost and learner_idle count as wasted. The rest counts as useful,
open tokens included.
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
State = Literal["booting", "idle", "busy", "serving"]  # serving: idle or busy, divided by `Accounting.worked`
Fate = Literal["trained", "evaluated", "stale", "uninformative", "failed", "lost"]
FATES: tuple[Fate, ...] = ("trained", "evaluated", "stale", "uninformative", "failed", "lost")

USEFUL = ("learner", "trained", "evaluated", "open")
WASTED = ("booting", "idle", "stale", "uninformative", "failed", "lost", "learner_idle")
RECENT_STEPS = 20  # steps whose median is the price of a step

_PRICE_UNITS = 10**9  # of 1 $/h
_TIME_UNITS = 10**9  # of 1 s
_UNITS_PER_USD = 3600 * _PRICE_UNITS * _TIME_UNITS


class _Accrual:
    """Units spent so far at a changing rate, as rate x now - offset: a read takes constant time."""

    __slots__ = ("_offset", "rate")

    def __init__(self) -> None:
        self.rate = 0
        self._offset = 0

    def add(self, price: int, now: int) -> None:
        """Raise the rate by `price` from `now` on; a negative price lowers it."""
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
    # In state `serving`: time and money are accounted once they are divided into busy and idle.
    served: _Accrual = field(default_factory=_Accrual)  # time
    accounted: int = 0  # part of `served`
    busy: int = 0  # part of `accounted`
    life_busy: int = 0  # part of `busy` since the machine's last start
    accounted_units: int = 0
    busy_units: int = 0  # part of `accounted_units`

    def spent_in(self, state: State, now: int) -> int:
        return self.states[state].at(now) if state in self.states else 0

    def account(self, busy: int, now: int) -> None:
        """Account for the serving time since the last account, of which `busy` was busy."""
        if passed := self.served.at(now) - self.accounted:
            fresh = self.spent_in("serving", now) - self.accounted_units
            self.busy_units += fresh * busy // passed
            self.accounted_units += fresh
            self.accounted += passed
            self.busy += busy
            self.life_busy += busy

    def likely_busy(self, time: int) -> int:
        """Estimate the busy part of a time, or of its dollars, from the accounted time; at first all."""
        return time * self.busy // self.accounted if self.accounted else time

    def settle_life(self, now: int) -> None:
        """Estimate the account of the last moments, which no machine reports after a stop or restart."""
        self.account(self.likely_busy(self.served.at(now) - self.accounted), now)
        self.life_busy = 0

    def at_work(self, now: int) -> tuple[int, int]:
        """Return the cost of the busy and of the idle time."""
        serving = self.spent_in("serving", now)
        busy = self.busy_units + self.likely_busy(serving - self.accounted_units)
        return self.spent_in("busy", now) + busy, self.spent_in("idle", now) + serving - busy


class Accounting:
    """Dollars by machine, by SKU, by step and by part.

    Pure: the caller passes the time in. A time before the last event counts as the time of that event, so no
    cost ever decreases.
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
        self._fates: Counter[Fate] = Counter()  # tokens of no known machine
        self._undecided = 0

    # --- events ----------------------------------------------------------------------------------

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
        """Charge for a machine from now on. A restart charges the time before at the earlier price.

        Args:
            machine: its name.
            usd_per_hour: its price; 0: paid for already.
            now_s: the time.
            sku, market: its hardware and its market.
            role: plane that it works for.
            state: from now on; default: booting, or busy for a machine of the learner.

        Raises:
            ConfigError: the price is negative or not a number.
        """
        price = _price(machine, usd_per_hour)
        now = self._advance(now_s)
        state = state or ("busy" if role == "learner" else "booting")
        known = self._machines.get(machine)
        if known is None:
            known = self._machines[machine] = _Machine(role, sku, market, 0, state)
        self._pay(known, -known.price, now)
        known.settle_life(now)
        known.role, known.sku, known.market, known.state = role, sku, market, state
        known.price = price
        self._pay(known, known.price, now)

    def reprice(self, machine: str, usd_per_hour: float, now_s: float) -> None:
        """Change the price of a machine from now on; its cost so far stays.

        Raises:
            ConfigError: the price is negative or not a number.
        """
        price = _price(machine, usd_per_hour)
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is not None:
            self._pay(known, -known.price, now)
            known.price = price
            self._pay(known, known.price, now)

    def stop(self, machine: str, now_s: float) -> None:
        """Stop charging for a machine."""
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is not None:
            self._pay(known, -known.price, now)
            known.settle_life(now)
            known.price = 0

    def mark(self, machine: str, state: State, now_s: float) -> None:
        """Set a machine's state from now on: `booting`, `idle` (nothing in flight), `busy`, or `serving`.

        An unknown machine is ignored, and a stopped one costs nothing in any state.
        """
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is not None and known.state != state:
            self._pay(known, -known.price, now)
            known.state = state
            self._pay(known, known.price, now)

    def worked(self, machine: str, busy_s: float, now_s: float) -> None:
        """Account for a machine's busy time while it was `serving`; the rest of that time was idle.

        The increase of `busy_s` counts for the time since the last account, up to its length. Time without an
        account counts as busy in the same share as accounted time.

        Args:
            machine: its name.
            busy_s: seconds with something in flight, from its last start until `now_s`.
            now_s: the time.
        """
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is not None:
            new = max(0, _whole(busy_s, _TIME_UNITS) - known.life_busy)
            known.account(min(new, known.served.at(now) - known.accounted), now)

    def made(self, machine: str, tokens: int) -> None:
        """Add sampled tokens to a machine. A machine that never started has no dollars and is ignored."""
        if machine in self._machines:
            self._machines[machine].made += _tokens(tokens)

    def settle(self, machine: str | None, fate: Fate, tokens: int) -> None:
        """Set the fate of a number of tokens. Settle each token once, however often it is trained.

        Args:
            machine: maker of the tokens; None if unknown: then machines without own tokens share them.
            fate: fate of the tokens.
            tokens: number of tokens.
        """
        if machine is None:
            self._fates[fate] += _tokens(tokens)
        elif machine in self._machines:
            self._machines[machine].fates[fate] += _tokens(tokens)

    def undecided(self, tokens: int) -> None:
        """Set the number of tokens of no known machine that have no fate yet."""
        self._undecided = _tokens(tokens)

    def ready(self, now_s: float) -> None:
        """Mark the first step's start. Its dollars include the cost until now; prices of steps do not."""
        self._ready_total = self._total.at(self._advance(now_s))

    def step(self, now_s: float, trained_tokens: int, learner_idle_s: float) -> float:
        """Record the end of a training step and return the dollars of all machines since the step before.

        Args:
            now_s: the time.
            trained_tokens: in its batch.
            learner_idle_s: seconds since the step before in which the learner waited.
        """
        self._trained_tokens += _tokens(trained_tokens)
        now = self._advance(now_s)
        total, learner = self._total.at(now), self._learner.at(now)
        idle = _whole(max(0.0, learner_idle_s), _TIME_UNITS)
        self._learner_idle += min(self._learner.rate * idle, learner - self._step_learner)
        self._step_usd.append((total - max(self._step_total, self._ready_total)) / _UNITS_PER_USD)
        spent, self._step_total, self._step_learner = total - self._step_total, total, learner
        return spent / _UNITS_PER_USD

    # --- results ---------------------------------------------------------------------------------

    def usd(self, machine: str, now_s: float) -> float:
        """Return the dollars spent on one machine."""
        known = self._machines.get(machine)
        return known.total.at(self._at(now_s)) / _UNITS_PER_USD if known is not None else 0.0

    def total(self, now_s: float) -> Fraction:
        """Return the exact dollars spent on all machines."""
        return Fraction(self._total.at(self._at(now_s)), _UNITS_PER_USD)

    def total_usd(self, now_s: float) -> float:
        """Return the dollars spent on all machines, in constant time."""
        return self._total.at(self._at(now_s)) / _UNITS_PER_USD

    def usd_by_sku(self, now_s: float) -> dict[str, float]:
        """Return the dollars by SKU and market ("L4 spot")."""
        now, skus = self._at(now_s), sorted(self._skus.items())
        return {f"{sku} {market}".strip(): spent.at(now) / _UNITS_PER_USD for (sku, market), spent in skus}

    def parts(self, now_s: float) -> dict[str, Fraction]:
        """Return the exact dollars by part (`USEFUL` and `WASTED`); they add up to `total`."""
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
            else:  # no token yet: a machine that is gone makes none any more
                units["open" if known.price else "lost"] += busy
        if of_all:
            _share_out(pooled, self._fates, of_all, units)
        return {part: Fraction(value, _UNITS_PER_USD) for part, value in units.items()}

    def recent_step_usd(self) -> float | None:
        """Return the median dollars of the recent steps; None before the first."""
        return statistics.median(self._step_usd) if self._step_usd else None

    def projected_usd(self, now_s: float, steps_left: int) -> float | None:
        """Return the projected dollars of the whole run: the cost so far and `steps_left` recent prices."""
        usd = self.recent_step_usd()
        return None if usd is None else self.total_usd(now_s) + steps_left * usd

    def summary(self, now_s: float, steps_left: int | None = None) -> dict[str, Any]:
        """Return all figures as plain numbers, for metrics, report and step line. None: not known yet."""
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
        """Raise the rate of every account that this machine counts towards in its present state."""
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
    """Budget of a run, in dollars.

    Args:
        usd: in total.
        book: accounting of the costs.
        earlier_usd: spent by earlier parts of the same run, before it was resumed.

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
        """Return the dollars left; negative if more was spent."""
        return float(self._left - self._book.total(now_s))

    def spent(self, now_s: float) -> bool:
        """Return whether nothing is left."""
        return self._book.total(now_s) >= self._left

    def steps_left(self, now_s: float) -> int | None:
        """Return the whole steps that the rest pays for at the recent price; None without a recent price."""
        step_usd, left = self._book.recent_step_usd(), self._left - self._book.total(now_s)
        return max(0, math.floor(left / Fraction(step_usd))) if step_usd else None


def _share_out(units: int, fates: Mapping[Fate, int], tokens: int, parts: dict[str, int]) -> None:
    """Divide units evenly over `tokens` tokens and add them to the parts; tokens without a fate are open."""
    rest = units
    for fate in FATES:
        parts[fate] += (share := units * fates.get(fate, 0) // tokens)
        rest -= share
    parts["open"] += rest


def _decimal(value: float) -> Fraction:
    """Return the decimal number that the float was written as: 0.8 is 4/5."""
    return Fraction(str(value))


def _price(machine: str, usd_per_hour: float) -> int:
    if not (math.isfinite(usd_per_hour) and usd_per_hour >= 0):
        raise ConfigError(f"machine {machine}: price {usd_per_hour} $/h; give a number of dollars, 0 or more")
    return _whole(usd_per_hour, _PRICE_UNITS)


def _whole(value: float, units: int) -> int:
    return round(value * units)


def _tokens(count: int) -> int:
    if count < 0:
        raise RefusedError(f"{count} tokens were reported; a count cannot be negative")
    return int(count)
