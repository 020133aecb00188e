"""The data plane's process."""

from __future__ import annotations

from typing import Any

from echo_planes.cluster.process import enter_actor
from echo_planes.data import service


class DataService(service.DataService):
    """`service.DataService` in its own actor process; takes the same arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        enter_actor()
        super().__init__(*arguments, **options)
