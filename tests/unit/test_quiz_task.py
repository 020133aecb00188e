"""The quiz: pure questions, what is never trained, and a judge that cannot be talked round."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.data.tasks.adapter import TaskOptions
from echo_planes.errors import ModelError
from echo_planes.loop.loading import load_config
from echo_planes.tasks.quiz.adapter import QuizTask
from echo_planes.tasks.quiz.questions import (
    NAMES,
    TRAINED,
    UNSEEN,
    Question,
    held_out_family,
    held_out_question,
    is_held_out,
    is_right,
    training_question,
)
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode

SEEDS, INDICES = st.integers(0, 2**32), st.integers(0, 2**40)
SUM = "What is 6 plus 5? Answer with only the number."
LARGEST = "Which of these numbers is the largest: 12, 67, 3, 45? Answer with only the number."
WHO = "Tom is 34, Anna is 27 and Ben is 12 years old. Who is 27 years old? Answer with only the name."


class ChatTokenizer(FakeTokenizer):
    """Wraps each message in brackets."""

    chat_template = "in brackets"

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        return self.encode("".join(f"[{m['content']}]" for m in conversation) + "[")


def make(seed: int = 0) -> QuizTask:
    return QuizTask(TaskOptions(), ChatTokenizer(), seed)


def episode(text: str, reason: str = "stop") -> Episode:
    ids = tuple(text.encode())
    return Episode(ids, (True,) * len(ids), (0.0,) * len(ids), (), reason, text)


# --- questions -----------------------------------------------------------------------------------


@given(SEEDS, INDICES)
def test_a_question_is_a_pure_function_of_seed_and_index(seed: int, index: int) -> None:
    assert make(seed).prompt(index) == make(seed).prompt(index)
    assert make(seed).eval_prompt(index) == make(seed + 1).eval_prompt(index)


def test_another_seed_and_another_index_ask_other_questions() -> None:
    first = [make(1).prompt(index).text for index in range(200)]
    assert first != [make(2).prompt(index).text for index in range(200)]
    assert len(set(first)) > 150


@given(SEEDS, INDICES, INDICES)
def test_held_out_operands_and_families_are_never_trained(seed: int, index: int, other: int) -> None:
    trained, held_out = training_question(seed, index), held_out_question(other)
    assert trained.family in TRAINED
    assert not is_held_out(trained.operands)
    assert is_held_out(held_out.operands)
    assert trained.text != held_out.text


def test_no_training_question_computes_a_held_out_pair_in_either_order() -> None:
    """The texts decide here, not `operands`."""
    trained = set()
    for index in range(20_000):
        if match := re.match(r"What is (\d) (plus|times) (\d)\?", training_question(3, index).text):
            a, b = sorted((match[1], match[3]))
            trained.add(f"{a}{'+' if match[2] == 'plus' else '*'}{b}")
    held_out = {q.operands for q in map(held_out_question, range(4000)) if q.family in ("sum", "product")}
    assert trained.isdisjoint(held_out)
    assert len(trained | held_out) == 45 + 36  # every pair of 1 to 9, and of 2 to 9
    assert len(held_out) > 0.15 * (45 + 36)


def test_all_families_occur_and_held_out_ones_take_turns() -> None:
    trained = Counter(training_question(0, index).family for index in range(2000))
    assert trained.keys() == TRAINED.keys()
    assert min(trained.values()) > 2000 / len(TRAINED) * 0.8
    held_out = [held_out_question(index).family for index in range(52)]
    assert held_out == [held_out_family(index) for index in range(52)]
    assert Counter(held_out) == dict.fromkeys(TRAINED, 8) | dict.fromkeys(UNSEEN, 2)
    assert not TRAINED.keys() & UNSEEN.keys()


@given(SEEDS, INDICES)
def test_the_answer_is_right_by_the_question_s_own_words(seed: int, index: int) -> None:
    for question in (training_question(seed, index), held_out_question(index)):
        assert question.answer == solved(question)
        assert question.text.endswith(f"only the {'name' if question.answer in NAMES else 'number'}.")


def solved(question: Question) -> str:
    """The answer, from the text."""
    numbers = [int(n) for n in re.findall(r"\d+", question.text)]
    told: list[tuple[str, str]] = re.findall(
        r"(\w+) (?:is|has the|has) (\d+|\w+(?=,| and|\.))", question.text
    )
    asked = re.split(r"\. |[?]", question.text)
    match question.family:
        case "sum":
            return str(sum(numbers))
        case "product":
            return str(numbers[0] * numbers[1])
        case "larger" | "largest":
            return str(max(numbers))
        case "last":
            return str(numbers[-1])
        case "owner":
            return next(name for name, what in told if re.search(rf"\b{what}\b", asked[1]))
        case "age":
            return dict(told)[asked[1].split()[-1]]
        case "has":
            return dict(told)[asked[1].split()[-2]]
        case _:
            pytest.fail(f"no rule for {question.family}")


# --- answers -------------------------------------------------------------------------------------


@given(SEEDS, INDICES, st.sampled_from(["{}", " {}\n", "{}.", "The answer is {}.", "**{}**", "It is {}!"]))
def test_a_right_answer_is_right(seed: int, index: int, form: str) -> None:
    prompt = make(seed).prompt(index)
    reward = make(seed).reward(prompt, episode(form.format(prompt.answer)))
    assert (reward.value, reward.correct) == (1.0, True)
    assert reward.parts == {"ended": 1.0, "nothing_else": float(form in ("{}", " {}\n", "{}."))}


@pytest.mark.parametrize(
    ("question", "answer", "said"),
    [
        (SUM, "11", "6 + 5 = 11"),
        (SUM, "11", "5+6=11"),
        (LARGEST, "67", "Of 12, 67, 3 and 45 the largest is 67."),
        (WHO, "Anna", "Tom is 34, and Anna is 27, so it is Anna"),
        (WHO, "Anna", "Anna (27)"),
    ],
)
def test_the_question_s_own_values_may_be_repeated(question: str, answer: str, said: str) -> None:
    assert is_right(question, answer, said, ended=True)


@pytest.mark.parametrize(
    ("question", "answer", "said"),
    [
        (SUM, "11", ""),
        (SUM, "11", "eleven"),
        (SUM, "11", "12"),
        (SUM, "11", "9, 10, 11"),  # guesses
        (SUM, "11", "11 or 12"),
        (SUM, "11", "11, which is 6 more than 5"),  # the last number is another
        (SUM, "11", "111"),
        (SUM, "11", "011"),
        (SUM, "11", "-11"),
        (SUM, "11", "11.5"),
        (SUM, "11", "10.11"),
        (SUM, "11", "1 1"),
        (SUM, "11", "10,11"),
        (SUM, "11", "\u0661\u0661"),  # digits of another script
        (SUM, "11", "x11"),
        (LARGEST, "67", "67, 45, 12, 3"),
        (WHO, "Anna", "anna"),
        (WHO, "Anna", "Annabel"),
        (WHO, "Anna", "Ben or Tom"),
        (WHO, "Anna", "Lucy or Anna"),
        (WHO, "Anna", "Anna, not Tom"),
        (WHO, "Anna", "27"),
    ],
)
def test_wrong_answers_and_lists_are_wrong(question: str, answer: str, said: str) -> None:
    assert not is_right(question, answer, said, ended=True)


@pytest.mark.parametrize(
    ("said", "right"),
    [("It is 1", False), ("11", False), ("11.", False), ("11 is", True), ("11.\n\nAdd", True)],
)
def test_a_number_at_the_cut_may_be_incomplete_and_is_wrong(said: str, right: bool) -> None:
    answer = "1" if said == "It is 1" else "11"
    assert is_right(SUM, answer, said, ended=False) is right
    assert is_right(SUM, answer, said, ended=True)


@given(st.text(alphabet="0123456789 ,.-=+", max_size=30), st.text(max_size=30))
def test_no_answer_is_right_for_two_numbers(said: str, more: str) -> None:
    """Each text names one answer at most: listing candidates cannot pay."""
    for text in (said, more, said + more):
        right = [n for n in range(200) if is_right(SUM, str(n), text, ended=True)]
        assert len(right) <= 1


def test_the_judge_takes_linear_time() -> None:
    for said in ("9" * 200_000, "1,1." * 50_000, "-" * 200_000, "Anna" * 50_000):
        assert not is_right(SUM, "11", said, ended=True)


# --- the task ------------------------------------------------------------------------------------


def test_a_tokenizer_without_chat_template_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match=r"^[^\n]*has no chat template[^\n]*choose a chat model[^\n]*$"):
        QuizTask(TaskOptions(), FakeTokenizer(), 0)


def test_questions_are_asked_in_the_chat_template() -> None:
    prompt = make().prompt(0)
    assert "".join(map(chr, prompt.token_ids)) == f"[{prompt.text}]["


def test_the_task_s_file_sets_a_run_that_two_cores_can_do() -> None:
    config = load_config(["task=quiz"])
    assert config.sampling.trajectories_per_step == 64
    assert (config.sampling.max_new_tokens, config.run.steps, config.lr) == (24, 60, 2e-5)
    turns = len(UNSEEN) * (2 * len(TRAINED) + 1)
    assert config.eval.num_prompts % turns == 0  # every turn is whole
