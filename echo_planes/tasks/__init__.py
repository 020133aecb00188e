"""The bundled tasks, one folder each.

In a wheel they lie inside this package; in a checkout they lie in the top-level `tasks/` folder, where
people look for them. Either way they import as `echo_planes.tasks.<name>`.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2] / "tasks"
if _checkout.is_dir() and (_checkout.parent / "pyproject.toml").is_file():
    __path__.append(str(_checkout))
