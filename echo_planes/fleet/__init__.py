"""Economics of the fleet: the rollout capacity the learner needs, its instance types, and when to change it.

In: measured times and rates, prices, interruptions. Out: actions (launch, leave, park, activate), which
`loop.reconcile` carries out with an `actuators.actuator.Actuator`. The decisions are pure; only the actuators
and the readers of files do I/O. Imports: types, errors, config, cluster, weights (chain plan, tensor files).
"""
