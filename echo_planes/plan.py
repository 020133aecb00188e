"""`python -m echo_planes.plan prices=FILE key=value ...`: plan of the fleet that a run needs, before the run.

`convert-skypilot` turns a catalogue of SkyPilot into a list of prices. `fleet/planning.py` makes the plan.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echo_planes.config.hub import pinned
from echo_planes.config.schema import Config, LearnerConfig
from echo_planes.errors import ConfigError, EchoPlanesError, UserError
from echo_planes.fleet.instance_types import InstanceType
from echo_planes.fleet.plan_config import PlanConfig, describe, load_plan
from echo_planes.fleet.planning import Planned, plan
from echo_planes.fleet.prices import convert_skypilot
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.learning.footprint import GIB, footprint, shape_of
from echo_planes.loop.sparsity import read_schedule
from echo_planes.reporting.formats import count, show_usd
from echo_planes.reporting.metrics import write_atomic
from echo_planes.reporting.plan import (
    MARK,
    MAX_INSTANCE_TYPES,
    as_html,
    as_json,
    as_text,
    cheapest_instance_types,
)
from echo_planes.rollout.sparsity.cost import mean_read_tokens

NO_FLEET = 1  # exit status; 0: a fleet was found, 2: a person's mistake
CONVERT = "convert-skypilot"

USAGE = f"""usage: python -m echo_planes.plan [--json] [--html FILE] [--help] prices=FILE key=value ...
       python -m echo_planes.plan {CONVERT} IN.csv OUT.csv --provider NAME

  --json        print the plan as JSON
  --html FILE   also write it as a page with charts
  --help        show this, with every key

Exit status: 0 a fleet was found, 1 no fleet can do it (advice is printed), 2 a mistake in what was given,
or kappa steps end before a publication does.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan or convert, and return the exit status. A mistake is one line on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == [CONVERT]:
            return _convert(words[1:])
        parser = argparse.ArgumentParser(prog="python -m echo_planes.plan", add_help=False)
        parser.add_argument("-h", "--help", action="store_true")
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--html", type=Path)
        parser.add_argument("words", nargs="*")
        options = parser.parse_intermixed_args(words)
        if options.help:
            return _show(f"{USAGE}\n{describe()}\n")
        planned = _with_learner_memory(_planned(load_plan(options.words)))
        if options.html:
            _write(options.html, as_html(planned))
        _show(as_json(planned) if options.json else as_text(planned))
        return 0 if planned.advice is None else NO_FLEET
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except EchoPlanesError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _planned(config: PlanConfig) -> Planned:
    """Plan, and note what a schedule of KV budgets saves by the cost model, which is an upper bound.

    Raises:
        ConfigError: `sparse` is no file with a schedule.
    """
    if config.sparse is None:
        return plan(config)
    read = mean_read_tokens(read_schedule(config.sparse), config.prompt_tokens, config.answer_tokens)
    dense, planned = plan(config), plan(config, read)
    before = {one.name: one for one in dense.instance_types}
    whole = mean_read_tokens(None, config.prompt_tokens, config.answer_tokens)
    lines = [
        f"Sparse: a token reads the KV of {read:,.0f} tokens, not of {whole:,.0f}. Kernels are free here: "
        "what follows are upper bounds of what it saves.",
        *(
            f"Sparse on {one.name}: {show_usd(_usd_per_step(one, config))} a step, "
            f"{show_usd(_usd_per_step(before[one.name], config))} dense {MARK}."
            for one in cheapest_instance_types(planned)[:MAX_INSTANCE_TYPES]
        ),
    ]
    if dense.fleets and planned.fleets:
        first, second = (show_usd(one.fleets[0].usd_per_step) for one in (dense, planned))
        lines.append(f"Sparse, the {planned.fleets[0].title} fleet: {second} a step, {first} dense {MARK}.")
    return replace(planned, sparse=tuple(lines))


def _usd_per_step(instance_type: InstanceType, config: PlanConfig) -> float:
    """Return the rollouts' dollars of a step that such machines alone sample."""
    return instance_type.rho * config.per_step / 3600


def _with_learner_memory(planned: Planned) -> Planned:
    """Add the memory of a learner rank, where the model's folder and the learner's GPU are known."""
    config = planned.config
    facts = SKU_FACTS.get(config.learner_sku or "")
    if config.model is None or facts is None:
        return planned
    longest = config.prompt_tokens + config.answer_tokens
    settings = Config.model_validate(
        {
            "model": {"path": pinned(config.model), "max_model_len": longest},
            "sampling": {"max_new_tokens": config.answer_tokens},
            "learner": {
                "num_ranks": config.learner_gpus,
                "resources": {"GPU": 1},
                "zero_stage": 3,
                "micro_batch_tokens": max(longest, LearnerConfig().micro_batch_tokens),
            },
        }
    )
    try:
        needs = footprint(settings, shape_of(settings.model.folder), on_gpu=True)
    except KeyError:  # sizes by other words
        return planned
    parts = f" ({needs})" if str(needs) else ""
    has_bytes = facts.memory_gib * GIB
    more = (
        ""
        if needs.total < has_bytes
        else "; that is too much: see learner.sequence_ranks and offloading in docs/learning.md"
    )
    return replace(
        planned,
        learner_memory=f"at least {needs.total / GIB:.2g} of {facts.memory_gib:g} GiB on each of "
        f"{count(config.learner_gpus, 'GPU')} under ZeRO-3{parts}{more}",
    )


def _convert(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m echo_planes.plan {CONVERT}",
        description="Turn a catalogue of SkyPilot (vms.csv) into a list of prices.",
    )
    parser.add_argument("source", metavar="IN.csv", type=Path, help="the catalogue")
    parser.add_argument("target", metavar="OUT.csv", type=Path, help="the list to be written")
    parser.add_argument("--provider", required=True, help="whose catalogue it is")
    options = parser.parse_args(words)
    converted = convert_skypilot(options.source, options.provider)
    _write(options.target, converted.text)
    left_out = (
        f"{converted.without_gpu} without a whole GPU, {converted.without_machine} priced without their "
        f"machine, {converted.without_price} without a price, "
        f"{converted.dearer} dearer ones of the same kind and region"
    )
    return _show(f"{options.target}: {converted.num_rows} rows. Left out: {left_out}.\n")


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another place") from error


def _show(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
