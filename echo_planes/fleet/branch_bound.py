"""Small integer programmes of covering and packing, solved to the optimum by branch and bound.

    minimise  sum w_j y_j    with  0 <= y_j <= cap_j,   cover rows  a y >= b,   pack rows  a y <= b

for a few rows, some dozens of variables and counts of any size. All numbers of a programme are integers of at
least 0 (bounds may be negative), and what is compared with them is exact; only bounds are floats, and they
give way by their rounding error before anything is cut off.

- Variables with the same coefficients in every row are one class: the cheapest of it are taken first, so a
  class costs a convex function of its count. Offers of one SKU in many regions are such a class.
- The bound keeps the first cover row; the others take part with Lagrange multipliers. What is open at a depth
  is always the same set, so its relaxation is a table: one bisection a node. So is, for each pair of a cover
  and a pack row, the least of the second that keeps the first.
- Classes whose count the relaxation is surest of come first. The counts of one are tried outwards from the
  relaxed one: the bound is convex in them, so the first that is too dear ends its direction.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_CLOSE = 1e-11  # an improvement by less than this share is not looked for
_ROUNDING = 1e-13  # of the largest sum in a bound; a bound is a sum of some dozens of floats
_SWEEPS, _HALVINGS = 4, 60  # of the search for multipliers


@dataclass(frozen=True, slots=True)
class Row:
    coefs: tuple[int, ...]
    bound: int


@dataclass(frozen=True, slots=True)
class Programme:
    weights: tuple[int, ...]
    caps: tuple[int, ...]
    cover: tuple[Row, ...]  # a y >= b; the first one drives the bound
    pack: tuple[Row, ...]  # a y <= b


@dataclass(frozen=True, slots=True)
class Found:
    counts: tuple[int, ...] | None  # None: nothing below the value asked for
    bound: float  # no solution is better than this
    proved: bool  # the node limit was not reached
    nodes: int


def minimise(programme: Programme, below: int | None, node_limit: int) -> Found:
    """The optimum, or the best found within `node_limit` nodes.

    Args:
        below: only solutions of less than this are of interest; None: any.
    """
    search = _Search(programme, below, node_limit)
    search.run()
    return search.found()


class _Class:
    """Variables with the same coefficients, cheapest first."""

    def __init__(
        self, cover: tuple[int, ...], pack: tuple[int, ...], members: list[tuple[int, int, int]]
    ) -> None:
        self.cover, self.pack = cover, pack
        self.members = sorted(members)  # (weight, position, cap)
        self.ends = [0]  # count up to which the members before are used
        self.sums = [0]  # and what that costs
        for weight, _, cap in self.members:
            self.ends.append(self.ends[-1] + cap)
            self.sums.append(self.sums[-1] + weight * cap)
        self.cap = self.ends[-1]
        self.shift = 0.0  # what the multipliers add to each weight

    def cost(self, count: int) -> int:
        member = min(bisect_right(self.ends, count) - 1, len(self.members) - 1)
        return self.sums[member] + self.members[member][0] * (count - self.ends[member])

    def adjusted(self, count: int) -> float:
        return self.cost(count) + self.shift * count


class _Table:
    """min sum w y with p y >= P over open classes, y real: a convex function of P, as its corners."""

    def __init__(self, segments: Sequence[tuple[float, float, int]]) -> None:
        """segments: (weight / p or its sign where p is 0, weight of all of it, p of all of it), ranked."""
        self.base_p, self.base = 0, 0.0
        self.ends: list[int] = [0]
        self.sums: list[float] = [0.0]
        self.slopes: list[float] = []
        for slope, weight, p in segments:
            if weight < 0:
                self.base_p, self.base = self.base_p + p, self.base + weight
            elif p > 0:
                self.ends.append(self.ends[-1] + p)
                self.sums.append(self.sums[-1] + weight)
                self.slopes.append(slope)
        self.total = self.base_p + self.ends[-1]

    def __call__(self, need: int) -> float:
        need -= self.base_p
        if need <= 0:
            return self.base
        if need > self.ends[-1]:
            return math.inf
        corner = bisect_left(self.ends, need) - 1
        return self.base + self.sums[corner] + (need - self.ends[corner]) * self.slopes[corner]

    def slope(self, need: int) -> float:
        """Marginal weight of one more p."""
        need -= self.base_p
        if need <= 0 or not self.slopes:
            return 0.0
        return self.slopes[min(bisect_left(self.ends, need), len(self.slopes)) - 1]


class _Search:
    def __init__(self, programme: Programme, below: int | None, node_limit: int) -> None:
        self._programme, self._node_limit = programme, node_limit
        self._needs = tuple(row.bound for row in programme.cover)
        self._rooms = tuple(row.bound for row in programme.pack)
        members: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int, int]]] = {}
        for j, (weight, cap) in enumerate(zip(programme.weights, programme.caps, strict=True)):
            key = tuple(r.coefs[j] for r in programme.cover), tuple(r.coefs[j] for r in programme.pack)
            if cap > 0:
                members.setdefault(key, []).append((weight, j, cap))
        self._classes = [_Class(cover, pack, some) for (cover, pack), some in members.items()]
        everything = sum(c.sums[-1] for c in self._classes) + 1
        self._best = everything if below is None else min(below, everything)
        self._counts: list[int] | None = None
        self._nodes = 0
        self._open = math.inf  # the least bound of what the node limit left open
        self._path = [0] * len(self._classes)
        self._multipliers()
        self._order()
        self._set_cut()

    def run(self) -> None:
        enough = all(
            sum(c.cover[row] * c.cap for c in self._classes) >= need for row, need in enumerate(self._needs)
        )
        if self._best <= 0 or not enough or any(room < 0 for room in self._rooms):
            return  # nothing costs less than nothing; or a row cannot be kept
        if not self._classes:
            self._counts, self._best = [], 0
            return
        if self._constant + self._tables[0](self._needs[0]) <= self._cut:
            self._dive(0, self._needs, self._rooms, 0, self._constant)

    def found(self) -> Found:
        proved = self._open == math.inf
        bound = float(self._best) if proved else min(self._open, float(self._best))
        if self._counts is None:
            return Found(None, bound, proved, self._nodes)
        counts = [0] * len(self._programme.weights)
        for some, count in zip(self._classes, self._counts, strict=True):
            for (_, position, cap), begin in zip(some.members, some.ends, strict=False):
                counts[position] = max(0, min(cap, count - begin))
        return Found(tuple(counts), bound, proved, self._nodes)

    # -- the relaxation -------------------------------------------------------------------------------------

    def _segments(self, classes: Sequence[_Class]) -> list[tuple[float, float, int, int, int]]:
        """(slope, adjusted weight, p, cap, position of the class) of every member, ranked by slope."""
        segments = []
        for number, some in enumerate(classes):
            p = some.cover[0]
            for weight, _, cap in some.members:
                adjusted = weight + some.shift
                slope = adjusted / p if p else math.copysign(math.inf, adjusted)
                segments.append((slope, adjusted * cap, p * cap, cap, number))
        return sorted(segments)

    def _relaxed(self) -> list[float]:
        """The relaxed count of each class under the multipliers as they are."""
        counts = [0.0] * len(self._classes)
        need = float(self._needs[0])
        for _, weight, p, cap, number in self._segments(self._classes):
            if weight < 0:
                share = 1.0
            elif p > 0 and need > 0:
                share = min(1.0, need / p)
            else:
                continue
            counts[number] += share * cap
            need -= share * p
        return counts

    def _multipliers(self) -> None:
        """One for each row but the first, by bisection in turn; zero for a row that does not bind."""
        rows = [(True, r) for r in range(1, len(self._needs))] + [(False, r) for r in range(len(self._rooms))]
        found = dict.fromkeys(rows, 0.0)
        self._relaxed_counts = self._relaxed()

        def missing(row: tuple[bool, int], value: float) -> tuple[float, list[float]]:
            """By how much the row is not kept (negative: kept with room), and by which counts."""
            found[row] = value
            for some in self._classes:
                some.shift = sum(
                    -x * some.cover[r] if is_cover else x * some.pack[r] for (is_cover, r), x in found.items()
                )
            counts = self._relaxed()
            is_cover, r = row
            used = sum(
                (c.cover[r] if is_cover else c.pack[r]) * y
                for c, y in zip(self._classes, counts, strict=True)
            )
            return (self._needs[r] - used if is_cover else used - self._rooms[r]), counts

        for _ in range(_SWEEPS if self._classes else 0):
            before = dict(found)
            for row in rows:
                over, over_counts = missing(row, 0.0)
                if over <= 0:
                    continue
                largest = max((c.cover if row[0] else c.pack)[row[1]] for c in self._classes)
                low, high = 0.0, max(1, *self._programme.weights) / max(largest, 1)
                for _ in range(_HALVINGS):
                    if missing(row, high)[0] <= 0:
                        break
                    low, high = high, 2 * high
                for _ in range(_HALVINGS):
                    middle = (low + high) / 2
                    at_middle, counts = missing(row, middle)
                    if at_middle > 0:
                        low, over, over_counts = middle, at_middle, counts
                    else:
                        high = middle
                # Where the count jumps, the relaxed optimum lies between: where the row is just kept.
                under, under_counts = missing(row, high)
                share = over / (over - under) if under < 0 else 1.0
                self._relaxed_counts = [
                    x + share * (y - x) for x, y in zip(over_counts, under_counts, strict=True)
                ]
            if before == found or len(rows) < 2:
                break
        parts = [x * (self._needs[r] if is_cover else -self._rooms[r]) for (is_cover, r), x in found.items()]
        self._constant = math.fsum(parts)
        self._magnitude = math.fsum(abs(part) for part in parts)

    def _order(self) -> None:
        """Surest classes first; then the tables of what is open behind each."""
        counts = self._relaxed_counts
        rho = _Table([s[:3] for s in self._segments(self._classes)]).slope(self._needs[0])

        def sureness(number: int) -> tuple[float, int]:
            some, count = self._classes[number], round(counts[number])
            steps = [
                abs(some.adjusted(other) - some.adjusted(count) - rho * some.cover[0] * (other - count))
                for other in (count - 1, count + 1)
                if 0 <= other <= some.cap
            ]
            return (-min(steps, default=0.0), -some.cover[0])

        order = sorted(range(len(self._classes)), key=sureness)
        self._classes = [self._classes[number] for number in order]
        self._guess = [round(counts[number]) for number in order]
        depths = range(len(order) + 1)
        self._tables = [_Table([s[:3] for s in self._segments(self._classes[k:])]) for k in depths]
        rows = range(len(self._needs))
        self._totals = [[sum(c.cover[r] * c.cap for c in self._classes[k:]) for r in rows] for k in depths]
        pairs = [(cover, pack) for cover in rows for pack in range(len(self._rooms))]
        self._least = [[(c, p, self._least_pack(k, c, p)) for c, p in pairs] for k in depths]

    def _least_pack(self, depth: int, cover: int, pack: int) -> _Table:
        """Least of a pack row with which the classes from `depth` on keep a cover row."""
        ranked = sorted(
            (c.pack[pack] / c.cover[cover], float(c.pack[pack] * c.cap), c.cover[cover] * c.cap)
            for c in self._classes[depth:]
            if c.cover[cover] > 0
        )
        return _Table(ranked)

    # -- the search -----------------------------------------------------------------------------------------

    def _set_cut(self) -> None:
        error = _ROUNDING * (abs(self._best) + self._magnitude)
        self._cut = self._best - max(1.0, _CLOSE * self._best) + error

    def _dive(
        self, depth: int, needs: tuple[int, ...], rooms: tuple[int, ...], spent: int, adjusted: float
    ) -> None:
        """All counts of one class, outwards from the relaxed one; `adjusted` is the part of the bound that is
        settled by the classes before."""
        self._nodes += 1
        some, behind, after = self._classes[depth], self._totals[depth + 1], self._tables[depth + 1]
        low, high = self._range(some, behind, needs, rooms)
        if low > high:
            return
        if depth == len(self._classes) - 1:  # the least is the cheapest
            self._path[depth] = low
            value = spent + some.cost(low)
            if value < self._best:
                self._best, self._counts = value, list(self._path)
                self._set_cut()
            return
        for cover, pack, table in self._least[depth]:
            if table(needs[cover]) > rooms[pack] * (1 + _ROUNDING) + _ROUNDING:
                return

        def bound(count: int) -> float:
            if not low <= count <= high:
                return math.inf
            return adjusted + some.adjusted(count) + after(needs[0] - some.cover[0] * count)

        guess = min(max(self._guess[depth], low), high)
        up = _lowest(bound, guess, low, high)
        flat = _CLOSE / 4 * self._best
        # Multipliers make the bound flat over many counts: of those the relaxed one is best to begin with.
        if bound(guess) <= min(self._cut, bound(up) + flat):
            up = guess
        middle, down = up, up - 1
        at_up, at_down = bound(up), bound(down)
        while (least := min(at_up, at_down)) <= self._cut:
            if self._nodes >= self._node_limit:
                self._open = min(self._open, least)
                return
            even = abs(at_up - at_down) <= flat
            count = up if (up - middle < middle - down if even else at_up <= at_down) else down
            self._path[depth] = count
            self._dive(
                depth + 1,
                tuple(need - a * count for need, a in zip(needs, some.cover, strict=True)),
                tuple(room - a * count for room, a in zip(rooms, some.pack, strict=True)),
                spent + some.cost(count),
                adjusted + some.adjusted(count),
            )
            if count == up:
                up += 1
                at_up = bound(up)
            else:
                down -= 1
                at_down = bound(down)

    @staticmethod
    def _range(
        some: _Class, behind: Sequence[int], needs: tuple[int, ...], rooms: tuple[int, ...]
    ) -> tuple[int, int]:
        """Counts of a class that the rows still permit."""
        low, high = 0, some.cap
        for a, need, total in zip(some.cover, needs, behind, strict=True):
            if need > total:
                low = max(low, -(-(need - total) // a)) if a else high + 1
        for a, room in zip(some.pack, rooms, strict=True):
            if a:
                high = min(high, room // a)
        return low, high


def _lowest(bound: Callable[[int], float], start: int, low: int, high: int) -> int:
    """Where a convex function on low..high is least; quick where that is close to `start`."""

    def rises(count: int) -> bool:
        return count >= high or bound(count + 1) >= bound(count)

    size = 1
    if rises(start):
        high_end = start
        while (low_end := max(low, high_end - size)) < high_end and rises(low_end):
            high_end, size = low_end, 2 * size
    else:
        low_end = start
        while not rises(high_end := min(high, low_end + size)):
            low_end, size = high_end, 2 * size
    while low_end < high_end:
        middle = (low_end + high_end) // 2
        low_end, high_end = (low_end, middle) if rises(middle) else (middle + 1, high_end)
    return high_end
