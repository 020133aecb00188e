"""Bytes that a process and its children read and write, as a sign of progress."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from echo_planes.cluster.process import io_mib

WRITE = """
import os, sys
with open(sys.argv[1], "wb") as file:
    file.write(bytes(32 << 20))
    file.flush()
    os.fsync(file.fileno())
print("written", flush=True)
sys.stdin.read()
"""


def test_a_childs_bytes_count_unless_it_is_left_out(tmp_path: Path) -> None:
    before = io_mib(None)
    command = [sys.executable, "-c", WRITE, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        if psutil.Process(child.pid).io_counters().write_bytes < 32 << 20:
            child.communicate("")
            pytest.skip("the system counts no bytes written to this file system")
        assert io_mib(None) >= before + 32
        assert io_mib(child.pid) < before + 32
        child.communicate("")
