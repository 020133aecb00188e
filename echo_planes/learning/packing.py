"""Packing of trajectories into rows of tokens, each common history once. numpy only, deterministic.

    trajectories -> inputs -> units (a shared history once) -> layouts -> micro-batches (arrays)

The part of a trajectory that goes through the model is its *input*: the tokens before its last trained one.
Later tokens cannot change a trained token's logprob, so they are left out.

A unit holds trajectories that begin alike, such as the samples of one prompt or the turns of one episode. It
is a tree of segments: a history that several share comes once, then what each adds to it, with the position
numbers of a trajectory alone. A token attends to what comes before it in its trajectory and to nothing else
(`tree_attention`). A micro-batch is one row of units, without padding.

A model whose layers cannot do that gets rows of one trajectory each, padded at their ends to the longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from echo_planes.errors import ConfigError, TaskError
from echo_planes.types import BoolArray, IntArray, TrainBatch

# First tokens in common that are worth two more calls of a kernel in every layer: of answers, or of prompts
# that differ later.
MIN_SHARED = 8
UNITS_PER_SHARD = (1, 2, 4)  # sizes of units that are tried where they are dealt to several shards


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of units in rows. No rows: an empty micro-batch, which keeps ranks in step."""

    row_len: int
    rows: tuple[tuple[int, ...], ...]  # unit numbers, left to right


@dataclass(frozen=True, slots=True)
class Inputs:
    """Extents of a batch's inputs. N: trajectories; K: trained tokens."""

    starts: IntArray  # (N,) first token in the batch's (T,) columns
    lengths: IntArray  # (N,) input tokens; 0: left out
    prompts: IntArray  # (N,) tokens before the first trained one
    trained: IntArray  # (K,) trained tokens, ascending, in the batch's (T,) columns
    bounds: IntArray  # (N + 1,) trajectory i's trained tokens are trained[bounds[i] : bounds[i + 1]]


@dataclass(frozen=True, slots=True)
class Unit:
    """Trajectories packed together, in the order of their tokens."""

    trajectories: tuple[int, ...]
    shared: tuple[int, ...]  # first tokens that each has in common with the one before it; 0 for the first
    length: int  # tokens in all, shared ones once


@dataclass(frozen=True, slots=True)
class Segment:
    """Run of tokens [start, stop) of a row, right before all that continue it, [stop, end)."""

    start: int
    stop: int
    end: int
    depth: int  # segments above it


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows ready for the model. M: trained tokens in it (0 for an empty one)."""

    token_ids: IntArray  # (rows, row_len)
    position_ids: IntArray  # (rows, row_len), from 0 in every trajectory; 0 on padding
    segments: tuple[Segment, ...]  # in preorder; cover the row, where there is one
    predictors: IntArray  # (M,) flat position in the rows whose hidden state predicts the token
    targets: IntArray  # (M,) token ids
    columns: IntArray  # (M,) the token's index in the batch's (T,) columns
    trajectories: IntArray  # (M,) the token's trajectory, an index in the batch's (N,) columns


def find_inputs(batch: TrainBatch, keep: BoolArray) -> Inputs:
    """Return the inputs of the trajectories in `keep` (N,); one without a trained token has length 0.

    Raises:
        TaskError: a trajectory's first token is marked as trained, but no token before it predicts it.
    """
    starts = batch.offsets[:-1]
    trained = np.flatnonzero(batch.loss_mask)
    bounds = np.searchsorted(trained, batch.offsets)
    some = bounds[1:] > bounds[:-1]
    prompts, lengths = np.zeros_like(starts), np.zeros_like(starts)
    prompts[some] = trained[bounds[:-1][some]] - starts[some]
    lengths[some] = trained[bounds[1:][some] - 1] - starts[some]
    if (prompts[some] == 0).any():
        raise TaskError("a trajectory's first token is marked as trained, but nothing comes before it")
    lengths[~keep] = 0
    return Inputs(starts, lengths, prompts, trained, bounds)


def make_units(batch: TrainBatch, inputs: Inputs, limit_tokens: int, num_shards: int = 1) -> list[Unit]:
    """Put every input into one unit of at most `limit_tokens` tokens, or alone.

    A trajectory joins the unit of another if they have half of its prompt or more in common: a history rather
    than the system prompt that all of a batch begin with.

    Args:
        limit_tokens: 0: every input is a unit.
        num_shards: among which the units are dealt. Of several sizes of units the one is taken that leaves
            the least to the busiest shard: smaller ones deal out evenly, but repeat their common history.
    """
    used = np.flatnonzero(inputs.lengths).tolist()
    if limit_tokens == 0 or not used:
        return [Unit((i,), (0,), int(inputs.lengths[i])) for i in used]
    tokens = {i: batch.token_ids[inputs.starts[i] : inputs.starts[i] + inputs.lengths[i]] for i in used}
    order = sorted(used, key=lambda i: tokens[i].astype(">u4").tobytes())
    common = [0]
    for before, i in itertools.pairwise(order):
        size = min(len(tokens[before]), len(tokens[i]))
        parts = np.flatnonzero(tokens[before][:size] != tokens[i][:size])
        shared, prompt = int(parts[0]) if len(parts) else size, int(inputs.prompts[i])
        if prompt <= shared < prompt + MIN_SHARED:
            shared = prompt
        common.append(shared if shared >= min(prompt, max(MIN_SHARED, prompt / 2)) else 0)
    total = int(inputs.lengths.sum()) - sum(common)
    limits = [limit_tokens]
    if num_shards > 1:
        limits += [min(limit_tokens, -(-total // (units * num_shards))) for units in UNITS_PER_SHARD]
    return min((_cut(order, common, inputs, limit) for limit in limits), key=partial(_most, num_shards))


def _cut(order: list[int], common: list[int], inputs: Inputs, limit_tokens: int) -> list[Unit]:
    """Cut trajectories in order into units; `common`: first tokens that each has of the one before it."""
    units: list[Unit] = []
    members: list[int] = []
    joined: list[int] = []
    length = 0
    for i, shared in zip(order, common, strict=True):
        more = int(inputs.lengths[i]) - shared
        if members and (shared == 0 or length + more > limit_tokens):
            units.append(Unit(tuple(members), tuple(joined), length))
            members, joined, length = [], [], 0
        members.append(i)
        joined.append(shared if length else 0)
        length += more if length else int(inputs.lengths[i])
    return [*units, Unit(tuple(members), tuple(joined), length)]


def _most(num_shards: int, units: list[Unit]) -> int:
    """Return the tokens of the busiest shard."""
    lengths = np.array([unit.length for unit in units])
    return max(int(lengths[chosen].sum()) for chosen in _dealt(lengths, num_shards))


def _dealt(lengths: IntArray, num_shards: int) -> list[IntArray]:
    """Deal units to shards longest first, back and forth. Return each shard's numbers, longest first."""
    order = np.argsort(-lengths, kind="stable")
    turn = np.arange(len(order)) % (2 * num_shards)
    shard = np.minimum(turn, 2 * num_shards - 1 - turn)
    return [order[shard == number] for number in range(num_shards)]


def split_groups(groups: IntArray, parts: int) -> list[IntArray]:
    """Return the trajectory indices of at most `parts` mini-batches of whole groups.

    Consecutive groups, in order of first appearance, stay together; the parts differ by at most one group.
    Fewer groups than `parts` give one part per group.
    """
    _, first, index = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))[index]
    chunks = np.array_split(np.arange(len(first)), min(parts, len(first)))
    return [np.flatnonzero((order >= c[0]) & (order <= c[-1])) for c in chunks]


def plan(
    lengths: IntArray, budget_tokens: int, num_shards: int, *, several: bool = True, multiple: int = 1
) -> list[list[Layout]]:
    """Return the layouts of each shard; every unit is in exactly one layout.

    Units are dealt to the shards longest first, back and forth; all shards get the same number of
    layouts, empty ones last.

    Args:
        lengths: tokens per unit (n,), positive.
        budget_tokens: most tokens of a layout, padding included.
        num_shards: data-parallel ranks, or groups of ranks that share sequences.
        several: True: one row of units a layout; False: rows of one unit each.
        multiple: of which each row's length is one; divides `budget_tokens`.

    Raises:
        ConfigError: a unit is longer than the budget.
    """
    longest = int(lengths.max(initial=0))
    if longest > budget_tokens:
        raise ConfigError(
            f"learner.micro_batch_tokens={budget_tokens} is less than an input of {longest} tokens; raise it"
        )
    fill = _rows_of_several if several else _rows_of_one
    plans = [
        fill(numbers.tolist(), lengths.tolist(), budget_tokens, multiple)
        for numbers in _dealt(lengths, num_shards)
    ]
    most = max(len(p) for p in plans)
    return [p + [Layout(multiple, ())] * (most - len(p)) for p in plans]


def rounded_up(length: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `length`."""
    return -(-length // multiple) * multiple


def _rows_of_several(
    numbers: list[int], lengths: list[int], budget_tokens: int, multiple: int
) -> list[Layout]:
    """Fill rows of `budget_tokens` with the units in `numbers` (longest first) by first-fit decreasing."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in numbers:
        need = lengths[number]
        row = next((r for r, free in enumerate(room) if free >= need), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(budget_tokens)
        rows[row].append(number)
        room[row] -= need
    filled = (budget_tokens - free for free in room)
    return [Layout(rounded_up(n, multiple), (tuple(row),)) for n, row in zip(filled, rows, strict=True)]


def _rows_of_one(numbers: list[int], lengths: list[int], budget_tokens: int, multiple: int) -> list[Layout]:
    """Give each of the units in `numbers` (longest first) a row, as long as the first of its layout."""
    layouts: list[Layout] = []
    while numbers:
        row_len = rounded_up(lengths[numbers[0]], multiple)
        taken, numbers = numbers[: budget_tokens // row_len], numbers[budget_tokens // row_len :]
        layouts.append(Layout(row_len, tuple((number,) for number in taken)))
    return layouts


def build(layout: Layout, units: list[Unit], batch: TrainBatch, inputs: Inputs) -> MicroBatch:
    """Fill a layout with the batch's tokens. An empty layout becomes a row of padding, not trained."""
    num_rows = max(len(layout.rows), 1)
    token_ids, position_ids = np.zeros((2, num_rows * layout.row_len), np.int64)
    places: dict[int, IntArray] = {}  # by trajectory: where each of its input's tokens is
    segments: list[Segment] = []
    for row, numbers in enumerate(layout.rows):
        at = row * layout.row_len
        for number in numbers:
            for segment, depth_tokens, members in _segments(units[number], inputs, at):
                segments.append(segment)
                here = np.arange(segment.start, segment.stop)
                own = slice(depth_tokens, depth_tokens + len(here))
                first = int(inputs.starts[members[0]])
                token_ids[here] = batch.token_ids[first + own.start : first + own.stop]
                position_ids[here] = np.arange(own.start, own.stop)
                for i in members:
                    places.setdefault(i, np.empty(int(inputs.lengths[i]), np.int64))[own] = here
            at += units[number].length
        if (padding := (row + 1) * layout.row_len) > at:
            segments.append(Segment(at, padding, padding, 0))
    if not layout.rows:
        segments.append(Segment(0, layout.row_len, layout.row_len, 0))
    trajectory = np.array(list(places), np.int64)
    low = inputs.bounds[trajectory]
    counts = inputs.bounds[trajectory + 1] - low
    columns = inputs.trained[_ranges(low, counts)]
    predictors = [
        places[i][inputs.trained[inputs.bounds[i] : inputs.bounds[i + 1]] - inputs.starts[i] - 1]
        for i in places
    ]
    return MicroBatch(
        token_ids.reshape(num_rows, layout.row_len),
        position_ids.reshape(num_rows, layout.row_len),
        tuple(segments),
        np.concatenate([np.zeros(0, np.int64), *predictors]),
        batch.token_ids[columns],
        columns,
        np.repeat(trajectory, counts),
    )


def _segments(unit: Unit, inputs: Inputs, at: int) -> Iterator[tuple[Segment, int, tuple[int, ...]]]:
    """Yield a unit's segments in preorder, the tokens that come before each, and the trajectories in it.

    Args:
        at: place of the unit's first token.
    """
    lengths = [int(inputs.lengths[i]) for i in unit.trajectories]
    open_parts = [(0, len(lengths), 0, 0)]  # first and last member, tokens and segments above
    while open_parts:
        low, high, above, depth = open_parts.pop()
        if high - low == 1:
            stop = lengths[low]
            children: list[int] = []
        else:
            stop = min(unit.shared[low + 1 : high])
            children = [low, *(n for n in range(low + 1, high) if unit.shared[n] == stop), high]
        size = sum(lengths[low:high]) - sum(unit.shared[low + 1 : high]) - above
        open_parts += reversed([(*pair, stop, depth + 1) for pair in itertools.pairwise(children)])
        if stop > above:
            yield (
                Segment(at, at + stop - above, at + size, depth),
                above,
                unit.trajectories[low:high],
            )
        at += stop - above


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return, joined for all pairs, the `length` integers that begin at `start`."""
    ends = np.cumsum(lengths)
    result: IntArray = np.arange(int(lengths.sum())) + np.repeat(starts - ends + lengths, lengths)
    return result


def joined_batch(parts: Sequence[TrainBatch]) -> TrainBatch:
    """Return the parts of one step as one batch, in their order; its advantage groups are numbered anew.

    The batch is the last of its step if the last part is. One part is returned as it is.
    """
    if len(parts) == 1:
        return parts[0]
    offsets: list[IntArray] = [np.zeros(1, np.int64)]
    groups: list[IntArray] = []
    num_tokens = num_groups = 0
    for part in parts:
        offsets.append(num_tokens + part.offsets[1:])
        num_tokens += len(part.token_ids)
        groups.append(num_groups + part.advantage_groups)
        num_groups += int(part.advantage_groups.max(initial=-1)) + 1
    means: dict[str, tuple[float, int]] = {}
    for name, mean, answers in (one for part in parts for one in part.reward_parts):
        before, number = means.get(name, (0.0, 0))
        means[name] = before + (mean - before) * answers / (number + answers), number + answers
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (
            "token_ids",
            "loss_mask",
            "sampler_logprobs",
            "rewards",
            "advantages",
            "versions",
            "correct",
            "token_versions",
            "cut_off",
            "scores",
            "accepted_scores",
            "accepted_cut_off",
            "accepted_levels",
        )
    }
    return replace(
        parts[-1],
        trajectory_ids=tuple(one for part in parts for one in part.trajectory_ids),
        offsets=np.concatenate(offsets),
        advantage_groups=np.concatenate(groups),
        reward_parts=tuple((name, *means[name]) for name in sorted(means)),
        **columns,
    )
