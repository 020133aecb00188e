"""A run's replay store, opened: anew, or taken back to a checkpoint together with the buffer's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from echo_planes.config.schema import Config
from echo_planes.data.replay.buffer_state import Accepted, BufferState
from echo_planes.data.replay.checkpoint_state import STATE_NAME, load_checkpoint_state, rejoin
from echo_planes.data.store.files import on_disk
from echo_planes.data.store.index import Fate
from echo_planes.data.store.store import ReplayStore
from echo_planes.errors import ConfigError, DataError
from echo_planes.types import BufferCounts, Group, sampled_tokens

LEVELS_NAME = "levels.txt"  # of a curriculum, in the store's folder
_WITH_A_RUN = (Fate.BUFFERED, Fate.TRAINED, Fate.DROPPED, Fate.UNINFORMATIVE)


def open_store(
    folder: Path, lineage: str, restore_dir: Path | None, config: Config
) -> tuple[ReplayStore, BufferState | None, int]:
    """The store, the state to go on from, and how many groups' fates were forgotten by a damaged log."""
    store = ReplayStore(folder, holder=f"{folder.parent} ({lineage})")
    try:
        if restore_dir:
            return store, *_restore(store, restore_dir, config.sampling.samples_per_prompt)
        # What a run left that ended before its first checkpoint is not this run's.
        others = np.isin(store.index.groups["fate"], _WITH_A_RUN)
        store.settle(np.flatnonzero(others), Fate.QUARANTINED)
        with on_disk(folder):
            (folder / LEVELS_NAME).unlink(missing_ok=True)
    except BaseException:  # whatever it is: the lock must not outlive it
        store.close()
        raise
    return store, None, 0


def _restore(store: ReplayStore, folder: Path, samples: int) -> tuple[BufferState, int]:
    """Take the store back to a checkpoint; see `_open`.

    Raises:
        ConfigError: groups have another number of samples now.
        DataError: the checkpoint is not readable, or the store is another one's.
    """
    state, num_groups = load_checkpoint_state(folder / STATE_NAME)
    if num_groups and not store.counts().accepted:
        raise DataError(
            f"the replay store is empty, and the checkpoint {folder.parent} was written when it had "
            f"{num_groups} groups; restore the whole run folder, or resume another run"
        )
    store.expect(num_groups)
    sequences = store.roll_back(state.step)
    # Whatever was open at the checkpoint is in it. Of others the fate is forgotten: trained perhaps, so not
    # again.
    known = {group.group_id for group in state.groups}
    is_open = [
        i >= num_groups or name in known for i, name in zip(sequences, store.ids(sequences), strict=True)
    ]
    forgotten = sequences[~np.array(is_open, np.bool_)]
    store.settle(forgotten, Fate.QUARANTINED, step=state.step)
    sequences = sequences[np.array(is_open, np.bool_)]
    groups = store.gather_groups(sequences) if len(sequences) else []
    for group in groups:
        if len(group.trajectories) != samples:
            raise ConfigError(
                f"sampling.samples_per_prompt={samples}, but the run has groups of {len(group.trajectories)} "
                "to train; resume with the number it was started with"
            )
    kept = [Accepted.of(group) for group in groups]
    is_later = sequences >= num_groups
    later = [group for group, is_new in zip(groups, is_later, strict=True) if is_new]
    set_aside = np.flatnonzero(store.index.groups["fate"] == Fate.UNINFORMATIVE)
    set_aside = set_aside[set_aside >= num_groups]
    done = store.gather_groups(set_aside) if len(set_aside) else []
    state = replace(state, counts=_with_tokens(state.counts, later, done))
    state = rejoin(
        state,
        [Accepted.of(group) for group in later],
        kept,
        store.trajectory_counts(),
        [Accepted.of(group) for group in done],
    )
    return state, len(forgotten)


def _with_tokens(counts: BufferCounts, later: Sequence[Group], done: Sequence[Group]) -> BufferCounts:
    """The tokens of groups that were accepted after the checkpoint, counted in."""
    uninformative = sum(map(sampled_tokens, done))
    return replace(
        counts,
        accepted_tokens=counts.accepted_tokens + sum(map(sampled_tokens, later)) + uninformative,
        uninformative_tokens=counts.uninformative_tokens + uninformative,
    )
