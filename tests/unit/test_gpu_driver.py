"""The GPU's driver against torch's CUDA: what is told, read from a stand-in for NVML, and who tells it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo_planes.cluster import gpu_driver
from echo_planes.cluster.gpu_driver import driver_problem
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.schema import SamplingConfig
from echo_planes.errors import ClusterError, EngineStartError

torch = pytest.importorskip("torch")

NVML = """
#include <cstring>
extern "C" int nvmlInit_v2() { return INIT; }
extern "C" int nvmlShutdown() { return 0; }
extern "C" int nvmlSystemGetDriverVersion(char* text, unsigned length) {
    strncpy(text, "570.86.15", length);
    return READ;
}
"""


@pytest.mark.parametrize(
    ("driver", "cuda"), [("570.86.15", "13.0"), ("579.99", "13.1"), ("470.57.02", "12.8"), ("418.39", "11.8")]
)
def test_an_old_driver_is_told_in_one_line_with_both_versions(driver: str, cuda: str) -> None:
    problem = driver_problem(driver, cuda)
    assert problem is not None
    assert "\n" not in problem
    assert driver in problem
    assert f"CUDA {cuda}, which needs {gpu_driver.OLDEST_DRIVER[int(cuda[:2])]} or later" in problem


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("580.65.06", "13.0"),
        ("595.10", "13.2"),
        ("535.274.02", "12.8"),
        ("580.65.06", "99.0"),
        ("unknown", "13.0"),
        ("570.86.15", ""),
    ],
)
def test_a_driver_that_is_new_enough_or_unknown_is_not_judged(driver: str, cuda: str) -> None:
    assert driver_problem(driver, cuda) is None


@pytest.mark.parametrize(
    ("init", "read", "found"), [(0, 0, "570.86.15"), (9, 0, ""), (0, 1, "")], ids=["answers", "no", "half"]
)
def test_the_version_is_nvmls(tmp_path: Path, init: int, read: int, found: str) -> None:
    (tmp_path / "nvml.cpp").write_text(NVML)
    built = ["g++", "-shared", "-fPIC", f"-DINIT={init}", f"-DREAD={read}", "-o", "libnvidia-ml.so.1"]
    subprocess.run([*built, "nvml.cpp"], cwd=tmp_path, check=True)
    code = "from echo_planes.cluster.gpu_driver import installed_driver; print(installed_driver())"
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == found


@pytest.fixture
def _old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with torch for CUDA 13 and a driver for 12, so that torch finds no GPU."""
    monkeypatch.setattr(gpu_driver, "installed_driver", lambda: "570.86.15")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("_old_driver")
def test_a_learner_says_that_the_driver_is_too_old() -> None:
    from echo_planes.learning.deepspeed_engine import check_gpu

    with pytest.raises(ClusterError, match=r"driver 570\.86\.15 is too old for torch's CUDA 13\.0"):
        check_gpu(1.0)


@pytest.mark.usefixtures("_old_driver")
def test_a_worker_says_it_before_its_engine_is_built_and_is_not_started_again(tmp_path: Path) -> None:
    from echo_planes.rollout.vllm.engine import VllmEngine

    (tmp_path / "config.json").write_text("{}")
    engine = VllmEngine(EngineConfig(), SamplingConfig(), tmp_path, max_model_len=16, seed=0)
    with pytest.raises(EngineStartError, match=r"driver 570\.86\.15 is too old .* 580 or later") as raised:
        asyncio.run(engine.start())
    assert raised.value.is_final
    asyncio.run(engine.close())


@pytest.mark.usefixtures("_old_driver")
def test_a_driver_with_which_torch_computes_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's compatibility package for older drivers: NVML gives the old version all the same."""
    assert gpu_driver.driver_problem_here()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_driver.driver_problem_here() is None


def test_without_cuda_in_torch_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_driver, "installed_driver", lambda: "570.86.15")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_driver.driver_problem_here() is None
