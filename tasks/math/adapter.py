"""The math task: `task=math`, with `task.dataset` one of addition, gsm8k, math500."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import ClassVar, cast

from echo_planes.data.tasks.adapter import WINDOW_GROUPS, Progress, TaskAdapter, TaskOptions, Tokenizer
from echo_planes.data.tasks.answers import answering, opens_thought
from echo_planes.data.tasks.chat import Chat, plain_prompt
from echo_planes.errors import DataError
from echo_planes.types import Episode, Prompt, Reward

from .datasets import Problem, held_out_pairs, load_splits, training_pair
from .grade import AnswerForm, parse_response
from .judging import MathJudge
from .options import MathOptions

ADDITION_MAX_NEW_TOKENS = 6  # more than the longest right answer, so that a wrong one may be longer
FORMS: dict[AnswerForm, tuple[str, str]] = {"boxed": ("\\boxed{", "}"), "answer": ("<answer>", "</answer>")}
INSTRUCTION = (
    "{question}\n\nThink step by step inside <think></think>, then give only the final answer inside {form}."
)


class MathTask(TaskAdapter):
    """Questions with one right answer.

    Raises:
        ModelError: template=chat and the tokenizer has no chat template.
    """

    Options: ClassVar[type[TaskOptions]] = MathOptions

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        self._options = cast(MathOptions, options)
        self._is_addition = self._options.dataset == "addition"
        self.num_levels = self._options.levels
        self._only_carry = self._options.level == "carry"
        template = self._options.template or ("plain" if self._is_addition else "chat")
        self._chat = Chat(tokenizer) if template == "chat" else None
        if self._is_addition:
            self.max_new_tokens = ADDITION_MAX_NEW_TOKENS
        self._judge = MathJudge(self._options.verifier_timeout_s, self._options.max_answer_chars)

    def prompt(self, index: int) -> Prompt:
        """Return prompt `index`. Addition: an independent draw. Files: each row once per shuffled epoch."""
        if self._is_addition:
            return self.prompt_at(index, self.num_levels - 1)
        problems = self._splits[0]
        epoch, position = divmod(index, len(problems))
        return self._problem_prompt(index, problems, _order(self.seed, epoch, len(problems)), position)

    def sources(self) -> tuple[Sequence[str], Sequence[str]]:
        if self._is_addition or self._options.max_prompt_tokens:  # others replace rows that are too long
            return (), ()
        training, held_out = self._splits
        order = _order(self.seed, 0, len(training))
        return [training[i].place for i in order], [problem.place for problem in held_out]

    def level(self, progress: Progress) -> int:
        """Return the level: the next one once the last `WINDOW_GROUPS` prompts reached `next_level_at`."""
        is_known = progress.num_groups >= WINDOW_GROUPS and progress.accuracy >= self._options.next_level_at
        return min(progress.level + is_known, self.num_levels - 1)

    def prompt_at(self, index: int, level: int) -> Prompt:
        """Return prompt `index` at a level. Addition: operands below the level's share of `max_operand`."""
        if not self._is_addition:
            return self.prompt(index)
        limit = math.ceil(self._options.max_operand * (level + 1) / self.num_levels)
        pair = training_pair(self.seed, index, limit, only_carry=self._only_carry)
        return self._addition_prompt(index, *pair)

    def eval_prompt(self, index: int) -> Prompt:
        """Return held-out question `index`, the same for every seed; questions repeat after the last."""
        if self._is_addition:
            pairs = held_out_pairs(self._options.max_operand, only_carry=self._only_carry)
            return self._addition_prompt(index, *pairs[index % len(pairs)])
        problems = self._splits[1]
        return self._problem_prompt(index, problems, range(len(problems)), index % len(problems))

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        """Return the reward. Addition: 1 if the text is only the sum, and ended before the token limit."""
        if self._is_addition:
            correct = episode.finish_reason == "stop" and episode.text.strip() == prompt.answer
            return Reward(float(correct), correct)
        opened = opens_thought(self.tokenizer, prompt.token_ids)
        parsed = parse_response(episode.text, self._options.answer_form, opened=opened)
        verdict = self._judge.verdict(prompt.answer, parsed.answer)
        has_answer = parsed.answer is not None
        ended = has_answer and not parsed.has_trailing and episode.finish_reason == "stop"
        shares = {
            "correct": float(verdict == "correct"),
            "format": float(has_answer),
            "thinking": float(parsed.has_thinking),
            "no_trailing": float(ended),
        }
        value = shares["correct"]
        if self._options.reward == "composite":
            value = self._options.weights.total(shares)
        failures = {name: float(verdict == name) for name in ("timeout", "unparsable")}
        return Reward(value, verdict == "correct", {**shares, **failures})

    def right_answer(self, prompt: Prompt) -> str:
        """Return the reference answer: for files in the form that the prompt asks for."""
        if self._is_addition:
            return prompt.answer
        begin, end = FORMS[self._options.answer_form]
        return answering(self.tokenizer, prompt.token_ids, f"{begin}{prompt.answer}{end}")

    @cached_property
    def _splits(self) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
        return load_splits(self._options.dataset, self._options.data, self._options.eval_data)

    def _addition_prompt(self, index: int, a: int, b: int) -> Prompt:
        text = f"{a}+{b}="
        return Prompt(index, self._encode(text), str(a + b), text)

    def _problem_prompt(
        self, index: int, problems: tuple[Problem, ...], order: range | list[int], position: int
    ) -> Prompt:
        limit = self._options.max_prompt_tokens
        for step in range(len(order)):  # the next prompt that fits replaces one that is too long
            problem = problems[order[(position + step) % len(order)]]
            form = "".join(FORMS[self._options.answer_form])
            token_ids = self._encode(INSTRUCTION.format(question=problem.question, form=form))
            if limit is None or len(token_ids) <= limit:
                return Prompt(index, token_ids, problem.answer, problem.question)
        raise DataError(f"all {len(order)} prompts are longer than task.max_prompt_tokens={limit}: raise it")

    def _encode(self, text: str) -> tuple[int, ...]:
        if self._chat:
            return self._chat.prompt([{"role": "user", "content": text}])
        return plain_prompt(self.tokenizer, text)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> list[int]:
    order = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
