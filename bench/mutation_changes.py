"""The changes that a mutation run tries: cosmic-ray's operators, and two of our own.

Cosmic-ray turns comparisons, arithmetic, constants, conditions and loops. It neither leaves a statement out
nor a condition of several, which is how a fence, a count or a check gets lost: those two are added here.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Keyword
from parso.tree import BaseNode, NodeOrLeaf, search_ancestor

Position = tuple[int, int]  # line from 1, column from 0
BOUNDARY = re.compile(r"_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt)$")
IDENTITY = re.compile(r"_(?!Is)[A-Za-z]+_(Is|IsNot)$")  # `is` for `==` says nothing of small numbers
COMMENT = re.compile(r"\s+# .*$")
SPACE = re.compile(r"\s+")


class DropStatement(Operator):
    """Leave out a statement of a function that does something: a call, a store, a deletion, a raise."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        if isinstance(node, BaseNode) and node.type == "simple_stmt" and _has_effect(node):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        assert isinstance(node, BaseNode)
        node.children[0] = _word("pass", node.children[0])
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("def f(): x.y()", "def f(): pass"), Example("def f(): x.y = 1", "def f(): pass"))


class DropCondition(Operator):
    """Leave out one operand of `and` or `or`."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        if isinstance(node, BaseNode) and node.type in ("and_test", "or_test"):
            for operand in node.children[::2]:
                yield operand.start_pos, operand.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        assert isinstance(node, BaseNode)
        neutral = "True" if node.type == "and_test" else "False"
        node.children[2 * index] = _word(neutral, node.children[2 * index])
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("a and b", "True and b"), Example("a or b", "a or False", occurrence=1))


OURS: dict[str, type[Operator]] = {"DropStatement": DropStatement, "DropCondition": DropCondition}


@dataclass(frozen=True, slots=True)
class Change:
    """One small change of a module.

    `text` names it, and stays the same where lines move: the definition that it is in, the lines as they
    were, and as they are.
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
    draw = random.Random(seed)
    places = [(kind, variants) for kind, variants in sorted(_places(source).items())]
    draw.shuffle(places)
    seen = {_meaning(source)}
    drawn: list[Change] = []
    for _, variants in places:
        if len(drawn) == most:
            break
        operator, occurrence = draw.choice(variants)
        mutated = mutate_code(source, operator(), occurrence)
        meaning = _meaning(mutated)
        if meaning is not None and meaning not in seen:
            seen.add(meaning)
            drawn.append(_change(source, mutated))
    return sorted(drawn, key=lambda change: (change.line, change.text)), len(places)


def _places(source: str) -> dict[tuple[str, Position, Position], list[tuple[type[Operator], int]]]:
    """Operators and their occurrences, by kind and place."""
    nodes = list(ast_nodes(get_ast(source)))
    operators = {name: cosmic_ray.plugins.get_operator(name) for name in cosmic_ray.plugins.operator_names()}
    found: dict[tuple[str, Position, Position], list[tuple[type[Operator], int]]] = {}
    for name, operator in sorted((operators | OURS).items()):
        if operator.arguments() or IDENTITY.search(name):
            continue
        kind = "boundary" if BOUNDARY.search(name) else name.split("_")[0]
        positions = (position for node in nodes for position in operator().mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            found.setdefault((kind, start, end), []).append((operator, occurrence))
    return found


def _has_effect(statement: BaseNode) -> bool:
    inside = search_ancestor(statement, "funcdef")
    if inside is None:
        return False
    first = statement.children[0]
    if first.type in ("raise_stmt", "del_stmt", "yield_expr"):
        return True
    if first.type == "atom_expr":
        return first.get_last_leaf().value == ")"
    # A local name left out is a NameError, an attribute left out of a constructor an AttributeError.
    is_store = first.type == "expr_stmt" and first.children[0].type in ("atom_expr", "power")
    is_added_to = first.type == "expr_stmt" and first.children[1].type in ("operator", "augassign")
    adds = is_added_to and first.children[1].get_code().strip() not in ("=", ":")
    return adds or (is_store and inside.name.value != "__init__")


def _word(text: str, instead: NodeOrLeaf) -> Keyword:
    return Keyword(text, instead.start_pos, prefix=instead.get_first_leaf().prefix)


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
