"""Schedule of a sender's writes to its store. Pure: its owner reports events, and asks for the next write.

The owner stores every publication as it was sent, and a snapshot after every `snapshot_every` patches. If a
publication cannot be stored, or too many wait, later patches lack their base in the store. The archivist then
schedules a snapshot of the newest version, and retries it until it is stored (PULSE appendix G.1, G.4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from echo_planes.errors import ConfigError
from echo_planes.weights.wire.manifest import PublicationKey

FIRST_RETRY_S = 5.0  # delay after a failed snapshot; doubled after each further failure
MAX_RETRY_S = 300.0
MAX_WAITING = 8  # publications that wait for a store slower than the learner


@dataclass(frozen=True, slots=True)
class SnapshotWork:
    """Order to store a snapshot of this version, or of a newer one of the lineage."""

    lineage: str
    version: int


class Archivist:
    """Schedule of one sender's store, for one thread or one event loop.

    After every event, the owner calls `next_publication` and `next_snapshot`, does the writes they return,
    and reports with `publication_done` and `snapshot_done`. One publication and one snapshot may be written
    at the same time.

    Args:
        snapshot_every: patches from one snapshot to the next, at least 1.
        max_waiting: publications that may wait for the store, at least 1. The archivist skips the oldest
            above this number, or while several wait with more bytes than the model has.

    Raises:
        ConfigError: one of them is below 1.
    """

    def __init__(self, snapshot_every: int = 50, max_waiting: int = MAX_WAITING) -> None:
        if snapshot_every < 1 or max_waiting < 1:
            raise ConfigError(f"weights.snapshot_every={snapshot_every} must be at least 1")
        self._snapshot_every = snapshot_every
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[PublicationKey, int]] = deque()  # with the size of the payload, bytes
        self._writing: PublicationKey | None = None
        self._newest: PublicationKey | None = None
        self._unstored: set[int] = set()  # versions of the newest lineage
        self._since_snapshot = 0  # patches of the newest lineage since its last snapshot was scheduled
        self._snapshot_due = False
        self._snapshot_busy = False
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s = 0.0
        self.num_failed = 0  # failed writes of publications and snapshots
        self.num_skipped = 0  # publications skipped because too many waited
        self.last_error = ""

    @property
    def holds(self) -> frozenset[PublicationKey]:
        """Publications that the owner must still be able to read."""
        writing = () if self._writing is None else (self._writing,)
        return frozenset((*(key for key, _ in self._waiting), *writing))

    @property
    def broken(self) -> bool:
        """Return whether a snapshot is due or being stored: the store may not lead to the newest version."""
        return self._snapshot_due or self._snapshot_busy

    @property
    def unstored(self) -> tuple[int, ...]:
        """Published versions of the newest lineage that have not been in the store."""
        return tuple(sorted(self._unstored))

    def published(self, key: PublicationKey, payload_bytes: int, dense_bytes: int) -> None:
        """Record that a publication is complete at the sender.

        Args:
            payload_bytes: size of this publication's payload.
            dense_bytes: size of the model's weights.
        """
        if self._newest is None or key.lineage != self._newest.lineage:
            self._since_snapshot = 0
            self._snapshot_due = key.codec != "full"  # a lineage that begins with a patch lacks its base
            self._unstored.clear()
        newest = self._newest
        if newest is None or (key.lineage, key.version) != (newest.lineage, newest.version):
            self._unstored.add(key.version)  # one that is published again may be there
        self._newest = key
        self._waiting.append((key, payload_bytes))
        if key.codec == "full":
            self._since_snapshot = 0
        else:
            self._since_snapshot += 1
            if self._since_snapshot >= self._snapshot_every:
                self._demand_snapshot()
        while self._too_much_waits(max(dense_bytes, payload_bytes)):
            self._waiting.popleft()
            self.num_skipped += 1
            if all(waiting.codec != "full" for waiting, _ in self._waiting):
                self._demand_snapshot()

    def next_publication(self) -> PublicationKey | None:
        """Return the publication to store now; None: none waits, or one is being stored."""
        if self._writing is None and self._waiting:
            self._writing, _ = self._waiting.popleft()
            return self._writing
        return None

    def publication_done(self, key: PublicationKey, error: str) -> None:
        """Record that storing a publication has ended; `error` is "" if it is in the store."""
        self._writing = None
        if error:
            self._failed(error)
        if self._newest is None or key.lineage != self._newest.lineage:
            return  # the lineage was replaced: no worker needs it
        if error:
            self._demand_snapshot()
            return
        self._unstored.discard(key.version)
        if key == self._newest and key.codec == "full":
            self._snapshot_due = False

    def next_snapshot(self, now_s: float) -> SnapshotWork | None:
        """Return the snapshot to store now; None: none is due, one is being stored, or a retry must wait."""
        if not self._snapshot_due or self._snapshot_busy or self._newest is None or now_s < self._retry_at_s:
            return None
        self._snapshot_due, self._snapshot_busy = False, True
        return SnapshotWork(self._newest.lineage, self._newest.version)

    def snapshot_done(self, version: int, error: str, now_s: float) -> None:
        """Record that storing the snapshot of `version` has ended; unless `error` is "", schedule a retry."""
        self._snapshot_busy = False
        if not error:
            self._unstored.discard(version)
            self._retry_s, self._retry_at_s = FIRST_RETRY_S, 0.0
            return
        self._failed(error)
        self._snapshot_due = True
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _too_much_waits(self, max_bytes: int) -> bool:
        if len(self._waiting) > self._max_waiting:
            return True
        return len(self._waiting) > 1 and sum(size for _, size in self._waiting) > max_bytes

    def _demand_snapshot(self) -> None:
        self._snapshot_due = True
        self._since_snapshot = 0

    def _failed(self, error: str) -> None:
        self.num_failed += 1
        self.last_error = error
