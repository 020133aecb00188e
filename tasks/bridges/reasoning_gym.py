"""Procedural datasets of reasoning-gym: `task=reasoning_gym:NAME` (tested with 0.1.25).

    pip install 'echo_planes[reasoning_gym]'
    task=reasoning_gym:spell_backward task.config.max_word_len=6

An item is a pure function of (seed, index), the dataset's settings and the library's version. A few datasets
also depend on the order of sets (intermediate_integration, isomorphic_strings, knight_swap, word_ladder).
They need PYTHONHASHSEED, and `python -m echo_planes.task check` reports them. Questions are held out by a
hash of their text. The reward is `score_answer` of the text inside the last <answer></answer>; 1 is correct.
If `score_answer` raises, the answer is a counted failure.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import random
from functools import lru_cache
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions, Tokenizer
from echo_planes.data.tasks.answers import after_thought, answering, last_tagged, opens_thought
from echo_planes.data.tasks.chat import Chat, plain_prompt
from echo_planes.errors import ConfigError, DataError, TaskError
from echo_planes.types import Episode, Prompt, Reward

BLOCK = 256  # indices that share one dataset object, because some take most of a second to build
DRAWS = 16  # items per index in one dataset object
MOST_DRAWS = 64  # items tried for an index; without success the dataset has too few questions for a split
HOLDOUT = 4  # 1 question in 4 is held out; a smaller share would take many draws for each held-out prompt
INSTRUCTION = "{question}\n\nThink step by step, then give only the final answer inside <answer></answer>."


class ReasoningGymOptions(TaskOptions):
    """`task.*` settings of a procedural dataset."""

    dataset: str = Field(description="its name in reasoning-gym; task=reasoning_gym:NAME sets it")
    config: dict[str, Any] = Field(default={}, description="the dataset's own settings, as task.config.KEY")
    template: Literal["plain", "chat"] = Field(default="chat", description="how a question becomes tokens")


class ReasoningGymTask(TaskAdapter):
    """Task of generated questions, which their library scores.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such dataset, or does not take its settings.
        ModelError: template=chat and the tokenizer has no chat template.
    """

    Options: ClassVar[type[TaskOptions]] = ReasoningGymOptions
    named_by = "dataset"

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        self._options = cast(ReasoningGymOptions, options)
        name = self._options.dataset
        self._factory = _module("reasoning_gym.factory", name)
        if name not in self._factory.DATASETS:
            nearest = ", ".join(difflib.get_close_matches(name, self._factory.DATASETS, n=3, cutoff=0.0))
            raise ConfigError(f"task=reasoning_gym:{name}: it has no such dataset; the nearest are {nearest}")
        if taken := {"seed", "size"} & self._options.config.keys():
            raise ConfigError(f"task.config.{min(taken)}: the run sets it itself; leave it out")
        self._chat = Chat(tokenizer) if self._options.template == "chat" else None
        self._dataset = lru_cache(maxsize=8)(self._new_dataset)
        self._entry: tuple[str, dict[str, Any]] | None = None  # of the group being scored, by Prompt.answer

    def prompt(self, index: int) -> Prompt:
        return self._drawn(index, f"{self.seed}", held_out=False)

    def eval_prompt(self, index: int) -> Prompt:
        return self._drawn(index, "held out", held_out=True)

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        """Score the answer with the library, usually 0 to 1. Raises if the library's scorer raises."""
        place = json.loads(prompt.answer)
        dataset = self._dataset(place["seed"])
        if self._entry is None or self._entry[0] != prompt.answer:  # once per group: some take a second
            self._entry = (prompt.answer, self._same(prompt, dataset[place["item"]]))
        start = after_thought(episode.text, opened=opens_thought(self.tokenizer, prompt.token_ids))
        # As the library's `extract_answer`, in linear time.
        tagged = None if start is None else last_tagged(episode.text, "answer", start)
        answer = tagged and tagged[0].strip()
        score = dataset.score_answer(answer, self._entry[1])
        return Reward(score, bool(score >= 1), {"answered": float(answer is not None)})

    def right_answer(self, prompt: Prompt) -> str:
        answer = f"<answer>{json.loads(prompt.answer)['answer']}</answer>"
        return answering(self.tokenizer, prompt.token_ids, answer)

    def _same(self, prompt: Prompt, entry: dict[str, Any]) -> dict[str, Any]:
        """Return `entry`, generated again for scoring, after a check that its question is the prompt's."""
        if str(entry["question"]) != prompt.text:
            raise TaskError(
                f"task.dataset={self._options.dataset}: prompt {prompt.index} is another one in another "
                "process, so its answers cannot be scored; export PYTHONHASHSEED=0 or take another dataset"
            )
        return entry

    def _drawn(self, index: int, stream: str, *, held_out: bool) -> Prompt:
        """Return the prompt of `index` in a stream: the first of its draws that is held out, or is not."""
        block, position = divmod(index, BLOCK)
        for draw in range(MOST_DRAWS):
            part, row = divmod(draw, DRAWS)
            seed = random.Random(f"{stream}/{block}/{part}").getrandbits(31)
            entry = self._dataset(seed)[row * BLOCK + position]
            question = str(entry["question"])
            if _is_held_out(question) == held_out:
                place = {"answer": entry["answer"], "seed": seed, "item": row * BLOCK + position}
                return Prompt(index, self._encode(question), json.dumps(place, default=str), question)
        raise DataError(
            f"task.dataset={self._options.dataset}: {MOST_DRAWS} items for prompt {index} and none "
            f"{'held out' if held_out else 'to train on'}: it has too few questions; widen task.config"
        )

    def _encode(self, question: str) -> tuple[int, ...]:
        text = INSTRUCTION.format(question=question)
        if self._chat:
            return self._chat.prompt([{"role": "user", "content": text}])
        return plain_prompt(self.tokenizer, text + "\n")

    def _new_dataset(self, seed: int) -> Any:
        name = self._options.dataset
        try:
            return self._factory.create_dataset(name, seed=seed, size=BLOCK * DRAWS, **self._options.config)
        except (TypeError, ValueError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"task.config={self._options.config}: {name} of reasoning_gym does not take it ({error}); "
                "correct or leave out the key that it names"
            ) from error


LIBRARY_TASK = ReasoningGymTask


def _module(name: str, dataset: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task=reasoning_gym:{dataset}: no module named '{error.name}', which its questions come from; "
            "pip install 'echo_planes[reasoning_gym]'"
        ) from error


def _is_held_out(question: str) -> bool:
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % HOLDOUT == 0
