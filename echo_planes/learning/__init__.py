"""The learning plane: objectives, packing, drift control, the divergence guard, the DeepSpeed engine.

Input: `TrainBatch` messages. Output: updates, and publications through `weights`. `learner` is the core,
`actor` its process. Imports: types, errors, config, cluster, weights; DeepSpeed only in `deepspeed_engine`.
"""
