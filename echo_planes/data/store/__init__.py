"""The replay store: trajectory groups on disk as Arrow segments, their fates, recovery and retention.

In: accepted groups. Out: the same groups, after any crash; `snapshot` reads while the owner writes.
"""
