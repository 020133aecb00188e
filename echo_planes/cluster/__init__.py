"""Machines of a run: the Ray session, whether the fleet fits it, child processes, clocks, temporary folders.

In: a `Config`, and the processes that others start. Out: a joined or a private cluster, and nothing left
of it afterwards. Imports: types, errors, config. Ray: in `session` alone.
"""
