"""Registry of the workers: the version that each one serves, and whether it is parked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping


class WorkerRegistry:
    """The workers that the data plane knows.

    A parked worker is kept ready: it installs every version, is leased nothing, and does not count when
    permits are shared out.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}  # version that each worker serves; -1: none yet
        self._parked: set[str] = set()
        self._leasing: Counter[int] = Counter()  # number of workers that may be given prompts, by version
        self.num_leasing = 0

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._versions

    def version(self, worker_id: str) -> int:
        """Return the version that a known worker serves; -1: none yet."""
        return self._versions[worker_id]

    def may_lease(self, worker_id: str) -> bool:
        """Return whether a worker may be given prompts: it serves a version and is not parked."""
        return self._versions.get(worker_id, -1) >= 0 and worker_id not in self._parked

    def leasing(self) -> Iterator[tuple[str, int]]:
        """Yield every worker that may be given prompts, and the version that it serves."""
        return ((name, version) for name, version in self._versions.items() if self.may_lease(name))

    @property
    def versions(self) -> Mapping[int, int]:
        """Number of workers that may be given prompts, by the version that they serve."""
        return self._leasing

    def serves(self, worker_id: str, version: int) -> None:
        """Enter a worker with the version that it serves; -1: none yet."""
        self._count(worker_id, -1)
        self._versions[worker_id] = version
        self._count(worker_id, 1)

    def remove(self, worker_id: str) -> None:
        """Remove a worker and unpark it. An unknown worker may still register, and stays parked if it is."""
        self._count(worker_id, -1)
        if self._versions.pop(worker_id, None) is not None:
            self._parked.discard(worker_id)

    def park(self, worker_id: str, parked: bool) -> None:
        """Park or unpark a worker. It need not be registered yet."""
        self._count(worker_id, -1)
        if parked:
            self._parked.add(worker_id)
        else:
            self._parked.discard(worker_id)
        self._count(worker_id, 1)

    def _count(self, worker_id: str, more: int) -> None:
        """Add `more` to the counts of a worker that may be given prompts: -1 before a change, 1 after."""
        if not self.may_lease(worker_id):
            return
        version = self._versions[worker_id]
        self.num_leasing += more
        self._leasing[version] += more
        if not self._leasing[version]:
            del self._leasing[version]
