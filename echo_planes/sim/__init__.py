"""`python -m echo_planes.simulate`: a run in virtual time, the real decisions over models of everything else.

In: a scenario. Out: a run folder like a real one's, marked as simulated. Imports: all but rollout and
learning.
"""
