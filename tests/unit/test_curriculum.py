"""Levels: a prompt that was issued stays what it was, whatever is learnt, lost or resumed."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from echo_planes.data.replay.prompts import BLOCK_PROMPTS, Curriculum, PromptCursor
from echo_planes.data.tasks.adapter import WINDOW_GROUPS, Progress, TaskOptions
from echo_planes.errors import ClusterError, DataError, TaskError
from echo_planes.tasks.math.adapter import MathTask
from echo_planes.tasks.math.options import MathOptions
from echo_planes.testing.fakes import FakeTask, FakeTokenizer
from echo_planes.types import Group, Prompt
from tests.unit.test_schema import make_group


class Laddered(FakeTask):
    """Goes up after two right groups, down after two wrong ones, and keeps what it was told."""

    num_levels = 4

    def __init__(self) -> None:
        super().__init__(TaskOptions(), FakeTokenizer(), 0)
        self.told: list[Progress] = []

    def level(self, progress: Progress) -> int:
        self.told.append(progress)
        if progress.num_groups < 2:
            return progress.level
        return min(max(progress.level + (1 if progress.accuracy > 0.5 else -1), 0), 3)

    def prompt_at(self, index: int, level: int) -> Prompt:
        return replace(self.prompt(index), text=f"{index} at {level}")


def answered(prompt: Prompt, num_right: int, size: int = 4) -> Group:
    """A group of `size` samples of a prompt, of which so many are right."""
    group = make_group("g", 0, size=size)
    samples = tuple(
        replace(t, prompt=prompt, reward=replace(t.reward, correct=i < num_right))
        for i, t in enumerate(group.trajectories)
    )
    return replace(group, trajectories=samples)


def addition(**options: object) -> MathTask:
    return MathTask(MathOptions.model_validate(options), FakeTokenizer(), 0)


def operands(prompt: Prompt) -> list[int]:
    return [int(n) for n in prompt.text.removesuffix("=").split("+")]


def test_a_level_begins_with_a_block_and_progress_begins_with_the_level(tmp_path: Path) -> None:
    task = Laddered()
    curriculum = Curriculum(task, tmp_path / "levels.txt")
    first = [curriculum.prompt(i) for i in range(BLOCK_PROMPTS)]
    assert {prompt.text.split()[-1] for prompt in first} == {"0"}
    curriculum.observe(answered(first[0], 4))
    curriculum.observe(answered(first[1], 3))
    assert curriculum.progress == Progress(0, 2, 0.875)
    second = curriculum.prompt(BLOCK_PROMPTS)
    assert second.text == f"{BLOCK_PROMPTS} at 1"
    assert curriculum.progress == Progress(1, 0, 0.0)
    curriculum.observe(answered(first[2], 0))  # of the level before: it says nothing about this one
    curriculum.observe(answered(second, 1))
    assert curriculum.progress == Progress(1, 1, 0.25)
    assert task.told == [Progress(0, 0, 0.0), Progress(0, 2, 0.875)]  # asked once for each block


def test_a_prompt_that_skips_blocks_writes_the_level_of_each(tmp_path: Path) -> None:
    curriculum = Curriculum(Laddered(), tmp_path / "levels.txt")
    first = curriculum.prompt(0)
    for _ in range(2):
        curriculum.observe(answered(first, 4))
    skipped = curriculum.prompt(3 * BLOCK_PROMPTS)
    assert (tmp_path / "levels.txt").read_text() == "0\n1\n1\n1\n"
    assert Curriculum(Laddered(), tmp_path / "levels.txt").prompt(3 * BLOCK_PROMPTS) == skipped


def test_returned_prompts_go_out_lowest_first_also_beside_one_that_is_reserved() -> None:
    cursor = PromptCursor()
    issued = [cursor.take() for _ in range(4)]
    for index in (0, 3, 1, 2):
        cursor.give_back(index)
    cursor.set_aside(0)
    assert [cursor.take() for _ in range(4)] == [1, 2, 3, len(issued)]
    assert cursor.take_aside(0) == 0


def test_accuracy_is_of_the_last_groups(tmp_path: Path) -> None:
    curriculum = Curriculum(Laddered(), tmp_path / "levels.txt")
    prompt = curriculum.prompt(0)
    for num_right in [0] * WINDOW_GROUPS + [4] * (WINDOW_GROUPS // 2):
        curriculum.observe(answered(prompt, num_right))
    assert curriculum.progress == Progress(0, WINDOW_GROUPS * 3 // 2, 0.5)


@pytest.mark.parametrize("seed", range(8))
def test_an_issued_prompt_is_the_same_for_good(tmp_path: Path, seed: int) -> None:
    """Random work, losses and crashes; a resume starts from the last checkpoint of the cursor."""
    rng, path, issued = random.Random(seed), tmp_path / "levels.txt", dict[int, str]()
    cursor, curriculum = PromptCursor(), Curriculum(Laddered(), path)
    cut = (0, ())
    for _ in range(2000):
        index = cursor.take()
        prompt = curriculum.prompt(index)
        assert issued.setdefault(index, prompt.text) == prompt.text
        match rng.choices(["accepted", "lost", "checkpoint", "crash"], [80, 15, 4, 1])[0]:
            case "accepted":
                curriculum.observe(answered(prompt, rng.choice([0, 4])))
            case "lost":
                cursor.give_back(index)
            case "checkpoint":
                cut = (cursor.next_index, (*cursor.returned, index))
            case _:
                cursor, curriculum = PromptCursor(*cut), Curriculum(Laddered(), path)
    assert len({text.split()[-1] for text in issued.values()}) > 1


def test_a_resumed_run_goes_on_at_the_last_level(tmp_path: Path) -> None:
    path = tmp_path / "levels.txt"
    curriculum = Curriculum(Laddered(), path)
    for _ in range(2):
        curriculum.observe(answered(curriculum.prompt(0), 4))
    curriculum.prompt(BLOCK_PROMPTS)
    path.write_bytes(
        path.read_bytes() + b"3"
    )  # a crash cut the next line short: none of its prompts went out
    resumed = Curriculum(Laddered(), path)
    assert resumed.progress == Progress(1, 0, 0.0)
    assert resumed.prompt(BLOCK_PROMPTS * 2).text.endswith("at 1")
    assert path.read_text() == "0\n1\n1\n"


def test_the_level_is_on_disk_before_the_prompt_goes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, pieces: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    curriculum = Curriculum(Laddered(), tmp_path / "levels.txt")
    curriculum.prompt(0)
    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", full)
        assert curriculum.prompt(BLOCK_PROMPTS - 1).text.endswith("at 0")  # its block is there already
        with pytest.raises(ClusterError, match="No space left"):
            curriculum.prompt(BLOCK_PROMPTS)
    assert curriculum.prompt(BLOCK_PROMPTS).text.endswith("at 0")


@pytest.mark.parametrize("content", ["0\n4\n", "0\nx\n", "-1\n", "0\n\n", "9" * 5000 + "\n"])
def test_levels_that_the_task_does_not_have_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "levels.txt"
    path.write_text(content)
    with pytest.raises(
        DataError, match=r"levels\.txt, line [12]: .* is no level of a task that has 4"
    ) as caught:
        Curriculum(Laddered(), path)
    assert "\n" not in str(caught.value)


def test_levels_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"cannot read {tmp_path}: Is a directory"):
        Curriculum(Laddered(), tmp_path)


def test_no_descriptor_stays_open_for_a_block(tmp_path: Path) -> None:
    curriculum = Curriculum(Laddered(), tmp_path / "levels.txt")
    before = len(os.listdir("/proc/self/fd"))
    for block in range(20):
        curriculum.prompt(block * BLOCK_PROMPTS)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("wrong", [-1, 4, 1.0, None, True])
def test_a_task_that_names_no_level_is_told(tmp_path: Path, wrong: object) -> None:
    task = Laddered()
    task.level = lambda progress: wrong  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(TaskError, match=f"level returned {wrong!r}; it must be a whole number from 0 to 3"):
        Curriculum(task, tmp_path / "levels.txt").prompt(0)


def test_a_task_with_one_level_is_left_alone(tmp_path: Path) -> None:
    task = addition()
    curriculum = Curriculum(task, tmp_path / "levels.txt")
    assert [curriculum.prompt(i) for i in range(100)] == [task.prompt(i) for i in range(100)]
    curriculum.observe(answered(task.prompt(0), 4))
    assert list(tmp_path.iterdir()) == []


# --- generated addition --------------------------------------------------------------------------


def test_additions_operands_grow_with_the_level() -> None:
    task = addition(levels=4, max_operand=100)
    largest = [max(max(operands(task.prompt_at(i, level))) for i in range(2000)) for level in range(4)]
    assert largest == [24, 49, 74, 99]
    assert [task.prompt_at(i, 3) for i in range(50)] == [addition().prompt(i) for i in range(50)]
    assert task.prompt(5) == addition().prompt(5)
    held_out = {addition().eval_prompt(i).text for i in range(500)}
    assert {task.eval_prompt(i).text for i in range(500)} == held_out  # what is measured does not change
    assert held_out.isdisjoint(task.prompt_at(i, level).text for i in range(500) for level in range(4))


def test_addition_goes_on_once_a_level_is_known(tmp_path: Path) -> None:
    task = addition(levels=3, next_level_at=0.75)
    assert task.level(Progress(0, WINDOW_GROUPS - 1, 1.0)) == 0  # too few to tell
    assert task.level(Progress(0, WINDOW_GROUPS, 0.74)) == 0
    assert task.level(Progress(0, WINDOW_GROUPS, 0.75)) == 1
    assert task.level(Progress(2, WINDOW_GROUPS, 1.0)) == 2
    curriculum = Curriculum(task, tmp_path / "levels.txt")
    largest = []
    for index in range(BLOCK_PROMPTS * 10):
        prompt = curriculum.prompt(index)
        curriculum.observe(answered(prompt, 3))
        largest.append(max(operands(prompt)))
    steps = [max(largest[i : i + BLOCK_PROMPTS]) for i in range(0, len(largest), BLOCK_PROMPTS)]
    assert max(steps[:2]) < 34 <= max(steps[2:4]) < 67 <= max(steps[4:])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"levels": 20}, "levels=20 of max_operand=100 are too small to tell apart; lower levels to 12"),
        ({"dataset": "gsm8k", "levels": 2}, "dataset=gsm8k comes from files: leave out max_operand, levels"),
    ],
)
def test_levels_that_cannot_be_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        addition(**options)
