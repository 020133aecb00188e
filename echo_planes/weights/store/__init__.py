"""Versions kept for later: snapshots and the patches between them, in a folder or a bucket.

In: publications, as they were sent. Out: the cheapest way to any version that is kept. `objects` is the
interface to where the bytes lie.
"""
