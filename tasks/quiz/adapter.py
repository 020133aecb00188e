"""The quiz: `task=quiz`. Generated questions for a small chat model, each in the model's chat template."""

from __future__ import annotations

from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions, Tokenizer
from echo_planes.data.tasks.chat import Chat
from echo_planes.errors import ModelError
from echo_planes.types import Episode, Prompt, Reward

from .questions import Question, held_out_question, is_right, training_question


class QuizTask(TaskAdapter):
    """Questions with one right number or name.

    Raises:
        ModelError: the tokenizer has no chat template.
    """

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "the model's tokenizer has no chat template, in which the quiz is asked: choose a chat model"
            )
        self._chat = Chat(tokenizer)

    def prompt(self, index: int) -> Prompt:
        return self._prompt(index, training_question(self.seed, index))

    def eval_prompt(self, index: int) -> Prompt:
        return self._prompt(index, held_out_question(index))

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        """Return 1 for a right answer, otherwise 0; the parts tell how short answers become."""
        ended = episode.finish_reason == "stop"
        right = is_right(prompt.text, prompt.answer, episode.text, ended=ended)
        is_bare = episode.text.strip().removesuffix(".") == prompt.answer
        return Reward(float(right), right, {"ended": float(ended), "nothing_else": float(is_bare)})

    def _prompt(self, index: int, question: Question) -> Prompt:
        ids = self._chat.prompt([{"role": "user", "content": question.text}])
        return Prompt(index, ids, question.answer, question.text)
