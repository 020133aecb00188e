"""Sparse attention in rollouts: the context that a sampled token reads, and how far that is from dense.

Input: lengths of sequences, keys and queries, likeliest tokens. Output: budgets, pages, acceptance, rises of
budgets. No I/O, no vLLM; `rollout.vllm.sparse_attention` decodes with it, `loop.sparsity` keeps one schedule
on all workers. Imports: types, errors.
"""
