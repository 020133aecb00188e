"""Typed models of a run's settings, with the checks between settings.

The module does not import torch, ray, vllm or deepspeed, so that a mistake is found before they load. A
resume must not change `Fixed` settings, and may change `Free` ones (see `fields`, `loop.resume`).
`loop.loading` builds a `Config` from YAML groups and the `key=value` words of a command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from echo_planes.config.extensions import one_of
from echo_planes.config.fields import (
    OFF,
    Day,
    Fixed,
    Free,
    Interval,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    not_with,
    only_with,
)
from echo_planes.config.files import user_path
from echo_planes.config.fleet import FleetConfig, SeedingConfig, WorkerConfig
from echo_planes.config.hub import fetch, is_pinned
from echo_planes.config.sparse import SparseConfig
from echo_planes.config.weights import WeightsConfig

_BUILTIN = ("tiny-math", "tiny-carry", "tiny-code", "tiny-poker")
BUILTIN_MODELS = {f"builtin:{name}": Path(__file__).parents[1] / "assets" / name for name in _BUILTIN}

BUILTIN_LR, MODEL_LR = 2.5e-4, 1e-6  # learner.lr where it is not set
LORA_TIMES = 10.0  # with adapters: Thinking Machines, "LoRA Without Regret" (2025), across models and sizes

_STALE = not_with("staleness.max_staleness", 0)
_QUEUES = not_with("sampling.router", "pull", "proportional", instead="=jsq")
_CLIPPED = not_with("objective.name", "cispo", instead=" to one that clips there")
_PROXIMAL = only_with("objective.anchor", "proximal")
_WITH_KL = not_with("objective.kl_beta", 0)
_WITH_DRIFT = not_with("learner.drift_target", 0)
_WITH_ADAPTERS = not_with("learner.lora_rank", 0)
_OWN_CLUSTER = only_with("run.ray_address", None)


class RunConfig(Section):
    """Folder, seed, length and cluster of the run."""

    dir: str | None = Free(None, description="run folder; default runs/<time>-<task>")
    resume: str | None = Free(None, description="run folder to continue from its newest checkpoint")
    seed: int = Fixed(0, ge=0, description="seeds prompts, learner and selectors")
    date: Day | None = Free(None, description="day that chat templates tell; default: the run's first")
    steps: PositiveInt = Free(120, description="learner steps in all, those before a resume too")
    wait_limit_s: PositiveFloat = Free(
        600.0, description="longest wait without progress: for the learner, an engine, an install, a batch"
    )
    ray_address: str | None = Free(None, description="cluster to join; default: RAY_ADDRESS, or a local one")
    tracker: Annotated[str, one_of("none", "tensorboard", "wandb", "trackio")] = Free(
        "none", description="told each step and event; package.module:NAME that makes a Tracker"
    )
    metrics_port: int | None = Free(
        None, counts=_OWN_CLUSTER, ge=1024, le=65535, description="Prometheus port of a local cluster"
    )


class TaskConfig(BaseModel):
    """Adapter of the task, and its own options (validated by the adapter's `Options` model)."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str = Fixed("math", description="short name: run folder, report")
    adapter: str = Fixed(
        "echo_planes.tasks.math.adapter:MathTask", description="package.module:Class of the TaskAdapter"
    )

    @property
    def options(self) -> dict[str, Any]:
        """Keys of the adapter's own options."""
        return dict(self.model_extra or {})


class ModelConfig(Section):
    """The policy."""

    path: str = Fixed(
        "builtin:tiny-math",
        description="model folder, GGUF file, ORG/NAME[@REVISION] of the Hugging Face hub, or "
        "builtin:tiny-math, -carry, -code, -poker",
    )
    max_model_len: PositiveInt = Free(512, description="prompt + response, tokens")
    lr: PositiveFloat | None = Free(None, description="rate that suits it, where learner.lr is not set")

    @property
    def folder(self) -> Path:
        """Folder of the model on this machine. ORG/NAME@COMMIT is fetched first; raises as `hub.fetch`."""
        if self.path in BUILTIN_MODELS:
            return BUILTIN_MODELS[self.path]
        return fetch(self.path) if is_pinned(self.path) else user_path(self.path)


class BudgetConfig(Section):
    """Limit on the cost of the run."""

    usd: PositiveFloat | None = Free(
        None, description="all machines together, earlier parts of a resumed run too: then it stops, cleanly"
    )


class SamplingConfig(Section):
    """Settings of sampling. Log-probabilities are taken after temperature and top-p."""

    prompts_per_step: PositiveInt = Free(32, description="groups in a learner step")
    samples_per_prompt: int = Fixed(8, ge=2, description="samples in a group (n)")
    temperature: PositiveFloat = Fixed(1.0, description="logits are divided by it")
    top_p: float = Fixed(1.0, gt=0, le=1, description="nucleus: only tokens within this probability mass")
    max_new_tokens: PositiveInt = Free(64, description="tokens per call of the policy")
    top_logprobs: int = Free(0, ge=0, le=20, description="top-k log-probabilities kept per token")
    lease_s: PositiveFloat = Free(
        60.0, description="longest lease, seconds: 2.5 x the median completion, renewed by streamed tokens"
    )
    stream_s: PositiveFloat = Free(
        1.0, description="workers send their tokens this often; so much at most is sampled again after a loss"
    )
    router: Annotated[str, one_of("pull", "jsq", "proportional")] = Free(
        "pull",
        description="which worker gets the prompts; or package.module:NAME that makes a DispatchPolicy",
    )
    refill: Annotated[Literal["off", "reward", "correct"] | None, OFF] = Free(
        None,
        description="groups that do not count towards a batch, others take their place: all rewards equal, "
        "or all answers right or all wrong; default: off, objective.name=dapo: correct",
    )
    refill_limit: PositiveFloat = Free(
        4.0,
        counts=not_with("sampling.refill", "off", instead="=reward or correct"),
        description="such groups at most, for one batch, in batches; then they count",
    )
    overlong: Literal["keep", "mask", "penalty"] | None = Free(
        None,
        description="answers that reach max_new_tokens: trained as they are; not trained; or with less and "
        "less reward over the last overlong_tokens; default: keep, objective.name=dapo: penalty",
    )
    overlong_tokens: PositiveInt | None = Free(
        None,
        counts=only_with("sampling.overlong", "penalty"),
        description="overlong=penalty: tokens before the limit; default: a fifth of max_new_tokens",
    )
    theta: int = Free(
        2, counts=_QUEUES, ge=1, le=65536, description="router=jsq: prompts queued at a worker, at most"
    )

    @property
    def trajectories_per_step(self) -> int:
        """R of ECHO-2."""
        return self.prompts_per_step * self.samples_per_prompt


class StalenessConfig(Section):
    """Bounded staleness: a trajectory of version v may be in the batch formed at t only if t - v <= S."""

    max_staleness: int = Free(3, ge=0, description="S; 0 is the strictly synchronous algorithm")
    publish_every: PositiveInt | None = Free(None, description="kappa; default max(1, S - 1); at most S + 1")
    policy: Literal["drop", "wait"] = Free(
        "wait", description="drop what is too old, or hold the learner for leases that would become too old"
    )
    queue_batches: float = Free(
        1.5, counts=_STALE, ge=1, description="leased + buffered groups, in batches, at most"
    )
    selector: Literal["fifo", "freshest", "uniform", "staleness", "reward"] = Free(
        "fifo",
        description="which admissible groups first: oldest arrivals; newest versions; drawn at random, "
        "alike, or newer versions, or higher rewards, more often",
    )
    reuse: PositiveInt = Free(
        1, description="times a group may be trained, where too few new ones are there; at most S + 1"
    )

    @property
    def kappa(self) -> int:
        return self.publish_every if self.publish_every is not None else max(1, self.max_staleness - 1)

    def limited(self, max_staleness: int) -> Self:
        """Return these settings with another S; `publish_every` and `reuse` become at most S + 1."""
        most = max_staleness + 1
        every = None if self.publish_every is None else min(self.publish_every, most)
        changes = {"max_staleness": max_staleness, "publish_every": every, "reuse": min(self.reuse, most)}
        return type(self).model_validate({**self.model_dump(), **changes})

    @model_validator(mode="after")
    def _live(self) -> Self:
        if self.kappa > self.max_staleness + 1:
            raise ValueError(
                f"publish_every={self.kappa} is larger than max_staleness + 1 = {self.max_staleness + 1}: "
                "the newest snapshot would be too old to train on before the next one comes; lower "
                "publish_every or raise max_staleness"
            )
        if self.reuse > self.max_staleness + 1:
            raise ValueError(
                f"reuse={self.reuse} is larger than max_staleness + 1 = {self.max_staleness + 1}: a group is "
                "too old after that many batches, and the learner would wait for groups to use again that "
                "never come; lower reuse or raise max_staleness"
            )
        return self


class ObjectiveConfig(Section):
    """The loss. Each name fixes how advantages are normalised, how tokens are averaged, and its defaults."""

    name: Annotated[str, one_of("grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo")] = Free(
        "grpo", description="see learning/objectives; or package.module:NAME of an Objective"
    )
    anchor: Literal["proximal", "sampler"] | None = Free(
        None,
        description="what the clipped ratio is against: the policy at the step's start, times a truncated "
        "weight against the sampler; or the policy that sampled, so that the clip holds for stale tokens; "
        "default: proximal, name=cispo: sampler",
    )
    clip_low: NonNegativeFloat | None = Free(
        None, counts=_CLIPPED, description="lower clip: ratio >= 1 - clip_low; default: the objective's"
    )
    clip_high: NonNegativeFloat | None = Free(
        None, description="upper clip: ratio <= 1 + clip_high; default: the objective's"
    )
    clip_delta: NonNegativeFloat | None = Free(
        None,
        counts=_CLIPPED,
        description="second-side clip: ratio <= clip_delta where the advantage is negative; 0: none; "
        "default: the objective's",
    )
    tis_level: Literal["token", "sequence", "geometric", "none"] | None = Free(
        None,
        counts=_PROXIMAL,
        description="anchor=proximal: level of the truncated importance weight; default: the objective's",
    )
    tis_cap: PositiveFloat = Free(
        2.0, counts=(_PROXIMAL, _WITH_KL), description="C: importance weights are cut here"
    )
    uncorrected: bool = Free(
        False,
        counts=only_with("objective.tis_level", "none"),
        description="allow tis_level=none on stale data: a biased gradient",
    )
    token_mask: Interval | None = Free(
        None, description="[low, high]: tokens whose pi_learner / pi_sampler lies outside are left out"
    )
    sequence_mask: Interval | None = Free(
        None, description="[low, high]: answers whose geometric mean ratio lies outside are left out"
    )
    kl_beta: NonNegativeFloat = Free(0.0, description="weight of the KL to the frozen reference")
    kl_estimator: Literal["k1", "k2", "k3"] = Free(
        "k3", counts=_WITH_KL, description="how the KL is estimated"
    )
    kl_clamp: PositiveFloat = Free(
        10.0, counts=_WITH_KL, description="nats: largest |log ratio| in the KL estimate"
    )
    skip_zero_advantage: bool = Free(
        True,
        counts=only_with("objective.kl_beta", 0),
        description="leave out groups with equal rewards (no gradient when kl_beta = 0)",
    )
    score_skipped: bool = Free(
        False,
        counts=only_with("objective.skip_zero_advantage", True),
        description="put skipped groups through the model all the same: entropy and drift of all tokens",
    )

    @property
    def ratio_anchor(self) -> Literal["proximal", "sampler"]:
        """`anchor`, or the objective's default."""
        return self.anchor or ("sampler" if self.name == "cispo" else "proximal")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.name == "cispo" and self.anchor == "proximal":
            raise ValueError(
                "name=cispo weights tokens against the policy that sampled, not that of the step's start: "
                "leave out anchor=proximal"
            )
        if self.name == "gspo" and self.token_mask is not None:
            raise ValueError("name=gspo has one ratio an answer: give sequence_mask instead of token_mask")
        for key in ("token_mask", "sequence_mask"):
            ends = getattr(self, key)
            if ends is not None and not 0 <= ends[0] < 1 < ends[1]:
                raise ValueError(
                    f"{key}={list(ends)} must hold 1 between its ends: the ratio of fresh tokens"
                )
        return self


class LearnerConfig(Section):
    """DeepSpeed and the optimizer."""

    num_ranks: PositiveInt = Fixed(1, description="learner processes")
    sequence_ranks: PositiveInt = Free(1, description="of them, those that share each sequence (Ulysses)")
    zero_stage: int = Fixed(
        1, ge=0, le=3, description="what ZeRO shards: 1 moments, 2 + gradients, 3 + weights"
    )
    offload_optimizer: bool = Fixed(False, description="masters and moments in host memory (ZeRO-1 to 3)")
    offload_weights: bool = Fixed(False, description="beside these, ranks' shares of the weights (ZeRO-3)")
    dtype: Literal["auto", "bf16", "fp32"] = Fixed(
        "auto", description="compute type over fp32 masters; auto: on GPUs bf16, on CPUs what is faster"
    )
    lr: NonNegativeFloat | None = Free(
        None,
        description="peak learning rate of AdamW; default model.lr, else 2.5e-4 for builtin models, 1e-6 for "
        "others; with adapters ten times that",
    )
    lora_rank: int = Fixed(
        0, ge=0, description="train adapters of this rank beside frozen weights (LoRA); 0: all weights"
    )
    lora_alpha: PositiveFloat = Fixed(
        32.0, counts=_WITH_ADAPTERS, description="adapters count alpha / rank times"
    )
    lora_targets: list[str] | None = Fixed(
        None,
        counts=_WITH_ADAPTERS,
        description="linear layers with adapters, by last name (q_proj); default: all in the layers",
    )
    drift_target: NonNegativeFloat = Free(
        0.1,
        description="nats: the learning rate shrinks while mean |log pi_learner - log pi_sampler| of the "
        "trained tokens is above it; 0: never",
    )
    drift_floor: float = Free(
        0.02, counts=_WITH_DRIFT, gt=0, le=1, description="smallest factor drift puts on the rate"
    )
    warmup_steps: int = Free(10, ge=0, description="optimizer updates of linear warm-up")
    decay: float = Free(
        0.3, ge=0, le=1, description="share of the run, at its end, in which lr falls linearly to 0"
    )
    beta1: float = Free(0.9, ge=0, lt=1, description="AdamW: decay of the first moment")
    beta2: float = Free(0.98, ge=0, lt=1, description="AdamW: decay of the second moment")
    eps: PositiveFloat = Free(1e-8, description="AdamW: added to the root of the second moment")
    weight_decay: NonNegativeFloat = Free(0.0, description="AdamW: decoupled weight decay")
    grad_clip: PositiveFloat = Free(1.0, description="largest gradient norm")
    updates_per_step: PositiveInt = Free(1, description="optimizer updates per batch (ECHO-2 makes 2)")
    max_skipped_updates: int = Free(
        3,
        ge=0,
        description="updates in a row without a finite gradient that are left out; then the run stops",
    )
    micro_batch_groups: PositiveInt | None = Free(
        None,
        description="m_b, where S = 0: train as soon as so many groups are complete, while the others are "
        "still sampled; default: the whole batch at once",
    )
    dropout: bool = Free(False, description="the model's own dropout, in updates alone; else it is off")
    micro_batch_tokens: PositiveInt = Free(8192, description="tokens packed into one forward pass")
    activation_checkpointing: bool | None = Free(
        None,
        description="keep only the inputs of layers for the backward pass, which runs them again; default: "
        "where a micro-batch would keep more than 4 GiB",
    )
    threads: int | None = Free(None, ge=1, description="CPU threads per rank; default: those engines leave")
    usd_per_hour: NonNegativeFloat = Free(0.0, description="price of one rank")
    resources: dict[str, NonNegativeFloat] | None = Free(
        None,
        description="Ray resources of one rank; default: a CPU, and a GPU that no worker needs where the "
        "cluster has GPUs. A rank trains on a GPU only if it has one here",
    )
    master_port: int | None = Free(
        None,
        counts=not_with("learner.num_ranks", 1, instead=" above 1"),
        ge=1024,
        le=65535,
        description="torch.distributed port; default: a free one",
    )

    @property
    def rank_resources(self) -> dict[str, float]:
        """`resources`, or those of a rank where there are no GPUs."""
        return {"CPU": 1.0} if self.resources is None else self.resources

    @model_validator(mode="after")
    def _one_gpu(self) -> Self:
        if (amount := self.rank_resources.get("GPU", 0.0)) > 1:
            raise ValueError(
                f"resources: a rank trains on one GPU, and this gives it {amount:g}; "
                f"set GPU: 1, and num_ranks={amount:g} for all of them"
            )
        if 0 < amount < 1 and self.num_ranks > 1:
            raise ValueError(
                f"resources: {self.num_ranks} ranks with GPU: {amount:g} each would share cards, which NCCL "
                "refuses; set GPU: 1, or num_ranks=1"
            )
        return self


class EvalConfig(Section):
    """Evaluations on the held-out set, at the start of the run, during it and at its end."""

    every: int = Free(40, ge=0, description="steps between evaluations; 0: only first and last")
    num_prompts: PositiveInt = Free(128, description="held-out prompts")
    samples_per_prompt: PositiveInt = Free(4, description="n of avg@n, and of pass@k for k = 1 ... n")
    temperature: float | None = Free(
        None,
        ge=0,
        le=2,
        description="logits are divided by it; 0: the likeliest token; default: as trained on",
    )
    top_p: float | None = Free(
        None,
        counts=not_with("eval.temperature", 0),
        gt=0,
        le=1,
        description="only tokens within this probability mass; default: as trained on",
    )

    @model_validator(mode="after")
    def _not_the_same_again(self) -> Self:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"temperature=0 gives one answer, {self.samples_per_prompt} times: set samples_per_prompt=1"
            )
        return self


class ReplayConfig(Section):
    """Limits on the rows of accepted trajectories that are kept on disk (RUN/replay)."""

    max_gib: PositiveFloat = Free(8.0, description="of all rows; the oldest go, trained ones first")
    max_age_h: PositiveFloat | None = Free(None, description="since acceptance, hours; default: no limit")
    max_versions: PositiveInt | None = Free(
        None, description="newest policy versions whose rows are kept; default: all"
    )
    trim_every: PositiveInt = Free(20, description="steps between looks at these limits")


class CheckpointConfig(Section):
    """Checkpoints, from which a run continues after a crash."""

    every: int = Free(
        50, ge=0, description="steps between checkpoints, the first of the start; 0: at the end and on Ctrl-C"
    )
    keep: PositiveInt = Free(2, description="newest checkpoints kept")


class GuardConfig(Section):
    """Limits of the guard's signals; `learning/guard.py` documents its actions beyond them."""

    counts = not_with("guard.mode", "off", instead="=act or warn")

    mode: Annotated[Literal["act", "warn", "off"], OFF] = Free(
        "act", description="climb the ladder; only tell; neither"
    )
    patience: PositiveInt = Free(
        4,
        description="steps that a signal is beyond its limit, less those it is within, until the next rung; "
        "one twice beyond counts two",
    )
    calm: PositiveInt = Free(50, description="steps without a signal until the last rung is taken back")
    good_after: PositiveInt = Free(10, description="steps without an alarm until a checkpoint counts as good")
    max_rollbacks: int = Free(2, ge=0, description="times the run goes back to a good checkpoint")
    k3: PositiveFloat = Free(0.3, description="nats: largest k3 of the tokens of any lag")
    effective_samples: float = Free(
        0.1, gt=0, lt=1, description="smallest effective sample size, as a share of the tokens"
    )
    truncated: float = Free(
        0.1, gt=0, le=1, description="largest share of tokens whose importance weight is cut at its cap"
    )
    log_weight: PositiveFloat = Free(8.0, description="nats: largest 99.9th percentile of |log weight|")
    entropy_slope: PositiveFloat = Free(
        0.1, description="nats a step: fastest rise or fall of entropy, fitted over 10 steps"
    )
    grad_norm: float = Free(10.0, gt=1, description="largest gradient norm, in medians of the last 50 steps")
    cut_off: float = Free(
        0.3, gt=0, le=1, description="share of answers cut off: largest rise above the median of 50 steps"
    )
    reward_drop: float = Free(
        0.7,
        gt=0,
        description="largest fall of the reward from its best, both over 10 steps, in what it had gained, or "
        "in standard deviations of a step's rewards where that is more",
    )
    mismatch: PositiveFloat = Free(
        0.1,
        description="nats: largest mean |log pi_learner - log pi_sampler| where both hold the first version",
    )


class Config(Section):
    """All settings of a run, resolved."""

    run: RunConfig = RunConfig()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    fleet: FleetConfig = FleetConfig()
    seeding: SeedingConfig = SeedingConfig()
    budget: BudgetConfig = BudgetConfig()
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    replay: ReplayConfig = ReplayConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    sparse: SparseConfig = SparseConfig()

    @property
    def lr(self) -> float:
        """Peak learning rate; the built-in models' default is far too high for larger models."""
        if self.learner.lr is not None:
            return self.learner.lr
        rate = self.model.lr or (BUILTIN_LR if self.model.path in BUILTIN_MODELS else MODEL_LR)
        return LORA_TIMES * rate if self.learner.lora_rank else rate

    @property
    def refill(self) -> Literal["off", "reward", "correct"]:
        """Rule by which groups do not count towards a batch; default "reward" for DAPO, else "off"."""
        return self.sampling.refill or ("correct" if self.objective.name == "dapo" else "off")

    @property
    def overlong(self) -> Literal["keep", "mask", "penalty"]:
        """Treatment of answers that were cut off; default "penalty" for DAPO, else "keep"."""
        return self.sampling.overlong or ("penalty" if self.objective.name == "dapo" else "keep")

    @model_validator(mode="after")
    def _corrected(self) -> Self:
        stale = self.staleness.max_staleness
        if self.objective.tis_level == "none" and stale and not self.objective.uncorrected:
            raise ValueError(
                f"objective.tis_level=none trains data of other versions (staleness.max_staleness={stale}) "
                "as if it were fresh; choose token or sequence, or say objective.uncorrected=true"
            )
        return self

    def first_workers(self) -> dict[str, WorkerConfig]:
        """Return the workers to begin with, by id: a fleet of fixed size, and the seeders."""
        return {**self.fleet.fixed(), **self.seeding.workers()}

    @model_validator(mode="after")
    def _fits_a_row(self) -> Self:
        if (budget := self.learner.micro_batch_tokens) < self.model.max_model_len:
            raise ValueError(
                f"learner.micro_batch_tokens={budget} is less than model.max_model_len="
                f"{self.model.max_model_len}: the longest answer would not fit; raise it, or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _seeds(self) -> Self:
        if self.seeding.engines and self.staleness.max_staleness:
            raise ValueError(
                f"seeding.engines={self.seeding.engines} does not go with staleness.max_staleness="
                f"{self.staleness.max_staleness}: a window is for steps of one version, where the learner "
                "would wait; set staleness.max_staleness=0, or leave seeding out"
            )
        return self

    @model_validator(mode="after")
    def _trains_in_parts(self) -> Self:
        if self.learner.micro_batch_groups is None:
            return self
        needed: dict[str, tuple[object, object, str]] = {
            "staleness.max_staleness": (
                self.staleness.max_staleness,
                0,
                "a step that is trained while it is sampled has one version",
            ),
            "staleness.selector": (self.staleness.selector, "fifo", "groups are trained as they come"),
            "staleness.reuse": (self.staleness.reuse, 1, "groups are trained as they come, once"),
            "learner.updates_per_step": (self.learner.updates_per_step, 1, "all parts make one update"),
            "sampling.overlong": (
                self.overlong,
                self.overlong if self.overlong != "mask" else "keep or penalty",
                "the number of answers that count is not known before the last one",
            ),
        }
        for key, (value, need, why) in needed.items():
            if value != need:
                raise ValueError(
                    f"learner.micro_batch_groups={self.learner.micro_batch_groups} does not go with "
                    f"{key}={value}: {why}; set {key}={need}, or leave out micro_batch_groups"
                )
        return self

    @model_validator(mode="after")
    def _keeps_what_it_trains(self) -> Self:
        kept, budget = self.replay.max_versions, self.staleness.max_staleness
        if kept is not None and kept <= budget:
            raise ValueError(
                f"replay.max_versions={kept} does not keep the {budget + 1} versions that "
                f"staleness.max_staleness={budget} trains on: rows would go before their batch is formed; "
                f"give at least {budget + 1}"
            )
        return self
