"""NCCL's exported functions that are probed, and CUDA's that capture and replay: their arguments, and which of them can block.

Signatures: ``nccl.h`` of NCCL 2.18.3 to 2.32.3. A function that a build does not export is simply not probed. Left out on purpose
are queries (``ncclCommCount``), allocation (``ncclMemAlloc``) and reduction operators: they neither move data nor involve a peer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ncclwatch.model.events import Function
from ncclwatch.probes.map_layouts import FUNCTION_SPEC_DTYPE
from ncclwatch.target.machine import Machine, this_machine

_COLLECTIVES = ["AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter"]

_SIGNATURES: tuple[tuple[Function, str, str], ...] = (
    (Function.ALL_REDUCE, "AllReduce", "sendbuff recvbuff count datatype redop comm stream"),
    (Function.BROADCAST, "Broadcast", "sendbuff recvbuff count datatype peer comm stream"),
    (Function.BCAST, "Bcast", "recvbuff count datatype peer comm stream"),
    (Function.REDUCE, "Reduce", "sendbuff recvbuff count datatype redop peer comm stream"),
    (Function.ALL_GATHER, "AllGather", "sendbuff recvbuff count datatype comm stream"),
    (Function.REDUCE_SCATTER, "ReduceScatter", "sendbuff recvbuff count datatype redop comm stream"),
    (Function.ALL_TO_ALL, "AlltoAll", "sendbuff recvbuff count datatype comm stream"),
    (Function.GATHER, "Gather", "sendbuff recvbuff count datatype peer comm stream"),
    (Function.SCATTER, "Scatter", "sendbuff recvbuff count datatype peer comm stream"),
    (Function.SEND, "Send", "sendbuff count datatype peer comm stream"),
    (Function.RECV, "Recv", "recvbuff count datatype peer comm stream"),
    (Function.PUT_SIGNAL, "PutSignal", "sendbuff count datatype peer - - - - - comm stream"),
    (Function.SIGNAL, "Signal", "peer - - - comm stream"),
    (Function.WAIT_SIGNAL, "WaitSignal", "- - comm stream"),
    (Function.GROUP_START, "GroupStart", ""),
    (Function.GROUP_END, "GroupEnd", ""),
    (Function.GROUP_SIMULATE_END, "GroupSimulateEnd", ""),
    (Function.GET_UNIQUE_ID, "GetUniqueId", "id_out"),
    (Function.COMM_INIT_RANK, "CommInitRank", "comm_out nranks =id_value rank"),
    (Function.COMM_INIT_RANK_CONFIG, "CommInitRankConfig", "comm_out nranks =id_value rank -"),
    (Function.COMM_INIT_RANK_SCALABLE, "CommInitRankScalable", "comm_out nranks rank - id_pointer -"),
    (Function.COMM_INIT_ALL, "CommInitAll", "comm_out nranks -"),
    (Function.COMM_SPLIT, "CommSplit", "comm color - comm_out -"),
    (Function.COMM_SHRINK, "CommShrink", "comm - - comm_out - -"),
    (Function.COMM_GROW, "CommGrow", "comm nranks id_pointer rank comm_out -"),
    (Function.COMM_GET_UNIQUE_ID, "CommGetUniqueId", "comm id_out"),
    (Function.COMM_FINALIZE, "CommFinalize", "comm"),
    (Function.COMM_DESTROY, "CommDestroy", "comm"),
    (Function.COMM_ABORT, "CommAbort", "comm"),
    (Function.COMM_REVOKE, "CommRevoke", "comm -"),
    (Function.COMM_SUSPEND, "CommSuspend", "comm -"),
    (Function.COMM_RESUME, "CommResume", "comm"),
    (Function.COMM_REGISTER, "CommRegister", "comm sendbuff count -"),
    (Function.COMM_DEREGISTER, "CommDeregister", "comm -"),
    (Function.WINDOW_REGISTER, "CommWindowRegister", "comm sendbuff count - -"),
    (Function.WINDOW_DEREGISTER, "CommWindowDeregister", "comm -"),
    (Function.DEV_COMM_CREATE, "DevCommCreate", "comm - -"),
    (Function.DEV_COMM_DESTROY, "DevCommDestroy", "comm -"),
)
"""(function, name without ``nccl``, its arguments in order): ``-`` is one we do not read, ``=`` one that is passed in memory
because it is a structure (it takes no register)."""

_GRAPH_SIGNATURES: tuple[tuple[Function, str, str], ...] = (
    (Function.GRAPH_LAUNCH, "GraphLaunch", "sendbuff stream"),
    (Function.STREAM_BEGIN_CAPTURE, "StreamBeginCapture StreamBeginCapture_v2 StreamBeginCaptureToGraph", "stream"),
    (Function.STREAM_END_CAPTURE, "StreamEndCapture", "stream comm_out"),
    (
        Function.GRAPH_INSTANTIATE,
        "GraphInstantiate GraphInstantiate_v2 GraphInstantiateWithFlags GraphInstantiateWithParams",
        "comm_out sendbuff",
    ),
    (Function.GRAPH_EXEC_UPDATE, "GraphExecUpdate GraphExecUpdate_v2", "sendbuff recvbuff"),
)
"""The same of CUDA's functions, without ``cuda`` (runtime API) or ``cu`` (driver API), with all that take these arguments first.
What they make stands where others have the communicator.
"""

GRAPHS = frozenset(function for function, *_ in _GRAPH_SIGNATURES)
"""Functions of CUDA."""

_FREES = frozenset({Function.COMM_DESTROY, Function.COMM_ABORT})

MAKES_COMMUNICATORS = (
    Function.COMM_INIT_RANK,
    Function.COMM_INIT_RANK_CONFIG,
    Function.COMM_INIT_RANK_SCALABLE,
    Function.COMM_INIT_ALL,
    Function.COMM_SPLIT,
    Function.COMM_SHRINK,
    Function.COMM_GROW,
)

BLOCKING = frozenset(
    {
        Function.GROUP_END,
        Function.GET_UNIQUE_ID,
        *MAKES_COMMUNICATORS,
        Function.COMM_GET_UNIQUE_ID,
        Function.COMM_FINALIZE,
        Function.COMM_DESTROY,
        Function.COMM_ABORT,
        Function.COMM_REVOKE,
        Function.COMM_SUSPEND,
        Function.COMM_RESUME,
        Function.WINDOW_REGISTER,
        Function.WINDOW_DEREGISTER,
        Function.DEV_COMM_CREATE,
        Function.DEV_COMM_DESTROY,
    }
)
"""Functions that wait for other ranks by design, or (``ncclGetUniqueId``) whose result is only known on return.

Collectives and Send/Recv also block while NCCL connects on first use (2.22 and later); their leave costs a single-stepped
trap at every call, so it is probed only on demand.
"""


@dataclass(frozen=True)
class FunctionSpec:
    """One function of NCCL: the symbols it is exported under and where its arguments are."""

    function: Function
    symbols: tuple[str, ...]
    arguments: str

    @property
    def name(self) -> str:
        """The name in NCCL's API (``ncclAllReduce``)."""
        return self.symbols[0]

    @property
    def can_block(self) -> bool:
        """Whether the function waits for other ranks by design."""
        return self.function in BLOCKING

    @property
    def tells_on_return(self) -> bool:
        """Whether its return is worth a trap: it can block, or makes something that is known only then."""
        return self.can_block or "comm_out" in self.places()

    def places(self, machine: Machine | None = None) -> dict[str, int]:
        """Place of each argument as ``nw_function_spec`` counts: integer registers in order, then words on the stack.

        A large structure lies on the stack with x86-64, in no place of its own; with aarch64 (AAPCS64, 6.8.2) the caller makes a
        copy and passes its address.
        """
        places = {}
        place = 0
        by_address = (machine or this_machine()) is Machine.AARCH64
        for argument in self.arguments.split():
            if argument.startswith("=") and by_address:
                place += 1
                places[argument[1:].replace("_value", "_pointer")] = place
                continue
            if argument.startswith("="):
                places[argument[1:]] = 1
                continue
            place += 1
            if argument != "-":
                places[argument] = place
        return places

    def pack(self, *, enter: bool, leave: bool, leave_seen: bool) -> bytes:
        """``struct nw_function_spec`` with its gates."""
        row = np.zeros((), FUNCTION_SPEC_DTYPE)
        for name, place in self.places().items():
            row[name] = place
        row["enter_on"], row["leave_on"], row["leave_seen"] = enter, leave, leave_seen
        row["comm_freed"] = self.function in _FREES
        return row.tobytes()


def _symbols(name: str) -> tuple[str, ...]:
    """``ncclX`` is a weak alias of ``pncclX``; the Config variants (2.31) have the same arguments and one more."""
    plain = (f"nccl{name}", f"pnccl{name}")
    return (*plain, f"nccl{name}Config", f"pnccl{name}Config") if name in _COLLECTIVES else plain


def _graph_symbols(names: str) -> tuple[str, ...]:
    """Of the runtime and the driver API; ``_ptsz`` variants are for programs compiled with a default stream for each thread."""
    return tuple(f"{api}{name}{variant}" for name in names.split() for api in ("cuda", "cu") for variant in ("", "_ptsz"))


FUNCTIONS: dict[Function, FunctionSpec] = {
    **{function: FunctionSpec(function, _symbols(name), arguments) for function, name, arguments in _SIGNATURES},
    **{function: FunctionSpec(function, _graph_symbols(names), arguments) for function, names, arguments in _GRAPH_SIGNATURES},
}
"""Every function that is probed."""


def function_name(number: int) -> str:
    """``ncclAllReduce`` for a function number of a record; the number itself when it is unknown."""
    try:
        return FUNCTIONS[Function(number)].name
    except (ValueError, KeyError):
        return f"function {number}"
