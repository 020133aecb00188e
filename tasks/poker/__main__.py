"""`python -m echo_planes.tasks.poker`: `records` converts logs, `warmstart` trains, `evaluate` plays."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from echo_planes.data.tasks.adapter import Tokenizer
from echo_planes.errors import ConfigError, EchoPlanesError, UserError

from .adapter import PLAIN_MAX_NEW_TOKENS, PokerTask
from .evaluate import ModelRow, evaluate_model
from .frozen import FrozenModel, load_tokenizer, model_folder
from .opponents import all_opponents
from .options import PokerOptions
from .records import convert, write_records
from .table import TableRules

TRAINER = "echo_planes.loop.warm_start"  # run as a separate command: tasks do not import the learning plane
READER = "echo_planes.tasks.poker.offline:read_examples"

USAGE = """usage: python -m echo_planes.tasks.poker COMMAND ...

  records    --out offline.arrow [--hands N] [LOG.phh ...]    hand histories and rule-based play as a table
  warmstart  --table offline.arrow --model M --steps N --out FOLDER      train a model on such a table
  evaluate   --model M --hands N [--seed S]                   net chips a hand against each opponent

COMMAND --help says more. M: a Hugging Face model folder, or builtin:tiny-poker.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. An error of the library is one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        match words:
            case ["records", *rest]:
                return _records(rest)
            case ["warmstart", *rest]:
                return _warm_start(rest)
            case ["evaluate", *rest]:
                return _evaluate(rest)
            case ["--help" | "-h"]:
                print(USAGE, end="")
                return 0
            case _:
                given = f"'{words[0]}': unknown command" if words else "no command"
                raise ConfigError(f"{given}; write records, warmstart or evaluate, or --help for more")
    except EchoPlanesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, UserError) else 1


def _records(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m echo_planes.tasks.poker records")
    parser.add_argument("--out", type=Path, required=True, help="the table to write")
    parser.add_argument("--hands", type=int, default=0, help="of rule-based play to add")
    parser.add_argument("--seed", type=int, default=0, help="of that play")
    parser.add_argument("words", nargs="*", help="PHH files; seats=, stack_bb=, style= ... as in task.*")
    args = parser.parse_args(words)
    options = _options([word for word in args.words if _is_setting(word)])
    stack, big = options.stack_bb * options.big_blind, options.big_blind
    found = convert(
        [Path(word) for word in args.words if not _is_setting(word)],
        options.style,
        hands=args.hands,
        rules=TableRules((stack,) * options.seats, big // 2, big),
        rng=random.Random(args.seed),
    )
    count = write_records(args.out, found, options.style)
    print(f"wrote {count} records to {args.out}")
    return 0


def _warm_start(words: Sequence[str]) -> int:
    """Run the trainer's own command line, with the reader for poker tables."""
    sys.argv = [TRAINER, "--reader", READER, *words]
    runpy.run_module(TRAINER, run_name="__main__")  # ends with SystemExit
    return 0


def _evaluate(words: Sequence[str]) -> int:
    rules = [opponent.name for opponent in all_opponents()]
    parser = argparse.ArgumentParser(prog="python -m echo_planes.tasks.poker evaluate")
    parser.add_argument("--model", required=True, help="Hugging Face folder, or builtin:tiny-poker")
    parser.add_argument("--hands", type=int, required=True, help="per opponent; rounded up to whole deals")
    parser.add_argument("--seed", type=int, default=0, help="which held-out deals, and the model's luck")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest action")
    parser.add_argument("--opponents", nargs="+", default=rules, help="as task.opponent")
    parser.add_argument("--settings", nargs="*", default=[], help="of the task: stack_bb=20 style=plain ...")
    args = parser.parse_args(words)
    folder = model_folder(args.model)
    tokenizer = load_tokenizer(folder)
    tasks = {name: _task(name, args.settings, tokenizer) for name in args.opponents}
    limit = max(task.max_new_tokens or PLAIN_MAX_NEW_TOKENS for task in tasks.values())
    model = FrozenModel(folder, tokenizer.eos_token_id, max_new_tokens=limit, temperature=args.temperature)
    options = _options(args.settings)
    deals = -(-args.hands // options.seats)
    rows = asyncio.run(_play(model, tasks, options.seats, deals, args.seed))
    _show(rows, options.big_blind)
    told = {"model": args.model, "seed": args.seed, "big_blind": options.big_blind}
    print(json.dumps({**told, "rows": [_as_json(row) for row in rows]}))
    return 0


async def _play(
    model: FrozenModel, tasks: Mapping[str, PokerTask], seats: int, deals: int, seed: int
) -> list[ModelRow]:
    return [
        await evaluate_model(model, task, name, seats=seats, deals=deals, seed=seed)
        for name, task in tasks.items()
    ]


def _task(opponent: str, settings: Sequence[str], tokenizer: Tokenizer) -> PokerTask:
    task = PokerTask(_options([*settings, f"opponent={opponent}"]), tokenizer, seed=0)
    task.preflight()
    return task


def _is_setting(word: str) -> bool:
    return word.partition("=")[0] in PokerOptions.model_fields and "=" in word


def _options(settings: Sequence[str]) -> PokerOptions:
    """Return `key=value` words as the task's settings. Raises ConfigError if they are invalid."""
    values = {}
    for word in settings:
        key, _, value = word.partition("=")
        values[key] = yaml.safe_load(value)
    try:
        return PokerOptions.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0] if first["loc"] else "settings"
        raise ConfigError(
            f"{name}: {first['msg']}; see task.* of python -m echo_planes.run --help"
        ) from error


def _show(rows: Sequence[ModelRow], big_blind: int) -> None:
    width = max(len("opponent"), *(len(played.row.opponent) for played in rows))
    print(f"{'opponent':{width}}  chips/hand  95 % interval       hands  illegal  cut off")
    for played in rows:
        row = played.row
        low, mean, high = (value * big_blind for value in (row.low_bb, row.mean_bb, row.high_bb))
        print(
            f"{row.opponent:{width}}  {mean:+10.3f}  {low:+8.3f} {high:+8.3f}  {row.hands:7}"
            f"  {played.illegal_share:6.1%}  {played.cut_off_share:6.1%}"
        )


def _as_json(played: ModelRow) -> dict[str, Any]:
    return {
        **asdict(played.row),
        "illegal_share": played.illegal_share,
        "cut_off_share": played.cut_off_share,
    }


if __name__ == "__main__":
    sys.exit(main())
