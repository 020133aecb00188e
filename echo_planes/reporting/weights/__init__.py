"""`python -m echo_planes.weights`: tables of stored weights, and of the share that an update changes."""
