"""The replay buffer's part of a checkpoint, and how it meets the store again on a resume.

The store is the truth about groups: it has every accepted one, also those of the time between checkpoint and
crash. The checkpoint is the truth about training and prompts. Put together, no prompt is skipped, none whose
work is there is done again, and the ledger adds up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from echo_planes.data.buffer_state import Accepted, BufferState
from echo_planes.data.store.index import StoreCounts
from echo_planes.errors import DataError
from echo_planes.types import BufferCounts

CUT_NAME = "state.json"  # in a checkpoint's data folder


def dump_cut(state: BufferState, *, num_groups: int) -> str:
    """A cut as JSON.

    Args:
        state: the cut.
        num_groups: how many groups the store had accepted.
    """
    return json.dumps({**asdict(state), "num_groups": num_groups})


def load_cut(path: Path) -> tuple[BufferState, int]:
    """The inverse of `dump_cut`: the cut in a file, and the number of groups in the store.

    Raises:
        DataError: the file is no cut.
    """
    try:
        record = json.loads(path.read_text())
        state = BufferState(
            step=record["step"],
            next_index=record["next_index"],
            returned=tuple(record["returned"]),
            issued=record["issued"],
            groups=tuple(Accepted(**group) for group in record["groups"]),
            counts=BufferCounts(**record["counts"]),
            published=tuple((line, version, digest) for line, version, digest in record["published"]),
        )
        return state, int(record["num_groups"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the checkpoint's {path} is not readable ({error}); restore it, or remove the checkpoint"
        ) from error


def rejoin(
    state: BufferState, later: Sequence[Accepted], kept: Sequence[Accepted], counts: StoreCounts
) -> BufferState:
    """The state to go on from.

    Args:
        state: the checkpoint's cut.
        later: of `kept`, the groups that were accepted after the cut.
        kept: every group that the rolled back store holds as buffered, in order of arrival.
        counts: its ledger, in trajectories.
    """
    there = {group.prompt_index for group in kept}
    beyond = max((group.prompt_index + 1 for group in later), default=0)
    next_index = max(state.next_index, beyond)
    open_ = {*state.returned, *range(state.next_index, next_index)}
    # Of the cut's groups, those that have left since: dropped, or let go, or damaged on disk.
    open_ |= {group.prompt_index for group in state.groups}
    ledger = replace(
        state.counts,
        accepted=counts.trained + counts.dropped + counts.removed + counts.buffered,
        trained=counts.trained,
        dropped_stale=counts.dropped,
        removed=counts.removed,
        buffered=counts.buffered,
    )
    return replace(
        state,
        next_index=next_index,
        returned=tuple(sorted(open_ - there)),
        groups=tuple(kept),
        counts=ledger,
    )
