"""Environment variables that an engine's process inherits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo_planes.cluster.scratch import shared_folder
from echo_planes.rollout.vllm.work_counter import COUNTER

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are local folders
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # the warnings at every start concern settings chosen here on purpose
    "OMP_NUM_THREADS": "1",  # an engine on CPUs computes on one
    "TOKENIZERS_PARALLELISM": "false",
}


def staging_parent() -> str | None:
    """Return the memory-backed folder for staged payloads; None: use the folder for temporary files."""
    folder = shared_folder()
    return str(folder) if os.access(folder, os.W_OK) else None


@contextmanager
def engine_environment(on_cpu: bool, num_ranks: int, counter: Path) -> Iterator[None]:
    """Set the variables that the engine's processes inherit, and restore the environment afterwards.

    Args:
        on_cpu: whether the engine computes on the CPU.
        num_ranks: processes of the engine that hold weights.
        counter: file of its `WorkCounter`.
    """
    variables = {
        COUNTER: str(counter),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # All ranks are on this machine. Without these settings even a single rank would listen on the
        # machine's external address.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if on_cpu:
        # Even in eager mode vLLM compiles a small sampling helper with g++ at the first request: 20-30 s
        # for a gain too small to measure.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if num_ranks > 1:
        # vLLM would bind each rank to its own NUMA node, and would not start with fewer nodes than ranks.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
