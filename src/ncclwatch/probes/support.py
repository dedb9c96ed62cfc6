"""What this machine must offer before anything is attached; each gap is one clear error."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from ncclwatch.errors import NcclwatchError, PrivilegeError
from ncclwatch.target.machine import this_machine

MINIMUM_KERNEL = (5, 8)
"""The first with BPF ring buffers (``bpf_ringbuf_reserve``)."""
_STILL = "{}; dump and diagnose still work"
_UPROBE_PMU = Path("/sys/bus/event_source/devices/uprobe")


class UnsupportedError(NcclwatchError):
    """This machine cannot run the calls plane; the other planes may still work."""


def kernel_release(text: str) -> tuple[int, int]:
    """(major, minor) of a release such as ``6.1.0-28-amd64``; (0, 0) when it is not one."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_support(*, machine: str = "", release: str = "", euid: int | None = None) -> None:
    """Raise :class:`UnsupportedError` or :class:`PrivilegeError` when calls cannot be traced here.

    The arguments stand in for this machine's in tests.
    """
    machine = machine or platform.machine()
    release = release or platform.release()
    if this_machine(machine) is None:
        raise UnsupportedError(
            f"NCCL calls cannot be traced on {machine}", _STILL.format("ncclwatch probes x86-64 and aarch64 only")
        )
    if kernel_release(release) < MINIMUM_KERNEL:
        raise UnsupportedError(f"NCCL calls cannot be traced on kernel {release}", _STILL.format("it takes kernel 5.8 or later"))
    if not _UPROBE_PMU.exists():
        raise UnsupportedError("this kernel has no uprobes", _STILL.format("use a kernel built with CONFIG_UPROBE_EVENTS"))
    if (os.geteuid() if euid is None else euid) != 0 and not _has_capabilities():
        raise PrivilegeError(
            "tracing NCCL calls needs privileges", "run as root, or with CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE and CAP_SYS_ADMIN"
        )


def _has_capabilities() -> bool:
    """CAP_SYS_ADMIN (21), or CAP_BPF (39) and CAP_PERFMON (38), effective."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return bool(effective >> 21 & 1) or effective >> 38 & 3 == 3
    return False
