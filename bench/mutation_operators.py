"""cosmic-ray's operators, and two of our own; imported where cosmic-ray is installed.

Cosmic-ray turns comparisons, arithmetic, constants, conditions and loops. It neither leaves a statement out
nor a condition of several, which is how a fence, a count or a check gets lost: those two are added here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Keyword
from parso.tree import BaseNode, NodeOrLeaf, search_ancestor

Position = tuple[int, int]  # line from 1, column from 0
Variant = tuple[type[Operator], int]  # an operator, and which of the places where it can change something
BOUNDARY = re.compile(r"_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt)$")
IDENTITY = re.compile(r"_(?!Is)[A-Za-z]+_(Is|IsNot)$")  # `is` for `==` says nothing of small numbers


class DropStatement(Operator):  # type: ignore[misc]
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


class DropCondition(Operator):  # type: ignore[misc]
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


def places(source: str) -> dict[tuple[str, Position, Position], list[Variant]]:
    """Find what may be changed: by kind of change and place, the ways to do it."""
    nodes = list(ast_nodes(get_ast(source)))
    operators = {name: cosmic_ray.plugins.get_operator(name) for name in cosmic_ray.plugins.operator_names()}
    found: dict[tuple[str, Position, Position], list[Variant]] = {}
    for name, operator in sorted((operators | OURS).items()):
        if operator.arguments() or IDENTITY.search(name):
            continue
        kind = "boundary" if BOUNDARY.search(name) else name.split("_")[0]
        positions = (position for node in nodes for position in operator().mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            found.setdefault((kind, start, end), []).append((operator, occurrence))
    return found


def applied(source: str, variant: Variant) -> str:
    """The source with that change."""
    operator, occurrence = variant
    changed: str = mutate_code(source, operator(), occurrence)
    return changed


def _has_effect(statement: BaseNode) -> bool:
    inside = search_ancestor(statement, "funcdef")
    if inside is None:
        return False
    first = statement.children[0]
    if first.type in ("raise_stmt", "del_stmt", "yield_expr"):
        return True
    if first.type == "atom_expr":
        return bool(first.get_last_leaf().value == ")")
    # A local name left out is a NameError, an attribute left out of a constructor an AttributeError.
    is_store = first.type == "expr_stmt" and first.children[0].type in ("atom_expr", "power")
    is_added_to = first.type == "expr_stmt" and first.children[1].type in ("operator", "augassign")
    adds = is_added_to and first.children[1].get_code().strip() not in ("=", ":")
    return bool(adds or (is_store and inside.name.value != "__init__"))


def _word(text: str, instead: NodeOrLeaf) -> Keyword:
    return Keyword(text, instead.start_pos, prefix=instead.get_first_leaf().prefix)
