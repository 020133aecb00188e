"""The rollout plane: workers that pull leases, sample with an engine, score the answers and hand them in.

In: leases, and snapshots through `weights`. Out: trajectories, partial rollouts, counters. `engine` is the
interface to an inference engine, `vllm` the real one, `sources` the interface to the planes around it.
Imports: types, errors, config, cluster, weights.
"""
