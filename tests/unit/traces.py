"""A trace of ``report --perfetto`` read back with Perfetto's own messages, and what has to hold for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent


@dataclass(slots=True)
class Span:
    """A slice: ns since the trace's beginning, how deep it lies, and the event that began it."""

    begin: int
    depth: int
    event: Any
    end: int = -1

    @property
    def name(self) -> str:
        return str(self.event.name)

    @property
    def category(self) -> str:
        return str(self.event.categories[0])

    @property
    def values(self) -> dict[str, Any]:
        found = {}
        for note in self.event.debug_annotations:
            which = note.WhichOneof("value")
            found[note.name] = [v.string_value for v in note.array_values] if which is None else getattr(note, which)
        return found


@dataclass(slots=True)
class Line:
    """One track."""

    name: str
    parent: int
    order: int
    unit: str
    spans: list[Span] = field(default_factory=list)
    instants: list[Span] = field(default_factory=list)
    counts: list[tuple[int, float]] = field(default_factory=list)


class ReadTrace:
    """Every track by its number; ``problems`` says what is wrong with the file."""

    def __init__(self, data: bytes) -> None:
        self.lines: dict[int, Line] = {}
        self.realtime_ns = 0
        self.problems: list[str] = []
        trace = Trace.FromString(data)
        if trace.SerializeToString() != data:
            self.problems.append("it does not come out as it went in: fields that Perfetto does not know")
        open_: dict[int, list[Span]] = {}
        newest: dict[int, int] = {}
        for packet in trace.packet:
            if packet.trusted_packet_sequence_id == 0:
                self.problems.append("a packet of no sequence")
            if packet.HasField("track_descriptor"):
                told = packet.track_descriptor
                if told.uuid in self.lines or told.uuid == 0:
                    self.problems.append(f"track {told.uuid} is described twice, or has no number")
                self.lines[told.uuid] = Line(told.name, told.parent_uuid, told.sibling_order_rank, told.counter.unit_name)
            elif packet.HasField("clock_snapshot"):
                self.realtime_ns = next(c.timestamp for c in packet.clock_snapshot.clocks if c.clock_id == 1)
            elif packet.HasField("track_event"):
                self._take(packet.timestamp, packet.track_event, open_, newest)
        self.problems += [f"{self.lines[uuid].name}: never ended: {s[-1].name}" for uuid, s in open_.items() if s]
        for uuid, line in self.lines.items():
            if not line.name:
                self.problems.append(f"track {uuid} has no name")
            if line.parent and line.parent not in self.lines:
                self.problems.append(f"{line.name} lies in a track that is not there")

    def _take(self, time: int, event: Any, open_: dict[int, list[Span]], newest: dict[int, int]) -> None:
        line = self.lines.get(event.track_uuid)
        if line is None:
            self.problems.append(f"an event on track {event.track_uuid}, which was not described before it")
            return
        if event.type == TrackEvent.TYPE_INSTANT:
            line.instants.append(Span(time, 0, event, time))
            return
        if time < newest.get(event.track_uuid, 0):
            self.problems.append(f"{line.name}: {time} comes after a later event")
        newest[event.track_uuid] = time
        stack = open_.setdefault(event.track_uuid, [])
        if event.type == TrackEvent.TYPE_COUNTER:
            line.counts.append((time, event.double_counter_value))
        elif event.type == TrackEvent.TYPE_SLICE_BEGIN:
            if not event.name or not event.categories:
                self.problems.append(f"{line.name}: a slice without name or category")
            stack.append(Span(time, len(stack), event))
            line.spans.append(stack[-1])
        elif not stack:
            self.problems.append(f"{line.name}: something ends at {time} that never began")
        else:
            stack.pop().end = time

    def under(self, name: str) -> Iterator[Line]:
        """The tracks in the one of that name."""
        for uuid, line in self.lines.items():
            if line.name == name:
                yield from (each for each in self.lines.values() if each.parent == uuid)
