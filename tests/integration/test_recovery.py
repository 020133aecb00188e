"""A machine that cannot be reached any more, on a real cluster over a poor link: a run goes on without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.chaos.machines import shut_off
from bench.chaos.recovery import RECOMMENDED, WORKERS, life, strike
from tests.integration.harness import ROOT
from tests.integration.netns import missing
from tests.thorough import takes_minutes

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=f"not shown: {missing()}"),
]


@takes_minutes
def test_the_prompts_of_a_machine_that_was_cut_off_go_on_elsewhere(tmp_path: Path) -> None:
    words = shut_off([sys.executable, "-m", "tests.integration.test_recovery", str(tmp_path)])
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["replay_buffer"] == [0]  # not on a machine that may be lost
    assert said["leases"] > 0
    assert said["seconds"] is not None
    assert said["noticed"] == "loss"  # no lease had to end first


def main(folder: Path) -> None:
    """Cut off a worker's machine; print what came of it."""
    with life(folder, RECOMMENDED) as one:
        places = {machine: [name for name, _ in one.machines.processes(machine)] for machine in (0, *WORKERS)}
        held = [m for m, names in places.items() if any(name.startswith("ray::DataServ") for name in names)]
        print(json.dumps({**strike(one, "link", WORKERS[0]), "replay_buffer": held}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
