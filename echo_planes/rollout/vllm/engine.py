"""One vLLM engine behind the `Engine` protocol: `AsyncLLM` here, the model in a process of its own.

vLLM is imported in `start`, after the environment variables that it reads at import.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from echo_planes.config.schema import EngineConfig, SamplingConfig
from echo_planes.errors import ModelError, RunError, TaskError, WeightsError
from echo_planes.rollout.vllm.answers import Answer, Origins, label
from echo_planes.rollout.vllm.environment import ENVIRONMENT, engine_environment, staging_parent
from echo_planes.types import Draw, Manifest, Publication, Sample, joined
from echo_planes.weights.receiver import check_payload

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

_PLUGIN = "echo_planes.rollout.vllm.plugin"
BACKEND = "echo_planes"  # what the plugin registers itself as
_GIB = 1 << 30
# Tokens per streamed chunk: enough to renew leases, and a fraction of the work of one chunk per token.
_STREAM_INTERVAL_TOKENS = 16
# An answer of several ranks, at most: the install of a model that fills eight GPUs takes a few minutes.
_RANKS_LIMIT_S = 600.0


class VllmEngine:
    """See `rollout.engine.Engine`.

    Args:
        config: options of the engine.
        sampling: temperature, top-p and how many top log-probabilities to keep.
        model_folder: Hugging Face folder; its weights serve as version -1 until the first install.
        max_model_len: prompt + response, tokens.
        seed: seeds the engine's sampling. What is sampled still depends on which requests run together.
    """

    worker_extension = f"{_PLUGIN}.WorkerExtension"

    def __init__(
        self,
        config: EngineConfig,
        sampling: SamplingConfig,
        model_folder: Path,
        max_model_len: int,
        seed: int,
    ) -> None:
        self._config = config
        self._sampling = sampling
        self._draw = Draw(sampling.temperature, sampling.top_p)
        self._model_folder = model_folder
        self._max_model_len = max_model_len
        self._seed = seed
        self._vllm: AsyncLLM | None = None
        self._version = -1
        self._digest = ""
        self._digest_mismatches = 0
        self._last_pause_s = 0.0
        self._still_since_s: float | None = None  # since when generation stands still; None: it goes on
        self._request_ids = itertools.count()
        self._params: dict[tuple[int, int, Draw], SamplingParams] = {}
        self._install_lock = asyncio.Lock()
        self._staging: Path | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def digest_mismatches(self) -> int:
        return self._digest_mismatches

    @property
    def last_pause_s(self) -> float:
        return self._last_pause_s

    @property
    def vllm(self) -> AsyncLLM:
        """The engine underneath, for benchmarks and tests.

        Raises:
            RunError: before `start` or after `close`.
        """
        if self._vllm is None:
            raise RunError("the vLLM engine is not running")
        return self._vllm

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Build the engine and answer one warm-up request.

        Raises:
            ModelError: the model folder cannot be served.
            RunError: the engine process did not come up.
        """
        if not (self._model_folder / "config.json").is_file():
            raise ModelError(f"{self._model_folder} holds no config.json: not a Hugging Face model folder")
        self._staging = Path(tempfile.mkdtemp(prefix="echo_planes_", dir=staging_parent()))  # mode 0700
        self._vllm = self._build()
        if self._config.pipeline_parallel_size > 1:
            await self._ask("echo_planes_make_room")
        self._digest = await self.live_digest()
        await self._vllm.update_weight_version(label(self._version, self._digest))
        await self.generate([0], num_samples=1, max_new_tokens=1, on_tokens=lambda *_: None)
        await self._check_live()
        # What was imported lives as long as the process: scanning it in every full collection cost three
        # times the CPU of a request.
        gc.collect()
        gc.freeze()

    async def _check_live(self) -> None:
        # After a request: by then whatever copies of the weights this vLLM makes are made.
        found = await self._ask("echo_planes_check_live")
        if found:
            raise RunError(f"published weights would not reach what this vLLM computes with: {found}")

    async def close(self) -> None:
        """End the engine and its process. Requests in flight fail with `RunError`."""
        vllm, self._vllm = self._vllm, None
        if vllm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError

            vllm.output_processor.propagate_error(EngineDeadError())  # else callers would wait for ever
            # There is nothing to drain or to save, so the process need not be waited for.
            vllm.shutdown(timeout=0)
            gc.unfreeze()
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None

    def _build(self) -> AsyncLLM:
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        # It would override the configured KV cache, and vLLM reads it as a whole number only.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from echo_planes.rollout.vllm.plugin import OneRank, SeveralRanks

        on_cpu = current_platform.is_cpu()
        arguments = AsyncEngineArgs(
            model=str(self._model_folder),
            dtype=self._config.dtype,
            max_model_len=self._max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            tensor_parallel_size=self._config.tensor_parallel_size,
            pipeline_parallel_size=self._config.pipeline_parallel_size,
            enable_prefix_caching=self._config.enable_prefix_caching,
            seed=self._seed,
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
            stream_interval=_STREAM_INTERVAL_TOKENS,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            weight_transfer_config={"backend": BACKEND},
            worker_extension_cls=self.worker_extension,
            **(self._cpu_options() if on_cpu else self._gpu_options()),
        )
        with engine_environment(on_cpu, self._config.num_ranks):
            try:
                return AsyncLLM(
                    arguments.create_engine_config(UsageContext.ENGINE_CONTEXT),
                    OneRank if self._config.num_ranks == 1 else SeveralRanks,
                    log_stats=not arguments.disable_log_stats,
                    log_requests=arguments.enable_log_requests,
                )
            except RuntimeError as error:
                raise RunError(f"the vLLM engine did not start: {error}") from error

    def _cpu_options(self) -> dict[str, Any]:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        return {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(self._config.kv_cache_gib * _GIB),
            # As a class: the name "uni" is replaced by an executor with one more process, which only
            # engines of several ranks or OpenMP threads need.
            "distributed_executor_backend": UniProcExecutor if self._config.num_ranks == 1 else "mp",
        }

    def _gpu_options(self) -> dict[str, Any]:
        return {
            "enforce_eager": self._config.enforce_eager,
            "gpu_memory_utilization": self._config.gpu_memory_utilization,
            # All ranks on this node, in processes of this engine: vLLM would choose Ray inside an actor.
            "distributed_executor_backend": None if self._config.num_ranks == 1 else "mp",
        }

    # --- sampling --------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        max_new_tokens: int,
        on_tokens: Callable[[int, Sample], None],
        draw: Draw | None = None,
    ) -> list[Sample]:
        """See `Engine.generate`. Tokens arrive in chunks: the first at once, then every 16.

        Answers of at most 16 tokens arrive whole, all samples of the prompt together.

        Raises:
            TaskError: the prompt leaves no room for an answer.
            RunError: the engine died.
        """
        room = self._max_model_len - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise TaskError(
                f"a prompt of {len(prompt_ids)} tokens does not fit max_model_len = {self._max_model_len} "
                "with room for an answer"
            )
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = self._sampling_params(num_samples, min(max_new_tokens, room), draw or self._draw)
        answers = [Answer(self._sampling.top_logprobs) for _ in range(num_samples)]
        pieces: list[list[Sample]] = [[] for _ in range(num_samples)]
        # As an already rendered input: a bare prompt would take a detour through a thread.
        prompt = tokens_input(list(prompt_ids))
        request_id = str(next(self._request_ids))
        origins = Origins(self.vllm.output_processor, request_id)
        try:
            async for output in self.vllm.generate(prompt, params, request_id):
                for completion in output.outputs:
                    index = completion.index
                    piece = answers[index].piece(completion, origins.starts(completion))
                    pieces[index].append(piece)
                    on_tokens(index, piece)
        except (EngineDeadError, EngineGenerateError) as error:
            raise RunError(f"the vLLM engine died while it sampled: {error}") from error
        return [joined(sample) for sample in pieces]

    def _sampling_params(self, num_samples: int, max_tokens: int, draw: Draw) -> SamplingParams:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        key = (num_samples, max_tokens, draw)
        if key not in self._params:
            self._params[key] = SamplingParams(
                n=num_samples,
                temperature=draw.temperature,
                top_p=draw.top_p,
                max_tokens=max_tokens,
                logprobs=self._sampling.top_logprobs,
                detokenize=False,
                # An answer that fits one chunk is not worth streaming.
                output_kind=RequestOutputKind.DELTA
                if max_tokens > _STREAM_INTERVAL_TOKENS
                else RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # never changed after it is made, so requests may share it
            )
        return self._params[key]

    # --- weights ---------------------------------------------------------------------------------

    async def install(self, publication: Publication) -> None:
        """See `Engine.install`.

        Requests in flight go on where they were. Without prefix caching their older tokens keep the keys
        and values of the old weights; with it they are recomputed, because the cache must be emptied.
        """
        # Shielded: a caller that gives up must not leave new weights under the old version's name.
        await asyncio.shield(asyncio.ensure_future(self._install(publication)))

    async def _install(self, publication: Publication) -> None:
        manifest = publication.manifest
        async with self._install_lock:
            self._last_pause_s = 0.0
            stood_still = self._still_since_s is not None
            try:
                path = await asyncio.to_thread(self._staged, publication)
                try:
                    await self._update(path, manifest)
                finally:
                    if path.parent == self._staging:
                        path.unlink(missing_ok=True)
            except WeightsError as error:
                if stood_still:
                    raise RunError(f"the engine's damaged weights were not mended: {error}") from error
                raise
            self._version, self._digest = manifest.version, manifest.digest

    def _staged(self, publication: Publication) -> Path:
        """The payload as a file. Whatever can be checked before generation stands still is checked here."""
        check_payload(publication)
        payload = publication.payload
        if isinstance(payload, np.memmap) and payload.filename is not None:
            return Path(payload.filename)
        if self._staging is None:
            raise RunError("the vLLM engine is not running")
        path = self._staging / f"v{publication.manifest.version}.safetensors"
        payload.tofile(path)
        return path

    async def _update(self, staged: Path, manifest: Manifest) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.v1.engine.exceptions import EngineDeadError

        vllm = self.vllm
        request = WeightTransferUpdateRequest({"payload_path": str(staged), "manifest": asdict(manifest)})
        try:
            await vllm.start_weight_update()
            if self._still_since_s is None:
                self._still_since_s = time.perf_counter()
                # Not `pause_generation`: it sleeps 20 ms so that what was sampled before is handed out
                # before it returns, an order that nothing here relies on.
                await vllm.engine_core.pause_scheduler_async(
                    mode="keep", clear_cache=self._config.enable_prefix_caching
                )
            refusal = await self._refusal(request)
            if refusal is None:
                await vllm.finish_weight_update(label(manifest.version, manifest.digest))
                await self._resume()
            else:
                standing = await self._ask("echo_planes_standing")
                if standing == "broken":
                    raise RunError(f"version {manifest.version} left the engine broken: {refusal}")
                if standing == "sound":
                    await self._resume()
            self._digest_mismatches = int(await self._ask("echo_planes_digest_mismatches"))
        except EngineDeadError as error:
            raise RunError(f"the vLLM engine died while it installed version {manifest.version}") from error
        except RunError:
            raise
        except Exception as error:  # vLLM hands over what the engine process raised as a bare Exception
            raise RunError(
                f"the install of version {manifest.version} broke off, and what the engine holds is unknown: "
                f"{error}"
            ) from error
        finally:
            if self._still_since_s is not None:
                self._last_pause_s = time.perf_counter() - self._still_since_s
        if refusal is not None:
            raise WeightsError(f"version {manifest.version} was not installed: {refusal}") from refusal

    async def _refusal(self, request: WeightTransferUpdateRequest) -> Exception | None:
        """Have the engine process install; what it raised, which does not say whether it may go on."""
        try:
            async with self._limit():
                await self.vllm.update_weights(request)
        except TimeoutError as error:
            raise RunError(
                f"the ranks of the vLLM engine installed nothing in {_RANKS_LIMIT_S:g} s"
            ) from error
        except Exception as error:  # noqa: BLE001  bare Exceptions are what vLLM hands over
            return error
        if self._config.num_ranks == 1:
            return None
        refusal = await self._ask("echo_planes_refusal")
        if refusal:
            await self.vllm.finish_weight_update()  # of vLLM's session: it heard of no error
        return WeightsError(refusal) if refusal else None

    async def _resume(self) -> None:
        await self.vllm.resume_generation()
        if self._still_since_s is not None:
            # From asking to stand still to going on: a step that was under way is in it.
            self._last_pause_s = time.perf_counter() - self._still_since_s
        self._still_since_s = None

    async def live_digest(self) -> str:
        """See `Engine.live_digest`."""
        return str(await self._ask("echo_planes_live_digest"))

    async def _ask(self, method: str) -> Any:
        """Call a method of the ranks' weight-transfer part, and return the answer in which all agree."""
        try:
            async with self._limit():
                answers = await self.vllm.collective_rpc(method)
        except RunError:
            raise
        except Exception as error:  # vLLM hands over what the engine process raised as a bare Exception
            raise RunError(f"the vLLM engine died before it answered {method}: {error!r}") from error
        if any(answer != answers[0] for answer in answers):
            raise RunError(f"the ranks of the vLLM engine answer {method} differently: {answers}")
        return answers[0]

    def _limit(self) -> asyncio.Timeout:
        # Of several ranks one may wait for another: the caller must not wait for ever.
        return asyncio.timeout(None if self._config.num_ranks == 1 else _RANKS_LIMIT_S)
