"""What is in an encoded batch: which fields travel as tables, which by their types, and the map that holds them."""

from __future__ import annotations

import typing
from functools import cache
from typing import Any

import msgspec

from ncclwatch.collect.batch import BatchHead, NodeBatch
from ncclwatch.collect.windows import CurrentOperation, LastCall, RankWindow
from ncclwatch.messaging import packing
from ncclwatch.messaging.packing import Layout, Table
from ncclwatch.messaging.records import RecordType
from ncclwatch.model.device import (
    ConnectionCounter,
    DeviceChannel,
    DeviceCommunicator,
    DeviceOperation,
    DeviceSample,
    StepWait,
    UnfinishedTransfer,
)
from ncclwatch.model.events import EVENT_DTYPE
from ncclwatch.model.network import FlowRecord, PathAnswer, QueuePairEnds, RdmaCounts, SocketFacts, StepRate
from ncclwatch.model.state import (
    Communicator,
    HostConnection,
    NetStep,
    PendingOperation,
    ProcessSample,
    ProxyOperation,
    ProxySub,
)
from ncclwatch.model.work import FlowWindow, WorkWindow

_TABLES = frozenset(
    {
        *(Communicator, HostConnection, NetStep, ProxyOperation, ProxySub, PendingOperation, CurrentOperation, LastCall),
        *(FlowWindow, WorkWindow),
        *(DeviceSample, DeviceCommunicator, DeviceChannel, DeviceOperation, UnfinishedTransfer, StepWait, ConnectionCounter),
    }
)

_FLOW_TABLES = frozenset({StepRate, RdmaCounts, SocketFacts, PathAnswer, QueuePairEnds})
WINDOWS = RankWindow.__name__
FLOWS = FlowRecord.__name__
WORK = FlowWindow.__name__


class Body(BatchHead, omit_defaults=True, kw_only=True):
    """What is in a batch, before it is compressed."""

    stream: int
    epoch: int
    first_value: int = 1
    values: list[bytes] = msgspec.field(default_factory=list)
    layouts: dict[str, Layout] = msgspec.field(default_factory=dict)
    """With a key batch."""
    tables: list[Table] = msgspec.field(default_factory=list)
    grouped: bool = False
    """The calls of a process follow one another, in their order; else all are in the order of the ring."""
    since: list[int] = msgspec.field(default_factory=list)
    """For each sample, the sequence number of the batch that holds what it showed."""
    more: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    """Every other field of ``NodeBatch`` that is not at its default, by name."""


HEAD = BatchHead.__struct_fields__
IN_TABLES = frozenset({"samples", "windows", "work", "all_flows", "events"})


@cache
def window_type() -> RecordType:
    """Windows as a table."""
    return RecordType(RankWindow, _TABLES)


@cache
def work_type() -> RecordType:
    """Windows of work requests as a table."""
    return RecordType(FlowWindow, _TABLES)


@cache
def flow_type() -> RecordType:
    """Flows as a table."""
    return RecordType(FlowRecord, _FLOW_TABLES)


@cache
def sample_types() -> tuple[RecordType, RecordType]:
    """What differs between any two looks, and what a process shows: the latter stays the same while nothing happens."""
    whole = RecordType(ProcessSample, _TABLES)
    head = {f.name for f in whole.fields if (f.kind != "value" and f.child is None) or f.name in ("process", "run_state")}
    content = {f.name for f in whole.fields} - head
    return (
        RecordType(ProcessSample, _TABLES, only=head, path="sample"),
        RecordType(ProcessSample, _TABLES, only=content, path="content"),
    )


@cache
def layouts() -> dict[str, Layout]:
    """Of every table, by name."""
    types = [window_type(), work_type(), flow_type(), *sample_types()]
    known = {part.name: part.layout for whole in types for part in whole.every()}
    return {**known, "calls": packing.layout_of(EVENT_DTYPE)}


@cache
def more_fields() -> dict[str, msgspec.msgpack.Decoder[Any]]:
    """Decoders of the fields of ``NodeBatch`` that are written by their type alone: an added plane needs no change here."""
    hints = typing.get_type_hints(NodeBatch)
    rest = [name for name in NodeBatch.__struct_fields__ if name not in HEAD and name not in IN_TABLES]
    return {name: msgspec.msgpack.Decoder(hints[name]) for name in rest}
