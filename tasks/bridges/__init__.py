"""Tasks written for other libraries: a reward function with a file, an environment with `step`, datasets."""
