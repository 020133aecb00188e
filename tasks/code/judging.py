"""Making of the two programs that judge an answer, and of a verdict from their outcomes.

Both programs consist of `inside.py`: the answer runs in one, the tests in the other.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from echo_planes.data.tasks.answers import after_thought, has_thought
from echo_planes.sandbox.model import Outcome, Program

from . import inside

_FENCE = re.compile(r"[ \t>]*(?P<marks>`{3,}|~{3,})(?P<info>.*)")
_PYTHON = re.compile(r"(?:i?python|py)[\d.]*", re.IGNORECASE)
_STARTS = re.compile(r"(?:def|class|import|from|async|@)\b|@")
MOST_CLOSINGS = 16  # fences that may end one block
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


def parse_answer(
    text: str, head: str, *, fenced: bool, names: Collection[str] = (), opened: bool = False
) -> Answer:
    """Find the program in a response: a fenced block after the thinking, or all of that text.

    Of several blocks it is the last one that defines all `names`, else the last one. Earlier blocks that
    define what it uses and lacks, helpers and imports, come before it.

    Args:
        head: Python that the answer continues, unless a fenced answer repeats it.
        fenced: whether the answer must be in a block.
        names: what the tests call.
        opened: whether the prompt opened a thought. An open thought holds no answer.
    """
    text = text.replace("\r\n", "\n")
    thinks, begin = has_thought(text), after_thought(text, opened=opened)
    if begin is None:
        return Answer(None, False, thinks)
    code: str | None = text[begin:]
    if fenced:
        blocks = code_blocks(text[begin:], head)
        last = max(
            (i for i, block in enumerate(blocks) if set(names) <= _defined(block)), default=len(blocks) - 1
        )
        code = _with_helpers(blocks[last], blocks[:last]) if blocks else None
    if code is None:
        return Answer(None, False, thinks)
    start = _start(head)
    name = head[start:].removeprefix("def ").partition("(")[0].strip()
    # The text before the function, imports and helpers, belongs to the question. Answers may rely on it.
    before = head[:start] if fenced and f"def {name}(" in code else head
    code = _futures_first(before + code)
    return Answer(code, _is_python(code), thinks)


def code_blocks(text: str, head: str) -> list[str]:
    """Return the fenced blocks of Python, or of no stated language, without the indentation of their fences.

    A fence is closed by one of its character that is as long, also with text behind it; the end of the text
    closes it too. Where a block holds fences itself, as in a docstring, it ends at the first one that leaves
    it a program, else at the first.
    """
    lines = text.split("\n")
    found, at = [], 0
    while at < len(lines):
        opening = _FENCE.fullmatch(lines[at])
        at += 1
        if opening is None or "`" in opening["info"]:
            continue
        closings = []
        for i in range(at, len(lines)):
            closing = _FENCE.fullmatch(lines[i])
            if closing and closing["marks"].startswith(opening["marks"]):
                closings.append(i)
                if len(closings) == MOST_CLOSINGS:
                    break
        indent = len(lines[at - 1]) - len(lines[at - 1].lstrip(" \t>"))
        block = [_without(line, indent) for line in lines[at : (closings or [len(lines)])[-1]]]
        blocks = {end: _program(block[: end - at], head) for end in closings or [len(lines)]}
        end = next((end for end, code in blocks.items() if _continues(head, code)), next(iter(blocks)))
        language = re.split(r"[\s:{},]+", opening["info"].strip(" \t{"))[0].lstrip(".")
        if (not language or _PYTHON.fullmatch(language)) and blocks[end].strip():
            found.append(blocks[end])
        # A fence with a language both ends a block that was left open, and opens the next.
        at = end if end < len(lines) and _opens(lines[end]) else end + 1
    return found


def _without(line: str, indent: int) -> str:
    """Return a line without so much of its own indentation."""
    return line[min(indent, len(line) - len(line.lstrip(" \t>"))) :]


def _program(lines: list[str], head: str) -> str:
    """Return a block's program. One that is indented as a whole, and does not continue the head, is not."""
    code = "".join(line + "\n" for line in lines)
    dedented = textwrap.dedent(code)
    return code if _continues(head, code) or not _STARTS.match(dedented) else dedented


def _continues(head: str, code: str) -> bool:
    return _is_python(code) or _is_python(head + code)


def _opens(line: str) -> bool:
    fence = _FENCE.fullmatch(line)
    return fence is not None and _PYTHON.fullmatch(fence["info"].strip()) is not None


def _defined(code: str) -> set[str]:
    """Return the names that a block defines; none where it is no Python."""
    return _bound(code) if _is_python(code) else set()


def _with_helpers(code: str, earlier: Sequence[str]) -> str:
    """Return a block behind those of the earlier ones that define what it lacks."""
    lacking = _lacking(code)
    for block in reversed(earlier):
        if lacking and lacking & _names(block):
            code, lacking = f"{block}\n{code}", lacking - _names(block) | _lacking(block)
    return code


def _lacking(code: str) -> set[str]:
    """Return the names that a program uses, and neither defines nor imports; none where it is no Python."""
    if not _is_python(code):
        return set()
    tables, used = [symtable.symtable(code, "answer", "exec")], set[str]()
    while tables:
        table = tables.pop()
        used |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_global() and symbol.is_referenced()
        }
        tables += table.get_children()
    return used - _names(code) - vars(builtins).keys()


def _names(code: str) -> set[str]:
    """Return the names that a program defines or imports; none where it is no Python."""
    if not _is_python(code):
        return set()
    symbols = symtable.symtable(code, "answer", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _futures_first(code: str) -> str:
    """Return a program with its `from __future__` lines first, where Python wants them."""
    lines = code.split("\n")
    futures = [line for line in lines if line.startswith("from __future__ import ")]
    return "\n".join([*futures, *(line for line in lines if line not in futures)]) if futures else code


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
    told = {"authors": authors, "names": sorted(called(tests, head, solution)), "tests": counted(tests)}
    return _inside(inside.JUDGE, told), _inside(inside.ANSWER, code)


def called(tests: str, head: str, solution: str) -> set[str]:
    """Return the names that the tests use and an answer has to define; arguments as of `programs`."""
    authors = head[: _start(head)] + _imports(solution)
    used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    return (_bound(solution) - _bound(authors)) & used


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
