"""Sparse decoding by brute force: a plain model whose sampled rows read the pages that a loop has chosen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from echo_planes.config.kv_schedule import Schedule

_NUMBERS = itertools.count()


def chosen_pages(
    scores: npt.NDArray[np.float64], budget: int, first_pages: int, last_pages: int
) -> list[int]:
    """The first and the last pages, then the highest scores, as many as the budget."""
    count = len(scores)
    always = {page for page in range(count) if page < first_pages or page >= count - last_pages}
    others = sorted(set(range(count)) - always, key=lambda page: -scores[page])
    return sorted([*always, *others[: budget - len(always)]])


class Reference:
    """A model of a folder in float32.

    Args:
        folder: Hugging Face folder.
        recent: choose the newest pages, whatever their scores (the control).
    """

    def __init__(self, folder: Path, *, recent: bool = False) -> None:
        name = f"sparse_by_brute_force_{next(_NUMBERS)}"  # transformers keeps one function a name
        AttentionInterface.register(name, self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=name
        )
        self.recent = recent
        self.rows = 0  # rows and heads for which pages were left out

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int], schedule: Schedule | None) -> Any:
        """Log-probabilities (len(answer), vocabulary) of each answer's token; None: dense."""
        self.prompt, self.schedule = len(prompt), schedule
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
        return logits[len(prompt) - 1 : -1].log_softmax(-1)

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> tuple[Any, None]:
        heads, kv_heads, length = query.shape[1], key.shape[1], key.shape[2]
        groups = heads // kv_heads
        seen = torch.ones(length, length, dtype=torch.bool).tril().repeat(kv_heads, 1, 1)
        if self.schedule is not None and module.layer_idx >= self.schedule.dense_layers:
            for head in range(kv_heads):
                for row in range(self.prompt, length):
                    seen[head, row] &= self._reads(query[0], key[0], head, row, groups)
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, 1),
            value.repeat_interleave(groups, 1),
            attn_mask=seen.repeat_interleave(groups, 0)[None],
            scale=scaling,
        )
        return output.transpose(1, 2).contiguous(), None

    def _reads(self, query: Any, key: Any, head: int, row: int, groups: int) -> Any:
        """Positions that a row reads, (length,)."""
        schedule = self.schedule
        assert schedule is not None
        size = schedule.page_tokens
        count = row // size + 1
        place = min(row // schedule.bin_tokens, len(schedule.pages) - 1)
        budget = schedule.pages[place] or count
        asked = query[head * groups : (head + 1) * groups, row].double().mean(0)
        scores = [
            float(asked @ key[head, page * size : min(row + 1, (page + 1) * size)].double().sum(0))
            for page in range(count)
        ]
        if self.recent:
            scores = list(range(count))
        read = torch.zeros(key.shape[1], dtype=torch.bool)
        chosen = chosen_pages(np.array(scores), budget, schedule.first_pages, schedule.last_pages)
        self.rows += len(chosen) < count
        for page in chosen:
            read[page * size : (page + 1) * size] = True
        return read
