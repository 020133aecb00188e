"""`python -m echo_planes.view`: a local page to read the rollouts of a run."""
