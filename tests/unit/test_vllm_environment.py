"""The environment that an engine's processes inherit, and their actor must not keep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echo_planes.rollout.vllm.environment import engine_environment

LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_an_engine_keeps_to_loopback_however_many_ranks_it_has(
    num_ranks: int, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    before = dict(os.environ)
    with engine_environment(on_cpu, num_ranks, Path("/dev/shm/counter")):
        assert {name: os.environ[name] for name in LOOPBACK} == LOOPBACK
    assert dict(os.environ) == before
