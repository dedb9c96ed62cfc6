"""What the names and sizes of Flight Recorder entries mean: which operation, with whom, of how many elements.

A name is the backend and the profiler's title: ``nccl:all_reduce``, ``nccl:send 0->1`` (ranks of the group), ``gloo:barrier``
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and ProcessGroupGloo.cpp). Sizes are compared among ranks, so of each operation
only those are taken that all its ranks must have alike; where there are none (an all-to-all, a gather's output) it counts 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ncclwatch.model.events import Function

MOST_TENSORS, MOST_DIMENSIONS = 4096, 64
"""Bound: tensors of an entry, and dimensions of one."""
LARGEST = 1 << 62
"""Bound: elements."""
DATATYPES = {
    "Char": 0, "Byte": 1, "Bool": 1, "Int": 2, "UInt32": 3, "Long": 4, "UInt64": 5, "Half": 6, "Float": 7, "Double": 8,
    "BFloat16": 9, "Float8_e4m3fn": 10, "Float8_e5m2": 11, "ComplexFloat": 7, "ComplexDouble": 8,
}  # fmt: skip
"""PyTorch's names of types (``c10::toString``) to ``ncclDataType_t`` (ProcessGroupNCCL.cpp, ``ncclDataType``)."""
UNTYPED = -1
"""A type that NCCL does not know, or none."""


class Sizes(NamedTuple):
    """Which sizes all ranks of an operation have alike: keys of an entry, ``tensors`` empty where there are none. ``parts``: it
    is one part a rank, and NCCL counts a part; parts may differ, the whole does not.
    """

    tensors: str
    types: str
    parts: bool = False


INPUT, OUTPUT = Sizes("input_sizes", "input_dtypes"), Sizes("output_sizes", "output_dtypes")
INPUT_PARTS, OUTPUT_PARTS = INPUT._replace(parts=True), OUTPUT._replace(parts=True)
NONE = INPUT._replace(tensors="")
_COLLECTIVES = (
    (r"_?all_?reduce\w*|barrier|sparse_all_reduce", Function.ALL_REDUCE, INPUT),
    (r"_?reduce_?scatter\w*", Function.REDUCE_SCATTER, INPUT_PARTS),
    (r"_?all_?gather\w*", Function.ALL_GATHER, OUTPUT_PARTS),
    (r"_?all_?to_?all\w*", Function.ALL_TO_ALL, NONE),
    (r"_?broadcast\w*", Function.BROADCAST, OUTPUT),
    (r"_?reduce\w*", Function.REDUCE, INPUT),
    (r"_?gather\w*", Function.GATHER, INPUT),
    (r"_?scatter\w*", Function.SCATTER, OUTPUT),
)
_MESSAGE = re.compile(r"(send|recv|recv_?any_?source)\b\s*(?:(\d{1,9})?\s*(->|<-)\s*(\d{1,9}))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Title:
    """What a name says. ``function`` is ``NONE`` for what is not known, and for a group that hides what it holds (``coalesced``);
    ``peer``: rank in the group that a message goes to or comes from, -1 where that is not said.
    """

    backend: str
    function: Function
    sizes: Sizes = NONE
    peer: int = -1
    coalesced: bool = False
    message: bool = False


def title_of(name: str) -> Title:
    """What the name of an entry says."""
    backend, colon, title = name[:200].partition(":")
    if not colon:
        backend, title = "", backend
    title = title.strip()
    message = _MESSAGE.match(title)
    if message is not None:
        sends = message[1].lower() == "send"
        return Title(backend, Function.SEND if sends else Function.RECV, peer=int(message[4]) if message[4] else -1, message=True)
    lowered = title.lower().partition(" ")[0]
    if lowered == "coalesced":
        return Title(backend, Function.NONE, coalesced=True)
    for pattern, function, sizes in _COLLECTIVES:
        if re.fullmatch(pattern, lowered):
            return Title(backend, function, sizes)
    return Title(backend, Function.NONE)


def elements(entry: Mapping[str, Any], sizes: Sizes, nranks: int) -> int:
    """Elements of an operation, as NCCL's callers count them; 0 where ranks may differ or nothing is said.

    Raises ``TypeError`` and ``ValueError`` for what is no list of sizes.
    """
    if not sizes.tensors:
        return 0
    tensors = entry.get(sizes.tensors) or ()
    if len(tensors) > MOST_TENSORS:
        raise ValueError("too many tensors")
    total = 0
    for tensor in tensors:
        if len(tensor) > MOST_DIMENSIONS or (tensor and max(tensor) >= LARGEST):
            raise ValueError("sizes that no tensor has")
        total += math.prod(tensor)
    if type(total) is not int or not 0 <= total < LARGEST:
        raise ValueError("sizes that no tensor has")
    return total // nranks if sizes.parts and nranks > 0 and not total % nranks else total


def datatype(entry: Mapping[str, Any], sizes: Sizes) -> int:
    """``ncclDataType_t`` of the tensors that are compared; -1 where that is not said."""
    names = entry.get(sizes.types) or ()
    return DATATYPES.get(names[0], UNTYPED) if names and isinstance(names[0], str) else UNTYPED
