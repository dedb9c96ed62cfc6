"""Records of the calls plane: the binary layout the BPF programs write.

Generated from bpftrace_probes/events.h by scripts/generate_events.py: change the header, then run the script.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np


class Kind(IntEnum):
    """``enum nw_kind`` of events.h."""

    ENTER = 1
    """A thread called a function of NCCL."""
    LEAVE = 2
    """A thread returned from it."""
    EXEC = 3
    """A process replaced its program."""
    EXIT = 4
    """The main thread of a process exited."""


class Function(IntEnum):
    """``enum nw_function`` of events.h."""

    NONE = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    BCAST = 3
    REDUCE = 4
    ALL_GATHER = 5
    REDUCE_SCATTER = 6
    ALL_TO_ALL = 7
    GATHER = 8
    SCATTER = 9
    SEND = 10
    RECV = 11
    PUT_SIGNAL = 12
    SIGNAL = 13
    WAIT_SIGNAL = 14
    GROUP_START = 20
    GROUP_END = 21
    GROUP_SIMULATE_END = 22
    GET_UNIQUE_ID = 30
    COMM_INIT_RANK = 31
    COMM_INIT_RANK_CONFIG = 32
    COMM_INIT_RANK_SCALABLE = 33
    COMM_INIT_ALL = 34
    COMM_SPLIT = 35
    COMM_SHRINK = 36
    COMM_GROW = 37
    COMM_GET_UNIQUE_ID = 38
    COMM_FINALIZE = 40
    COMM_DESTROY = 41
    COMM_ABORT = 42
    COMM_REVOKE = 43
    COMM_SUSPEND = 44
    COMM_RESUME = 45
    COMM_REGISTER = 50
    COMM_DEREGISTER = 51
    WINDOW_REGISTER = 52
    WINDOW_DEREGISTER = 53
    DEV_COMM_CREATE = 54
    DEV_COMM_DESTROY = 55
    GRAPH_LAUNCH = 56
    """Sendbuff: the executable graph."""
    STREAM_BEGIN_CAPTURE = 57
    STREAM_END_CAPTURE = 58
    """LEAVE, comm: the graph."""
    GRAPH_INSTANTIATE = 59
    """Sendbuff: the graph; LEAVE, comm: the executable graph."""
    GRAPH_EXEC_UPDATE = 60
    """Sendbuff: the executable graph, recvbuff: the graph."""


class Flag(IntFlag):
    """``enum nw_flag`` of events.h."""

    COMM_READ = 1
    """Comm_hash, rank, nranks and op_count were read from the communicator."""
    UNKNOWN_PROCESS = 2
    """The process is not on the list of watched ones (yet)"""
    NO_ENTER = 4
    """A leave whose enter was not seen: it began before the probes."""
    NO_ARGUMENTS = 8
    """Arguments that NCCL's ABI passes on the stack could not be read."""
    REPLAYED = 16
    """No call: what a graph that was launched then had captured (set by the agent)"""
    UNKNOWN_GRAPH = 32
    """GRAPH_LAUNCH: what the graph has captured was not seen (set by the agent)"""


EVENT_DTYPE = np.dtype(
    {
        "names": [
            "time_ns",  # CLOCK_MONOTONIC of the kernel (bpf_ktime_get_ns)
            "enter_time_ns",  # LEAVE: when the call was entered, 0 when that was not seen
            "pid",  # process, in the numbers /proc shows to the agent; of an unknown process in those of pid_namespace
            "tid",  # thread, in the numbers of pid_namespace
            "function",  # enum nw_function; 0 for EXEC and EXIT
            "kind",  # enum nw_kind
            "pid_namespace",  # index into the tracer's list of pid namespaces; 0 is the one /proc shows to the agent
            "flags",  # enum nw_flag
            "binary",  # the tracer's number of the file that carries NCCL
            "comm",  # ncclComm_t; for functions that make one, known from LEAVE on
            "comm_hash",  # ncclComm.commHash
            "op_count",  # ncclComm.opCount at the time of the record
            "unique_id",  # first 8 bytes of the ncclUniqueId (the random magic of ncclBootstrapHandle)
            "count",  # elements as given to the call; bytes of registrations
            "sendbuff",
            "recvbuff",
            "stream",  # cudaStream_t
            "caller",  # return address of the call
            "rank",  # rank in the communicator, or the rank argument of a function that makes one
            "nranks",  # likewise
            "datatype",  # ncclDataType_t
            "redop",  # ncclRedOp_t
            "peer",  # root of a rooted collective, peer of a point-to-point call
            "color",  # colour of CommSplit
            "result",  # LEAVE: ncclResult_t
            "cpu",
        ],
        "formats": [
            "<u8",
            "<u8",
            "<u4",
            "<u4",
            "<u2",
            "u1",
            "u1",
            "<u2",
            "<u2",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<i4",
            "<i4",
            "<i4",
            "<i4",
            "<i4",
            "<i4",
            "<i4",
            "<u4",
        ],
        "offsets": [0, 8, 16, 20, 24, 26, 27, 28, 30, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 108, 112, 116, 120, 124, 128, 132],
        "itemsize": 136,
    }
)
"""``struct nw_event``, 136 bytes."""
