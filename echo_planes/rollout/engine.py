"""Interface to an inference engine, as a rollout worker needs it.

`vllm.engine.VllmEngine` is the real engine; `echo_planes.testing.simulation.FakeEngine` is the public fake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from echo_planes.config.kv_schedule import Schedule
from echo_planes.rollout.sparsity.acceptance import Audit
from echo_planes.types import Draw, Publication, Sample
from echo_planes.weights.sparse_adapter import SparseAdapter


class Engine(Protocol):
    """One inference engine. Callers use one event loop for all methods."""

    @property
    def version(self) -> int:
        """Published version that serves now; -1 before the first install."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the weights that serve now, taken from the live tensors at start or last install."""
        ...

    @property
    def digest_mismatches(self) -> int:
        """Number of times that an install found live tensors that did not match their digest."""
        ...

    @property
    def last_pause_s(self) -> float:
        """Seconds that generation paused for the last install, refused or not; 0.0 before the first one.

        For an install that repaired damaged weights, the pause begins when they were found damaged.
        """
        ...

    @property
    def progress(self) -> str:
        """Text of what the engine has computed, which changes also while it reads long prompts."""
        ...

    @property
    def about(self) -> str:
        """Line on how the engine computes, once it has started; "": nothing to say."""
        ...

    async def start(self) -> None:
        """Build the engine and answer one warm-up request. Slow (tens of seconds).

        Raises:
            EngineStartError: it did not start.
        """
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

        The engine calls `on_tokens(i, piece)` when more tokens of sample i arrive; the joined pieces are the
        sample. The spans of a sample give the published version and digest under which it sampled each token.
        `draw` sets temperature and top-p; None: those of the engine's settings.
        """
        ...

    async def install(self, publication: Publication) -> None:
        """Make a published version serve, at a safe point, and keep the requests in flight.

        Takes codecs `overwrite` and `full`; others must be staged first (`weights.node.stager.Stager`). Pass
        a payload that is already a file as `weights.receiver.open_staged` opens it. The engine then reads
        that file without a copy, and the file must exist until this method returns.

        Either the live tensors end with exactly the digest in the manifest and answer a probe, or nothing
        changes and `WeightsError` says why. Tensors found damaged do not serve any more: generation pauses
        until the next install, which must be in full and succeed.

        Raises:
            WeightsError: the publication was refused, or the live tensors were found damaged.
            RunError: the weights that serve are unknown, or damage was not repaired. Generation stays
                paused: end this engine.
        """
        ...

    async def set_schedule(self, schedule: Schedule | None) -> None:
        """Decode by a schedule of KV budgets from now on; None: dense.

        Raises:
            RunError: the engine was built for dense attention, or died.
        """
        ...

    async def set_adapter(self, adapter: SparseAdapter) -> None:
        """Compute with an adapter where attention is sparse, from now on. An older one than the last is left.

        Raises:
            WeightsError: it is no adapter of this model.
            RunError: the engine was built for dense attention, or died.
        """
        ...

    def take_audits(self) -> list[Audit]:
        """Return the comparisons of answers with dense attention since the last call."""
        ...

    async def live_digest(self) -> str:
        """Return the canonical digest of the engine's live tensors, computed now."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
