"""The data plane's process."""

from __future__ import annotations

from typing import Any

from echo_planes.data import service
from echo_planes.process import enter_actor


class DataService(service.DataService):
    """`service.DataService` in an actor of its own; same arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        enter_actor()
        super().__init__(*arguments, **options)
