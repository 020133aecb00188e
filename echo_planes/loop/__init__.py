"""One run, from its command-line words to its summary.

`loading`, `preflight`, `memory` and `resume` check the settings before any process starts. `launch` starts
the actors. `controller` is a pure state machine (events in, actions out). `runner` carries out its actions
through the interfaces of `planes`. `accounting` records steps, events and dollars. `reconcile` starts and
ends workers where the fleet follows price and need. May import all but testing and sim; only `launch` imports
Ray.
"""
