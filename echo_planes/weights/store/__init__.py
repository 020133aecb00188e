"""Store of weights: snapshots, and the patches between them, in a folder or a bucket.

In: publications, as the sender published them. Out: the cheapest sequence of publications that rebuilds a
stored version. `objects` is the interface to the folder or bucket.
"""
