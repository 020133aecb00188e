"""One vLLM engine behind the `Engine` protocol: `AsyncLLM` in this process, the model in another.

`start` imports vLLM, after it has set the environment variables that vLLM reads at import.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from echo_planes.cluster.gpu_driver import driver_problem_here
from echo_planes.cluster.processor import bf16_is_faster
from echo_planes.config.fleet import CPU_PAGE_TOKENS, EngineConfig
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import SamplingConfig
from echo_planes.errors import (
    ConfigError,
    EngineStartError,
    ModelError,
    RunError,
    TaskError,
    WeightsError,
    one_line,
)
from echo_planes.rollout.sparsity.acceptance import Audit
from echo_planes.rollout.vllm.answers import Answer, Origins, label
from echo_planes.rollout.vllm.environment import ENVIRONMENT, engine_environment, staging_parent
from echo_planes.rollout.vllm.output import DIED, EngineOutput, root_cause, would_fail_again
from echo_planes.rollout.vllm.work_counter import WorkCounter
from echo_planes.types import Draw, Manifest, Publication, Sample, joined
from echo_planes.weights.receiver import check_payload
from echo_planes.weights.sparse_adapter import SparseAdapter

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
_PLUGIN = "echo_planes.rollout.vllm.plugin"
BACKEND = "echo_planes"  # name under which the plugin registers itself
_GIB = 1 << 30
# Tokens per streamed chunk: enough to renew leases, and a fraction of the work of one chunk per token.
_STREAM_INTERVAL_TOKENS = 16
# Longest wait for several ranks: the install of a model that fills eight GPUs takes a few minutes.
_RANKS_LIMIT_S = 600.0
_LOOK_S = 1.0  # between looks whether an engine that has not replied lives
_ENDING_S = 5.0  # longest wait for the end of processes of an engine that did not start


class VllmEngine:
    """See `rollout.engine.Engine`.

    Args:
        config: options of the engine.
        sampling: temperature, top-p and the number of top log-probabilities to keep.
        model_folder: Hugging Face folder; its weights serve as version -1 until the first install.
        max_model_len: most tokens of prompt and response together.
        seed: seed of the engine's sampling. The samples still depend on which requests run together.
    """

    worker_extension = f"{_PLUGIN}.WorkerExtension"
    environment: ClassVar[Mapping[str, str]] = ENVIRONMENT  # unless the user's has another value

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
        self._still_since_s: float | None = None  # since when generation is paused; None: it runs
        self._request_ids = itertools.count()
        self._params: dict[tuple[int, int, Draw], SamplingParams] = {}
        self._install_lock = asyncio.Lock()
        self._staging: Path | None = None
        self._output = EngineOutput()
        self._counter: WorkCounter | None = None
        self._about = ""

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
    def progress(self) -> str:
        return "" if self._counter is None else str(self._counter)

    @property
    def about(self) -> str:
        return self._about

    @property
    def vllm(self) -> AsyncLLM:
        """vLLM's own engine, for benchmarks and tests.

        Raises:
            RunError: the engine is not started, or closed.
        """
        if self._vllm is None:
            raise RunError("the vLLM engine is not running")
        return self._vllm

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Build the engine and answer one warm-up request.

        Raises:
            ModelError: the model folder cannot be served.
            ConfigError: vLLM refuses `EngineConfig.extra`.
            EngineStartError: the engine did not start, or would not compute with installed weights.
        """
        if not (self._model_folder / "config.json").is_file():
            raise ModelError(f"{self._model_folder} holds no config.json: not a Hugging Face model folder")
        self._staging = Path(tempfile.mkdtemp(prefix="echo_planes_", dir=staging_parent()))  # mode 0700
        self._counter = WorkCounter(counter := self._staging / "computed", create=True)
        try:
            # In a thread, so that this process says meanwhile how far it is.
            await asyncio.to_thread(self._build, counter)
            if self._config.pipeline_parallel_size > 1:
                await self._ask("echo_planes_make_room")
            self._digest = await self.live_digest()
            await self._reply(self.vllm.update_weight_version(self._label(self._version, self._digest)))
            await self.generate([0], num_samples=1, max_new_tokens=1, on_tokens=lambda *_: None)
            await self._check_live()
        except EngineStartError:
            raise
        except RunError as error:
            raise await asyncio.to_thread(self._not_started, error) from error
        # The imported objects live as long as the process. Scanning them in every full collection cost three
        # times the CPU time of a request.
        gc.collect()
        gc.freeze()

    async def _check_live(self) -> None:
        # Called after a request, when vLLM has made any copies of the weights that it makes.
        found = await self._ask("echo_planes_check_live")
        if found:
            raise EngineStartError(
                f"published weights would not reach what this vLLM computes with: {found}", is_final=True
            )

    def _not_started(self, error: RunError) -> EngineStartError:
        """Return the error of an engine that did not start, with the cause that its processes printed."""
        text = self._output.text(_ENDING_S)
        has_ended = self._vllm is None or DIED in text
        if has_ended and (cause := root_cause(text)):
            return EngineStartError(
                f"the vLLM engine did not start: {cause}", text, is_final=would_fail_again(cause)
            )
        why, last = error.__cause__, next((line for line in reversed(text.splitlines()) if line), "nothing")
        return EngineStartError(
            one_line(f"{error}; its processes wrote last: {last}"),
            text,
            is_final=would_fail_again(f"{type(why).__name__}: {why}"),
        )

    async def close(self) -> None:
        """End the engine and its process. Requests in flight fail with `RunError`."""
        vllm, self._vllm = self._vllm, None
        if vllm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError

            vllm.output_processor.propagate_error(EngineDeadError())  # otherwise callers would wait for ever
            # There is nothing to drain or to save, so `close` does not wait for the process.
            vllm.shutdown(timeout=0)
            gc.unfreeze()
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None

    def _cause(self, error: Exception) -> str:
        """Return why the engine died: what its processes printed of it, or what vLLM says."""
        text = self._output.text()
        return root_cause(text) if DIED in text else str(error)

    def _build(self, counter: Path) -> None:
        os.environ.update({name: value for name, value in self.environment.items() if name not in os.environ})
        # The variable would override the configured KV cache, and vLLM reads it as a whole number only.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        if problem := driver_problem_here():
            raise EngineStartError(f"the vLLM engine cannot start: {problem}", is_final=True)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from echo_planes.rollout.vllm.plugin import OneRank, SeveralRanks
        from echo_planes.rollout.vllm.scheduler import AheadScheduler, SyncScheduler

        on_cpu = current_platform.is_cpu()
        dtype = self._dtype(on_cpu)
        widened = dtype == "float32" != self._config.dtype
        options = self._cpu_options(widened=widened) if on_cpu else self._gpu_options()
        with engine_environment(on_cpu, self._config.num_ranks, counter):
            try:
                settings = AsyncEngineArgs(
                    model=str(self._model_folder),
                    dtype=dtype,
                    max_model_len=self._max_model_len,
                    max_num_seqs=self._config.max_num_seqs,
                    tensor_parallel_size=self._config.tensor_parallel_size,
                    pipeline_parallel_size=self._config.pipeline_parallel_size,
                    enable_prefix_caching=self._config.enable_prefix_caching,
                    seed=self._seed,
                    max_logprobs=max(20, self._sampling.top_logprobs),
                    logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
                    stream_interval=_STREAM_INTERVAL_TOKENS,
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    weight_transfer_config={"backend": BACKEND},
                    worker_extension_cls=self.worker_extension,
                    **(options | self._config.extra),
                    # For a server vLLM sizes a step of the scheduler by the card.
                ).create_engine_config(UsageContext.OPENAI_API_SERVER)
            except (TypeError, ValueError) as error:
                extra = f"engine.extra={self._config.extra}" if self._config.extra else "the engine's options"
                raise ConfigError(f"{extra}: vLLM refuses it: {one_line(str(error))}") from error
            cache, scheduling = settings.cache_config, settings.scheduler_config
            common = f"common prefixes once, pages of {cache.block_size} tokens"
            self._about = (
                f"computes in {str(settings.model_config.dtype).removeprefix('torch.')}; "
                f"{common if cache.enable_prefix_caching else 'each prompt for each of its samples'}"
            )
            scheduling.scheduler_cls = AheadScheduler if scheduling.async_scheduling else SyncScheduler
            try:
                with self._output.taken():
                    self._vllm = AsyncLLM(
                        settings,
                        OneRank if self._config.num_ranks == 1 else SeveralRanks,
                        log_stats=False,
                        log_requests=False,
                    )
            except (RuntimeError, ValueError) as error:
                raise RunError(f"the vLLM engine did not start: {one_line(str(error))}") from error

    def _dtype(self, on_cpu: bool) -> str:
        if self._config.dtype != "auto":
            return self._config.dtype
        # Several ranks hold weights as they are published.
        may_widen = on_cpu and self._config.num_ranks == 1
        return "float32" if may_widen and not bf16_is_faster() else "bfloat16"

    def _cpu_options(self, *, widened: bool) -> dict[str, Any]:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        return {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(self._config.kv_cache_gib * _GIB) * (2 if widened else 1),
            "block_size": CPU_PAGE_TOKENS,  # small: prompts share whole pages alone
            # Passed as a class, because vLLM replaces the name "uni" by an executor with one more process,
            # which only engines of several ranks or OpenMP threads need.
            "distributed_executor_backend": UniProcExecutor if self._config.num_ranks == 1 else "mp",
        }

    def _gpu_options(self) -> dict[str, Any]:
        return {
            "enforce_eager": self._config.enforce_eager,
            "gpu_memory_utilization": self._config.gpu_memory_utilization,
            # "mp" keeps all ranks on this machine, as processes of this engine. In an actor vLLM would choose
            # Ray.
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
        """See `Engine.generate`. Tokens arrive in chunks: the first token at once, then 16 at a time.

        With `max_new_tokens` of at most 16, all samples of the prompt arrive whole and together.

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
        dense = draw is not None and draw.dense
        answers = [Answer(self._sampling.top_logprobs, dense) for _ in range(num_samples)]
        pieces: list[list[Sample]] = [[] for _ in range(num_samples)]
        # An already rendered input: vLLM would pass a bare prompt through a thread first.
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
            raise RunError(f"the vLLM engine died while it sampled: {self._cause(error)}") from error
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

        Requests in flight continue where they were: their older tokens keep the keys and values of the old
        weights. Later requests find none of these in the prefix cache (`scheduler`).
        """
        # Shielded: a caller that is cancelled must not leave new weights under the old version's label.
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
        """Return the payload as a file, after every check that is possible before generation is paused."""
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
            await self._reply(vllm.start_weight_update())
            if self._still_since_s is None:
                self._still_since_s = time.perf_counter()
                # Not `pause_generation`, which sleeps 20 ms so that it returns after the outputs of earlier
                # samples. Nothing here relies on that order.
                await self._reply(vllm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
            refusal = await self._refusal(request)
            if refusal is None:
                await self._reply(vllm.finish_weight_update(self._label(manifest.version, manifest.digest)))
                await self._resume()
            else:
                standing = await self._ask("echo_planes_standing")
                if standing == "broken":
                    raise RunError(f"version {manifest.version} left the engine broken: {refusal}")
                if standing == "sound":
                    await self._resume()
            self._digest_mismatches = int(await self._ask("echo_planes_digest_mismatches"))
        except EngineDeadError as error:
            why = self._cause(error)
            raise RunError(
                f"the vLLM engine died in the install of version {manifest.version}: {why}"
            ) from error
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

    def _label(self, version: int, digest: str) -> str:
        """Return the mark of the tokens that these weights sample."""
        return label(version, digest)

    async def _refusal(self, request: WeightTransferUpdateRequest) -> Exception | None:
        """Let the engine process install, and return its error, which does not say if it may continue."""
        try:
            await self._reply(self.vllm.update_weights(request))
        except RunError:
            raise
        except Exception as error:  # noqa: BLE001  vLLM passes errors on as bare Exceptions
            return error
        if self._config.num_ranks == 1:
            return None
        refusal = await self._ask("echo_planes_refusal")
        if refusal:
            await self._reply(self.vllm.finish_weight_update())  # ends vLLM's session, which got no error
        return WeightsError(refusal) if refusal else None

    async def _resume(self) -> None:
        await self._reply(self.vllm.resume_generation())
        if self._still_since_s is not None:
            # From the request to pause until generation runs again, including the step in progress.
            self._last_pause_s = time.perf_counter() - self._still_since_s
        self._still_since_s = None

    async def set_schedule(self, schedule: Schedule | None) -> None:
        """Raise RunError: this engine is dense. See `SparseEngine`."""
        if schedule is not None:
            raise RunError("this engine was built for dense attention")

    async def set_adapter(self, adapter: SparseAdapter) -> None:
        """Raise RunError: this engine is dense. See `SparseEngine`."""
        raise RunError(f"this engine was built for dense attention, so adapter {adapter.version} has no use")

    def take_audits(self) -> list[Audit]:
        """Return nothing: dense answers have nothing to compare."""
        return []

    async def live_digest(self) -> str:
        """See `Engine.live_digest`."""
        return str(await self._ask("echo_planes_live_digest"))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the plugin on all ranks, and return the answer, which must be equal on all."""
        try:
            answers = await self._reply(self.vllm.collective_rpc(method, args=arguments))
        except RunError:
            raise
        except Exception as error:  # vLLM hands over what the engine process raised as a bare Exception
            raise RunError(f"the vLLM engine died before it answered {method}: {error!r}") from error
        if any(answer != answers[0] for answer in answers):
            raise RunError(f"the ranks of the vLLM engine answer {method} differently: {answers}")
        return answers[0]

    async def _reply(self, call: Awaitable[T]) -> T:
        """Return the engine's reply to a call. vLLM never ends a call that is under way when its engine dies.

        Raises:
            RunError: the engine died or was closed, or its ranks, which may wait for one another, took too
                long.
        """
        begun_s, reply = time.monotonic(), asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([reply], timeout=_LOOK_S))[0]:
                if self.vllm.errored:
                    raise RunError(f"the vLLM engine died: {self._cause(self.vllm.dead_error)}")
                if self._config.num_ranks > 1 and time.monotonic() - begun_s > _RANKS_LIMIT_S:
                    raise RunError(f"the ranks of the vLLM engine did not reply in {_RANKS_LIMIT_S:g} s")
            return reply.result()
        finally:
            reply.cancel()
