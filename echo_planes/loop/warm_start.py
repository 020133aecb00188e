"""`python -m echo_planes.loop.warm_start`: supervised steps on a table of offline records, before any run.

The task that wrote the table provides the function that reads it. The result is a model folder for
`model.path=`. Training runs in one process, so the model must fit into one.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo_planes.config.extensions import imported
from echo_planes.config.files import check_regular, user_path
from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.errors import ClusterError, ConfigError, EchoPlanesError, StoppedError, UserError

if TYPE_CHECKING:
    from echo_planes.learning.offline import OfflineExample

REPORT_STEPS = 20  # about as many lines of progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status. A user's mistake is one line on stderr."""
    args = _parser().parse_args(arguments)
    try:
        return _run(args)
    except EchoPlanesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return StoppedError.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m echo_planes.loop.warm_start",
        description="Train a model on logged actions, weighted by what they led to.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--reader", required=True, help="package.module:function that reads the table")
    parser.add_argument("--table", type=Path, required=True, help="offline.arrow")
    parser.add_argument("--model", required=True, help="Hugging Face folder, or builtin:NAME")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--template", choices=("plain", "chat"), default="plain", help="as task.template")
    parser.add_argument("--batch", type=int, default=32, help="records a step")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate at the start; falls to 0")
    parser.add_argument("--objective", choices=("awr", "filtered"), default="awr")
    parser.add_argument("--beta", type=float, default=1.0, help="awr: exp(advantage / beta)")
    parser.add_argument("--cap", type=float, default=20.0, help="awr: largest weight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what fixes the result")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ConfigError(f"--out {args.out} exists already; give a new folder")
    for key in ("steps", "batch", "threads"):
        if getattr(args, key) < 1:
            raise ConfigError(f"--{key} {getattr(args, key)} is less than 1; give at least 1")
    if args.table.exists():  # the reader reports a missing table
        check_regular(args.table, sys.maxsize, advice="give the table that the task wrote")
    reader = _reader(args.reader)
    import numpy as np  # imported late, so that mistakes in the arguments show at once
    import torch
    from transformers import AutoConfig

    from echo_planes.data.tasks.registry import load_tokenizer
    from echo_planes.learning.offline import OfflineObjective, warm_start
    from echo_planes.learning.policy_model import load_policy

    folder = BUILTIN_MODELS.get(args.model, user_path(args.model))
    objective = OfflineObjective(args.objective, args.beta, args.cap)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = load_policy(folder, torch.float32, temperature=1.0, top_p=1.0)
    tokenizer = load_tokenizer(folder)
    examples: Sequence[OfflineExample] = reader(args.table, tokenizer, args.template)
    print(f"{len(examples)} records, {sum(sum(e.loss_mask) for e in examples)} trained tokens", flush=True)

    def tell(step: int, loss: float) -> None:
        if step % math.ceil(args.steps / REPORT_STEPS) == 0 or step in (1, args.steps):
            print(f"step {step}/{args.steps}  loss {loss:.4f}", flush=True)

    warm_start(
        model,
        examples,
        objective,
        steps=args.steps,
        rows_per_step=args.batch,
        learning_rate=args.lr,
        rng=np.random.default_rng(args.seed),
        on_step=tell,
    )
    dtype = AutoConfig.from_pretrained(folder, local_files_only=True).dtype
    _save(args.out, model.model.to(dtype or torch.float32), tokenizer)
    print(f"wrote {args.out}: run with model.path={args.out}")
    return 0


def _reader(name: str) -> Callable[[Path, Any, str], Sequence[OfflineExample]]:
    """Import the function `package.module:function`: (table, tokenizer, template) -> examples."""
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"--reader {name}: not of the form package.module:function")
    found: Callable[[Path, Any, str], Sequence[OfflineExample]] | None = getattr(
        imported(module, f"--reader {name}"), function, None
    )
    if not callable(found):
        raise ConfigError(f"--reader {name}: no function '{function}' in {module}; check the spelling")
    return found


def _save(out: Path, model: Any, tokenizer: Any) -> None:
    """Write a model folder under a temporary name, then rename it: `out` is complete or missing."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ClusterError(
            f"--out {out} cannot be written: {error}; free some space or give another folder"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
