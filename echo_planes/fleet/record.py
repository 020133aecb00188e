"""Record of a fleet that follows price and need: its actions, and its standing between them.

One object of numbers each time, for the report and for a later look at why a machine was bought.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from echo_planes.fleet.capacity import Need
from echo_planes.fleet.reconciler import Reconciler
from echo_planes.fleet.workers import Activate, FleetAction, Launch, Leave

EVERY_S = 60.0  # at least, between two records of a fleet to which nothing is done
DIGITS = 4  # of a number: estimates that move less have not changed


class FleetRecord:
    """The record of one fleet: give it every tick.

    Args:
        fleet: whose.
    """

    def __init__(self, fleet: Reconciler) -> None:
        self._fleet = fleet
        self._offers: dict[str, str] = {}  # of the workers that were launched: one that is gone has none
        self._last: tuple[float, Mapping[str, Any]] | None = None

    def begun(self, actions: Sequence[FleetAction]) -> None:
        """The first workers were launched."""
        self._offers |= {action.worker_id: action.offer for action in actions if isinstance(action, Launch)}

    def tick(
        self, need: Need | None, actions: Sequence[FleetAction], now_s: float
    ) -> tuple[str, dict[str, Any]] | None:
        """Make the record of a tick; None: nothing is done, and it is too soon or nothing has changed.

        Args:
            need: as the tick was told.
            actions: what it said is to be done.
            now_s: when.

        Returns:
            The reason in words, empty where nothing is done, and the numbers: `mu_min` and `mu_target`
            (trajectories/s; None where the overlap rule does not apply), `mu` and `usd_per_hour` of the fleet
            (`Reconciler.standing`), `workers` by state, and workers by offer that were `launched` and
            `released`.
        """
        if not actions and self._last is not None and now_s - self._last[0] < EVERY_S:
            return None
        self.begun(actions)
        launched = Counter(action.offer for action in actions if isinstance(action, Launch))
        leaves = [action for action in actions if isinstance(action, Leave)]
        released = Counter(self._offers.pop(leave.worker_id, "?") for leave in leaves)
        overlaps = need is not None and need.max_staleness > 0
        standing = self._fleet.standing(now_s)
        numbers: dict[str, Any] = {
            "mu_min": _rounded(need.mu_min) if need is not None and overlaps else None,
            "mu_target": _rounded(need.mu_target) if need is not None and overlaps else None,
            "mu": _rounded(standing.mu),
            "usd_per_hour": _rounded(standing.usd_per_hour),
            "workers": dict(standing.workers),
        }
        if not actions and self._last is not None and numbers == self._last[1]:
            return None
        self._last = now_s, numbers
        if not actions:
            return "", numbers
        decision = self._fleet.decision
        if need is None or decision is None:
            reason = "nothing is known of the need yet: the first fleet is kept"
        else:
            reason = decision.reason
        own = [action.reason for action in actions if isinstance(action, Leave | Activate)]
        text = "; ".join((*dict.fromkeys(why for why in own if why != reason), reason))
        return text, {**numbers, "launched": dict(launched), "released": dict(released)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
