"""Rewards from child processes, so that a slow, hanging or crashing reward never stalls an engine.

A child process holds the task adapter and answers one group at a time (`data.tasks.reward_child`). A
reward that raises, returns an invalid value, or takes too long is a `RewardFailure`, never a silent zero. The
scorer kills a child that missed a deadline, and starts another when there is work for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from echo_planes.errors import RunError, WaitTimeoutError
from echo_planes.types import Episode, Prompt, Reward, RewardFailure

MAX_CHILDREN = 4
GROW_AFTER_S = 1.0  # longest wait of a group for a free child, before the scorer starts one more
START_LIMIT_S = 120.0  # importing the user's module, on a busy machine
_MAX_REPLY_BYTES = 4 << 20  # more than the largest reward that `data.tasks.reward_child` lets through


class Scorer(Protocol):
    """Scorer of the answers to one prompt."""

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Reward | RewardFailure]:
        """Return one outcome for each episode, in order."""
        ...

    def longest(self) -> str:
        """Return the answer whose reward has been computed for longest, as text; "": none is."""
        ...

    async def close(self) -> None:
        """End everything that the scorer has started."""
        ...


class ProcessScorer:
    """Scorer on up to `MAX_CHILDREN` child processes, started as they are needed.

    Args:
        module: module that each child runs; `data.tasks.reward_child` describes its messages.
        setup: JSON that tells the child which adapter to build.
        limit_s: deadline of one answer's reward, seconds.
    """

    def __init__(self, module: str, setup: str, limit_s: float) -> None:
        self._module = module
        self._setup = setup
        self._limit_s = limit_s
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._starting = 0
        self._closed = False
        self._scoring: dict[_Child, str] = {}  # the present answer of each child, the oldest first
        self._freed = asyncio.Event()

    async def start(self) -> None:
        """Start the first child, so that no group waits for its imports.

        Raises:
            RunError: the child does not start.
        """
        self._idle.append(await self._start())

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Reward | RewardFailure]:
        """Return one outcome for each episode; after a deadline or a crash the rest fail unscored.

        Raises:
            RunError: no child process can be started.
        """
        child = await self._take()
        outcomes: list[Reward | RewardFailure] = []
        is_done = False  # all answers came; otherwise a late one could be taken for the next group's
        try:
            child.send([prompt, list(episodes)])
            for number in range(1, len(episodes) + 1):
                self._scoring.pop(child, None)
                self._scoring[child] = f"answer {number} of {len(episodes)} to prompt {prompt.index}"
                outcomes.append(_outcome(await child.reply(self._limit_s)))
            is_done = True
        except TimeoutError:
            outcomes.append(RewardFailure("reward_timeout", f"took longer than {self._limit_s:g} s"))
        except (EOFError, OSError):
            outcomes.append(RewardFailure("reward_error", f"its process ended ({await child.ended()})"))
        finally:
            self._scoring.pop(child, None)
            if is_done and not self._closed:
                self._idle.append(child)
            else:
                await self._end(child)
            self._freed.set()
        missing = RewardFailure("failed", "not scored: the reward of another answer failed")
        return outcomes + [missing] * (len(episodes) - len(outcomes))

    def longest(self) -> str:
        """Do `Scorer.longest`."""
        return next(iter(self._scoring.values()), "")

    async def close(self) -> None:
        """Kill all children; no more are started."""
        self._closed = True
        for child in list(self._children):
            await self._end(child)
        self._idle.clear()

    async def _take(self) -> _Child:
        while True:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    return child
                await self._end(child)  # the idle child died, for example for lack of memory
            self._freed.clear()
            num = len(self._children) + self._starting
            try:
                async with asyncio.timeout(GROW_AFTER_S if num else 0):
                    await self._freed.wait()
            except TimeoutError:
                if len(self._children) + self._starting < MAX_CHILDREN:
                    return await self._start()

    async def _start(self) -> _Child:
        if self._closed:
            raise RunError("rewards were asked for after the worker was stopped")
        self._starting += 1
        try:
            child = await _Child.start(self._module, self._setup)
        finally:
            self._starting -= 1
        self._children.add(child)
        if self._closed:
            await self._end(child)
        return child

    async def _end(self, child: _Child) -> None:
        self._children.discard(child)
        await child.kill()


class _Child:
    """One child process. Messages both ways are JSON after their length in four bytes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, setup: str) -> _Child:
        # The child must find the user's task, so it gets this process's module paths.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # its own process group, so that its descendants end with it
        )
        child = cls(process)
        try:
            child.send(json.loads(setup))
            ready = await child.reply(START_LIMIT_S)
        except TimeoutError:
            await child.kill()
            raise WaitTimeoutError("reward process start", START_LIMIT_S) from None
        except (EOFError, OSError):
            raise RunError(f"the reward's process does not start ({await child.ended()})") from None
        except BaseException:
            await child.kill()
            raise
        if "error" in ready:
            await child.kill()
            raise RunError(f"the reward's process does not start: {ready['error']}")
        return child

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the child is gone."""
        stdin = self._process.stdin
        if stdin is None or stdin.is_closing():
            raise BrokenPipeError
        data = json.dumps(message, default=_fields).encode()
        stdin.write(len(data).to_bytes(4, "big") + data)

    async def reply(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer. Raises TimeoutError, or EOFError if the child is gone."""
        stdout = self._process.stdout
        if stdout is None:
            raise EOFError
        async with asyncio.timeout(limit_s):
            size = int.from_bytes(await stdout.readexactly(4), "big")
            if size > _MAX_REPLY_BYTES:
                raise EOFError
            answer: dict[str, Any] = json.loads(await stdout.readexactly(size))
        return answer

    async def ended(self) -> str:
        """Kill the process if it still runs, and describe how it ended."""
        await self.kill()
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"

    async def kill(self) -> None:
        """Kill the process and its process group, and wait for its end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()


def _fields(message: Any) -> dict[str, Any]:
    """Return a dataclass's fields for JSON; `dataclasses.asdict` would copy every single token."""
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}


def _outcome(answer: dict[str, Any]) -> Reward | RewardFailure:
    if "status" in answer:
        return RewardFailure(answer["status"], answer["error"])
    return Reward(**answer)
