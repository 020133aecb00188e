"""The papers' claims beside what the simulator says: `python -m bench.papers [--json FILE] [--only 1 4 ...]`.

SIMULATED, all of it: the code that decides is the real one, and learner, engines, links, prices and spot
markets are modelled. What is assumed is in `bench/assumptions.yaml`, with its sources, and was fixed before
the first run; what had to change is listed there. It is printed after the claims.

1. ECHO-2, figure 3c: the learner's bubble vanishes at the predicted number of workers;
2. ECHO-2, figure 4: T_bcast against workers;
3. ECHO-2, table 2: what peer-assisted broadcast and cost-aware provisioning are worth;
4. ECHO-2, table 4: one fault among eight workers;
5. ECHO-2, appendix B: the bound on staleness;
6. SparrowRL, table 7: a batch split by speed;
7. RLBoost: preemptible machines; needs the recorded spot markets (ECHO_PLANES_DATA), else it is left out;
8. RLBoost: seeding on the learner's machine, and steps in parts (`--only rlboost`: this claim alone);
9. Sparrow: sparse decoding, by its cost model (`--only sparrow`: this claim alone).

Each with the main figure under halved and doubled boot delay, throughput and price, where they matter. Ends
with status 1 where a claim does not hold. About four minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from bench import (
    papers_ablation,
    papers_faults,
    papers_overlap,
    papers_seeding,
    papers_sparrow,
    papers_split,
    papers_spot,
    papers_staleness,
)
from bench.papers_base import ASSUMPTIONS, Claim, Row, load

MARK = "simulated"
NAMED = {"rlboost": 8, "sparrow": 9}
VERDICTS = {True: "holds", False: "DOES NOT HOLD", None: "-"}


def claims(only: Iterable[int] = ()) -> Iterable[Claim]:
    """The named claims, or all, one after another."""
    assumed = load()
    makers: dict[int, Callable[[], Claim]] = {
        1: lambda: papers_overlap.claim(assumed),
        2: papers_ablation.figure_4,
        3: lambda: papers_ablation.claim(assumed),
        4: lambda: papers_faults.claim(assumed),
        5: lambda: papers_staleness.claim(assumed),
        6: lambda: papers_split.claim(assumed),
        7: lambda: papers_spot.claim(assumed),
        8: lambda: papers_seeding.claim(assumed),
        9: lambda: papers_sparrow.claim(assumed),
    }
    for number in only or makers:
        if number == 7 and not papers_spot.traces_are_there():
            print("\n7. left out: set ECHO_PLANES_DATA to the folder with the recorded spot markets")
            continue
        yield makers[number]()


def show(claim: Claim) -> None:
    """One claim as a table."""
    print(f"\n{claim.name} ({claim.source}), {MARK}: {VERDICTS[claim.holds]}")
    _table([("", "paper", f"ours ({MARK})", ""), *map(_cells, claim.rows)])
    if claim.sensitivity:
        print(f"  sensitivity ({MARK})")
        _table([_cells(row)[:3] for row in claim.sensitivity])
    for note in claim.notes:
        print(f"  * {note}")


def _cells(row: Row) -> tuple[str, str, str, str]:
    return row.what, row.paper, row.ours, VERDICTS[row.holds]


def _table(rows: list[Any]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("    " + "  ".join(cells).rstrip())


def show_assumptions(sections: Iterable[str]) -> None:
    """Print what was assumed for these claims, and from where; then what changed after a first run."""
    tree = yaml.safe_load(ASSUMPTIONS.read_text())
    for section in sections:
        print(f"\nassumptions: {section}")
        for key, row in tree[section].items():
            print(f"    {key} = {row['value']}  [{row['source']}]")
    print("\nchanged after they were fixed")
    for change in tree["changed"]:
        print(f"    {change['what']}: from {change['from']} to {change['to']}: {change['why']}")


def record(claim: Claim) -> dict[str, Any]:
    """One claim for the file."""
    rows = [dict(zip(("what", "paper", "ours", "verdict"), _cells(row), strict=True)) for row in claim.rows]
    varied = [{"what": row.what, "paper": row.paper, "ours": row.ours} for row in claim.sensitivity]
    return {
        MARK: True,
        "claim": claim.name,
        "source": claim.source,
        "holds": claim.holds,
        "rows": rows,
        "sensitivity": varied,
        "notes": list(claim.notes),
        "figures": dict(claim.figures),
    }


def _number(word: str) -> int:
    return NAMED[word] if word in NAMED else int(word)


def main() -> int:
    """Simulate, print, and write what was asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.papers", description="The papers' claims, simulated"
    )
    parser.add_argument("--json", type=Path, help="write the claims here")
    parser.add_argument(
        "--only",
        type=_number,
        nargs="+",
        default=[],
        choices=range(1, 10),
        help="these claims; rlboost: 8, sparrow: 9",
    )
    arguments = parser.parse_args()
    found = []
    for claim in claims(arguments.only):
        found.append(claim)
        show(claim)
    show_assumptions(dict.fromkeys(section for claim in found for section in claim.assumptions))
    if arguments.json:
        assumed = yaml.safe_load(ASSUMPTIONS.read_text())
        written = {MARK: True, "assumptions": assumed, "claims": [record(claim) for claim in found]}
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")
    missed = [claim.name for claim in found if not claim.holds]
    print(
        f"\n{MARK}: {len(found) - len(missed)} of {len(found)} claims hold"
        + "".join(f"; not: {m}" for m in missed)
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
