"""Record of a fleet that follows price and need: its actions, and its standing between them.

Each entry holds numbers and a reason. The report shows them, and they explain later why a machine was bought.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from echo_planes.fleet.capacity import Need
from echo_planes.fleet.reconciler import Reconciler
from echo_planes.fleet.workers import Activate, FleetAction, Launch, Leave

EVERY_S = 60.0  # least time between two entries without actions
DIGITS = 4  # significant digits of a number; smaller changes of an estimate do not count


class FleetRecord:
    """Record of one fleet, which makes an entry of a tick.

    Args:
        fleet: the fleet to record.
    """

    def __init__(self, fleet: Reconciler) -> None:
        self._fleet = fleet
        self._instance_types: dict[
            str, str
        ] = {}  # of launched workers, because the fleet forgets those that are gone
        self._last: tuple[float, Mapping[str, Any]] | None = None

    def begun(self, actions: Sequence[FleetAction]) -> None:
        """Remember the instance types of the workers that `actions` launch."""
        self._instance_types |= {
            action.worker_id: action.instance_type for action in actions if isinstance(action, Launch)
        }

    def tick(
        self, need: Need | None, actions: Sequence[FleetAction], now_s: float
    ) -> tuple[str, dict[str, Any]] | None:
        """Make the entry of a tick; None if there are no actions and it is too soon or nothing has changed.

        Args:
            need: the need that the tick used.
            actions: the actions that the tick returned.
            now_s: the time.

        Returns:
            The reason in words, empty without actions, and the numbers: `mu_min` and `mu_target`
            (trajectories/s; None if the overlap rule does not apply), `mu` and `usd_per_hour` of the fleet
            (`Reconciler.standing`), `workers` by state, and workers by instance type that were `launched` and
            `released`.
        """
        if not actions and self._last is not None and now_s - self._last[0] < EVERY_S:
            return None
        self.begun(actions)
        launched = Counter(action.instance_type for action in actions if isinstance(action, Launch))
        leaves = [action for action in actions if isinstance(action, Leave)]
        released = Counter(self._instance_types.pop(leave.worker_id, "?") for leave in leaves)
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
