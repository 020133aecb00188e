"""Settings without an effect are refused where they are given, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_planes.config.conditions import COMES_TO
from echo_planes.config.plain_yaml import dump_yaml
from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError
from echo_planes.loop.loading import config_dir, dump_config, load_config, recorded_config

SPARSE = ("sparse.schedule=[8]", "sampling.top_logprobs=20")
FOLLOWS = "fleet.scale=static"
ONE = "fleet.workers.0"
# The setting; words beside which it has no effect; what the line advises; words beside which it has one.
CASES: list[tuple[str, str, str, str]] = [
    ("objective.clip_low=0.1", "objective.name=cispo", "objective.name", "objective.name=gspo"),
    ("objective.clip_delta=3", "objective.name=cispo", "objective.name", "objective.anchor=sampler"),
    ("objective.tis_level=token", "objective.anchor=sampler", "anchor=proximal", "objective.name=rloo"),
    ("objective.tis_level=token", "objective.name=cispo", "objective.anchor=proximal", ""),
    ("objective.tis_cap=3", "objective.anchor=sampler", "objective.anchor=proximal or objective.kl_beta", ""),
    ("objective.tis_cap=3", "objective.name=cispo", "anchor=proximal", "objective.kl_beta=0.1"),
    ("objective.uncorrected=true", "", "objective.tis_level=none", "objective.tis_level=none"),
    ("objective.kl_estimator=k1", "", "objective.kl_beta above 0", "objective.kl_beta=0.1"),
    ("objective.kl_clamp=3", "objective.kl_beta=0", "objective.kl_beta above 0", "objective.kl_beta=0.1"),
    ("objective.skip_zero_advantage=false", "objective.kl_beta=0.1", "objective.kl_beta=0", ""),
    ("objective.score_skipped=true", "objective.skip_zero_advantage=false", "skip_zero_advantage=true", ""),
    ("sampling.theta=4", "", "sampling.router=jsq", "sampling.router=jsq"),
    ("sampling.theta=4", "sampling.router=proportional", "sampling.router=jsq", "sampling.router=my:Policy"),
    ("sampling.refill_limit=2", "", "sampling.refill=reward or correct", "objective.name=dapo"),
    (
        "sampling.refill_limit=2",
        "objective.name=dapo sampling.refill=off",
        "refill=reward",
        "sampling.refill=correct",
    ),
    ("sampling.overlong_tokens=4", "sampling.overlong=mask", "overlong=penalty", "objective.name=dapo"),
    ("staleness.queue_batches=2", "staleness.max_staleness=0", "staleness.max_staleness above 0", ""),
    ("learner.lora_alpha=16", "", "learner.lora_rank above 0", "learner.lora_rank=8"),
    ("learner.lora_targets=[q_proj]", "", "learner.lora_rank above 0", "learner.lora_rank=8"),
    ("learner.drift_floor=0.1", "learner.drift_target=0", "learner.drift_target above 0", ""),
    ("learner.master_port=2000", "", "learner.num_ranks above 1", "learner.num_ranks=2"),
    ("eval.top_p=0.9", "eval.temperature=0 eval.samples_per_prompt=1", "eval.temperature above 0", ""),
    ("run.metrics_port=2000", "run.ray_address=host:1", "run.ray_address=null", ""),
    ("guard.patience=9", "guard.mode=off", "guard.mode=act or warn", "guard.mode=warn"),
    ("guard.mismatch=0.2", "guard.mode=off", "guard.mode=act or warn", ""),
    ("weights.codec=fast", "weights.mode=full", "weights.mode=chain or direct", "weights.mode=direct"),
    ("weights.snapshot_every=9", "weights.mode=full", "weights.mode=chain or direct", "weights.mode=direct"),
    ("weights.keep_patches=9", "weights.mode=full", "weights.mode=chain or direct", "weights.mode=direct"),
    ("weights.starved_s=9", "weights.mode=direct", "weights.mode=chain", ""),
    ("weights.uplink_mbit=9", "weights.mode=full", "weights.mode=chain", ""),
    ("weights.worker_mbit=9", "weights.mode=direct", "weights.mode=chain", ""),
    ("seeding.first_s=2", "", "seeding.engines above 0", "fleet=colocated"),
    ("seeding.engine.max_num_seqs=2", "", "seeding.engines above 0", "fleet=colocated"),
    ("seeding.resources={CPU: 1}", "", "seeding.engines above 0", "fleet=colocated"),
    ("sparse.target=0.9", "", "sparse.schedule", " ".join(SPARSE)),
    ("sparse.guard=off", "sparse=dense", "sparse.schedule", " ".join(SPARSE)),
    ("sparse.distill_lr=0.1", " ".join(SPARSE), "distill_rank", " ".join((*SPARSE, "sparse.distill_rank=8"))),
    ("fleet.gamma=1.2", "", "fleet.scale=ray or static", FOLLOWS),
    ("fleet.tick_s=1", "", "fleet.scale=ray or static", FOLLOWS),
    ("fleet.sustain_s=1", "", "fleet.scale=ray or static", FOLLOWS),
    ("fleet.ask_limit_s=1", "", "fleet.scale=ray or static", FOLLOWS),
    ("fleet.boot_limit_s=1", "", "fleet.scale=ray or static", FOLLOWS),
    ("fleet.usd_per_hour=9", "", "fleet.scale=ray or static", FOLLOWS),
    ("fleet.interruptions_per_hour=9", "", "fleet.scale=ray or static", FOLLOWS),
    ("fleet.max_workers=9", "", "fleet.scale=ray or static", FOLLOWS),
    ("fleet.standby=1", "", "fleet.scale=ray or static", FOLLOWS),
    ("fleet.restarts=1", FOLLOWS, "fleet.scale=fixed or seeding.engines above 0", ""),
    ("fleet.prices_every_s=9", "", "fleet.prices=package.module:NAME", "fleet.prices=my:prices"),
    (f"{ONE}.min_count=1", "", "fleet.scale=ray or static", FOLLOWS),
    (f"{ONE}.max_count=2", "", "fleet.scale=ray or static", FOLLOWS),
    (f"{ONE}.mu=1.5", "", "fleet.scale=ray or static", FOLLOWS),
    (f"{ONE}.interruptions_per_hour=0.1", "", "fleet.scale=ray or static", FOLLOWS),
    (f"{ONE}.cloud=aws", "", "fleet.scale=ray or static", FOLLOWS),
    (f"{ONE}.metadata_url=http://x", FOLLOWS, f"{ONE}.cloud=aws, gcp", f"{FOLLOWS} {ONE}.cloud=aws"),
    (f"{ONE}.engine.enforce_eager=true", "", f"{ONE}.resources.GPU above 0", f"{ONE}.resources.GPU=1"),
    (f"{ONE}.engine.gpu_memory_utilization=0.5", "", f"{ONE}.resources.GPU", f"{ONE}.resources.GPU=1"),
    (f"{ONE}.engine.kv_cache_gib=2", f"{ONE}.resources.GPU=1", f"{ONE}.resources.GPU=null or 0", ""),
]


@pytest.mark.parametrize(("word", "beside", "advice", "effective"), CASES, ids=lambda one: str(one)[:50])
def test_a_setting_without_an_effect_is_refused_with_what_would_give_it_one(
    word: str, beside: str, advice: str, effective: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([word, *beside.split()])
    message, (key, _, value) = str(caught.value), word.partition("=")
    assert message.startswith(f"{key}=")
    assert value.strip("{}[]").partition(":")[0] in message
    assert " has no effect with " in message
    assert advice in message.partition("; leave it out, or set ")[2]
    assert "\n" not in message
    load_config([word, *effective.split()])


def test_it_is_refused_as_a_default_and_in_a_section_too() -> None:
    for word in ("sampling.theta=2", "sampling={theta: 2}", 'fleet.workers=[{sku: x, "mu": 2.0}]'):
        with pytest.raises(
            ConfigError, match=r"(sampling\.theta=2|fleet\.workers\.0\.mu=2\.0) has no effect"
        ):
            load_config([word])
    assert load_config(["sampling.theta=null", "sampling.theta=3", "sampling.router=jsq"]).sampling.theta == 3
    assert load_config(["objective.clip_low=null", "objective.name=cispo"]).objective.clip_low is None


def test_a_file_that_is_named_gives_what_differs_from_the_default(tmp_path: Path) -> None:
    fleet = tmp_path / "mine.yaml"
    fleet.write_text("workers: [{sku: x, min_count: 1, usd_per_hour: 0.1}]\ngamma: 1.1\n")
    with pytest.raises(ConfigError, match=r"fleet\.workers\.0\.min_count=1 has no effect"):
        load_config([f"fleet={fleet}"])
    load_config([f"fleet={fleet}", FOLLOWS])
    fleet.write_text("workers: [{sku: x, min_count: 0}]\ngamma: 1.1\n")
    load_config([f"fleet={fleet}"])
    sparse = tmp_path / "schedule.yaml"  # as calibrate writes it, defaults and all
    sparse.write_text(dump_yaml(Config.model_validate({"sparse": {"schedule": [8]}}).sparse.model_dump()))
    load_config([f"sparse={sparse}", "sampling.top_logprobs=20"])


def test_what_a_file_suggests_for_other_sections_gives_way(tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(
        "name: mine\nadapter: echo_planes.tasks.math.adapter:MathTask\ndataset: addition\n"
        "defaults: {objective: {name: grpo, clip_low: 0.1}, learner: {lora_rank: 8, lora_alpha: 16.0}}\n"
    )
    load_config([f"task={task}", "objective.name=cispo", "learner.lora_rank=0"])


def test_what_a_run_has_recorded_does_not_stop_its_resume(tmp_path: Path) -> None:
    changes = {
        "objective": {"name": "cispo", "clip_low": 0.1, "tis_cap": 3.0},
        "learner": {"lora_alpha": 16.0},
        "fleet": {"gamma": 1.5, "workers": [{"min_count": 1}]},
        "sampling": {"theta": 4},
    }
    (tmp_path / "config.yaml").write_text(dump_config(Config.model_validate(changes)))
    resume = f"run.resume={tmp_path}"
    assert load_config([resume, "run.steps=500"]).objective.clip_low == 0.1
    assert recorded_config(tmp_path).learner.lora_alpha == 16.0
    assert load_config([resume, "sampling.router=jsq"]).sampling.theta == 4
    with pytest.raises(ConfigError, match=r"^sampling\.theta=5 has no effect with sampling\.router=pull"):
        load_config([resume, "sampling.theta=5"])


@pytest.mark.parametrize("group", ["task", "model", "fleet"])
def test_no_file_of_this_repository_gives_a_setting_without_an_effect(group: str) -> None:
    needed = {"function": ["task.reward=m:f", "task.data=x"], "gym": ["task.env=m:E", "task.data=x"]}
    needed["reasoning_gym"] = ["task.dataset=x"]
    for path in (config_dir() / group).glob("*.yaml"):
        load_config([f"{group}={path.stem}", *needed.get(path.stem, [])])


def test_the_settings_whose_default_others_decide_come_to_a_value() -> None:
    assert all(comes_to(Config()) is not None for comes_to in COMES_TO.values())
