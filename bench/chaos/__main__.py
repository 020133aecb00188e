"""`python -m bench.chaos SECTION --folder FOLDER [--json FILE]`: fault campaigns on real processes.

    kills [--victim NAME ...] [--number N] [--vllm]   kill -9 of every process of a run, then its books
    resume [--number N]                               kill -9 over step, save, publish: what is loaded then
    recovery [--number N] [--minutes M]               fault to work resumed; no false death on a poor link

What is in FOLDER already is not done again: an interrupted campaign goes on. The file gets the figures, and
`verdicts` {claim: true or false}; the exit status is 1 where one is false.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.chaos import kills
from bench.chaos.recovery import recovery, recovery_verdicts


def main(words: Sequence[str] | None = None) -> int:
    """Run one section; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos")
    sections = parser.add_subparsers(dest="section", required=True)
    one = sections.add_parser("kills", help="kill -9 of every process of a run")
    one.add_argument("--victim", action="append", choices=kills.VICTIMS)
    one.add_argument("--number", type=int, default=200, help="kills of each victim")
    one.add_argument("--vllm", action="store_true", help="the real engine; weights are not compared then")
    two = sections.add_parser("resume", help="kill -9 over step, save and publish")
    two.add_argument("--number", type=int, default=50, help="kills")
    three = sections.add_parser("recovery", help="from a fault to work resumed, over a poor link")
    three.add_argument("--number", type=int, default=20, help="faults of each kind")
    three.add_argument("--minutes", type=float, default=30.0, help="of a run that nothing is done to")
    for section in (one, two, three):
        section.add_argument("--folder", type=Path, required=True, help="where the campaign keeps its state")
        section.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.section == "kills":
        victims = options.victim or list(kills.VICTIMS)
        figures = kills.kills(folder, victims, options.number, real_engine=options.vllm)
        verdicts = kills.kill_verdicts(figures, options.number, deterministic=not options.vllm)
    elif options.section == "recovery":
        figures = recovery(folder, options.number, options.minutes)
        verdicts = recovery_verdicts(figures, options.number, options.minutes)
    else:
        figures = kills.resume(folder, options.number)
        verdicts = kills.resume_verdicts(figures, options.number)
    return _told({"section": options.section, "figures": figures, "verdicts": verdicts}, options.json)


def _told(report: dict[str, Any], path: Path | None) -> int:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")
    for claim, holds in report["verdicts"].items():
        print(f"{'holds' if holds else 'FAILS'}  {claim}", flush=True)
    return 0 if all(report["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
