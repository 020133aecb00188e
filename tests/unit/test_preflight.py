"""Mistakes found before anything starts: each message says what, which value, why and what to do."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_planes.cluster import placement
from echo_planes.cluster.placement import Machine
from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import Config
from echo_planes.data.store.store import ReplayStore
from echo_planes.errors import ClusterError, ConfigError, DataError, ModelError, UserError
from echo_planes.loop import memory, preflight
from echo_planes.loop.loading import load_config
from echo_planes.loop.spending import SPENDING_FILE
from echo_planes.run import run_folder
from echo_planes.testing.simulation import replace_section


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes; the contents are not looked at."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config(**sections: dict[str, Any]) -> Config:
    base = Config()
    changed = {name: {**getattr(base, name).model_dump(), **values} for name, values in sections.items()}
    return replace_section(base, **changed)  # type: ignore[no-any-return]


def refusal(kind: type[UserError], settings: Config, run_dir: Path) -> str:
    with pytest.raises(kind) as caught:
        preflight.check(settings, run_dir)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_default_run_passes_and_the_check_leaves_nothing_behind(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "new"
    preflight.check(Config(), run_dir)
    assert list(tmp_path.rglob("*")) == []


def test_a_model_folder_passes(model: Path, tmp_path: Path) -> None:
    preflight.check(config(model={"path": str(model)}), tmp_path / "run")


@pytest.mark.parametrize(
    ("missing", "parts"),
    [
        ("config.json", ["no config.json"]),
        ("model.safetensors", ["no *.safetensors", "can run code"]),
        ("tokenizer_config.json", ["no tokenizer_config.json", "save the model's tokenizer"]),
    ],
)
def test_a_model_folder_that_lacks_a_part(
    model: Path, tmp_path: Path, missing: str, parts: list[str]
) -> None:
    (model / missing).unlink()
    message = refusal(ModelError, config(model={"path": str(model)}), tmp_path / "run")
    for part in [f"model.path={model}", *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('{"eos_token": null}', "no end token"),
        ("{}", "no end token"),
        ('{"eos_token": ', "not JSON"),
        ("[]", "tokenizer_config.json"),
        ("\xff\xfe", "not JSON"),
    ],
)
def test_a_tokenizer_without_an_end_would_never_stop(
    model: Path, tmp_path: Path, content: str, part: str
) -> None:
    (model / "tokenizer_config.json").write_bytes(content.encode("latin-1"))
    message = refusal(ModelError, config(model={"path": str(model)}), tmp_path / "run")
    assert part in message
    assert str(model) in message


def test_an_end_token_may_be_described_by_an_object(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    preflight.check(config(model={"path": str(model)}), tmp_path / "run")


def test_no_model_folder_at_all(tmp_path: Path) -> None:
    message = refusal(ModelError, config(model={"path": "no/such/model"}), tmp_path / "run")
    for part in ("model.path=no/such/model", "no such folder", "builtin:tiny-math"):
        assert part in message


def test_a_fleet_of_nobody(tmp_path: Path) -> None:
    message = refusal(ConfigError, config(fleet={"workers": [{"count": 0}, {"count": 0}]}), tmp_path / "run")
    assert "fleet.workers" in message
    assert "zero workers" in message
    preflight.check(config(fleet={"workers": [{"count": 0}, {"count": 1}]}), tmp_path / "run")


@pytest.mark.parametrize(
    ("resources", "engine", "lacks"),
    [
        ({"CPU": 8.0, "GPU": 4.0}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ""),
        ({"CPU": 8.0, "GPU": 3.0}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "3 GPU"),
        ({"CPU": 8.0, "GPU": 1.0}, {"tensor_parallel_size": 2}, "1 GPU"),
        ({"CPU": 2.0}, {"tensor_parallel_size": 2}, ""),
        ({"CPU": 1.0}, {"pipeline_parallel_size": 2}, "1 CPU"),
        ({"CPU": 0.5}, {}, ""),
    ],
)
def test_an_engine_over_several_devices_is_given_them(
    tmp_path: Path, resources: dict[str, float], engine: dict[str, int], lacks: str
) -> None:
    settings = config(fleet={"workers": [{"sku": "L40S", "resources": resources, "engine": engine}]})
    if not lacks:
        preflight.check(settings, tmp_path / "run")
        return
    message = refusal(ConfigError, settings, tmp_path / "run")
    num_ranks = math.prod(engine.values())
    device = lacks.split()[1]
    for part in ("L40S", f"spans {num_ranks} devices", lacks, f"{device}: {num_ranks} or more"):
        assert part in message


def test_several_ranks_hold_what_is_published(tmp_path: Path) -> None:
    engine = {"tensor_parallel_size": 2, "dtype": "float32"}
    settings = config(fleet={"workers": [{"resources": {"CPU": 2.0}, "engine": engine}]})
    message = refusal(ConfigError, settings, tmp_path / "run")
    assert "dtype=float32" in message
    assert "one device" in message
    preflight.check(config(fleet={"workers": [{"engine": {"dtype": "float32"}}]}), tmp_path / "run")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("page", "gpus", "fits"),
    [(16, 0.0, False), (0, 0.0, False), (32, 0.0, True), (96, 0.0, True), (16, 1.0, True)],
)
def test_pages_that_no_kernel_for_cpus_takes_are_refused(
    tmp_path: Path, dtype: str, page: int, gpus: float, fits: bool
) -> None:
    engine = {"dtype": dtype, "extra": {"block_size": page}}
    settings = config(fleet={"workers": [{"sku": "x", "resources": {"GPU": gpus}, "engine": engine}]})
    if fits:
        preflight.check(settings, tmp_path / "run")
    else:
        message = refusal(ConfigError, settings, tmp_path / "run")
        assert f"engine.extra.block_size={page} of SKU 'x'" in message
        assert "a multiple of 32 tokens" in message


@pytest.mark.parametrize(("tokens", "fits"), [(511, True), (512, False), (600, False)])
def test_answers_must_leave_room_for_a_prompt(tmp_path: Path, tokens: int, fits: bool) -> None:
    settings = config(sampling={"max_new_tokens": tokens}, model={"max_model_len": 512})
    if fits:
        preflight.check(settings, tmp_path / "run")
        return
    message = refusal(ConfigError, settings, tmp_path / "run")
    for part in (f"sampling.max_new_tokens={tokens}", "model.max_model_len=512", "lower"):
        assert part in message


@pytest.mark.parametrize("key", ["run.metrics_port", "learner.master_port", "weights.port"])
def test_a_port_somebody_listens_on(tmp_path: Path, taken_port: int, key: str) -> None:
    section, _, name = key.partition(".")
    message = refusal(ClusterError, config(**{section: {name: taken_port}}), tmp_path / "run")
    for part in (f"{key}={taken_port}", "in use", "choose another"):
        assert part in message
    preflight.check(config(**{section: {name: free_port()}}), tmp_path / "run")


@pytest.mark.parametrize(("name", "fits"), [("grpo", True), ("gspo", True), ("dapo", False), ("rloo", False)])
def test_a_step_in_parts_needs_an_objective_that_divides_by_answers(name: str, fits: bool) -> None:
    settings = config(
        learner={"micro_batch_groups": 2}, staleness={"max_staleness": 0}, objective={"name": name}
    )
    if fits:
        preflight.check_extensions(settings)
        return
    with pytest.raises(ConfigError) as caught:
        preflight.check_extensions(settings)
    for part in ("learner.micro_batch_groups", f"objective.name={name}", "not known before", "grpo"):
        assert part in str(caught.value)


def test_a_folder_that_another_run_has_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    message = refusal(ConfigError, Config(), tmp_path)
    assert f"run.dir={tmp_path}" in message
    assert f"run.resume={tmp_path}" in message
    preflight.check(config(run={"resume": str(tmp_path)}), tmp_path)


def test_a_job_on_a_cluster_keeps_its_run_elsewhere_than_in_rays_copy_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    for settings in (Config(), config(run={"dir": "runs/job"})):
        message = refusal(ConfigError, settings, run_folder(settings))
        assert all(part in message for part in ("run.dir=", "Ray removes", "a folder that stays"))
    stays = config(run={"dir": str(tmp_path / "runs" / "job")})
    preflight.check(stays, run_folder(stays))
    # What was written there all the same can be gone on with as long as it is there.
    preflight.check(config(run={"resume": "runs/job"}), copy / "runs" / "job")


@pytest.mark.parametrize(
    ("learner", "worker", "fits"), [(0.0, 0.0, False), (2.0, 0.0, True), (0.0, 0.4, True)]
)
def test_a_budget_that_nothing_spends(tmp_path: Path, learner: float, worker: float, fits: bool) -> None:
    workers = [{"sku": "cpu", "count": 1, "usd_per_hour": worker}]
    settings = config(budget={"usd": 20.0}, learner={"usd_per_hour": learner}, fleet={"workers": workers})
    if fits:
        preflight.check(settings, tmp_path / "run")
        return
    message = refusal(ConfigError, settings, tmp_path / "run")
    for part in ("budget.usd=20", "never be spent", "learner.usd_per_hour", "set what they cost"):
        assert part in message


@pytest.mark.parametrize(("usd", "fits"), [(12.0, False), (12.5, False), (12.6, True), (None, True)])
def test_a_resumed_run_whose_budget_is_spent(tmp_path: Path, usd: float | None, fits: bool) -> None:
    spent = {"usd_by_sku": {"learner": 12.5}, "usd_by_part": {"learner": 8.0, "booting": 4.5}}
    (tmp_path / SPENDING_FILE).write_text(json.dumps(spent))
    settings = config(run={"resume": str(tmp_path)}, budget={"usd": usd}, learner={"usd_per_hour": 1.0})
    if fits:
        preflight.check(settings, tmp_path)
    else:
        message = refusal(ConfigError, settings, tmp_path)
        for part in (f"budget.usd={usd:g}", "has spent $12.5 already", "give more", "budget.usd=null"):
            assert part in message


def test_a_replay_store_that_another_run_has_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "RELEASE_S", 0.0)
    store = ReplayStore(tmp_path / "replay", holder="the other")
    with pytest.raises(ClusterError, match=r'is in use by run "the other", process .* end that run'):
        preflight.check(Config(), tmp_path)
    store.close()
    preflight.check(Config(), tmp_path)


def test_a_replay_store_of_a_newer_version(tmp_path: Path) -> None:
    ReplayStore(tmp_path / "replay", holder="test").close()
    path = tmp_path / "replay" / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(DataError, match=r"store\.json was written in format 99, .* update echo_planes"):
        preflight.check(Config(), tmp_path)


def test_a_run_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(ClusterError, Config(), tmp_path / "file" / "run")
    assert f"run.dir={tmp_path / 'file' / 'run'}" in message
    assert "cannot be written" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_run_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(ClusterError, Config(), tmp_path / "run")


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MIN_FREE_BYTES", 2**62)
    message = refusal(ClusterError, Config(), tmp_path / "run")
    for part in (f"run.dir={tmp_path / 'run'}", "MiB are free", str(2**42), "free some space"):
        assert part in message


def test_a_signing_key_that_is_none(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    assert f"{key} cannot be read" in refusal(
        ConfigError, config(weights={"key_file": str(key)}), tmp_path / "r"
    )
    key.write_text("no key")
    key.chmod(0o600)
    message = refusal(ConfigError, config(weights={"key_file": str(key)}), tmp_path / "r")
    assert "openssl genpkey" in message


def test_certificates_that_are_not_there(tmp_path: Path) -> None:
    given = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}
    message = refusal(ConfigError, config(weights=given), tmp_path / "run")
    assert "cert.pem cannot be read: No such file" in message
    assert "weights.tls_cert" in message
    with pytest.raises(ValueError, match="belong together"):
        config(weights={"tls_cert": "cert.pem"})


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(ConfigError, config(weights={"store": str(tmp_path / "file")}), tmp_path / "run")
    assert f"weights.store={tmp_path / 'file'} is a file" in message
    preflight.check(config(weights={"store": str(tmp_path / "store")}), tmp_path / "run")


def changing(*kinds: dict[str, Any], **fleet: Any) -> Config:
    """A fleet that follows price and need."""
    return config(fleet={"workers": list(kinds), "scale": "static", **fleet})


@pytest.mark.parametrize("scale", ["static", "ray"])
def test_a_fleet_that_changes_passes_with_what_only_it_looks_at(tmp_path: Path, scale: str) -> None:
    spot = {"sku": "a", "market": "spot", "min_count": 1, "max_count": 3, "mu": 2.0, "cloud": "aws"}
    other = {"sku": "a", "region": "r", "market": "spot", "interruptions_per_hour": 0.5}
    settings = changing(spot, other, scale=scale, usd_per_hour=3.0, max_workers=4, tick_s=1.0, gamma=1.2)
    preflight.check(settings, tmp_path / "run")


def test_kinds_of_a_fleet_that_changes_have_names_of_their_own(tmp_path: Path) -> None:
    kinds = [{"sku": "a", "region": "r", "usd_per_hour": price} for price in (1.0, 2.0)]
    message = refusal(ConfigError, changing(*kinds), tmp_path / "run")
    assert "a/r/on_demand" in message
    assert "another sku, region or market" in message
    preflight.check(config(fleet={"workers": kinds}), tmp_path / "run")  # a fixed one needs none


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ({"count": 3, "max_count": 2}, ["count=3", "max_count=2"]),
        ({"count": 1, "min_count": 2}, ["min_count=2", "max_count=1"]),
        ({"count": 0, "min_count": 5, "max_count": 4}, ["min_count=5", "max_count=4"]),
    ],
)
def test_counts_beyond_a_quota(tmp_path: Path, kind: dict[str, Any], parts: list[str]) -> None:
    message = refusal(ConfigError, changing({"sku": "a"}, {"sku": "b", **kind}), tmp_path / "run")
    for part in [*parts, "b/on_demand", "lower"]:
        assert part in message


def test_the_first_workers_are_within_the_limits_of_the_fleet(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{"sku": "a", "count": 2, "usd_per_hour": 1.5}, {"sku": "b"}]
    message = refusal(ConfigError, changing(*kinds, max_workers=2), tmp_path / "run")
    assert "max_workers=2" in message
    assert "3 workers" in message
    message = refusal(ConfigError, changing(*kinds, usd_per_hour=2.5), tmp_path / "run")
    assert "usd_per_hour=2.5" in message
    assert "$3/h" in message
    preflight.check(changing(*kinds, max_workers=3, usd_per_hour=3.0), tmp_path / "run")
    spot: dict[str, Any] = {"sku": "a", "count": 3, "usd_per_hour": 0.1, "interruptions_per_hour": 0.1}
    message = refusal(ConfigError, changing(spot, interruptions_per_hour=0.2), tmp_path / "run")
    assert message.startswith("fleet.interruptions_per_hour=0.2 is below 0.3/h")
    assert "lower the counts" in message
    # 3 x 0.1 is a little above 0.3 in floating point: as for the fleet later, that is no excess.
    preflight.check(changing(spot, interruptions_per_hour=0.3, usd_per_hour=0.3), tmp_path / "run")


def test_standbys_must_have_room_beside_the_workers_to_begin_with(tmp_path: Path, model: Path) -> None:
    kind = {"sku": "a", "count": 2, "max_count": 4}
    fits = changing(kind, standby=2, max_workers=4)
    preflight.check_fleet(fits)
    message = refusal(ConfigError, changing(kind, standby=2, max_workers=3), tmp_path / "run")
    assert "fleet.standby=2: fleet.max_workers=3" in message
    assert "raise it to 4" in message
    message = refusal(ConfigError, changing(kind, standby=3), tmp_path / "run")
    assert "max_count (of all instance types)=4" in message
    preflight.check_fleet(changing({"sku": "a", "count": 2}))  # no standby: the quota may be the fleet


def test_instance_types_that_are_priced_by_name_have_names_of_their_own() -> None:
    twins = [WorkerConfig(sku="a", usd_per_hour=usd).model_dump() for usd in (1.0, 2.0)]
    preflight.check_fleet(config(fleet={"workers": twins}))
    with pytest.raises(ConfigError, match="two entries are of instance type a/on_demand"):
        preflight.check_fleet(config(fleet={"workers": twins, "prices": "my_prices:make"}))


def test_the_devices_of_one_engine_lie_on_one_node() -> None:
    kind = {"sku": "a", "resources": {"CPU": 4.0, "GPU": 4.0}, "engine": {"tensor_parallel_size": 4}}
    small = [{"CPU": 16.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 8.0}]
    with pytest.raises(ClusterError, match="'a' needs 4 CPU, 4 GPU on one node, and no node"):
        placement.check_nodes(config(fleet={"workers": [kind]}).fleet, small)
    placement.check_nodes(config(fleet={"workers": [kind]}).fleet, [*small, {"CPU": 4.0, "GPU": 4.0}])
    placement.check_nodes(changing(kind, scale="ray").fleet, small)  # nodes come when asked for


def test_a_fleet_that_changes_must_fit_with_all_its_quotas_unless_nodes_come() -> None:
    kind = {"sku": "a", "count": 1, "max_count": 4, "resources": {"GPU": 1.0}, "labels": {"pool": "x"}}
    has = {"CPU": 8.0, "GPU": 3.0}
    nodes = [{"pool": "x"}]
    with pytest.raises(
        ClusterError, match=r"need 4 GPU, the cluster has 3; lower fleet\.workers\.0\.max_count=4, or"
    ):
        placement.check_fit(changing(kind), has, nodes)
    with pytest.raises(ClusterError, match="no node of the cluster carries the labels"):
        placement.check_fit(changing(kind), has | {"GPU": 4.0}, [{"pool": "y"}])
    placement.check_fit(changing(kind), has | {"GPU": 4.0}, nodes)
    placement.check_fit(changing(kind, scale="ray"), {"CPU": 8.0}, [])


@pytest.mark.parametrize("scale", ["fixed", "static"])
def test_the_default_fleet_fits_two_cores_and_a_larger_one_is_told_what_to_lower(scale: str) -> None:
    cores = {"CPU": 2.0}
    placement.check_fit(load_config([f"fleet.scale={scale}"]), cores, [{}])
    larger = load_config(
        [f"fleet.scale={scale}", f"fleet.workers.1.{'count' if scale == 'fixed' else 'max_count'}=2"]
    )
    advice = "choose a smaller fleet"
    if scale == "static":
        advice = "lower fleet.workers.0.max_count=1 or fleet.workers.1.max_count=2"
    with pytest.raises(
        ClusterError, match=f"need 2.5 CPU, the cluster has 2; {advice}, or their 'resources'"
    ):
        placement.check_fit(larger, cores, [{}])


def test_a_seeder_fits_beside_the_learner_in_memory_and_resources(tmp_path: Path) -> None:
    words = ["fleet=colocated", "seeding.resources={GPU: 0.5}", "learner.resources={CPU: 1, GPU: 0.5}"]
    with pytest.raises(ConfigError) as told:
        preflight.check(load_config(words), tmp_path / "run")
    for part in ("gpu_memory_utilization=0.85", "0.35 of the card more", "set at most 0.5"):
        assert part in str(told.value)
    with pytest.raises(ConfigError, match=r"seeding\.resources has no GPU, learner\.resources has GPU: 0\.5"):
        preflight.check(load_config([words[0], words[2]]), tmp_path / "run")
    fits = load_config([*words, "seeding.engine.gpu_memory_utilization=0.45"])
    preflight.check(fits, tmp_path / "run")
    placement.check_fit(fits, {"CPU": 2.0, "GPU": 1.0}, [{}])
    with pytest.raises(
        ClusterError, match=r"workers, seeders and the learner need 1 GPU, the cluster has 0\.5"
    ):
        placement.check_fit(fits, {"CPU": 2.0, "GPU": 0.5}, [{}])
    assert fits.staleness.max_staleness == 0
    assert list(fits.first_workers()) == ["s0"]


def test_a_fleet_file_sets_other_sections_and_words_set_them_again() -> None:
    assert load_config(["fleet=colocated", "seeding.engines=2"]).seeding.engines == 2
    with pytest.raises(ConfigError, match=r"seeding\.engines=1 does not go with staleness\.max_staleness=2"):
        load_config(["fleet=colocated", "staleness.max_staleness=2"])


def machine(**resources: float) -> Machine:
    return Machine("n", resources, {})


@pytest.mark.parametrize(
    ("words", "gpus", "resources"),
    [
        ([], 0, None),
        ([], 1, {"CPU": 1.0, "GPU": 1.0}),
        (["learner.num_ranks=4"], 8, {"CPU": 1.0, "GPU": 1.0}),
        (["fleet=colocated", "seeding.resources={GPU: 0.5}"], 1, {"CPU": 1.0, "GPU": 0.5}),
        (["fleet.workers.0.resources={GPU: 1}"], 2, {"CPU": 1.0, "GPU": 1.0}),
        (["learner.resources={CPU: 2}"], 8, {"CPU": 2.0}),
    ],
)
def test_a_rank_takes_a_gpu_that_the_cluster_has_left(
    words: list[str], gpus: int, resources: dict[str, float] | None
) -> None:
    has = [machine(CPU=16, GPU=gpus)] if gpus else [machine(CPU=16)]
    settled = placement.with_learner_resources(load_config(words), has)
    assert settled.learner.resources == resources
    assert settled.learner.rank_resources == (resources or {"CPU": 1.0})


def test_ranks_that_find_no_gpu_left_are_refused() -> None:
    words = ["learner.num_ranks=2", "fleet=single", "fleet.workers.0.resources={GPU: 1}"]
    with pytest.raises(
        ClusterError, match=r"has 2 GPU, of which workers and seeders need 1: too few are left"
    ):
        placement.with_learner_resources(load_config(words), [machine(GPU=1), machine(GPU=1)])
    with pytest.raises(ConfigError, match=r"a rank trains on one GPU, and this gives it 4"):
        load_config(["learner.resources={GPU: 4}"])


def test_gpus_of_bought_machines_are_not_the_learners() -> None:
    """They may be up already, of the part of the run that this one continues."""
    bought = load_config(["fleet.scale=ray", "fleet.workers.0.resources={GPU: 1}"])
    name = bought.fleet.workers[0].instance_type
    has = [machine(CPU=8), machine(CPU=8, GPU=1, **{name: 1.0})]
    assert placement.with_learner_resources(bought, has).learner.resources is None
    assert placement.with_learner_resources(bought, [machine(CPU=8, GPU=1), *has]).learner.resources


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"max_position_embeddings": 4095}, False),
        ({"max_position_embeddings": 4096}, True),
        ({}, True),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default"}}, False),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, True),
        ({"text_config": {"max_position_embeddings": 2048}}, False),
    ],
)
def test_an_answer_has_no_more_tokens_than_the_model_has_positions(
    model: Path, fields: dict[str, Any], fits: bool
) -> None:
    (model / "config.json").write_text(json.dumps(fields))
    settings = load_config([f"model.path={model}", "model.max_model_len=4096"])
    if fits:
        preflight.check_positions(settings)
        return
    with pytest.raises(ConfigError, match=r"model\.max_model_len=4096 is above the max_position_embeddings="):
        preflight.check_positions(settings)


@pytest.mark.parametrize(
    ("name", "code", "fits"),
    [
        ("model.norm.weight", "BF16", True),
        ("model.norm.weight", "F16", True),
        ("model.norm.weight", "F32", True),
        ("model.embed.position_ids", "I64", True),  # a buffer
        ("model.q_proj.weight", "F8_E4M3", False),
        ("model.q_proj.weight_scale_inv", "F8_E8M0", False),
        ("model.q_proj.weight", "I8", False),
        ("model.q_proj.weight", "U8", False),
        ("model.q_proj.qweight", "I32", False),
        ("model.q_proj.weight_packed", "I32", False),
    ],
)
def test_weights_are_of_types_that_bf16_can_hold(
    model: Path, tmp_path: Path, name: str, code: str, fits: bool
) -> None:
    size = {"8": 1, "6": 2, "2": 4, "4": 8}[code.partition("_")[0][-1]]
    header = json.dumps({name: {"dtype": code, "shape": [1], "data_offsets": [0, size]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    if fits:
        preflight.check_model(model)
        return
    message = refusal(ModelError, config(model={"path": str(model)}), tmp_path / "run")
    for part in (f"model.path={model}: tensor {name!r} is {code}", "bf16", "give the model in"):
        assert part in message


# --- memory of the learner ---


def folder_of(folder: Path, vocabulary: int, hidden: int, **more: Any) -> Path:
    """Write a model folder whose weight file is all hole: it takes no space on disk."""
    folder.mkdir()
    shape = {"num_hidden_layers": 4, "hidden_size": hidden, "vocab_size": vocabulary, **more}
    (folder / "config.json").write_text(json.dumps(shape))
    size = 2 * vocabulary * hidden
    entry = {"dtype": "BF16", "shape": [vocabulary, hidden], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return folder


def card(kind: str) -> Machine:
    return Machine("n", {"GPU": 1.0}, {"ray.io/accelerator-type": kind})


def test_a_model_whose_learner_cannot_fit_is_refused_with_its_parts(tmp_path: Path) -> None:
    gib = 2**30
    folder = folder_of(tmp_path / "model", 2**17, 2**13)  # 2**30 weights
    on_cpu = load_config(
        [
            *(f"model.path={folder}", "learner.dtype=fp32"),
            *("learner.micro_batch_tokens=512", "learner.num_ranks=2"),
        ]
    )
    # In fp32 under ZeRO-1: weights 4, gradients 4, masters and moments 16 / 2 GiB, logits 0.5 GiB,
    # embedding 4 GiB, the program 0.4 GiB, published 2 GiB.
    memory.check_memory(on_cpu, [], 47 * gib)
    parts = (
        r"at least 2 ranks with 23\.0 GiB \(weights 4\.0, gradients 4\.0, masters 4\.0, moments 4\.0, "
        r"inputs 0\.1, logits 0\.5, embedding 4\.0, program 0\.4, published 2\.0\), this machine "
        r"has 24\.0 GiB; choose a smaller model"
    )
    with pytest.raises(ConfigError, match=parts):
        memory.check_memory(on_cpu, [], 24 * gib)
    words = [f"model.path={folder}", "learner.resources={GPU: 1}"]
    memory.check_memory(load_config(words), [card("H100")], 1)
    memory.check_memory(load_config(words), [card("no such card"), Machine("n", {}, {})], 1)
    memory.check_memory(load_config(words), [card("T4"), card("no such card")], 1)
    with pytest.raises(ConfigError, match=r"a rank's part of a card has 16\.0 GiB; .*learner\.zero_stage=3"):
        memory.check_memory(load_config(words), [card("T4")], 1)
    shared = [*words[:1], "learner.resources={GPU: 0.2}"]
    with pytest.raises(ConfigError, match=r"a rank's part of a card has 9\.6 GiB"):
        memory.check_memory(load_config(shared), [card("L40S")], 1)
    long = [*words, "learner.micro_batch_tokens=131072"]
    with pytest.raises(ConfigError, match=r"choose a smaller learner\.micro_batch_tokens"):
        memory.check_memory(load_config(long), [card("L4")], 1)


def test_engines_on_this_machine_count_beside_the_learner(tmp_path: Path) -> None:
    gib = 2**30
    folder = folder_of(tmp_path / "model", 2**17, 2**13, num_attention_heads=64, num_key_value_heads=2)
    words = [f"model.path={folder}", "learner.micro_batch_tokens=512", "learner.dtype=fp32"]
    fleet = load_config([*words, "fleet=laptop"]).fleet.num_workers
    assert fleet == 2
    # The learner alone, with ZeRO-1 on one rank: 4 + 4 + 8 + 8 + 4.6 + 0.4 + 2 GiB. An engine and its node
    # have 2 GiB of weights each, a cache of 0.25 and a program of 0.4.
    memory.check_memory(load_config(words), [], 41 * gib)
    told = r"at least 31\.0 GiB \(.*\) and 2 engines together 9\.3 GiB, this machine has 40\.0 GiB; choose"
    with pytest.raises(ConfigError, match=told):
        memory.check_memory(load_config(words), [], 40 * gib)


@pytest.mark.parametrize(
    ("more", "tokens", "fits"),
    [
        ({}, 65_536, True),  # 4 layers x 2 heads x 128 x keys and values x 2 bytes: 4 KiB a token
        ({}, 65_537, False),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 3]}, 262_144, True),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 3]}, 262_145, False),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 512}, 10**6, True),
        ({"kv_lora_rank": 512}, 10**6, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, 65_537, False),
    ],
)
def test_an_engine_on_cpus_holds_one_answer(
    tmp_path: Path, more: dict[str, Any], tokens: int, fits: bool
) -> None:
    shape = {"num_attention_heads": 64, "num_key_value_heads": 2, **more}
    folder = folder_of(tmp_path / "model", 2**10, 2**13, **shape)
    words = [f"model.path={folder}", f"model.max_model_len={tokens}", f"learner.micro_batch_tokens={tokens}"]
    words.append("fleet=single")
    settings = load_config([*words, "fleet.workers.0.engine.kv_cache_gib=0.25"])
    if fits:
        memory.check_memory(settings, [], 2**50)
        return
    with pytest.raises(ConfigError) as told:
        memory.check_memory(settings, [], 2**50)
    for part in (
        "fleet.workers.0.engine.kv_cache_gib=0.25",
        f"model.max_model_len={tokens}",
        "takes 0.25 GiB",
    ):
        assert part in str(told.value)


def test_a_card_without_a_known_size_is_looked_up_in_the_cluster(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 64, "num_key_value_heads": 2}
    folder = folder_of(tmp_path / "model", 2**18, 2**13, **shape)  # 4 GiB in bf16
    words = [f"model.path={folder}", "fleet=single", "fleet.workers.0.resources={GPU: 1}"]
    settings = load_config([*words, "fleet.workers.0.engine.gpu_memory_utilization=0.2"])
    memory.check_memory(settings, [card("no such card")], 2**50)
    memory.check_memory(settings, [card("L4")], 2**50)
    with pytest.raises(ConfigError, match=r"fleet\.workers\.0\.engine: weights of 4\.0 GiB .* of 1 x 16 GiB"):
        memory.check_memory(settings, [card("T4")], 2**50)


def test_a_model_with_sizes_by_other_names_is_not_judged(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", 2**17, 2**13)
    (folder / "config.json").write_text('{"n_layer": 4, "n_embd": 8192, "vocab_size": 131072}')
    memory.check_memory(load_config([f"model.path={folder}"]), [], 1)


def test_adapters_at_layers_that_the_model_has_not(tmp_path: Path) -> None:
    given = {"lora_rank": 8, "lora_targets": ["q_proj", "query"]}
    message = refusal(ConfigError, config(learner=given), tmp_path / "run")
    for part in ("learner.lora_targets: query", "builtin:tiny-math", "down_proj, gate_proj"):
        assert part in message
    preflight.check(config(learner={**given, "lora_targets": ["q_proj"]}), tmp_path / "run")
