"""What NCCL's exported functions mean for the aggregator: operations with their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model import events


class Bytes(Enum):
    """How the ``count`` of a call relates to the data the operation is about.

    The algorithm bandwidth of nccl-tests (``doc/PERFORMANCE.md``) takes the size of the whole buffer: count × element size, and
    times the number of ranks where ``count`` is one rank's share.
    """

    NONE = 0
    COUNT = 1
    COUNT_TIMES_RANKS = 2


@dataclass(frozen=True, slots=True)
class Function:
    """One exported function: its name for people, and what it is."""

    name: str
    operation: bool = False
    data: Bytes = Bytes.NONE


FUNCTIONS: dict[int, Function] = {
    events.Function.ALL_REDUCE: Function("AllReduce", True, Bytes.COUNT),
    events.Function.BROADCAST: Function("Broadcast", True, Bytes.COUNT),
    events.Function.BCAST: Function("Broadcast", True, Bytes.COUNT),
    events.Function.REDUCE: Function("Reduce", True, Bytes.COUNT),
    events.Function.ALL_GATHER: Function("AllGather", True, Bytes.COUNT_TIMES_RANKS),
    events.Function.REDUCE_SCATTER: Function("ReduceScatter", True, Bytes.COUNT_TIMES_RANKS),
    events.Function.ALL_TO_ALL: Function("AlltoAll", True, Bytes.COUNT_TIMES_RANKS),
    events.Function.GATHER: Function("Gather", True, Bytes.COUNT_TIMES_RANKS),
    events.Function.SCATTER: Function("Scatter", True, Bytes.COUNT_TIMES_RANKS),
    events.Function.SEND: Function("Send", True, Bytes.COUNT),
    events.Function.RECV: Function("Recv", True, Bytes.COUNT),
    events.Function.PUT_SIGNAL: Function("PutSignal", True, Bytes.COUNT),
    events.Function.SIGNAL: Function("Signal", True),
    events.Function.WAIT_SIGNAL: Function("WaitSignal", True),
    events.Function.GROUP_START: Function("GroupStart"),
    events.Function.GROUP_END: Function("GroupEnd"),
    events.Function.GROUP_SIMULATE_END: Function("GroupSimulateEnd"),
    events.Function.GET_UNIQUE_ID: Function("GetUniqueId"),
    events.Function.COMM_INIT_RANK: Function("CommInitRank"),
    events.Function.COMM_INIT_RANK_CONFIG: Function("CommInitRankConfig"),
    events.Function.COMM_INIT_RANK_SCALABLE: Function("CommInitRankScalable"),
    events.Function.COMM_INIT_ALL: Function("CommInitAll"),
    events.Function.COMM_SPLIT: Function("CommSplit"),
    events.Function.COMM_SHRINK: Function("CommShrink"),
    events.Function.COMM_GROW: Function("CommGrow"),
    events.Function.COMM_GET_UNIQUE_ID: Function("CommGetUniqueId"),
    events.Function.COMM_FINALIZE: Function("CommFinalize"),
    events.Function.COMM_DESTROY: Function("CommDestroy"),
    events.Function.COMM_ABORT: Function("CommAbort"),
    events.Function.COMM_REVOKE: Function("CommRevoke"),
    events.Function.COMM_SUSPEND: Function("CommSuspend"),
    events.Function.COMM_RESUME: Function("CommResume"),
    events.Function.COMM_REGISTER: Function("CommRegister"),
    events.Function.COMM_DEREGISTER: Function("CommDeregister"),
    events.Function.WINDOW_REGISTER: Function("CommWindowRegister"),
    events.Function.WINDOW_DEREGISTER: Function("CommWindowDeregister"),
    events.Function.DEV_COMM_CREATE: Function("DevCommCreate"),
    events.Function.DEV_COMM_DESTROY: Function("DevCommDestroy"),
    events.Function.GRAPH_LAUNCH: Function("GraphLaunch"),
    events.Function.STREAM_BEGIN_CAPTURE: Function("StreamBeginCapture"),
    events.Function.STREAM_END_CAPTURE: Function("StreamEndCapture"),
    events.Function.GRAPH_INSTANTIATE: Function("GraphInstantiate"),
    events.Function.GRAPH_EXEC_UPDATE: Function("GraphExecUpdate"),
}

TYPES = (
    ("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8),
    ("float16", 2), ("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8e4m3", 1), ("float8e5m2", 1),
)  # fmt: skip
"""Names and sizes in bytes by ``ncclDataType_t`` (``nccl.h``)."""


def function(number: int) -> Function:
    """The function of a record; one that a newer tracer knows and we do not keeps its number as name."""
    return FUNCTIONS.get(number) or Function(f"function {number}")


def type_name(datatype: int) -> str:
    """``float32``; one that a newer NCCL knows and we do not keeps its number as name. Below 0: nobody said."""
    if datatype < 0:
        return "unknown type"
    return TYPES[datatype][0] if datatype < len(TYPES) else f"type {datatype}"


@lru_cache(maxsize=4096)
def algorithm_bytes(number: int, count: int, datatype: int, nranks: int) -> int | None:
    """Bytes the operation is about, as nccl-tests counts them; ``None`` where type or number of ranks is not known."""
    meaning = function(number).data
    if meaning is Bytes.NONE:
        return 0
    if not 0 <= datatype < len(TYPES):
        return None
    total = count * TYPES[datatype][1]
    if meaning is Bytes.COUNT:
        return total
    return total * nranks if nranks > 0 else None


_MEANINGS = np.zeros(1 << 16, np.uint8)
"""By the number of a function, which has 16 bits."""
_MEANINGS[list(FUNCTIONS)] = [known.data.value for known in FUNCTIONS.values()]
_SIZES = np.array([*(size for _, size in TYPES), 0], np.float64)
"""By the type; one that is not known has none."""


def algorithm_sizes(
    numbers: NDArray[Any], counts: NDArray[Any], datatypes: NDArray[Any], nranks: NDArray[Any], most: int
) -> tuple[NDArray[np.int64], int]:
    """:func:`algorithm_bytes` of many calls at once: at most ``most`` bytes each (below 2^53), 0 where that is not known, and of
    how many it is not.
    """
    meaning = _MEANINGS[numbers]
    size = _SIZES[np.where((datatypes >= 0) & (datatypes < len(TYPES)), datatypes, len(TYPES))]
    ranks = np.where(meaning == Bytes.COUNT_TIMES_RANKS.value, nranks, 1)
    unknown = (meaning != Bytes.NONE.value) & ((size == 0) | (ranks <= 0))
    # What a call states is the caller's, and may be more than 64 bits hold.
    nbytes = np.minimum(counts.astype(np.float64) * size * ranks, float(most))
    nbytes[unknown | (meaning == Bytes.NONE.value)] = 0.0
    return nbytes.astype(np.int64), int(np.count_nonzero(unknown))
