"""Conversations as tokens: what a chat template puts around messages, found once and never sampled again.

Rendering a whole conversation anew after each turn would tokenise the policy's own answers a second time,
and templates leave parts of old answers out (their thinking). So only what stands between two answers is
taken from the template: everything after the end token of one answer, up to where the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from echo_planes.cluster.process import within
from echo_planes.errors import ModelError

TEMPLATE_LIMIT_S = 10.0  # to write two questions

_QUESTION, _ANSWER = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


class Chat:
    """Turns messages into tokens by the tokenizer's chat template.

    Args:
        tokenizer: with a chat template whose answers end with its end token.
        options: for the template (`enable_thinking=False`, say).

    Raises:
        ModelError: it has no template, or one that cannot write a question, or not within TEMPLATE_LIMIT_S.
    """

    def __init__(self, tokenizer: ChatTokenizer, **options: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the model's tokenizer has no chat template: use task.template=plain")
        self._tokenizer = tokenizer
        self._options = options
        endless = ModelError(
            f"the chat template does not come to an end within {TEMPLATE_LIMIT_S:g} s: use "
            "task.template=plain"
        )
        try:
            with within(TEMPLATE_LIMIT_S, endless):
                self._begun = self._render([_QUESTION])
                another = self._render([{**_QUESTION, "content": "3"}])
        except ModelError:
            raise
        except Exception as error:  # templates are programs, which can go wrong in any way
            raise ModelError(
                f"the chat template cannot write a question ({type(error).__name__}: {error!s:.300}): use "
                "task.template=plain"
            ) from error
        if another == self._begun:
            raise ModelError(
                "the chat template leaves out a question's text, it may want a list of parts: use "
                "task.template=plain"
            )

    def prompt(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Tokens of messages ({"role":, "content":} each), up to where the policy's answer begins."""
        return tuple(self._render(list(messages)))

    def reply(self, message: dict[str, str], *, ended: bool) -> tuple[int, ...]:
        """Tokens between the policy's last answer and its next one: the end of the one, `message`, the
        beginning of the other.

        Args:
            ended: the answer ended with an end token, the tokenizer's or another of the model's; otherwise
                the tokenizer's comes first here.

        Raises:
            ModelError: the template ends no answer with the end token, or writes a question differently once
                it was answered.
        """
        end = self._tokenizer.eos_token_id
        whole = self._render([_QUESTION, _ANSWER, message])
        answered = whole[self._answer_begins(whole) :]
        if end is None or end not in answered:
            raise ModelError(
                "the chat template ends no answer with the tokenizer's end token, so that turns cannot be "
                "told apart: set 'eos_token' in tokenizer_config.json to the token that ends an answer"
            )
        after = answered[answered.index(end) + 1 :]
        return tuple(after) if ended else (end, *after)

    def _answer_begins(self, whole: list[int]) -> int:
        """Index at which the question has ended, and the answer's end token is not passed yet."""
        if whole[: len(self._begun)] == self._begun:
            return len(self._begun)
        # Some templates open an answer with what they leave out of old ones (an empty thinking block).
        question = self._render([_QUESTION], add_generation_prompt=False)
        if whole[: len(question)] != question:
            raise ModelError(
                "the chat template writes a question differently once it was answered, so that turns cannot "
                "be told apart: use task.template=plain"
            )
        return len(question)

    def _render(self, messages: list[dict[str, str]], **changed: Any) -> list[int]:
        options: dict[str, Any] = {"add_generation_prompt": True, **self._options, **changed}
        ids = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        return [int(token) for token in ids]
