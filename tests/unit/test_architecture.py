"""The picture in the README, kept: who may import whom, and what may be imported where."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "echo_planes"
LIGHT = (
    "config.schema",
    "config.files",
    "types",
    "errors",
    "cluster.clock",
    "cluster.placement",
    "loop.loading",
    "loop.events",
    "loop.controller",
    "loop.planes",
    "loop.runner",
    "loop.preflight",
    "loop.checkpoint",
)
PLANES = ("data", "learning", "rollout")
BASE = ("types", "errors", "config", "cluster")
# The rooms, and what each may import of the package besides itself.
ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "types": (),
    "config": ("errors",),
    "cluster": ("types", "errors", "config"),
    "sandbox": BASE,
    "weights": BASE,
    "data": BASE,
    "fleet": (*BASE, "weights"),
    "learning": (*BASE, "weights"),
    "rollout": (*BASE, "weights"),
    "reporting": (*BASE, "weights", "data", "fleet"),
    "loop": (*BASE, "weights", "data", "fleet", "learning", "rollout", "reporting"),
    "testing": (*BASE, "data", "fleet", "rollout", "reporting", "loop"),
    "sim": (*BASE, "weights", "data", "fleet", "reporting", "loop", "testing"),
    "tasks": (),  # `test_tasks_import_only_the_public_interface`
}
COMMANDS = ("run", "plan", "simulate", "view", "task", "sparsity")  # which put rooms together
# Rooms within rooms, lowest first: each may import those before it. Other modules stand for themselves.
FLOORS: dict[str, tuple[str, ...]] = {
    "weights": (
        "digest",
        "sparse_adapter",
        "lineage",
        "tensor_files",
        "wire",
        "codec",
        "receiver",
        "publisher",
        "shards",
        "chain",
        "store",
        "node",
        "link",
    ),
    "data": ("claims", "store", "tasks", "replay", "open", "service", "actor"),
}
HEAVY = {
    "ray": lambda path: path.name in ("session.py", "launch.py", "actor.py", "ray_nodes.py"),
    "deepspeed": lambda path: path.name == "deepspeed_engine.py",
    "vllm": lambda path: path.parent == PACKAGE / "rollout" / "vllm",
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


def module_of(path: Path) -> str:
    """.../echo_planes/data/service.py -> echo_planes.data.service"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def arrows() -> dict[str, set[str]]:
    """Of every module of the package the modules of the package that it imports."""
    modules = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = imports(path) & modules.keys()
        # `from package import module` means the module, not what the package's own file does
        found[module] = {n for n in names if not any(other.startswith(f"{n}.") for other in names)} - {module}
    return found


def room_of(module: str) -> str:
    """echo_planes.data.replay.buffer -> data; echo_planes.weights.__main__ is a command."""
    pieces = module.split(".")
    return "" if len(pieces) < 2 or pieces[-1] == "__main__" else pieces[1]


def test_every_module_is_in_a_room() -> None:
    assert {room_of(module) for module in arrows()} - {""} == ROOMS.keys() | set(COMMANDS)
    things = [
        path for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "py.typed", "__pycache__")
    ]
    assert len([path for path in things if path.stem not in COMMANDS]) <= 16


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_may(room: str) -> None:
    assert not [
        f"{module} imports {name}"
        for module, names in arrows().items()
        if room_of(module) == room
        for name in sorted(names)
        if room_of(name) not in (room, "", *ROOMS[room])
    ]


def test_rooms_go_one_way() -> None:
    """A room imports only rooms that stand before it: so there is no import cycle."""
    order = list(ROOMS)
    for room, allowed in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in allowed), room
    for plane in PLANES:
        assert not set(PLANES) & set(ROOMS[plane])


@pytest.mark.parametrize("room", FLOORS)
def test_rooms_within_a_room_go_one_way(room: str) -> None:
    floors = FLOORS[room]
    for module, names in arrows().items():
        if room_of(module) != room or module == f"echo_planes.{room}":
            continue
        own = floors.index(module.split(".")[2])
        above = [n for n in names if room_of(n) == room and floors.index(n.split(".")[2]) > own]
        assert not above, f"{module} imports {above}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    left = {module: set(names) for module, names in arrows().items()}
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"a cycle is among {sorted(left)}"


def test_heavy_dependencies_stay_in_their_files() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]:
        for package, allowed in HEAVY.items():
            used = {n for n in imports(path) if n == package or n.startswith(f"{package}.")}
            assert not used or allowed(path), f"{path.relative_to(ROOT)} imports {sorted(used)}"


def test_tasks_import_only_the_public_interface() -> None:
    public = {
        "echo_planes.config.extensions",
        "echo_planes.data.tasks.chat",
        "echo_planes.data.tasks.datasets",
        "echo_planes.data.tasks.environment",
        "echo_planes.sandbox",
        "echo_planes.data.tasks.adapter",
        "echo_planes.data.tasks.answers",
        "echo_planes.types",
        "echo_planes.errors",
    }
    for path in (ROOT / "tasks").rglob("*.py"):
        for name in imports(path):
            if name.startswith("echo_planes"):
                assert any(name == p or name.startswith(f"{p}.") for p in public), f"{path}: {name}"


def heavy_after(code: str) -> str:
    """List those of the heavy four that a process has imported after `code`, as printed."""
    code = f"import sys\n{code}\nprint(sorted({{'torch', 'ray', 'vllm', 'deepspeed'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_settings_and_cores_import_without_the_heavy_four() -> None:
    modules = ", ".join(f"echo_planes.{name}" for name in LIGHT)
    assert heavy_after(f"import {modules}") == "[]"


def test_what_a_task_is_written_with_is_importable_from_one_place() -> None:
    code = (
        "from echo_planes import TaskAdapter, TaskOptions, EpisodeTask, Environment, Turn\n"
        "from echo_planes import Prompt, Episode, Reward\n"
        "import echo_planes; assert all(getattr(echo_planes, name) for name in echo_planes.__all__)"
    )
    assert heavy_after(code) == "[]"


def test_a_run_begins_without_the_seconds_that_torch_takes() -> None:
    """The driver, with the task's first prompts made; the data plane's process imports less."""
    code = (
        "from echo_planes.cluster import session\nfrom echo_planes.loop import job, launch\n"
        "from echo_planes.loop.loading import load_config\n"
        "from echo_planes.loop.task_probe import probe_task\n"
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


def test_docstrings_say_what_a_thing_is() -> None:
    """They begin with a noun or a verb, never with a riddle."""
    riddles = {"What", "Who", "Which", "How", "Whose", "Where", "When", "Whoever", "Whatever"}
    found = []
    for folder in ("echo_planes", "tasks", "bench", "tests", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in nodes(path):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    words = (ast.get_docstring(node) or "").split()
                    if words and words[0].strip(",:") in riddles:
                        found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {words[0]}")
    assert not found
