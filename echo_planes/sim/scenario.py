"""Scenario to simulate: typed, from YAML and `key=value` words.

A scenario describes learner, engines, links, prices, spot markets and faults. The real code decides the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from echo_planes.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Section, unknown_key
from echo_planes.config.files import user_path
from echo_planes.config.plain_yaml import dump_yaml, parse_word, read_yaml
from echo_planes.config.schema import StalenessConfig
from echo_planes.data.replay.dispatch import PolicyName
from echo_planes.errors import ConfigError, nearest, shown
from echo_planes.loop.loading import config_dir, describe_section, set_key
from echo_planes.sim.engine_model import EngineSpec
from echo_planes.sim.lengths import LengthModel
from echo_planes.sim.network import Dissemination
from echo_planes.sim.spot import AtEnd, SpotTrace, read_trace
from echo_planes.types import Market

SEEDER = "seeder"
DATA_VARIABLE = "ECHO_PLANES_DATA"
MBIT = 1e6 / 8  # bytes/s
USAGE = "python -m echo_planes.simulate scenario=NAME|FILE.yaml key=value ..."


class SamplingModel(Section):
    """Settings of sampling."""

    prompts_per_step: PositiveInt = Field(64, description="groups in a learner step")
    samples_per_prompt: int = Field(8, ge=2, description="samples in a group (n)")
    lease_s: PositiveFloat = Field(3600.0, description="longest lease, seconds")
    stream_s: PositiveFloat = Field(1.0, description="workers send their tokens this often, seconds")
    router: PolicyName = Field("pull", description="which worker gets the prompts: pull, jsq or proportional")
    theta: int = Field(2, ge=1, le=65536, description="router=jsq: prompts queued at a worker, at most")
    accuracy: float = Field(0.5, ge=0, le=1, description="share of the answers that are right")
    solved: float = Field(0.0, ge=0, le=1, description="share of the prompts whose every answer is right")
    refill: Literal["off", "reward", "correct"] = Field(
        "off",
        description="groups that do not count towards a batch: all rewards equal, or all right or wrong",
    )
    refill_limit: PositiveFloat = Field(4.0, description="such groups at most, for one batch, in batches")


class LengthConfig(Section):
    """Lengths of answers: lognormal, cut off."""

    median_tokens: PositiveFloat = Field(2000.0, description="half of the answers are longer")
    sigma: NonNegativeFloat = Field(0.6, description="standard deviation of the logarithm; 0: all alike")
    max_tokens: PositiveInt = Field(16384, description="longest answer")
    prompt_tokens: int = Field(0, ge=0, description="of a prompt, where prefills take time")


class LearnerModel(Section):
    """Times and price of the learner."""

    t_train_s: PositiveFloat = Field(60.0, description="T_train, seconds of a step")
    jitter: float = Field(0.0, ge=0, lt=1, description="a step takes (1 +- jitter) T_train, drawn evenly")
    publish_s: NonNegativeFloat = Field(1.0, description="encoding and signing a publication, seconds")
    checkpoint_every: int = Field(0, ge=0, description="steps between checkpoints; 0: only at the end")
    checkpoint_s: NonNegativeFloat = Field(10.0, description="writing one, seconds")
    usd_per_hour: NonNegativeFloat = Field(0.0, description="price of the learner")
    micro_batch_groups: PositiveInt | None = Field(
        None, description="m_b, where S = 0: a step is trained in parts of so many groups; default: at once"
    )


class NetworkConfig(Section):
    """Links between learner and workers, and sizes of publications."""

    mode: Dissemination = Field("chain", description="chain, star, or a star of unlimited uplink")
    uplink_mbit: PositiveFloat = Field(800.0, description="B0: what the learner can send, Mbit/s")
    worker_mbit: PositiveFloat = Field(100.0, description="Bw: what a worker can receive and send, Mbit/s")
    rtt_s: NonNegativeFloat = Field(0.08, description="round trip, seconds")
    chunk_kib: PositiveInt = Field(256, description="verified and forwarded at once, KiB")
    snapshot_mb: PositiveFloat = Field(16000.0, description="all weights, MB (10^6 bytes)")
    patch_mb: PositiveFloat | None = Field(
        None, description="a publication after the first, MB; default: a whole snapshot"
    )
    detection_s: PositiveFloat = Field(5.0, description="until a dead or silent worker is noticed, seconds")
    install_s: NonNegativeFloat = Field(0.5, description="generation stands still at an install, seconds")
    receive_in_place: bool = Field(
        False, description="a worker generates nothing while it receives: what ECHO-2's rule assumes"
    )


class InstanceTypeModel(Section):
    """Kind of worker with its region, market and price."""

    name: str = Field(description="unique")
    sku: str = Field("gpu", description="what the hardware is called")
    region: str = Field("", description="a chain enters each region once")
    market: Market = Field("on_demand", description="spot or on_demand")
    usd_per_hour: NonNegativeFloat = Field(0.0, description="price of one worker")
    count: int = Field(
        0, ge=0, description="workers at the start: w0, w1, ... in the order of the instance types"
    )
    min_count: int = Field(0, ge=0, description="fleet.mode=provisioned: always so many")
    max_count: int | None = Field(None, ge=0, description="quota; default: count")
    peak_tokens_per_s: PositiveFloat = Field(2500.0, description="with very many samples running")
    half_batch: NonNegativeFloat = Field(16.0, description="samples at which half of that is reached")
    prefill_tokens_per_s: PositiveFloat | None = Field(
        None, description="prompts, and tokens of other workers, taken in; default: at once"
    )
    kv_share: float = Field(
        0.0, ge=0, le=1, description="share of a sample's part of a token's time that reading its KV takes"
    )
    read_share: float = Field(1.0, gt=0, le=1, description="share of the KV that a token reads; 1: dense")
    max_groups: PositiveInt = Field(8, description="prompts in flight at once")
    boot_s: NonNegativeFloat = Field(120.0, description="from when its machine is there until its engine is")
    interruptions_per_hour: NonNegativeFloat = Field(0.0, description="of one worker, at random")
    notice_s: NonNegativeFloat = Field(0.0, description="warning before an interruption, seconds")
    trace: str | None = Field(None, description=f"recorded spot market: a file, or one in ${DATA_VARIABLE}")
    trace_at_end: AtEnd = Field("error", description="repeat, hold, or error: when the trace has ended")
    trace_share: PositiveFloat = Field(1.0, description="of the machines in the trace are there for this run")

    @property
    def engine(self) -> EngineSpec:
        """Throughput. What a whole batch costs stays; the cost of each sample falls with its reading."""
        cost = 1 - self.kv_share * (1 - self.read_share)
        return EngineSpec(self.peak_tokens_per_s / cost, self.half_batch / cost, self.prefill_tokens_per_s)

    @property
    def quota(self) -> int:
        return self.count if self.max_count is None else self.max_count

    @model_validator(mode="after")
    def _fits(self) -> Self:
        least = max(self.count, self.min_count)
        if self.quota < least:
            raise ValueError(
                f"type {self.name}: max_count={self.quota} is less than its count or min_count, {least}"
            )
        return self


class SeedingModel(Section):
    """Engines on the learner's devices, which sample at the start of each synchronous step (RLBoost 4.1)."""

    engines: int = Field(0, ge=0, description="N_resv; 0: no seeding")
    first_s: NonNegativeFloat = Field(60.0, description="T_seed of the first step, seconds")
    eta: PositiveFloat = Field(2.0, description="a window changes by the difference of the waits over eta")
    switch_s: NonNegativeFloat = Field(
        0.0, description="the devices' change from training to sampling, and back, seconds each"
    )
    peak_tokens_per_s: PositiveFloat = Field(2500.0, description="of one engine, as of a worker")
    half_batch: NonNegativeFloat = Field(16.0, description="as of a worker")
    prefill_tokens_per_s: PositiveFloat | None = Field(None, description="as of a worker")
    kv_share: float = Field(0.0, ge=0, le=1, description="as of a worker")
    read_share: float = Field(1.0, gt=0, le=1, description="as of a worker")
    max_groups: PositiveInt = Field(8, description="prompts in flight at once")

    @property
    def instance_type(self) -> InstanceTypeModel:
        """The engines as workers, whose machine is paid for as the learner's."""
        return InstanceTypeModel(
            name=SEEDER,
            sku=SEEDER,
            count=self.engines,
            peak_tokens_per_s=self.peak_tokens_per_s,
            half_batch=self.half_batch,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            kv_share=self.kv_share,
            read_share=self.read_share,
            max_groups=self.max_groups,
            boot_s=0.0,
        )


class FleetModel(Section):
    """Settings of the fleet: the rule that decides the number of workers."""

    mode: Literal["fixed", "kept", "provisioned", "exact"] = Field(
        "fixed",
        description="fixed: `count` of each type, which are started again when they are lost; kept: others "
        "take the place of the lost; provisioned: as many as pay; exact: the same, by the optimum of every "
        "moment and without hysteresis, to compare with",
    )
    restarts: int = Field(3, ge=0, description="fixed: times in a row that a lost worker is started again")
    boot_limit_s: PositiveFloat = Field(
        3600.0,
        description="a worker that does not generate by then is given up, its instance type backed off",
    )
    sustain_s: NonNegativeFloat = Field(
        30.0, description="a shortage must last so long before any is added (a surplus 300 s)"
    )
    gamma: float = Field(1.1, ge=1, allow_inf_nan=False, description="mu_target = gamma mu_min")
    usd_per_hour: PositiveFloat | None = Field(None, description="of all workers, at most")
    interruptions_per_hour: PositiveFloat | None = Field(None, description="expected, at most")
    tick_s: PositiveFloat = Field(15.0, description="the fleet is looked at this often, seconds")
    standby: int = Field(0, ge=0, description="kept, provisioned: workers beside these that are kept ready")

    @property
    def follows_need(self) -> bool:
        """Whether the fleet follows the learner's need instead of keeping its first size."""
        return self.mode in ("provisioned", "exact")


class FaultConfig(Section):
    """Fault at a set time."""

    at_s: NonNegativeFloat = Field(description="when")
    kind: Literal["kill", "preempt", "slow", "slow_link", "silence", "refuse_install"] = Field(
        description="kill: the process dies; preempt: the machine goes; slow, slow_link: at `factor` of its "
        "speed; silence: no message comes or goes; refuse_install: its next install fails"
    )
    worker: str = Field("", description="which; default: drawn from those that serve")
    count: PositiveInt = Field(1, description="how many, where they are drawn")
    factor: float = Field(0.5, gt=0, allow_inf_nan=False, description="of a slow one's speed")
    duration_s: PositiveFloat = Field(600.0, description="of slow, slow_link and silence")


class RunLimits(Section):
    """Limits that end a run, whichever comes first."""

    hours: PositiveFloat = Field(24.0, description="virtual hours")
    steps: PositiveInt = Field(1_000_000, description="learner steps")
    wait_limit_s: PositiveFloat = Field(7200.0, description="longest wait for a batch: then the run fails")
    batch_wait_s: PositiveFloat = Field(1.0, description="how long one question for a batch waits")


class Scenario(Section):
    """Settings of a whole simulated run."""

    name: str = Field("scenario", description="of the page and the files")
    seed: int = Field(0, ge=0, lt=2**63, description="of lengths, faults and interruptions")
    run: RunLimits = RunLimits()
    sampling: SamplingModel = SamplingModel()
    lengths: LengthConfig = LengthConfig()
    staleness: StalenessConfig = StalenessConfig()
    learner: LearnerModel = LearnerModel()
    network: NetworkConfig = NetworkConfig()
    fleet: FleetModel = FleetModel()
    seeding: SeedingModel = SeedingModel()
    instance_types: list[InstanceTypeModel] = Field([], description="at least one")
    faults: list[FaultConfig] = Field([], description="what goes wrong, besides interruptions")

    @property
    def per_step(self) -> int:
        """R, trajectories of a step."""
        return self.sampling.prompts_per_step * self.sampling.samples_per_prompt

    def length_model(self) -> LengthModel:
        """Return the lengths of its answers."""
        return LengthModel(
            self.seed,
            num_samples=self.sampling.samples_per_prompt,
            median_tokens=self.lengths.median_tokens,
            sigma=self.lengths.sigma,
            max_tokens=self.lengths.max_tokens,
        )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        names = [instance_type.name for instance_type in self.instance_types]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"instance types {', '.join(twice)} are named twice: give each a name of its own"
            )
        most = sum(o.quota if self.fleet.follows_need else o.count for o in self.instance_types)
        in_parts = self.seeding.engines or self.learner.micro_batch_groups
        if in_parts and self.staleness.max_staleness:
            raise ValueError(
                f"staleness.max_staleness={self.staleness.max_staleness}: seeding and "
                "learner.micro_batch_groups are for steps of one version; set staleness.max_staleness=0"
            )
        if not most and not self.seeding.engines:
            raise ValueError("instance_types: there would be no worker: give one a count, or a max_count")
        if self.fleet.standby and self.fleet.mode == "fixed":
            raise ValueError(
                f"fleet.standby={self.fleet.standby}: a fleet of fixed size has none; set fleet.mode=kept or "
                "provisioned, or leave it out"
            )
        for fault in self.faults:
            if fault.worker and not re.fullmatch(r"w\d+", fault.worker):
                raise ValueError(f"faults: {fault.worker} is no worker: they are called w0, w1, ...")
        return self


def load_scenario(words: Sequence[str]) -> Scenario:
    """Load the scenario that `words` name, with their overrides.

    Args:
        words: `scenario=NAME|FILE.yaml` and `key=value` with dotted keys, in which numbers index lists.

    Raises:
        ConfigError: names the key, the value and the error.
    """
    name, overrides = "", []
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise ConfigError(f"'{word}' is not of the form key=value; usage: {USAGE}")
        if key == "scenario":
            name = text
        else:
            overrides.append((key, parse_word(key, text)))
    if not name:
        raise ConfigError(f"no scenario is named; known: {', '.join(scenario_names())}; usage: {USAGE}")
    tree = read_yaml(_path(name))
    tree.setdefault("name", Path(name).stem)
    for key, value in overrides:
        set_key(tree, key, value)
    return parse_scenario(tree)


def parse_scenario(tree: dict[str, Any]) -> Scenario:
    """Build a scenario from plain values.

    Raises:
        ConfigError: names the key, the value and the error.
    """
    try:
        return Scenario.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"]) or "scenario"
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{path}={shown(first['input'])}: {unknown_key(path, '; see --help for all keys')}"
            ) from error
        if first["type"] in ("missing", "value_error"):
            raise ConfigError(f"{path}: {message}") from error
        raise ConfigError(f"{path}={shown(first['input'])}: {message[0].lower()}{message[1:]}") from error


def describe() -> str:
    """Return every key with its default and meaning, for `--help`; `...` stands for a missing default."""
    rows = describe_section("", Scenario)
    return "\n".join(row.replace("  .", "  ", 1) for row in rows)


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with the library."""
    return sorted(path.stem for path in (config_dir() / "scenario").glob("*.yaml"))


def dump_scenario(scenario: Scenario) -> str:
    """Return the resolved scenario as YAML."""
    return dump_yaml(scenario.model_dump(mode="json"))


def instance_type_trace(instance_type: InstanceTypeModel) -> SpotTrace | None:
    """Read the recorded market of an instance type; None if it has none.

    Raises:
        ConfigError: the file does not exist.
        DataError: the file is damaged or of an unknown format.
    """
    if instance_type.trace is None:
        return None
    folder = os.environ.get(DATA_VARIABLE)
    places = [user_path(instance_type.trace), *([Path(folder) / instance_type.trace] if folder else [])]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise ConfigError(
            f"instance_types: trace={instance_type.trace} of {instance_type.name} is not there: give the "
            f"path of a file, or set {DATA_VARIABLE} to the folder that it is in"
        )
    return read_trace(found, instance_type.trace_at_end)


def _path(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    known = scenario_names()
    if name not in known:
        raise ConfigError(f"scenario={name}: unknown; allowed: {', '.join(known)}{nearest(name, known)}")
    return config_dir() / "scenario" / f"{name}.yaml"
