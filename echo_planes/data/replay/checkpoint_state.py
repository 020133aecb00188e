"""The replay buffer's part of a checkpoint, and how a resume combines it with the store.

The store has every accepted group, also those accepted between checkpoint and crash. The checkpoint has the
state of training and prompts. Combined, they skip no prompt, repeat no work that was kept, and their ledger
adds up.

In a checkpoint's data folder::

    state.json      everything but the partial rollouts; size and hash of their file (null: there is none)
    drafts.arrows   tokens of unfinished prompts (`checkpoint_partial_rollouts` numbers its format)

A `state.json` without the key `drafts`, as earlier versions wrote it, is read too. Partial rollouts only save
work: if their file is missing, damaged or of another format, the run continues without them, and the ledger
counts their tokens (`unreadable_tokens`). `state.json` itself must be whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from echo_planes.config.files import LOG_BYTES, read_json
from echo_planes.data.replay.buffer_state import Accepted, BufferState
from echo_planes.data.replay.checkpoint_partial_rollouts import PartialsRecord, read_partials, write_partials
from echo_planes.data.store.index import StoreCounts
from echo_planes.errors import DataError
from echo_planes.types import BufferCounts

STATE_NAME = "state.json"  # in a checkpoint's data folder
PARTIALS_NAME = "drafts.arrows"  # beside it


def write_checkpoint_state(folder: Path, state: BufferState, *, num_groups: int) -> None:
    """Write a checkpoint state into a new folder.

    Args:
        folder: a checkpoint's data folder, empty.
        state: state to write.
        num_groups: number of groups that the store had accepted.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    partials = asdict(write_partials(folder / PARTIALS_NAME, state.partials)) if state.partials else None
    record = asdict(replace(state, partials={})) | {"drafts": partials, "num_groups": num_groups}
    del record["partials"]  # they are in `drafts.arrows`
    (folder / STATE_NAME).write_text(json.dumps(record))


def load_checkpoint_state(path: Path) -> tuple[BufferState, int]:
    """Read the file `path` of `write_checkpoint_state`; return the state and the store's number of groups.

    Partial rollouts that cannot be read are left out, and their tokens counted.

    Raises:
        DataError: the file is no checkpoint state.
    """
    try:
        record = read_json(path, LOG_BYTES, advice="restore it, or remove the checkpoint")
        state = BufferState(
            step=record["step"],
            next_index=record["next_index"],
            returned=tuple(record["returned"]),
            issued=record["issued"],
            groups=tuple(Accepted(**group) for group in record["groups"]),
            counts=BufferCounts(**record["counts"]),
            published=tuple((line, version, digest) for line, version, digest in record["published"]),
            replaced=record.get("replaced", 0),
        )
        partials = PartialsRecord(**record["drafts"]) if record.get("drafts") else None
        num_groups = int(record["num_groups"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the checkpoint's {path} is not readable ({error}); restore it, or remove the checkpoint"
        ) from error
    return (_with_partials(state, path.parent / PARTIALS_NAME, partials) if partials else state), num_groups


def _with_partials(state: BufferState, path: Path, record: PartialsRecord) -> BufferState:
    try:
        return replace(state, partials=read_partials(path, record))
    except DataError:  # workers sample these tokens again; the ledger counts them
        counts = state.counts
        lost = replace(
            counts,
            discarded_tokens=counts.discarded_tokens + record.num_tokens,
            unreadable_tokens=counts.unreadable_tokens + record.num_tokens,
        )
        return replace(state, counts=lost)


def rejoin(
    state: BufferState,
    later: Sequence[Accepted],
    kept: Sequence[Accepted],
    counts: StoreCounts,
    done: Sequence[Accepted] = (),
) -> BufferState:
    """Return the state to continue from.

    Args:
        state: state of the checkpoint.
        later: those groups of `kept` that were accepted after the checkpoint.
        kept: every group that the rolled-back store holds as buffered, in order of arrival.
        counts: ledger of the rolled-back store, in trajectories.
        done: groups set aside as uninformative after the checkpoint that keep this fate.
    """
    there = {group.prompt_index for group in (*kept, *done)}
    beyond = max((group.prompt_index + 1 for group in (*later, *done)), default=0)
    next_index = max(state.next_index, beyond)
    open_ = {*state.returned, *range(state.next_index, next_index)}
    # Prompts of the checkpoint's groups go out again if the group was since dropped, removed or damaged.
    open_ |= {group.prompt_index for group in state.groups}
    ledger = replace(
        state.counts,
        accepted=counts.trained + counts.dropped + counts.removed + counts.uninformative + counts.buffered,
        trained=counts.trained,
        dropped_stale=counts.dropped,
        removed=counts.removed,
        uninformative=counts.uninformative,
        buffered=counts.buffered,
    )
    returned = open_ - there
    return replace(
        state,
        next_index=next_index,
        returned=tuple(sorted(returned)),
        groups=tuple(kept),
        counts=ledger,
        partials={index: partials for index, partials in state.partials.items() if index in returned},
    )
