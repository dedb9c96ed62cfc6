"""A limit on the processor time of some processes, by cgroup: both kinds of hierarchy, as containers are limited."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_US = 100_000
_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")


def _hierarchy() -> tuple[Path, int] | None:
    """Where groups with a limit on processor time can be made, and the version of the interface there."""
    try:
        if "cpu" in (_V2 / "cgroup.controllers").read_text().split():
            return _V2, 2
    except OSError:
        pass
    return (_V1, 1) if (_V1 / "cpu.cfs_quota_us").exists() or (_V1 / "cgroup.procs").exists() else None


def can_limit() -> bool:
    """Whether this machine lets us limit processes."""
    return os.geteuid() == 0 and _hierarchy() is not None


class CpuShare:
    """``with CpuShare(pids, 0.1):`` gives the processes together a tenth of one processor; they are let go at the end."""

    def __init__(self, pids: Sequence[int], share: float) -> None:
        found = _hierarchy()
        if found is None:
            raise OSError("there is no cgroup hierarchy with a processor controller")
        root, version = found
        self._root, self._version = root, version
        self._folder = root / f"ncclwatch-testbed-{os.getpid()}-{time.monotonic_ns()}"
        if version == 2:
            with contextlib.suppress(OSError):  # already on, or not ours to switch: then the write below says so
                (root / "cgroup.subtree_control").write_text("+cpu")
        self._folder.mkdir()
        try:
            self.limit(share)
            for pid in pids:
                (self._folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            self.close()
            raise

    def limit(self, share: float) -> None:
        """Give them another part of a processor from now on."""
        quota = max(1000, round(share * PERIOD_US))
        if self._version == 2:
            (self._folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))

    def close(self) -> None:
        """Let the processes go."""
        with contextlib.suppress(OSError):
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._root / "cgroup.procs").write_text(pid)
            self._folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
