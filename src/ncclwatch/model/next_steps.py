"""What to do next, in words, about what a verdict names or what is told beside it; what stands in braces is filled in."""

from __future__ import annotations

from ncclwatch.model.cause import Cause
from ncclwatch.model.verdict import SlowKind, VerdictClass

_WHERE = "see where it stands: `py-spy dump --nonblocking --pid {pid}` on {host}"
_NETWORK = ("look for GPU and NIC errors on {host}: `dmesg -T | grep -iE 'xid|mlx5|link'`, `nvidia-smi -q`",)
_PROXY = (
    "see whether its threads get a CPU and where they stand: `top -H -p {pid}`, `grep . /proc/{pid}/task/*/wchan` on {host}",
    "a CPU limit, a debugger on that thread and a network plugin that blocks are the usual causes",
)
STEPS: dict[VerdictClass | Cause, tuple[str, ...]] = {
    VerdictClass.STOPPED: (
        "find out who stopped the process (debugger, job control, kill -STOP); `kill -CONT {pid}` lets it go on",
    ),
    VerdictClass.DEAD: (
        "look for why it ended: `dmesg -T` (out of memory, Xid), the exit status its launcher printed, core files",
        "the remaining ranks cannot finish: restart the job, or let its watchdog abort the communicators",
    ),
    VerdictClass.NOT_ENTERED: (
        _WHERE,
        "data loading, checkpointing and host-side exceptions before the collective are the usual causes",
    ),
    VerdictClass.HARDWARE: _NETWORK,
    VerdictClass.SLOW_COMMUNICATION: _NETWORK,
    VerdictClass.INIT_HANG: (
        _WHERE,
        "a different rendezvous address or network interface, or a slow import, keeps ranks from meeting",
    ),
    VerdictClass.INCONSISTENT: (
        "compare what the ranks named call with their peers: operation, element count, type and order must be the same",
    ),
    VerdictClass.DEADLOCK: ("make every rank call the operations of these communicators in one order",),
    VerdictClass.ERROR: ("read the NCCL log of the ranks named (NCCL_DEBUG=WARN)",),
    Cause.GPU_NOT_BEGUN: (
        "its host code has called the operation; see what its GPU does: `nvidia-smi -q`, `dmesg -T | grep -i xid` on {host}",
        "a kernel before it that does not end, and a stream that waits for an event nobody records, are the usual causes: "
        "`py-spy dump --nonblocking --native --pid {pid}`",
    ),
    Cause.LEFT_OUT: (
        "look for a condition in its code that this rank alone evaluates otherwise: uneven data, an exception that was caught",
        _WHERE,
    ),
    Cause.PROXY_STALLED: _PROXY,
    Cause.PROXY_NOT_BEGUN: _PROXY,
    Cause.PATH: (
        "look at the port, its cable and its switch: `ip -s link`, `ethtool`, `dmesg -T | grep -i link` on {host}",
        "from another host, `ncclwatch probe {host}` tells whether the path is dead",
    ),
    Cause.ONE_SAMPLE: ("take at least two samples, a second apart",),
    Cause.NOTHING_SEEN: (
        "see where the ranks stand: `py-spy dump --nonblocking --pid PID` for each; a healthy job computes or loads data",
        "start the job with the counter shim to see inside a node (docs/device-plane.md)",
    ),
    Cause.UNSEEN: ("attach to the processes of the ranks named as well",),
    Cause.BESIDE_ABSENT: ("look whether the ranks that were not observed still run; attach to them as well",),
}
"""What to do next: of a cause where the class alone would send people to look in the wrong place, else of the class."""

SLOW_STEPS = {
    SlowKind.COMPUTE: "on {host}: compare clocks, power and temperature with a healthy GPU (nvidia-smi -q -d CLOCK,PERFORMANCE)",
    SlowKind.HOST: "on {host}: look at its CPU (top -H -p {pid}; cgroup cpu.stat) and at what it does (py-spy dump --pid {pid})",
    SlowKind.KERNEL: "on {host}: compare PCIe link width and speed with a healthy GPU (nvidia-smi -q -d PCIE)",
    SlowKind.PROXY: "on {host}: see whether the proxy threads get CPU (top -H -p {pid})",
    SlowKind.NIC: "on {host}: look at the NIC (ethtool -S, rdma statistic) for errors, pauses and its speed",
    SlowKind.LINK: "look at the path between the two hosts: port errors, retransmissions, congestion",
}
"""What to do next about what holds a slow job up."""
LOADER_TOO = (
    "on {host}: look at its data loader as well (py-spy dump --pid {pid}): the time goes before the iteration's first pass ends"
)
RAISE_LIMIT = "on {host}: raise the CPU limit of process {pid} (of its container or pod; `cat /proc/{pid}/cgroup`, cpu.max there)"
RAISE_LIMITS = "raise the CPU limits of the job's containers or pods, or take them away"
OUT_OF_MEMORY = (
    "it was killed for want of memory: raise the limit of its cgroup, or find what grew (data loaders, pinned buffers, /dev/shm)"
)
WHERE_LOST = (
    "packets of {who} are lost on the way: look for errors and drops at the cable, the transceiver and the switch port "
    "(ethtool -S), and for queues that overflow"
)
