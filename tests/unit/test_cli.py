"""From words to settings: what is asked for is what comes out, and a mistake is named with its remedy."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest
import yaml

from echo_planes import run
from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError
from echo_planes.loop.loading import _USUAL, config_dir, dump_config, load_config, recorded_config


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    message = str(caught.value)
    assert "\n" not in message
    return message


def names(message: str, *parts: str) -> None:
    """A message says each of these."""
    for part in parts:
        assert part in message, f"'{part}' is not in: {message}"


# --- what is asked for ---------------------------------------------------------------------------


def test_no_words_give_the_default_run() -> None:
    config = load_config([])
    assert config.task.name == "math"
    assert config.model.path == "builtin:tiny-math"
    assert (config.staleness.max_staleness, config.staleness.kappa) == (3, 2)
    assert config.sampling.trajectories_per_step == 32 * 8


@pytest.mark.parametrize(
    ("word", "section", "key", "value"),
    [
        ("run.steps=7", "run", "steps", 7),
        ("learner.lr=1e-5", "learner", "lr", 1e-5),  # text in YAML 1.1
        ("learner.lr=0", "learner", "lr", 0.0),
        ("objective.clip_delta=null", "objective", "clip_delta", None),
        ("staleness.policy=drop", "staleness", "policy", "drop"),
        ("objective.skip_zero_advantage=false", "objective", "skip_zero_advantage", False),
        ("run.dir=runs/a=b", "run", "dir", "runs/a=b"),  # only the first = separates
        ("sampling.top_p=1", "sampling", "top_p", 1.0),
    ],
)
def test_one_word_sets_one_key(word: str, section: str, key: str, value: object) -> None:
    config = load_config([word])
    assert getattr(getattr(config, section), key) == value
    default = load_config([]).model_dump()
    changed = config.model_dump()
    changed[section][key] = default[section][key]
    assert changed == default


def test_the_last_word_wins() -> None:
    assert load_config(["run.steps=7", "run.steps=9"]).run.steps == 9


def test_numbers_index_the_workers() -> None:
    config = load_config(["fleet.workers.1.count=5", "fleet.workers.0.engine.max_num_seqs=3"])
    plain = load_config([])
    assert config.fleet.num_workers == plain.fleet.num_workers - plain.fleet.workers[1].count + 5
    assert config.fleet.workers[0].engine.max_num_seqs == 3
    assert config.fleet.workers[0].sku == plain.fleet.workers[0].sku


def test_a_group_word_replaces_the_whole_group_and_words_come_after_it() -> None:
    config = load_config(["fleet.workers.0.count=4", "fleet=single"])
    assert len(config.fleet.workers) == 1
    assert config.fleet.num_workers == 4


def test_a_group_may_be_a_file_or_a_folder_or_a_class(tmp_path: Path) -> None:
    fleet = tmp_path / "mine.yaml"
    fleet.write_text("workers: [{sku: T4, usd_per_hour: 0.35, count: 2}]\n")
    config = load_config(
        [f"fleet={fleet}", f"model={tmp_path}", "task=examples.own_task:OwnTask", "model.max_model_len=64"]
    )
    assert [kind.sku for kind in config.fleet.workers] == ["T4"]
    assert config.model.folder == tmp_path
    assert config.task.adapter == "examples.own_task:OwnTask"
    assert config.task.name == "OwnTask"


def test_task_options_go_to_the_adapter() -> None:
    assert load_config(["task.max_operand=20"]).task.options == {"dataset": "addition", "max_operand": 20}


def test_names_of_other_trainers_lead_to_settings() -> None:
    known = {
        name
        for section in Config.model_fields.values()
        for name in getattr(section.annotation, "model_fields", {})
    }
    assert set(_USUAL.values()) <= known
    assert not known & _USUAL.keys()


def test_what_is_dumped_is_read_back_equal() -> None:
    config = load_config(["fleet=mixed_gpus", "learner.lr=3e-7", "run.seed=11", "objective.clip_delta=null"])
    assert Config.model_validate(yaml.safe_load(dump_config(config))) == config


def test_an_old_key_in_a_run_folder_is_read_under_its_present_name(tmp_path: Path) -> None:
    recorded = dump_config(load_config(["weights.snapshot_every=7"]))
    (tmp_path / "config.yaml").write_text(recorded.replace("snapshot_every", "anchor_every"))
    assert load_config([f"run.resume={tmp_path}"]).weights.snapshot_every == 7
    assert recorded_config(tmp_path).weights.snapshot_every == 7
    names(refusal(f"run.resume={tmp_path}", "weights.anchor_every=3"), "is called weights.snapshot_every now")


def test_an_unknown_key_in_a_run_folder_is_told_with_its_file(tmp_path: Path) -> None:
    recorded = dump_config(load_config([]))
    path = str(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text(recorded.replace("snapshot_every", "snapshot_evry"))
    names(refusal(f"run.resume={tmp_path}"), f"{path}: weights.snapshot_evry=", "snapshot_every")
    (tmp_path / "config.yaml").write_text(recorded)
    assert path not in refusal(f"run.resume={tmp_path}", "weights.anchor_every=3")


def test_a_resume_continues_with_the_run_s_own_settings_and_the_words_win(tmp_path: Path) -> None:
    earlier = load_config(["run.steps=7", "fleet=single", "task.max_operand=20", "learner.lr=1e-6"])
    (tmp_path / "config.yaml").write_text(dump_config(earlier))
    config = load_config([f"run.resume={tmp_path}", "run.steps=20"])
    assert config.run.steps == 20
    assert (config.run.resume, config.run.dir) == (str(tmp_path), str(tmp_path))
    assert config.fleet == earlier.fleet
    assert config.task == earlier.task
    assert config.learner == earlier.learner
    assert load_config([f"run.resume={tmp_path}", "fleet=laptop"]).fleet == load_config([]).fleet


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["steps", "=5", "--steps", ""])
def test_a_word_without_key_or_value(word: str) -> None:
    names(refusal(word), f"'{word}'", "key=value")


@pytest.mark.parametrize(
    ("word", "path", "value", "nearest"),
    [
        ("staleness.max_stalenes=4", "staleness.max_stalenes", "4", "max_staleness"),
        ("learner.learning_rate_warmup=4", "learner.learning_rate_warmup", "4", "warmup_steps"),
        ("fleet.workers.0.price_per_hour=4", "fleet.workers.0.price_per_hour", "4", "usd_per_hour"),
        ("fleet.workers.1.engine.max_num_seq=9", "fleet.workers.1.engine.max_num_seq", "9", "max_num_seqs"),
        ("task.max_operands=9", "task.max_operands", "9", "max_operand"),
        ("sampler.temperature=1", "sampler", "temperature", "sampling"),
        ("task.weights.corect=0.5", "task.weights.corect", "0.5", "correct"),
    ],
)
def test_an_unknown_key_is_named_with_its_value_and_the_nearest(
    word: str, path: str, value: str, nearest: str
) -> None:
    message = refusal(word)
    names(message, path, value, "unknown key", nearest)


def test_an_unknown_key_like_nothing_gets_the_list() -> None:
    message = refusal("checkpoint.zzzzz=1")
    names(message, "checkpoint.zzzzz", "allowed", "every", "keep")


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("run.steps=0", ["run.steps", "0", "greater than or equal to 1"]),
        ("run.steps=many", ["run.steps", "many", "integer"]),
        ("run.steps=2.5", ["run.steps", "2.5", "integer"]),
        ("run.steps=true", ["run.steps", "True", "integer"]),
        ("learner.lr=fast", ["learner.lr", "fast", "number"]),
        ("learner.lr=nan", ["learner.lr", "nan", "finite"]),
        ("learner.lr=-1", ["learner.lr", "-1", "greater than or equal to 0"]),
        ("fleet.workers.0.usd_per_hour=inf", ["fleet.workers.0.usd_per_hour", "inf", "finite"]),
        ("fleet.workers.1.count=-1", ["fleet.workers.1.count", "-1", "greater than or equal to 0"]),
        ("sampling.top_p=1.5", ["sampling.top_p", "1.5", "less than or equal to 1"]),
        ("run.metrics_port=80", ["run.metrics_port", "80", "1024"]),
        ("task.max_operand=7", ["task.max_operand", "7", "8"]),
        ("objective.skip_zero_advantage=1", ["objective.skip_zero_advantage", "1", "boolean"]),
        ("run=5", ["run", "5"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(word: str, parts: list[str]) -> None:
    names(refusal(word), *parts)


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("steps=20", ["steps=20", "unknown key", "did you mean 'run.steps'?"]),
        ("learner.learning_rate=1e-4", ["learner.learning_rate", "unknown key", "did you mean 'lr'?"]),
        ("sampling.num_generations=8", ["unknown key", "did you mean 'samples_per_prompt'?"]),
        ("objective.beta=0.1", ["unknown key", "did you mean 'kl_beta'?"]),
        ("staleness.policy=waits", ["staleness.policy", "'waits'", "'drop'", "did you mean 'wait'?"]),
        ("staleness.selector=fresh", ["staleness.selector", "'uniform'", "did you mean 'freshest'?"]),
        ("objective.name=drgrpo", ["objective.name", "'grpo'", "'gspo'", "did you mean 'dr_grpo'?"]),
        ("objective.name=dr-grpo", ["objective.name", "did you mean 'dr_grpo'?"]),
        ("weights.anchor_every=3", ["weights.anchor_every", "is called weights.snapshot_every now"]),
        ("objective.anchor=samplr", ["objective.anchor", "'proximal'", "did you mean 'sampler'?"]),
        ("objective.kl_estimator=k4", ["objective.kl_estimator", "'k1'", "did you mean 'k3'?"]),
        ("objective.tis_level=tokens", ["objective.tis_level", "'sequence'", "did you mean 'token'?"]),
        ("sampling.refill=rewards", ["sampling.refill", "'correct'", "did you mean 'reward'?"]),
        ("sampling.overlong=masked", ["sampling.overlong", "'penalty'", "did you mean 'mask'?"]),
        ("task.dataset=gsm", ["task.dataset", "'math500'", "did you mean 'gsm8k'?"]),
    ],
)
def test_a_wrong_choice_lists_the_choices_and_the_nearest(word: str, parts: list[str]) -> None:
    names(refusal(word), *parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["fleet=laptp"], ["fleet=laptp", "laptop", "mixed_gpus", "single", "did you mean 'laptop'?"]),
        (["model=qqqq"], ["model=qqqq", "allowed: ", "tiny"]),
        (["task=maths"], ["task=maths", "did you mean 'math'?"]),
        (["fleet=nowhere/mine.yaml"], ["nowhere/mine.yaml", "No such file"]),
        (["learner.lrate=1"], ["unknown key; did you mean 'lr'?"]),
        (["batch_size=4"], ["did you mean 'sampling.prompts_per_step'?"]),
        (["task.reward=mine:score"], ["'exact' or 'composite'", "the reward of task=function"]),
        (["task=no.such.module:Task"], ["task.adapter", "no.such.module:Task", "no module named 'no'"]),
        (
            ["task=examples.own_task:Task"],
            ["examples.own_task:Task", "there is no 'Task'", "did you mean 'OwnTask'?"],
        ),
        (["task.adapter=examples.own_task"], ["task.adapter", "package.module:Class"]),
        (["fleet.workers.2.count=1"], ["fleet.workers.2.count", "'2'", "index below 2"]),
        (["fleet.workers.first.count=1"], ["fleet.workers.first.count", "'first'", "index below 2"]),
        (["run.steps.more=1"], ["run.steps.more", "'steps'", "not a section"]),
        (["run.steps.more.still=1"], ["run.steps.more.still", "not a section"]),
        (["run.dir=[unclosed"], ["run.dir", "[unclosed", "is not YAML"]),
        (["run.resume=/no/such/run"], ["run.resume=/no/such/run", "config.yaml"]),
        (["run={resume: /no/such/run}"], ["run={resume: ...}", "write run.resume=..."]),
        (["run={steps: 3, seed: 1, steps: 5}"], ["is not YAML", "steps", "stands in it twice"]),
    ],
)
def test_other_mistakes(words: list[str], parts: list[str]) -> None:
    names(refusal(*words), *parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["objective.tis_level=none"],
            ["tis_level=none", "max_staleness=3", "objective.uncorrected=true"],
        ),
        (
            ["objective.anchor=sampler", "objective.tis_level=token"],
            ["anchor=sampler", "tis_level=token", "anchor=proximal"],
        ),
        (["objective.name=cispo", "objective.anchor=proximal"], ["cispo", "anchor=proximal"]),
        (["objective.name=gspo", "objective.token_mask=[0.5, 2.0]"], ["gspo", "sequence_mask"]),
        (["objective.token_mask=[1.5, 2.0]"], ["token_mask", "[1.5, 2.0]", "1 between its ends"]),
    ],
)
def test_objectives_that_make_no_sense_are_refused(words: list[str], parts: list[str]) -> None:
    names(refusal(*words), "objective", *parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["staleness.max_staleness=3", "set staleness.max_staleness=0"]),
        (["staleness.max_staleness=0", "staleness.selector=uniform"], ["staleness.selector=uniform", "fifo"]),
        (
            ["staleness.max_staleness=0", "learner.updates_per_step=2"],
            ["learner.updates_per_step=2", "one update"],
        ),
        (
            ["staleness.max_staleness=0", "sampling.overlong=mask"],
            ["sampling.overlong=mask", "keep or penalty"],
        ),
    ],
)
def test_a_step_in_parts_is_synchronous(words: list[str], parts: list[str]) -> None:
    names(refusal("learner.micro_batch_groups=2", *words), "learner.micro_batch_groups=2", *parts)


def test_uncorrected_training_is_possible_where_it_is_asked_for() -> None:
    plain = ["objective.tis_level=none"]
    assert load_config([*plain, "objective.uncorrected=true"]).objective.uncorrected
    assert load_config([*plain, "staleness.max_staleness=0"]).objective.tis_level == "none"


def test_the_learning_rate_suits_the_model(tmp_path: Path) -> None:
    assert load_config([]).lr == 2.5e-4
    assert load_config([f"model={tmp_path}"]).lr == 1e-6
    assert load_config([f"model={tmp_path}", "learner.lr=3e-6"]).lr == 3e-6


@pytest.mark.parametrize("name", sorted(path.stem for path in (config_dir() / "model").glob("*.yaml")))
def test_adapters_of_a_model_by_name_have_ten_times_its_rate(name: str) -> None:
    whole = load_config([f"model={name}"])
    assert whole.learner.lr is None  # a rate there would also be that of adapters
    assert load_config([f"model={name}", "learner.lora_rank=8"]).lr == pytest.approx(10 * whole.lr)


def test_dapo_is_all_of_dapo() -> None:
    assert (load_config([]).refill, load_config([]).overlong) == ("off", "keep")
    dapo = load_config(["objective.name=dapo"])
    assert (dapo.refill, dapo.overlong) == ("correct", "penalty")
    assert load_config(["objective.name=dapo", "sampling.refill=off"]).refill == "off"


@pytest.mark.parametrize(
    ("max_staleness", "publish_every", "allowed"),
    [(0, 1, True), (0, 2, False), (3, 4, True), (3, 5, False)],
)
def test_kappa_may_be_one_more_than_s_and_no_larger(
    max_staleness: int, publish_every: int, allowed: bool
) -> None:
    words = [f"staleness.max_staleness={max_staleness}", f"staleness.publish_every={publish_every}"]
    if allowed:
        assert load_config(words).staleness.kappa == publish_every
    else:
        names(
            refusal(*words),
            "staleness",
            f"publish_every={publish_every}",
            f"max_staleness + 1 = {max_staleness + 1}",
        )


@pytest.mark.parametrize(("max_staleness", "kappa"), [(0, 1), (1, 1), (2, 1), (3, 2), (6, 5)])
def test_kappa_follows_s_unless_said(max_staleness: int, kappa: int) -> None:
    assert load_config([f"staleness.max_staleness={max_staleness}"]).staleness.kappa == kappa


def test_an_unknown_option_in_a_task_file_that_leaves_the_adapter_to_the_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndatset: addition\n")
    names(refusal(f"task={path}"), "task.datset", "unknown key", "did you mean 'dataset'?")


@pytest.mark.parametrize(
    ("text", "part"), [("", "holds no settings"), ("- a\n", "holds no settings"), ("a: [\n", "not YAML")]
)
def test_a_group_file_that_is_not_settings(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    names(refusal(f"fleet={path}"), str(path), part)


def test_settings_that_contradict_one_another_say_which() -> None:
    names(refusal("task.reward=composite"), "task", "dataset=addition", "reward")


def test_an_interruption_says_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object) -> int:
        raise asyncio.CancelledError  # what Ctrl-C does to the main task

    monkeypatch.setattr(run, "_run", interrupted)
    folder = tmp_path / "a run"
    words = [f"run.dir={folder}"]
    assert run.main(words) == 130
    assert "no checkpoint to go on from" in capsys.readouterr().err
    checkpoint = folder / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text("{}")
    assert run.main(words) == 130
    (line,) = capsys.readouterr().err.splitlines()
    start, _, command = line.partition("go on with: ")
    assert start == "error: interrupted; "
    assert shlex.split(command) == ["python", "-m", "echo_planes.run", f"run.resume={folder}"]
