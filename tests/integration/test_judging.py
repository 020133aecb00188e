"""Answers judged in the real sandbox, behind both walls: what solves nothing earns nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from echo_planes.sandbox import pool
from echo_planes.sandbox.model import Limits, Tier
from echo_planes.tasks.code.judging import Verdict
from echo_planes.tasks.code.runner import ProgramRunner
from tests.integration.test_sandbox import missing
from tests.unit.code_attacks import (
    ATTACKS,
    HELPED_ATTACK,
    HELPED_HEAD,
    HELPED_SOLUTION,
    HELPED_TESTS,
    SOLUTION,
    TESTS,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LOOKS_AROUND = """
import glob, os
def f(x):
    for path in glob.glob("/tmp/**", recursive=True) + glob.glob("/proc/*/cwd/*") + glob.glob("../*/*"):
        try:
            if str(4337654 * 2 + 1) in open(path).read(): return 4337654 * 2 + 1
        except OSError: pass
    return 7
"""
AT_A_LIMIT = {
    "def f(x):\n    while True: pass": "timeout",
    "import time\ndef f(x): time.sleep(99)": "timeout",
    "def f(x): return bytes(b'x') * (1 << 30)": "memory",
    "def f(x): return [[]] * (1 << 23)": "",  # of the answer's memory, the judge's or the channel's room
    "import os\ndef f(x):\n    while True: os.write(2, b'x' * 65536)": "output",
}


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def runner(request: pytest.FixtureRequest) -> Iterator[ProgramRunner]:
    tier: Tier = request.param
    if missing(tier):
        pytest.skip(f"{tier}: not shown: {missing(tier)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "TIERS", (tier,))
        made = ProgramRunner(2, Limits(wall_s=4.0, cpu_s=2.0, memory_bytes=128 << 20, output_bytes=1 << 16))
        yield made
        made.close()


def test_what_solves_nothing_passes_nothing_and_what_solves_it_passes(runner: ProgramRunner) -> None:
    codes = {**ATTACKS, "looks around": LOOKS_AROUND, "the authors' own": SOLUTION}
    found = runner.judge(list(codes.values()), TESTS, "", SOLUTION)
    assert found.pop(SOLUTION) == Verdict(3, 3, "ok")
    assert {name: found[code] for name, code in codes.items() if code in found and found[code].passed} == {}
    found = runner.judge([HELPED_ATTACK, HELPED_SOLUTION], HELPED_TESTS, HELPED_HEAD, HELPED_SOLUTION)
    assert [found[code].passed for code in (HELPED_ATTACK, HELPED_SOLUTION)] == [0, 2]


def test_an_answer_at_a_limit_has_passed_nothing_and_the_next_is_judged(runner: ProgramRunner) -> None:
    begins_well = (
        "\nfirst = f\ndef f(x, seen=[]):\n    seen.append(x)\n    return x if len(seen) == 1 else first(x)"
    )
    tests = "assert f(1) == 1\nassert f(2) == 2\nassert f(3) == 3"
    codes = {code + begins_well: status for code, status in AT_A_LIMIT.items()}
    found = runner.judge(list(codes), tests, "", SOLUTION)
    for code, status in codes.items():
        if status:
            assert (found[code].passed, found[code].total, found[code].status) == (0, 3, status)
        else:
            assert found[code].passed <= 1
    assert runner.judge([SOLUTION], TESTS, "", SOLUTION)[SOLUTION].passed == 3
