"""Offline records as a task's tokens, their objective, and the warm start of a model on them."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.data.tasks.chat import Chat
from echo_planes.data.tasks.registry import load_tokenizer
from echo_planes.errors import ConfigError, DataError, DivergedError
from echo_planes.learning import offline
from echo_planes.learning.offline import OfflineObjective, offline_weights, rectangle, warm_start
from echo_planes.learning.policy_model import PolicyModel, load_policy
from echo_planes.loop.warm_start import main
from echo_planes.tasks.poker.__main__ import main as poker_command
from echo_planes.tasks.poker.adapter import PokerTask
from echo_planes.tasks.poker.game import Game
from echo_planes.tasks.poker.histories import OfflineRecord, Turn
from echo_planes.tasks.poker.offline import Example, Template, example_of, read_examples
from echo_planes.tasks.poker.options import PokerOptions
from echo_planes.tasks.poker.records import write_records
from echo_planes.tasks.poker.text import Style
from echo_planes.types import Prompt, Sample, Span

TINY = BUILTIN_MODELS["builtin:tiny-poker"]
TOKENIZER = load_tokenizer(TINY)
STATE = "AhKd - p3 c1 r4-10 b1/2 s8+2,*9+1 :"
READER = "echo_planes.tasks.poker.offline:read_examples"
REST = ["--steps", "1", "--out", "never-written"]
AWR = OfflineObjective("awr", beta=0.5, cap=20.0)


class Caller:
    """Answers by turns in the one style and the other: what cannot be read is a check or a fold."""

    def __init__(self) -> None:
        self._turn = 0

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        ids = (*TOKENIZER.encode("k" if self._turn % 2 else "call"), TOKENIZER.eos_token_id or 0)
        self._turn += 1
        return Sample(ids, (-1.0,) * len(ids), (Span(0, len(ids), 1, "d"),), "stop")


@pytest.mark.parametrize("template", ["plain", "chat"])
@pytest.mark.parametrize("style", ["compact", "plain"])
def test_a_record_has_the_tokens_of_the_episode_that_it_logs(style: Style, template: Template) -> None:
    options = PokerOptions(style=style, template=template, max_episode_tokens=20_000)
    task, policy = PokerTask(options, TOKENIZER, 0), Caller()
    chat = Chat(TOKENIZER) if template == "chat" else None
    for index in range(6):
        prompt = task.prompt(index)
        episode = asyncio.run(task.rollout(prompt, policy))
        net_bb = task.reward(prompt, episode).value
        said = [turn["action"] for turn in json.loads(episode.notes)["turns"]]
        logged = tuple(
            Turn(state, action, 0) for state, action in zip(states(task, prompt, said), said, strict=True)
        )
        found = example_of(OfflineRecord("log", 0, 2, logged, "AKo", int(2 * net_bb)), style, TOKENIZER, chat)
        assert found.token_ids == prompt.token_ids + episode.response_ids
        assert found.loss_mask == (False,) * len(prompt.token_ids) + episode.response_mask
        assert found.value == net_bb


def states(task: PokerTask, prompt: Prompt, actions: Sequence[str]) -> list[str]:
    """Texts that the seat sees at each of its decisions, asked of the hand itself."""
    game = task.environment(prompt, Caller())
    assert isinstance(game, Game)
    seen = [game.opening or ""]
    for action in actions[:-1]:
        seen.append(asyncio.run(game.step(action)).observation.removeprefix("\n"))
    return seen


def record(action: str, net_chips: int, group: str = "AKo", state: str = STATE) -> OfflineRecord:
    return OfflineRecord("log", 1, 2, (Turn(state, action, net_chips),), group, net_chips)


def tiny_policy() -> PolicyModel:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 512}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return PolicyModel(Qwen3ForCausalLM(Qwen3Config(**size, **heads)), 1.0, 1.0)


def flat(model: PolicyModel) -> torch.Tensor:
    """All weights, as they are now."""
    return torch.cat([one.detach().flatten().float() for one in model.parameters()])


def examples_of(records: Sequence[OfflineRecord]) -> list[Example]:
    return [example_of(found, "compact", TOKENIZER, None) for found in records]


@torch.no_grad()
def logprob(model: PolicyModel, action: str) -> float:
    """Of `action` and the end token in STATE."""
    batch = rectangle(examples_of([record(action, 0)]))
    values, _ = model(batch.token_ids, None, None, batch.predictors, batch.targets)
    return float(values.sum())


def test_what_the_table_would_not_take_is_read_and_not_trained() -> None:
    legal, illegal = Turn(STATE, "c", -2), Turn(STATE, "f", 0, is_legal=False)
    found = example_of(OfflineRecord("log", 1, 2, (legal, illegal), "AKo", -2), "compact", TOKENIZER, None)
    assert found.value == -1.0
    trained = [token for token, mine in zip(found.token_ids, found.loss_mask, strict=True) if mine]
    assert trained == [*TOKENIZER.encode("c"), TOKENIZER.eos_token_id]


def test_a_table_is_read_into_examples(tmp_path: Path) -> None:
    records = [record("c", 3), record("f", -1)]
    write_records(tmp_path / "t.arrow", records, "compact")
    assert read_examples(tmp_path / "t.arrow", TOKENIZER, "plain") == examples_of(records)


RETURNS = np.array([4.0, 0.0, 7.0, 7.0, -3.0], np.float32)
GROUPS = ["AKo", "AKo", "22", "22", "72o"]
COUNTS = np.array([1, 3, 2, 0, 2])


def test_weights_are_exponential_in_the_return_normalised_by_initial_state() -> None:
    # Advantages: 1 and -1 among AKo; 0 where all returns are equal.
    raw = np.array([math.exp(2.0), math.exp(-2.0), 1.0, 1.0, 1.0])
    mean = (raw * COUNTS).sum() / COUNTS.sum()
    found = offline_weights(OfflineObjective(beta=0.5, cap=20.0), RETURNS, GROUPS, COUNTS)
    assert found == pytest.approx(raw / mean, rel=1e-5)
    capped = offline_weights(OfflineObjective(beta=0.5, cap=3.0), RETURNS, GROUPS, COUNTS)
    assert capped[0] / capped[2] == pytest.approx(3.0)
    assert np.isfinite(offline_weights(OfflineObjective(beta=1e-6), RETURNS, GROUPS, COUNTS)).all()


def test_filtered_cloning_keeps_what_did_better_than_its_group() -> None:
    found = offline_weights(OfflineObjective("filtered"), RETURNS, GROUPS, COUNTS)
    assert found == pytest.approx([8.0, 0, 0, 0, 0])
    with pytest.raises(DataError, match="all 2 records have weight 0"):
        offline_weights(OfflineObjective("filtered"), RETURNS[2:4], GROUPS[2:4], COUNTS[2:4])


@pytest.mark.parametrize(("beta", "cap"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_constants_that_make_no_weights_are_refused(beta: float, cap: float) -> None:
    with pytest.raises(ConfigError, match="give a finite number above 0"):
        OfflineObjective("awr", beta, cap)


def test_the_loss_is_the_weighted_mean_whatever_the_rectangles(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = examples_of(
        [record("c", 6), record("r99", -6), record("c", 1, "22", STATE * 3), record("f", 0, "22")]
    )
    weights = offline_weights(
        AWR,
        np.array([found.value for found in examples], np.float32),
        [found.group for found in examples],
        np.array([2, 3, 2, 2]),  # "r99" is spelt: r9 and 9
    )
    policy = tiny_policy()
    alone = [rectangle([found]) for found in examples]
    with torch.no_grad():
        sums = [
            float(policy(one.token_ids, None, None, one.predictors, one.targets)[0].sum()) for one in alone
        ]
    expected = -sum(weight * value for weight, value in zip(weights, sums, strict=True)) / 9
    for tokens in (10_000, 100, 1):
        monkeypatch.setattr(offline, "RECTANGLE_TOKENS", tokens)
        assert train(tiny_policy(), examples, steps=1, rate=1e-9)[0] == pytest.approx(expected, rel=1e-4)


def test_the_loss_falls_and_actions_that_won_become_likelier_than_those_that_lost() -> None:
    # In one and the same state calling won and raising lost, as often as each other.
    records = [record("c", 6), record("r10", -6)] * 8 + [record("f", 0, "22", STATE[:4])]
    policy = load_policy(TINY, torch.float32, 1.0, 1.0)
    before = logprob(policy, "c"), logprob(policy, "r10")
    losses = train(policy, examples_of(records), steps=12, rate=1e-3)
    after = logprob(policy, "c"), logprob(policy, "r10")
    assert np.mean(losses[-3:]) < 0.6 * np.mean(losses[:3])
    assert after[0] > before[0]
    assert after[0] - after[1] > before[0] - before[1] + 1.0


def test_without_weights_both_actions_are_learnt_alike() -> None:
    """The contrast to the test above: it is the weights that tell them apart."""
    records = [record("c", 0), record("r10", 0)] * 8
    policy = load_policy(TINY, torch.float32, 1.0, 1.0)
    before = logprob(policy, "c") - logprob(policy, "r10")
    train(policy, examples_of(records), steps=12, rate=1e-3)
    assert abs(logprob(policy, "c") - logprob(policy, "r10")) < abs(before) + 1.0


def test_the_same_seed_gives_the_same_model() -> None:
    examples = examples_of([record(action, won) for action, won in (("c", 2), ("f", -1), ("r8", 5))] * 3)
    models = [tiny_policy() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        train(model, examples, steps=3, rows=4, seed=seed)
    first, again, other = map(flat, models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_rate_falls_from_the_one_that_was_asked_for_to_0() -> None:
    """AdamW moves every weight by the rate while its gradient stays the same."""
    policy = tiny_policy()
    places = [flat(policy)]
    train(
        policy,
        examples_of([record("c", 6), record("r10", -6)]),
        steps=4,
        rate=1e-5,
        on_step=lambda step, loss: places.append(flat(policy)),
    )
    moved = [(after - before).abs().max().item() for before, after in pairwise(places)]
    assert moved == pytest.approx([1e-5, 0.75e-5, 0.5e-5, 0.25e-5], rel=0.05)


def test_a_model_that_diverges_is_not_trained_on() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        next(policy.parameters()).fill_(math.nan)
    with pytest.raises(DivergedError, match="warm start step 1"):
        train(policy, examples_of([record("c", 1)]), steps=2)


def train(
    policy: PolicyModel,
    examples: Sequence[Example],
    objective: OfflineObjective = AWR,
    *,
    steps: int,
    rows: int = 64,
    rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    return warm_start(
        policy,
        examples,
        objective,
        steps=steps,
        rows_per_step=rows,
        learning_rate=rate,
        rng=np.random.default_rng(seed),
        on_step=on_step,
    )


def test_the_command_writes_a_model_folder_that_a_run_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record("c", 6), record("r10", -6)] * 4
    write_records(tmp_path / "t.arrow", records, "compact")
    words = ["--reader", READER, "--table", str(tmp_path / "t.arrow"), "--model", "builtin:tiny-poker"]
    asked = ["--steps", "2", "--batch", "3", "--lr", "0.02", "--beta", "0.5", "--cap", "2", "--seed", "5"]
    assert main([*words, *asked, "--out", str(tmp_path / "warm")]) == 0
    assert {path.name for path in TINY.iterdir()} <= {path.name for path in (tmp_path / "warm").iterdir()}
    was, now = (load_policy(folder, torch.bfloat16, 1.0, 1.0) for folder in (TINY, tmp_path / "warm"))
    assert now.model.config.to_dict() == was.model.config.to_dict() | {
        "_name_or_path": str(tmp_path / "warm")
    }
    policy = load_policy(TINY, torch.float32, 1.0, 1.0)
    train(policy, examples_of(records), replace(AWR, cap=2.0), steps=2, rows=3, rate=0.02, seed=5)
    assert torch.equal(flat(now), flat(policy).bfloat16().float())
    assert not torch.equal(flat(now), flat(was))
    read = load_tokenizer(tmp_path / "warm")
    assert read.encode(STATE, add_special_tokens=False) == TOKENIZER.encode(STATE, add_special_tokens=False)
    assert not list(tmp_path.glob("*.partial"))
    capsys.readouterr()
    for changed in (
        ["--out", str(tmp_path / "warm")],
        ["--table", str(tmp_path / "none.arrow")],
        ["--reader", "no.such:reader"],
        ["--model", str(tmp_path)],
        ["--steps", "0"],
        ["--beta", "0"],
    ):
        assert main([*words, "--steps", "1", "--out", str(tmp_path / "other"), *changed]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert told.count("\n") == 1
    assert not (tmp_path / "other").exists()


def test_the_tasks_command_is_the_trainers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "echo_planes.loop.warm_start")  # as in a process of its own
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) as ended:
        poker_command(["warmstart", "--table", "none.arrow", "--model", "builtin:tiny-poker", *REST])
    assert ended.value.code == 2
    assert "none.arrow: no readable table" in capsys.readouterr().err
