"""The replay buffer's core: admission, staleness, leases, partial rollouts, dispatch. Pure, time passed in.

In: what workers pull, stream and submit. Out: leases, batches, and counts that add up.
"""
