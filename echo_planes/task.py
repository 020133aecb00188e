"""`python -m echo_planes.task check|new`: check of a task's contract, and the skeleton of a new task.

A child process builds and calls the adapter. The parent kills it when a call does not return in time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from echo_planes.cluster.process import die_with_parent
from echo_planes.config.files import user_path
from echo_planes.config.gguf_model import is_gguf
from echo_planes.config.hub import pinned
from echo_planes.config.schema import BUILTIN_MODELS, Config
from echo_planes.data.tasks.adapter import Tokenizer
from echo_planes.data.tasks.check import NUM_PROMPTS, PROBE_LIMIT_S, Finding, Level, Setting, TaskCheck
from echo_planes.data.tasks.registry import load_tokenizer
from echo_planes.data.tasks.skeleton import write_skeleton
from echo_planes.errors import ConfigError, EchoPlanesError, StoppedError, UserError
from echo_planes.loop.loading import load_config
from echo_planes.testing.fakes import FakeTokenizer

START_LIMIT_S = 120.0  # for imports on a busy machine
CONVERT_LIMIT_S = 3600.0  # for a GGUF file; once, and large ones take minutes
GRACE_S = 5.0  # beyond a limit, at which the child ends itself with a traceback, until it is killed
FATAL = ("build", "prompts", "held-out prompts")  # an error of these probes ends the check
OTHER_PROCESS = "another process"  # the last probe, with a second child process
PROBLEM = 1  # exit status; 0: the contract is kept, 2: a person's mistake
_TAIL_BYTES = 1 << 16
_MAX_MESSAGE_BYTES = 1 << 22
_FRAME = re.compile(r'File "(.+)", line (\d+)')
_CHILD = "from echo_planes.task import answer_parent; answer_parent()"

USAGE = """usage: python -m echo_planes.task check TASK [section.key=value] ...
       python -m echo_planes.task new NAME [--folder FOLDER]

  check math                        a task of configs/task/
  check own.yaml                    a file of your own, with an adapter: key
  check package.module:Class        a TaskAdapter
  check NAME task.limit=50          what an installed package offers in the group echo_planes.tasks
  new my_task                       write my_task.py and test_my_task.py, which work as they are

Exit status of check: 0 the contract is kept (there may be warnings), 1 it is broken, 2 it could not be tried.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status. A mistake is one line on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        match words:
            case [*_, "--help" | "-h"]:
                print(USAGE, end="")
                return 0
            case ["check", task, *rest] if task:
                return _report(task, check_task(task, rest))
            case ["new", name] if name:
                return _new(name, Path())
            case ["new", name, "--folder", folder] | ["new", "--folder", folder, name] if name and folder:
                return _new(name, user_path(folder))
            case ["check" | "new", *_]:
                raise ConfigError(f"'{' '.join(words)}': one name is needed after '{words[0]}'; see --help")
            case _:
                given = f"'{words[0]}': unknown command" if words else "no command"
                raise ConfigError(f"{given}; write check or new, or --help for more")
    except EchoPlanesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, UserError) else PROBLEM
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return StoppedError.exit_status


def check_task(
    task: str, words: Sequence[str] = (), *, start_limit_s: float = START_LIMIT_S
) -> list[Finding]:
    """Probe a task in child processes and return all findings; a fault of the adapter raises nothing here.

    Args:
        task: as in `task=...` of a run.
        words: `section.key=value` settings of a run.
        start_limit_s: limit for imports, with the user's module, seconds.

    Raises:
        UserError: there is no such task, or a setting is wrong.
    """
    findings: list[Finding] = []
    done: list[str] = []
    while True:
        request = {"words": [f"task={task}", *words], "done": done}
        with _Child(request, hash_seed=1, limit_s=start_limit_s) as child:
            for message in child.messages():
                if "probe" in message and message["probe"] not in done:
                    done.append(message["probe"])
                    findings += [Finding(**finding) for finding in message["findings"]]
            if not child.has_ended:
                findings.append(child.lost())
        if child.prints is not None:
            return findings + _compared(child.prints, request, start_limit_s)
        if child.has_ended or child.probe in (*FATAL, OTHER_PROCESS, ""):
            return findings
        # A probe that has hung or crashed would do so again, so the next child skips it.
        done += [child.probe, *(["something to learn"] if child.probe.startswith("reward") else [])]


def _compared(prints: list[str], request: dict[str, Any], start_limit_s: float) -> list[Finding]:
    """Check that another process, with another seed of Python's `hash`, makes the same prompts."""
    with _Child({**request, "only_prints": True}, hash_seed=2, limit_s=start_limit_s) as child:
        for _ in child.messages():
            pass
        if child.prints is None:
            return [child.lost()]
    different = [i for i, (a, b) in enumerate(zip(prints, child.prints, strict=True)) if a != b]
    if not different:
        return [Finding("ok", OTHER_PROCESS, "makes the same prompts")]
    call = "prompt" if different[0] < NUM_PROMPTS else "eval_prompt"
    text = (
        f"{call}({different[0] % NUM_PROMPTS}) is another prompt in another process, and a run has many; "
        "look for hash() of text, the order of a set, the time, or a global `random`"
    )
    return [Finding("error", OTHER_PROCESS, text)]


# --- output --------------------------------------------------------------------------------------


def _report(task: str, findings: Sequence[Finding]) -> int:
    for finding in findings:
        mark = {"ok": "ok", "warning": "warning", "error": "FAILED"}[finding.level]
        print(f"{mark:8}{finding.probe:26}{finding.text}")
    counts = Counter(finding.level for finding in findings)
    print(f"{task}: {counts['ok']} ok, {counts['warning']} warnings, {counts['error']} failed")
    return PROBLEM if counts["error"] else 0


def _new(name: str, folder: Path) -> int:
    made = write_skeleton(name, folder)
    print(f"{made.task} and {made.test} are written, and work as they are. Next{_where(folder)}:")
    print(f"  python -m pytest {made.test.name}")
    print(f"  python -m echo_planes.task check {made.adapter}")
    print(f"  python -m echo_planes.run task={made.adapter}")
    return 0


def _where(folder: Path) -> str:
    return "" if folder.resolve() == Path.cwd() else f", in {folder}"


# --- the child, from outside ---------------------------------------------------------------------


class _Child:
    """A process that answers one request with JSON lines; leaving the context kills its process group.

    Args:
        request: argument of `answer_parent`.
        hash_seed: seed of Python's `hash`.
        limit_s: limit for its imports, seconds; later its messages say how long the parent must wait.
    """

    def __init__(self, request: dict[str, Any], *, hash_seed: int, limit_s: float) -> None:
        self.probe = self._doing = ""
        self.prints: list[str] | None = None
        self.has_ended = self._is_silent = False
        self._level: Level = "error"
        self._folder: str | None = None
        self._limit_s = limit_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed on leaving
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps({**request, "limit_s": limit_s})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(0.0)
        self._output.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the child's messages until it ends, or is silent for longer than its limit.

        Raises:
            UserError: the request holds a user's mistake.
        """
        if self._process.stdout is None:
            return
        pipe, rest = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(pipe, select.POLLIN | select.POLLHUP)
        while len(rest) < _MAX_MESSAGE_BYTES:
            if not poll.poll((self._limit_s + GRACE_S) * 1000):
                self._is_silent = True
                return
            data = os.read(pipe, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "mistake" in message:
                    raise UserError(message["mistake"])
                self._note(message)
                yield message

    def _note(self, message: dict[str, Any]) -> None:
        if "doing" in message:
            self._doing, self._level, self._limit_s = message["doing"], message["level"], message["limit_s"]
        self.probe = message.get("begin", self.probe)
        self._folder = message.get("folder", self._folder)
        self.prints = message.get("prints", self.prints)
        self.has_ended = message.get("end", self.has_ended)

    def lost(self) -> Finding:
        """Return the finding about a child that hung or crashed."""
        exit_status = self._end(GRACE_S)
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _TAIL_BYTES))
        output = self._output.read().decode(errors="replace")
        doing = self._doing or "importing the task"
        if self._is_silent or "Timeout (" in output:
            frames = _FRAME.findall(output.rpartition("Timeout (")[2])
            own = [frame for frame in frames if str(Path(frame[0]).parent) == self._folder] or frames
            place = f" (it was at {own[0][0]}:{own[0][1]})" if own else ""
            text = f"{doing} did not come back within {self._limit_s:g} s{place}; bound its work"
            return Finding(self._level, self.probe or "start", text)
        ended = f"signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"
        last = (output.strip().splitlines() or ["it said nothing"])[-1]
        text = f"{doing} ended its process ({ended}): {last[:300]}; a run would lose that process too"
        return Finding("error", self.probe or "start", text)

    def _end(self, patience_s: float) -> int:
        """Wait up to `patience_s` for the child's end, kill its process group, and return its exit status."""
        if self._process.returncode is None:
            handle = os.pidfd_open(self._process.pid)
            try:
                ending = select.poll()
                ending.register(handle, select.POLLIN)
                ending.poll(patience_s * 1000)
            finally:
                os.close(handle)
            os.killpg(self._process.pid, signal.SIGKILL)  # the id is not reused before the child is reaped
        return self._process.wait()


# --- the child, from inside ----------------------------------------------------------------------


def answer_parent() -> None:
    """Build the adapter that the request names, in the child, and send the findings of each probe."""
    die_with_parent()
    request = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps a task's prints out of the messages

    def tell(**message: object) -> None:
        replies.write(json.dumps(message) + "\n")

    def arm(doing: str, level: Level, limit_s: float) -> None:
        # This timer does not need the GIL, so it also ends a long integer power or regular expression.
        faulthandler.dump_traceback_later(limit_s, exit=True)
        tell(doing=doing, level=level, limit_s=limit_s)

    arm("importing the task", "error", request["limit_s"])
    try:
        config = load_config(request["words"])
        if is_gguf(config.model.path):
            arm("converting the model", "error", CONVERT_LIMIT_S)
            model = config.model.model_copy(update={"path": pinned(config.model.path)})
            config = config.model_copy(update={"model": model})
            arm("importing the task", "error", request["limit_s"])
        tokenizer, vocabulary, said = _tokenizer(config)
        check = TaskCheck(_setting(config, tokenizer, vocabulary), arm)
    except UserError as error:
        tell(mistake=str(error))
        return
    tell(folder=str(check.folder))
    if not request.get("only_prints"):
        tell(probe="tokenizer", findings=[asdict(said)])
        for probe in check.probes:
            if probe in request["done"] and probe != "build":
                continue
            tell(begin=probe)
            found = check.run(probe)
            tell(probe=probe, findings=[asdict(finding) for finding in found])
            if probe in FATAL and any(finding.level == "error" for finding in found):
                tell(end=True)
                return
    tell(begin=OTHER_PROCESS)
    arm("making prompts for another process", "error", PROBE_LIMIT_S)
    tell(prints=check.fingerprints(), end=True)


def _setting(config: Config, tokenizer: Tokenizer, vocabulary: int) -> Setting:
    return Setting(
        task=config.task,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        seed=config.run.seed,
        max_model_len=config.model.max_model_len,
        max_new_tokens=config.sampling.max_new_tokens,
    )


def _tokenizer(config: Config) -> tuple[Tokenizer, int, Finding]:
    """Return the model's tokenizer, or a stand-in, its vocabulary's size, and the finding about it."""
    folder, probe = config.model.folder, "tokenizer"
    why = ""
    if config.model.path in BUILTIN_MODELS and not folder.is_dir():
        why = f"{config.model.path} is not here"
    else:
        try:
            loaded: Any = load_tokenizer(folder, config.run.date)
            return loaded, len(loaded), Finding("ok", probe, f"{config.model.path}, {len(loaded)} tokens")
        except ImportError as error:
            why = str(error)
    text = f"one token per character stands in, as {why}; lengths will differ in a run"
    return FakeTokenizer(), sys.maxunicode + 1, Finding("warning", probe, text)


if __name__ == "__main__":
    sys.exit(main())
