"""Machines of a run: Ray session, check that the fleet fits, child processes, clocks, GPU driver, scratch.

In: a `Config`, and the processes that other rooms start. Out: a joined or a private cluster, of which nothing
remains afterwards. Imports: types, errors, config. Only `session` imports Ray.
"""
