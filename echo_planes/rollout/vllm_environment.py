"""What an engine's process inherits of its surroundings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are local folders
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings at every start concern settings made here on purpose
    "OMP_NUM_THREADS": "1",  # an engine on CPUs is given one
    "TOKENIZERS_PARALLELISM": "false",
}


def staging_parent() -> str | None:
    """Memory-backed where there is such a folder; None: the system's folder for temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextmanager
def engine_environment(on_cpu: bool) -> Iterator[None]:
    """What the engine's process inherits and this one must not keep."""
    variables = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if on_cpu:
        # Even in eager mode vLLM compiles a small sampling helper with g++ at the first request: 20-30 s
        # for a gain too small to measure.
        variables["TORCHDYNAMO_DISABLE"] = "1"
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
