"""Control group of a slot: limits, counts and lists all processes of a program together.

cgroup v1 (one folder for each controller) or v2 (one folder), whichever this process can write to.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NEEDED = ("pids", "memory")
OPTIONAL = "cpuacct"  # v1 only; v2 always counts processor time


@dataclass(frozen=True)
class Site:
    """Location for new control groups.

    Args:
        version: "v1" or "v2".
        folders: parent folder for each controller; for v2 one folder, for all.
    """

    version: Literal["v1", "v2"]
    folders: tuple[tuple[str, Path], ...]


@dataclass(frozen=True)
class Mount:
    """Mounted cgroup file system, a line of mountinfo.

    Args:
        root: group that is mounted.
        path: mount point.
        controllers: controllers of a v1 hierarchy; empty for v2.
    """

    root: str
    path: Path
    controllers: frozenset[str]


def parse_mounts(mountinfo: str) -> list[Mount]:
    """Return the cgroup file systems in /proc/self/mountinfo (proc(5))."""
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        fields = before.split(" ")
        if kind == "cgroup2":
            mounts.append(Mount(fields[3], Path(fields[4]), frozenset()))
        elif kind == "cgroup":
            mounts.append(Mount(fields[3], Path(fields[4]), frozenset(options.split(","))))
    return mounts


def parse_own(cgroup: str) -> dict[str, str]:
    """Return /proc/self/cgroup as controller -> path of this process's group; "" stands for v2."""
    own = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    return own


def candidates(mounts: Sequence[Mount], own: dict[str, str]) -> list[Site]:
    """Return candidate locations: first the own group, then the mount's root (v1) or the ancestors (v2)."""
    sites = []
    v1: dict[str, list[Path]] = {}
    for mount in mounts:
        for name in mount.controllers & {*NEEDED, OPTIONAL} & own.keys():
            v1.setdefault(name, [*_beneath(mount, own[name])[:1], mount.path])
    if all(name in v1 for name in NEEDED):
        for depth in (0, -1):
            sites.append(Site("v1", tuple((name, paths[depth]) for name, paths in sorted(v1.items()))))
    for mount in mounts:
        if not mount.controllers and "" in own:
            sites += [Site("v2", (("", path),)) for path in _beneath(mount, own[""])]
    return sites


def _beneath(mount: Mount, own: str) -> list[Path]:
    """Return the folder of a group and its ancestors, up to the mount point."""
    inside = own.removeprefix(mount.root if mount.root != "/" else "").strip("/")
    path = mount.path / inside
    return [path, *(p for p in path.parents if p == mount.path or mount.path in p.parents)]


class Group:
    """Control group of one slot.

    Raises:
        OSError: the group cannot be made at `site`.
    """

    def __init__(self, site: Site, name: str, memory_bytes: int, max_processes: int) -> None:
        self.version = site.version
        self.folders = {controller: parent / name for controller, parent in site.folders}
        made = []
        try:
            for folder in self.folders.values():
                folder.mkdir()
                made.append(folder)
            self._limit(memory_bytes, max_processes)
        except OSError:
            for folder in made:
                folder.rmdir()
            raise

    def _limit(self, memory_bytes: int, max_processes: int) -> None:
        (self._at("pids") / "pids.max").write_text(str(max_processes))
        memory = self._at("memory")
        if self.version == "v1":
            (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
            swap = memory / "memory.memsw.limit_in_bytes"
            if swap.exists():
                swap.write_text(str(memory_bytes))
        else:
            (memory / "memory.max").write_text(str(memory_bytes))
            swap = memory / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")

    def _at(self, controller: str) -> Path:
        return self.folders["" if self.version == "v2" else controller]

    def enter(self) -> None:
        """Move the calling process into the group."""
        for folder in self.folders.values():
            (folder / "cgroup.procs").write_text("0")

    def processes(self) -> list[int]:
        """Return the ids of the processes in the group."""
        return [int(line) for line in (self._at("pids") / "cgroup.procs").read_text().split()]

    def oom_kills(self) -> int:
        """Return the number of processes that the kernel killed in this group for lack of memory."""
        name = "memory.oom_control" if self.version == "v1" else "memory.events"
        fields = dict(line.split() for line in (self._at("memory") / name).read_text().splitlines())
        return int(fields.get("oom_kill", 0))

    def cpu_s(self) -> float | None:
        """Return the processor seconds of the group so far; None without a controller that counts them."""
        if self.version == "v2":
            fields = dict(line.split() for line in (self._at("") / "cpu.stat").read_text().splitlines())
            return int(fields["usage_usec"]) / 1e6
        if OPTIONAL not in self.folders:
            return None
        return int((self.folders[OPTIONAL] / "cpuacct.usage").read_text()) / 1e9

    def kill(self) -> None:
        """Kill the processes in the group. Processes that they start meanwhile may need another call."""
        for pid in self.processes():
            with suppress(ProcessLookupError):  # the process has just ended
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """Remove the folders of an empty group.

        Raises:
            OSError: the group is not empty.
        """
        for folder in self.folders.values():
            folder.rmdir()


def find(mountinfo: str, cgroup: str, name: str, memory_bytes: int, max_processes: int) -> Group | None:
    """Make a group at the first location that allows it; None if no location does."""
    for site in candidates(parse_mounts(mountinfo), parse_own(cgroup)):
        try:
            return Group(site, name, memory_bytes, max_processes)
        except OSError:  # no right to write here, or these controllers are missing: try the next one
            continue
    return None
