"""Mistakes found before anything starts: each is one line that says what, which value, why and what to do."""

from __future__ import annotations

import math
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from echo_planes.config.extensions import extension
from echo_planes.config.files import MIB, MODEL_JSON_BYTES, check_regular, read_json
from echo_planes.config.schema import Config, FleetConfig, WeightsConfig, WorkerConfig
from echo_planes.data.store.files import LOCK_NAME, REPLAY_FOLDER, Lock
from echo_planes.data.store.recovery import STORE_NAME, read_store_id
from echo_planes.data.tasks.registry import TOKENIZER_SETTINGS, check_model_files
from echo_planes.errors import ClusterError, ConfigError, ModelError
from echo_planes.fleet.instance_types import SAME
from echo_planes.loop.spending import check_budget
from echo_planes.reporting.metrics import METRICS_FILE
from echo_planes.weights.store.objects import check_store
from echo_planes.weights.wire.signing import Signer

MIN_FREE_BYTES = 200 * 1024**2
RELEASE_S = 10.0  # for the processes of a run that was killed to end


def check(config: Config, run_dir: Path) -> None:
    """All checks that need no cluster.

    Raises:
        UserError: the first thing that is wrong.
    """
    check_model(config.model.folder)
    check_extensions(config)
    check_fleet(config)
    check_engines(config.fleet)
    check_lengths(config)
    for key, port in (
        ("run.metrics_port", config.run.metrics_port),
        ("learner.master_port", config.learner.master_port),
        ("weights.port", config.weights.port),
    ):
        if port is not None:
            check_port(key, port)
    check_disk(run_dir)
    if config.run.resume is None:
        check_new(run_dir)
    elif config.budget.usd is not None:
        check_budget(config.budget.usd, run_dir)
    check_replay(run_dir)
    check_weights(config.weights)


def check_extensions(config: Config) -> None:
    """Parts that settings name by `package.module:NAME` are there. The processes that use one are not up yet:
    what they raised would not come through as it is.
    """
    for key, name in (
        ("objective.name", config.objective.name),
        ("sampling.router", config.sampling.router),
        ("fleet.scale", config.fleet.scale),
    ):
        if ":" in name:
            extension(key, name, {})


def check_weights(weights: WeightsConfig) -> None:
    """The key, the certificates and the store that were named are there and can be used."""
    if weights.key_file:
        Signer.from_file(weights.key_file)
    for key in ("tls_cert", "tls_key", "tls_ca"):
        if path := getattr(weights, key):
            advice = f"give a PEM file as weights.{key}, or leave TLS out"
            check_regular(Path(path), MIB, error=ConfigError, advice=advice)
    if weights.store:
        check_store(weights.store, writes=True)


def check_model(folder: Path) -> None:
    """The model folder holds a model, and its tokenizer an end token."""
    name = f"model.path={folder}"
    if not os.path.isdir(folder):  # which takes any name
        raise ModelError(f"{name}: no such folder; give a Hugging Face model folder, or builtin:tiny-math")
    check_model_files(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: no config.json there; give a Hugging Face model folder")
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


def check_fleet(config: Config) -> None:
    if config.fleet.num_workers == 0:
        raise ConfigError(
            "fleet.workers: the fleet has zero workers, so nothing would ever be sampled; set a count of at "
            "least 1"
        )
    if config.fleet.scale == "fixed":
        check_ignored(config.fleet)
        return
    fleet = config.fleet
    kinds = fleet.workers
    usd_per_hour = math.fsum(kind.count * kind.usd_per_hour for kind in kinds)
    per_hour = math.fsum(kind.count * kind.interruptions_per_hour for kind in kinds)
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
    seen: set[str] = set()
    for kind in fleet.workers:
        if kind.offer in seen:
            raise ConfigError(
                f"fleet.workers: two kinds are called {kind.offer}; give them another sku, region or market"
            )
        seen.add(kind.offer)
        for key in ("count", "min_count"):
            wanted = getattr(kind, key)
            if wanted > kind.quota:
                raise ConfigError(
                    f"fleet.workers: {key}={wanted} of {kind.offer} is above its quota "
                    f"max_count={kind.quota}; lower the one or raise the other"
                )


def check_engines(fleet: FleetConfig) -> None:
    """A worker is given what its engine's ranks need, all on one node: GPUs, or CPUs where it has none."""
    for kind in fleet.workers:
        resource = "GPU" if kind.resources.get("GPU") else "CPU"
        amount, num_ranks = kind.resources.get(resource, 0.0), kind.engine.num_ranks
        if num_ranks > 1 and amount < num_ranks:
            raise ConfigError(
                f"fleet.workers: the engine of SKU '{kind.sku}' spans {num_ranks} devices "
                f"(tensor_parallel_size={kind.engine.tensor_parallel_size}, "
                f"pipeline_parallel_size={kind.engine.pipeline_parallel_size}), but its resources hold "
                f"{amount:g} {resource}; ask for {resource}: {num_ranks} or more, or make the engine smaller"
            )
        if num_ranks > 1 and kind.engine.dtype == "float32":
            raise ConfigError(
                f"fleet.workers: dtype=float32 for the engine of SKU '{kind.sku}', which spans {num_ranks} "
                "devices: several ranks hold weights as they are published, in bfloat16; leave dtype out, or "
                "give each engine one device"
            )


def check_standby(fleet: FleetConfig) -> None:
    """The limits leave room for the standbys beside the workers to begin with."""
    if fleet.standby == 0:
        return
    wanted, quota = fleet.num_workers + fleet.standby, sum(kind.quota for kind in fleet.workers)
    for limit, most in (("max_workers", fleet.max_workers), ("workers.max_count (of all kinds)", quota)):
        if most is not None and most < wanted:
            raise ConfigError(
                f"fleet.standby={fleet.standby}: fleet.{limit}={most} leaves no room for so many beside the "
                f"{fleet.num_workers} workers to begin with; raise it to {wanted}, or lower the counts"
            )


def check_ignored(fleet: FleetConfig) -> None:
    """Nothing is set that a fleet of fixed size never looks at."""
    usual = WorkerConfig()
    keys = ("min_count", "max_count", "mu", "interruptions_per_hour", "cloud", "metadata_url")
    names = [
        f"fleet.workers.{key}"
        for key in keys
        if any(getattr(k, key) != getattr(usual, key) for k in fleet.workers)
    ]
    of_fleet = (
        "gamma",
        "tick_s",
        "sustain_s",
        "ask_limit_s",
        "boot_limit_s",
        "usd_per_hour",
        "interruptions_per_hour",
        "max_workers",
        "standby",
    )
    names += [
        f"fleet.{key}" for key in of_fleet if getattr(fleet, key) != FleetConfig.model_fields[key].default
    ]
    if names:
        raise ConfigError(
            f"{', '.join(names)}: only a fleet that follows price and need looks at that; set "
            "fleet.scale=ray or static, or leave it out"
        )


def check_lengths(config: Config) -> None:
    if config.sampling.max_new_tokens >= config.model.max_model_len:
        raise ConfigError(
            f"sampling.max_new_tokens={config.sampling.max_new_tokens} leaves no room for a prompt in "
            f"model.max_model_len={config.model.max_model_len}; lower the one or raise the other"
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
    """No other run's files are in the folder of a new run."""
    if (run_dir / METRICS_FILE).exists():
        raise ConfigError(
            f"run.dir={run_dir}: another run is in that folder; continue it with run.resume={run_dir}, or "
            "choose another folder"
        )


def check_replay(run_dir: Path) -> None:
    """The folder's replay store, if there is one, is of a format we know, and no other run has it open.

    One that was just killed gets a moment to be gone.
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
    """The run folder can be made and written, and has some room. Nothing is left there."""
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
