"""Attention over shared histories: outputs and gradients are those of a dense mask, and of rows alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from echo_planes.learning.packing import (  # noqa: E402
    Segment,
    build,
    find_inputs,
    make_units,
    plan,
)
from echo_planes.learning.policy_model import load_policy  # noqa: E402
from echo_planes.learning.tree_attention import Forest, _joined_calls, attend  # noqa: E402
from echo_planes.types import TrainBatch  # noqa: E402
from tests.unit.test_packing import make_batch  # noqa: E402

CPU = torch.device("cpu")
CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Tree = list[tuple[int, Any]]  # tokens of each child, and its children


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trees(depth: int) -> st.SearchStrategy[Tree]:
    below = st.just([]) if depth == 0 else trees(depth - 1)
    return st.lists(st.tuples(st.integers(1, 40), below), min_size=1, max_size=3)


def segments_of(tree: Tree, at: int = 0, depth: int = 0) -> tuple[list[Segment], int]:
    found: list[Segment] = []
    for size, children in tree:
        below, end = segments_of(children, at + size, depth + 1)
        found += [Segment(at, at + size, end, depth), *below]
        at = end
    return found, at


def visible(segments: list[Segment], tokens: int) -> Any:
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for one in segments:
        mask[one.start : one.end, one.start : one.stop] = True
    return mask & torch.ones(tokens, tokens, dtype=torch.bool).tril()


@settings(max_examples=60, deadline=None)
@given(tree=trees(2), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]), width=st.sampled_from([8, 6]))
def test_outputs_and_gradients_are_those_of_a_dense_mask(
    tree: Tree, heads: tuple[int, int], width: int
) -> None:
    """`width`: of the values; the kernels want that of the queries, 8."""
    segments, tokens = segments_of(tree)
    generator = torch.Generator().manual_seed(tokens)
    sizes = [(heads[0], 8), (heads[1], 8), (heads[1], width)]
    query, key, value = (
        torch.randn(1, count, tokens, size, generator=generator, requires_grad=True) for count, size in sizes
    )
    pull = torch.randn(1, tokens, heads[0], width, generator=generator)
    output, _ = attend(torch.nn.Module(), query, key, value, None, forest=Forest(segments, CPU), scaling=0.3)
    found = torch.autograd.grad((output * pull).sum(), (query, key, value))
    more = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, *more, attn_mask=visible(segments, tokens), scale=0.3
    ).transpose(1, 2)
    wanted = torch.autograd.grad((expected * pull).sum(), (query, key, value))
    for one, other in zip([output, *found], [expected, *wanted], strict=True):
        assert float((one - other).detach().abs().max()) < 1e-5


def flash_forward(q: Any, k: Any, v: Any, *rest: Any, scale: float) -> tuple[Any, ...]:
    """In the place of `aten._flash_attention_forward`: pair by pair, by the kernel for CPUs."""
    query_bounds, key_bounds, most_queries, most_keys, dropout, causal, _ = rest
    out, sums = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    assert dropout == 0.0
    for a, b in pairs(query_bounds, key_bounds, most_queries, most_keys):
        given = (x.transpose(0, 1)[None] for x in (q[a], k[b], v[b]))
        made, log_sums = CPU_FORWARD(*given, 0.0, causal, attn_mask=None, scale=scale)
        out[a], sums[:, a] = made[0].transpose(0, 1), log_sums[0]
    return out, sums, None, None, None


def flash_backward(
    g: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, *rest: Any, scale: float
) -> tuple[Any, ...]:
    """In the place of `aten._flash_attention_backward`."""
    query_bounds, key_bounds, most_queries, most_keys, _, causal, *_ = rest
    assert sums.shape == (q.shape[1], q.shape[0])
    found = tuple(torch.empty_like(x) for x in (q, k, v))
    for a, b in pairs(query_bounds, key_bounds, most_queries, most_keys):
        given = (x.transpose(0, 1)[None] for x in (g[a], q[a], k[b], v[b], out[a]))
        made = CPU_BACKWARD(*given, sums[:, a][None].contiguous(), 0.0, causal, attn_mask=None, scale=scale)
        for whole, rows, part in zip(found, (a, b, b), made, strict=True):
            whole[rows] = part[0].transpose(0, 1)
    return found


def pairs(query_bounds: Any, key_bounds: Any, most_queries: int, most_keys: int) -> list[tuple[slice, slice]]:
    runs = [
        [slice(one, other) for one, other in pairwise(bounds.tolist())]
        for bounds in (query_bounds, key_bounds)
    ]
    assert [max(run.stop - run.start for run in some) for some in runs] == [most_queries, most_keys]
    return list(zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_calls_for_gpus_compute_the_same(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level of the forest in one call, with stand-ins for the two kernels. Not run on a GPU."""
    segments, tokens = segments_of([(3, [(2, [(4, []), (1, [])]), (5, [])]), (2, []), (6, [(1, [])])])
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, 8, generator=generator).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    pull = torch.randn(1, tokens, 4, 8, generator=generator).to(dtype)
    results = []
    for calls in (None, _joined_calls(segments, CPU)):
        forest = Forest(segments, CPU)
        forest.calls = calls or forest.calls
        output, _ = attend(torch.nn.Module(), query, key, value, None, forest=forest)
        results.append([output, *torch.autograd.grad((output * pull).sum(), (query, key, value))])
    tolerance = 1e-6 if dtype == torch.float32 else 0.05
    for one, other in zip(*results, strict=True):
        assert float((one - other).detach().abs().max()) < tolerance


def test_what_attention_over_a_forest_does_not_do_is_refused() -> None:
    x = torch.zeros(1, 1, 4, 8)
    forest = Forest([Segment(0, 4, 4, 0)], CPU)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    for rows, named in ((1, {"dropout": 0.1}), (1, {"attention_mask": mask}), (2, {})):
        arguments: dict[str, Any] = {"attention_mask": None} | named
        some = x.expand(rows, -1, -1, -1)
        with pytest.raises(RuntimeError, match="neither dropout nor a mask"):
            attend(torch.nn.Module(), some, some, some, forest=forest, **arguments)


def answers(samples: int = 4) -> TrainBatch:
    """Answers to two prompts, some alike at first, and turns that continue one of them."""
    rng = np.random.default_rng(2)
    sequences = []
    for prompt in (rng.integers(0, 64, n).tolist() for n in (23, 9)):
        alike = rng.integers(0, 64, 12).tolist()
        for sample in range(samples):
            own = rng.integers(0, 64, 5 + 3 * sample).tolist()
            answer = [*alike, *own] if sample % 2 else own
            sequences.append((prompt, answer, [place % 5 != 4 for place in range(len(answer))]))
    before, answer, _ = sequences[0]
    sequences.append(([*before, *answer, 1, 2], [3, 4, 5], [True] * 3))
    return make_batch(sequences)


def gradients(policy: Any, batch: TrainBatch, pull: Any, limit: int) -> tuple[Any, Any, dict[str, Any]]:
    """Logprobs and entropies (T,), and the gradient of their weighted sum."""
    inputs = find_inputs(batch, np.ones(batch.num_trajectories, np.bool_))
    units = make_units(batch, inputs, limit)
    lengths = np.array([unit.length for unit in units])
    found = torch.zeros(2, len(batch.token_ids))
    for layout in plan(lengths, max(limit, 200), 1, several=limit > 0)[0]:
        micro = build(layout, units, batch, inputs)
        with torch.enable_grad():
            rows = [torch.from_numpy(x) for x in (micro.token_ids, micro.position_ids)]
            rest = [torch.from_numpy(x) for x in (micro.predictors, micro.targets)]
            logprobs, entropy = policy(*rows, micro.segments, *rest)
            (logprobs * pull[micro.columns]).sum().backward()
        found[0, micro.columns], found[1, micro.columns] = logprobs.detach(), entropy
    grads = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    return found[0], found[1], grads


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("model", "heads"),
    [("Llama", (4, 4)), ("Qwen3", (4, 2)), ("Llama", (9, 3))],
    ids=["Llama", "Qwen3", "SmolLM2"],
)
def test_shared_rows_have_the_gradient_of_rows_alone(
    model: str, heads: tuple[int, int], recompute: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{model}Config")(
        vocab_size=64,
        hidden_size=heads[0] * 8,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    getattr(transformers, f"{model}ForCausalLM")(config).save_pretrained(tmp_path)
    batch = answers()
    policy = load_policy(tmp_path, torch.float32, 1.0, 1.0, longest=200, recompute=lambda model: recompute)
    pull = torch.randn(len(batch.token_ids), generator=torch.Generator().manual_seed(0))
    shared = gradients(policy, batch, pull, 400)
    split = gradients(policy, batch, pull, 80)
    with policy.rows_of_one():
        alone = gradients(policy, batch, pull, 0)
    for found in (shared, split):
        assert float((found[0] - alone[0]).abs().max()) < 2e-6
        assert float((found[1] - alone[1]).abs().max()) < 2e-6
        wanted = torch.cat([gradient.flatten() for gradient in alone[2].values()])
        off = torch.cat([gradient.flatten() for gradient in found[2].values()]) - wanted
        assert float(off.norm() / wanted.norm()) < 1e-6
        assert float(off.abs().max() / wanted.abs().max()) < 1e-6
