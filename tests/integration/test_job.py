"""The wheel, installed where there is no checkout, run as a job on a Ray cluster from an empty folder."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.harness import summary, trained, wait_until

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run([*pip, *build], check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    target = folder / "site"
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=120
    )
    return target


def environment(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def test_the_wheel_has_one_top_level_name(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"echo_planes"}


def test_the_wheel_finds_its_tasks_and_settings(installed: Path, tmp_path: Path) -> None:
    code = "import echo_planes, echo_planes.tasks.math.adapter as a; print(echo_planes.__file__, a.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert all(path.startswith(str(installed)) for path in where.stdout.split())
    printed = subprocess.run(
        [sys.executable, "-m", "echo_planes.run", "--print", "fleet=single"],
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "cpu-large" in printed.stdout


def test_the_wheel_finds_its_templates(installed: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "echo_planes.reporting.report", str(tmp_path)],
        cwd=tmp_path,
        env=environment(installed),
        check=True,
        timeout=60,
    )
    assert "<style>" in (tmp_path / "report.html").read_text()


@contextmanager
def head(env: dict[str, str], log: Path) -> Iterator[str]:
    """A Ray head with job submission, behind a token; yields its dashboard's address."""
    ports = [free_port() for _ in range(3)]
    command = [
        *("ray", "start", "--head", "--block", "--num-cpus", "2", "--disable-usage-stats"),
        *("--port", str(ports[0]), "--dashboard-host", "127.0.0.1", "--dashboard-port", str(ports[1])),
        # Jobs go through it, and its usual port is another cluster's where one runs on this machine.
        *("--dashboard-agent-listen-port", str(ports[2])),
    ]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink)
        try:
            wait_until(lambda: is_open(ports[1]), 90.0, "the Ray dashboard")
            yield f"http://127.0.0.1:{ports[1]}"
        finally:
            process.terminate()
            process.wait(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_job_submitted_from_an_empty_folder_plays_hands_over_several_turns(
    installed: Path, tmp_path: Path
) -> None:
    env = {
        **environment(installed),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    run_dir = tmp_path / "run"
    empty = tmp_path / "empty"
    empty.mkdir()
    small = "run.steps=3 sampling.prompts_per_step=4 eval.num_prompts=4 eval.samples_per_prompt=1"
    entry = f"{sys.executable} -m echo_planes.run task=poker fleet=single {small} run.dir={run_dir}"

    def submit(address: str) -> subprocess.CompletedProcess[str] | None:
        done = subprocess.run(
            ["ray", "job", "submit", "--address", address, "--", *entry.split()],
            cwd=empty,
            env=env,
            capture_output=True,
            text=True,
            timeout=400,
        )
        # The head's agent may start some seconds after its dashboard: nothing was submitted then.
        return None if "No available agent to submit job" in done.stdout + done.stderr else done

    with head(env, tmp_path / "head.log") as address:
        done = wait_until(lambda: submit(address), 90.0, "the agent of the Ray head")
    assert done is not None
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "succeeded" in done.stdout + done.stderr
    told = summary(run_dir)
    assert (told["task"], told["status"], told["steps"]) == ("poker", "done", 3)
    assert told["digest_mismatches"] == told["lost_trajectories"] == told["reward_error"] == 0
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    rows = trained(run_dir)
    assert max(row["num_turns"] for row in rows) > 1
    for group in {row["group_id"] for row in rows}:
        assert len({row["prompt_text"] for row in rows if row["group_id"] == group}) == 1
    for row in rows:
        assert -5 <= row["reward"] <= 5  # stacks of five big blinds, heads-up
        assert not all(row["response_mask"]) or row["num_turns"] == 1
        assert all(p == 0.0 for p, own in zip(row["logprobs"], row["response_mask"], strict=True) if not own)
