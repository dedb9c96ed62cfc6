"""The kernel's log, as far as it tells of GPUs and NICs in trouble, and of processes that it ended.

Format of a record of /dev/kmsg: ``priority,sequence,µs since boot,flags;text`` (Documentation/ABI/testing/dev-kmsg).
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from types import TracebackType

from ncclwatch.errors import NcclwatchError, PrivilegeError

RECORD_BYTES = 8192
MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One line of the kernel's log that matters to a job.

    ``kind`` is ``xid`` (NVIDIA driver), ``nvlink``, ``nic`` (mlx5 and other NIC drivers), ``link`` (a NIC driver's word on its
    link), ``pcie`` (AER), ``memory`` (a process was killed for want of memory) or ``crash`` (a thread did what the processor
    refuses). ``device`` is the PCI address or network device named in it, ``code`` the Xid, ``pid`` the process it names, of a
    crash the thread. ``time_ns`` is ns since boot on the log's clock (local_clock, which starts with CLOCK_MONOTONIC).
    ``severity`` is syslog's (0-7).
    """

    kind: str
    device: str
    text: str
    time_ns: int
    sequence: int
    severity: int
    code: int | None = None
    pid: int | None = None


_PCI = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?"
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?(?P<device>{_PCI})\): (?P<code>\d+)(?:, pid='?(?P<pid>\d+))?")
_NVLINK = re.compile(rf"(?:NVRM|nvidia-nvswitch\d*).*?(?P<device>{_PCI})?.*?(?:NVLink|SXid)", re.IGNORECASE)
_LINK = re.compile(
    rf"^(?P<driver>mlx[45]_\w+|bnxt_en|ice|irdma|efa)\s+(?P<pci>{_PCI})(?:\s+(?P<netdev>[\w.-]+))?:.*\blink (?:up|down|is)\b",
    re.IGNORECASE,
)
_NIC = re.compile(
    rf"^(?P<driver>mlx[45]_\w+|infiniband|bnxt_re|irdma|efa|hns3?)\s+(?P<device>{_PCI}|[\w.-]+)?.*"
    r"(?:error|fail|fatal|timeout|timed out|health|recover|reset|unresponsive|hang)",
    re.IGNORECASE,
)
_PCIE = re.compile(rf"(?P<device>{_PCI}).*(?:AER:|PCIe Bus Error)|AER:.*(?P<other>{_PCI})")
# mm/oom_kill.c (__oom_kill_process); arch/x86/mm/fault.c (show_signal_msg) and arch/x86/kernel/traps.c.
_MEMORY = re.compile(r"^(?:Memory cgroup o|O)ut of memory\b.*?: Kill(?:ed)? process (?P<pid>\d+)")
_CRASH = re.compile(r"^(?:traps: )?[^\[\]:]{1,16}\[(?P<pid>\d+)\]:? (?:segfault at|general protection|trap \w|bad frame)")
_HEADER = re.compile(rb"(\d+),(\d+),(\d+),[^;]*;")


def parse(record: bytes) -> KernelEvent | None:
    """The event in one record of /dev/kmsg, or ``None`` for a line that is nobody's business here."""
    header = _HEADER.match(record)
    if header is None:
        return None
    line = record[header.end() :].split(b"\n", 1)[0].decode("utf-8", "replace")
    text = "".join(char if char.isprintable() else "?" for char in line)[:MAX_TEXT]
    priority, sequence, microseconds = (int(group) for group in header.groups())

    def event(kind: str, device: str | None, code: str | None = None, pid: str | None = None) -> KernelEvent:
        numbers = (int(code) if code else None, int(pid) if pid else None)
        return KernelEvent(kind, device or "", text, microseconds * 1000, sequence, priority & 7, *numbers)

    if found := _XID.search(text):
        return event("xid", found["device"], found["code"], found["pid"])
    if found := _MEMORY.search(text) or _CRASH.search(text):
        return event("memory" if found.re is _MEMORY else "crash", None, pid=found["pid"])
    if found := _LINK.search(text):
        return event("link", found["netdev"] or found["pci"])
    if found := _NVLINK.search(text):
        return event("nvlink", found["device"])
    if found := _NIC.search(text):
        return event("nic", found["device"])
    if found := _PCIE.search(text):
        return event("pcie", found["device"] or found["other"])
    return None


class KernelLog:
    """A reader of /dev/kmsg; ``lost`` counts records that were overwritten before they were read.

    It begins with what the kernel still remembers. Raises :class:`PrivilegeError`.
    """

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self.lost = 0
        self._next: int | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError:
            raise PrivilegeError("not allowed to read the kernel's log", "run as root, or with CAP_SYSLOG") from None
        except OSError as error:
            raise NcclwatchError(f"cannot read {path}: {error.strerror}", "in a container, give it /dev/kmsg") from None

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> KernelLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """Readable when there is a new record."""
        return self._fd

    def events(self) -> list[KernelEvent]:
        """The events among the records that came since the last call."""
        found: list[KernelEvent] = []
        while True:
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                return found
            except OSError as error:
                # EPIPE: records were overwritten; the next read goes on with the oldest one left, whose number tells how many.
                # EINVAL: a record larger than our buffer is skipped.
                if error.errno in (errno.EPIPE, errno.EINVAL):
                    continue
                raise NcclwatchError(f"cannot read the kernel's log: {error.strerror}", "try again") from None
            if not record:
                return found
            self._count_lost(record)
            event = parse(record)
            if event is not None:
                found.append(event)

    def _count_lost(self, record: bytes) -> None:
        header = _HEADER.match(record)
        if header is None:
            return
        sequence = int(header[2])
        if self._next is not None and sequence > self._next:
            self.lost += sequence - self._next
        self._next = sequence + 1
