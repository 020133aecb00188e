"""Model of leases, tokens and the ledger, which `invariants.WatchedBuffer` compares with the real buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_planes.types import Group, Lease, PartialRollout

Label = tuple[int, int, str]  # a token with the version and digest that it was sampled under


@dataclass(slots=True)
class Call:
    """Call of the policy with its streamed tokens."""

    context: tuple[int, ...]
    tokens: list[Label] = field(default_factory=list)


@dataclass(slots=True)
class Held:
    """Live lease."""

    lease: Lease
    calls: list[Call]
    issued_s: float
    ends_s: float
    recalled: bool = False


@dataclass(slots=True)
class Tally:
    """Expected counts of the ledger, in groups; `expired` in leases."""

    accepted: int = 0
    trained: int = 0
    dropped: int = 0
    uninformative: int = 0
    reused: int = 0
    refused: int = 0
    failed: int = 0
    expired: int = 0


def labels(partial: PartialRollout) -> list[Label]:
    """Return the label of every token of a partial rollout."""
    ids, spans = partial.sample.token_ids, partial.sample.spans
    return [(ids[i], span.version, span.digest) for span in spans for i in range(span.start, span.stop)]


def is_sound(lease: Lease, group: Group, digests: Mapping[int, str]) -> bool:
    """Return whether a group is whole, belongs to its lease and was sampled under published versions only.

    `digests`: digest of each published version.
    """
    return (
        group.group_id == lease.group_id
        and len(group.trajectories) == lease.num_samples
        and all(t.status == "ok" and t.prompt == lease.prompt for t in group.trajectories)
        and all(t.worker_id == lease.worker_id for t in group.trajectories)
        and all(
            digests.get(span.version) == span.digest for t in group.trajectories for span in t.episode.spans
        )
    )
