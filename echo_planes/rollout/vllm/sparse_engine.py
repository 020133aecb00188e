"""vLLM engine that decodes by a schedule of KV budgets, and tells how far it is from dense attention."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from echo_planes.config.kv_schedule import PAGE_TOKENS, Schedule
from echo_planes.errors import ConfigError, RunError
from echo_planes.rollout.sparsity.acceptance import Acceptance, Audit, acceptance
from echo_planes.rollout.vllm.answers import DENSE, label
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.rollout.vllm.environment import ENVIRONMENT
from echo_planes.types import Draw, Sample
from echo_planes.weights.sparse_adapter import SparseAdapter

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

_MODULE = "echo_planes.rollout.vllm.sparse_attention"
MOST_WAITING = 16  # audits between two calls of `take_audits`: they are dense work, so more are left out


class SparseEngine(VllmEngine):
    """See `VllmEngine`. Dense until `set_schedule`, and where a request's `Draw` says so.

    Args:
        page_tokens: tokens of a page of the cache, 16 or 32.
        audit_share: share of the answers that are compared with dense attention once they are whole.

    Raises:
        ConfigError: an option of the engine does not go with sparse attention.
    """

    worker_extension = f"{_MODULE}.SparseWorkerExtension"
    # Of vLLM's two model runners for GPUs the first one tells which request a row of a batch is of.
    environment = ENVIRONMENT | {"VLLM_USE_V2_MODEL_RUNNER": "0"}

    def __init__(self, *args: Any, page_tokens: int = 16, audit_share: float = 0.0, **named: Any) -> None:
        super().__init__(*args, **named)
        self._page_tokens = page_tokens
        self._audit_share = audit_share
        self._random = random.Random(self._seed)
        self._schedule: Schedule | None = None
        self._audits: list[Audit] = []
        self._auditing: set[asyncio.Task[None]] = set()
        self._one_audit = asyncio.Lock()  # at a time: the log-probabilities of a prompt take much memory
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
        if audit_share:
            self._check_audits()
        self._config = config.model_copy(
            update={"extra": config.extra | {"block_size": page_tokens}, "enable_prefix_caching": False}
        )

    async def set_schedule(self, schedule: Schedule | None) -> None:
        """Decode by a schedule from now on, also answers in flight; None: dense.

        Of two schedules the one with the larger number stays, in whatever order they come.

        Raises:
            ConfigError: the schedule is of another page size.
            RunError: the engine died, or none of its layers can decode sparsely.
        """
        if schedule is not None and schedule.page_tokens != self._page_tokens:
            raise ConfigError(
                f"sparse.schedule: its pages have {schedule.page_tokens} tokens, the engine's have "
                f"{self._page_tokens}; calibrate one for this engine"
            )
        async with self._install_lock:
            if schedule and self._schedule and schedule.number < self._schedule.number:
                return
            # No token may be sampled between the change and that of its mark.
            await self._reply(self.vllm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
            await self._ask("echo_planes_set_schedule", None if schedule is None else asdict(schedule))
            self._schedule = schedule
            await self._reply(self.vllm.update_weight_version(self._label(self._version, self._digest)))
            if self._still_since_s is None:  # no install has left damaged weights
                await self._reply(self.vllm.resume_generation())

    async def set_adapter(self, adapter: SparseAdapter) -> None:
        """See `Engine.set_adapter`."""
        adapter.pairs()  # an error of the engine's process would come as one of the engine
        await self._ask("echo_planes_set_adapter", adapter.version, adapter.tensors)

    def _gpu_options(self) -> dict[str, Any]:
        return super()._gpu_options() | {"attention_backend": "FLASH_ATTN"}  # which has a backend of ours

    def _label(self, version: int, digest: str) -> str:
        return label(version, digest, -1 if self._schedule is None else self._schedule.number)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        max_new_tokens: int,
        on_tokens: Callable[[int, Sample], None],
        draw: Draw | None = None,
    ) -> list[Sample]:
        """See `VllmEngine.generate`. A share of the answers is audited afterwards, beside the next ones.

        Not while every bin is dense: there is nothing to compare.
        """
        samples = await super().generate(
            prompt_ids,
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            on_tokens=on_tokens,
            draw=draw,
        )
        if draw is None and self._schedule is not None and any(self._schedule.pages):
            for sample in samples:
                is_drawn = self._random.random() < self._audit_share
                is_whole = len(sample.spans) == 1 and len(sample.token_ids) > 1
                if is_drawn and is_whole and len(self._auditing) < MOST_WAITING:
                    task = asyncio.create_task(self._audit_later(prompt_ids, sample))
                    self._auditing.add(task)
        return samples

    def _sampling_params(self, num_samples: int, max_tokens: int, draw: Draw) -> SamplingParams:
        params = super()._sampling_params(num_samples, max_tokens, draw)
        if draw.dense:
            params.extra_args = {DENSE: True}
        return params

    async def _audit_later(self, prompt_ids: Sequence[int], sample: Sample) -> None:
        (span,) = sample.spans
        async with self._one_audit:
            told = await self._compared(prompt_ids, sample) if span.version == self._version else None
        if told is None:
            return  # newer weights came
        found, drift = told
        alphas = tuple(one.likely for one in found[1:])
        self._audits.append(Audit(span.schedule, span.version, len(prompt_ids), alphas, drift))

    def take_audits(self) -> list[Audit]:
        """Return the audits since the last call.

        Raises:
            RunError: the engine died in an audit.
        """
        for task in [one for one in self._auditing if one.done()]:
            self._auditing.discard(task)
            task.result()
        audits, self._audits = self._audits, []
        return audits

    async def close(self) -> None:
        for task in self._auditing:
            task.cancel()
        await super().close()

    async def audit(self, prompt_ids: Sequence[int], sample: Sample) -> list[Acceptance]:
        """Return each sampled token's acceptance, by a dense pass over prompt and answer.

        The last distribution is that of the token which the pass samples behind the others. So an answer may
        fill the length of the model.

        Args:
            prompt_ids: the prompt.
            sample: whole, drawn as the engine's settings say, by the version that serves now.

        Raises:
            ConfigError: the settings' temperature and top-p are not 1, or keep no top log-probabilities.
            RunError: the engine died, or the sample is of another version.
        """
        self._check_audits()
        told = await self._compared(prompt_ids, sample)
        if told is None:
            versions = {span.version for span in sample.spans}
            raise RunError(f"an audit of tokens of versions {versions}, while {self.version} serves")
        return told[0]

    def _check_audits(self) -> None:
        settings = self._sampling
        if (settings.temperature, settings.top_p) != (1.0, 1.0) or not settings.top_logprobs:
            raise ConfigError(
                f"an audit of answers with sampling.temperature={settings.temperature:g}, "
                f"top_p={settings.top_p:g} and top_logprobs={settings.top_logprobs}: the dense pass tells "
                "the model's own distribution; set the first two to 1, and keep some"
            )

    async def _compared(
        self, prompt_ids: Sequence[int], sample: Sample
    ) -> tuple[list[Acceptance], float] | None:
        """Return each token's acceptance, and the mean |log p_dense - log q_sparse| of those after the first.

        None: the sample is not of the weights that the whole pass was made with.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        count = self._sampling.top_logprobs
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=count,
            logprobs=count,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={DENSE: True},
        )
        if {span.version for span in sample.spans} != {self._version}:
            return None
        prompt = tokens_input([*prompt_ids, *sample.token_ids[:-1]])
        dense: list[Any] = []
        labels: set[str] = set()
        try:
            async for output in self.vllm.generate(prompt, params, f"audit-{next(self._request_ids)}"):
                dense = [*output.prompt_logprobs[len(prompt_ids) :], *output.outputs[0].logprobs]
                labels = {run.version for run in output.outputs[0].weight_versions}
        except (EngineDeadError, EngineGenerateError) as error:
            raise RunError(f"the vLLM engine died in an audit: {error}") from error
        # Versions only rise: if the last token is of the sample's, so is all that was before it.
        if {int(one.partition(" ")[0]) for one in labels} != {span.version for span in sample.spans}:
            return None
        drawn = zip(sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True)
        pairs = list(zip(dense, drawn, strict=True))
        found = [
            acceptance([(one, it.logprob) for one, it in told.items()], [*top, (token, logprob)])
            for told, (token, logprob, top) in pairs
        ]
        # The last token is not in the pass, so only by chance among its likeliest.
        apart = [
            abs(told[token].logprob - logprob) for told, (token, logprob, _) in pairs[1:] if token in told
        ]
        return found, sum(apart) / max(1, len(apart))
