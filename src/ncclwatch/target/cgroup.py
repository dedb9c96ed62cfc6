"""Whether a CPU limit holds a process back: what its control groups say (``cpu.stat``), by either interface of the kernel.

A limit (``cpu.max``, ``cpu.cfs_quota_us``; of a container or a pod) gives a group so much processor time in each period of mostly
100 ms. Whoever has used it up stands still until the next: no sample of its state shows that, and its load looks small.
"""

from __future__ import annotations

import contextlib
import time
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.state import CpuLimit
from ncclwatch.target.maps import PROC, read_bounded, read_small

GROUPS_EVERY_S = 5.0
"""A process is seldom moved from one group to another."""

CONTROLLERS = ("cpu", "cpuset")
"""Of which groups are looked up: limits on processor time, sets of CPUs."""
_MAX_TEXT = 1 << 16
_MAX_MOUNTS = 1 << 20
_MAX_DEPTH = 32
_NONE = CpuLimit(0, 0)


def cpu_limit(pid: int, proc: Path = PROC) -> CpuLimit | None:
    """What the limit that has held a process back most has done so far; of those above it too. Zeros where nothing limits it.

    ``None`` where that cannot be read: no processor controller, or a group outside what this process's own mounts show.
    """
    return CpuLimits(pid, proc).read()


class CpuLimits:
    """:func:`cpu_limit` of one process again and again; in which groups it is, is looked up every few seconds."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        self._groups: tuple[tuple[str, int], ...] = ()
        self._next = 0.0

    def read(self) -> CpuLimit | None:
        """As they are now."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + GROUPS_EVERY_S
            self._groups = self._look_up()
        found: list[CpuLimit] = []
        for path, number in self._groups:
            try:
                text = read_small(path)
            except OSError:
                continue
            numbers = dict(words for line in text.splitlines() if len(words := line.split()) == 2 and words[1].isdigit())
            if b"nr_periods" in numbers and b"nr_throttled" in numbers:
                found.append(CpuLimit(int(numbers[b"nr_periods"]), int(numbers[b"nr_throttled"]), number))
            elif numbers:
                found.append(_NONE)  # the root of the newer interface, or a group without the controller
        return max(found, key=lambda limit: (limit.throttled, limit.periods), default=None)

    def _look_up(self) -> tuple[tuple[str, int], ...]:
        """The file of each of the process's groups, with the number of its folder."""
        found = []
        for folder in group_folders(self._pid, self._proc):
            with contextlib.suppress(OSError, ValueError):  # a name with a zero byte is none
                found.append((str(folder / "cpu.stat"), folder.stat().st_ino))
        return tuple(found)


def group_folders(pid: int, proc: Path = PROC, controller: str = "cpu") -> list[Path]:
    """The folder of the control group with a controller that a process is in, and those above it that are shown."""
    place = _folder(pid, proc, controller)
    if place is None:
        return []
    mount, path = place
    return [mount / group.relative_to("/") for group in [path, *path.parents][:_MAX_DEPTH]]


def _folder(pid: int, proc: Path, controller: str) -> tuple[Path, PurePosixPath] | None:
    """Where the hierarchy with a controller is mounted, and the group of a process below it."""
    try:
        groups = read_bounded(proc / str(pid) / "cgroup", pid, _MAX_TEXT).decode("utf-8", "surrogateescape")
    except NcclwatchError:
        return None
    fields = (line.split(":", 2) for line in groups.splitlines())
    paths = {name: found[2] for found in fields if len(found) == 3 for name in found[1].split(",")}
    controller = controller if controller in paths else ""
    path = PurePosixPath(paths.get(controller, ""))
    if not path.is_absolute() or ".." in path.parts:
        return None
    # A mount may show a part of the hierarchy only.
    shown = (mount for mount in _mounts(proc) if mount.controller == controller and path.is_relative_to(mount.root))
    mount = next(shown, None)
    return (mount.at, PurePosixPath("/") / path.relative_to(mount.root)) if mount else None


class _Mount(NamedTuple):
    controller: str
    """One of :data:`CONTROLLERS`; empty for the newer interface, which has all."""
    root: str
    at: Path


@lru_cache(maxsize=4)
def _mounts(proc: Path) -> tuple[_Mount, ...]:
    """The control groups' mounts that this process sees. They are read once: a node may have thousands of mounts."""
    try:
        text = read_bounded(proc / "self" / "mountinfo", 0, _MAX_MOUNTS).decode("utf-8", "surrogateescape")
    except NcclwatchError:
        return ()
    found = []
    for line in text.splitlines():
        own, _, system = line.partition(" - ")
        words, kind = own.split(), system.split()
        if len(words) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            found.append(_Mount("", words[3], Path(words[4])))
        elif kind[0] == "cgroup":
            found += [_Mount(one, words[3], Path(words[4])) for one in CONTROLLERS if one in kind[2].split(",")]
    return tuple(found)
