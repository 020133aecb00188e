"""Prices that a run requests while it runs: interface of their source, and checks of its answers."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

MOST_USD_PER_HOUR = 10_000.0  # of one worker: about a hundred times the price of eight of the best GPUs

# The run calls it for each answer: dollars an hour of one worker by instance type name ("L4/us-east/spot").
PriceSource = Callable[[], Mapping[str, float] | Awaitable[Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class Prices:
    """Checked answer of a price source."""

    usd_per_hour: Mapping[str, float]  # usable prices by instance type
    refused: Mapping[str, str]  # by instance type, the reason for which its price stays unchanged


def looked_through(answer: object, instance_types: Collection[str]) -> Prices:
    """Check an answer for these types. Prices of other types are ignored; a missing price is refused.

    Raises:
        TypeError: the answer is no mapping.
    """
    if not isinstance(answer, Mapping):
        raise TypeError(
            f"it gave a {type(answer).__name__}, not a mapping of instance types to dollars an hour"
        )
    usd_per_hour: dict[str, float] = {}
    refused: dict[str, str] = {}
    for instance_type in instance_types:
        if instance_type not in answer:
            refused[instance_type] = "no price was given"
        elif (price := _price(answer[instance_type])) is None:
            refused[instance_type] = (
                f"{str(answer[instance_type])[:40]} is no number of dollars an hour above 0, and at most "
                f"{MOST_USD_PER_HOUR:g}"
            )
        else:
            usd_per_hour[instance_type] = price
    return Prices(usd_per_hour, refused)


def _price(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and 0 < value <= MOST_USD_PER_HOUR else None
