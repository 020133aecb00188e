"""vLLM behind the interface of `rollout.engine`. Only the files of this folder import vLLM.

Input: requests, staged weights. Output: samples with logprobs, each token under one proven (version, digest).
"""
