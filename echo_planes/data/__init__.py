"""The data plane: it leases prompts, takes groups of answers, and forms batches of bounded staleness.

In: trajectories and partial rollouts of workers, checked by `claims`. Out: leases, `TrainBatch`es,
checkpoint state. `service` is the asyncio shell, `actor` its process. Below them: `replay` (the buffer),
`store` (groups on disk) and `tasks` (the adapter interface). Imports: types, errors, config, cluster.
"""
