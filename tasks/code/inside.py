"""The two programs in the sandbox that judge an answer, connected by a pipe each way.

`answer` runs the answer and performs the judge's requests, for example a call. `judge` runs the authors'
tests, with a `Remote` for each name that the answer defines, and holds the expected values. It never runs the
answer's code. Only plain data passes between them: a value from the answer cannot define its own equality,
and the answer's process cannot read the tests.

Plain data: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, and
builtin types by name. Arguments are copied. Other values stay in the answer's process, and the tests get a
`Remote` of them: they may call it, get and set its attributes and iterate over it, but not compare it.

The pool copies this file into both scratch folders, so it imports only the standard library.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

SOURCE, JUDGE, ANSWER = "inside.py", "import inside; inside.judge()", "import inside; inside.answer()"
TOLD = "told.json"  # file with a program's input
MAX_FRAME_BYTES = 16 << 20
MAX_REASON = 200  # characters
JSON_INT = 1 << 63  # larger integers are sent as hexadecimal digits, which take linear time to read
NONSENSE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)  # from an invalid reply
SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}
TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}


class Refused(Exception):
    """Error for a value that cannot be sent, or an operation that a `Remote` does not support."""


class Gone(Exception):
    """Error for a peer program that has ended, or sends invalid data."""


# --- the wire ------------------------------------------------------------------------------------


def encode(value: Any, other: Callable[[Any], int]) -> Any:
    """Encode plain data for JSON; an instance of a derived type becomes one of its plain type.

    Args:
        other: returns the number that stands for a value that is not plain data.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -JSON_INT < number < JSON_INT else ["i", int.__format__(number, "x")]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, (bytes, bytearray)):
        return ["b" if isinstance(value, bytes) else "B", bytes(value).hex()]
    if isinstance(value, dict):
        return ["d", [[encode(key, other), encode(item, other)] for key, item in value.items()]]
    for tag, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [tag, [encode(item, other) for item in value]]
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return ["y", value.__name__]
    return ["r", other(value), type(value).__name__]


def decode(data: Any, other: Callable[[int, str], Any]) -> Any:
    """Decode a result of `encode`, into exactly the builtin types.

    Args:
        other: returns the value for a number and the name of its type.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError, RecursionError: `data` is no result of `encode`.
    """
    if data is None or isinstance(data, (bool, str, int)):
        return data
    tag, *parts = data
    if tag in SEQUENCES:
        return SEQUENCES[tag]([decode(item, other) for item in parts[0]])
    if tag == "d":
        return {decode(key, other): decode(item, other) for key, item in parts[0]}
    if tag == "f":
        return float.fromhex(parts[0])
    if tag == "i":
        return int(parts[0], 16)
    if tag == "c":
        return complex(float.fromhex(parts[0]), float.fromhex(parts[1]))
    if tag in ("b", "B"):
        return (bytes if tag == "b" else bytearray).fromhex(parts[0])
    if tag == "y":
        return TYPES[parts[0]]
    if tag == "r":
        return other(int(parts[0]), str(parts[1]))
    raise ValueError(f"no plain data: {data!r:.60}")


class Channel:
    """Frames of JSON over two pipes, each preceded by its length in four bytes."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink

    def send(self, message: object) -> None:
        """Write one frame. Raises Refused if it is too large, Gone if the other end does not read."""
        body = json.dumps(message).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise Refused(f"{len(body)} bytes are more than the {MAX_FRAME_BYTES} that can be carried")
        view = memoryview(len(body).to_bytes(4, "little") + body)
        try:
            while view:
                view = view[os.write(self._sink, view) :]
        except BrokenPipeError as error:
            raise Gone("the reader is gone") from error

    def receive(self) -> Any:
        """Read one frame. Raises Gone at the end of the pipe, or if the data is no frame."""
        size = int.from_bytes(self._read(4), "little")
        if size > MAX_FRAME_BYTES:
            raise Gone("it sent more than can be carried")
        try:
            return json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise Gone("it sent what is no message") from error

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = os.read(self._source, min(size - len(parts), 1 << 16))
            if not part:
                raise Gone("it ended")
            parts += part
        return bytes(parts)


# --- the answer's process ------------------------------------------------------------------------


def serve(code: str, channel: Channel) -> None:
    """Run the answer, then perform the judge's requests until the judge ends."""
    module = sys.modules["answer"] = ModuleType("answer")
    kept: list[Any] = []

    def number(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def stays(at: int, kind: str) -> Any:
        return kept[at]

    def done(request: list[Any]) -> Any:
        asked, *given = (decode(part, stays) for part in request)
        if asked == "names":
            return {name: vars(module)[name] for name in given[0] if name in vars(module)}
        if asked == "call":
            return given[0](*given[1], **given[2])
        if asked == "list":
            return list(given[0])
        return getattr(given[0], given[1]) if asked == "get" else setattr(*given)

    try:
        exec(compile(code, "answer", "exec", dont_inherit=True), vars(module))
    except BaseException as error:  # noqa: BLE001  raised by the answer; its earlier definitions stay
        print(reason(error), file=sys.stderr, flush=True)
    while True:
        try:
            request = channel.receive()
        except Gone:
            return
        try:
            channel.send(["ok", encode(done(request), number)])
        except Gone:
            return
        except BaseException as error:  # noqa: BLE001  any error is reported to the judge
            with suppress(Gone):
                channel.send(["raised", type(error).__name__, reason(error)])


def reason(error: BaseException) -> str:
    """Describe an exception in one line; its text may come from the answer."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_REASON]
    except BaseException:  # noqa: BLE001  __str__ may come from the answer and raise
        return type(error).__name__[:MAX_REASON]


# --- the judge's process -------------------------------------------------------------------------


class Remote:
    """Reference to a value that is no plain data and stays in the answer's process."""

    __slots__ = ("_asks", "_kind", "_number")

    def __init__(self, asks: Asks, number: int, kind: str) -> None:
        for name, value in (("_asks", asks), ("_number", number), ("_kind", kind)):
            object.__setattr__(self, name, value)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._asks("call", self, given, named)

    def __getattr__(self, name: str) -> Any:
        return self._asks("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._asks("set", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._asks("list", self))

    def _refuse(self, *_: object) -> NoReturn:
        raise Refused(f"the answer returned {self._kind!r:.60}, which is no plain data to compare")

    __eq__ = __ne__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Asks:
    """Judge's side of the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.is_gone = False

    def __call__(self, what: str, *given: Any) -> Any:
        """Return the reply of the answer's process, or raise the builtin exception that it raised.

        Raises:
            Refused: the request or the reply has a value that cannot be sent, or the exception is no builtin.
            Gone: the answer's process has ended, or its reply is invalid.
        """
        if self.is_gone:
            raise Gone("the answer ended")
        request = [encode(part, self._number) for part in (what, *given)]
        try:
            self._channel.send(request)
            said, *parts = self._channel.receive()
            if said == "ok":
                return decode(parts[0], self._remote)
            name, text = str(parts[0]), str(parts[1])[:MAX_REASON]
        except (Gone, *NONSENSE) as error:
            self.is_gone = True
            raise Gone(f"the answer ended ({error})"[:MAX_REASON]) from error
        kind = TYPES.get(name, Refused)
        raise kind(text) if issubclass(kind, Exception) else Refused(text)

    def _remote(self, number: int, kind: str) -> Remote:
        return Remote(self, number, kind)

    def _number(self, value: Any) -> int:
        if type(value) is Remote:
            number: int = object.__getattribute__(value, "_number")
            return number
        raise Refused(f"{type(value).__name__!r:.60} is no plain data to call the answer with")


def judged(told: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Run the tests on the answer behind a channel, and return their result.

    Args:
        told: `names` of the answer that the tests use; `authors`, code of the authors that the tests use;
            `tests`, with `_case(lambda: ...)` in place of each assertion.

    Returns:
        `passed` and `total`, numbers of assertions; `cut`, 1 if an exception ended the tests early; `gone`,
        whether the answer's process ended before the tests; `why`, the last error, "" without one.
    """
    asks = Asks(channel)
    passed: list[bool] = []  # one entry per assertion
    why = ""

    def case(check: Callable[[], object]) -> None:
        nonlocal why
        try:
            passed.append(bool(check()))
        except Exception as error:  # noqa: BLE001  a test that raises has failed
            passed.append(False)
            why = reason(error)

    space = {"__name__": "tests", "_case": case}
    is_cut = False
    try:
        exec(compile(told["authors"], "authors", "exec", dont_inherit=True), space)
        defined = dict(asks("names", told["names"]))
        space |= {name: defined[name] for name in told["names"] if name in defined}
        exec(compile(told["tests"], "tests", "exec", dont_inherit=True), space)
    except BaseException as error:  # noqa: BLE001  ended the tests early
        is_cut, why = True, reason(error)
    counts = {"passed": sum(passed), "total": len(passed), "cut": int(is_cut)}
    return {**counts, "gone": asks.is_gone, "why": why}


# --- both ----------------------------------------------------------------------------------------


def start() -> tuple[Any, Channel]:
    """Return this program's input and its channel, which leaves standard input and output free."""
    channel = Channel(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    with open(TOLD) as file:
        return json.load(file), channel


def answer() -> NoReturn:
    """Run the answer's program."""
    serve(*start())
    os._exit(0)  # skips exit handlers that the answer may have registered


def judge() -> NoReturn:
    """Run the judge's program; its verdict is the last line of its standard error."""
    found = judged(*start())
    os.write(2, b"\n" + json.dumps(found).encode())
    os._exit(0)
