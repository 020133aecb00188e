"""Chat templates with the structure of Qwen's and Llama's, and a made-up one.

The templates are our own words, with the special tokens, branches and white space of the originals
(Qwen2.5-Instruct, Qwen3, Llama 3, 3.1 and 3.2 Instruct); where the originals are installed, they are
compared. What a conversation must look like is said a second time, in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from echo_planes.data.tasks.chat import Chat

pytest.importorskip("transformers")
Messages = list[dict[str, Any]]

# --- templates -----------------------------------------------------------------------------------

# Tool answers, one after another, are one message of the user; a tool list stands in the system message.
QWEN_TAIL = """
{%- macro tool(i) -%}
    {%- if i == 0 or messages[i - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
    {{- '\\n<tool_response>\\n' + messages[i].content + '\\n</tool_response>' -}}
    {%- if i == messages|length - 1 or messages[i + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- endmacro -%}
{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{% endmacro -%}
{%- set first = messages[0] if messages[0].role == 'system' else none -%}
{%- set system = first.content if first else default_system -%}
{%- if tools -%}
    {{- turn('system', (system + '\\n\\n' if system else '') + 'Tools: ' + tools|tojson) -}}
{%- elif system %}{{ turn('system', system) }}{% endif -%}
"""
QWEN_2_5 = (
    "{%- set default_system = 'Be helpful.' -%}"
    + QWEN_TAIL
    + """
{%- for message in messages -%}
    {%- if message.role == 'tool' %}{{ tool(loop.index0) }}
    {%- elif not (loop.first and first) %}{{ turn(message.role, message.content) }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
)
# Thinking is kept after the last question alone, where a tool's answer is none, and left out before it.
QWEN_3 = (
    "{%- set default_system = '' -%}"
    + QWEN_TAIL
    + """
{%- set ns = namespace(question=messages|length - 1, found=false) -%}
{%- for message in messages|reverse -%}
    {%- set is_tool = message.content.startswith('<tool_response>')
            and message.content.endswith('</tool_response>') -%}
    {%- if not ns.found and message.role == 'user' and not is_tool -%}
        {%- set ns.question = loop.revindex0 -%}
        {%- set ns.found = true -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set text = message.content -%}
    {%- if message.role == 'tool' %}{{ tool(loop.index0) }}
    {%- elif message.role == 'assistant' -%}
        {%- set parts = text.split('</think>') -%}
        {%- set said = parts[-1].lstrip('\\n') if parts|length > 1 else text -%}
        {%- set thought = parts[0].split('<think>')[-1].strip('\\n') if parts|length > 1 else '' -%}
        {%- if loop.index0 > ns.question and (loop.last or thought) -%}
            {%- set said = '<think>\\n' + thought + '\\n</think>\\n\\n' + said.lstrip('\\n') -%}
        {%- endif -%}
        {{- turn('assistant', said) -}}
    {%- elif not (loop.first and first) %}{{ turn(message.role, text) }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""
)
LLAMA_HEAD = """
{%- macro turn(role, text) -%}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + text + '<|eot_id|>' -}}
{%- endmacro -%}
"""
LLAMA_TAIL = """
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""
LLAMA_3 = (
    LLAMA_HEAD
    + """
{%- for message in messages -%}
    {{- bos_token if loop.first -}}{{- turn(message.role, message.content|trim) -}}
{%- endfor -%}
"""
    + LLAMA_TAIL
)
# There is always a system message, which tells the date; tools stand in the first question.
LLAMA_3_1 = (
    LLAMA_HEAD
    + """
{%- set first = messages[0] if messages[0].role == 'system' else none -%}
{%- set date = date_string if date_string is defined else '1 Feb 2003' -%}
{{- bos_token + turn('system', 'Date: ' + date + '\\n\\n' + (first.content|trim if first else '')) -}}
{%- for message in (messages[1:] if first else messages) -%}
    {%- if message.role == 'tool' %}{{ turn('ipython', message.content|tojson) }}
    {%- elif loop.first and tools -%}
        {{- turn('user', 'Tools: ' + tools|tojson + '\\n' + message.content|trim) -}}
    {%- else %}{{ turn(message.role, message.content|trim) }}{% endif -%}
{%- endfor -%}
"""
    + LLAMA_TAIL
)
MADE_UP = """
{{- 'A talk.\\n\\n' -}}
{%- for message in messages -%}
    {%- if message.role == 'assistant' %}{{ 'me: ' + message.content + '</s>\\n--\\n' }}
    {%- else %}{{ '(' + message.role + ') ' + message.content + '\\n\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'me: ' }}{% endif -%}
"""
# --- what they must write ------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A template, and in Python what it writes of a conversation that begins with a question."""

    template: str
    end: str  # what ends an answer
    head: str  # before the first question where no system message is given
    question: str  # a message of the user, {text}
    opening: str  # what stands before the policy's answer
    after: str  # between the end of an answer and the next message
    trims: bool = False  # white space around the user's text
    options: dict[str, Any] = field(default_factory=dict)

    def between(self, text: str) -> str:
        """Everything from the end of one answer to the beginning of the next, the end token left out."""
        return self.after + self.asked(text) + self.opening

    def asked(self, text: str) -> str:
        return self.question.format(text=text.strip() if self.trims else text)


TOOLS = [{"type": "function", "function": {"name": "look"}}]
SHOWN_TOOLS = '[{"type": "function", "function": {"name": "look"}}]'
IM, EOT, EMPTY = "<|im_end|>", "<|eot_id|>", "<think>\n\n</think>\n\n"
CHATML = ("<|im_start|>user\n{text}<|im_end|>\n", "<|im_start|>assistant\n", "\n")
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA = (HEADER.format("user") + "{text}<|eot_id|>", HEADER.format("assistant"), "", True)
BEGIN = "<|begin_of_text|>"
DATED = BEGIN + HEADER.format("system") + "Date: 1 Feb 2003\n\n<|eot_id|>"
SYSTEM = "<|im_start|>system\n{}<|im_end|>\n"
FORMS = {
    "qwen2.5": Form(QWEN_2_5, IM, SYSTEM.format("Be helpful."), *CHATML),
    "qwen2.5 tools": Form(
        QWEN_2_5,
        IM,
        SYSTEM.format("Be helpful.\n\nTools: " + SHOWN_TOOLS),
        *CHATML,
        options={"tools": TOOLS},
    ),
    "qwen3": Form(QWEN_3, IM, "", *CHATML),
    "qwen3 no thinking": Form(
        QWEN_3, IM, "", CHATML[0], CHATML[1] + EMPTY, CHATML[2], options={"enable_thinking": False}
    ),
    "llama3": Form(LLAMA_3, EOT, BEGIN, *LLAMA),
    "llama3.1": Form(LLAMA_3_1, EOT, DATED, *LLAMA),
    "made-up": Form(MADE_UP, "</s>", "A talk.\n\n", "(user) {text}\n\n", "me: ", "\n--\n"),
}
SPECIAL = [
    IM,
    "<|im_start|>",
    EOT,
    BEGIN,
    "<|start_header_id|>",
    "<|end_header_id|>",
    "</s>",
    "<|endoftext|>",
]
# Line ends stay together, a space goes with its word: what both families' tokenizers do.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"
WORDS = "user\n assistant\n system\n\n hello there\n\n think\n\n\n ok tool response "


@lru_cache(maxsize=32)
def tokenizer_of(template: str, end: str) -> Any:
    """A Hugging Face tokenizer of bytes with some merges, those of line ends among them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytewise])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([WORDS] * 4, trainer)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=BEGIN, eos_token=end, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def shown(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def rendered(form: Form, messages: Messages, *, opened: bool = True) -> str:
    tokenizer = tokenizer_of(form.template, form.end)
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened, **form.options)
    )


# --- the originals, where they are installed -----------------------------------------------------

ORIGINALS = {  # package, file -> our form
    ("vllm", "transformers_utils/chat_templates/template_minicpmv45.jinja"): "qwen3 no thinking",
    ("trl", "chat_templates/qwen2_5.jinja"): "qwen2.5",
    ("trl", "chat_templates/qwen3.jinja"): "qwen3",
    ("trl", "chat_templates/llama3.jinja"): "llama3",
    ("trl", "chat_templates/llama3_1.jinja"): "llama3.1",
    ("trl", "chat_templates/llama3_2.jinja"): "llama3.1",
}


def original(package: str, file: str) -> str:
    spec = find_spec(package)
    places = [Path(place) / file for place in (spec and spec.submodule_search_locations) or ()]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        pytest.skip(f"no {file} of {package} installed")
    return found.read_text()


TALKS: list[list[tuple[str, str]]] = [
    [("user", "a")],
    [("user", "a\n"), ("assistant", "b"), ("user", " c ")],
    [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "c"), ("assistant", "d")],
    [("user", "a"), ("assistant", "<think>hm</think>b"), ("tool", "7"), ("assistant", "d")],
    [("user", "a"), ("assistant", "b"), ("user", "<tool_response>7</tool_response>"), ("assistant", "d")],
]


@pytest.mark.parametrize(("package", "file"), ORIGINALS)
def test_our_templates_write_what_the_originals_write(package: str, file: str) -> None:
    ours = FORMS[ORIGINALS[package, file]]
    theirs = replace(ours, template=original(package, file))
    begin = {"role": "system", "content": "Play."}
    for talk in TALKS:
        messages = [begin, *({"role": role, "content": text} for role, text in talk)]
        if "llama3.jinja" in file and any(role == "tool" for role, _ in talk):
            continue  # it has no tools
        for opened in (True, False):
            # What the system message says around ours (a date, say) is their own text.
            cut = [rendered(form, messages, opened=opened).partition("Play.")[2] for form in (ours, theirs)]
            assert cut[0] == cut[1]
            assert cut[0]
    chat = Chat(tokenizer_of(theirs.template, theirs.end), **theirs.options)
    reply = chat.reply({"role": "user", "content": "x"}, ended=True)
    assert shown(tokenizer_of(theirs.template, theirs.end), reply) == ours.between("x")
