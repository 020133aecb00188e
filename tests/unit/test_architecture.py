"""The picture in the README, kept: who may import whom, and what may be imported where."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "echo_planes"
LIGHT = (
    "config",
    "cli",
    "types",
    "errors",
    "clock",
    "events",
    "controller",
    "planes",
    "runner",
    "preflight",
    "checkpoint",
)
PLANES = ("data", "learning", "rollout")
BASE = {"types", "errors", "clock", "metrics", "config", "settings", "files"}
BASE |= {"process", "samples", "claims", "scratch"}
# What each part may import of the package, besides itself.
ALLOWED = {
    "weights": BASE,
    "data": BASE | {"weights"},
    "learning": BASE | {"weights"},
    "rollout": BASE | {"weights"},
    "events": BASE,
    "controller": BASE | {"events", "learning"},  # of it the guard, which is pure
    "planes": BASE,
    "runner": BASE | {"controller", "evaluation", "events", "planes"},
    "evaluation": BASE,
    "cluster": BASE | {"preflight"},
}
HEAVY = {
    "ray": lambda path: path.name in ("cluster.py", "launch.py", "actor.py", "ray_nodes.py"),
    "deepspeed": lambda path: path.name == "deepspeed_engine.py",
    "vllm": lambda path: path.name.startswith("vllm_"),
}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a module, flat."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names a module imports, wherever in it."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def part_of(name: str) -> str:
    """echo_planes.data.buffer -> data"""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 else ""


def test_direction_of_imports() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part not in ALLOWED:
            continue
        for name in imports(path):
            target = part_of(name)
            known = (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").is_file()
            if name.startswith("echo_planes.") and known and target not in ALLOWED[part] | {part}:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_planes_never_import_one_another() -> None:
    for plane in PLANES:
        others = {p for p in PLANES if p != plane}
        for path in (PACKAGE / plane).rglob("*.py"):
            assert not {part_of(n) for n in imports(path) if n.startswith("echo_planes.")} & others, path


def test_heavy_dependencies_stay_in_their_files() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]:
        for package, allowed in HEAVY.items():
            used = {n for n in imports(path) if n == package or n.startswith(f"{package}.")}
            assert not used or allowed(path), f"{path.relative_to(ROOT)} imports {sorted(used)}"


def test_tasks_import_only_the_public_interface() -> None:
    public = {
        "echo_planes.data.chat",
        "echo_planes.data.datasets",
        "echo_planes.data.environment",
        "echo_planes.data.sandbox",
        "echo_planes.data.task",
        "echo_planes.types",
        "echo_planes.errors",
    }
    for path in (ROOT / "tasks").rglob("*.py"):
        for name in imports(path):
            if name.startswith("echo_planes"):
                assert any(name == p or name.startswith(f"{p}.") for p in public), f"{path}: {name}"


def heavy_after(code: str) -> str:
    """Which of the heavy four a process has imported after `code`."""
    code = f"import sys\n{code}\nprint(sorted({{'torch', 'ray', 'vllm', 'deepspeed'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_settings_and_cores_import_without_the_heavy_four() -> None:
    modules = ", ".join(f"echo_planes.{name}" for name in LIGHT)
    assert heavy_after(f"import {modules}") == "[]"


def test_a_run_begins_without_the_seconds_that_torch_takes() -> None:
    """The driver, with the task's first prompts made; the data plane's process imports less."""
    code = (
        "from echo_planes import cluster, job, launch\n"
        "from echo_planes.cli import load_config\n"
        "from echo_planes.data.registry import probe_task\n"
        "probe_task(load_config([]))"
    )
    assert heavy_after(code) == "['ray']"


def test_modules_and_functions_stay_small() -> None:
    lengths = {path: path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    assert not [path.name for path, length in lengths.items() if length > 600]
    assert sum(length > 400 for length in lengths.values()) <= len(lengths) / 10
    for path in lengths:
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 80, f"{path.name}:{node.name} has {length} lines"
