"""Fault campaigns on real processes: `python -m bench.chaos SECTION ...` (see `__main__`)."""
