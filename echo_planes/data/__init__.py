"""The data plane: prompts out under leases, groups of answers in, batches of bounded staleness out.

In: trajectories and partial rollouts of workers, checked by `claims`. Out: leases, `TrainBatch`es,
checkpoint state. `service` is its shell, `actor` its process; below it `replay` (the buffer), `store`
(groups on disk) and `tasks` (the adapter interface). Imports: types, errors, config, cluster.
"""
