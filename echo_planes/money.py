"""The ledger of dollars: what every machine has cost so far, what it went into, and what is left.

Money is whole numbers. Prices are kept to 1e-24 $/h (as the decimal number that was written) and times to
1e-15 s, so that costs are exact products and sums; only answers are rounded, once, to a float. So the parts
always add up to the total, in whatever order things happen.

Every dollar is in exactly one part:

- `learner`, `learner_idle`: machines of the learner, while it trains and while it waits;
- `booting`: paid for a rollout machine before it serves;  `idle`: it serves and has nothing in flight;
- and while a machine has work, its dollars are shared out evenly over its tokens: `trained`, `evaluated`,
  `stale` (dropped as too old), `failed` (no usable answer), `lost` (went with the machine), `open` (not
  decided yet).

Booting, idle, stale, failed, lost and learner_idle are wasted; the rest, open tokens too, is useful so far.
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
State = Literal["booting", "idle", "busy"]
Fate = Literal["trained", "evaluated", "stale", "failed", "lost"]
FATES: tuple[Fate, ...] = ("trained", "evaluated", "stale", "failed", "lost")

USEFUL = ("learner", "trained", "evaluated", "open")
WASTED = ("booting", "idle", "stale", "failed", "lost", "learner_idle")
RECENT_STEPS = 20  # the price of a step is the median of so many

_PRICE_UNITS = 10**24  # of 1 $/h
_TIME_UNITS = 10**15  # of 1 s
_UNITS_PER_USD = 3600 * _PRICE_UNITS * _TIME_UNITS


class _Accrual:
    """Units spent by whatever runs: rate x now - offset, so that reading it takes no loop."""

    __slots__ = ("_offset", "_rate")

    def __init__(self) -> None:
        self._rate = 0
        self._offset = 0

    def add(self, price: int, now: int) -> None:
        """`price` more is paid from `now` on; a negative one ends what was added before."""
        self._rate += price
        self._offset += price * now

    def at(self, now: int) -> int:
        return self._rate * now - self._offset


@dataclass(slots=True)
class _Machine:
    role: Role
    sku: str
    market: Market
    price: int  # 0: stopped, or free
    state: State
    total: _Accrual = field(default_factory=_Accrual)
    states: dict[State, _Accrual] = field(default_factory=dict)  # as a rollout machine
    made: int = 0  # tokens
    fates: Counter[Fate] = field(default_factory=Counter)

    def spent_in(self, state: State, now: int) -> int:
        return self.states[state].at(now) if state in self.states else 0


class MoneyBook:
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
        self._step_now: int | None = None  # when the last step ended
        self._step_total = 0  # spent until then
        self._step_learner = 0
        self._step_usd: deque[float] = deque(maxlen=RECENT_STEPS)
        self._trained_tokens = 0

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
        state: State = "booting",
    ) -> None:
        """A machine costs money from now on. Starting it again settles the time before at its price then.

        Args:
            machine: its name.
            usd_per_hour: its price; 0: paid for already.
            now_s: when.
            sku: what it is.
            market: how it was bought.
            role: whom it works for.
            state: of a rollout machine, from now on.

        Raises:
            ConfigError: the price is negative or not a number.
        """
        if not (math.isfinite(usd_per_hour) and usd_per_hour >= 0):
            raise ConfigError(
                f"machine {machine}: price {usd_per_hour} $/h; give a number of dollars, 0 or more"
            )
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is None:
            known = self._machines[machine] = _Machine(role, sku, market, 0, state)
        self._pay(known, -known.price, now)
        known.role, known.sku, known.market, known.state = role, sku, market, state
        known.price = _whole(usd_per_hour, _PRICE_UNITS)
        self._pay(known, known.price, now)
        if self._step_now is None:
            self._step_now = now

    def stop(self, machine: str, now_s: float) -> None:
        """A machine costs nothing from now on."""
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is not None:
            self._pay(known, -known.price, now)
            known.price = 0

    def mark(self, machine: str, state: State, now_s: float) -> None:
        """What a machine does from now on: `booting`, `idle` (nothing in flight) or `busy`.

        News of a machine that is not running comes too late and changes nothing.
        """
        now = self._advance(now_s)
        known = self._machines.get(machine)
        if known is not None and known.state != state:
            self._pay(known, -known.price, now)
            known.state = state
            self._pay(known, known.price, now)

    def made(self, machine: str, tokens: int) -> None:
        """A machine sampled so many more tokens. For one that never started there are no dollars to share."""
        if machine in self._machines:
            self._machines[machine].made += _tokens(tokens)

    def settle(self, machine: str, fate: Fate, tokens: int) -> None:
        """So many of its tokens ended like this. Each is to be settled once, however often it is trained."""
        if machine in self._machines:
            self._machines[machine].fates[fate] += _tokens(tokens)

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
        passed = now - (now if self._step_now is None else self._step_now)
        idle = min(_whole(max(0.0, learner_idle_s), _TIME_UNITS), passed)
        if passed:
            self._learner_idle += (learner - self._step_learner) * idle // passed
        step_usd = (total - self._step_total) / _UNITS_PER_USD
        self._step_usd.append(step_usd)
        self._step_now, self._step_total, self._step_learner = now, total, learner
        return step_usd

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
        now = self._at(now_s)
        return {
            f"{sku} {market}".strip(): accrual.at(now) / _UNITS_PER_USD
            for (sku, market), accrual in sorted(self._skus.items())
        }

    def parts(self, now_s: float) -> dict[str, Fraction]:
        """Dollars by what they went into (`USEFUL` and `WASTED`), exactly: they add up to `total`."""
        now = self._at(now_s)
        units = dict.fromkeys((*USEFUL, *WASTED), 0)
        learner = self._learner.at(now)
        units["learner_idle"] = self._learner_idle
        units["learner"] = learner - self._learner_idle
        for known in self._machines.values():
            units["booting"] += known.spent_in("booting", now)
            units["idle"] += known.spent_in("idle", now)
            for part, share in _shared_out(known, known.spent_in("busy", now)).items():
                units[part] += share
        return {part: Fraction(value, _UNITS_PER_USD) for part, value in units.items()}

    def recent_step_usd(self) -> float | None:
        """Median dollars of the recent steps; None before the first."""
        return statistics.median(self._step_usd) if self._step_usd else None

    def projected_usd(self, now_s: float, steps_left: int) -> float | None:
        """What the run will have cost: dollars so far and the steps left at the recent price."""
        step_usd = self.recent_step_usd()
        return None if step_usd is None else self.total_usd(now_s) + steps_left * step_usd

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
            if machine.role == "learner":
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

    def __init__(self, usd: float, book: MoneyBook, *, earlier_usd: float = 0.0) -> None:
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
        step_usd = self._book.recent_step_usd()
        if not step_usd:
            return None
        return max(0, math.floor((self._left - self._book.total(now_s)) / Fraction(step_usd)))


def _shared_out(machine: _Machine, busy: int) -> Mapping[str, int]:
    """The dollars of a machine at work, by the fate of its tokens; they add up to `busy`."""
    tokens = max(machine.made, machine.fates.total())
    if tokens == 0:
        # Nothing came of it: of a machine that is gone, nothing will.
        return {"open" if machine.price else "lost": busy}
    shares: dict[str, int] = {fate: busy * machine.fates[fate] // tokens for fate in FATES}
    return {**shares, "open": busy - sum(shares.values())}


def _decimal(value: float) -> Fraction:
    """The decimal number that was written, where the float nearest to it is what came."""
    return Fraction(str(value))


def _whole(value: float, units: int) -> int:
    return round(_decimal(value) * units)


def _tokens(count: int) -> int:
    if count < 0:
        raise RefusedError(f"{count} tokens were reported; a count cannot be negative")
    return int(count)
