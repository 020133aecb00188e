"""Cost of a sandboxed run: `python -m bench.sandbox [--json FILE]`.

- start: one program after another, `pass`, beside a bare `python -I -S -c pass` of the same interpreter in
  the same rounds. The overhead is the median of the differences within each round;
- rate: programs a second through two slots, interpreter start included;
- judgement: one answer of task=code after another, which is two programs that speak with each other; and
  answers a second, two at a time.

Nothing else should run meanwhile. The first line says which protection was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from echo_planes.sandbox.model import Limits, Program
from echo_planes.sandbox.pool import SandboxPool
from echo_planes.tasks.code.runner import ProgramRunner

NUM_SLOTS = 2
IDLE = Program("pass")
ANSWER, TESTS = "def f(x): return x + 1", "assert f(1) == 2\nassert f(2) == 3\nassert f(3) == 4"


async def bare(interpreter: str) -> float:
    """Seconds for an interpreter that does nothing, unprotected."""
    begun_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(interpreter, "-I", "-S", "-c", "pass")
    await process.wait()
    return time.perf_counter() - begun_s


def measure_judging(rounds: int, answers: int) -> dict[str, float]:
    """Seconds of a judgement alone, and answers a second."""
    runner = ProgramRunner(NUM_SLOTS, Limits())
    codes = [f"{ANSWER}  # {number}" for number in range(rounds + answers + 1)]  # equal ones are run once
    try:
        judged_s = []
        for code in codes[: rounds + 1]:
            begun_s = time.perf_counter()
            if runner.judge([code], TESTS, "", ANSWER)[code].passed != 3:
                raise SystemExit("a right answer was judged wrong")
            judged_s.append(time.perf_counter() - begun_s)
        begun_s = time.perf_counter()
        runner.judge(codes[rounds + 1 :], TESTS, "", ANSWER)
        rate = answers / (time.perf_counter() - begun_s)
    finally:
        runner.close()
    # The first round warms up.
    return {"judged_ms": 1000 * statistics.median(judged_s[1:]), "judgements_per_s": rate}


async def measure(rounds: int, programs: int) -> dict[str, Any]:
    """Start overhead and rate."""
    async with SandboxPool(NUM_SLOTS) as pool:
        interpreter = pool.protection.rsplit("; ", 1)[-1]
        bare_s, sandboxed_s = [], []
        for number in range(rounds + 1):
            bare_time_s = await bare(interpreter)
            begun_s = time.perf_counter()
            outcome = await pool.run(IDLE)
            if outcome.status != "ok":
                raise SystemExit(f"the empty program ended as {outcome}")
            if number:  # the first round warms up
                sandboxed_s.append(time.perf_counter() - begun_s)
                bare_s.append(bare_time_s)
        begun_s = time.perf_counter()
        await asyncio.gather(*(pool.run(IDLE) for _ in range(programs)))
        rate = programs / (time.perf_counter() - begun_s)
        differences_s = [inside - outside for inside, outside in zip(sandboxed_s, bare_s, strict=True)]
        return {
            "protection": pool.protection,
            "bare_ms": 1000 * statistics.median(bare_s),
            "sandboxed_ms": 1000 * statistics.median(sandboxed_s),
            "overhead_ms": 1000 * statistics.median(differences_s),
            "programs_per_s": rate,
            "num_slots": NUM_SLOTS,
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sandbox", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures as one JSON object")
    parser.add_argument("--rounds", type=int, default=50, help="measured rounds, one program each")
    parser.add_argument("--programs", type=int, default=200, help="programs for the rate")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.rounds, arguments.programs))
    result |= measure_judging(arguments.rounds, arguments.programs)
    print(result["protection"])
    print(
        f"start: {result['sandboxed_ms']:.1f} ms, bare {result['bare_ms']:.1f} ms, "
        f"overhead {result['overhead_ms']:.1f} ms (medians)"
    )
    print(f"rate: {result['programs_per_s']:.1f} programs/s with {NUM_SLOTS} slots")
    print(
        f"judgement: {result['judged_ms']:.1f} ms (median), {result['judgements_per_s']:.1f}/s with "
        f"{NUM_SLOTS} at a time"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
