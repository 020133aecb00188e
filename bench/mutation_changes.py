"""The changes that a mutation run tries: drawn from what the operators can change in a module."""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections import Counter
from dataclasses import dataclass, replace

COMMENT = re.compile(r"\s+# .*$")
SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Change:
    """One small change of a module.

    `text` names it, and stays the same where lines move: the definition that it is in, the lines as they
    were, and as they are; where that comes again in the module, with a number.
    """

    line: int
    text: str
    source: str  # the whole module, changed


def changes(source: str, *, most: int, seed: str) -> tuple[list[Change], int]:
    """Draw changes of a module: the same ones for the same source, number and seed.

    One place in the source gets one change of each kind (of the eleven other operators that `+` may become,
    one is drawn); a comparison that may move by its boundary gets that one beside another. Changes of
    annotations and docstrings are none.

    Args:
        source: of the module.
        most: how many at most.
        seed: of the draw.

    Returns:
        The changes by line, and how many places there are.
    """
    # Here, because only a run needs cosmic-ray; what judges its results does not.
    from bench.mutation_operators import applied, places

    draw = random.Random(seed)
    found = [variants for _, variants in sorted(places(source).items())]
    draw.shuffle(found)
    seen = {_meaning(source)}
    drawn: list[Change] = []
    for variants in found:
        if len(drawn) == most:
            break
        changed = applied(source, draw.choice(variants))
        meaning = _meaning(changed)
        if meaning is not None and meaning not in seen:
            seen.add(meaning)
            drawn.append(_change(source, changed))
    return _numbered(sorted(drawn, key=lambda change: (change.line, change.text))), len(found)


def _numbered(drawn: list[Change]) -> list[Change]:
    seen: Counter[str] = Counter()
    numbered = []
    for change in drawn:
        seen[change.text] += 1
        again = f" ({seen[change.text]})" if seen[change.text] > 1 else ""
        numbered.append(replace(change, text=change.text + again))
    return numbered


def _meaning(source: str) -> str | None:
    """The syntax tree without annotations and docstrings; None: the source is not Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_text(one)]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _change(source: str, mutated: str) -> Change:
    before, after = source.split("\n"), mutated.split("\n")
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    blocks = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    first, last = blocks[0], blocks[-1]
    old, new = before[first[1] : last[2]], after[first[3] : last[4]]
    words = [SPACE.sub(" ", " ".join(COMMENT.sub("", one) for one in lines)).strip() for lines in (old, new)]
    line = first[1] + 1
    where = _definition(source, line)
    return Change(line, f"{where}: {words[0]} -> {words[1]}", mutated)


def _definition(source: str, line: int) -> str:
    """The dotted name of what a line is in; of a module's own lines that is `module`."""
    names: list[str] = []
    body: list[ast.stmt] = ast.parse(source).body
    while True:
        around = [
            one for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        holder = next((one for one in around if _first_line(one) <= line <= (one.end_lineno or 0)), None)
        if holder is None:
            return ".".join(names) or "module"
        names.append(holder.name)
        body = holder.body


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
