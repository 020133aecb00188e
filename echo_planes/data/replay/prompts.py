"""The prompt stream: the next index, returned indices, and the prompt of each index."""

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
    """Cursor that hands out prompt indices 0, 1, 2, ... and takes back those whose work was lost.

    Returned indices go out again first, smallest first, so that no prompt is skipped.
    """

    def __init__(self, next_index: int = 0, returned: Iterable[int] = ()) -> None:
        self._next_index = next_index
        self._returned = list(returned)
        self._aside: set[int] = set()  # returned indices that only `take_aside` hands out
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
        """Hand out the next index."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._next_index += 1
        return self._next_index - 1

    def give_back(self, index: int) -> None:
        """Take back an index, so that it goes out again."""
        heapq.heappush(self._returned, index)

    def set_aside(self, index: int) -> None:
        """Reserve a returned index: from now on only `take_aside` hands it out."""
        self._returned.remove(index)
        heapq.heapify(self._returned)
        self._aside.add(index)

    def take_aside(self, index: int) -> int:
        """Hand out a reserved index."""
        self._aside.remove(index)
        return index


class Curriculum:
    """Training prompt of each index, for tasks whose prompts get harder as the policy learns.

    The task decides the level of a block of indices when the first of them goes out. The level is durable
    before that. So an index that was ever issued stays the same prompt: when it goes out again, and after a
    resume from any checkpoint. Observed accuracies are not saved: a resumed run continues at the last level,
    and measures anew before the level changes.

    Args:
        task: asked for its level if it has several; with one level, every index is `prompt(index)`.
        path: file of this run with the level of a block in each line; not made for a task with one level.

    Raises:
        ClusterError: the file cannot be written.
        DataError: the file cannot be read, or does not hold levels of this task.
    """

    def __init__(self, task: TaskAdapter, path: Path) -> None:
        self._task = task
        self._levels: list[int] = []  # level of each block
        self._path = path
        self._size_bytes = 0
        self._recent: deque[float] = deque(maxlen=WINDOW_GROUPS)  # share of correct samples in each group
        self._num_groups = 0
        if task.num_levels > 1:
            if not path.exists():
                LogFile(path, Files(), create=True).close()
            lines = _whole_lines(path)
            self._levels = _levels(lines, task.num_levels, path)
            self._size_bytes = len(lines)

    @property
    def progress(self) -> Progress:
        """Progress at the present level, from which the task decides the next level."""
        accuracy = sum(self._recent) / max(len(self._recent), 1)
        return Progress(self._levels[-1] if self._levels else 0, self._num_groups, accuracy)

    def prompt(self, index: int) -> Prompt:
        """Return training prompt number `index`, for the first time or again.

        Raises:
            ClusterError: its level cannot be written.
            TaskError: the task returned no valid level.
        """
        if self._task.num_levels == 1:
            return self._task.prompt(index)
        num_missing = index // BLOCK_PROMPTS + 1 - len(self._levels)
        if num_missing > 0:
            self._decide(num_missing)
        return self._task.prompt_at(index, self._levels[index // BLOCK_PROMPTS])

    def level(self, index: int) -> int:
        """Return the level of an issued prompt; 0 for a task with one level."""
        return self._levels[index // BLOCK_PROMPTS] if self._levels else 0

    def observe(self, group: Group) -> None:
        """Count an accepted group towards the progress, if it is of the present level."""
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
    """Return a file without a last line that a crash cut short; no prompt of that line's block went out."""
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
