"""Leases by the record of a replay buffer: who had which prompt, and when its tokens came."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Incarnation = tuple[str, int]  # worker, epoch


@dataclass(slots=True)
class _Lease:
    holder: Incarnation
    prompt: int
    at_s: float
    first_s: float | None = None  # tokens of it, or all of it, first came
    taken: bool = False  # handed in, and accepted


class LeaseRecord:
    """Leases of a run, from the notes that `failpoints` makes of them.

    Args:
        path: the record; None: notes are only given to `add`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._read_bytes = 0
        self._leases: dict[str, _Lease] = {}
        self._of_prompt: dict[int, list[_Lease]] = {}
        self._heard_s: dict[Incarnation, float] = {}
        self._lost: list[tuple[str, float]] = []

    def read(self) -> None:
        """Take in the whole lines that are new."""
        if self._path is None or not self._path.exists():
            return
        with self._path.open("rb") as record:
            record.seek(self._read_bytes)
            whole, newline, _ = record.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        for line in whole.splitlines():
            self.add(json.loads(line))

    def add(self, note: Mapping[str, Any]) -> None:
        """Take in one note; of those that are not about leases nothing is kept."""
        kind, at_s = note["kind"], float(note["at_s"])
        if kind == "lost":
            self._lost.append((note["worker"], at_s))
        elif kind == "leased":
            for lease_id, prompt in note["leases"].items():
                lease = _Lease((note["worker"], note["epoch"]), prompt, at_s)
                self._leases[lease_id] = lease
                self._of_prompt.setdefault(prompt, []).append(lease)
        elif kind in ("heard", "taken"):
            for lease in (self._leases[lease_id] for lease_id in note["leases"]):
                lease.first_s = at_s if lease.first_s is None else lease.first_s
                lease.taken = lease.taken or kind == "taken"
                self._heard_s[lease.holder] = at_s

    def samples(self, worker: str, since_s: float) -> Incarnation | None:
        """The worker's newest incarnation that was heard of since then, if it has leases."""
        heard = [one for one, at_s in self._heard_s.items() if one[0] == worker and at_s >= since_s]
        newest = max(heard, default=None)
        return newest if newest is not None and self.open_leases(newest, math.inf) else None

    def open_leases(self, holder: Incarnation, at_s: float) -> list[int]:
        """Prompts that it had a lease of then, and never handed in."""
        leases = self._leases.values()
        return [one.prompt for one in leases if one.holder == holder and one.at_s <= at_s and not one.taken]

    def resumed_s(self, lost: Incarnation, at_s: float) -> float | None:
        """Time when tokens of another incarnation had come of every prompt that `lost` left at `at_s`.

        None: not of all of them yet, or it left none.
        """
        latest_s = None
        for prompt in self.open_leases(lost, at_s):
            others = [one for one in self._of_prompt[prompt] if one.holder != lost and one.at_s > at_s]
            came_s = [one.first_s for one in others if one.first_s is not None]
            if not came_s:
                return None
            latest_s = max(min(came_s), latest_s or 0.0)
        return latest_s

    def was_lost(self, worker: str, since_s: float, until_s: float) -> bool:
        """Whether the run gave that worker up in between."""
        return any(name == worker and since_s <= at_s <= until_s for name, at_s in self._lost)

    def taken_away(self) -> int:
        """Leases that were not handed in, and whose prompt was leased again."""
        return sum(sum(not one.taken for one in leases[:-1]) for leases in self._of_prompt.values())
