"""Lines of PyTorch's watchdog, as several releases write them (made up by ProcessGroupNCCL.cpp, TraceUtils.h and
ProcessGroupWrapper.cpp).
"""

from __future__ import annotations

OLDER = (
    "[rank3]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 3] Exception (either an error or timeout) detected by "
    "watchdog at work: 1580, last enqueued NCCL work: 1582, last completed NCCL work: 1579."
)
OLDEST = (
    "[E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=64088, "
    "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25625251 milliseconds before timing out."
)
REPORT = (
    "[rank0]:[E603 17:48:01.005 ProcessGroupNCCL.cpp:1234] [PG ID 0 PG GUID 0(default_pg) Rank 0]",
    "\t - [0] Timeout at collective: ALLREDUCE, #39",
    "\t - [1] Timeout at collective: ALLREDUCE, #39",
    "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
    "\t     [2] finished collective #38, but didn't join collective #39 (count from 1)",
    "\t - Snapshot of ranks' latest states:",
)
NEVER_JOINED = (
    "\t - To our best knowledge, ranks [3, 4] are the lagging ranks that caused this timeout. They never joined any collectives"
)
STUCK = (
    "[rank6]:[E429 13:55:49.3 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 6] ProcessGroupNCCL's watchdog got "
    "stuck for 480 seconds without making progress in monitoring enqueued collectives."
)


def prefix(rank: int, place: int | None = None, group: str = "ID 0 PG GUID 0(default_pg)") -> str:
    """What stands before a line; ``place``: the rank in its group."""
    return f"[rank{rank}]:[E603 17:48:01.005 ProcessGroupNCCL.cpp:2268] [PG {group} Rank {rank if place is None else place}]"


def timed_out(rank: int, number: int, kind: str = "ALLREDUCE", elements: int = 8) -> str:
    """A rank has waited for too long in an operation."""
    return (
        f"[rank{rank}]:[E603 17:48:01.005 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn={elements}, NumelOut=8, Timeout(ms)=600000) ran for 600068 "
        "milliseconds before timing out."
    )


def status(
    rank: int, number: int, called: int, *, place: int | None = None, group: str = "ID 0 PG GUID 0(default_pg)", started: str = ""
) -> str:
    """How far the group of that operation has come; ``started``: as releases from 2.13 on say what has begun."""
    return (
        f"{prefix(rank, place, group)}  failure detected by watchdog at work sequence id: {number} PG status: last enqueued "
        f"work: {called}, {started}last completed work: {number - 1}"
    )


def answer(rank: int, called: int, ended: int | None = None, group: str = "ID 0 PG GUID 0(default_pg)") -> str:
    """What a rank says that was asked for its dump."""
    come = f"Last enqueued NCCL work: {called}, last completed NCCL work: {called if ended is None else ended}."
    return (
        f"{prefix(rank, group=group)} Received a dump signal due to a collective timeout from  rank 7 and we will try our best "
        f"to dump the debug info. {come}"
        "This is most likely caused by incorrect usages of collectives, e.g., wrong sizes used across ranks"
    )


def differ(rank: int, called: tuple[str, int], other: int, others: tuple[str, int], number: int = 19) -> str:
    """What ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` finds: a rank and what it called, another and what that called."""
    texts = (
        f"CollectiveFingerPrint(SequenceNumber={number}, OpType={kind}, TensorShape=[{size}], TensorDtypes=Float)"
        for kind, size in (called, others)
    )
    return (
        f"[rank{rank}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running collective: "
        f"{next(texts)}, but Rank {other} is running collective: {next(texts)}.Collectives differ in the following aspects: "
    )
