"""Settings of `python -m echo_planes.plan`, from `key=value` words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

from pydantic import Field, ValidationError

from echo_planes.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Section, unknown_key
from echo_planes.config.schema import StalenessConfig
from echo_planes.errors import ConfigError, nearest
from echo_planes.fleet.throughput import Answers

Count = Annotated[int, Field(ge=0)]

EXAMPLE = (
    "prices=configs/prices/example.csv params_b=7 learner_sku=H100 uplink_mbit=1000 worker_mbit=200 "
    "changed_share=0.02 learner_usd_per_hour=20"
)
# Of each group one is needed, for which no single key is: how it is given, by the keys that give it.
ONE_OF = {
    ("params_b", "model"): "params_b=BILLIONS (or model=FOLDER)",
    ("learner_sku", "t_train_s"): "learner_sku=GPU (or t_train_s=SECONDS)",
}


class PlanConfig(Section):
    """Settings of the planning command."""

    prices: str = Field(description="price list, CSV (see configs/prices/example.csv)")
    model: str | None = Field(None, description="model folder, or builtin:NAME; or give params_b")
    params_b: PositiveFloat | None = Field(None, description="weights of the model, in billions")
    kv_kib_per_token: PositiveFloat | None = Field(
        None, description="KV cache of a token, KiB; default: from the model folder, else estimated"
    )
    max_staleness: int = Field(3, ge=0, description="S")
    publish_every: PositiveInt | None = Field(None, description="kappa; default max(1, S - 1)")
    gamma: float = Field(1.1, ge=1, allow_inf_nan=False, description="redundancy: mu_target = gamma mu_min")
    prompts_per_step: PositiveInt = Field(32, description="groups in a learner step")
    samples_per_prompt: PositiveInt = Field(8, description="samples in a group (n)")
    prompt_tokens: PositiveInt = Field(256, description="mean length of a prompt")
    answer_tokens: PositiveInt = Field(1024, description="mean length of an answer")
    max_num_seqs: PositiveInt = Field(256, description="sequences that an engine decodes together")
    sparse: str | None = Field(
        None, description="sparse=FILE.yaml of a run: what its schedule of KV budgets saves is told"
    )
    steps: PositiveInt = Field(100, description="learner steps to be made")
    t_train_s: PositiveFloat | None = Field(
        None, description="T_train, seconds of a learner step; default: estimated from the learner's GPUs"
    )
    learner_sku: str | None = Field(None, description="the learner's GPU, for the estimate of T_train")
    learner_gpus: PositiveInt = Field(8, description="how many of them")
    learner_usd_per_hour: NonNegativeFloat = Field(0.0, description="price of the whole learner")
    uplink_mbit: PositiveFloat = Field(description="B0: what the learner can send, Mbit/s")
    worker_mbit: PositiveFloat = Field(description="Bw: what a worker can receive, Mbit/s")
    rtt_ms: NonNegativeFloat = Field(50.0, description="round trip between workers, ms")
    chunk_kib: PositiveFloat = Field(256.0, description="verified and forwarded at once, KiB")
    changed_share: float | None = Field(
        None, gt=0, le=1, description="weights that change between publications: payload is a patch"
    )
    payload_mib: PositiveFloat | None = Field(
        None, description="payload as measured, MiB; default: a full snapshot"
    )
    gpus_per_worker: PositiveInt = Field(
        1, description="only machines with so many GPUs; a worker spans them"
    )
    skus: str = Field("", description="only these, with commas between; default: all in the list")
    providers: str = Field("", description="only these, with commas between; default: all in the list")
    spot: bool = Field(True, description="spot machines are allowed")
    spot_interruptions_per_hour: NonNegativeFloat = Field(0.1, description="expected, of a spot worker")
    interruptions_per_hour: NonNegativeFloat | None = Field(
        None, description="allowed, expected of all workers together; default: any"
    )
    usd_per_hour: PositiveFloat | None = Field(None, description="budget of all workers; default: any")
    usd_total: PositiveFloat | None = Field(
        None, description="budget of the whole run, learner included; default: any"
    )
    usd_spent: NonNegativeFloat = Field(0.0, description="of usd_total, already")
    min_workers: int = Field(0, ge=0, description="workers at least")
    max_workers: PositiveInt | None = Field(None, description="workers at most; default: any")
    max_per_instance_type: PositiveInt = Field(64, description="quota, workers of one instance type at most")
    quota: dict[str, Count] = Field(
        {}, description="quota.NAME=workers: of an instance type, or of each with that SKU"
    )
    minimum: dict[str, Count] = Field({}, description="minimum.INSTANCE_TYPE=workers that are always kept")
    mu: dict[str, PositiveFloat] = Field({}, description="mu.SKU=trajectories/s of one worker, measured")
    tokens_per_s: dict[str, PositiveFloat] = Field(
        {}, description="tokens_per_s.SKU=of one saturated worker, given"
    )

    @property
    def kappa(self) -> int:
        return StalenessConfig(max_staleness=self.max_staleness, publish_every=self.publish_every).kappa

    @property
    def answers(self) -> Answers:
        return Answers(self.prompt_tokens, self.answer_tokens, self.max_num_seqs)

    @property
    def per_step(self) -> int:
        """R, trajectories a step."""
        return self.prompts_per_step * self.samples_per_prompt


def load_plan(words: Sequence[str]) -> PlanConfig:
    """Parse the settings in `words` (`key=value`, `mu.SKU=value`).

    Raises:
        ConfigError: names the key, the value, the error and the nearest match.
    """
    tree: dict[str, str | dict[str, str]] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise ConfigError(f"'{word}' is not of the form key=value; see --help")
        group, dot, name = key.partition(".")
        if not dot:
            tree[key] = text
            continue
        named = tree.setdefault(group, {})
        if not isinstance(named, dict):
            raise ConfigError(f"{key}={text}: '{group}' is a value already, not a section")
        named[name] = text
    try:
        config = PlanConfig.model_validate_strings(tree)
        StalenessConfig(max_staleness=config.max_staleness, publish_every=config.publish_every)
    except ValidationError as error:
        raise ConfigError(_explain(error, tree)) from error
    if config.model is not None and config.params_b is not None:
        raise ConfigError("give one of model=FOLDER and params_b=N: both say how large the model is")
    if config.changed_share is not None and config.payload_mib is not None:
        raise ConfigError("give one of changed_share and payload_mib: both say how large a publication is")
    if needed := _needed((), tree):
        raise ConfigError(needed)
    if config.max_staleness == 0:
        raise ConfigError(
            "max_staleness=0: nothing overlaps, so that no fleet hides the wait; give 1 or more"
        )
    return config


def _explain(error: ValidationError, given: Collection[str]) -> str:
    # An unknown key may be why a needed one is missing.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        hint = nearest(path, PlanConfig.model_fields) or "; see --help"
        return f"{path}={first['input']}: {unknown_key(path, hint)}"
    if first["type"] == "missing":
        missing = [".".join(map(str, one["loc"])) for one in error.errors() if one["type"] == "missing"]
        return _needed(missing, given)
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        return message
    return f"{path}={first['input']}: {message[0].lower()}{message[1:]}"


def _needed(missing: Sequence[str], given: Collection[str]) -> str:
    """Return all that has to be given still, in one line with an example, or an empty text."""
    words = [f"{key}=..." for key in missing]
    words += [form for keys, form in ONE_OF.items() if not set(keys) & set(given)]
    return f"{', '.join(words)}: needed, there is no default; for example: {EXAMPLE}" if words else ""


def describe() -> str:
    """Return every key with its default and meaning, for `--help`."""
    rows = []
    for key, field in PlanConfig.model_fields.items():
        default = "..." if field.is_required() else field.default
        shown = f"{key}.NAME=..." if isinstance(default, dict) else f"{key}={default}"
        rows.append(f"  {shown:34s} {field.description}")
    return "\n".join(rows)
