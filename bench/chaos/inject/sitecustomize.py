"""Put into every Python process of a run by PYTHONPATH: watches it, and kills it where the plan says.

Nothing of the product knows of this. Classes are changed as their modules are imported, in that process only.
"""

import os

if os.environ.get("ECHO_CHAOS"):
    from bench.chaos import failpoints

    failpoints.install(os.environ["ECHO_CHAOS"])
