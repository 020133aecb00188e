"""The pages of `python -m echo_planes.view`: what is asked of a store, how it is drawn, who may see it."""
