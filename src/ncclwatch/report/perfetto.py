"""A recording as a trace that ui.perfetto.dev opens: Perfetto's protobuf, track events on tracks of our own.

Tracks are verdicts, hosts with their ranks (what each was seen to do, by its state, with the operation inside it, and a counter
of bytes a second), and communicators with the operations open in them. Culprits are flagged in their names, by the category
``culprit`` and by an instant where the verdict begins. Samples are a second apart: an edge lies between the two around it.

Source: protos/perfetto/trace/track_event (Perfetto v59).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BuiltinClock,
    Trace,
    TrackDescriptor,
    TrackEvent,
)

from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.verdict import places, stands_in
from ncclwatch.report.history import Incident
from ncclwatch.text import clean
from ncclwatch.view.frame import View, operation_title
from ncclwatch.view.states import BY_LETTER, CULPRIT

SEQUENCE = 1
"""All packets are of one sequence: one writer, in the order of time on every track."""

VERDICTS, COMMUNICATORS, HOSTS = "Verdicts", "Communicators", "Hosts"
MAX_INT = (1 << 63) - 1
LAST = 1 << 30
"""Order of a rank without a number among those of its host."""

Values = Mapping[str, "str | int | float | Sequence[str]"]


@dataclass(frozen=True, slots=True)
class Slice:
    """What a track is in: a name, a category, and values to look at. Slices of equal name follow each other as one."""

    name: str
    category: str
    values: Values = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class Track:
    """A line of the trace: its number, its name, and the slices open on it, outermost first."""

    uuid: int
    name: str
    parent: int = 0
    order: int = 0
    unit: str = ""
    open: list[Slice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank: host, pid and number, its track, and its counter of bytes a second."""

    place: tuple[str, int, int | None]
    track: Track
    rate: Track


class TraceBuilder:
    """Takes views in the order of time; ``finish`` makes the trace. Times are seconds since the epoch."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._time = begin
        self._tracks: list[Track] = []
        self._events: list[bytes] = []
        """Packets of events: names of tracks are only known at the end, and come first."""
        self._verdicts, self._hosts, self._groups = (self._track(name) for name in (VERDICTS, HOSTS, COMMUNICATORS))
        self._by_host: dict[str, Track] = {}
        self._ranks: dict[ProcessKey, _Rank] = {}
        self._by_group: dict[int, Track] = {}

    # --- samples -------------------------------------------------------------------------------------------------------

    def add(self, view: View) -> None:
        """Take a view."""
        time = self._time = view.frame.time
        groups: dict[int, set[str]] = {}
        for window, letter in zip(view.frame.windows, view.letters, strict=True):
            rank = self._rank(view, window.process.key)
            operation = window.operation
            state = BY_LETTER[letter]
            stack = [Slice(state.word, "culprit" if state is CULPRIT else "state")]
            if operation is not None:
                title = operation_title(operation)
                values: Values = {"communicator": f"{operation.comm_hash:016x}", "steps": operation.steps_total or 0}
                stack.append(Slice(title, "operation", values))
                groups.setdefault(operation.comm_hash, set()).add(title)
            self._move(rank.track, stack, time)
            if window.bytes_per_s is not None:
                self._event(rank.rate, TrackEvent.TYPE_COUNTER, time, double_counter_value=float(window.bytes_per_s))
        for comm_hash in set(groups) | set(self._by_group):
            names = sorted(groups.get(comm_hash, ()))
            stack = [Slice(", ".join(names[:4]), "operation")] if names else []
            self._move(self._group(comm_hash), stack, time)

    def finish(self, incidents: list[Incident], end: float) -> bytes:
        """Close what is open, tell the verdicts; returns the whole trace."""
        end = max(end, self._time)
        for track in self._tracks:
            self._move(track, [], end)
        for incident in incidents:
            self._tell(incident, end)
        accused = places(c for incident in incidents for c in incident.verdict.culprits)
        for rank in self._ranks.values():
            if stands_in(accused, *rank.place):
                rank.track.name += " ◀ culprit"
        # Serialised traces one behind the other are one trace: repeated fields of protobuf add up.
        return b"".join([self._clocks(), *map(self._descriptor, self._tracks), *self._events])

    def _tell(self, incident: Incident, end: float) -> None:
        verdict = incident.verdict
        begin, over = max(incident.began, self._begin), end if incident.ended is None else incident.ended
        values: Values = {
            "id": verdict.id,
            "confidence": round(verdict.confidence, 3),
            "evidence": [clean(line, 400) for line in verdict.evidence],
        }
        # One track each: verdicts on several jobs overlap without nesting.
        track = self._track(verdict.verdict_class.value, self._verdicts)
        self._move(track, [Slice(f"{verdict.verdict_class.value.upper()}: {verdict.summary}", "verdict", values)], begin)
        self._move(track, [], max(over, begin))
        accused = places(verdict.culprits)
        for rank in self._ranks.values():
            if stands_in(accused, *rank.place):
                flag = Slice("culprit from here on", "culprit", {"verdict": verdict.id})
                self._event(rank.track, TrackEvent.TYPE_INSTANT, begin, flag)

    # --- tracks --------------------------------------------------------------------------------------------------------

    def _track(self, name: str, parent: Track | None = None, order: int = 0, unit: str = "") -> Track:
        track = Track(len(self._tracks) + 1, name, parent.uuid if parent else 0, order, unit)
        self._tracks.append(track)
        return track

    def _rank(self, view: View, key: ProcessKey) -> _Rank:
        found = self._ranks.get(key)
        if found is None:
            window = view.frame.windows[view.place_of[key]]
            host = window.process.host
            above = self._by_host.get(host) or self._by_host.setdefault(host, self._track(host, self._hosts))
            name = f"pid {key.pid}" if window.rank is None else f"rank {window.rank}"
            track = self._track(name, above, LAST if window.rank is None else window.rank)
            rate = self._track(f"bytes/s of {name}", track, unit="bytes/s")
            found = self._ranks[key] = _Rank((host, key.pid, window.rank), track, rate)
        return found

    def _group(self, comm_hash: int) -> Track:
        found = self._by_group.get(comm_hash)
        if found is None:
            found = self._by_group[comm_hash] = self._track(f"{comm_hash:016x}", self._groups)
        return found

    # --- packets -------------------------------------------------------------------------------------------------------

    def _move(self, track: Track, stack: Sequence[Slice], time: float) -> None:
        """From now on a track is in these slices, outermost first: what differs ends from the inside out, then begins."""
        same = 0
        while same < min(len(stack), len(track.open)) and stack[same] == track.open[same]:
            same += 1
        for _ in range(len(track.open) - same):
            self._event(track, TrackEvent.TYPE_SLICE_END, time)
        for started in stack[same:]:
            self._event(track, TrackEvent.TYPE_SLICE_BEGIN, time, started)
        track.open[same:] = stack[same:]

    def _event(self, track: Track, kind: int, time: float, told: Slice | None = None, **more: Any) -> None:
        trace = Trace()
        packet = trace.packet.add(timestamp=self._ns(time), trusted_packet_sequence_id=SEQUENCE)
        event = packet.track_event
        event.MergeFrom(TrackEvent(type=kind, track_uuid=track.uuid, **more))
        if told is not None:
            event.name = clean(told.name, 200)
            event.categories.append(told.category)
            for name, value in told.values.items():
                note = event.debug_annotations.add(name=name)
                if isinstance(value, str):
                    note.string_value = value
                elif isinstance(value, int):
                    note.int_value = max(min(value, MAX_INT), -MAX_INT)
                elif isinstance(value, float):
                    note.double_value = value
                else:
                    for text in value:
                        note.array_values.add(string_value=text)
        self._events.append(_bytes(trace))

    def _descriptor(self, track: Track) -> bytes:
        trace = Trace()
        descriptor = trace.packet.add(trusted_packet_sequence_id=SEQUENCE).track_descriptor
        descriptor.uuid, descriptor.name = track.uuid, clean(track.name, 120)
        descriptor.sibling_order_rank = track.order
        descriptor.child_ordering = TrackDescriptor.EXPLICIT
        if track.parent:
            descriptor.parent_uuid = track.parent
        if track.unit:
            descriptor.counter.unit_name = track.unit
        return _bytes(trace)

    def _clocks(self) -> bytes:
        """The trace's clock begins with the recording; what time it was then, the viewer can show."""
        trace = Trace()
        clocks = trace.packet.add(trusted_packet_sequence_id=SEQUENCE).clock_snapshot.clocks
        clocks.add(clock_id=BuiltinClock.BUILTIN_CLOCK_BOOTTIME, timestamp=0)
        clocks.add(clock_id=BuiltinClock.BUILTIN_CLOCK_REALTIME, timestamp=max(round(self._begin * 1e9), 0))
        return _bytes(trace)

    def _ns(self, time: float) -> int:
        """Nanoseconds since the beginning of the recording."""
        return max(round((time - self._begin) * 1e9), 0)


def _bytes(trace: Trace) -> bytes:
    data: bytes = trace.SerializeToString()
    return data
