"""A simulator of whole runs: the code that decides is the real one, what it decides about is modelled."""
