"""Opening of a run's replay store: for a new run, or rolled back to a checkpoint with the buffer's state."""

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

LEVELS_NAME = "levels.txt"  # levels of a curriculum; a file in the store's folder
_WITH_A_RUN = (Fate.BUFFERED, Fate.TRAINED, Fate.DROPPED, Fate.UNINFORMATIVE)


def open_store(
    folder: Path, lineage: str, restore_dir: Path | None, config: Config
) -> tuple[ReplayStore, BufferState | None, int]:
    """Open the store of a run that begins, or that resumes from the data folder `restore_dir`.

    Returns:
        The store, the state to continue from (None: new run), and how many groups' fates a damaged log lost.
    """
    store = ReplayStore(folder, holder=f"{folder.parent} ({lineage})")
    try:
        if restore_dir:
            return store, *_restore(store, restore_dir, config.sampling.samples_per_prompt)
        # An earlier run may have ended before its first checkpoint; this run does not train its groups.
        others = np.isin(store.index.groups["fate"], _WITH_A_RUN)
        store.settle(np.flatnonzero(others), Fate.QUARANTINED)
        with on_disk(folder):
            (folder / LEVELS_NAME).unlink(missing_ok=True)
    except BaseException:  # after any failure the lock must be released
        store.close()
        raise
    return store, None, 0


def _restore(store: ReplayStore, folder: Path, samples: int) -> tuple[BufferState, int]:
    """Roll the store back to a checkpoint; return the state to continue from and the number of lost fates.

    Raises:
        ConfigError: buffered groups have another number of samples than `samples`.
        DataError: the checkpoint is not readable, or the store is empty although the checkpoint has groups.
    """
    state, num_groups = load_checkpoint_state(folder / STATE_NAME)
    if num_groups and not store.counts().accepted:
        raise DataError(
            f"the replay store is empty, and the checkpoint {folder.parent} was written when it had "
            f"{num_groups} groups; restore the whole run folder, or resume another run"
        )
    store.expect(num_groups)
    sequences = store.roll_back(state.step)
    # The checkpoint lists every group that was buffered then. Older groups that the store shows as buffered
    # lost their fate to damage. They may have been trained, so they are not trained again.
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
    """Return `counts` plus the tokens of groups that were accepted after the checkpoint."""
    uninformative = sum(map(sampled_tokens, done))
    return replace(
        counts,
        accepted_tokens=counts.accepted_tokens + sum(map(sampled_tokens, later)) + uninformative,
        uninformative_tokens=counts.uninformative_tokens + uninformative,
    )
