"""The durable replay store; `store.py` is where to begin."""
