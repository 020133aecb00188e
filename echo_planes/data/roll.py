"""Which workers are there, which version each serves, and which of them are parked."""

from __future__ import annotations

from collections.abc import Iterator


class WorkerRoll:
    """The workers that the data plane knows.

    A parked one is kept ready: it takes every version as the others do, is leased nothing, and does not
    count where work is shared out.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}  # that workers serve; -1: none yet
        self._parked: set[str] = set()
        self.num_leasing = 0  # serve a version and are not parked

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._versions

    def version(self, worker_id: str) -> int:
        """What a worker that is there serves; -1: nothing yet."""
        return self._versions[worker_id]

    def may_lease(self, worker_id: str) -> bool:
        """Whether it may be given prompts."""
        return self._versions.get(worker_id, -1) >= 0 and worker_id not in self._parked

    def leasing(self) -> Iterator[tuple[str, int]]:
        """Every worker that may be given prompts, and the version that it serves."""
        return ((name, version) for name, version in self._versions.items() if self.may_lease(name))

    def serves(self, worker_id: str, version: int) -> None:
        """A worker is there and serves `version`; -1: nothing yet."""
        before = self.may_lease(worker_id)
        self._versions[worker_id] = version
        self.num_leasing += self.may_lease(worker_id) - before

    def remove(self, worker_id: str) -> None:
        """A worker is gone. One that was never there may still come, and stays parked if it was."""
        self.num_leasing -= self.may_lease(worker_id)
        if self._versions.pop(worker_id, None) is not None:
            self._parked.discard(worker_id)

    def park(self, worker_id: str, parked: bool) -> None:
        """From now on a worker is parked, or no longer. It need not be there yet."""
        before = self.may_lease(worker_id)
        if parked:
            self._parked.add(worker_id)
        else:
            self._parked.discard(worker_id)
        self.num_leasing += self.may_lease(worker_id) - before
