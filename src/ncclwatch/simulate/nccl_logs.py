"""SIMULATED debug logs of NCCL: what every rank of a simulated job would have logged by some moment (``NCCL_DEBUG=INFO``,
``NCCL_DEBUG_SUBSYS=INIT,COLL``, ``NCCL_DEBUG_FILE``).

Form as in NCCL v2.27.5: creation (``src/init.cc``, ``ncclCommInitRankFunc``), calls (``src/enqueue.cc``, ``ncclEnqueueCheck``),
the beginning of a line (``src/debug.cc``). Shares no code with what reads such logs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ncclwatch.simulate.layout import groups, node_of
from ncclwatch.simulate.observe import HOST_PREFIX, Cast, Membership
from ncclwatch.simulate.timeline import Block, Timeline

_DATATYPES = {1: 0, 2: 6, 4: 7, 8: 8}
"""Element bytes to ``ncclDataType_t``: int8, float16, float32, float64."""


def nccl_logs(timeline: Timeline, at_s: float) -> dict[int, str]:
    """The log of each rank whose node is observed, up to a true time of the simulation (seconds)."""
    cast, calls = Cast(timeline.scenario), defaultdict[int, list[tuple[float, str]]](list)
    for block in timeline.blocks:
        for rank, called in zip(block.ranks.tolist(), block.called.tolist(), strict=True):
            if called <= at_s and cast.observed(rank):
                calls[rank] += ((called, line) for line in _calls(block, cast, rank))
    logs: dict[int, str] = {}
    for rank in filter(cast.observed, range(timeline.scenario.layout.world)):
        made = sorted(calls[rank], key=lambda call: call[0])
        lines = [*_creation(timeline, cast, rank, at_s), *(line for _, line in made)]
        host, device = f"{HOST_PREFIX}{node_of(timeline.scenario.layout, rank)}", rank % timeline.scenario.layout.ranks_per_node
        begin = f"{host}:{10_000 + rank}:{10_000 + rank} [{device}] NCCL INFO "
        logs[rank] = "".join(f"{begin}{line}\n" for line in lines)
    return logs


def _creation(timeline: Timeline, cast: Cast, rank: int, at_s: float) -> Iterator[str]:
    init_s = timeline.scenario.network.init_s
    yield f"NCCL version {'.'.join(map(str, cast.version))}+cuda12.9"
    if rank in timeline.never_initialised or at_s < 0.1 * init_s:
        return
    creating = bool(timeline.never_initialised) or at_s < init_s
    for member in cast.memberships(rank):
        bus_id = 0x1000 * (1 + rank % timeline.scenario.layout.ranks_per_node)
        line = (
            f"ncclCommInitRank comm {_address(cast, member):#x} rank {member.rank} nranks {len(member.members)} cudaDev 0 "
            f"nvmlDev 0 busId {bus_id:x} commId {member.hash:#x} - Init "
        )
        yield line + "START"
        if creating:
            return
        yield line + "COMPLETE"


def _address(cast: Cast, member: Membership) -> int:
    return 0x7F00_0000_0000 + cast.roles.index(member.role) * 0x200_0000


def _calls(block: Block, cast: Cast, rank: int) -> Iterator[str]:
    """One operation as its rank called it: an exchange is several Sends and Recvs."""
    own, member = block.calling(rank), cast.membership(rank, block.role)
    size = groups(cast.scenario.layout, block.role).shape[1]
    count = own.nbytes // own.element_bytes // (1 if own.function in ("AllReduce", "SendRecv") else size)
    asked = [(own.function, 0)]
    if block.transfers:
        asked = [("Send" if transfer.send else "Recv", transfer.peer) for transfer in block.transfers]
    elif own.function == "AlltoAll":
        asked = [(name, peer) for peer in range(size) for name in ("Send", "Recv")]
    for name, root in asked:
        yield (
            f"{name}: opCount {block.sequence:x} sendbuff 0x7f0000000000 recvbuff 0x7f0000100000 count {count} "
            f"datatype {_DATATYPES.get(own.element_bytes, 7)} op 0 root {root} comm {_address(cast, member):#x} "
            f"[nranks={len(member.members)}] stream 0x5000"
        )
