"""`python -m echo_planes.weights`: tables of stored weights, and of how few of them an update changes."""
