"""Simulator (`python -m echo_planes.simulate`): real decisions over modelled machines, in virtual time.

In: a scenario. Out: a run folder like a real run's, marked as simulated. Imports: all but rollout and
learning.
"""
