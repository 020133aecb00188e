"""vLLM engine that decodes by a schedule of KV budgets, and tells how far it is from dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from echo_planes.errors import ConfigError, RunError
from echo_planes.rollout.sparsity.acceptance import acceptance_bounds
from echo_planes.rollout.sparsity.schedule import Schedule
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.types import Sample

_MODULE = "echo_planes.rollout.vllm.sparse_attention"


class SparseEngine(VllmEngine):
    """See `VllmEngine`. Dense until `set_schedule`.

    Args:
        page_tokens: tokens of a page of the cache, 16 or 32.

    Raises:
        ConfigError: an option of the engine, or the sampling, does not go with sparse attention.
    """

    worker_extension = f"{_MODULE}.SparseWorkerExtension"

    def __init__(self, *args: Any, page_tokens: int = 16, **named: Any) -> None:
        super().__init__(*args, **named)
        self._page_tokens = page_tokens
        config = self._config
        if "block_size" in config.extra:
            raise ConfigError(
                f"engine.extra.block_size={config.extra['block_size']} with sparse attention: its schedule "
                "sets the size of a page; leave it out"
            )
        if config.enable_prefix_caching:
            raise ConfigError(
                "engine.enable_prefix_caching=true with sparse attention: an answer's KV of sparse layers "
                "would serve dense requests; set it to false"
            )
        self._config = config.model_copy(update={"extra": config.extra | {"block_size": page_tokens}})

    async def set_schedule(self, schedule: Schedule | None) -> None:
        """Decode by a schedule from now on, also answers in flight; None: dense.

        Raises:
            ConfigError: the schedule is of another page size.
            RunError: the engine died, or its ranks differ.
        """
        if schedule is not None and schedule.page_tokens != self._page_tokens:
            raise ConfigError(
                f"sparse.schedule: its pages have {schedule.page_tokens} tokens, the engine's have "
                f"{self._page_tokens}; calibrate one for this engine"
            )
        fields = None if schedule is None else asdict(schedule)
        numbers = await self.vllm.collective_rpc("echo_planes_set_schedule", args=(fields,))
        if set(numbers) != {-1 if schedule is None else schedule.number}:
            raise RunError(f"the ranks of the vLLM engine decode by schedules {numbers}")

    async def audit(self, prompt_ids: Sequence[int], sample: Sample) -> list[tuple[float, float]]:
        """Return bounds of each sampled token's acceptance, by a dense pass over prompt and answer.

        Raises:
            ConfigError: the sample was not drawn at temperature and top-p 1.
            RunError: the engine died.
        """
        if (self._draw.temperature, self._draw.top_p) != (1.0, 1.0):
            raise ConfigError(
                f"an audit of answers at sampling.temperature={self._draw.temperature:g} and "
                f"top_p={self._draw.top_p:g}: the dense pass tells the model's own distribution; set both "
                "to 1"
            )
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=1, prompt_logprobs=self._sampling.top_logprobs, detokenize=False, temperature=1.0
        )
        prompt = tokens_input([*prompt_ids, *sample.token_ids])
        dense: Any = None
        async for output in self.vllm.generate(prompt, params, f"audit-{next(self._request_ids)}"):
            dense = output.prompt_logprobs or dense
        if dense is None or len(dense) != len(prompt_ids) + len(sample.token_ids):
            raise RunError("the vLLM engine returned no log-probabilities of a prompt")
        return [
            acceptance_bounds([(token, one.logprob) for token, one in told.items()], sparse)
            for told, sparse in zip(dense[len(prompt_ids) :], sample.top_logprobs, strict=True)
        ]
