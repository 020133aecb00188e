"""Check of memory before anything starts: what learner ranks and engines need at least, by arithmetic.

Counted are a learner rank (`learning/footprint.py`), and of an engine its weights, the KV of one answer of
the greatest length, and on CPUs its program and its weight node. What is not known is not judged: cards of
other names, config.json in other words, weights of other types.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echo_planes.cluster.placement import Machine, cluster_address
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError, DataError, ModelError
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.fleet.throughput import ModelSize, size_of_folder
from echo_planes.learning.footprint import GIB, PROGRAM_BYTES, Footprint, footprint, shape_of


@dataclass(frozen=True, slots=True)
class _Engines:
    """Engines of one instance type, or the seeders."""

    key: str
    sku: str
    count: int
    has_gpu: bool
    engine: EngineConfig


def check_memory(config: Config, machines: Sequence[Machine], host_bytes: float) -> None:
    """Check that learner ranks and engines have the memory that they need at least, as far as it is known.

    Args:
        config: with `learner.resources` settled.
        machines: of the cluster. The memory of a card follows from its type, which Ray reports, or its SKU.
        host_bytes: memory of this machine, where ranks and engines on CPUs run unless a cluster is joined.

    Raises:
        ConfigError: gives the parts, and the keys to change.
    """
    _check_learner(config, _size_of(config), machines, host_bytes)
    check_engine_memory(config, machines)


def check_engine_memory(config: Config, machines: Sequence[Machine]) -> None:
    """Check that engines hold the weights and one answer; without machines, those of a known SKU and on CPUs.

    Raises:
        ConfigError: gives the parts, and the keys to change.
    """
    if size := _size_of(config):
        for engines in _engines(config):
            _check_engine(config, size, engines, machines)


def _size_of(config: Config) -> ModelSize | None:
    try:
        return size_of_folder(config.model.folder)
    except (ModelError, DataError):
        return None


def _check_learner(
    config: Config, size: ModelSize | None, machines: Sequence[Machine], host_bytes: float
) -> None:
    try:
        shape = shape_of(config.model.folder)
    except (KeyError, DataError):
        return
    gpu, num_ranks = config.learner.rank_resources.get("GPU", 0.0), config.learner.num_ranks
    needs = footprint(config, shape, on_gpu=gpu > 0)
    told = f"{needs.total / GIB:.1f} GiB ({needs})"
    if gpu:
        gib = _card_gib(machines)
        if gib is not None and needs.total > gib * GIB * gpu:
            more = ", or learner.zero_stage=3 and more learner.num_ranks, or learner.offload_optimizer=true"
            if config.learner.offload_optimizer and config.learner.zero_stage == 3:
                more = ", or more learner.num_ranks"
                more += "" if config.learner.offload_weights else ", or learner.offload_weights=true"
            raise _too_much(config, needs, told, "a rank's part of a card", gib * GIB * gpu, more)
        if not cluster_address(config) and num_ranks * needs.offloaded > host_bytes:
            raise ConfigError(
                f"learner.offload_optimizer=true: what {num_ranks} ranks offload takes "
                f"{num_ranks * needs.offloaded / GIB:.1f} GiB of host memory, this machine has "
                f"{host_bytes / GIB:.1f}; choose a smaller model, or learner.lora_rank"
            )
    elif not cluster_address(config):
        on_cpu = [one for one in _engines(config) if size and not one.has_gpu]
        engines_bytes = math.fsum(one.count * _host_bytes(one.engine, size) for one in on_cpu if size)
        if num_ranks * needs.total + engines_bytes > host_bytes:
            ranks = f"{num_ranks} ranks with " if num_ranks > 1 else ""
            count = sum(one.count for one in on_cpu)
            beside = f" and {count} engines together {engines_bytes / GIB:.1f} GiB" if count else ""
            raise _too_much(config, needs, f"{ranks}{told}{beside}", "this machine", host_bytes)


def _too_much(
    config: Config, needs: Footprint, told: str, where: str, has_bytes: float, more: str = ""
) -> ConfigError:
    is_long = needs.inputs + needs.logits > has_bytes / 4
    less = "a smaller model"
    if is_long:
        less = "a smaller learner.micro_batch_tokens, or a larger learner.sequence_ranks"
    return ConfigError(
        f"model.path={config.model.path}: the learner needs at least {told}, {where} has "
        f"{has_bytes / GIB:.1f} GiB; choose {less}{more}"
    )


def _engines(config: Config) -> Iterator[_Engines]:
    for number, one in enumerate(config.fleet.workers):
        has_gpu = one.resources.get("GPU", 0.0) > 0
        yield _Engines(f"fleet.workers.{number}.engine", one.sku, one.count, has_gpu, one.engine)
    if seeders := config.seeding.engines:
        has_gpu = config.seeding.resources.get("GPU", 0.0) > 0
        yield _Engines("seeding.engine", "", seeders, has_gpu, config.seeding.engine)


def _check_engine(config: Config, size: ModelSize, engines: _Engines, machines: Sequence[Machine]) -> None:
    engine, tokens = engines.engine, config.model.max_model_len
    width = 2 if engine.dtype == "float32" else 1  # in bf16
    kv_bytes = width * size.kv_bytes_per_token * tokens if size.kv_source == "given" else 0.0
    if not engines.has_gpu:
        if kv_bytes > engine.kv_cache_gib * GIB:
            raise ConfigError(
                f"{engines.key}.kv_cache_gib={engine.kv_cache_gib:g}: the KV of an answer of "
                f"model.max_model_len={tokens} tokens takes {kv_bytes / GIB:.2g} GiB; raise the one, or "
                "lower the other"
            )
        return
    gib = SKU_FACTS[engines.sku].memory_gib if engines.sku in SKU_FACTS else _card_gib(machines)
    weight_bytes, num_ranks = width * size.weight_bytes, engine.num_ranks
    if gib is not None and weight_bytes + kv_bytes > engine.gpu_memory_utilization * gib * GIB * num_ranks:
        raise ConfigError(
            f"{engines.key}: weights of {weight_bytes / GIB:.1f} GiB and the KV of an answer of "
            f"model.max_model_len={tokens} tokens, {kv_bytes / GIB:.1f} GiB, are more than "
            f"gpu_memory_utilization={engine.gpu_memory_utilization:g} of {num_ranks} x {gib:g} GiB; choose "
            "a larger card, a larger tensor_parallel_size, or a smaller model"
        )


def _host_bytes(engine: EngineConfig, size: ModelSize) -> float:
    """Return the least that an engine on CPUs and its weight node hold, each with the weights."""
    width = 2 if engine.dtype == "float32" else 1
    return (1 + width) * size.weight_bytes + engine.kv_cache_gib * GIB + PROGRAM_BYTES


def _card_gib(machines: Sequence[Machine]) -> float | None:
    """Return the memory of the largest card of the cluster; None: of one, or all, it is not known."""
    largest = []
    for machine in machines:
        if machine.resources.get("GPU"):
            kind = machine.labels.get("ray.io/accelerator-type", "")
            of_kind = [
                facts.memory_gib
                for name, facts in SKU_FACTS.items()
                if name == kind or name.startswith(f"{kind}-")
            ]
            if not of_kind:
                return None
            largest += of_kind
    return max(largest, default=None)
