"""The adapter of sparse attention: choice of pages on tensors, training, and what is taken from the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save  # noqa: E402

from bench.sparse_reference import Reference  # noqa: E402
from bench.sparse_reference import chosen_pages as by_brute_force  # noqa: E402
from echo_planes.config.kv_pages import chosen_pages, landmarks  # noqa: E402
from echo_planes.config.kv_schedule import Schedule  # noqa: E402
from echo_planes.config.schema import BUILTIN_MODELS  # noqa: E402
from echo_planes.config.sparse import SparseConfig  # noqa: E402
from echo_planes.errors import DivergedError, WeightsError  # noqa: E402
from echo_planes.learning.distillation import Distiller, SparseRows  # noqa: E402
from echo_planes.learning.policy_model import PolicyModel, load_policy  # noqa: E402
from echo_planes.rollout.sparsity.pages import choose_pages  # noqa: E402
from echo_planes.types import TrainBatch  # noqa: E402
from echo_planes.weights import sparse_adapter  # noqa: E402
from echo_planes.weights.sparse_adapter import SparseAdapter  # noqa: E402

FOLDER = BUILTIN_MODELS["builtin:tiny-math"]
SCHEDULE = Schedule(pages=(0, 2, 3), bin_tokens=80, first_pages=1, last_pages=1, dense_layers=1)
PROMPT, ANSWER = 120, 90
CPU = torch.device("cpu")


# --- the choice of pages -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_pages_are_those_of_brute_force_and_of_the_engines_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, rows, most, size = 2, 6, 20, 4
    first, last = int(rng.integers(0, 3)), int(rng.integers(1, 4))
    pages = rng.integers(1, most + 1, rows)
    budgets = np.minimum(pages, rng.integers(first + last, first + last + 10, rows))
    # Whole numbers: scores are often equal.
    marks = rng.integers(-3, 4, (most, heads, size)).astype(np.float32)
    queries = rng.integers(-3, 4, (rows, heads, size)).astype(np.float32)
    scores = np.einsum("rhs,phs->hrp", queries, marks)
    got = chosen_pages(*map(torch.from_numpy, (scores, pages, budgets)), first, last).numpy()
    table = np.zeros((rows * heads, most), np.int32)
    blocks = np.tile(np.arange(most), (rows, 1))
    choose_pages(queries, marks, blocks, pages, budgets, first, last, table)
    for row in range(rows):
        for head in range(heads):
            own = scores[head, row, : pages[row]].astype(np.float64)
            want = by_brute_force(own, budgets[row], first, last)
            assert np.flatnonzero(got[head, row]).tolist() == want
            read = table[row * heads + head, : budgets[row]] // heads
            assert read.tolist() == want


def test_scores_that_are_no_numbers_leave_the_budget_as_it_is() -> None:
    scores = torch.full((1, 2, 9), torch.nan)
    scores[0, 1, 4] = 1.0
    scores[0, 1, 6] = -torch.inf
    got = chosen_pages(scores, torch.tensor([9, 7]), torch.tensor([5, 4]), 1, 1)
    assert got.sum(-1).tolist() == [[5, 4]]
    assert got[0, 1, 4]
    assert not got[0, 1, 7:].any()


def test_the_last_page_may_be_partly_filled() -> None:
    sums = landmarks(torch.ones(2, 21, 3), 16)
    assert sums[..., 0].tolist() == [[16, 5], [16, 5]]


# --- from the wire -----------------------------------------------------------------------------


def pairs(rank: int = 2) -> dict[str, Any]:
    return {"layers.0.q": (torch.ones(rank, 8), torch.full((6, rank), 0.5))}


def test_an_adapter_comes_as_it_went() -> None:
    (a, b) = SparseAdapter.of(3, pairs()).pairs()["layers.0.q"]
    assert a.dtype == b.dtype == torch.bfloat16
    assert torch.equal(a.float(), torch.ones(2, 8))
    assert torch.equal(b.float(), torch.full((6, 2), 0.5))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (b"no safetensors", "no safetensors file"),
        (save({"q.lora_a": torch.ones(2, 8)}), "not pairs"),
        (save({"q.weight": torch.ones(2, 8)}), "not pairs"),
        (save({"q.lora_a": torch.ones(2, 8), "q.lora_b": torch.ones(6, 3)}), "must be"),
        (save({"q.lora_a": torch.ones(2), "q.lora_b": torch.ones(6)}), "must be"),
        (save({"q.lora_a": torch.ones(2, 8), "q.lora_b": torch.full((6, 2), torch.nan)}), "not finite"),
    ],
)
def test_what_is_no_adapter_is_refused(tensors: bytes, why: str) -> None:
    with pytest.raises(WeightsError, match=why):
        SparseAdapter(1, tensors).pairs()


def test_too_many_bytes_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_adapter, "MOST_BYTES", 10)
    with pytest.raises(WeightsError, match="at most 10"):
        SparseAdapter(1, b"x" * 11).pairs()


# --- training ----------------------------------------------------------------------------------


def policy(*, recompute: bool = False) -> PolicyModel:
    return load_policy(FOLDER, torch.float32, 1.0, 1.0, recompute=lambda _: recompute)


def distiller(model: PolicyModel, **settings: Any) -> Distiller:
    whole = {"distill_rank": 4, "distill_lr": 1e-3, "distill_share": 1.0} | settings
    return Distiller(model, SparseConfig(**whole), 0, 0, 1)


def batch(answers: int = 4, step: int = 0, answer: int = ANSWER) -> TrainBatch:
    length = PROMPT + answer
    count = answers * length
    mask = np.tile([False] * PROMPT + [True] * answer, answers)
    return TrainBatch(
        step=step,
        trajectory_ids=tuple(map(str, range(answers))),
        token_ids=np.random.default_rng(1).integers(0, 250, count),
        offsets=np.arange(0, count + 1, length),
        loss_mask=mask,
        sampler_logprobs=np.zeros(count, np.float32),
        rewards=np.zeros(answers, np.float32),
        advantage_groups=np.arange(answers),
        advantages=np.zeros(answers, np.float32),
        versions=np.zeros(answers, np.int64),
        correct=np.zeros(answers, np.bool_),
        token_versions=np.where(mask, 0, -1),
        cut_off=np.zeros(answers, np.bool_),
    )


def update(one: Distiller, some: TrainBatch, version: int = 1) -> Any:
    return one.distil(some, SCHEDULE, version, lambda _: None)


def logits(one: Distiller, model: PolicyModel, ids: Any, rows: SparseRows) -> Any:
    with torch.no_grad(), one.sparse(rows):
        return model.head._logits(one.hidden(ids, rows.rows))


def test_the_sparse_forward_is_that_of_brute_force() -> None:
    model = policy()
    ids = torch.from_numpy(batch(1).token_ids)
    decoded = batch(1).loss_mask[:-1]
    # The reference counts the last bin's budget from the bin's first token on, and has no dense bins.
    schedule = replace(SCHEDULE, pages=(4, 4, 5))
    rows = SparseRows.of(schedule, decoded, CPU)
    got = logits(distiller(model), model, ids[:-1], rows).log_softmax(-1)
    reference = Reference(Path(FOLDER))
    want = reference.logprobs(ids[:PROMPT].tolist(), ids[PROMPT:].tolist(), schedule)
    assert reference.rows > 100
    assert (got - want[1:]).abs().max() < 1e-4
    dense = reference.logprobs(ids[:PROMPT].tolist(), ids[PROMPT:].tolist(), None)
    assert (got - dense[1:]).abs().max() > 1e-2


def test_tokens_of_dense_bins_are_left_alone() -> None:
    rows = SparseRows.of(SCHEDULE, np.arange(200) >= 60, CPU)
    assert rows.adapted.tolist() == list(range(80, 200))  # of the prompt, none in the second bin
    assert rows.rows.tolist() == list(range(80, 200))
    assert SparseRows.of(SCHEDULE, np.arange(200) >= 130, CPU).adapted.tolist() == list(range(80, 200))


def test_distillation_brings_sparse_attention_nearer_and_leaves_the_policy_alone() -> None:
    model = policy()
    before = [one.detach().clone() for one in model.parameters()]
    one = distiller(model)
    made = [update(one, batch(), version) for version in range(1, 13)]
    apart = [each.divergence for each in made]
    assert apart[-1] < 0.7 * apart[0]
    assert made[0].tokens == 4 * (ANSWER - 1)  # the last token is not read
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    still = distiller(policy(), distill_lr=1e-12)
    assert [update(still, batch()).divergence for _ in range(3)] == pytest.approx([apart[0]] * 3)


def test_layers_that_run_again_give_the_same_adapter() -> None:
    found = []
    for recompute in (False, True):
        one = distiller(policy(recompute=recompute))
        found.append([update(one, batch(), version).divergence for version in (1, 2, 3)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_share_of_the_answers_is_drawn_anew_for_each_step() -> None:
    one = distiller(policy(), distill_share=0.5)
    tokens = [update(one, batch(8, step)).tokens for step in range(4)]
    assert 0 < min(tokens) <= max(tokens) < 8 * (ANSWER - 1)
    assert len(set(tokens)) > 1


def test_without_sparse_tokens_nothing_is_updated() -> None:
    one = distiller(policy())
    before = SparseAdapter.of(0, one.pairs).tensors
    dense = replace(SCHEDULE, pages=(0,))
    made = one.distil(batch(), dense, 7, lambda _: None)
    assert (made.tokens, made.divergence, made.adapter) == (0, 0.0, SparseAdapter(7, before))
    assert one.distil(None, SCHEDULE, 8, lambda _: None).adapter == SparseAdapter(8, before)


def test_a_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    one = distiller(policy())
    update(one, batch())
    one.save(tmp_path)
    two = distiller(policy())
    two.load(tmp_path)
    assert update(one, batch(step=1), 2).adapter == update(two, batch(step=1), 2).adapter


def test_a_resume_goes_on_with_the_rate_that_the_settings_say_now(tmp_path: Path) -> None:
    one = distiller(policy())
    update(one, batch())
    one.save(tmp_path)
    same, other = distiller(policy()), distiller(policy(), distill_lr=1e-12)
    for each, moves in ((same, True), (other, False)):
        each.load(tmp_path)
        before = each.distil(None, SCHEDULE, 1, lambda _: None).adapter
        assert (update(each, batch(step=1)).adapter != before) == moves


def test_a_checkpoint_of_another_rank_or_none_is_a_new_beginning(tmp_path: Path) -> None:
    one = distiller(policy())
    one.load(tmp_path)
    update(one, batch())
    one.save(tmp_path)
    other = distiller(policy(), distill_rank=2)
    other.load(tmp_path)
    assert not any(b.any() for _, b in other.pairs.values())


def test_a_gradient_that_is_no_number_ends_the_run() -> None:
    model = policy()
    one = distiller(model)
    with torch.no_grad():
        one.pairs["model.layers.1.mlp.up_proj"][1].fill_(torch.inf)
    with pytest.raises(DivergedError, match=r"sparse\.distill_lr"):
        update(one, batch())
