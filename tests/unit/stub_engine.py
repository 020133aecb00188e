"""Base of the engines of several tests: they note what they are asked, and install at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from echo_planes.types import Publication


class StubEngine:
    """All of an `Engine` but `generate`."""

    def __init__(self, version: int = 0) -> None:
        self.version, self.digest, self.digest_mismatches = version, f"d{version}", 0
        self.last_pause_s, self.progress, self.about = 0.0, "", ""
        self.requests: list[tuple[tuple[int, ...], int, int]] = []  # context, samples, longest answer
        self.open = 0
        self.most_open = 0

    async def start(self) -> None:
        return None

    @contextmanager
    def request(self, prompt_ids: Sequence[int], num_samples: int, max_new_tokens: int) -> Iterator[None]:
        """One request, while it is answered."""
        self.requests.append((tuple(prompt_ids), num_samples, max_new_tokens))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield
        finally:
            self.open -= 1

    async def install(self, publication: Publication) -> None:
        self.version, self.digest = publication.manifest.version, publication.manifest.digest

    async def live_digest(self) -> str:
        return self.digest

    async def close(self) -> None:
        return None
