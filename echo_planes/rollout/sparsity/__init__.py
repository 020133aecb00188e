"""Sparse attention in rollouts: the context that a sampled token reads, and how far that is from dense.

Input: lengths of sequences, keys and queries, likeliest tokens. Output: budgets, pages, acceptance. No I/O,
no vLLM; `rollout.vllm.sparse_attention` decodes with it. `bench.sparse` uses it; runs do not yet.
Imports: types, errors.
"""
