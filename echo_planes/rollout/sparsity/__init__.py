"""Sparse attention in rollouts: the context that a sampled token reads, and how far that is from dense.

Input: lengths of sequences, scores of pages, likeliest tokens. Output: budgets, pages, acceptance. Pure;
`rollout.vllm.sparse_attention` computes with a schedule. `bench.sparse` uses it; runs do not yet.
Imports: types, errors.
"""
