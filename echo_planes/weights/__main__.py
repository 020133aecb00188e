"""`python -m echo_planes.weights`: see `cli.py`."""

import sys

from echo_planes.reporting.weights.cli import main

if __name__ == "__main__":
    sys.exit(main())
