"""The math task: prompts, rewards, data files, and a verifier that always comes back."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from echo_planes.errors import ConfigError, DataError, ModelError
from echo_planes.loop.loading import load_config
from echo_planes.tasks.math.adapter import MathOptions, MathTask
from echo_planes.tasks.math.datasets import held_out_pairs, is_held_out, load_splits, read_problems
from echo_planes.tasks.math.grade import compare_exactly, parse_response
from echo_planes.tasks.math.verifier import Verifier
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Prompt

DATA = Path(os.environ.get("ECHO_PLANES_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason=f"no data sets in {DATA}")


class ChatTokenizer(FakeTokenizer):
    """Wraps each message in brackets."""

    chat_template = "in brackets"

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        asked = "".join(f"[{m['role']}: {m['content']}]" for m in conversation)
        return self.encode(f"{asked}[assistant: ")


def make(seed: int = 0, **options: Any) -> MathTask:
    return MathTask(MathOptions.model_validate(options), ChatTokenizer(), seed)


def episode(text: str, reason: str = "stop") -> Episode:
    ids = tuple(text.encode())
    return Episode(ids, (True,) * len(ids), (0.0,) * len(ids), (), reason, text)


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    rows = [
        {"question": f"What is {n}?", "answer": f"It is.\n#### {n:,}"} for n in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    pytest.importorskip("math_verify")
    one = Verifier(timeout_s=10.0, max_answer_chars=256)
    yield one
    one.close()


def judging(**options: Any) -> Iterator[MathTask]:
    pytest.importorskip("math_verify")
    task = make(dataset="math500", verifier_timeout_s=60, **options)
    yield task
    task._judge.close()


@pytest.fixture(scope="module")
def boxed() -> Iterator[MathTask]:
    yield from judging()


@pytest.fixture(scope="module")
def tagged() -> Iterator[MathTask]:
    yield from judging(answer_form="answer")


# --- addition ------------------------------------------------------------------------------------


def test_addition_is_a_pure_function_of_seed_and_index() -> None:
    first = [make(seed=1).prompt(index) for index in range(50)]
    assert first == [make(seed=1).prompt(index) for index in range(50)]
    assert first != [make(seed=2).prompt(index) for index in range(50)]
    assert [make().prompt(index).text for index in range(3)] == ["1+30=", "69+50=", "81+8="]


def test_addition_prompts_are_right_and_spread_over_all_pairs() -> None:
    task = make()
    seen = set()
    for index in range(5000):
        prompt = task.prompt(index)
        a, b = map(int, prompt.text.removesuffix("=").split("+"))
        assert prompt.answer == str(a + b)
        assert bytes(prompt.token_ids).decode() == prompt.text
        seen.add((a, b))
    assert {a for a, _ in seen} == set(range(100))
    assert {b for _, b in seen} == set(range(100)) - {7, 27, 47, 67, 87}
    assert len(seen) > 3500  # 9500 (1 - exp(-5000 / 9500)) = 3888 expected of independent draws


def test_held_out_pairs_are_never_trained_and_fixed_whatever_the_seed() -> None:
    texts = {make(seed=5).eval_prompt(index).text for index in range(500)}
    assert texts == {make(seed=6).eval_prompt(index).text for index in range(500)}
    assert len(texts) == len(held_out_pairs(100)) == 500  # 5 % of 10,000
    assert all(is_held_out(a, b) for a, b in held_out_pairs(100))
    assert texts.isdisjoint(make(seed=5).prompt(index).text for index in range(5000))
    assert make().eval_prompt(3).text == make().eval_prompt(503).text


@pytest.mark.parametrize(
    ("text", "reason", "value"),
    [
        ("54", "stop", 1.0),
        (" 54\n", "stop", 1.0),
        ("55", "stop", 0.0),
        ("54", "length", 0.0),
        ("54 ok", "stop", 0.0),
        ("054", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_addition_reward(text: str, reason: str, value: float) -> None:
    reward = make().reward(Prompt(0, (), "54"), episode(text, reason))
    assert (reward.value, reward.correct) == (value, value == 1.0)


def test_addition_knows_its_length_and_costs_nothing() -> None:
    task = make()
    assert task.max_new_tokens == 6
    assert make(dataset="gsm8k").max_new_tokens is None
    began = time.perf_counter()
    for index in range(256):
        task.reward(task.prompt(index), episode("54"))
    assert time.perf_counter() - began < 0.1


def test_contradicting_options_are_refused() -> None:
    for wrong in ({"reward": "composite"}, {"data": "x"}, {"datset": "gsm8k"}, {"max_operand": 7}):
        with pytest.raises(ValidationError):
            make(**wrong)


# --- word problems -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "thinking", "trailing"),
    [
        (r"<think>1+1</think> \boxed{2}", "2", True, False),
        (r"1+1</think> \boxed{2}.", "2", True, False),  # the template had opened <think>
        (r"<think> </think>\boxed{2}", "2", False, False),
        (r"<think>\boxed{3}</think>no answer", None, True, False),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}", False, False),
        (r"\boxed{2} and more", "2", False, True),
        (r"\boxed{\frac{1}{2}", None, False, False),  # never closed
        ("", None, False, False),
    ],
)
def test_parsing_boxed_answers(text: str, answer: str | None, thinking: bool, trailing: bool) -> None:
    parsed = parse_response(text, "boxed")
    assert (parsed.answer, parsed.has_thinking, parsed.has_trailing) == (answer, thinking, trailing)


def test_parsing_tagged_answers() -> None:
    parsed = parse_response("<think>a</think><answer>1</answer> <answer> 2 </answer>", "answer")
    assert parsed.answer == "2"
    assert parsed.has_thinking
    assert not parsed.has_trailing
    assert parse_response(r"\boxed{2}", "answer").answer is None


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("72", "72.", True),
        ("1080", "1,080", True),
        ("1080", r"\$1{,}080", None),
        ("72", "72.00", True),
        ("1/2", r"\frac{1}{2}", True),
        ("0.5", r"-\dfrac{1}{2}", False),
        ("72", "73", False),
        ("1,2", "12", None),
        ("3", "1/0", None),
        ("x+1", "1+x", None),
        (r"\text{Evelyn}", r"\text{Evelyn}", True),
        ("34", "3 4", None),
        ("34", "3\n4", None),
        ("34", r"3\,4", None),
        ("34", r"3\$4", None),
        ("1080", "1 080", True),
        ("1080", r"1\,080", True),
        (r"10,\!080", "10080", True),
        (r"11,\! 111,\! 111,\! 100", "11111111100", True),
        ("7/2", "3 1/2", True),
        (r"\$5", "5", True),
        ("x+1", "x +\n1", True),
    ],
)
def test_exact_comparison(gold: str, answer: str, same: bool | None) -> None:
    assert compare_exactly(gold, answer) is same


MORE_THAN_34 = [
    "33=34",
    "x=35=34",
    "33=x=34",
    "33==34",
    r"33\equiv 34",
    r"33\%=34",
    "33 cm = 34 cm",
    r"33 = 34\text{ cm}",
    "35=34=34=34",
    "3 4",
    "3\n4",
    r"3\!4",
    r"3\!\!4",
    "3'4",
    '3"4',
    r"3\$4",
    r"3\displaystyle4",
    r"3\text{}4",
    r"3\mathrm{th}4",
    "33$ $34",
    r"34\text{ cm}, 33\text{ cm}",
    r"34\mbox{ cm}^2, 33\mbox{ cm}^2",
    r"34\text{ cm}\text{ or }33\text{ cm}",
    r"34\text{cm}+\frac{1}{2}",
    r"34\text{cm},\frac{1}{2}",
    r"34\mathrm{cm}; \mathrm{x}",
    r"34 \text{ (not 33)}",
    r"34\text{ or else 33}",
    r"33\fbox{34}",
    r"\fbox{34}33",
]


@pytest.mark.parametrize("answer", MORE_THAN_34)
def test_a_box_that_holds_more_than_the_answer_is_not_right(boxed: MathTask, answer: str) -> None:
    reward = boxed.reward(Prompt(0, (), "34"), episode(f"\\boxed{{{answer}}}"))
    assert not reward.correct
    assert reward.parts["timeout"] == 0.0


def test_two_answers_with_a_unit_between_them_are_not_the_one(boxed: MathTask) -> None:
    for gold in (
        r"\frac{270}7\text{ degrees}",
        r"864 \mbox{ inches}^2",
        r"5.4 \text{ cents}",
        r"15\mbox{ cm}^2",
    ):
        for answer, right in ((gold, True), (f"{gold}+1, {gold}", False), (f"{gold}, {gold}+1", False)):
            assert boxed.reward(Prompt(0, (), gold), episode(f"\\boxed{{{answer}}}")).correct == right, answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("34", "x=34"),
        ("34", "30+4=34"),
        ("34", "x = 30+4 = 34"),
        ("34", "y=x=34"),
        ("34", "a_{10}=34"),
        ("34", "f(2) = 34"),
        ("34", "x^2+y^2=34"),
        ("34", r"\text{Area}=34"),
        ("34", r"34\text{ cm}"),
        ("34", r"34\text{ cm}^2"),
        ("34", r"34\,\text{m}/\text{s}^{2}"),
        ("34", "34 cm"),
        ("34", r"34^\circ"),
        ("34", r"34\%"),
        ("34", r"\$34"),
        ("34", "$34$"),
        ("x=5", "5"),
        ("y = 2x + 3", "y=2x+3"),
        ("5x - 7y + 11z + 4 = 0", "0=5x - 7y + 11z + 4"),
        (r"\frac{1}{2}", r"P(X=2)=\frac12"),
        (r"\frac{1}{2}", r"\frac 1 2"),
        (r"\frac{7}{2}", r"3\frac12"),
        (r"\log_2 3", r"\log_2 3"),
        ("2, 3", r"3\text{ and }2"),
        (r"864 \mbox{ inches}^2", "864"),
    ],
)
def test_honest_ways_to_write_an_answer_are_right(
    boxed: MathTask, tagged: MathTask, gold: str, answer: str
) -> None:
    assert boxed.reward(Prompt(0, (), gold), episode(f"\\boxed{{{answer}}}")).correct
    assert tagged.reward(Prompt(0, (), gold), episode(f"<answer>\\boxed{{{answer}}}</answer>")).correct


def test_composite_weights_by_hand() -> None:
    task = make(dataset="gsm8k", reward="composite")
    prompt = Prompt(0, (), "72")
    cases = {
        (r"<think>easy</think>\boxed{72}", "stop"): Fraction("1.0"),
        (r"<think>easy</think>\boxed{71}", "stop"): Fraction("0.3"),  # format, thinking, no trailing
        (r"<think>easy</think>\boxed{72} bye", "stop"): Fraction("0.95"),
        (r"<think>easy</think>\boxed{72}", "length"): Fraction("0.95"),  # cut off: it did not end there
        (r"\boxed{72}", "stop"): Fraction("0.9"),
        ("<think>easy</think>72", "stop"): Fraction("0.1"),
        ("", "length"): Fraction(0),
    }
    for (text, reason), value in cases.items():
        assert task.reward(prompt, episode(text, reason)).value == pytest.approx(float(value)), text
    exact = make(dataset="gsm8k").reward(prompt, episode(r"\boxed{72} bye", "length"))
    assert (exact.value, exact.correct, exact.parts["no_trailing"]) == (1.0, True, 0.0)
    changed = make(dataset="gsm8k", reward="composite", weights={"correct": 0.6, "thinking": 0.2})
    assert changed.reward(prompt, episode(r"\boxed{72}")).value == pytest.approx(0.8)


@pytest.mark.parametrize("part", ["correct", "format", "thinking", "no_trailing"])
def test_each_weight_pays_for_its_own_part(tmp_path: Path, part: str) -> None:
    """The weights stand in a YAML file. One part has it all: only answers that have the part earn."""
    weights = dict.fromkeys(["correct", "format", "thinking", "no_trailing"], 0) | {part: 1}
    path = tmp_path / "mine.yaml"
    adapter = "echo_planes.tasks.math.adapter:MathTask"
    path.write_text(
        f"{{name: m, adapter: '{adapter}', dataset: gsm8k, reward: composite, weights: {weights}}}"
    )
    task = make(**load_config([f"task={path}"]).task.options)
    lacking = {
        "correct": r"<think>easy</think>\boxed{71}",
        "format": "<think>easy</think>72",
        "thinking": r"\boxed{72}",
        "no_trailing": r"<think>easy</think>\boxed{72} bye",
    }
    prompt = Prompt(0, (), "72")
    assert task.reward(prompt, episode(r"<think>easy</think>\boxed{72}")).value == 1.0
    assert task.reward(prompt, episode(lacking[part])).value == 0.0
    others = [text for name, text in lacking.items() if name not in (part, "format")]
    assert {task.reward(prompt, episode(text)).value for text in others} == {1.0}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["task.reward=composite", "task.weights.correct=0.9"],
            "task.weights: correct=0.9, format=0.15, thinking=0.1, no_trailing=0.05 add up to 1.2, but a "
            "perfect answer must earn 1; make them add up to 1",
        ),
        (
            ["task.reward=composite", "task.weights.format=-0.1"],
            "task.weights.format=-0.1: input should be greater than or equal to 0",
        ),
        (["task.reward=composite", "task.weights.form=0.1"], "did you mean 'format'?"),
        (
            ["task.weights.correct=0.7"],
            "reward=exact uses no weights: set task.reward=composite or leave out",
        ),
    ],
)
def test_weights_that_cannot_be_are_told_in_one_line(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["task=math", "task.dataset=gsm8k", *words])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_epoch_asks_every_question_once_in_its_own_order(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 40)
    write_rows(tmp_path / "test.jsonl", 5, first=100)
    task = make(dataset="gsm8k", data=str(tmp_path))
    epochs = [[task.prompt(epoch * 40 + i) for i in range(40)] for epoch in range(2)]
    orders = [[int(prompt.answer) for prompt in epoch] for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))
    assert orders[0] != orders[1] != list(range(40))
    assert epochs[0] == [make(dataset="gsm8k", data=str(tmp_path)).prompt(i) for i in range(40)]
    assert [task.eval_prompt(i).answer for i in range(6)] == ["100", "101", "102", "103", "104", "100"]


def test_prompts_ask_for_the_form_the_reward_wants(tmp_path: Path) -> None:
    data = str(write_rows(tmp_path / "rows.jsonl", 40))
    chat = bytes(make(dataset="gsm8k", data=data).prompt(0).token_ids).decode()
    assert chat.startswith("[user: What is ")
    assert chat.endswith("[assistant: ")
    assert "\\boxed{}" in chat
    assert "<think>" in chat
    plain = make(dataset="gsm8k", data=data, template="plain", answer_form="answer").prompt(0)
    assert "<answer></answer>" in bytes(plain.token_ids).decode()
    assert plain.text.startswith("What is ")
    assert bytes(make(template="chat").prompt(0).token_ids).startswith(b"[user: ")


def test_long_prompts_give_their_place_to_others(tmp_path: Path) -> None:
    data = str(write_rows(tmp_path / "rows.jsonl", 40))
    whole = make(dataset="gsm8k", data=data, template="plain")
    lengths = {len(whole.prompt(index).token_ids) for index in range(38)}
    short, long = sorted(lengths)  # one-digit and two-digit numbers
    task = make(dataset="gsm8k", data=data, template="plain", max_prompt_tokens=short)
    assert [len(places) for places in whole.sources()] == [38, 2]
    assert task.sources() == ((), ())  # no row is asked in its own turn alone
    assert {int(task.prompt(index).answer) for index in range(38)} == set(range(10)) - {
        7
    }  # row 7 is held out
    assert task.prompt(5) == make(
        dataset="gsm8k", data=data, template="plain", max_prompt_tokens=short
    ).prompt(5)
    with pytest.raises(DataError, match=f"longer than task.max_prompt_tokens={short - 1}"):
        make(dataset="gsm8k", data=data, template="plain", max_prompt_tokens=short - 1).prompt(0)
    assert long == short + 1


def test_one_file_is_split_and_repeated_questions_are_not_trained(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 40)
    path.write_text(path.read_text() + json.dumps({"question": "What is 27?", "answer": "#### 27"}) + "\n")
    training, evaluation = load_splits("gsm8k", str(path), None)
    assert [problem.answer for problem in evaluation] == ["7", "27"]
    assert len(training) == 38
    assert {p.question for p in training}.isdisjoint(p.question for p in evaluation)


def test_no_chat_template_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"no chat template: use task.template=plain$"):
        MathTask(MathOptions(dataset="gsm8k"), FakeTokenizer(), 0)


def test_files_are_touched_only_when_prompts_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHO_PLANES_DATA", raising=False)
    task = make(dataset="gsm8k")
    assert task.reward(Prompt(0, (), "72"), episode(r"\boxed{72}")).correct
    with pytest.raises(DataError, match=r"set task\.data=PATH or ECHO_PLANES_DATA"):
        task.prompt(0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        (b"", "no rows"),
        (b'{"question": "q", "answer": "#### 1"}\n{"question": "q"}\n', "row 2 .*no field 'answer'"),
        (b'{"question": "q", "answer": "#### 1"}\n{broken\n', "row 2 is not a gsm8k row"),
        (b'{"question": "q", "answer": "seven"}\n', "row 1 .*####"),
        (b"[1, 2]\n", "row 1 is not a gsm8k row"),
        (b"\xff\xfe\n", "row 1 is not a gsm8k row"),
    ],
)
def test_bad_files_are_named_with_the_row_and_the_remedy(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as caught:
        read_problems(path, "gsm8k")
    message = str(caught.value)
    assert str(path) in message
    assert "task.data=PATH" in message
    assert "\n" not in message


def test_damaged_archives_are_data_errors(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"question": "q", "answer": "#### 1"}\n' * 500)
    for name, content in {
        "cut": whole[:-20],
        "flipped": whole[:40] + b"\xff" * 9 + whole[49:],
        "not": b"hi",
    }.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            read_problems(path, "gsm8k")


@needs_data
def test_every_gsm8k_gold_answer_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_PLANES_DATA", str(DATA))
    task = make(dataset="gsm8k")
    prompts = [task.eval_prompt(index) for index in range(1319)] + [
        task.prompt(index) for index in range(7473)
    ]
    assert len({prompt.text for prompt in prompts}) == 8792
    for prompt in prompts:
        assert task.reward(prompt, episode(f"<think>t</think>\\boxed{{{int(prompt.answer):,}}}")).correct
        assert not task.reward(prompt, episode(f"\\boxed{{{int(prompt.answer) + 1}}}")).correct


@needs_data
def test_math500_gold_answers_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_PLANES_DATA", str(DATA))
    task = make(dataset="math500")
    prompts = [task.eval_prompt(index) for index in range(25)] + [task.prompt(index) for index in range(475)]
    assert len({prompt.text for prompt in prompts}) == 500
    for prompt in prompts:
        assert task.reward(prompt, episode(f"\\boxed{{{prompt.answer}}}")).correct, prompt.answer


# --- the verifier --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("x^2+2x+1", "(x+1)^2", "correct"),
        (r"\sqrt{12}", r"2\sqrt{3}", "correct"),
        ("1,-2", "-2, 1", "correct"),
        (r"\frac{\pi}{2}", r"\frac{\pi}{3}", "wrong"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", "correct"),
        ("3", r"\frac{", "unparsable"),
        ("3", "", "unparsable"),
        ("3", "1+" * 200 + "1", "unparsable"),  # over the length cap
    ],
)
def test_symbolic_verdicts(verifier: Verifier, gold: str, answer: str, verdict: str) -> None:
    assert verifier.verify(gold, answer) == verdict


def test_a_hanging_answer_times_out_and_the_next_one_is_verified(verifier: Verifier) -> None:
    assert verifier.verify("x+1", "1+x") == "correct"  # the child is up
    quick = Verifier(timeout_s=0.5, max_answer_chars=256)
    try:
        quick.verify("x", "x+1")  # its start is not part of the deadline
        began = time.perf_counter()
        assert quick.verify("3", "9^{9^{9^9}}") == "timeout"
        assert time.perf_counter() - began < 0.5 + 1.5
        quick.timeout_s = 10.0
        assert quick.verify("x+1", "1+x") == "correct"
    finally:
        quick.close()


def test_a_timeout_is_counted_in_the_reward(verifier: Verifier) -> None:
    task = make(dataset="math500", verifier_timeout_s=0.5, reward="composite")
    reward = task.reward(Prompt(0, (), "3"), episode(r"<think>t</think>\boxed{9^{9^{9^9}}}"))
    assert reward.parts["timeout"] == 1.0
    assert reward.parts["correct"] == 0.0
    assert reward.value == pytest.approx(0.3)


def test_many_threads_share_one_verifier(verifier: Verifier) -> None:
    verdicts: dict[int, str] = {}

    def ask(number: int) -> None:
        verdicts[number] = verifier.verify(f"x+{number}", f"{number % 4}+x")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {n: "correct" if n < 4 else "wrong" for n in range(12)}
