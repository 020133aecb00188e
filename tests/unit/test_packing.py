"""Packing: nothing lost, nothing doubled, nothing sees what it must not, budgets kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import ConfigError, TaskError
from echo_planes.learning.packing import (
    MIN_SHARED,
    Inputs,
    MicroBatch,
    build,
    find_inputs,
    make_units,
    plan,
    split_groups,
)
from echo_planes.types import TrainBatch


def make_batch(sequences: list[tuple[list[int], list[int], list[bool]]]) -> TrainBatch:
    """From (prompt ids, response ids, response mask) per trajectory."""
    ids = [t for prompt, response, _ in sequences for t in prompt + response]
    mask = [m for prompt, _, trained in sequences for m in [False] * len(prompt) + trained]
    n = len(sequences)
    return TrainBatch(
        step=0,
        trajectory_ids=tuple(map(str, range(n))),
        token_ids=np.array(ids, np.int64),
        offsets=np.cumsum([0] + [len(p) + len(r) for p, r, _ in sequences]),
        loss_mask=np.array(mask, np.bool_),
        sampler_logprobs=np.zeros(len(ids), np.float32),
        rewards=np.zeros(n, np.float32),
        advantage_groups=np.zeros(n, np.int64),
        advantages=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int64),
        correct=np.zeros(n, np.bool_),
        token_versions=np.zeros(len(ids), np.int64),
        cut_off=np.zeros(n, np.bool_),
    )


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Few prompts, several answers each, environment tokens between, some with nothing to train.

    Some prompts continue an earlier trajectory, as the turns of an episode do.
    """
    prompts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=4))
    sequences: list[tuple[list[int], list[int], list[bool]]] = []
    for prompt in prompts:
        for _ in range(draw(st.integers(1, 4))):
            mask = draw(st.lists(st.booleans(), max_size=8))
            response = draw(st.lists(st.integers(0, 1), min_size=len(mask), max_size=len(mask)))
            sequences.append((prompt, response, mask))
    for _ in range(draw(st.integers(0, 4))):
        before, response, _ = sequences[draw(st.integers(0, len(sequences) - 1))]
        mask = draw(st.lists(st.booleans(), max_size=20 - len(before) - len(response)))
        sequences.append((before + response, [1] * len(mask), mask))
    return make_batch(sequences)


def pack(batch: TrainBatch, budget: int, shards: int, share: int) -> tuple[Inputs, list[list[MicroBatch]]]:
    inputs = find_inputs(batch, np.ones(batch.num_trajectories, np.bool_))
    units = make_units(batch, inputs, share)
    layouts = plan(np.array([u.length for u in units], np.int64), budget, shards)
    return inputs, [[build(layout, units, batch, inputs) for layout in shard] for shard in layouts]


def visible(micro: MicroBatch, place: int) -> list[tuple[int, int]]:
    """(position, token id) of everything the token at `place` may look at, itself included, in order."""
    above = [one for one in micro.segments if one.stop <= place < one.end]
    own = next(one for one in micro.segments if one.start <= place < one.stop)
    assert [one.depth for one in above] == list(range(own.depth))
    seen = np.concatenate(
        [*(np.arange(one.start, one.stop) for one in above), np.arange(own.start, place + 1)]
    )
    ids, positions = micro.token_ids.ravel()[seen], micro.position_ids.ravel()[seen]
    return list(zip(positions.tolist(), ids.tolist(), strict=True))


@settings(max_examples=150, deadline=None)
@given(batch=batches(), budget=st.integers(20, 80), shards=st.integers(1, 3), share=st.sampled_from([0, 20]))
def test_every_trained_token_is_predicted_once_from_exactly_its_own_past(
    batch: TrainBatch, budget: int, shards: int, share: int
) -> None:
    inputs, packed = pack(batch, budget, shards, share)
    assert len({len(shard) for shard in packed}) == 1
    micros = [micro for shard in packed for micro in shard]
    columns = np.concatenate([m.columns for m in micros]) if micros else np.zeros(0, np.int64)
    assert sorted(columns.tolist()) == np.flatnonzero(batch.loss_mask).tolist()
    for micro in micros:
        assert micro.token_ids.size <= budget
        for at, target, column, owner in zip(
            micro.predictors, micro.targets, micro.columns, micro.trajectories, strict=True
        ):
            start, stop = batch.offsets[owner], batch.offsets[owner + 1]
            assert start < column < stop
            assert target == batch.token_ids[column]
            past = batch.token_ids[start:column].tolist()
            assert visible(micro, int(at)) == list(enumerate(past))
        # Segments cover the row, each with what continues it right behind.
        covered = [place for one in micro.segments for place in range(one.start, one.stop)]
        assert covered == list(range(micro.token_ids.size))
        assert all(one.start < one.stop <= one.end for one in micro.segments)
    if share == 0:
        # Nothing shared: every input token is in exactly one place.
        assert sum(m.token_ids.size for m in micros if len(m.columns)) == inputs.lengths.sum()


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    budget=st.integers(40, 200),
    shards=st.integers(1, 4),
    several=st.booleans(),
    multiple=st.integers(1, 4),
)
def test_plan_places_every_unit_once_within_the_budget(
    lengths: list[int], budget: int, shards: int, several: bool, multiple: int
) -> None:
    budget *= multiple
    layouts = plan(np.array(lengths, np.int64), budget, shards, several=several, multiple=multiple)
    placed = [unit for shard in layouts for layout in shard for row in layout.rows for unit in row]
    assert sorted(placed) == list(range(len(lengths)))
    for layout in (layout for shard in layouts for layout in shard if layout.rows):
        longest = max(sum(lengths[unit] for unit in row) for row in layout.rows)
        assert longest <= layout.row_len < longest + multiple
        assert layout.row_len * len(layout.rows) <= budget
        assert len(layout.rows) == 1 or not several
        assert several or all(len(row) == 1 for row in layout.rows)
    assert all(layout.row_len % multiple == 0 for shard in layouts for layout in shard)
    assert plan(np.array(lengths, np.int64), budget, shards, several=several, multiple=multiple) == layouts


def test_different_prompts_fill_one_row_without_padding() -> None:
    batch = make_batch([([i % 7, i // 7], [5] * 4, [True] * 4) for i in range(256)])
    _, [[micro]] = pack(batch, 8192, 1, share=8192)
    assert micro.token_ids.shape == (1, 256 * 5)  # 2 + 4 tokens, the last of which predicts nothing
    assert len(micro.segments) == 256


def test_rows_of_one_trajectory_are_padded_to_the_longest() -> None:
    batch = make_batch([([1, 2, 3], [4] * (2 + i), [True] * (2 + i)) for i in range(4)])
    inputs = find_inputs(batch, np.ones(4, np.bool_))
    units = make_units(batch, inputs, 0)
    [[layout]] = plan(np.array([unit.length for unit in units]), 64, 1, several=False)
    micro = build(layout, units, batch, inputs)
    assert micro.token_ids.shape == (4, 7)
    assert sorted(micro.columns.tolist()) == np.flatnonzero(batch.loss_mask).tolist()


def test_samples_of_a_prompt_carry_it_once() -> None:
    batch = make_batch([([1, 2, 3], [4, 5 + i, 6], [True] * 3) for i in range(4)])
    _, [[micro]] = pack(batch, 64, 1, share=64)
    assert [(one.start, one.stop, one.end) for one in micro.segments] == [
        *((0, 3, 11), (3, 5, 5), (5, 7, 7), (7, 9, 9), (9, 11, 11))
    ]
    # The four first tokens are predicted from the very same place.
    assert len(set(micro.predictors[np.isin(micro.columns, batch.offsets[:-1] + 3)].tolist())) == 1


def test_answers_that_begin_alike_carry_that_once() -> None:
    alike = list(range(50, 50 + MIN_SHARED))
    ends = ([1], [2, 3], [4])
    batch = make_batch([([7, 8], [*alike, *end, 9], [True] * (len(alike + end) + 1)) for end in ends])
    _, [[micro]] = pack(batch, 64, 1, share=64)
    common = 2 + MIN_SHARED
    assert [(one.start, one.stop) for one in micro.segments] == [
        *((0, common), (common, common + 1), (common + 1, common + 3), (common + 3, common + 4))
    ]


def test_the_turns_of_an_episode_carry_its_history_once() -> None:
    """Each turn's prompt is all that came before it."""
    history: list[int] = [1] * 9
    turns = []
    for turn in range(2, 6):
        turns.append((history, [turn] * 5, [True] * 5))
        history = [*history, *[turn] * 5, 0]
    _, [[micro]] = pack(make_batch(turns), 256, 1, share=256)
    assert micro.token_ids.size == len(history) - 2  # all of it, but for the last trained token and the 0
    assert max(one.depth for one in micro.segments) > 1


def test_a_system_prompt_alone_is_not_shared() -> None:
    system = list(range(20))
    batch = make_batch([([*system, *([30 + i] * 30)], [1, 2], [True] * 2) for i in range(3)])
    assert len(make_units(batch, find_inputs(batch, np.ones(3, np.bool_)), 4096)) == 3


@pytest.mark.parametrize(
    ("prompt", "answer", "groups"), [(4, 16, 4), (2000, 64, 8), (100, 100, 3), (512, 64, 32)]
)
def test_the_busiest_shard_has_little_more_than_its_share(prompt: int, answer: int, groups: int) -> None:
    """Of four shards."""
    rows = [([g + 1] * prompt, [i] * answer, [True] * answer) for g in range(groups) for i in range(8)]
    batch = make_batch(rows)
    inputs = find_inputs(batch, np.ones(len(rows), np.bool_))
    whole = prompt + 8 * (answer - 1)
    units = make_units(batch, inputs, 8192, num_shards=4)
    plans = plan(np.array([unit.length for unit in units]), 8192, 4)
    loads = [sum(units[n].length for layout in shard for row in layout.rows for n in row) for shard in plans]
    assert max(loads) <= max(groups * whole / 4 + prompt + answer, whole)
    assert sum(len(unit.trajectories) for unit in units) == len(rows)


def test_empty_micro_batches_keep_the_ranks_in_step() -> None:
    batch = make_batch([([1], [2, 3], [True, True])])
    _, packed = pack(batch, 8, 2, share=0)
    assert [len(shard) for shard in packed] == [1, 1]
    assert len(packed[0][0].columns) == 2
    assert len(packed[1][0].columns) == 0
    assert packed[1][0].token_ids.shape == (1, 1)


def test_left_out_trajectories_are_not_packed() -> None:
    batch = make_batch([([1], [2, 3], [True, True]), ([1], [4, 5], [True, True])])
    inputs = find_inputs(batch, np.array([False, True]))
    assert inputs.lengths.tolist() == [0, 2]
    assert [u.trajectories for u in make_units(batch, inputs, 64)] == [(1,)]


def test_a_unit_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens=8"):
        plan(np.array([9]), 8, 1)


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(TaskError, match="first token"):
        pack(make_batch([([], [1, 2], [True, True])]), 8, 1, share=0)


def test_split_keeps_groups_whole_and_in_order() -> None:
    groups = np.array([5, 5, 9, 2, 2, 9])
    assert [p.tolist() for p in split_groups(groups, 2)] == [[0, 1, 2, 5], [3, 4]]
    assert [p.tolist() for p in split_groups(groups, 8)] == [[0, 1], [2, 5], [3, 4]]
