"""Tasks that were written for something else: a reward function with a file, an environment with `step`."""
