"""Making of the two programs that judge an answer, and of a verdict from their outcomes.

Both programs consist of `inside.py`: the answer runs in one, the tests in the other.
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
    """Answer in a response."""

    code: str | None  # None: the response has no program in the requested form
    is_python: bool
    has_thinking: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on an answer."""

    passed: int
    total: int
    status: str  # status of the sandbox, or "syntax", "empty"
    detail: str = ""  # end of the standard error, or the last error of the tests

    @property
    def share(self) -> float:
        return self.passed / self.total if self.total else 0.0


def parse_answer(text: str, head: str, *, fenced: bool) -> Answer:
    """Find the program in a response: the last fenced block after the thinking, or all of that text.

    Args:
        head: Python that the answer continues, unless a fenced answer repeats it.
        fenced: whether the answer must be in a block.
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
    # The text before the function, imports and helpers, belongs to the question. Answers may rely on it.
    code = (head[:start] if fenced and f"def {name}(" in code else head) + code
    return Answer(code, _is_python(code), has_thinking)


def _last_block(text: str) -> str | None:
    """Return the contents of the last closed block of Python, or of no stated language."""
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
    """Make the judge's program and the answer's program, which exchange messages.

    Args:
        code: the answer.
        tests: tests of the problem's authors, with plain assertions.
        head: Python that the answer continues; the tests may use the part before its last function.
        solution: the authors' solution; the tests may use its imports, and the answer's definitions of the
            names that it defines.
    """
    authors = head[: _start(head)] + _imports(solution)
    names = _bound(solution) - _bound(authors)
    used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    told = {"authors": authors, "names": sorted(names & used), "tests": counted(tests)}
    return _inside(inside.JUDGE, told), _inside(inside.ANSWER, code)


def verdict(judge: Outcome, answer: Outcome, tests: str) -> Verdict:
    """Return the verdict on the answer, from the outcomes of both programs."""
    least = max(sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(tests))), 1)
    said = answer.stderr.strip()
    # A program that reached a limit has passed nothing, whatever its earlier results.
    for outcome in (answer, judge):
        if outcome.status not in ("ok", "failed", "cancelled"):
            return Verdict(0, least, outcome.status, said[-_DETAIL:])
    line = judge.stderr.rpartition("\n")[2]
    if judge.status != "ok" or not line.startswith("{"):
        return Verdict(0, least, "failed", judge.stderr.strip()[-_DETAIL:])
    told = json.loads(line)
    detail = (said or told["why"])[-_DETAIL:]
    # Tests that ended early have failed at least one assertion, and all that they did not reach.
    total = max(told["total"] + told["cut"], least if told["cut"] else 1)
    if told["gone"]:
        return Verdict(0, total, "failed", detail)
    return Verdict(min(told["passed"], total), total, "ok", detail)


def _inside(main: str, told: object) -> Program:
    return Program(main, files={inside.SOURCE: _INSIDE, inside.TOLD: json.dumps(told)})


def counted(tests: str) -> str:
    """Return the tests with counted assertions, whose failure does not end the tests."""
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
    """Return the position at which the last function of a head begins; 0 if there is none."""
    return max(head.rfind("\ndef ") + 1, 0)


def _imports(solution: str) -> str:
    """Return a program's imports, each guarded: a missing package fails only the tests that use it."""
    nodes = [node for node in ast.parse(solution).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "".join(f"\ntry: {ast.unparse(node)}\nexcept ImportError: pass" for node in nodes)


def _bound(code: str) -> set[str]:
    """Return the names that a program defines, without its imports."""
    symbols = symtable.symtable(code, "authors", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() and not symbol.is_imported()}
