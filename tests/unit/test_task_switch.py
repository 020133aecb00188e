"""Another task is another word: no line outside tasks/ and configs/ knows which tasks there are.

ECHO-2 appendix F.2: to switch tasks, swap the adapter's configuration; everything else stays unchanged.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from echo_planes.data.tasks.registry import adapter_class
from echo_planes.loop.loading import load_config

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "echo_planes"
FILES = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs" / "task").glob("*.yaml")}
# Names that only a task has, and the classes of the adapters.
NAMES = {path.parent.name for path in (ROOT / "tasks").glob("*/adapter.py")} | set(FILES)
CLASSES = {section["adapter"].partition(":")[2] for section in FILES.values()}
# English and Python words too: as identifiers they say nothing, but no text may be one.
EVERYDAY = {"code", "function", "guess", "gym", "math"}

# (file, what it says): why. Whatever is not in here is a task that the library must not know.
JUSTIFIED = {
    ("loop/loading.py", "math"): "which task a run has that names none, and whose options --help shows",
    ("config/schema.py", "math"): "the same task's name, for configurations made in code",
    ("config/schema.py", "echo_planes.tasks.math.adapter:MathTask"): "the same task's adapter",
    ("config/schema.py", "tiny-math"): "a bundled model",
    ("config/schema.py", "tiny-carry"): "a bundled model",
    ("config/schema.py", "tiny-code"): "a bundled model",
    ("config/schema.py", "tiny-poker"): "a bundled model",
    ("config/schema.py", "builtin:tiny-math"): "the model of a run that names none",
    (
        "loop/preflight.py",
        ": no such folder; give a Hugging Face model folder, or builtin:tiny-math",
    ): "advice",
    (
        "config/schema.py",
        "model folder, GGUF file, ORG/NAME[@REVISION] of the Hugging Face hub, or builtin:tiny-math, "
        "-carry, -code, -poker",
    ): "in --help",
}


def said(path: Path) -> Iterator[str]:
    """Identifiers, imported names and texts of a module, docstrings and longer prose left out."""
    tree = ast.parse(path.read_text())
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(module=str(name)):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)) if id(node) not in prose:
                yield text


@cache
def names_a_task(text: str) -> bool:
    """Whether a text or an identifier is about one task of those that there are."""
    if any(name in text for name in CLASSES):
        return True
    if re.search(rf"\btasks[./](?!bridges\b)({'|'.join(NAMES)})\b", text):
        return True
    words = re.sub(r"([A-Z])", r" \1", text).lower()
    return bool(re.search(rf"(?<![a-z])({'|'.join(NAMES - EVERYDAY)})(?![a-z])|\btiny-\w", words))


def texts_that_are_names(path: Path) -> set[str]:
    """Texts that are an everyday word which is a task's name: `"math"`, but not `math.isfinite`."""
    constants = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return constants & EVERYDAY


def test_no_module_of_the_package_names_a_task() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "tasks"]
    assert len(modules) > 50
    found = {
        (str(path.relative_to(PACKAGE)), text)
        for path in modules
        for text in {text for text in said(path) if names_a_task(text)} | texts_that_are_names(path)
    }
    assert found == set(JUSTIFIED), "a task's name, or a justification that is not needed any more"


def test_the_search_finds_what_it_looks_for() -> None:
    for text in (
        "poker",
        "PokerTask",
        "is_poker",
        "reasoning_gym",
        "echo_planes.tasks.math.adapter",
        "tasks/guess",
        "tiny-math",
    ):
        assert names_a_task(text), text
    for text in ("math", "code", "isfinite", "decode", "tasks", "echo_planes.tasks.bridges", "exit_code"):
        assert not names_a_task(text), text


def test_switching_tasks_changes_the_task_and_what_its_file_says() -> None:
    """Two runs that differ in one word have the same settings but for the task's own file."""
    base = load_config([])
    for name, section in FILES.items():
        if name in ("function", "gym", "reasoning_gym"):
            continue  # they need a name or a file of the user's as well
        other = load_config([f"task={name}", "model=tiny"])
        adapter_class(other.task.adapter)
        changed = {key for key in type(base).model_fields if getattr(base, key) != getattr(other, key)}
        assert changed - {"task"} <= set(section.get("defaults", {})), name
