"""NVIDIA driver of this machine, compared with the CUDA that torch is built for."""

from __future__ import annotations

import ctypes

# By CUDA's major version: the first branch of drivers that runs programs built for it.
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_NVML = "libnvidia-ml.so.1"  # comes with the driver
_TEXT_BYTES = 80  # of a version, at most


def driver_problem(driver: str, cuda: str) -> str | None:
    """Return why a driver cannot run programs built for a CUDA, in one line; None: it can, or is unknown.

    Args:
        driver: version of the driver, such as "570.86.15".
        cuda: version of CUDA, such as "13.0".
    """
    branch, major = driver.partition(".")[0], cuda.partition(".")[0]
    if not (branch.isdecimal() and major.isdecimal()):
        return None
    oldest = OLDEST_DRIVER.get(int(major))
    if oldest is None or int(branch) >= oldest:
        return None
    return (
        f"the NVIDIA driver {driver} is too old for torch's CUDA {cuda}, which needs {oldest} or later; "
        "update it, or choose another machine image (docs/gpus.md)"
    )


def driver_problem_here() -> str | None:
    """Return why torch cannot compute on this machine's GPUs, if the driver is the reason."""
    import torch

    driver, cuda = installed_driver(), torch.version.cuda
    problem = driver_problem(driver, cuda) if driver and cuda else None
    # NVIDIA's compatibility package lets torch compute with an older driver all the same.
    return problem if problem and not torch.cuda.is_available() else None


def installed_driver() -> str:
    """Return the version of the driver as NVML gives it; "": there is no driver, or it does not answer."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return ""
    if nvml.nvmlInit_v2():
        return ""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    failed = nvml.nvmlSystemGetDriverVersion(text, _TEXT_BYTES)
    nvml.nvmlShutdown()
    return "" if failed else text.value.decode()
