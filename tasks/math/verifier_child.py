"""Child process of the verifier: reads one JSON request per line, writes one verdict per line. A script."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

MEMORY_BYTES = 4 << 30


def reply(word: str) -> None:
    """Write a whole line by one system call, because the parent reads it by one."""
    os.write(1, word.encode() + b"\n")


def main() -> None:
    """Answer requests until the parent closes standard input."""
    sys.stdout = sys.stderr  # so that the output of a library is not taken for a verdict
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        reply("missing")
        return
    logging.disable(logging.CRITICAL)
    # LaTeX only: math-verify's plain-expression path hands model-written text to sympy's eval.
    latex = [LatexExtractionConfig()]

    def compare(gold: str, answer: str) -> str:
        parsed = [
            parse(f"${text}$", extraction_config=latex, parsing_timeout=None) for text in (gold, answer)
        ]
        if all(isinstance(item, str) for item in parsed[1]):  # math-verify parsed nothing but plain text
            return "unparsable"
        return "correct" if verify(*parsed, timeout_seconds=None) else "wrong"

    # With the default action the kernel ends this process even in a long C call, and even without a parent.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    compare("x", "1+x")  # the first call loads the grammar, which must not count towards a deadline
    reply("ready")
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            verdict = compare(request["gold"], request["answer"])
        except MemoryError:
            verdict = "timeout"
        except RecursionError:
            verdict = "unparsable"
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(verdict)


if __name__ == "__main__":
    main()
