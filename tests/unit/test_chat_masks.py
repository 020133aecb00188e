"""Episodes in chat templates: masks cover exactly what the policy sampled, and everything else is what the
template writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.data.tasks.adapter import Policy
from echo_planes.data.tasks.chat import Chat
from echo_planes.data.tasks.environment import Environment, EpisodeOptions, EpisodeTask, Turn
from echo_planes.errors import ModelError
from echo_planes.types import Prompt, Reward, Sample, Span
from tests.unit.test_chat_templates import (
    EMPTY,
    FORMS,
    HEADER,
    IM,
    Form,
    Messages,
    rendered,
    shown,
    tokenizer_of,
)


class Talk(Environment):
    """Says its lines in order."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = list(lines)

    async def step(self, action: str) -> Turn:
        return Turn(self._lines.pop(0)) if self._lines else Turn("", done=True)

    def result(self) -> Reward:
        return Reward(0.0, False)

    def close(self) -> None:
        return


class TalkTask(EpisodeTask):
    """Asks the lines of `talk` in order."""

    lines: Sequence[str] = ()

    def prompt(self, index: int) -> Prompt:
        return self.make_prompt(index, self.lines[0])

    eval_prompt = prompt

    def environment(self, prompt: Prompt, policy: Policy) -> Environment:
        return Talk(self.lines[1:])


class Scripted:
    """Answers with given tokens, and remembers what it was asked. An answer without `end` was cut off."""

    def __init__(self, answers: Sequence[tuple[int, ...]], end: int | None) -> None:
        self._answers = iter(answers)
        self._end = end
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        self.asked.append(tuple(token_ids))
        ids = next(self._answers)
        spans = (Span(0, len(ids), 1, "d"),)
        return Sample(ids, (-0.5,) * len(ids), spans, "stop" if ids[-1:] == (self._end,) else "length")


def talk_task(form: Form, lines: Sequence[str]) -> TalkTask:
    tokenizer = tokenizer_of(form.template, form.end)
    task = TalkTask(EpisodeOptions(template="chat", max_episode_tokens=10_000), tokenizer, 0)
    task._chat = Chat(tokenizer, **form.options)
    task.lines = lines
    return task


TEXTS = st.text("ab 1.\n", max_size=8).map(lambda text: f"q{text}")
THOUGHTS = st.sampled_from(
    ["", "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n", "</think>", "<think>"]
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[str], bool]:
    """Pieces that are tokenised one by one, as a policy may sample them, and whether the answer ended."""
    pieces = draw(st.lists(st.text("ab o\n", min_size=1, max_size=3), min_size=1, max_size=4))
    return [draw(THOUGHTS), *pieces], draw(st.booleans())


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, answers()), min_size=1, max_size=4))
def test_masks_cover_exactly_what_the_policy_sampled(
    name: str, turns: list[tuple[str, tuple[list[str], bool]]]
) -> None:
    form = FORMS[name]
    tokenizer = tokenizer_of(form.template, form.end)
    sampled = [
        tuple(i for piece in [*pieces, *[form.end] * ended] for i in tokenizer.encode(piece))
        for _, (pieces, ended) in turns
    ]
    task = talk_task(form, [question for question, _ in turns])
    policy, prompt = Scripted(sampled, tokenizer.eos_token_id), task.prompt(0)
    episode = asyncio.run(task.rollout(prompt, policy))
    own = [i for i, mine in zip(episode.response_ids, episode.response_mask, strict=True) if mine]
    assert tuple(own) == sum(sampled, ())
    # Byte for byte: the head, then question and answer in turns, whatever was thought in them.
    expected = form.head + form.asked(turns[0][0]) + form.opening
    asked = [expected]
    for (_, (pieces, _)), (question, _) in pairwise([*turns, ("", ([], True))]):
        asked.append(asked[-1] + "".join(pieces) + form.end + form.between(question))
    assert [shown(tokenizer, ids) for ids in policy.asked] == asked[:-1]
    # The next question begins with all that was asked and answered before, token for token.
    whole = prompt.token_ids + episode.response_ids
    for ids, answer in zip(policy.asked, sampled, strict=True):
        assert whole[: len(ids) + len(answer)] == ids + answer
        start = len(ids) - len(prompt.token_ids)
        assert all(episode.response_mask[start : start + len(answer)])
    # Where an answer was cut off, its end was put there for it, and is not the policy's.
    ends = sum(not ended for _, (_, ended) in turns[:-1])
    outside = [i for i, mine in zip(episode.response_ids, episode.response_mask, strict=True) if not mine]
    assert outside.count(tokenizer.eos_token_id) - ends == sum(
        form.between(question).count(form.end) for question, _ in turns[1:]
    )


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=2, max_size=4), st.booleans())
def test_without_thinking_it_is_what_the_template_writes(
    name: str, turns: list[tuple[str, str]], has_system: bool
) -> None:
    form = FORMS[name]
    tokenizer = tokenizer_of(form.template, form.end)
    chat = Chat(tokenizer, **form.options)
    begin: Messages = [{"role": "system", "content": "Play well."}] if has_system else []
    messages = [*begin, {"role": "user", "content": turns[0][0]}]
    ids = list(chat.prompt(messages))
    for (_, answer), (question, _) in pairwise(turns):
        said = answer.strip()  # the Llama templates cut white space off answers too
        ids += tokenizer.encode(said + form.end)
        ids += chat.reply({"role": "user", "content": question}, ended=True)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
    # An empty thinking block that opened an answer stays, where the template leaves it out of old ones.
    kept, last = shown(tokenizer, ids).rsplit(form.opening, 1)
    assert kept.replace(EMPTY, "") + form.opening + last == rendered(form, messages)
    if form.opening.endswith("\n") and EMPTY not in form.opening:
        assert ids == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **form.options
        )


def test_old_thinking_stays_where_the_template_would_leave_it_out() -> None:
    form = FORMS["qwen3"]
    tokenizer = tokenizer_of(form.template, form.end)
    chat, question = Chat(tokenizer), {"role": "user", "content": "one?"}
    thought = "<think>\nhm\n</think>\n\nyes"
    begun = rendered(form, [question])
    again = rendered(form, [question, {"role": "assistant", "content": thought}, question])
    assert not again.startswith(begun + thought)  # so rendering anew would change what was sampled
    assert "hm" not in again
    ids = chat.prompt([question]) + tuple(tokenizer.encode(thought + IM)) + chat.reply(question, ended=True)
    assert shown(tokenizer, ids) == begun + thought + IM + form.between("one?")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen2.5", "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"),
        ("qwen3", "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"),
        ("llama3.1", HEADER.format("ipython") + '"7"<|eot_id|>'),
    ],
)
def test_what_a_tool_says_stands_as_the_template_writes_it(name: str, written: str) -> None:
    form = FORMS[name]
    tokenizer = tokenizer_of(form.template, form.end)
    reply = Chat(tokenizer).reply({"role": "tool", "content": "7"}, ended=True)
    assert shown(tokenizer, reply) == written + form.opening
    if name == "qwen3":  # a question in a tool's clothes keeps the thinking; the answer is found all the same
        text = "<tool_response>7</tool_response>"
        reply = Chat(tokenizer).reply({"role": "user", "content": text}, ended=True)
        assert shown(tokenizer, reply) == form.between(text)


def test_a_template_may_tell_another_date_the_next_day() -> None:
    form = FORMS["llama3.1"]
    tokenizer = tokenizer_of(form.template, form.end)

    class Dated:
        eos_token_id, chat_template, today = tokenizer.eos_token_id, form.template, "1 Feb 2003"

        def apply_chat_template(self, conversation: Messages, **options: Any) -> Any:
            return tokenizer.apply_chat_template(conversation, date_string=self.today, **options)

    dated = Dated()
    chat = Chat(dated)
    dated.today = "12 Mar 2004"
    reply = chat.reply({"role": "user", "content": "x"}, ended=True)
    assert shown(tokenizer, reply) == form.between("x")


@pytest.mark.parametrize("name", FORMS)
def test_a_base_model_whose_end_token_ends_no_answer_is_refused(name: str) -> None:
    chat = Chat(tokenizer_of(FORMS[name].template, "<|endoftext|>"), **FORMS[name].options)
    with pytest.raises(ModelError, match=r"set 'eos_token' in tokenizer_config\.json"):
        chat.reply({"role": "user", "content": "x"}, ended=True)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages if m.content is not string %}{{ m.content }}{% endfor %}", "leaves out"),
        ("{{ messages[0].content.nothing.there }}", "cannot write a question"),
    ],
)
def test_a_template_that_cannot_write_plain_questions_is_refused(template: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"{why}.*task.template=plain"):
        Chat(tokenizer_of(template, next(iter(FORMS.values())).end))
