"""Environment that an engine's process inherits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from echo_planes.cluster.scratch import shared_folder

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are local folders
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings at every start concern settings made here on purpose
    "OMP_NUM_THREADS": "1",  # an engine on CPUs is given one
    "TOKENIZERS_PARALLELISM": "false",
}


def staging_parent() -> str | None:
    """Memory-backed where there is such a folder; None: the folder for temporary files."""
    folder = shared_folder()
    return str(folder) if os.access(folder, os.W_OK) else None


@contextmanager
def engine_environment(on_cpu: bool, num_ranks: int = 1) -> Iterator[None]:
    """Set the environment that the engine's processes inherit and this one must not keep.

    Args:
        on_cpu: whether the engine computes on the CPU.
        num_ranks: processes of the engine that hold weights.
    """
    variables = {
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # All ranks are on this machine. Without this they listen on its address for others, one alone too.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if on_cpu:
        # Even in eager mode vLLM compiles a small sampling helper with g++ at the first request: 20-30 s
        # for a gain too small to measure.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if num_ranks > 1:
        # vLLM would bind each rank to a NUMA node of its own, and refuse to start where there are fewer.
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
