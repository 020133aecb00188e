"""From an answer's text to a program that judges it, and from the program's output to a verdict.

The program runs in the sandbox: first the answer, then the tests, each assertion counted by itself. It reads
a word that nobody can guess before the answer runs, and prints it with the counts at the very end; an answer
that ends the program early, or prints counts of its own, has passed nothing. An answer that looks for that
word in its own process can find it: this guards against accidents of training, the sandbox against harm.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from dataclasses import dataclass

from echo_planes.data.sandbox.model import Outcome, Program

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_HARNESS = """
import json, os, sys
def judge():
    told = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w")
    counts = [0, 0]
    def case(check):
        counts[1] += 1
        try:
            counts[0] += bool(check())
        except Exception:
            pass
    space = {"__name__": "answer"}
    try:
        exec(compile(told["answer"], "answer", "exec"), space)
        exec(compile(told["tests"], "tests", "exec"), dict(space, _case=case))
    except BaseException as error:
        counts[1] += 1
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    out.write("\\n" + json.dumps([told["word"], *counts]))
    out.flush()
    os._exit(0)
judge()
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a response holds."""

    code: str | None  # None: not in the form asked for
    is_python: bool
    has_thinking: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer did."""

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
    before, closed, rest = text.rpartition("</think>")
    has_thinking = bool(closed and before.replace("<think>", "").strip())
    code: str | None = rest
    if fenced:
        blocks = _FENCE.findall(rest)
        code = blocks[-1] if blocks else None
    if code is None:
        return Answer(None, False, has_thinking)
    definition = head.rstrip().rpartition("\ndef ")[2] if "def " in head else head
    name = definition.removeprefix("def ").partition("(")[0].strip()
    if not (fenced and f"def {name}" in code):
        code = head + code
    return Answer(code, _is_python(code), has_thinking)


def program(code: str, tests: str) -> tuple[Program, str]:
    """What the sandbox runs, and the word its verdict begins with."""
    word = secrets.token_hex(16)
    told = json.dumps({"word": word, "answer": code, "tests": counted(tests)})
    return Program(_HARNESS, stdin=told + "\n"), word


def verdict(outcome: Outcome, word: str, tests: str) -> Verdict:
    """What a run says of the answer."""
    least = max(tests.count("assert "), 1)
    detail = outcome.stderr.strip()[-200:]
    try:
        said = json.loads(outcome.stdout.rpartition("\n")[2])
    except ValueError:
        said = None
    if outcome.status != "ok" or not isinstance(said, list) or said[:1] != [word]:
        return Verdict(0, least, "failed" if outcome.status == "ok" else outcome.status, detail)
    return Verdict(int(said[1]), max(int(said[2]), 1), "ok", detail)


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
