"""Prompts and conversations as tokens: those that a chat template puts between the policy's answers.

Rendering a whole conversation again after each turn would tokenise the policy's own answers a second time,
and templates leave out parts of old answers (their thinking). So only the tokens between two answers come
from the template: all after the end token of one answer, up to the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from echo_planes.cluster.process import within
from echo_planes.errors import ModelError, shown

TEMPLATE_LIMIT_S = 10.0  # limit for rendering two questions

_QUESTION, _ANSWER = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that this module uses."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


def plain_prompt(tokenizer: ChatTokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of a prompt without a template. The token that begins a text is in front if the
    tokenizer adds one by default, unless the text has it; tokens that end a text are never added.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    begin = getattr(tokenizer, "bos_token_id", None)
    if begin is None or ids[:1] == [begin] or tokenizer.encode("", add_special_tokens=True)[:1] != [begin]:
        return tuple(ids)
    return (begin, *ids)


class Chat:
    """Conversion of messages into tokens by the tokenizer's chat template.

    Args:
        tokenizer: has a chat template that ends answers with the tokenizer's end token.
        options: options of the template, for example `enable_thinking=False`.

    Raises:
        ModelError: there is no template, or it cannot render a question within TEMPLATE_LIMIT_S.
    """

    def __init__(self, tokenizer: ChatTokenizer, **options: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the model's tokenizer has no chat template: use task.template=plain")
        self._tokenizer = tokenizer
        self._options = options
        self._written: set[tuple[str, ...]] = set()  # roles of conversations whose texts are all written
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
        except Exception as error:  # templates are programs, which can raise anything
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
        """Return the tokens of messages ({"role":, "content":} each), up to the policy's answer.

        Raises:
            ModelError: the template leaves out a message, as some do with roles that they do not know.
        """
        ids = self._render(list(messages))
        roles = tuple(message["role"] for message in messages)
        if roles not in self._written:
            for i, message in enumerate(messages):
                longer = {**message, "content": f"{message['content']}4"}
                if self._render([*messages[:i], longer, *messages[i + 1 :]]) == ids:
                    raise ModelError(
                        f"the chat template leaves out message {i + 1}, of role {shown(message['role'])}: "
                        "give it a role that the template knows, or use task.template=plain"
                    )
            self._written.add(roles)
        return tuple(ids)

    def reply(self, message: dict[str, str], *, ended: bool) -> tuple[int, ...]:
        """Return the tokens between two answers of the policy: the end of the last one, `message`, and the
        beginning of the next.

        Args:
            message: the message between the answers.
            ended: whether the answer ended with an end token, the tokenizer's or another one of the model;
                if not, the tokenizer's comes first here.

        Raises:
            ModelError: the template ends no answer with the end token, or renders a question differently
                once it has an answer.
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
        """Return an index between the end of the question and the answer's end token."""
        if whole[: len(self._begun)] == self._begun:
            return len(self._begun)
        # Some templates begin a new answer with tokens that old ones do not have (an empty thinking block).
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
