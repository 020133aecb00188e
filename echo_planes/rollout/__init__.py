"""The rollout plane: workers that pull leases, sample with an engine, score the answers and submit them.

Input: leases, and snapshots through `weights`. Output: trajectories, partial rollouts, counters. `engine` is
the interface to an inference engine, `vllm` the real one, `sources` the interface to the other planes.
Imports: types, errors, config, cluster, weights.
"""
