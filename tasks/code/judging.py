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

_FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
# Everything that the judging needs is bound before the answer runs, and the tests see the builtins as they
# were; of the answer's names that hide a builtin, they see those that the authors' solution defines too. What
# its functions return may not decide for itself whether it equals what a test expects.
_HARNESS = """
import builtins, json, os, sys
def judge():
    told = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w")
    write, flush, leave, true, clean = out.write, out.flush, os._exit, bool, dict(vars(builtins))
    word, own, run, build = told["word"], told["own"], exec, compile
    counts = [0, 0, 0]
    def case(check):
        counts[1] += 1
        try:
            if true(check()):
                counts[0] += 1
        except Exception:
            pass
    kind, members, is_a, can_call = type, vars, isinstance, callable
    wrong, groups, table, classes = TypeError, (list, tuple, set, frozenset), dict, told["classes"]
    decisive = frozenset("__%s__" % name for name in told["decisive"].split())
    def look(value):
        for base in kind(value).__mro__:
            is_own = base.__module__ == "answer" and base.__name__ not in classes
            if is_own and not decisive.isdisjoint(members(base)):
                raise wrong("the answer compares by rules of its own")
        for part in [*value, *value.values()] if is_a(value, table) else value if is_a(value, groups) else ():
            look(part)
        return value
    def watched(name, value):
        is_foreign = is_a(value, kind) and value.__module__ != "answer"
        if name in classes or is_foreign or not can_call(value):
            return value
        return lambda *args, **named: look(value(*args, **named))
    space = {"__name__": "answer", "__builtins__": dict(clean)}
    try:
        run(build(told["answer"], "answer", "exec"), space)
        kept = [name for name in space if name not in clean or name in own]
        seen = {name: watched(name, space[name]) for name in kept}
        run(build(told["tests"], "tests", "exec"), {**seen, "__builtins__": clean, "_case": case})
    except BaseException as error:
        counts[2] = 1
        try:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        except Exception:
            pass
    write("\\n%s %d %d %d" % (word, *counts))
    flush()
    leave(0)
judge()
"""
_DECISIVE = "eq ne lt le gt ge bool len contains iter abs sub rsub getattr getattribute instancecheck"


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
    text = text.replace("\r\n", "\n")
    before, closed, rest = text.rpartition("</think>")
    has_thinking = bool(closed and before.replace("<think>", "").strip())
    code: str | None = rest
    if fenced:
        blocks = [block for kind, block in _FENCE.findall(rest) if kind.strip().lower() in _PYTHON]
        code = blocks[-1] if blocks else None
    if code is None:
        return Answer(None, False, has_thinking)
    start = max(head.rfind("\ndef ") + 1, 0)
    name = head[start:].removeprefix("def ").partition("(")[0].strip()
    # What stands before the function, imports and helpers, is part of the question.
    code = (head[:start] if fenced and f"def {name}(" in code else head) + code
    return Answer(code, _is_python(code), has_thinking)


def program(code: str, tests: str, solution: str) -> tuple[Program, str]:
    """What the sandbox runs, and the word its verdict begins with.

    Args:
        code: the answer.
        tests: see `counted`.
        solution: the authors' own; what it defines, the answer may define.
    """
    word = secrets.token_hex(16)
    told = {
        "word": word,
        "answer": code,
        "tests": counted(tests),
        "own": _defined(solution, ast.FunctionDef, ast.ClassDef),
        "classes": _defined(solution, ast.ClassDef),
        "decisive": _DECISIVE,
    }
    return Program(_HARNESS, stdin=json.dumps(told) + "\n"), word


def verdict(outcome: Outcome, word: str, tests: str) -> Verdict:
    """What a run says of the answer."""
    least = max(sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(tests))), 1)
    detail = outcome.stderr.strip()[-200:]
    said = outcome.stdout.rpartition("\n")[2].split(" ")
    if outcome.status != "ok" or said[0] != word or len(said) != 4 or not all(n.isdigit() for n in said[1:]):
        return Verdict(0, least, "failed" if outcome.status == "ok" else outcome.status, detail)
    passed, total, is_cut = map(int, said[1:])
    # A program that broke off has failed at least one, and all that it did not come to.
    total = max(total + is_cut, least if is_cut else 1)
    return Verdict(min(passed, total), total, "ok", detail)


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


def _defined(solution: str, *kinds: type[ast.FunctionDef | ast.ClassDef]) -> list[str]:
    return [node.name for node in ast.parse(solution).body if isinstance(node, kinds)]
