"""The learning plane: objectives, packing, drift control, the divergence guard, the DeepSpeed engine.

In: `TrainBatch`es. Out: updates, and publications through `weights`. `learner` is the core, `actor` its
process. Imports: types, errors, config, cluster, weights. DeepSpeed: in `deepspeed_engine` alone.
"""
