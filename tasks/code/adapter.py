"""The code task: `task=code`, with `task.dataset` one of functions, humaneval, mbpp."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import ClassVar, cast

from echo_planes.data.tasks.adapter import Policy, TaskAdapter, TaskOptions, Tokenizer
from echo_planes.data.tasks.answers import answering, opens_thought
from echo_planes.data.tasks.chat import Chat, plain_prompt
from echo_planes.errors import DataError
from echo_planes.sandbox.model import Limits
from echo_planes.types import Episode, Prompt, Reward

from .functions import HEAD, Formula, formula
from .judging import Answer, Verdict, called, parse_answer
from .options import CodeOptions
from .problems import Problem, load_problems, split
from .runner import ProgramRunner

MOST_SAMPLES = 16  # programs of a group for which the deadline is made; all may run until their limit
MOST_SOLUTIONS = 20  # of the authors, judged before a run
MOST_FAILING = 0.2  # of them may fail their own tests
SHOWN_CHARACTERS = 2000  # most characters of the tests, and of the program, in an answer's notes
FUNCTION_MAX_NEW_TOKENS = 10  # five signs and the end token, with room for wrong answers
INSTRUCTION = (
    "{question}\n\nThink inside <think></think>, then give the whole program in one ```python block."
)


class CodeTask(TaskAdapter):
    """Task to write a program, which hidden tests judge in a sandbox.

    Raises:
        ModelError: template=chat and the tokenizer has no chat template.
    """

    Options: ClassVar[type[TaskOptions]] = CodeOptions

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        self._options = cast(CodeOptions, options)
        self._is_generated = self._options.dataset == "functions"
        template = self._options.template or ("plain" if self._is_generated else "chat")
        self._chat = Chat(tokenizer) if template == "chat" else None
        if self._is_generated:
            self.max_new_tokens = FUNCTION_MAX_NEW_TOKENS
        # The first answer waits for all of its group, and for the sandbox to start.
        self.reward_limit_s = 60.0 + math.ceil(MOST_SAMPLES / self._options.slots) * self._options.program_s
        self._judged: dict[str, Verdict] = {}  # of the group being scored, by program
        self._judged_prompt: Prompt | None = None

    def preflight(self) -> str:
        """Describe the sandbox around the programs, and judge solutions of the problems' authors.

        Raises:
            SandboxError: programs cannot run safely here.
            DataError: too many solutions fail their own tests.
        """
        try:
            told = f"sandbox: {self._runner.protection}"
            return told if self._is_generated else told + self._judge_authors()
        finally:
            self._runner.close()

    def prompt(self, index: int) -> Prompt:
        """Return prompt `index`. Functions: an independent draw. Files: each row once per shuffled epoch."""
        if self._is_generated:
            return self._generated(index, f"{self.seed}/{index}", held_out=False)
        problems = self._splits[0]
        epoch, position = divmod(index, len(problems))
        return self._from_file(index, 0, _order(self.seed, epoch, len(problems))[position])

    def eval_prompt(self, index: int) -> Prompt:
        """Return held-out problem `index`, the same for every seed; files repeat after the last."""
        if self._is_generated:
            return self._generated(index, f"held out/{index}", held_out=True)
        return self._from_file(index, 1, index % len(self._splits[1]))

    def sources(self) -> tuple[Sequence[str], Sequence[str]]:
        if self._is_generated:
            return (), ()
        training, held_out = self._splits
        order = _order(self.seed, 0, len(training))
        return [training[i].place for i in order], [problem.place for problem in held_out]

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Sample one answer and add the tests to its notes; `reward` adds the program and its verdict."""
        episode = await super().rollout(prompt, policy)
        tests = self._problem(prompt).tests[:SHOWN_CHARACTERS]
        return replace(episode, notes=json.dumps({"tests": tests}))

    def prepare(self, prompt: Prompt, episodes: Sequence[Episode]) -> None:
        """Run all programs of a group side by side, each distinct program once."""
        problem = self._problem(prompt)
        answers = [self._parse(prompt, episode) for episode in episodes]
        codes = {answer.code for answer in answers if answer.code and answer.is_python}
        self._judged = self._runner.judge(sorted(codes), problem.tests, problem.head, problem.solution)
        self._judged_prompt = prompt

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        """Return the reward: 1 if all hidden tests pass, else 0, or the weighted parts if composite."""
        answer = self._parse(prompt, episode)
        if answer.code is None or not answer.is_python:
            found = Verdict(0, 1, "empty" if answer.code is None else "syntax")
        else:
            if prompt != self._judged_prompt or answer.code not in self._judged:
                self.prepare(prompt, [episode])
            found = self._judged[answer.code]
        correct = found.passed == found.total
        parts = {
            "passed": found.share,
            "syntax": float(answer.is_python),
            "format": float(answer.code is not None),
            "thinking": float(answer.has_thinking),
        }
        value = float(correct)
        if self._options.reward == "composite":
            value = self._options.weights.total(parts)
        noted = json.loads(episode.notes) if episode.notes else {}
        noted |= {"passed": found.passed, "total": found.total, "verdict": found.status}
        noted["output"] = found.detail
        if answer.code:
            noted["program"] = answer.code[:SHOWN_CHARACTERS]
        return Reward(value, correct, {**parts, f"is_{found.status}": 1.0}, json.dumps(noted))

    def right_answer(self, prompt: Prompt) -> str:
        """Return the authors' solution: for files as a block of Python."""
        if self._is_generated:
            return Formula(prompt.text.partition("\n")[0].removeprefix("# ")).code
        solution = self._problem(prompt).solution
        return answering(self.tokenizer, prompt.token_ids, f"```python\n{solution}\n```")

    @cached_property
    def _splits(self) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
        return split(load_problems(self._options.dataset, self._options.data))

    @cached_property
    def _runner(self) -> ProgramRunner:
        limits = Limits(
            wall_s=self._options.program_s,
            cpu_s=self._options.program_s,
            memory_bytes=self._options.memory_mib << 20,
        )
        return ProgramRunner(self._options.slots, limits, self._options.interpreter)

    def _judge_authors(self) -> str:
        """Return a sentence about authors' solutions that fail their own tests, as without a package."""
        problems = [problem for part in self._splits for problem in part]
        some = problems[:: math.ceil(len(problems) / MOST_SOLUTIONS)]
        failing = []
        for problem in some:
            found = self._runner.judge([problem.solution], problem.tests, problem.head, problem.solution)
            judged = found[problem.solution]
            if judged.passed < judged.total:
                reason = judged.detail.strip().rpartition("\n")[2] or judged.status
                failing.append(f"{problem.place} ({reason})")
        if not failing:
            return ""
        about = f"the authors' solutions of {len(failing)} of {len(some)} problems fail their own tests here"
        about += f", first that of {failing[0]}; no answer to such a problem earns anything"
        if len(failing) > MOST_FAILING * len(some):
            raise DataError(
                f"task.dataset={self._options.dataset}: {about}; if the tests need packages, set "
                "task.interpreter to a Python that has them"
            )
        return f"; {about}"

    def _generated(self, index: int, seed: str, *, held_out: bool) -> Prompt:
        found = formula(seed, held_out=held_out)
        return Prompt(index, plain_prompt(self.tokenizer, found.prompt), found.tests(), found.prompt)

    def _from_file(self, index: int, part: int, row: int) -> Prompt:
        question = INSTRUCTION.format(question=self._splits[part][row].question)
        if self._chat:
            ids = self._chat.prompt([{"role": "user", "content": question}])
        else:
            ids = plain_prompt(self.tokenizer, question + "\n")
        return Prompt(index, ids, f"{part}/{row}", question)

    def _problem(self, prompt: Prompt) -> Problem:
        if self._is_generated:
            return Problem(
                prompt.text, HEAD, prompt.answer, f"{HEAD}0"
            )  # only the name that the solution defines is needed
        part, row = map(int, prompt.answer.split("/"))
        return self._splits[part][row]

    def _parse(self, prompt: Prompt, episode: Episode) -> Answer:
        problem = self._problem(prompt)
        return parse_answer(
            episode.text,
            problem.head,
            fenced=not self._is_generated,
            names=called(problem.tests, problem.head, problem.solution),
            opened=opens_thought(self.tokenizer, prompt.token_ids),
        )


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(length), length)
