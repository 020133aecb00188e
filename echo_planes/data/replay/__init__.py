"""The replay buffer's core: admission, staleness, leases, partial rollouts, dispatch. Pure, time passed in.

In: workers' pulls, streamed tokens and submitted groups. Out: leases, batches, and counts that add up.
"""
