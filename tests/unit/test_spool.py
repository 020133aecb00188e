"""Scratch folders of nodes: those of dead nodes are removed, those of nodes that live or just begin stay."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo_planes.errors import ClusterError
from echo_planes.weights.node import spool
from echo_planes.weights.node.spool import LOCK_NAME, PREFIX, hold_folder, sweep


def folder_in(root: Path, name: str) -> Path:
    folder = root / f"{PREFIX}{name}"
    folder.mkdir()
    return folder


def test_only_folders_of_dead_nodes_are_removed(tmp_path: Path) -> None:
    living, dead, new = (folder_in(tmp_path, name) for name in ("living", "dead", "new"))
    lock = hold_folder(living)
    os.close(hold_folder(dead))
    sweep(tmp_path)
    assert (living.exists(), dead.exists(), new.exists()) == (True, False, True)
    os.close(lock)
    sweep(tmp_path)
    assert not living.exists()


def test_a_folder_that_cannot_be_held_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="No such file"):
        hold_folder(tmp_path / "nowhere")
    folder = folder_in(tmp_path, "taken")
    lock = hold_folder(folder)
    with pytest.raises(ClusterError, match="another"):
        hold_folder(folder)
    os.close(lock)


def test_a_node_that_just_begins_is_not_swept_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = folder_in(tmp_path, "new")

    def flock(descriptor: int, kind: int) -> None:
        """Another node begins at this very moment."""
        monkeypatch.setattr(spool, "fcntl", fcntl)
        sweep(tmp_path)
        fcntl.flock(descriptor, kind)

    monkeypatch.setattr(spool, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": flock}))
    lock = hold_folder(folder)
    sweep(tmp_path)
    assert (folder / LOCK_NAME).exists()
    os.close(lock)
