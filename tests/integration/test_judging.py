"""Answers judged in the real sandbox, behind both walls: what solves nothing earns nothing."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_planes.errors import ConfigError, DataError
from echo_planes.sandbox import pool
from echo_planes.sandbox.model import Limits, Tier
from echo_planes.tasks.code.adapter import CodeTask
from echo_planes.tasks.code.judging import Verdict
from echo_planes.tasks.code.options import CodeOptions
from echo_planes.tasks.code.runner import ProgramRunner
from echo_planes.testing.fakes import FakeTokenizer
from tests.integration.test_sandbox import SYSTEM_PYTHON, missing
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
def tier(request: pytest.FixtureRequest) -> Iterator[Tier]:
    if missing(request.param):
        pytest.skip(f"{request.param}: not shown: {missing(request.param)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "TIERS", (request.param,))
        yield request.param


@pytest.fixture(scope="module")
def runner(tier: Tier) -> Iterator[ProgramRunner]:
    made = ProgramRunner(2, Limits(wall_s=4.0, cpu_s=2.0, memory_bytes=128 << 20, output_bytes=1 << 16))
    yield made
    made.close()


@pytest.fixture(scope="module")
def with_package() -> Iterator[str]:
    """A Python whose environment has a package of ours, where the programs' user can read it."""
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"not shown: there is no {SYSTEM_PYTHON}")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", f"{folder}/env"], check=True)
        (site,) = Path(folder).glob("env/lib/python*/site-packages")
        (site / "tripling.py").write_text("def triple(x): return 3 * x\n")
        yield f"{folder}/env/bin/python"


def mbpp(folder: Path, num_with_package: int) -> str:
    """Ten problems, of which some have tests that import `tripling`."""
    rows = []
    for number in range(10):
        is_plain = number >= num_with_package
        row = {"text": f"Add {number}.", "code": f"def add(x): return x + {number}"}
        row["test_setup_code"] = "" if is_plain else "from tripling import triple"
        rows.append(row | {"test_list": [f"assert add({'3' if is_plain else 'triple(1)'}) == {3 + number}"]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def code_task(data: str, **options: object) -> CodeTask:
    found = {"dataset": "mbpp", "data": data, "template": "plain", **options}
    return CodeTask(CodeOptions.model_validate(found), FakeTokenizer(), 0)


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


def test_solutions_of_the_authors_that_fail_their_tests_are_told(tier: Tier, tmp_path: Path) -> None:
    assert code_task(mbpp(tmp_path, 0)).preflight().count("solutions") == 0
    told = code_task(mbpp(tmp_path, 1)).preflight()
    assert "the authors' solutions of 1 of 10 problems fail" in told
    assert "No module named 'tripling'" in told
    with pytest.raises(DataError, match=r"3 of 10 problems fail .* set task\.interpreter"):
        code_task(mbpp(tmp_path, 3)).preflight()


def test_an_interpreter_of_ones_own_has_its_packages(tier: Tier, with_package: str, tmp_path: Path) -> None:
    told = code_task(mbpp(tmp_path, 3), interpreter=with_package).preflight()
    assert "solutions" not in told
    assert with_package in told
    uses = "from tripling import triple\ndef f(x): return triple(x) // 3"
    for interpreter, passed in ((with_package, 1), (None, 0)):
        runner = ProgramRunner(1, Limits(), interpreter)
        found = runner.judge([uses], "assert f(7) == 7", "", "def f(x): return x")
        runner.close()
        assert found[uses].passed == passed


@pytest.mark.parametrize("path", ["/nowhere/python", "/usr/bin/false", "/usr/bin/true"])
def test_an_interpreter_that_is_none_is_one_clear_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"interpreter {path} does not answer as a Python"):
        code_task(mbpp(tmp_path, 0), interpreter=path).preflight()
