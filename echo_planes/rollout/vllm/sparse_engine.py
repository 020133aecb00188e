"""vLLM engine that decodes by a schedule of KV budgets, and tells how far it is from dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from echo_planes.errors import ConfigError, RunError
from echo_planes.rollout.sparsity.acceptance import acceptance_bounds
from echo_planes.rollout.sparsity.schedule import PAGE_TOKENS, Schedule
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.types import Sample

_MODULE = "echo_planes.rollout.vllm.sparse_attention"


class SparseEngine(VllmEngine):
    """See `VllmEngine`. Dense until `set_schedule`.

    Args:
        page_tokens: tokens of a page of the cache, 16 or 32.

    Raises:
        ConfigError: an option of the engine does not go with sparse attention.
    """

    worker_extension = f"{_MODULE}.SparseWorkerExtension"

    def __init__(self, *args: Any, page_tokens: int = 16, **named: Any) -> None:
        super().__init__(*args, **named)
        self._page_tokens = page_tokens
        config = self._config
        if page_tokens not in PAGE_TOKENS:
            raise ConfigError(
                f"page_tokens={page_tokens}: there are pages of {PAGE_TOKENS[0]} and {PAGE_TOKENS[1]}"
            )
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
            RunError: the engine died, or none of its layers can decode sparsely.
        """
        if schedule is not None and schedule.page_tokens != self._page_tokens:
            raise ConfigError(
                f"sparse.schedule: its pages have {schedule.page_tokens} tokens, the engine's have "
                f"{self._page_tokens}; calibrate one for this engine"
            )
        await self._ask("echo_planes_set_schedule", None if schedule is None else asdict(schedule))

    async def audit(self, prompt_ids: Sequence[int], sample: Sample) -> list[tuple[float, float]]:
        """Return bounds of each sampled token's acceptance, by a dense pass over prompt and answer.

        The last distribution is that of the token which the pass samples behind the others. So an answer may
        fill the length of the model.

        Args:
            prompt_ids: the prompt.
            sample: whole, drawn as the engine's settings say, by the version that serves now.

        Raises:
            ConfigError: the settings' temperature and top-p are not 1, or keep no top log-probabilities.
            RunError: the engine died, or the sample is of another version.
        """
        settings = self._sampling
        if (settings.temperature, settings.top_p) != (1.0, 1.0) or not settings.top_logprobs:
            raise ConfigError(
                f"an audit of answers with sampling.temperature={settings.temperature:g}, "
                f"top_p={settings.top_p:g} and top_logprobs={settings.top_logprobs}: the dense pass tells "
                "the model's own distribution; set the first two to 1, and keep some"
            )
        versions = {span.version for span in sample.spans}
        if versions != {self.version}:
            raise RunError(f"an audit of tokens of versions {versions}, while {self.version} serves")
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        count = settings.top_logprobs
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=count,
            logprobs=count,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input([*prompt_ids, *sample.token_ids[:-1]])
        dense: list[Any] = []
        try:
            async for output in self.vllm.generate(prompt, params, f"audit-{next(self._request_ids)}"):
                dense = [*output.prompt_logprobs[len(prompt_ids) :], *output.outputs[0].logprobs]
        except (EngineDeadError, EngineGenerateError) as error:
            raise RunError(f"the vLLM engine died in an audit: {error}") from error
        drawn = zip(sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True)
        return [
            acceptance_bounds([(one, found.logprob) for one, found in told.items()], [*top, (token, logprob)])
            for told, (token, logprob, top) in zip(dense, drawn, strict=True)
        ]
