"""Entry point of `python -m echo_planes.weights`; `reporting/weights/cli.py` implements it."""

import sys

from echo_planes.reporting.weights.cli import main

if __name__ == "__main__":
    sys.exit(main())
