"""Keeper of the schedule of KV budgets: the same on all workers, raised where the guard asks for it.

`RUN/kv_budgets.json` lists every schedule of the run with its number, which the spans of trajectories name. A
resume goes on with the last one.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from echo_planes.config.files import MODEL_JSON_BYTES, read_json, user_path
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.plain_yaml import read_yaml
from echo_planes.config.schema import Config
from echo_planes.config.sparse import SparseConfig
from echo_planes.errors import ConfigError, DataError
from echo_planes.loop.planes import Observer
from echo_planes.reporting.metrics import write_atomic
from echo_planes.rollout.sparsity.acceptance import Audit, Histogram, audit_fault
from echo_planes.rollout.sparsity.guard import LEAST, WINDOW, Guard
from echo_planes.weights.sparse_adapter import Distilled

FILE = "kv_budgets.json"
TOLD_EVERY = WINDOW  # audited answers between two words of how far they are from dense
QUIET_STEPS = 50  # without an audited answer, after which the keeper says so


def schedule_of(sparse: SparseConfig, number: int = 0) -> Schedule:
    """Return the schedule that settings ask for."""
    return Schedule(
        pages=tuple(sparse.schedule),
        number=number,
        page_tokens=sparse.page_tokens,
        bin_tokens=sparse.bin_tokens,
        first_pages=sparse.first_pages,
        last_pages=sparse.last_pages,
        dense_layers=sparse.dense_layers,
    )


def read_schedule(name: str) -> Schedule:
    """Return the schedule of a file that `calibrate` wrote.

    Raises:
        ConfigError: it has none.
    """
    try:
        sparse = SparseConfig.model_validate(read_yaml(user_path(name)))
    except ValidationError as error:
        what = error.errors()[0]
        raise ConfigError(f"sparse={name}: {what['loc']}: {what['msg']}") from error
    if not sparse.schedule:
        raise ConfigError(f"sparse={name}: it has no schedule; give one that calibrate wrote")
    return schedule_of(sparse)


def model_shape(folder: Path) -> str:
    """Return what a schedule depends on of a model: its family and the shape of its attention."""
    config = _model_settings(folder)
    heads = config.get("num_attention_heads", 0)
    return (
        f"{config.get('model_type')}, {config.get('num_hidden_layers')} layers of "
        f"{config.get('hidden_size')}, {heads}/{config.get('num_key_value_heads', heads)} heads"
    )


def check_sparse(config: Config) -> None:
    """Check that the run's engines, sampling and model go with its schedule.

    Raises:
        ConfigError: one does not.
    """
    sparse, sampling = config.sparse, config.sampling
    if not sparse.schedule:
        return
    for key, value in (("sampling.temperature", sampling.temperature), ("sampling.top_p", sampling.top_p)):
        if sparse.audit_share and value != 1:
            raise ConfigError(
                f"sparse.audit_share={sparse.audit_share:g} with {key}={value:g}: audits compare with the "
                f"model's own distribution; set {key}=1, or sparse.audit_share=0 and sparse.guard=off"
            )
    if sparse.audit_share and not sampling.top_logprobs:
        raise ConfigError(
            f"sparse.audit_share={sparse.audit_share:g} with sampling.top_logprobs=0: audits compare the "
            "likeliest tokens; set sampling.top_logprobs=20"
        )
    learner = config.learner
    if sparse.distill_rank and (learner.zero_stage == 3 or learner.sequence_ranks > 1):
        raise ConfigError(
            f"sparse.distill_rank={sparse.distill_rank} with learner.zero_stage={learner.zero_stage} and "
            f"sequence_ranks={learner.sequence_ranks}: the adapter is trained where a rank has the whole "
            "policy and whole answers; set zero_stage to at most 2 and sequence_ranks to 1"
        )
    for worker in [*config.fleet.workers, *config.seeding.workers().values()]:
        engine, name = worker.engine, f"the engine of SKU '{worker.sku}'"
        if worker.resources.get("GPU") and sparse.distill_rank and not engine.enforce_eager:
            raise ConfigError(
                f"sparse.distill_rank={sparse.distill_rank}: {name} has enforce_eager=false, but compiled "
                "layers do not call the adapter; set it to true, or sparse.distill_rank=0"
            )
        if engine.enable_prefix_caching:
            raise ConfigError(
                f"sparse.schedule: {name} has enable_prefix_caching=true: an answer's KV of sparse layers "
                "would serve dense requests; set it to false"
            )
        if "block_size" in engine.extra:
            raise ConfigError(
                f"sparse.schedule: {name} has extra.block_size={engine.extra['block_size']}, but "
                f"sparse.page_tokens={sparse.page_tokens} sets the size of a page; leave block_size out"
            )
    settings = _model_settings(config.model.folder)
    if settings.get("sliding_window") and settings.get("use_sliding_window", True):
        raise ConfigError(
            f"sparse.schedule: {config.model.path} has a sliding window of {settings['sliding_window']} "
            "tokens, which pages cannot be left out of; leave sparse out"
        )
    if settings.get("alibi") or settings.get("model_type") in ("bloom", "mpt"):
        raise ConfigError(
            f"sparse.schedule: {config.model.path} has ALiBi, whose distances change where pages are "
            "left out; leave sparse out"
        )
    shape = model_shape(config.model.folder)
    if sparse.model is not None and sparse.model != shape:
        raise ConfigError(
            f"sparse.model={sparse.model}: the schedule was calibrated for another model than "
            f"{config.model.path} ({shape}); calibrate one for it"
        )


def _model_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = read_json(folder / "config.json", MODEL_JSON_BYTES)
    return settings


class Keeper:
    """Keeper of one run, which decodes sparsely.

    Args:
        config: the run's settings.
        run_dir: folder that holds `FILE`, or will.
        observer: told of every change, and now and then of the acceptance.

    Raises:
        DataError: `FILE` is there and holds no schedules.
    """

    def __init__(self, config: Config, run_dir: Path, observer: Observer) -> None:
        self._mode = config.sparse.guard
        self._path = run_dir / FILE
        self._observer = observer
        asked = schedule_of(config.sparse)
        record = _read(self._path)
        # What the settings asked for then: if they ask for something else now, that holds.
        settings = {"schedule": list(asked.pages), **_fixed(asked)}
        schedules: list[dict[str, Any]] = record.get("schedules", [])
        if record.get("settings") == settings:
            begun = asked.pages
            asked = replace(asked, pages=tuple(schedules[-1]["pages"]), number=schedules[-1]["number"])
            if asked.pages != begun:
                observer.on_event(
                    "sparse guard",
                    f"sparse.schedule={list(begun)} stays at the budgets it was raised to: "
                    f"{list(asked.pages)}; any other schedule would hold",
                )
        else:
            asked = replace(asked, number=schedules[-1]["number"] + 1 if schedules else 0)
            schedules = [*schedules, asdict(asked)]
        self._record: dict[str, Any] = {"settings": settings, "schedules": schedules}
        self._write()
        sparse = config.sparse
        self._guard = Guard(asked, sparse.target, sparse.tail_share, config.model.max_model_len)
        self._warned: set[int] = set()  # bins
        self._histogram = Histogram()
        self._answers: Counter[int] = Counter()  # audited since the last word, by bin
        self._drift = 0.0  # sum over these answers
        self._audited = 0
        self._step_tokens, self._step_drift = 0, 0.0  # audited since the last step, and their sum
        self._distilled = 0  # updates of the adapter
        self._longest_tokens = config.model.max_model_len
        self._audit_share = config.sparse.audit_share
        self._quiet_steps = 0  # since an answer was audited
        workers = [*config.fleet.workers, *config.seeding.workers().values()]
        if any(worker.resources.get("GPU") for worker in workers):
            advice = "look at the first audits, which compare it with dense"
            if not config.sparse.audit_share:
                advice = "sparse.audit_share=0 leaves a wrong kernel unnoticed, so set it above 0"
            observer.on_event("sparse on GPUs", f"nobody has run this on one yet: {advice}")

    @property
    def schedule(self) -> Schedule:
        """Schedule that every worker is to have."""
        return self._guard.schedule

    def hear(self, audits: object) -> str:
        """Take in a worker's audits. Return why they cannot be any; "": they can."""
        if not isinstance(audits, list):
            return f"malformed audits: {type(audits).__name__}"
        for audit in audits:
            if fault := audit_fault(audit) or self._fault(audit):
                return f"malformed audit: {fault}"
            if audit.schedule == self.schedule.number:  # not one that was on its way when budgets rose
                self._count(audit)
            self._guard.add(audit)
            self._step_tokens += len(audit.alphas)
            self._step_drift += audit.drift * len(audit.alphas)
        return ""

    def _fault(self, audit: Audit) -> str:
        if audit.schedule > self.schedule.number:
            return f"its schedule is {audit.schedule}, the newest {self.schedule.number}"
        if (tokens := audit.context_tokens + 1 + len(audit.alphas)) > self._longest_tokens:
            return f"it has {tokens} tokens, more than model.max_model_len={self._longest_tokens}"
        return ""

    def hear_distilled(self, distilled: Distilled) -> None:
        """Take in an update of the sparse adapter, and report the first one and now and then another."""
        if not distilled.tokens:
            return
        if self._distilled % TOLD_EVERY == 0:
            size = len(distilled.adapter.tensors)
            self._observer.on_event(
                "sparse distillation",
                f"KL(dense || sparse) was {distilled.divergence:.4f} nats a token of {distilled.tokens:,}, "
                f"{distilled.seconds:.1f} s, adapter of {size:,} bytes",
                version=distilled.adapter.version,
            )
        self._distilled += 1

    def change(self) -> Schedule | None:
        """Report a step's audits. Return a new schedule for all workers, if they ask for one."""
        self._quiet_steps += 1
        if self._step_tokens:
            self._observer.on_audited(self._step_drift / self._step_tokens)
            self._quiet_steps = 0
        if self._quiet_steps == QUIET_STEPS and self._audit_share and any(self.schedule.pages):
            self._observer.on_event(
                "sparse audit",
                f"no answer in {QUIET_STEPS} steps, so nobody watches the budgets. Only answers of two "
                "tokens or more that one version sampled whole are audited: publish less often "
                "(staleness.publish_every), or raise sparse.audit_share",
            )
        self._step_tokens, self._step_drift = 0, 0.0
        raises = [] if self._mode == "off" else self._guard.raises()
        if self._mode == "warn":
            for one in raises:
                if one.place not in self._warned:
                    self._observer.on_event("sparse guard", f"would act: {one}")
            self._warned |= {one.place for one in raises}
            return None
        if not raises:
            return None
        self._tell()
        schedule = self._guard.apply(raises)
        for one in raises:
            self._observer.on_event("sparse guard", f"schedule {schedule.number}: {one}")
        self._record["schedules"].append(asdict(schedule))
        self._write()
        return schedule

    def _count(self, audit: Audit) -> None:
        lengths = audit.context_tokens + 1 + np.arange(len(audit.alphas))
        bins: list[int] = self.schedule.bins(lengths).tolist()
        self._histogram.add(bins, audit.alphas)
        self._answers.update(set(bins))
        self._drift += audit.drift
        self._audited += 1
        if self._audited >= TOLD_EVERY:
            self._tell()

    def _tell(self) -> None:
        """Report the acceptance of the answers audited since the last report."""
        if not self._audited:
            return
        parts = []
        for place, answers in sorted(self._answers.items()):
            tail, mean = self._histogram.tail(place), self._histogram.mean(place)
            pages = self.schedule.pages[place]
            figures = f"5th percentile {tail:.3f}, mean {mean:.3f}" if answers >= LEAST else "too few answers"
            parts.append(f"bin {place} ({f'{pages} pages' if pages else 'dense'}) {figures} ({answers})")
        drift = self._drift / self._audited
        self._observer.on_event(
            "sparse audit",
            f"{self._audited} answers, |log dense - log sparse| {drift:.4f} nats; acceptance: "
            + "; ".join(parts),
        )
        self._histogram, self._answers = Histogram(), Counter()
        self._audited, self._drift = 0, 0.0

    def close(self) -> None:
        """Report the acceptance of the last answers."""
        self._tell()

    def _write(self) -> None:
        write_atomic(self._path, json.dumps(self._record, indent=1) + "\n")


def _fixed(schedule: Schedule) -> dict[str, int]:
    return {key: value for key, value in asdict(schedule).items() if key not in ("pages", "number")}


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
        for one in (*record["schedules"], record["schedules"][-1]):
            Schedule(**one | {"pages": tuple(one["pages"])})
    except FileNotFoundError:
        return {}
    except (ConfigError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} holds no schedules ({error}); restore it, or remove it") from error
    return dict(record)
