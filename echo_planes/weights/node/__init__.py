"""The process beside a learner or a worker that moves weights: `python -m echo_planes.weights.node.process`.

In: settings on stdin, HTTP from its owner over a Unix socket, and from other nodes. Out: a file that the
engine installs. `client` is the owner's side.
"""
