"""The whole loop in one process on a virtual clock, with fakes of engine and learner, for users' own tests.

`simulation.Simulation` runs the real controller, runner, data plane and worker. Imports: all but sim, weights
and learning.
"""
