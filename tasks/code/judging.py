"""From an answer's text to the two programs that judge it, and from how they ended to a verdict.

See `inside.py`, which both of them are made of: the answer runs in one, the tests in the other.
"""

from __future__ import annotations

import ast
import json
import re
import symtable
from dataclasses import dataclass
from pathlib import Path

from echo_planes.sandbox.model import Outcome, Program

from . import inside

_OPENING = re.compile(r"[ \t]*```([^`]*)")
_PYTHON = ("", "python", "python3", "py")
_DETAIL = 200  # characters
_INSIDE = Path(inside.__file__).read_text()


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer that a response holds."""

    code: str | None  # None: not in the form asked for
    is_python: bool
    has_thinking: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on an answer."""

    passed: int
    total: int
    status: str  # of the sandbox, or "syntax", "empty"
    detail: str = ""  # the end of what it said on standard error

    @property
    def share(self) -> float:
        return self.passed / self.total if self.total else 0.0


def parse_answer(text: str, head: str, *, fenced: bool) -> Answer:
    """The program in a response: the last fenced block after the thinking, or all of the text.

    Args:
        head: Python that the answer continues, unless it says it again itself.
        fenced: whether the answer must stand in a block.
    """
    text = text.replace("\r\n", "\n")
    before, closed, rest = text.rpartition("</think>")
    has_thinking = bool(closed and before.replace("<think>", "").strip())
    code: str | None = rest
    if fenced:
        code = _last_block(rest)
    if code is None:
        return Answer(None, False, has_thinking)
    start = _start(head)
    name = head[start:].removeprefix("def ").partition("(")[0].strip()
    # The text before the function, imports and helpers, is part of the question.
    code = (head[:start] if fenced and f"def {name}(" in code else head) + code
    return Answer(code, _is_python(code), has_thinking)


def _last_block(text: str) -> str | None:
    """The last closed block of Python, or of nothing in particular."""
    found: str | None = None
    kind: str | None = None
    block: list[str] = []
    for line in text.split("\n"):
        if kind is not None and line.strip(" \t") == "```":
            if kind.strip().lower() in _PYTHON:
                found = "".join(block)
            kind = None
        elif kind is not None:
            block.append(line + "\n")
        elif opening := _OPENING.fullmatch(line):
            kind, block = opening[1], []
    return found


def programs(code: str, tests: str, head: str, solution: str) -> tuple[Program, Program]:
    """Make the judge's program and the answer's program, which speak to each other.

    Args:
        code: the answer.
        tests: see `counted`.
        head: what the answer continues; what stands before its last function is the authors' to the tests.
        solution: the authors' own; the tests may use what it defines, of the answer's, and what it imports.
    """
    authors = head[: _start(head)] + _imports(solution)
    names = _bound(solution) - _bound(authors)
    used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    told = {"authors": authors, "names": sorted(names & used), "tests": counted(tests)}
    return _inside(inside.JUDGE, told), _inside(inside.ANSWER, code)


def verdict(judge: Outcome, answer: Outcome, tests: str) -> Verdict:
    """Verdict on the answer, from the ends of both programs."""
    least = max(sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(tests))), 1)
    said = answer.stderr.strip()
    # A program that reached a limit has passed nothing, whatever was asked of it until then.
    for outcome in (answer, judge):
        if outcome.status not in ("ok", "failed", "cancelled"):
            return Verdict(0, least, outcome.status, said[-_DETAIL:])
    line = judge.stderr.rpartition("\n")[2]
    if judge.status != "ok" or not line.startswith("{"):
        return Verdict(0, least, "failed", judge.stderr.strip()[-_DETAIL:])
    told = json.loads(line)
    detail = (said or told["why"])[-_DETAIL:]
    # Tests that broke off have failed at least one, and all that they did not come to.
    total = max(told["total"] + told["cut"], least if told["cut"] else 1)
    if told["gone"]:
        return Verdict(0, total, "failed", detail)
    return Verdict(min(told["passed"], total), total, "ok", detail)


def _inside(main: str, told: object) -> Program:
    return Program(main, files={inside.SOURCE: _INSIDE, inside.TOLD: json.dumps(told)})


def counted(tests: str) -> str:
    """The tests with every assertion replaced by a counted one, so that one that fails ends nothing."""
    return ast.unparse(ast.fix_missing_locations(_Counted().visit(ast.parse(tests))))


class _Counted(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        check = ast.Lambda(args=none, body=node.test)
        return ast.Expr(ast.Call(func=ast.Name("_case", ast.Load()), args=[check], keywords=[]))


def _is_python(code: str) -> bool:
    try:
        compile(code, "answer", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def _start(head: str) -> int:
    """Position at which the last function of a head begins; 0 if there is none."""
    return max(head.rfind("\ndef ") + 1, 0)


def _imports(solution: str) -> str:
    """The imports of a program, each for itself: what is not installed is missed only where it is used."""
    nodes = [node for node in ast.parse(solution).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "".join(f"\ntry: {ast.unparse(node)}\nexcept ImportError: pass" for node in nodes)


def _bound(code: str) -> set[str]:
    """The names a program defines, imports left out."""
    symbols = symtable.symtable(code, "authors", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() and not symbol.is_imported()}
