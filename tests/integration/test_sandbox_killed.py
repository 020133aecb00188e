"""A judge of programs is killed with its whole process group, as a slow reward is: nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import wait_until
from tests.integration.leftovers import CONTROL_GROUP, control_groups

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
JUDGE = """
import asyncio
from echo_planes.sandbox.model import Program
from echo_planes.sandbox.pool import SandboxPool
async def main():
    async with SandboxPool(2) as pool:
        print("ready", flush=True)
        await pool.run(Program("while True: pass"))
asyncio.run(main())
"""


def test_control_groups_go_with_the_process_group_that_made_them() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", JUDGE], stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as judge:
        assert judge.stdout is not None
        assert judge.stdout.readline() == "ready\n"
        beginning = f"{CONTROL_GROUP}sandbox-{judge.pid}-"
        made = [name for name in control_groups() if name.startswith(beginning)]
        if not made:
            pytest.skip("no control groups can be made here")
        os.killpg(judge.pid, signal.SIGKILL)
    wait_until(
        lambda: not any(name.startswith(beginning) for name in control_groups()), LIMIT_S, "groups to go"
    )
