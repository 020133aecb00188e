"""Schedule of a sender's writes to its store. Pure: it is told what happened, and asked what to do.

Every publication goes up as it was sent; beside the patches a full snapshot, the anchor, every so many
publications, in the background. A patch that cannot be stored, or that waits too long, breaks the way through
the store: then the newest version is stored in full, as soon as the store takes it (PULSE appendix G.1, G.4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from echo_planes.errors import ConfigError
from echo_planes.weights.wire.manifest import PublicationKey

FIRST_RETRY_S = 5.0  # after an anchor that could not be stored; doubled each time
MAX_RETRY_S = 300.0
MAX_WAITING = 8  # publications held for a store that is slower than the learner


@dataclass(frozen=True, slots=True)
class AnchorWork:
    """Store a full snapshot of this version, or of a newer one of the lineage."""

    lineage: str
    version: int


class Archivist:
    """One sender's store, seen from above. One thread, or one event loop, calls it.

    The owner asks `next_publication` and `next_anchor` after every event, does what they say (the two may go
    on at the same time, each one at a time) and reports with `publication_done` and `anchor_done`.

    Args:
        anchor_every: publications from one anchor to the next, at least 1.
        max_waiting: publications that may wait for the store; of more, the oldest are skipped. So they are
            of more bytes than the model has, but for the newest.

    Raises:
        ConfigError: one of them is below 1.
    """

    def __init__(self, anchor_every: int = 50, max_waiting: int = MAX_WAITING) -> None:
        if anchor_every < 1 or max_waiting < 1:
            raise ConfigError(f"weights.anchor_every={anchor_every} must be at least 1")
        self._anchor_every = anchor_every
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[PublicationKey, int]] = deque()  # with its payload's bytes
        self._writing: PublicationKey | None = None
        self._newest: PublicationKey | None = None
        self._since_anchor = 0  # publications of the newest lineage since its last anchor was asked for
        self._anchor_due = False
        self._anchor_busy = False
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s = 0.0
        self.num_failed = 0  # publications and anchors that the store did not take
        self.num_skipped = 0  # publications never tried: too many waited
        self.last_error = ""

    @property
    def holds(self) -> frozenset[PublicationKey]:
        """Publications that the owner must still be able to read."""
        writing = () if self._writing is None else (self._writing,)
        return frozenset((*(key for key, _ in self._waiting), *writing))

    @property
    def broken(self) -> bool:
        """Whether the newest version may have no way through the store: an anchor is due or on its way."""
        return self._anchor_due or self._anchor_busy

    def published(self, key: PublicationKey, payload_bytes: int, dense_bytes: int) -> None:
        """A publication is complete at the sender.

        Args:
            payload_bytes: of this publication.
            dense_bytes: of the model.
        """
        if self._newest is None or key.lineage != self._newest.lineage:
            self._since_anchor = 0
            self._anchor_due = key.codec != "full"  # a patch opens a lineage: nothing to patch in the store
        self._newest = key
        self._waiting.append((key, payload_bytes))
        if key.codec == "full":
            self._since_anchor = 0
        else:
            self._since_anchor += 1
            if self._since_anchor >= self._anchor_every:
                self._demand_anchor()
        while self._too_much_waits(max(dense_bytes, payload_bytes)):
            self._waiting.popleft()
            self.num_skipped += 1
            if all(waiting.codec != "full" for waiting, _ in self._waiting):
                self._demand_anchor()

    def next_publication(self) -> PublicationKey | None:
        """The publication to store now; None: none waits, or one is being stored."""
        if self._writing is None and self._waiting:
            self._writing, _ = self._waiting.popleft()
            return self._writing
        return None

    def publication_done(self, key: PublicationKey, error: str) -> None:
        """Enter the end of storing it: `error` is "" where it is in the store now."""
        self._writing = None
        if error:
            self._failed(error)
        if self._newest is None or key.lineage != self._newest.lineage:
            return  # of a replaced lineage: nobody needs a way to it
        if error:
            self._demand_anchor()
        elif key == self._newest and key.codec == "full":
            self._anchor_due = False

    def next_anchor(self, now_s: float) -> AnchorWork | None:
        """The anchor to store now; None: none is due, one is being stored, or the store is given time."""
        if not self._anchor_due or self._anchor_busy or self._newest is None or now_s < self._retry_at_s:
            return None
        self._anchor_due, self._anchor_busy = False, True
        return AnchorWork(self._newest.lineage, self._newest.version)

    def anchor_done(self, error: str, now_s: float) -> None:
        """Enter the end of storing the anchor: `error` is "" where it is stored; else it is tried again."""
        self._anchor_busy = False
        if not error:
            self._retry_s, self._retry_at_s = FIRST_RETRY_S, 0.0
            return
        self._failed(error)
        self._anchor_due = True
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _too_much_waits(self, max_bytes: int) -> bool:
        if len(self._waiting) > self._max_waiting:
            return True
        return len(self._waiting) > 1 and sum(size for _, size in self._waiting) > max_bytes

    def _demand_anchor(self) -> None:
        self._anchor_due = True
        self._since_anchor = 0

    def _failed(self, error: str) -> None:
        self.num_failed += 1
        self.last_error = error
