"""Checks before any process starts. Each error is one line: what is wrong, which value, why, what to do."""

from __future__ import annotations

import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from echo_planes.cluster.placement import Machine
from echo_planes.config.extensions import extension
from echo_planes.config.files import MIB, MODEL_JSON_BYTES, check_regular, read_json
from echo_planes.config.fleet import CPU_PAGE_TOKENS, EngineConfig, FleetConfig, SeedingConfig, WorkerConfig
from echo_planes.config.schema import Config
from echo_planes.config.weights import WeightsConfig
from echo_planes.data.store.files import LOCK_NAME, REPLAY_FOLDER, Lock
from echo_planes.data.store.recovery import STORE_NAME, read_store_id
from echo_planes.data.tasks.registry import TOKENIZER_SETTINGS, check_model_files
from echo_planes.errors import ClusterError, ConfigError, DataError, ModelError
from echo_planes.fleet.instance_types import SAME
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.learning.footprint import shape_of
from echo_planes.loop.memory import check_engine_memory
from echo_planes.loop.sparsity import check_sparse
from echo_planes.loop.spending import check_budget
from echo_planes.loop.trackers import check_installed
from echo_planes.reporting.metrics import METRICS_FILE
from echo_planes.weights.store.objects import check_store
from echo_planes.weights.wire.signing import Signer

MIN_FREE_BYTES = 200 * 1024**2
RAY_PACKAGES = "working_dir_files"  # holds the working directory of a `ray job submit --working-dir` job
RELEASE_S = 10.0  # longest wait for the processes of a killed run to end


def check(config: Config, run_dir: Path) -> None:
    """Run all checks that need no cluster.

    Raises:
        UserError: the first check that fails.
    """
    check_model(config.model.folder)
    check_positions(config)
    check_learner(config)
    check_extensions(config)
    check_fleet(config)
    check_seeding(config.seeding, config.learner.rank_resources)
    check_engines([*config.fleet.workers, *config.seeding.workers().values()])
    check_lengths(config)
    check_engine_memory(config, [])
    check_sparse(config)
    for key, port in (
        ("run.metrics_port", config.run.metrics_port),
        ("learner.master_port", config.learner.master_port),
        ("weights.port", config.weights.port),
    ):
        if port is not None:
            check_port(key, port)
    check_disk(run_dir)
    check_priced(config)
    if config.run.resume is None:
        check_new(run_dir)
    elif config.budget.usd is not None:
        check_budget(config.budget.usd, run_dir)
    check_replay(run_dir)
    check_weights(config.weights)


def check_learner(config: Config) -> None:
    """Check that layers which are to have adapters exist, and that ZeRO can offload what it is to offload."""
    learner = config.learner
    if learner.offload_optimizer and learner.zero_stage == 0:
        raise ConfigError(
            "learner.offload_optimizer=true with learner.zero_stage=0: only ZeRO keeps masters and moments "
            "apart from the weights; set learner.zero_stage=1"
        )
    if learner.offload_weights and not (learner.zero_stage == 3 and learner.offload_optimizer):
        raise ConfigError(
            f"learner.offload_weights=true with learner.zero_stage={learner.zero_stage} and "
            f"learner.offload_optimizer={str(learner.offload_optimizer).lower()}: only ZeRO-3 fetches a "
            "layer when it runs, and the optimizer is offloaded first; set learner.zero_stage=3 "
            "learner.offload_optimizer=true"
        )
    _check_sequence_ranks(config)
    if learner.lora_targets is None:
        return
    try:
        known = shape_of(config.model.folder).linear
    except (KeyError, DataError):  # sizes by other words, or weights of other types: the learner will tell
        return
    for target in learner.lora_targets:
        if target not in known:
            raise ConfigError(
                f"learner.lora_targets: {target} is no linear layer of {config.model.path}; choose of "
                f"{', '.join(sorted(known))}"
            )


def _check_sequence_ranks(config: Config) -> None:
    """Check that ranks can share sequences: each of them takes equally many positions and heads."""
    ranks = config.learner.sequence_ranks
    if ranks == 1:
        return
    key = f"learner.sequence_ranks={ranks}"
    for name in ("num_ranks", "micro_batch_tokens"):
        if (whole := getattr(config.learner, name)) % ranks:
            raise ConfigError(f"{key} does not divide learner.{name}={whole}; change one of them")
    if config.learner.dropout:
        raise ConfigError(
            f"{key} with learner.dropout=true: ranks that share a sequence would leave out the same units; "
            "set one of them back"
        )
    try:
        heads = shape_of(config.model.folder).heads
    except (KeyError, DataError):  # sizes by other words, or weights of other types: the learner will tell
        return
    if heads % ranks:
        raise ConfigError(
            f"{key} does not divide the {heads} attention heads of {config.model.path}; choose a divisor"
        )


def check_extensions(config: Config) -> None:
    """Check that parts named as `package.module:NAME` can be imported.

    The processes that use them start later and could not report such an error as clearly.
    """
    for key, name in (
        ("sampling.router", config.sampling.router),
        ("fleet.scale", config.fleet.scale),
        ("fleet.prices", config.fleet.prices),
        ("run.tracker", config.run.tracker),
    ):
        if ":" in name:
            extension(key, name, {})
    check_installed(config.run.tracker)
    in_parts = config.learner.micro_batch_groups is not None
    if ":" in config.objective.name or in_parts:
        from echo_planes.learning.objectives import OBJECTIVES, Objective, check_parts  # loads torch

        objective = extension("objective.name", config.objective.name, OBJECTIVES, Objective)
        if in_parts:
            check_parts(objective)
    if ":" in config.weights.codec:
        from echo_planes.weights.codec.table import take_codec  # loads numba, which takes a second

        take_codec(config.weights.codec)  # this process needs the codec to read the store for the report


def check_priced(config: Config) -> None:
    """Check that the budget, if there is one, can be spent: something of the run has a price.

    Raises:
        ConfigError: learner and workers are all free of charge.
    """
    fleet = config.fleet
    if (
        config.budget.usd is not None
        and fleet.prices == "fixed"
        and not config.learner.usd_per_hour
        and not config.seeding.usd_per_hour
        and not any(worker_config.usd_per_hour for worker_config in fleet.workers)
    ):
        raise ConfigError(
            f"budget.usd={config.budget.usd:g} would never be spent: learner.usd_per_hour and usd_per_hour "
            "of every worker are 0; set what they cost, or leave the budget out"
        )


def check_weights(weights: WeightsConfig) -> None:
    """Check that the configured key, certificates and store exist and are usable."""
    if weights.key_file:
        Signer.from_file(weights.key_file)
    for key in ("tls_cert", "tls_key", "tls_ca"):
        if path := getattr(weights, key):
            advice = f"give a PEM file as weights.{key}, or leave TLS out"
            check_regular(Path(path), MIB, error=ConfigError, advice=advice)
    if weights.store:
        check_store(weights.store, writes=True)


def check_model(folder: Path) -> None:
    """Check that the folder holds a model of floats whose tokenizer has an end token."""
    name = f"model.path={folder}"
    if not os.path.isdir(folder):  # unlike Path.is_dir, it never raises
        raise ModelError(f"{name}: no such folder; give a Hugging Face model folder, or builtin:tiny-math")
    if not os.path.exists(folder / "config.json"):
        raise ModelError(f"{name}: no config.json there; give a Hugging Face model folder")
    check_model_files(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name}: no *.safetensors there; other weight formats can run code and are not read"
        )
    settings = folder / TOKENIZER_SETTINGS
    if not settings.is_file():
        raise ModelError(f"{name}: no tokenizer_config.json there; save the model's tokenizer beside it")
    content = read_json(settings, MODEL_JSON_BYTES, error=ModelError, advice="save the tokenizer again")
    if not (isinstance(content, dict) and content.get("eos_token")):
        raise ModelError(
            f"{name}: its tokenizer has no end token, so answers would never stop; set 'eos_token' in "
            "tokenizer_config.json"
        )
    _check_types(name, folder)


def _check_types(name: str, folder: Path) -> None:
    """Check that bf16, which is what workers get, can hold the weights, as far as their types tell.

    Buffers of whole numbers may be there: they are neither trained nor published.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                types = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        except SafetensorError:  # no such file: who loads the weights says it
            continue
        for key, code in types.items():
            is_weight = "weight" in key.rpartition(".")[2] or code.startswith("F")
            if is_weight and code not in ("BF16", "F16", "F32"):
                raise ModelError(
                    f"{name}: tensor {key!r} is {code}: weights are trained and published in bf16, which a "
                    "quantized model has not; give the model in bf16, fp16 or fp32"
                )


def check_positions(config: Config) -> None:
    """Check that the model has a position for each token of the longest answer, where config.json says it.

    Positions that are scaled beyond those of the training (YaRN, linear) are left to the engine.
    """
    fields = read_json(config.model.folder / "config.json", MODEL_JSON_BYTES)
    text = fields.get("text_config", fields) if isinstance(fields, dict) else {}
    most = text.get("max_position_embeddings") if isinstance(text, dict) else None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {} if most else {}
    is_plain = isinstance(rope, dict) and rope.get("rope_type", "default") in ("default", "llama3")
    if isinstance(most, int) and is_plain and config.model.max_model_len > most:
        raise ConfigError(
            f"model.max_model_len={config.model.max_model_len} is above the max_position_embeddings={most} "
            f"of {config.model.path}: engines refuse longer answers; set at most {most}"
        )


def check_fleet(config: Config) -> None:
    for number, worker_config in enumerate(config.fleet.workers):
        _check_share(f"fleet.workers.{number}", worker_config.resources, worker_config.engine)
    if config.fleet.num_workers == 0 and not config.seeding.engines:
        raise ConfigError(
            "fleet.workers: the fleet has zero workers, so nothing would ever be sampled; set a count of at "
            "least 1, or let the learner's machine sample: fleet=colocated"
        )
    if config.fleet.scale != "fixed" or config.fleet.prices != "fixed":
        check_instance_types(config.fleet)
    if config.fleet.scale == "fixed":
        return
    fleet = config.fleet
    worker_configs = fleet.workers
    usd_per_hour = math.fsum(
        worker_config.count * worker_config.usd_per_hour for worker_config in worker_configs
    )
    per_hour = math.fsum(
        worker_config.count * worker_config.interruptions_per_hour for worker_config in worker_configs
    )
    limits: tuple[tuple[str, float | None, float, str], ...] = (
        ("max_workers", fleet.max_workers, fleet.num_workers, f"the {fleet.num_workers} workers"),
        ("usd_per_hour", fleet.usd_per_hour, usd_per_hour, f"${usd_per_hour:g}/h, the price of the workers"),
        (
            "interruptions_per_hour",
            fleet.interruptions_per_hour,
            per_hour,
            f"{per_hour:g}/h, which is expected of the workers",
        ),
    )
    for limit, most, first, shown in limits:
        if most is not None and first > most + SAME:
            raise ConfigError(
                f"fleet.{limit}={most:g} is below {shown} to begin with; raise it, or lower the counts"
            )
    check_standby(fleet)
    for worker_config in fleet.workers:
        for key in ("count", "min_count"):
            wanted = getattr(worker_config, key)
            if wanted > worker_config.quota:
                raise ConfigError(
                    f"fleet.workers: {key}={wanted} of {worker_config.instance_type} is above its quota "
                    f"max_count={worker_config.quota}; lower the one or raise the other"
                )


def check_instance_types(fleet: FleetConfig) -> None:
    """Check that instance types have distinct names, because names identify them when bought and priced."""
    seen: set[str] = set()
    for worker_config in fleet.workers:
        if worker_config.instance_type in seen:
            raise ConfigError(
                f"fleet.workers: two entries are of instance type {worker_config.instance_type}; give "
                "them another sku, region or market"
            )
        seen.add(worker_config.instance_type)


def check_seeding(seeding: SeedingConfig, learner: Mapping[str, float]) -> None:
    """Check that a seeder has a part of the learner's GPU, and takes no more of its memory than that part.

    Args:
        seeding: the settings.
        learner: Ray resources of one rank of the learner, which has the rest of the GPU.
    """
    if not seeding.engines:
        return
    if learner.get("GPU") and not seeding.resources.get("GPU"):
        raise ConfigError(
            f"seeding.resources has no GPU, learner.resources has GPU: {learner['GPU']:g}: a seeder shares "
            "the learner's card; set e.g. learner.resources='{GPU: 0.5}' seeding.resources='{GPU: 0.5}' "
            "seeding.engine.gpu_memory_utilization=0.4"
        )
    _check_share("seeding", seeding.resources, seeding.engine)


def _check_share(key: str, resources: Mapping[str, float], engine: EngineConfig) -> None:
    share, memory = resources.get("GPU", 0.0), engine.gpu_memory_utilization
    if 0 < share < 1 and memory > share:
        raise ConfigError(
            f"{key}.engine.gpu_memory_utilization={memory:g} is {memory - share:.2g} of the card more than "
            f"{key}.resources.GPU={share:g}, and others need the rest of it; set at most {share:g}"
        )


def check_engines(worker_configs: Sequence[WorkerConfig]) -> None:
    """Check what an engine would refuse: too few devices, float32 on several, a page size of its kernel."""
    for worker_config in worker_configs:
        _check_page(worker_config)
        resource = "GPU" if worker_config.resources.get("GPU") else "CPU"
        amount, num_ranks = worker_config.resources.get(resource, 0.0), worker_config.engine.num_ranks
        if num_ranks > 1 and amount < num_ranks:
            raise ConfigError(
                f"fleet.workers: the engine of SKU '{worker_config.sku}' spans {num_ranks} devices "
                f"(tensor_parallel_size={worker_config.engine.tensor_parallel_size}, "
                f"pipeline_parallel_size={worker_config.engine.pipeline_parallel_size}), but its resources "
                f"hold {amount:g} {resource}; ask for {resource}: {num_ranks} or more, or make the "
                "engine smaller"
            )
        if num_ranks > 1 and worker_config.engine.dtype == "float32":
            raise ConfigError(
                f"fleet.workers: dtype=float32 for the engine of SKU '{worker_config.sku}', which spans "
                f"{num_ranks} devices: several ranks hold weights as they are published, in bfloat16; leave "
                "dtype out, or give each engine one device"
            )


def _check_page(worker_config: WorkerConfig) -> None:
    """Check that vLLM's attention for CPUs has a kernel for the size of a page, in whatever dtype."""
    page = worker_config.engine.extra.get("block_size")
    on_cpu = not worker_config.resources.get("GPU")
    if on_cpu and isinstance(page, int) and (page < 1 or page % CPU_PAGE_TOKENS):
        raise ConfigError(
            f"fleet.workers: engine.extra.block_size={page} of SKU '{worker_config.sku}': on CPUs vLLM's "
            f"attention takes pages of a multiple of {CPU_PAGE_TOKENS} tokens; set one, or leave it out"
        )


def check_standby(fleet: FleetConfig) -> None:
    """Check that the limits leave room for the standbys beside the first workers."""
    if fleet.standby == 0:
        return
    wanted, quota = (
        fleet.num_workers + fleet.standby,
        sum(worker_config.quota for worker_config in fleet.workers),
    )
    for limit, most in (
        ("max_workers", fleet.max_workers),
        ("workers.max_count (of all instance types)", quota),
    ):
        if most is not None and most < wanted:
            raise ConfigError(
                f"fleet.standby={fleet.standby}: fleet.{limit}={most} leaves no room for so many beside the "
                f"{fleet.num_workers} workers to begin with; raise it to {wanted}, or lower the counts"
            )


def check_lengths(config: Config) -> None:
    if config.sampling.max_new_tokens >= config.model.max_model_len:
        raise ConfigError(
            f"sampling.max_new_tokens={config.sampling.max_new_tokens} leaves no room for a prompt in "
            f"model.max_model_len={config.model.max_model_len}; lower the one or raise the other"
        )


def check_cards(fleet: FleetConfig, machines: Sequence[Machine]) -> None:
    """Check that workers of an instance type with a card ask for one, in a cluster that has cards.

    Ray would count such a worker as one without a card, and give the card to another too.
    """
    if not any(machine.resources.get("GPU") for machine in machines):
        return
    for number, worker_config in enumerate(fleet.workers):
        if worker_config.sku in SKU_FACTS and not worker_config.resources.get("GPU"):
            raise ConfigError(
                f"fleet.workers.{number}.resources has no GPU, but sku={worker_config.sku} is a card; set "
                f"'fleet.workers.{number}.resources={{CPU: 1, GPU: 1}}'"
            )


def check_port(key: str, port: int) -> None:
    """Check that no process listens on a port that the run wants."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ClusterError(
                f"{key}={port}: the port is in use ({error.strerror}); choose another, or leave it out for a "
                "free one"
            ) from error


def check_new(run_dir: Path) -> None:
    """Check that a new run's folder holds no other run, and that Ray will not remove it after the job."""
    if RAY_PACKAGES in run_dir.parts:
        raise ConfigError(
            f"run.dir={run_dir}: that is in Ray's copy of the job's folder, which Ray removes; give a folder "
            "that stays on the head's machine, run.dir=/FOLDER"
        )
    if (run_dir / METRICS_FILE).exists():
        raise ConfigError(
            f"run.dir={run_dir}: another run is in that folder; continue it with run.resume={run_dir}, or "
            "choose another folder"
        )


def check_replay(run_dir: Path) -> None:
    """Check that the folder's replay store, if any, has a known format, and that no other run has it open.

    Wait up to `RELEASE_S` seconds for a killed run to release it.
    """
    path = run_dir / REPLAY_FOLDER / LOCK_NAME
    if not path.exists():
        return
    if (path.parent / STORE_NAME).exists():
        read_store_id(path.parent / STORE_NAME)
    deadline_s = time.monotonic() + RELEASE_S
    while True:
        try:
            Lock(path, str(run_dir)).release()
            return
        except ClusterError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def check_disk(run_dir: Path) -> None:
    """Check that the run folder can be made and written, and has free space. Leave nothing behind."""
    try:
        nearest = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
        with tempfile.TemporaryDirectory(prefix=".echo_planes-", dir=nearest) as probe:
            (Path(probe) / "writable").write_bytes(b"\0" * 4096)
        free_bytes = shutil.disk_usage(nearest).free
    except OSError as error:
        raise ClusterError(
            f"run.dir={run_dir}: cannot be written ({error.strerror}); free some space or choose another "
            "folder"
        ) from error
    if free_bytes < MIN_FREE_BYTES:
        raise ClusterError(
            f"run.dir={run_dir}: only {free_bytes // 1024**2} MiB are free on its disk and a run needs "
            f"{MIN_FREE_BYTES // 1024**2}; free some space or choose another folder"
        )
