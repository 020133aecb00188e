"""The whole loop in one process on a virtual clock, with fakes of engine and learner, for tests of one's own.

`simulation.Simulation` runs the real controller, runner, data plane and worker. Imports: all but sim.
"""
