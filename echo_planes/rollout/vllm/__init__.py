"""vLLM behind the interface of `rollout.engine`; the only files that import it.

In: requests and staged weights. Out: samples with logprobs, each token under one proven (version, digest).
"""
