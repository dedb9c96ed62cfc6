"""What to do about a verdict: by its class, or by its reason where the class alone would send people to the wrong place."""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.engine.habits import LEFT_OUT
from ncclwatch.model.verdict import Culprit, VerdictClass

NEXT_STEPS: dict[VerdictClass, tuple[str, ...]] = {
    VerdictClass.STOPPED: (
        "find out who stopped the process (debugger, job control, kill -STOP); `kill -CONT {pid}` lets it go on",
    ),
    VerdictClass.DEAD: (
        "look for why it ended: `dmesg -T` (out of memory, Xid), the exit status its launcher printed, core files",
        "the remaining ranks cannot finish: restart the job, or let its watchdog abort the communicators",
    ),
    VerdictClass.NOT_ENTERED: (
        "see where it stands: `py-spy dump --nonblocking --pid {pid}` on {host}",
        "data loading, checkpointing and host-side exceptions before the collective are the usual causes",
    ),
    VerdictClass.HARDWARE: ("look for GPU and NIC errors on {host}: `dmesg -T | grep -iE 'xid|mlx5|link'`, `nvidia-smi -q`",),
    VerdictClass.INIT_HANG: (
        "see where it stands: `py-spy dump --nonblocking --pid {pid}` on {host}",
        "a different rendezvous address or network interface, or a slow import, keeps ranks from meeting",
    ),
    VerdictClass.INCONSISTENT: (
        "compare what the ranks named call with their peers: operation, element count, type and order must be the same",
    ),
    VerdictClass.DEADLOCK: ("make every rank call the operations of these communicators in one order",),
}

GPU_NOT_BEGUN = "has called the operation, but its GPU has not begun it"
NEITHER_WAY = "data arrives neither at it nor from it: its proxy thread or its network port stands still"
PORT_RETRIES = "its network port, or the path to it, is slow: no transfer with it ends, though TCP still tries"
NOT_ACKNOWLEDGED = "nothing that is sent to or from its address is acknowledged: its network port, or the path to it, is dead"
PROXY_STALLED = "its proxy thread does not move transfers that could go on"
PROXY_NOT_BEGUN = "its proxy thread has not begun an operation that is queued"
_PROXY_STEPS = (
    "see whether its threads get a CPU and where they stand: `top -H -p {pid}`, `grep . /proc/{pid}/task/*/wchan` on {host}",
    "a CPU limit, a debugger on that thread and a network plugin that blocks are the usual causes",
)
NEXT_STEPS_BY_REASON = {
    GPU_NOT_BEGUN: (
        "its host code has called the operation; see what its GPU does: `nvidia-smi -q`, `dmesg -T | grep -i xid` on {host}",
        "a kernel before it that does not end, and a stream that waits for an event nobody records, are the usual causes: "
        "`py-spy dump --nonblocking --native --pid {pid}`",
    ),
    LEFT_OUT: (
        "look for a condition in its code that this rank alone evaluates otherwise: uneven data, an exception that was caught",
        "see where it stands: `py-spy dump --nonblocking --pid {pid}` on {host}",
    ),
    PROXY_STALLED: _PROXY_STEPS,
    PROXY_NOT_BEGUN: _PROXY_STEPS,
    NOT_ACKNOWLEDGED: (
        "look at the port, its cable and its switch: `ip -s link`, `ethtool`, `dmesg -T | grep -i link` on {host}",
        "from another host, `ncclwatch probe {host}` tells whether the path is dead",
    ),
}
"""Where the class alone would send people to look in the wrong place."""


def next_steps(verdict_class: VerdictClass, culprits: Sequence[Culprit]) -> tuple[str, ...]:
    """What to do about the first culprit."""
    first = culprits[0]
    pid = "PID" if first.pid is None else str(first.pid)
    steps = NEXT_STEPS_BY_REASON.get(first.reason) or NEXT_STEPS.get(verdict_class, ())
    return tuple(step.format(pid=pid, host=first.host or "its host") for step in steps)
