"""Topology of a broadcast: peer-forwarding chains, their repair, and the progress of every node. Pure.

In: reports of nodes, and time. Out: orders that name the parent each node pulls from. `tracker` is the core;
`simulated` runs the tracker over simulated links in virtual time.
"""
