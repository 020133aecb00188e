"""The topology of a broadcast: peer-forwarding chains, their repair, and progress of every node. Pure.

In: reports of nodes, and time. Out: orders, which parent each node pulls from. `tracker` is its core;
`simulated` runs it over links in virtual time.
"""
