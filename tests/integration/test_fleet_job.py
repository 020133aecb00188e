"""A job on Ray's real autoscaler with machines of two SKUs: the cheap one first, the next when it runs out.

Real vLLM workers on nodes of their own, in namespaces of their own (tests/integration/fake_cluster.py). A
spot machine is taken in mid-run, with notice; the learner gets slower, and what is then too much is let go.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import fake_cluster
from tests.integration.harness import (
    ROOT,
    SLOW_PROGRAM,
    events,
    metrics,
    program,
    summary,
)
from tests.thorough import takes_minutes

pytestmark = [
    pytest.mark.integration,
    takes_minutes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(fake_cluster.missing()), reason=f"no private cluster: {fake_cluster.missing()}"),
]

STEPS = 36
CHEAP, DEAR = "cpu-a/spot", "cpu-b/on_demand"
NODES = (f"{CHEAP}=2,sku=cpu-a", f"{DEAR}=1,sku=cpu-b")  # one more of the cheap one than the run may have
NOTICE_S = 15.0
CLUSTER = ("tests.integration.fake_cluster", *(w for n in NODES for w in ("--nodes", n)), "--head-cpus", "1")
INSIDE = ("--", sys.executable, "-m", *SLOW_PROGRAM)


def fleet_words() -> list[str]:
    """Two kinds; the run begins with one worker of the cheap one."""
    # As slow as larger models: at most 16 groups of 8 answers in 2 s, on whatever machine.
    slow = {"max_groups": 16, "slowdown_s": 2.0}
    same = {"engine": {"max_num_seqs": 128}, "resources": {"CPU": 0.5}, **slow}
    cheap = {"sku": "cpu-a", "market": "spot", "usd_per_hour": 0.02, "count": 1, "max_count": 1}
    dear = {"sku": "cpu-b", "usd_per_hour": 0.08, "count": 0, "max_count": 1}
    kinds = [{**same, **kind, "labels": {"sku": kind["sku"]}} for kind in (cheap, dear)]
    return [f"fleet.workers={json.dumps(kinds)}", "fleet.scale=ray", "fleet.tick_s=1", "fleet.sustain_s=2"]


def placed(run_dir: Path) -> list[tuple[str, str, str]]:
    """Worker, instance type and node of every worker that was given a machine, in order."""
    texts = [event["text"].split() for event in events(run_dir, "machine")]
    return [(worker, instance_type, node) for worker, instance_type, node in texts]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("fleet")
    folder = base / "run"
    words = [
        *fleet_words(),
        f"run.steps={STEPS}",
        "sampling.prompts_per_step=16",
        "learner.resources={CPU: 0.5}",
    ]
    with program(base / "work", folder, *words, command=(*CLUSTER, *INSIDE)) as running:
        running.wait_until(
            lambda: len({instance_type for _, instance_type, _ in placed(folder)}) == 2, "both SKUs"
        )
        running.wait_until(lambda: "worker w1 (cpu-b) ... ready" in running.stdout, "the second worker")
        _, _, node = placed(folder)[0]
        words = [sys.executable, "-m", "tests.integration.fake_cluster", "preempt", node, str(NOTICE_S)]
        told = subprocess.run(
            [*fake_cluster.enter(running.process.pid), *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        # Drained and without a worker, it may have ended before its time was up.
        assert told.returncode == 0 or "no machine" in told.stderr, told.stderr
        assert running.wait() == 0, running.tail()
        assert running.left_behind() == []
    return folder


def test_the_cheap_sku_is_taken_first_and_the_next_when_its_quota_is_used_up(run_dir: Path) -> None:
    instance_types = [instance_type for _, instance_type, _ in placed(run_dir)]
    assert instance_types[:2] == [CHEAP, DEAR]
    nodes = [node for _, _, node in placed(run_dir)]
    assert len(set(nodes)) == len(nodes)  # a node of its own for each


def test_a_preempted_worker_hands_over_and_another_comes(run_dir: Path) -> None:
    first = placed(run_dir)[0][0]
    (left,) = [event for event in events(run_dir, "worker left") if event["worker"] == first]
    (leaves,) = [event for event in events(run_dir, "worker leaves") if event["worker"] == first]
    assert "its machine goes" in leaves["text"]
    assert left["time_s"] - leaves["time_s"] < NOTICE_S
    came = [event for event in events(run_dir, "machine") if event["time_s"] > leaves["time_s"]]
    print(f"left after {left['time_s'] - leaves['time_s']:.2f} s; then came {[e['text'][:16] for e in came]}")
    assert CHEAP in came[0]["text"]


def test_what_is_too_much_is_let_go(run_dir: Path) -> None:
    reasons = [event["text"] for event in events(run_dir, "worker leaves")]
    released = [text for text in reasons if "its machine goes" not in text]
    print(released)
    assert released


def test_the_reward_keeps_rising_and_nothing_is_lost(run_dir: Path) -> None:
    told = summary(run_dir)
    assert told["status"] == "done"
    assert told["steps"] == STEPS
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == told["digest_mismatches"] == 0
    rewards = [row["reward_mean"] for row in metrics(run_dir)]
    thirds = [sum(part) / len(part) for part in (rewards[:10], rewards[13:23], rewards[-10:])]
    print(f"mean reward of the first, middle and last ten steps: {[round(r, 3) for r in thirds]}")
    assert thirds == sorted(thirds)
    assert told["eval_last"] > told["eval_first"]
    used = {row["sku"] for row in told["workers"] if row["trajectories"]}
    assert used == {"cpu-a", "cpu-b"}
