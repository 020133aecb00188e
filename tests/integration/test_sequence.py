"""Ranks that share sequences, as real gloo processes: attention over whole rows, and half of the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo_planes.learning.packing import Segment
from echo_planes.learning.policy_model import PolicyModel
from echo_planes.learning.sequence import SequenceGroup
from echo_planes.learning.tree_attention import Forest, attend
from tests.unit.test_tree_attention import visible

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RANKS, TOKENS, WIDTH = 2, 12, 8
HEADS = [(4, 4), (4, 2), (4, 1)]  # of queries, and of keys and values: 1 cannot be shared by two ranks
FORESTS = (
    [Segment(0, 12, 12, 0)],
    [Segment(0, 7, 7, 0), Segment(7, 12, 12, 0)],
    [Segment(0, 4, 11, 0), Segment(4, 7, 7, 1), Segment(7, 11, 11, 1), Segment(11, 12, 12, 0)],
)
LONG = 1024


def on_ranks(job: Any, folder: Path) -> list[Any]:
    """Return what `job(group)` gives on each rank, in processes of their own."""
    torch.multiprocessing.spawn(_rank, (job, str(folder)), RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def _rank(rank: int, job: Any, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=RANKS)
    group = SequenceGroup.joined(rank, RANKS, RANKS)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(job(group)))
    torch.distributed.destroy_process_group()


def largest_errors(group: SequenceGroup) -> list[float]:
    """Largest difference of outputs and gradients from attention of one process, of every case."""
    part = slice(group.index * TOKENS // RANKS, (group.index + 1) * TOKENS // RANKS)
    found = []
    for heads, kv_heads in HEADS:
        for segments in FORESTS:
            generator = torch.Generator().manual_seed(heads + kv_heads)
            whole = [
                torch.randn(1, count, TOKENS, WIDTH, generator=generator, requires_grad=True)
                for count in (heads, kv_heads, kv_heads)
            ]
            pull = torch.randn(1, TOKENS, heads, WIDTH, generator=generator)
            own = [x.detach()[:, :, part].clone().requires_grad_(True) for x in whole]
            query, key, value = own
            forest = Forest(segments, torch.device("cpu"), group)
            output, _ = attend(torch.nn.Module(), query, key, value, None, forest=forest, scaling=0.3)
            torch.autograd.backward((output * pull[:, part]).sum())
            key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in whole[1:])
            seen = visible(segments, TOKENS)
            expected = scaled_dot_product_attention(whole[0], key, value, seen, scale=0.3).transpose(1, 2)
            torch.autograd.backward((expected * pull).sum())
            pairs: list[tuple[Any, Any]] = [(output, expected[:, part])]
            pairs += [(mine.grad, its.grad[:, :, part]) for mine, its in zip(own, whole, strict=True)]
            found.append(max(float((one - other).abs().max()) for one, other in pairs))
    return found


def test_attention_is_that_of_whole_rows(tmp_path: Path) -> None:
    for errors in on_ranks(largest_errors, tmp_path):
        assert len(errors) == len(FORESTS) * len(HEADS)
        assert max(errors) < 1e-5


def kept_bytes(group: SequenceGroup | None) -> float:
    """Bytes that a forward pass over one long row keeps for the backward pass, weights left out."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    torch.manual_seed(0)
    policy = PolicyModel(Qwen3ForCausalLM(config), 1.0, 1.0, longest=LONG, sequence=group)
    weights = {one.untyped_storage().data_ptr() for one in policy.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    ids = torch.arange(LONG)[None] % 64
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = policy(
            ids, torch.arange(LONG)[None], (Segment(0, LONG, LONG, 0),), torch.arange(LONG - 1), ids[0, 1:]
        )
    total = sum(one.untyped_storage().nbytes() for at, one in kept.items() if at not in weights)
    assert output[0].shape == (LONG - 1,)
    return float(total)


def test_a_rank_keeps_half_of_a_row(tmp_path: Path) -> None:
    whole = kept_bytes(None)
    for share in on_ranks(kept_bytes, tmp_path):
        assert 0.4 < share / whole < 0.6, (share, whole)
