"""The process beside a learner or a worker that moves weights: `python -m echo_planes.weights.node.process`.

Input: settings on stdin, HTTP from its owner over a Unix socket, and HTTP from other nodes. Output: a file
that the engine installs. The owner, a learner or a worker, uses `client`.
"""
