"""The fault campaign: no invariant is violated, every seed replays, and every bug that is put in is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest

from bench.campaign import BUG_SEEDS, find, main, run_seeds, show
from bench.mutants import MUTANTS, Mutant
from echo_planes.data.replay.leases import LeaseTable
from echo_planes.sim.campaign import run_seed
from echo_planes.sim.draws import KINDS, draw
from tests.thorough import THOROUGH

PART = 250  # seeds
PARTS = 8 if THOROUGH else 1
REPLAY_EVERY = 20 if THOROUGH else 50
ROOT = Path(__file__).resolve().parents[2]
# Bugs that few seeds find, and the first that does (`first_seed_of_bug` of the campaign's figures). It is
# tried first, so that every bug can be tried; where it finds nothing any more, all seeds are.
FIRST_SEED = {
    "a lease is accepted after its end": 47,
    "the epoch is not checked on stream": 25,
    "a group is trained once too often": 237,
    "a dropped group is not counted": 8,
    "a dropped prompt is forgotten": 8,
    "a starved learner never publishes again": 527,
    "a worker is started again for ever": 28,
    "a leaving worker gets leases": 259,
    "a leaving worker gets installs": 13,
    "the fleet launches above its quota": 2431,
    "a fleet of nobody stays one": 86,
    "the fleet's limits are ignored": 92,
}


@pytest.mark.parametrize("part", range(PARTS))
def test_no_invariant_is_violated_and_every_seed_replays(part: int) -> None:
    tally = run_seeds(range(part * PART, (part + 1) * PART), REPLAY_EVERY)
    assert not tally.bad, "\n".join(show(outcome) for outcome in tally.bad[:3])
    assert not tally.unequal, f"seeds {tally.unequal} came to something else the second time"
    assert tally.replayed >= PART // REPLAY_EVERY
    assert tally.statuses["done"] > PART // 2
    assert tally.statuses["disk full"] > 0


def test_what_is_drawn_covers_what_is_promised() -> None:
    drawn = [draw(seed) for seed in range(300)]
    scenarios = [scenario for scenario, _ in drawn]
    assert {scenario.staleness.max_staleness for scenario in scenarios} == set(range(7))
    assert {scenario.staleness.policy for scenario in scenarios} == {"drop", "wait"}
    assert {scenario.fleet.mode for scenario in scenarios} == {"fixed", "kept", "provisioned"}
    assert len({scenario.staleness.selector for scenario in scenarios}) == 5
    assert any(scenario.staleness.reuse > 1 for scenario in scenarios)
    assert {scenario.sampling.refill for scenario in scenarios} == {"off", "reward", "correct"}
    assert {scenario.sampling.solved for scenario in scenarios} == {0.0, 0.5, 0.9, 1.0}
    assert {sum(o.quota for o in scenario.instance_types) for scenario in scenarios} <= set(range(2, 9))
    assert {scenario.run.steps for scenario in scenarios} <= set(range(6, 21))
    assert {one.kind for _, plan in drawn for one in plan.disturbances} == set(KINDS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_that_is_put_in_is_found(mutant: Mutant) -> None:
    outcome = find(mutant, chain([FIRST_SEED.get(mutant.name, 0)], range(BUG_SEEDS)))
    assert outcome is not None, f"{mutant.name}: not found in {BUG_SEEDS} seeds"
    assert not run_seed(outcome.seed).violation  # without the bug


def test_a_violation_names_the_command_that_replays_it(capsys: pytest.CaptureFixture[str]) -> None:
    bug = MUTANTS[0]
    outcome = find(bug, range(BUG_SEEDS))
    assert outcome is not None
    words = ["--bug", bug.name, "--seed", str(outcome.seed)]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert outcome.violation in said
    assert f'replay: python -m bench.campaign --bug "{bug.name}" --seed {outcome.seed}' in said
    assert outcome.last[-1] in said
    assert main(["--seed", str(outcome.seed)]) == 0


def test_another_process_comes_to_the_same_bytes() -> None:
    code = (
        "from echo_planes.sim.campaign import run_seed\n"
        "print(*(run_seed(seed).checksum for seed in range(20)))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert said[0].split() == [str(run_seed(seed).checksum) for seed in range(20)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_what_an_interrupted_campaign_found_is_kept(how: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    words = ["--seeds", "100000", "--processes", "1", "--json", str(path)]
    campaign = subprocess.Popen(
        [sys.executable, "-m", "bench.campaign", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, so that its pool ends with it
        # Whoever started the tests in the background may have had the signal ignored.
        preexec_fn=lambda: signal.signal(how, signal.SIG_DFL),
    )
    try:
        limit_s = time.monotonic() + 300.0
        while not path.exists():  # until its first line of progress
            assert campaign.poll() is None
            assert time.monotonic() < limit_s
            time.sleep(0.05)
        campaign.send_signal(how)
        said, progress = campaign.communicate(timeout=300.0)
    finally:
        with suppress(ProcessLookupError):  # nobody is left: it ended as it should
            os.killpg(campaign.pid, signal.SIGKILL)
        campaign.wait()
    result = json.loads(path.read_text())
    assert campaign.returncode == 1
    assert not result["complete"]
    assert result["stopped"] == "it was interrupted"
    assert 0 < result["seeds"] < result["seeds_asked"] == 100000
    assert sum(result["ended"].values()) == result["seeds"]
    assert f"NOT COMPLETE: it was interrupted after {result['seeds']:,} of 100,000 seeds" in said
    assert "seeds/s" in progress


def test_a_mutant_whose_line_is_gone_says_so() -> None:
    stale = Mutant("stale", LeaseTable, "close", "no such text", "")
    with pytest.raises(ValueError, match="write it anew"), stale.applied():
        pass


def test_a_mutant_is_taken_out_again() -> None:
    before = LeaseTable.__dict__["close"]
    with MUTANTS[0].applied():
        assert LeaseTable.__dict__["close"] is not before
    assert LeaseTable.__dict__["close"] is before
