"""Packing of trajectories into few, full rectangles of tokens. numpy only, deterministic.

    trajectories -> inputs -> units (a shared prompt once) -> layouts (first fit) -> micro-batches (arrays)

A micro-batch is a rectangle `[rows, row_len]` of at most `budget_tokens` tokens; `row_len` is the length of
its longest unit. A row holds one unit or several. No token attends to a token of another unit.

The part of a trajectory that goes through the model is its *input*: the tokens before its last trained one.
Later tokens cannot change a trained token's logprob, so they are left out. The samples of one prompt may
share a unit: the prompt comes once, then each sample as a branch that attends to the prompt and to itself,
with the position numbers of a sample alone. For short answers this halves the work or better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from echo_planes.errors import ConfigError, TaskError
from echo_planes.types import BoolArray, IntArray, TrainBatch

# Longest row that holds several trajectories, and so needs a dense mask of its length squared.
MAX_MASK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of the units in a rectangle. No rows: an empty micro-batch, which keeps ranks in step."""

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
    """Trajectories packed together: a common prompt of `prefix` tokens, then the rest of each input."""

    prefix: int  # 0 for a single trajectory
    trajectories: tuple[int, ...]
    length: int  # tokens in all


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rectangle ready for the model. M: trained tokens in it (0 for an empty one)."""

    token_ids: IntArray  # (rows, row_len)
    position_ids: IntArray  # (rows, row_len), from 0 in every trajectory; 0 on padding
    segment_ids: IntArray  # (rows, row_len): number of the unit within its row, -1 on padding
    branch_ids: IntArray  # (rows, row_len): 0 in a shared prompt or a single trajectory, else 1, 2, ...
    predictors: IntArray  # (M,) flat position in the rectangle whose hidden state predicts the token
    targets: IntArray  # (M,) token ids
    columns: IntArray  # (M,) the token's index in the batch's (T,) columns
    trajectories: IntArray  # (M,) the token's trajectory, an index in the batch's (N,) columns

    def attention_mask(self) -> BoolArray | None:
        """Return the causal mask within units and branches (rows, 1, row_len, row_len), True: may attend.

        None where each row holds one trajectory: plain causal attention with positions 0, 1, 2, ... then
        gives the same for every real token, because padding comes last.
        """
        if self.segment_ids.max(initial=0) <= 0 and self.branch_ids.max(initial=0) == 0:
            return None
        same_unit = self.segment_ids[:, :, None] == self.segment_ids[:, None, :]
        query, key = self.branch_ids[:, :, None], self.branch_ids[:, None, :]
        causal = np.tri(self.segment_ids.shape[1], dtype=np.bool_)
        visible: BoolArray = (same_unit & ((key == 0) | (key == query)) & causal)[:, None]
        return visible


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


def make_units(batch: TrainBatch, inputs: Inputs, limit_tokens: int) -> list[Unit]:
    """Put every input into one unit; inputs with equal prompts share units of up to `limit_tokens` tokens."""
    same_prompt: dict[bytes, list[int]] = {}
    for i in np.flatnonzero(inputs.lengths).tolist():
        start = inputs.starts[i]
        prompt = batch.token_ids[start : start + inputs.prompts[i]].tobytes()
        same_prompt.setdefault(prompt, []).append(i)
    units: list[Unit] = []
    for members in same_prompt.values():
        prefix = int(inputs.prompts[members[0]])
        gathered: list[int] = []
        length = prefix
        for i in members:
            extra = int(inputs.lengths[i]) - prefix
            if gathered and length + extra > limit_tokens:
                units.append(_unit(prefix, gathered, length))
                gathered, length = [], prefix
            gathered.append(i)
            length += extra
        units.append(_unit(prefix, gathered, length))
    return units


def _unit(prefix: int, members: list[int], length: int) -> Unit:
    return Unit(prefix if len(members) > 1 else 0, tuple(members), length)


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
        budget_tokens: tokens of the largest rectangle, padding included.
        num_shards: data-parallel ranks, or groups of ranks that share sequences.
        several: whether a row of at most MAX_MASK_TOKENS may hold more than one unit.
        multiple: of which each row's length is one; divides `budget_tokens`.

    Raises:
        ConfigError: a unit is longer than the budget.
    """

    def pack(numbers: IntArray, several: bool) -> list[Layout]:
        return _pack(numbers.tolist(), lengths.tolist(), budget_tokens, several, multiple)

    longest = int(lengths.max(initial=0))
    if longest > budget_tokens:
        raise ConfigError(
            f"learner.micro_batch_tokens={budget_tokens} is less than an input of {longest} tokens; raise it"
        )
    order = np.argsort(-lengths, kind="stable")
    turn = np.arange(len(order)) % (2 * num_shards)
    shard = np.minimum(turn, 2 * num_shards - 1 - turn)
    is_long = lengths[order] > MAX_MASK_TOKENS
    plans = [
        pack(order[(shard == s) & is_long], False) + pack(order[(shard == s) & ~is_long], several)
        for s in range(num_shards)
    ]
    most = max(len(p) for p in plans)
    return [p + [Layout(multiple, ())] * (most - len(p)) for p in plans]


def rounded_up(length: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `length`."""
    return -(-length // multiple) * multiple


def _pack(
    numbers: list[int], lengths: list[int], budget_tokens: int, several: bool, multiple: int
) -> list[Layout]:
    """Pack the units in `numbers` (longest first) into rectangles by first-fit decreasing."""
    layouts: list[Layout] = []
    while numbers:
        row_len, shortest = rounded_up(lengths[numbers[0]], multiple), lengths[numbers[-1]]
        max_rows = budget_tokens // row_len
        rows: list[list[int]] = []
        room: dict[int, int] = {}  # tokens left, of the rows that can still take a unit
        left: list[int] = []
        for number in numbers:
            need = lengths[number]
            row = next((r for r, free in room.items() if free >= need), len(rows))
            if row == max_rows:
                left.append(number)
                continue
            if row == len(rows):
                rows.append([])
                room[row] = row_len
            rows[row].append(number)
            room[row] -= need
            if room[row] < shortest or not several:
                del room[row]
        layouts.append(Layout(row_len, tuple(tuple(row) for row in rows)))
        numbers = left
    return layouts


def build(layout: Layout, units: list[Unit], batch: TrainBatch, inputs: Inputs) -> MicroBatch:
    """Fill a layout with the batch's tokens. An empty layout becomes a row of padding, not trained."""
    # source, destination, length, segment, branch, position
    runs: list[tuple[int, int, int, int, int, int]] = []
    members: list[tuple[int, int, int, int]] = []  # trajectory, prefix, unit's and own first destination
    for row, sequences in enumerate(layout.rows):
        at = row * layout.row_len
        for segment, number in enumerate(sequences):
            unit, first = units[number], at
            prefix = unit.prefix
            runs.append((int(inputs.starts[unit.trajectories[0]]), at, prefix, segment, 0, 0))
            at += prefix
            for branch, i in enumerate(unit.trajectories, start=1 if prefix else 0):
                own = int(inputs.lengths[i]) - prefix
                runs.append((int(inputs.starts[i]) + prefix, at, own, segment, branch, prefix))
                members.append((i, prefix, first, at))
                at += own
    shape = (max(len(layout.rows), 1), layout.row_len)
    sources, destinations, sizes, segments, branches, positions = np.array(runs, np.int64).reshape(-1, 6).T
    cells = _ranges(destinations, sizes)

    def rectangle(values: IntArray, padding: int) -> IntArray:
        flat = np.full(shape[0] * shape[1], padding, np.int64)
        flat[cells] = values
        return flat.reshape(shape)

    trajectory, prefixes, unit_at, own_at = np.array(members, np.int64).reshape(-1, 4).T
    low = inputs.bounds[trajectory]
    counts = inputs.bounds[trajectory + 1] - low
    columns = inputs.trained[_ranges(low, counts)]
    # The predictor's position within its trajectory.
    before = columns - np.repeat(inputs.starts[trajectory], counts) - 1
    shared = np.repeat(prefixes, counts)
    inside = before < shared
    predictors = before + np.where(inside, np.repeat(unit_at, counts), np.repeat(own_at, counts) - shared)
    return MicroBatch(
        rectangle(batch.token_ids[_ranges(sources, sizes)], 0),
        rectangle(_ranges(positions, sizes), 0),
        rectangle(np.repeat(segments, sizes), -1),
        rectangle(np.repeat(branches, sizes), 0),
        predictors,
        batch.token_ids[columns],
        columns,
        np.repeat(trajectory, counts),
    )


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
