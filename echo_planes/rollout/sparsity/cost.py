"""Cost of a sampled token, dense and sparse (Sparrow, equations 2 and 3, after Sadhukhan et al., 2506.05333).

Decoding a token of a sequence with s tokens before it takes 2 P operations with the weights and 2 r D s with
the KV cache, and reads the weights once a batch and 2 D s bytes of the cache. P: weights; D: numbers of a
token's keys and values; r: heads of queries that share keys. Sparse attention reads its budget instead of s,
and half of D for each page, to score it. What kernels, scheduling and sampling add is left out, so that a
speed-up told here is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echo_planes.config.kv_schedule import Schedule

BYTES = 2  # of a number, bf16


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a model that decoding depends on."""

    num_params: float
    num_layers: int
    kv_numbers: float  # D: of one token, all layers, keys and values
    shared: float  # r: heads of queries by heads of keys


def mean_read_tokens(
    schedule: Schedule | None, prompt_tokens: int, answer_tokens: int, num_layers: int | None = None
) -> float:
    """Return the tokens' worth of KV cache that a sampled token reads, mean over an answer; None: dense.

    Args:
        schedule: budgets; the scores of pages count, half a token for each page.
        prompt_tokens, answer_tokens: lengths.
        num_layers: of the model, of which the schedule's dense layers read all; None: they are not counted.
    """
    lengths = np.arange(prompt_tokens + 1, prompt_tokens + answer_tokens + 1)
    if schedule is None:
        return float(lengths.mean())
    read, pages = schedule.read_tokens(lengths), schedule.pages_of(lengths)
    sparse = read + np.where(schedule.budgets(lengths) < pages, pages / 2, 0)
    dense = min(1.0, schedule.dense_layers / num_layers) if num_layers else 0.0
    return float((dense * lengths + (1 - dense) * np.minimum(sparse, lengths)).mean())


def token_s(
    decoder: Decoder, read_tokens: float, batch: int, bytes_per_s: float, operations_per_s: float
) -> float:
    """Return the seconds of one token of every sequence of a batch: of reading or arithmetic, the longer."""
    read = BYTES * (decoder.num_params + batch * decoder.kv_numbers * read_tokens)
    computed = 2 * batch * (decoder.num_params + decoder.shared * decoder.kv_numbers * read_tokens)
    return max(read / bytes_per_s, computed / operations_per_s)
