"""The prompt stream: which index comes next, the ones that came back, and which prompt an index is."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from echo_planes.data.store.files import Files, LogFile, cannot_read
from echo_planes.data.tasks.adapter import WINDOW_GROUPS, Progress, TaskAdapter
from echo_planes.errors import DataError, TaskError
from echo_planes.types import Group, Prompt

BLOCK_PROMPTS = 32  # consecutive indices that have one level


class PromptCursor:
    """Hands out prompt indices 0, 1, 2, ... and takes back those whose work was lost.

    Returned indices go out again first, smallest first, so that no prompt is skipped.
    """

    def __init__(self, next_index: int = 0, returned: Iterable[int] = ()) -> None:
        self._next_index = next_index
        self._returned = list(returned)
        self._aside: set[int] = set()  # of those that came back: `take` passes them over
        heapq.heapify(self._returned)

    @property
    def next_index(self) -> int:
        """The smallest index never handed out."""
        return self._next_index

    @property
    def returned(self) -> tuple[int, ...]:
        """Indices waiting to go out again, ascending."""
        return tuple(sorted([*self._returned, *self._aside]))

    def take(self) -> int:
        """The next index to work on."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._next_index += 1
        return self._next_index - 1

    def give_back(self, index: int) -> None:
        """An index whose work ended without an accepted result."""
        heapq.heappush(self._returned, index)

    def set_aside(self, index: int) -> None:
        """An index that came back waits for somebody: only `take_aside` hands it out."""
        self._returned.remove(index)
        heapq.heapify(self._returned)
        self._aside.add(index)

    def take_aside(self, index: int) -> int:
        """Hand out an index that was set aside."""
        self._aside.remove(index)
        return index


class Curriculum:
    """Training prompt of each index, for tasks whose prompts get harder as the policy learns.

    The level of a block of indices is decided when the first of them goes out, and is durable before it does.
    So an index that was ever issued is the same prompt for good: when its work was lost and it goes out
    again, and after a crash and a resume, whatever checkpoint that starts from. What was observed is not
    kept: a resumed run goes on at the last level, and measures anew before it leaves it.

    Args:
        task: asked for its level where it has several; of a task with one, every index is `prompt(index)`.
        path: a file of this run, the level of a block in each line. Not made for a task with one level.

    Raises:
        ClusterError: the file cannot be written.
        DataError: it cannot be read, or holds something else.
    """

    def __init__(self, task: TaskAdapter, path: Path) -> None:
        self._task = task
        self._levels: list[int] = []  # of each block
        self._path = path
        self._size_bytes = 0
        self._recent: deque[float] = deque(maxlen=WINDOW_GROUPS)  # share of right samples, of each group
        self._num_groups = 0
        if task.num_levels > 1:
            if not path.exists():
                LogFile(path, Files(), create=True).close()
            lines = _whole_lines(path)
            self._levels = _levels(lines, task.num_levels, path)
            self._size_bytes = len(lines)

    @property
    def progress(self) -> Progress:
        """Progress by which the task decides its level now."""
        accuracy = sum(self._recent) / max(len(self._recent), 1)
        return Progress(self._levels[-1] if self._levels else 0, self._num_groups, accuracy)

    def prompt(self, index: int) -> Prompt:
        """Training prompt number `index`, for the first time or again.

        Raises:
            ClusterError: its level cannot be written down.
            TaskError: the task named none.
        """
        if self._task.num_levels == 1:
            return self._task.prompt(index)
        num_missing = index // BLOCK_PROMPTS + 1 - len(self._levels)
        if num_missing > 0:
            self._decide(num_missing)
        return self._task.prompt_at(index, self._levels[index // BLOCK_PROMPTS])

    def observe(self, group: Group) -> None:
        """A group that was accepted. Those of other levels than the present one are passed over."""
        samples = group.trajectories
        block = samples[0].prompt.index // BLOCK_PROMPTS
        if block < len(self._levels) and self._levels[block] == self._levels[-1]:
            self._recent.append(sum(sample.reward.correct for sample in samples) / len(samples))
            self._num_groups += 1

    def _decide(self, num_blocks: int) -> None:
        now, last = self.progress, self._task.num_levels - 1
        level = self._task.level(now)
        if type(level) is not int or not 0 <= level <= last:
            raise TaskError(
                f"level returned {level!r:.60}; it must be a whole number from 0 to {last}, num_levels - 1: "
                "correct the task's `level`"
            )
        self._append(b"%d\n" % level * num_blocks)
        self._levels += [level] * num_blocks
        if level != now.level:
            self._recent.clear()
            self._num_groups = 0

    def _append(self, lines: bytes) -> None:
        log = LogFile(self._path, Files(), self._size_bytes)
        try:
            log.append([[lines]])
        finally:
            log.close()
        self._size_bytes = log.size_bytes


def _whole_lines(path: Path) -> bytes:
    """The file but for a last line that a crash has cut short: no prompt of that block went out."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise cannot_read(path, error) from error
    return data[: data.rfind(b"\n") + 1]


def _levels(lines: bytes, num_levels: int, path: Path) -> list[int]:
    levels = []
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.isdigit() or len(line) > 9 or int(line) >= num_levels:
            raise DataError(
                f"{path}, line {number}: {line[:20]!r} is no level of a task that has {num_levels}; resume "
                "with the settings that the run was started with, or restore the file"
            )
        levels.append(int(line))
    return levels
