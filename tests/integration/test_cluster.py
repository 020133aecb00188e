"""A private Ray cluster where Ray gives up on its own processes: real Ray, with a clock that runs ahead."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_planes.config.schema import Config
from echo_planes.errors import RunError
from echo_planes.loop.loading import load_config
from tests.integration.harness import told_by
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GRANTED_S = 30.0


def told(failures: int) -> dict[str, Any]:
    """Run `main` in a process of its own; return what it prints."""
    said: dict[str, Any] = told_by("tests.integration.test_cluster", str(failures))
    return said


def test_a_start_that_took_too_long_is_made_again_and_leaves_nothing_behind() -> None:
    said = told(failures=1)
    assert said["error"] == ""
    assert said["starts"] == 2
    assert said["cpus"] >= 1
    assert said["inside"].count("gcs_server") == 1
    assert said["after"] == []


@takes_minutes
def test_a_machine_that_is_always_too_busy_is_one_line() -> None:
    said = told(failures=99)
    assert said["starts"] == 3
    assert "not up within 30 s, 3 times: this machine is too busy" in said["error"]
    assert "\n" not in said["error"]
    assert said["after"] == []


def test_logs_that_find_no_room_do_not_hide_why_the_session_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echo_planes.cluster import session as cluster

    @contextmanager
    def joined(config: Config, ray_folder: Path) -> Iterator[Config]:
        logs = ray_folder / "session_1" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.out").write_text("ended")
        yield config

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cluster, "_joined", joined)
    monkeypatch.setattr(shutil, "copytree", no_room)
    with (
        pytest.raises(RunError, match="no checkpoint") as caught,
        cluster.ray_session(load_config([]), tmp_path / "ray_logs"),
    ):
        raise RunError("no checkpoint")
    assert caught.value.__notes__ == [f"Ray's logs could not be copied to {tmp_path / 'ray_logs'}"]


def main(failures: int) -> None:
    """Open a session while the first `failures` starts of Ray find their time over; print what came of it."""
    from echo_planes.cluster.process import keep_ray_private
    from echo_planes.errors import ClusterError
    from echo_planes.loop.loading import load_config

    keep_ray_private()
    import ray._private.node as node
    import ray._private.services as services

    from echo_planes.cluster import session as cluster

    starts = 0
    find_node = services.get_node

    class RunsAhead:
        """The time module, as Ray sees it."""

        now_s = 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

        def monotonic(self) -> float:
            self.now_s += 2 * GRANTED_S
            return self.now_s

    def not_found(*arguments: Any) -> Any:
        if starts <= failures:
            raise RuntimeError("no such node yet")
        return find_node(*arguments)

    class Counted(node.Node):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal starts
            starts += 1
            super().__init__(*arguments, **options)

    node.time = RunsAhead()
    node.Node = Counted
    services.get_node = not_found
    said: dict[str, Any] = {"error": "", "inside": []}
    try:
        with cluster.ray_session(load_config(["fleet=single"])):
            said["inside"] = [one.name() for one in psutil.Process().children(recursive=True)]
            said["cpus"] = cluster.ray.cluster_resources()["CPU"]
    except ClusterError as error:
        said["error"] = str(error)
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
    print(json.dumps({**said, "starts": starts, "after": [one.name() for one in left]}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
