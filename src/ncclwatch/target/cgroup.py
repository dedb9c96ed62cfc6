"""Whether a CPU limit holds a process back: what its control groups say (``cpu.stat``), by either interface of the kernel.

A limit (``cpu.max``, ``cpu.cfs_quota_us``; of a container or a pod) gives a group so much processor time in each period of mostly
100 ms. Whoever has used it up stands still until the next: no sample of its state shows that, and its load looks small.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.state import CpuLimit
from ncclwatch.target.maps import PROC, read_bounded

_MAX_TEXT = 1 << 16
_MAX_MOUNTS = 1 << 20
_MAX_DEPTH = 32
_NONE = CpuLimit(0, 0)


def cpu_limit(pid: int, proc: Path = PROC) -> CpuLimit | None:
    """What the limit that has held a process back most has done so far; of those above it too. Zeros where nothing limits it.

    ``None`` where that cannot be read: no processor controller, or a group outside what this process's own mounts show.
    """
    folder = _folder(pid, proc)
    if folder is None:
        return None
    mount, path = folder
    found: list[CpuLimit] = []
    for group in [path, *path.parents][:_MAX_DEPTH]:
        try:
            text = read_bounded(mount / group.relative_to("/") / "cpu.stat", pid, _MAX_TEXT)
        except NcclwatchError:
            continue
        numbers = dict(words for line in text.splitlines() if len(words := line.split()) == 2 and words[1].isdigit())
        if b"nr_periods" in numbers and b"nr_throttled" in numbers:
            found.append(CpuLimit(int(numbers[b"nr_periods"]), int(numbers[b"nr_throttled"])))
        elif numbers:
            found.append(_NONE)  # the root of the newer interface, or a group without the controller
    return max(found, key=lambda limit: (limit.throttled, limit.periods), default=None)


def _folder(pid: int, proc: Path) -> tuple[Path, PurePosixPath] | None:
    """Where the hierarchy with the processor controller is mounted, and the group of a process below it."""
    try:
        groups = read_bounded(proc / str(pid) / "cgroup", pid, _MAX_TEXT).decode("utf-8", "surrogateescape")
        mounts = read_bounded(proc / "self" / "mountinfo", pid, _MAX_MOUNTS).decode("utf-8", "surrogateescape")
    except NcclwatchError:
        return None
    paths = {name: path for _, controllers, path in _fields(groups) for name in controllers.split(",")}
    old = "cpu" in paths
    path = PurePosixPath(paths.get("cpu") or paths.get("") or "")
    if not path.is_absolute() or ".." in path.parts:
        return None
    for line in mounts.splitlines():
        own, _, system = line.partition(" - ")
        words, kind = own.split(), system.split()
        if len(words) < 5 or len(kind) < 3 or kind[0] != ("cgroup" if old else "cgroup2"):
            continue
        if old and "cpu" not in kind[2].split(","):
            continue
        # A mount may show a part of the hierarchy only.
        if path.is_relative_to(words[3]):
            return Path(words[4]), PurePosixPath("/") / path.relative_to(words[3])
    return None


def _fields(groups: str) -> list[list[str]]:
    """``hierarchy:controllers:path`` of each line."""
    return [fields for line in groups.splitlines() if len(fields := line.split(":", 2)) == 3]
