"""Fault campaigns on real processes: `python -m bench.chaos SECTION --folder FOLDER [--json FILE]`.

    kills [--victim NAME ...] [--number N] [--vllm]   kill -9 of every process of a run, then its books
    resume [--number N]                               kill -9 over step, save, publish: what is loaded then
    recovery [--number N] [--minutes M]               fault to work resumed; no false death on a poor link
    hostile                                           named attacks of a worker that has a credential
    network [--vllm]                                  what a run unpickles, and what it listens on
    soak [--hours H] [--vllm]                         a fault every 20 s: what grows, what waits
    fuzz [--decoder NAME ...] [--inputs N]            damaged inputs to every decoder
    all                                               each of them at full size, in turn

What is in FOLDER already is not done again: an interrupted campaign goes on, if the commit is still that of
the folder. The file gets the commit, the figures, and `verdicts` {claim: true or false}; the exit status is 1
where one is false, 2 where the folder is of another commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chaos import fuzz, hostile, kills, network, soak
from bench.chaos.recovery import recovery, recovery_verdicts
from tests.integration.harness import ROOT

Options = argparse.Namespace
Told = tuple[dict[str, Any], dict[str, bool]]  # figures, verdicts


@dataclass(frozen=True, slots=True)
class Section:
    """A campaign.

    Args:
        options: what it may be given: flag -> settings of `add_argument`.
        run: runs it, given its options and its folder.
    """

    options: Mapping[str, Mapping[str, Any]]
    run: Callable[[Options, Path], Told]


def _kills(options: Options, folder: Path) -> Told:
    victims = options.victim or list(kills.VICTIMS)
    figures = kills.kills(folder, victims, options.number, real_engine=options.vllm)
    return figures, kills.kill_verdicts(figures, options.number, deterministic=not options.vllm)


def _resume(options: Options, folder: Path) -> Told:
    figures = kills.resume(folder, options.number)
    return figures, kills.resume_verdicts(figures, options.number)


def _recovery(options: Options, folder: Path) -> Told:
    figures = recovery(folder, options.number, options.minutes)
    return figures, recovery_verdicts(figures, options.number, options.minutes)


def _hostile(options: Options, folder: Path) -> Told:
    figures = hostile.hostile(folder)
    return figures, hostile.verdicts(figures)


def _network(options: Options, folder: Path) -> Told:
    figures = network.network(folder, real_engine=options.vllm)
    return figures, network.verdicts(figures)


def _soak(options: Options, folder: Path) -> Told:
    figures = soak.soak(folder, options.hours, real_engine=options.vllm)
    return figures, soak.verdicts(figures, options.hours)


def _fuzz(options: Options, folder: Path) -> Told:
    figures = fuzz.fuzz(folder, options.decoder or list(fuzz.DECODERS), options.inputs, options.processes)
    return figures, fuzz.verdicts(figures, options.inputs)


_VLLM: Mapping[str, Any] = {"action": "store_true", "help": "the real engine; weights are not compared then"}
SECTIONS: Mapping[str, Section] = {
    "kills": Section(
        {
            "--victim": {"action": "append", "choices": kills.VICTIMS},
            "--number": {"type": int, "default": 200, "help": "kills of each victim"},
            "--vllm": _VLLM,
        },
        _kills,
    ),
    "resume": Section({"--number": {"type": int, "default": 50, "help": "kills"}}, _resume),
    "recovery": Section(
        {
            "--number": {"type": int, "default": 20, "help": "faults of each kind"},
            "--minutes": {"type": float, "default": 30.0, "help": "of a run that nothing is done to"},
        },
        _recovery,
    ),
    "hostile": Section({}, _hostile),
    "network": Section({"--vllm": _VLLM}, _network),
    "soak": Section({"--hours": {"type": float, "default": 2.0}, "--vllm": _VLLM}, _soak),
    "fuzz": Section(
        {
            "--decoder": {"action": "append", "choices": list(fuzz.DECODERS)},
            "--inputs": {"type": int, "default": 10_000_000, "help": "for each decoder"},
            "--processes": {"type": int, "default": 2},
        },
        _fuzz,
    ),
}
# Each at full size; with vLLM, which samples by itself, fewer kills, whose weights are not compared.
FULL = (*([name] for name in SECTIONS), ["kills", "--number", "5", "--vllm"])


def main(words: Sequence[str] | None = None) -> int:
    """Run one section, or all of them; returns the exit status."""
    options = _parser().parse_args(words)
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    now, kept = commit(), folder / "commit"
    of = kept.read_text() if kept.exists() else "an unnamed commit" if any(folder.iterdir()) else now
    if of != now:
        print(f"error: {folder} holds a campaign of {of}, this is {now}; give another folder")
        return 2
    kept.write_text(now)
    if options.section != "all":
        return _told({options.section: _run(options, folder, now)}, options.json)
    reports: dict[str, Any] = {}
    for one in FULL:
        name = "-".join(word.strip("-") for word in one)
        reports[name] = _run(_parser().parse_args([*one, "--folder", str(folder)]), folder / name, now)
        _told(reports, options.json)  # a later section may raise
    return _told(reports, options.json)


def commit() -> str:
    """Commit of this checkout, marked where files differ from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+changes"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos")
    sections = parser.add_subparsers(dest="section", required=True)
    for name in (*SECTIONS, "all"):
        section = sections.add_parser(name)
        section.add_argument("--folder", type=Path, required=True, help="where the campaign keeps its state")
        section.add_argument("--json", type=Path, help="where its figures and verdicts go")
        for flag, settings in SECTIONS[name].options.items() if name in SECTIONS else ():
            section.add_argument(flag, **settings)
    return parser


def _run(options: Options, folder: Path, of_commit: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    figures, verdicts = SECTIONS[options.section].run(options, folder)
    for claim, holds in verdicts.items():
        print(f"{'holds' if holds else 'FAILS'}  {options.section}: {claim}", flush=True)
    return {"commit": of_commit, "figures": figures, "verdicts": verdicts}


def _told(reports: dict[str, Any], path: Path | None) -> int:
    if path is not None:
        path.write_text(json.dumps(reports, indent=1) + "\n")
    return 0 if all(all(report["verdicts"].values()) for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
