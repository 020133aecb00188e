"""Running a module's tests with a change in it: in a forked process, from memory. No file is touched."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "echo_planes"
ANEW = ("tests", "tasks", "examples", "conftest")  # imported by every trial itself
Outcome = Literal["killed", "survived", "timed out"]

# Limits of a trial, beside the unchanged module's time: work that does not end uses the processor's time,
# which is the same on a busy machine; what waits for ever uses none, and has a limit by the clock.
TIMES_CPU = 5.0
LEAST_CPU_S = 6.0
TIMES_WALL = 8.0
LEAST_WALL_S = 30.0
MOST_DATA_BYTES = 4 << 30
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a run of the tests."""

    outcome: Outcome
    by: str  # the test that failed, where one did: its file, or file::name
    wall_s: float
    cpu_s: float


class _FirstFailure:
    """A plugin of pytest that writes down which test failed, or which file could not be imported."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid.partition("[")[0])


class _Loader(importlib.machinery.SourceFileLoader):
    """A module from a text; its bytecode is neither read nor written."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        return self._source.encode() if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError("the text is in memory")


class _Finder(MetaPathFinder):
    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name, self._path, self._source = name, str(path), source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Loader(fullname, self._path, self._source)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


class Bench:
    """The tests of one module, ready to run with a change.

    The first run tells how long they take, and which modules they import: those that the change cannot reach
    are imported once, here, and every later run has them.

    Args:
        module: its path below the root.
        tests: their paths below the root, run in this order.

    Raises:
        RuntimeError: the tests fail without a change.
    """

    def __init__(self, module: str, tests: Sequence[str]) -> None:
        self._path = ROOT / module
        self._name = module.removesuffix(".py").replace("/", ".")
        self._anew = reached_by(self._name)
        self._tests = list(tests)
        self._cpu_s, self._wall_s = 300.0, 600.0
        source = self._path.read_text(encoding="utf-8")
        with tempfile.NamedTemporaryFile(prefix="echo_planes_mutation_") as told:
            self._passes(self._run(source, told.name))
            for name in json.loads(Path(told.name).read_text()):
                if not self._is_anew(name):
                    with contextlib.suppress(Exception):  # then the tests import it themselves
                        importlib.import_module(name)
        again = self._run(source)
        self._passes(again)
        self._cpu_s = LEAST_CPU_S + TIMES_CPU * again.cpu_s
        self._wall_s = LEAST_WALL_S + TIMES_WALL * again.wall_s

    def run(self, source: str) -> Trial:
        """Run the tests with another source of the module."""
        return self._run(source)

    def _passes(self, trial: Trial) -> None:
        if trial.outcome != "survived":
            raise RuntimeError(f"{self._path}: {trial.by or self._tests} fails without a change")

    def _is_anew(self, name: str) -> bool:
        return name in self._anew or name.split(".")[0] in ANEW or name.startswith(f"{PACKAGE}.tasks")

    def _run(self, source: str, tell: str = "") -> Trial:
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="echo_planes_mutation_") as name:
            folder = Path(name)
            pid = os.fork()
            if pid == 0:
                status = 70
                try:
                    status = self._in_child(source, tell, folder)
                finally:
                    os._exit(status)
            status, usage, ended = _wait(pid, begun_s + self._wall_s)
            failed = folder / "failed"
            by = failed.read_text() if failed.exists() else ""
        times = (time.monotonic() - begun_s, usage.ru_utime + usage.ru_stime)
        if not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
            return Trial("timed out", "", *times)
        return Trial("survived" if status == 0 else "killed", by, *times)

    def _in_child(self, source: str, tell: str, folder: Path) -> int:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        limit_s = int(self._cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA_BYTES, MOST_DATA_BYTES))
        os.chdir(ROOT)
        for name in [name for name in sys.modules if self._is_anew(name)]:
            del sys.modules[name]
            holder, _, last = name.rpartition(".")
            if holder in sys.modules and hasattr(sys.modules[holder], last):
                delattr(sys.modules[holder], last)
        sys.meta_path.insert(0, _Finder(self._name, self._path, source))
        import pytest  # in the child only: its plugins look at what is imported when they begin

        switches = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
        plugins = [_FirstFailure(folder / "failed")]
        status = int(pytest.main([*switches, "--basetemp", str(folder / "t"), *self._tests], plugins))
        if tell:
            Path(tell).write_text(json.dumps([name for name in sys.modules if name != "__main__"]))
        return status


def _wait(pid: int, until_s: float) -> tuple[int, resource.struct_rusage, bool]:
    """The end of a child, and of what it started: its status, its times, and whether it came by itself."""
    ended = True
    found, status, usage = os.wait4(pid, os.WNOHANG)
    while not found:
        if ended and time.monotonic() > until_s:
            ended = False
            os.killpg(pid, signal.SIGKILL)
        time.sleep(POLL_S)
        found, status, usage = os.wait4(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return status, usage, ended


def reached_by(name: str) -> set[str]:
    """A module of the package, and those that import it, directly or through others."""
    reached, fresh = {name}, {name}
    while fresh:
        fresh = {one for one, imported in _imports().items() if imported & fresh} - reached
        reached |= fresh
    return reached


@cache
def _imports() -> dict[str, set[str]]:
    """Map each module of the package to all names that it imports, modules or not."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names = found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found
