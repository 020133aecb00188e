"""The fleet's economics: rollout capacity that is needed, from which instance types, and when to change it.

In: measured times and rates, prices, interruptions. Out: actions (launch, leave, park, activate) with
their reasons; `loop.reconcile` has them done by an `actuators.actuator.Actuator`. Pure but for the
actuators. Imports: types, errors, config, cluster, weights (the chain model).
"""
