"""Run folder as the pages read it: its store, once it exists, and its model's tokenizer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from echo_planes.config.files import SETTINGS_BYTES, read_text
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot, is_store
from echo_planes.errors import DataError
from echo_planes.reporting.report import parse_config
from echo_planes.reporting.sections.rollouts import run_tokenizer

CONFIG_FILE = "config.yaml"


class RunFolder:
    """One run, finished, running or about to start.

    Args:
        folder: the run folder.

    Raises:
        DataError: it holds no run.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a run folder: it does not exist; give the folder of a run")
        if not (folder / CONFIG_FILE).exists() and not is_store(folder / REPLAY_FOLDER):
            raise DataError(
                f"{folder} is not a run folder: it has no {CONFIG_FILE} and no {REPLAY_FOLDER}/; give the "
                "folder of a run"
            )
        self._folder = folder
        self._snapshot: StoreSnapshot | None = None

    @property
    def name(self) -> str:
        return self._folder.resolve().name

    def snapshot(self) -> StoreSnapshot | None:
        """Return the store as it is now; None: the run has not made it yet.

        Raises:
            DataError: the store cannot be read, or is of a newer format.
        """
        if self._snapshot is not None:
            self._snapshot.refresh()
        elif is_store(self._folder / REPLAY_FOLDER):
            self._snapshot = StoreSnapshot(self._folder / REPLAY_FOLDER)
        return self._snapshot

    @cached_property
    def tokenizer(self) -> Any | None:
        """Tokenizer of the run's model; None if it has none.

        Raises:
            DataError: config.yaml or the tokenizer cannot be read.
        """
        path = self._folder / CONFIG_FILE
        return run_tokenizer(parse_config(read_text(path, SETTINGS_BYTES) if path.exists() else ""))
