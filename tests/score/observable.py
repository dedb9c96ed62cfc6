"""Which faults a collector of an unmodified job can see at all, from how the fault is defined and what joins the ranks.

Written down before anything is judged: where this says that a fault shows, ``unknown`` is a miss; where it says why not, naming
nobody is what is right. What NCCL keeps where is in docs/engine.md (what is seen of each transport).
"""

from __future__ import annotations

from ncclwatch.simulate.layout import groups, node_of
from ncclwatch.simulate.scenario import Fault, FaultKind, Scenario
from score.real import Attach

COUNTED_FROM = (2, 26)
"""NCCL counts the calls of each collective in host memory (``ncclComm.seqNumber``) from this release on."""

PROCESS = frozenset({FaultKind.STOP, FaultKind.INIT_MISSING})
"""The kernel, or the creation of a communicator, shows it, whatever joins the ranks."""
ENDED = frozenset({FaultKind.KILL, FaultKind.CRASH})
CALLS = frozenset({FaultKind.NEVER_ENTERS, FaultKind.SKIP, FaultKind.OTHER_OPERATION, FaultKind.OTHER_SIZE, FaultKind.OTHER_TYPE})
HOST = frozenset({FaultKind.SLOW_LOADER, FaultKind.GC_PAUSE, FaultKind.CPU_LIMIT})
"""The host is late, and so are its calls."""
GPU = frozenset({FaultKind.GPU_STALL, FaultKind.SLOW_GPU})
PROXY = frozenset({FaultKind.PROXY_STALL, FaultKind.PROXY_SLEEP, FaultKind.LINK_DOWN, FaultKind.SLOW_LINK})


def why_hidden(scenario: Scenario, nccl: str, attach: Attach) -> str:
    """Why a collector that attached so cannot see the scenario's fault; empty where it can, and for a healthy job."""
    return next(filter(None, (_of(fault, scenario, nccl, attach) for fault in scenario.faults)), "")


def _of(fault: Fault, scenario: Scenario, nccl: str, attach: Attach) -> str:
    inside, live = not _crosses(fault, scenario), attach is Attach.LIVE
    if fault.kind in PROCESS or (live and fault.kind in ENDED | HOST):
        return ""
    if fault.kind in ENDED:
        return "memory does not show whether an operation waits for who has gone" if inside else ""
    if fault.kind in CALLS:
        return "" if live else _of_calls_in_memory(fault, nccl, inside=inside)
    if fault.kind in GPU:
        return "how far a GPU is stands in GPU memory: nothing of it in the host's" if inside else ""
    if fault.kind in PROXY:
        return "no proxy and no network is involved" if inside else ""
    return f"not said of {fault.kind}"


def _of_calls_in_memory(fault: Fault, nccl: str, *, inside: bool) -> str:
    """What memory keeps of calls that nobody recorded: which are open on the network, and counts by kind in later releases."""
    if fault.kind is FaultKind.NEVER_ENTERS and not inside:
        return ""
    if fault.kind in (FaultKind.OTHER_SIZE, FaultKind.OTHER_TYPE):
        return "memory keeps neither sizes nor types of calls"
    if fault.role == "pp":
        return "Send and Recv are counted nowhere"
    number = tuple(int(part) for part in nccl.split(".")[:2])
    return "" if number >= COUNTED_FROM else "calls by kind are counted from 2.26 on"


def _crosses(fault: Fault, scenario: Scenario) -> bool:
    """Whether the network joins the ranks that the fault strikes: its group's, or those of any of the rank's groups."""
    roles = [fault.role] if fault.role else ["tp", "dp", "pp", "cp", "ep"]
    nodes = [
        {node_of(scenario.layout, int(rank)) for rank in group}
        for role in roles
        for group in groups(scenario.layout, role).tolist()
        if fault.rank in group
    ]
    return any(len(found) > 1 for found in nodes)
