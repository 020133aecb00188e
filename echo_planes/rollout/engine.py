"""Interface that a rollout worker needs of an inference engine.

`vllm.engine.VllmEngine` is the real one; `echo_planes.testing.simulation.FakeEngine` the public fake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from echo_planes.types import Draw, Publication, Sample


class Engine(Protocol):
    """One inference engine. All methods are called from one event loop."""

    @property
    def version(self) -> int:
        """The published version that serves now; -1 before the first install."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the weights that serve now, as taken from the live tensors at the last install."""
        ...

    @property
    def digest_mismatches(self) -> int:
        """Times an install found the live tensors not to be what a digest said of them."""
        ...

    @property
    def last_pause_s(self) -> float:
        """Seconds generation stood still for the last install, refused or not; 0.0 before the first one.

        Of an install that mended damaged weights: since they were found damaged.
        """
        ...

    async def start(self) -> None:
        """Build the engine and answer one warm-up request. Slow (tens of seconds)."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        max_new_tokens: int,
        on_tokens: Callable[[int, Sample], None],
        draw: Draw | None = None,
    ) -> list[Sample]:
        """Sample `num_samples` continuations of one prompt.

        `on_tokens(i, piece)` is called as more tokens of sample i arrive: pieces joined are the sample. Each
        sample's spans say which published version and digest every token was made under. `draw` says how
        tokens are drawn; None: as the engine was made for.
        """
        ...

    async def install(self, publication: Publication) -> None:
        """Make a published version serve, at a safe point, keeping the requests in flight.

        Takes codecs `overwrite` and `full`; others must be staged first (`weights.node.stager.Stager`). A
        payload that is already a file is given as `weights.receiver.open_staged` opens it: the engine then
        reads that file and makes no copy, and the file must stay until this returns.

        Either the live tensors end with exactly the digest in the manifest and answer a probe, or nothing
        changes and `WeightsError` says why. Tensors found damaged do not serve on: generation stands still
        until the next install, which must be in full and succeed.

        Raises:
            WeightsError: the publication was refused, or the live tensors were found damaged.
            RunError: what serves is no longer known, or damage was not mended. Generation stands still: end
                this engine.
        """
        ...

    async def live_digest(self) -> str:
        """Canonical digest computed now from the engine's live tensors."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
