"""Benchmarks: one file per hot path. `python -m bench.<name> [--json FILE]`."""
