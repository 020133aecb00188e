"""`python -m echo_planes.sparsity calibrate out=FILE.yaml key=value ...`: a schedule of KV budgets.

One engine answers prompts of the task with each budget, and compares its answers with dense attention.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from echo_planes.config.files import user_path
from echo_planes.config.hub import pinned
from echo_planes.config.plain_yaml import dump_yaml
from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError, EchoPlanesError, UserError
from echo_planes.loop.builders import build_task
from echo_planes.loop.loading import load_config
from echo_planes.loop.preflight import check_lengths, check_model, check_positions
from echo_planes.loop.sparsity import check_sparse, model_shape, schedule_of
from echo_planes.reporting.html import page
from echo_planes.reporting.metrics import write_atomic
from echo_planes.reporting.sections.charts import Chart, Series, line_chart
from echo_planes.rollout.sparsity.calibration import LEAST_ANSWERS, Surface
from echo_planes.rollout.vllm.sparse_engine import SparseEngine
from echo_planes.types import Sample

NOTHING = 1  # exit status: no budget keeps the target
COLORS = 5  # of the style sheet
_OWN = ("out", "budgets", "prompts")
USAGE = """usage: python -m echo_planes.sparsity calibrate out=FILE.yaml [budgets=8,16] [prompts=64] ...

Answers the first prompts of the run's task with each budget (pages that a sampled token reads), compares the
answers with dense attention, prints the 5th percentile of acceptance by sequence length, and writes the
smallest budgets that keep sparse.target: for runs with sparse=FILE.yaml. FILE.html has the figures as a page.

  budgets=   default: 8 and its doublings, up to the longest sequence
  prompts=   answers to each budget; default 64
  key=value  as of a run: task=, model=, fleet= (its first worker's engine), sampling.*, sparse.*

Exit status: 0 a schedule was written, 1 no budget keeps the target, 2 a mistake in what was given.
"""


@dataclass(slots=True)
class _Policy:
    """Policy of one episode that keeps its calls."""

    engine: SparseEngine
    max_new_tokens: int
    calls: list[tuple[tuple[int, ...], Sample]] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        (sample,) = await self.engine.generate(
            token_ids, num_samples=1, max_new_tokens=self.max_new_tokens, on_tokens=lambda *_: None
        )
        self.calls.append((tuple(token_ids), sample))
        return sample


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, and return the exit status. A mistake is one line on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or "--help" in words or "-h" in words:
            print(USAGE, end="")
            return 0 if words else UserError.exit_status
        if words[0] != "calibrate":
            raise ConfigError(f"'{words[0]}': unknown command; write calibrate, or --help for more")
        return _calibrate(words[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except EchoPlanesError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _calibrate(words: Sequence[str]) -> int:
    own = {key: text for key, _, text in (word.partition("=") for word in words) if key in _OWN}
    if "out" not in own:
        raise ConfigError("no out=FILE.yaml: where is the schedule to be written?")
    out = user_path(own["out"])
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"out={out}: the schedule is a YAML file; give a name that ends with .yaml")
    rest = [word for word in words if word.partition("=")[0] not in _OWN]
    # With a schedule, the other keys of sparse have an effect. Of this one every page is read.
    config = load_config(["sampling.top_logprobs=20", "sparse.schedule=[0]", *rest])
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": pinned(config.model.path)}),
            "sparse": config.sparse.model_copy(update={"schedule": []}),
        }
    )
    check_model(config.model.folder)
    check_positions(config)
    check_lengths(config)
    most = -(-config.model.max_model_len // config.sparse.page_tokens)
    budgets = _numbers("budgets", own.get("budgets", "")) or [8 << i for i in range(12) if 8 << i < most]
    prompts = (_numbers("prompts", own.get("prompts", "64")) or [64])[0]
    if prompts < LEAST_ANSWERS:
        raise ConfigError(
            f"prompts={prompts}: below {LEAST_ANSWERS} answers nothing can be said; ask for more"
        )
    if not budgets:
        raise ConfigError(
            f"model.max_model_len={config.model.max_model_len}: a sequence has {most} pages, and none can be "
            "left out; raise it, or roll out densely"
        )
    kept = config.sparse.first_pages + config.sparse.last_pages
    if budgets[0] < kept:
        raise ConfigError(
            f"budgets={budgets[0]}: the first {config.sparse.first_pages} and the last "
            f"{config.sparse.last_pages} pages are always read; give at least {kept}"
        )
    for key in ("temperature", "top_p"):
        if (value := getattr(config.sampling, key)) != 1:
            raise ConfigError(
                f"sampling.{key}={value:g}: every answer is compared with the model's own distribution; "
                "set it to 1"
            )
    # The checks of a run with such a schedule, and those of its own keys.
    check_sparse(_with_schedule(config, budgets))
    surface = asyncio.run(measure(config, budgets, prompts))
    schedule = surface.schedule(config.model.max_model_len)
    print(as_text(surface, schedule))
    if not any(schedule):
        print("no budget keeps the target in any bin: nothing written; give larger budgets", file=sys.stderr)
        return NOTHING
    written = _with_schedule(config, schedule).sparse.model_dump(mode="json")
    head = f"# Calibrated with {prompts} answers to each budget; for runs with sparse={out.name}\n"
    write_atomic(out, head + dump_yaml(written))
    write_atomic(out.with_suffix(".html"), as_html(config, surface, schedule))
    print(f"written: {out} and {out.with_suffix('.html').name}")
    return 0


def _numbers(key: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(word) for word in text.strip("[]").split(",") if word})
    except ValueError:
        numbers = [0]
    if numbers and numbers[0] < 1:
        raise ConfigError(f"{key}={text}: whole numbers above 0 are needed, with commas between them")
    return numbers


def _with_schedule(config: Config, schedule: Sequence[int]) -> Config:
    tree = config.model_dump()
    tree["sparse"] |= {"schedule": list(schedule), "model": model_shape(config.model.folder)}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:  # keys that go without a schedule alone
        raise ConfigError(f"sparse: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


async def measure(config: Config, budgets: Sequence[int], prompts: int) -> Surface:
    """Answer prompts with each budget, compare with dense attention, and return the acceptance of all tokens.

    Raises:
        RunError: the engine does not start, or dies.
    """
    sparse, worker = config.sparse, config.fleet.workers[0]
    task = build_task(config)
    engine = SparseEngine(
        worker.engine,
        config.sampling,
        config.model.folder,
        config.model.max_model_len,
        config.run.seed,
        page_tokens=sparse.page_tokens,
    )
    surface = Surface(sparse.bin_tokens, sparse.target, sparse.tail_share)
    longest = task.max_new_tokens or config.sampling.max_new_tokens
    await engine.start()
    try:
        for pages in budgets:
            await engine.set_schedule(schedule_of(_with_schedule(config, [pages]).sparse))
            policies = [_Policy(engine, longest) for _ in range(prompts)]
            await asyncio.gather(*(task.rollout(task.prompt(i), policy) for i, policy in enumerate(policies)))
            for context, sample in (call for policy in policies for call in policy.calls):
                found = await engine.audit(context, sample)
                surface.add(pages, len(context), [one.likely for one in found[1:]])
            print(f"[sparsity] budget of {pages} pages: {prompts} answers compared", flush=True)
    finally:
        await engine.close()
    return surface


# --- output --------------------------------------------------------------------------------------


def as_text(surface: Surface, schedule: Sequence[int]) -> str:
    """Return the surface as a table: 5th percentile of each bin and budget, the chosen ones marked."""
    head = ["tokens", *(f"{pages} pages" for pages in surface.budgets), "schedule"]
    rows = [head]
    for place in range(surface.num_bins):
        row = [f"to {(place + 1) * surface.bin_tokens:,}"]
        for pages in surface.budgets:
            cell = surface.cell(pages, place)
            few = cell is None or cell.answers < LEAST_ANSWERS
            row.append("too few" if few or cell is None else f"{cell.tail:.3f}{' *' if cell.is_kept else ''}")
        rows.append([*row, f"{schedule[place]} pages" if schedule[place] else "all"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(
        [
            *lines,
            f"5th percentile of acceptance. *: at most {surface.tail_share:.1%} of the tokens are below "
            f"{surface.target:g}, beyond doubt (95 %). too few: below {LEAST_ANSWERS} answers."
            " Such a bin takes the budget of the next longer one, else it is dense.",
        ]
    )


def as_html(config: Config, surface: Surface, schedule: Sequence[int]) -> str:
    """Return one self-contained page with the surface."""
    ends = [float((place + 1) * surface.bin_tokens) for place in range(surface.num_bins)]

    def lines(what: str) -> list[Series]:
        return [
            Series(
                f"{pages} pages", [_value(surface, pages, i, what) for i in range(len(ends))], 1 + n % COLORS
            )
            for n, pages in enumerate(surface.budgets)
        ]

    note = "by sequence length; bins with too few answers are left out"
    charts = [
        line_chart(
            Chart(f"{name} of acceptance", note, ends, "acceptance", lambda v: f"{v:.3f}", x_label="tokens"),
            lines(what),
            references=[(surface.target, "target")] if what == "tail" else [],
        )
        for name, what in (("5th percentile", "tail"), ("Mean", "mean"))
    ]
    return page(
        "sparsity",
        model=config.model.path,
        charts=charts,
        schedule=list(enumerate(schedule)),
        surface=surface,
    )


def _value(surface: Surface, pages: int, place: int, what: str) -> Any:
    cell = surface.cell(pages, place)
    return None if cell is None or cell.answers < LEAST_ANSWERS else getattr(cell, what)


if __name__ == "__main__":
    # Ended at once: vLLM and its threads would be torn down for seconds.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
