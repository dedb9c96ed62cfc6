"""All sources of evidence. To add one: a module of this package, a line here, and its tests (docs/adding-a-source.md)."""

from __future__ import annotations

from ncclwatch.engine.evidence.base import Source
from ncclwatch.engine.evidence.calls import Calls
from ncclwatch.engine.evidence.cpu_limits import CpuLimits
from ncclwatch.engine.evidence.device import DeviceShim
from ncclwatch.engine.evidence.disagreements import OpenCalls, SequenceCounts
from ncclwatch.engine.evidence.exits import Exits
from ncclwatch.engine.evidence.kernel_log import KernelLog
from ncclwatch.engine.evidence.ports import Ports
from ncclwatch.engine.evidence.proxies import Proxies
from ncclwatch.engine.evidence.shared_memory import SharedMemory
from ncclwatch.engine.evidence.sockets import Sockets
from ncclwatch.engine.evidence.work_requests import WorkRequests

SOURCES: tuple[Source, ...] = (
    Exits(), Proxies(), SharedMemory(), DeviceShim(), Calls(), OpenCalls(), SequenceCounts(), Ports(), Sockets(), KernelLog(),
    CpuLimits(), WorkRequests(),
)  # fmt: skip
"""Every source, in the order in which what they say is told."""
