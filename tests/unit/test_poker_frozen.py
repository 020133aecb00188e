"""A model that never changes: how it samples, how it sits at a table, how it is evaluated."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.data.tasks.registry import load_tokenizer
from echo_planes.errors import ConfigError, ModelError
from echo_planes.tasks.poker import frozen
from echo_planes.tasks.poker.__main__ import main
from echo_planes.tasks.poker.adapter import PokerTask
from echo_planes.tasks.poker.evaluate import ModelRow, evaluate_model
from echo_planes.tasks.poker.frozen import FrozenModel, Question, model_folder, sample
from echo_planes.tasks.poker.options import PokerOptions
from echo_planes.testing.fakes import FakeTokenizer
from echo_planes.types import Episode, Prompt, Sample

TINY = BUILTIN_MODELS["builtin:tiny-poker"]
TOKENIZER = load_tokenizer(TINY)
END = TOKENIZER.eos_token_id or 0
STATES = (
    "AhKd - p3 c1 r4-10 b1/2 s8+2,*9+1 :",
    "Ts9s 8s7s2c p8 c0 r2-6 b1/2 s*6,6 cr4c/:",
    "7h2c - p12 c8 r- b1/2 s+10,*8+2 r10:",
)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    return loaded


def question(state: str, key: str = "") -> Question:
    return Question(tuple(TOKENIZER.encode(state, add_special_tokens=False)), random.Random(f"{state}{key}"))


class Recorded(FrozenModel):
    """Notes how many were answered together."""

    def __init__(self, folder: Path = TINY, **options: object) -> None:
        super().__init__(folder, END, max_new_tokens=6, **options)
        self.sizes: list[int] = []

    def _answer_all(self, questions: Sequence[Question]) -> list[Sample]:
        self.sizes.append(len(questions))
        return super()._answer_all(questions)


def test_answers_are_the_same_alone_and_together(model: torch.nn.Module) -> None:
    for temperature in (0.0, 1.0):
        together = sample(model, [question(state) for state in STATES], END, 6, temperature)
        alone = [sample(model, [question(state)], END, 6, temperature)[0] for state in STATES]
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        for one, other in zip(together, alone, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_what_is_drawn_follows_the_models_own_distribution(model: torch.nn.Module) -> None:
    ids = torch.tensor([question(STATES[0]).token_ids])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, -1]
    for temperature in (1.0, 0.5):
        logprobs = (logits / temperature).log_softmax(-1)
        answers = sample(model, [question(STATES[0], str(n)) for n in range(300)], END, 1, temperature)
        assert {answer.finish_reason for answer in answers} == {"length"}
        drawn = (
            torch.tensor([answer.token_ids[0] for answer in answers]).bincount(minlength=len(logits)) / 300
        )
        assert float((drawn - logprobs.exp()).abs().max()) < 0.1  # 3.5 standard errors
        for answer in answers[:20]:
            assert answer.logprobs[0] == pytest.approx(float(logprobs[answer.token_ids[0]]), abs=1e-4)


def test_an_answer_ends_with_the_end_token_or_at_the_limit(model: torch.nn.Module) -> None:
    ended, cut = (sample(model, [question(STATES[2])], END, limit, 0.0)[0] for limit in (6, 1))
    assert (ended.token_ids[-1], ended.finish_reason) == (END, "stop")
    assert (len(cut.token_ids), cut.finish_reason) == (1, "length")
    assert [(span.start, span.stop) for span in ended.spans] == [(0, len(ended.token_ids))]


def test_who_asks_while_it_computes_is_answered_together_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "MAX_BATCH", 4)
    ids = question(STATES[0]).token_ids

    async def ask() -> tuple[list[Sample], list[int]]:
        together = Recorded()
        players = [together.player(str(number)) for number in range(10)]
        answers = await asyncio.gather(*(player.generate(ids) for player in players))
        answers += await asyncio.gather(*(player.generate(ids) for player in players[:2]))
        return answers, together.sizes

    async def ask_alone() -> list[Sample]:
        alone = Recorded()
        players = [alone.player(str(number)) for number in range(10)]
        return [await player.generate(ids) for player in [*players, *players[:2]]]

    answers, sizes = asyncio.run(ask())
    assert sizes == [10, 2]
    assert [answer.token_ids for answer in answers] == [
        answer.token_ids for answer in asyncio.run(ask_alone())
    ]
    assert len({answer.token_ids for answer in answers}) > 1


def test_a_hand_that_is_given_up_does_not_take_the_others_along() -> None:
    async def ask() -> Sample:
        shared = Recorded()
        first, second = (
            asyncio.create_task(shared.player(key).generate(question(STATES[0]).token_ids)) for key in "ab"
        )
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(ask()).token_ids


def test_a_model_that_cannot_be_read_fails_every_hand_that_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    broken = Recorded(tmp_path)

    async def ask() -> list[Sample | BaseException]:
        return await asyncio.gather(
            *(broken.player(key).generate([1, 2]) for key in "ab"), return_exceptions=True
        )

    assert [type(answer) for answer in asyncio.run(ask())] == [ModelError, ModelError]


@pytest.mark.parametrize(("temperature", "limit"), [(-1.0, 6), (float("nan"), 6), (1.0, 0)])
def test_settings_that_give_no_answer_are_refused(temperature: float, limit: int) -> None:
    with pytest.raises(ConfigError, match="need at least 0 and 1"):
        FrozenModel(TINY, END, max_new_tokens=limit, temperature=temperature)


def poker(opponent: str, **options: object) -> PokerTask:
    return PokerTask(PokerOptions(opponent=opponent, **options), TOKENIZER, 0)


def test_a_frozen_opponent_sits_at_the_table_and_only_the_learner_is_trained() -> None:
    async def play(task: PokerTask, count: int) -> list[Episode]:
        learner = Recorded()
        hands = [task.rollout(task.prompt(index), learner.player(str(index))) for index in range(count)]
        return list(await asyncio.gather(*hands))

    task = poker("frozen:builtin:tiny-poker")
    assert task.preflight() == ""
    hands = asyncio.run(play(task, 12))
    for episode in hands:
        own = [token for token, mine in zip(episode.response_ids, episode.response_mask, strict=True) if mine]
        assert own.count(END) == len(json.loads(episode.notes)["turns"]) == episode.num_turns
    told = [episode.notes for episode in hands]
    again = [episode.notes for episode in asyncio.run(play(task, 3))]
    assert again == told[:3]  # the same deal, the same luck
    by_rules = [episode.notes for episode in asyncio.run(play(poker("mixed"), 12))]
    assert by_rules != told  # they begin alike, and then somebody else acts


@pytest.mark.parametrize("opponent", ["frozen:", "frozen", "froze:folder", "nobody"])
def test_opponents_that_do_not_exist_are_refused(opponent: str) -> None:
    with pytest.raises(ValueError, match="opponent"):
        PokerOptions(opponent=opponent)


def test_a_frozen_opponent_needs_a_model_that_reads_what_the_policy_writes(tmp_path: Path) -> None:
    assert model_folder("builtin:tiny-poker") == TINY.resolve()
    for name in (str(tmp_path), "builtin:no-such"):
        with pytest.raises(ModelError, match="no model there"):
            poker(f"frozen:{name}")
    foreign = PokerTask(PokerOptions(opponent="frozen:builtin:tiny-poker"), FakeTokenizer(), 0)
    with pytest.raises(ModelError, match="not the policy's"):
        foreign.preflight()


def test_the_evaluation_plays_each_held_out_deal_from_every_seat_and_repeats() -> None:
    asked: list[Prompt] = []

    class Watched(PokerTask):
        def eval_prompt(self, index: int) -> Prompt:
            asked.append(super().eval_prompt(index))
            return asked[-1]

    async def rows(seed: int) -> ModelRow:
        task = Watched(PokerOptions(opponent="calling-station"), TOKENIZER, 0)
        return await evaluate_model(Recorded(), task, "calling-station", seats=2, deals=6, seed=seed)

    one, again, other = (asyncio.run(rows(seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert (one.row.deals, one.row.hands, one.row.opponent) == (6, 12, "calling-station")
    assert one.row.low_bb <= one.row.mean_bb <= one.row.high_bb
    assert [prompt.index for prompt in asked] == [*range(12, 24), *range(12, 24), *range(24, 36)]
    seats, deals = zip(*(prompt.answer.split("/", 1) for prompt in asked[:12]), strict=True)
    assert seats == ("0", "1") * 6
    assert deals[::2] == deals[1::2]
    assert len(set(deals)) == 6


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--model", "builtin:tiny-poker", "--hands", "5", "--seed", "3"]
    assert main([*words, "--settings", "stack_bb=3"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    told = json.loads(last)
    assert [row["opponent"] for row in told["rows"]] == ["calling-station", "tight-aggressive", "maniac"]
    assert all((row["hands"], row["deals"]) == (6, 3) for row in told["rows"])
    assert len(table) == 4
    for line, row in zip(table[1:], told["rows"], strict=True):
        name, mean, low, high, hands, *_ = line.split()
        assert (name, int(hands)) == (row["opponent"], 6)
        bounds = [2 * row[key] for key in ("mean_bb", "low_bb", "high_bb")]
        assert [float(mean), float(low), float(high)] == pytest.approx(bounds, abs=6e-4)
        assert -3 <= row["mean_bb"] <= 3
    for path in TINY.iterdir():  # a folder without weights
        if path.name != "model.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    for changed in (
        ["--hands", "2"],
        ["--settings", "seats=9"],
        ["--opponents", "me"],
        ["--model", "/no"],
        ["--model", str(tmp_path)],
    ):
        assert main([*words, *changed]) == 2
        told_wrong = capsys.readouterr().err
        assert told_wrong.startswith("error: ")
        assert told_wrong.count("\n") == 1
