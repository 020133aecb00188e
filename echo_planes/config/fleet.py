"""Settings of the fleet: instance types of rollout workers, the engine of each, and how many there are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import field_validator

from echo_planes.config.extensions import one_of
from echo_planes.config.fields import (
    Free,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    not_with,
    only_with,
)

# Options of vLLM that say how fast it computes, and neither what weights it has nor what it samples from.
EXTRA_OPTIONS = frozenset(
    (
        *("max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold"),
        *("enable_chunked_prefill", "async_scheduling", "scheduling_policy", "num_gpu_blocks_override"),
        *("block_size", "disable_cascade_attn", "disable_hybrid_kv_cache_manager", "attention_backend"),
        *("cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"),
        *("optimization_level", "performance_mode", "enable_flashinfer_autotune"),
        *("moe_backend", "linear_backend", "disable_custom_all_reduce", "numa_bind"),
    )
)

_FOLLOWS = not_with("fleet.scale", "fixed", instead="=ray or static")  # price and need
_ON_GPU = not_with("..resources.GPU", None, 0)

CPU_PAGE_TOKENS = 32  # vLLM's attention for CPUs takes pages of a multiple of so many tokens


class EngineConfig(Section):
    """Options of one vLLM engine."""

    max_num_seqs: PositiveInt = Free(256, description="requests decoded together")
    tensor_parallel_size: PositiveInt = Free(1, description="GPUs that share every layer of one engine")
    pipeline_parallel_size: PositiveInt = Free(1, description="stages of layers, each on GPUs of its own")
    gpu_memory_utilization: float = Free(
        0.85, counts=_ON_GPU, gt=0, le=1, description="share of GPU memory (GPU only)"
    )
    kv_cache_gib: PositiveFloat = Free(
        0.25,
        counts=only_with("..resources.GPU", None, 0),
        description="KV cache size on CPU, GiB; twice that if auto takes float32",
    )
    enforce_eager: bool = Free(False, counts=_ON_GPU, description="no CUDA graphs (GPU only)")
    enable_prefix_caching: bool | None = Free(
        None,
        description="requests under the same weights compute a common prefix once; default: where the model "
        "allows it and rollouts are dense",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Free(
        "auto",
        description="what the engine holds and computes in; published weights are bfloat16; auto: bfloat16, "
        "on CPUs that multiply faster in float32 that",
    )
    extra: dict[str, Any] = Free(
        {},
        description="more options of vLLM's AsyncEngineArgs, such as {max_num_batched_tokens: 8192}: those "
        "that change neither weights nor log-probabilities",
    )

    @field_validator("extra")
    @classmethod
    def _leaves_weights_and_logprobs(cls, extra: dict[str, Any]) -> dict[str, Any]:
        for name in extra:
            if name in cls.model_fields:
                raise ValueError(f"{name!r} has a key of its own; set engine.{name}")
            if name not in EXTRA_OPTIONS:
                raise ValueError(
                    f"vLLM's {name!r} is not known to leave weights and log-probabilities as they are; known "
                    "are " + ", ".join(sorted(EXTRA_OPTIONS))
                )
        return extra

    @property
    def num_ranks(self) -> int:
        """Processes of one engine that hold weights, each with a device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class WorkerConfig(Section):
    """Rollout workers of one instance type."""

    sku: str = Free("cpu", description="what the hardware is called in reports and prices")
    usd_per_hour: NonNegativeFloat = Free(0.0, description="price of one worker")
    count: int = Free(1, ge=0, description="how many")
    engine: EngineConfig = EngineConfig()
    max_groups: PositiveInt | None = Free(
        None,
        description="prompts in flight at once; default: 16, on GPUs as many as fill engine.max_num_seqs",
    )
    slowdown_s: NonNegativeFloat = Free(
        0.0, description="pause before each group, seconds: for trying out slow workers"
    )
    resources: dict[str, NonNegativeFloat] = Free(
        {"CPU": 1.0}, description="Ray resources of one worker (GPU: n, ...)"
    )
    labels: dict[str, str] = Free({}, description="Ray label selector")
    region: str = Free("", description="where it stands: a chain of workers enters each region once")
    market: Literal["on_demand", "spot"] = Free("on_demand", description="spot machines may be taken away")
    min_count: int = Free(0, counts=_FOLLOWS, ge=0, description="fleet.scale: always so many")
    max_count: int | None = Free(
        None, counts=_FOLLOWS, ge=0, description="fleet.scale: quota; default: `count`"
    )
    mu: PositiveFloat | None = Free(
        None,
        counts=_FOLLOWS,
        description="trajectories/s of one, until it is measured; default: as the others",
    )
    interruptions_per_hour: NonNegativeFloat = Free(
        0.0, counts=_FOLLOWS, description="preemptions of one, until they are measured"
    )
    cloud: Literal["aws", "gcp", "azure"] | None = Free(
        None,
        counts=_FOLLOWS,
        description="whose metadata service announces preemptions on the machine; default: none asked",
    )
    metadata_url: str | None = Free(
        None,
        counts=not_with(".cloud", None, instead="=aws, gcp or azure"),
        description="its address; default: the cloud's usual one",
    )

    @property
    def instance_type(self) -> str:
        """Name of the instance type: SKU, region and market, as far as they are set, joined by "/"."""
        return "/".join(part for part in (self.sku, self.region, self.market) if part)

    @property
    def quota(self) -> int:
        """Most workers of this instance type."""
        return self.count if self.max_count is None else self.max_count


class FleetConfig(Section):
    """The rollout workers."""

    workers: list[WorkerConfig] = Free([WorkerConfig()], description="workers, by instance type")
    restarts: int = Free(
        3,
        counts=(
            only_with("fleet.scale", "fixed"),
            not_with("seeding.engines", 0),
        ),
        ge=0,
        description="times in a row that a lost worker is started again, each, after 0, 1, 3, 7, ... 60 s; "
        "ten minutes of work begin the row anew (scale=fixed)",
    )
    scale: Annotated[str, one_of("fixed", "static", "ray")] = Free(
        "fixed",
        description="fixed: `count` workers of each instance type; static: as many as pay, on the nodes "
        "there are; ray: the same, on nodes of Ray's autoscaler; package.module:NAME: on those of the "
        "Actuator that it makes",
    )
    prices: Annotated[str, one_of("fixed")] = Free(
        "fixed",
        description="fixed: usd_per_hour of each instance type; package.module:NAME: by the PriceSource "
        "that it makes",
    )
    prices_every_s: PositiveFloat = Free(
        60.0,
        counts=not_with("fleet.prices", "fixed", instead="=package.module:NAME"),
        description="such a source is asked this often, seconds",
    )
    gamma: float = Free(1.1, counts=_FOLLOWS, ge=1, description="redundancy: mu_target = gamma mu_min")
    tick_s: PositiveFloat = Free(
        5.0, counts=_FOLLOWS, description="the fleet is looked at this often, seconds"
    )
    sustain_s: NonNegativeFloat = Free(
        30.0,
        counts=_FOLLOWS,
        description="a shortage must last so long before workers are added; a surplus ten times as long",
    )
    ask_limit_s: PositiveFloat = Free(
        120.0,
        counts=_FOLLOWS,
        description="a machine that is not there by then is given up, its instance type backed off",
    )
    boot_limit_s: PositiveFloat = Free(
        600.0,
        counts=_FOLLOWS,
        description="a worker that does not generate so long after that is given up likewise",
    )
    usd_per_hour: PositiveFloat | None = Free(
        None, counts=_FOLLOWS, description="all workers together, at most"
    )
    interruptions_per_hour: PositiveFloat | None = Free(
        None, counts=_FOLLOWS, description="expected preemptions of all workers together, at most"
    )
    max_workers: PositiveInt | None = Free(
        None, counts=_FOLLOWS, description="all instance types together, at most"
    )
    standby: int = Free(
        0,
        counts=_FOLLOWS,
        ge=0,
        description="workers beside these that are kept ready, idle, for the place of a lost one",
    )

    @property
    def num_workers(self) -> int:
        return sum(worker_config.count for worker_config in self.workers)

    @property
    def brings_nodes(self) -> bool:
        """Whether an actuator starts nodes on request, so that the present nodes do not limit the fleet."""
        return self.scale not in ("fixed", "static")

    def fixed(self) -> dict[str, WorkerConfig]:
        """Return the workers w0, w1, ... of a fleet with scale=fixed, in the settings' order; else {}."""
        if self.scale != "fixed":
            return {}
        worker_configs = [worker_config for worker_config in self.workers for _ in range(worker_config.count)]
        return {f"w{i}": worker_config for i, worker_config in enumerate(worker_configs)}


class SeedingConfig(Section):
    """Seeding: engines on the learner's devices sample at the start of each step (S = 0).

    They stop when the window is over, and remote workers continue their answers. Without remote workers the
    window lasts until the step is sampled: learner and engine are colocated.
    """

    counts = not_with("seeding.engines", 0)

    engines: int = Free(0, ge=0, description="N_resv: engines on the learner's machines; 0: no seeding")
    first_s: NonNegativeFloat = Free(5.0, description="T_seed of the first step, seconds; then it adapts")
    eta: PositiveFloat = Free(
        2.0, description="a window changes by the difference of the waits over eta, at least 1 + N_resv / n"
    )
    max_groups: PositiveInt = Free(32, description="prompts in flight at once, of each engine")
    usd_per_hour: NonNegativeFloat = Free(
        0.0, description="price of one engine; 0: the learner's price has it"
    )
    resources: dict[str, NonNegativeFloat] = Free(
        {"CPU": 0.0},
        description="Ray resources of one engine, on the machine of a rank (GPU: 0.5, ...)",
    )
    engine: EngineConfig = EngineConfig()

    def workers(self) -> dict[str, WorkerConfig]:
        """Return the seeders s0, s1, ..."""
        settings = WorkerConfig(
            sku="seeder",
            usd_per_hour=self.usd_per_hour,
            max_groups=self.max_groups,
            resources=self.resources,
            engine=self.engine,
        )
        return {f"s{i}": settings for i in range(self.engines)}
