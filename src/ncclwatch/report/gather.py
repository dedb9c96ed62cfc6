"""Everything a report tells, taken from a recording (or a live session's batches) in one pass and bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ncclwatch.collect.batch import PlaneState
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict
from ncclwatch.report.history import Incident, incidents
from ncclwatch.view.builder import ViewBuilder
from ncclwatch.view.frame import LogEntry, View
from ncclwatch.view.waits import Pair, WaitMatrix, matrix, pairs

if TYPE_CHECKING:
    from ncclwatch.engine.session import Update
    from ncclwatch.model.paths import Probe
    from ncclwatch.store.replay import Replay

BEFORE_S, AFTER_S = 60.0, 120.0
"""What the timeline shows around the event."""
MAX_POINTS = 600
"""Moments kept for the timeline; longer ones are thinned."""
MAX_LOG = 400


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """States at one moment: ``letters`` (``view.states``) by process, in the order of ``Report.processes``."""

    time: float
    letters: Mapping[ProcessKey, str]
    operations: Mapping[ProcessKey, str]
    """What each process was in the middle of."""


@dataclass(slots=True)
class Report:
    """What a report tells. Times are seconds since the epoch.

    ``focus`` is the verdict the report is about (the one that stands at the end, else the longest before, else none), ``event``
    when it began. ``view`` is what the rank grid and the step progress are of: the last one while the focus stood.
    """

    begin: float
    end: float
    verdicts: Sequence[Verdict]
    incidents: Sequence[Incident]
    focus: Verdict | None
    event: float | None
    view: View
    last: View
    timeline: list[TimelinePoint]
    waits: WaitMatrix
    now_waiting: set[Pair]
    log: list[LogEntry]
    planes: Sequence[PlaneState]
    lost: int
    problems: Sequence[str]
    environment: list[tuple[str, str]] = field(default_factory=list)
    meta: Sequence[Mapping[str, Any]] = ()
    probes: Sequence[Probe] = ()
    """What 'ncclwatch paths probe' told of the ways of flows, where it was asked."""


def choose_focus(found: Sequence[Incident], end: float) -> Incident | None:
    """The incident that stands at the end (the first of them: later ones may follow from it), else the longest."""
    standing = [incident for incident in found if incident.ended is None]
    if standing:
        return min(standing, key=lambda incident: incident.began)
    return max(found, key=lambda incident: (incident.ended or end) - incident.began, default=None)


def gather(replay: Replay) -> Report | None:
    """Play recordings twice: once for what happened when, once for what is shown of it. ``None`` when nothing was sampled."""
    builder = ViewBuilder()
    found = incidents(replay, lambda time_ns, update: _log(builder, replay, update, time_ns))
    recordings = replay.recordings
    begin, end = recordings.begin_ns / 1e9, recordings.end_ns / 1e9
    focus = choose_focus(found, end)
    verdicts, planes, lost = list(replay.verdicts), list(replay.planes), replay.lost
    first, last = window(focus, begin, end)
    collected = _Collected(focus, first, last)
    for time_ns, update in replay.updates():
        view = collected.builder.feed(replay, update, time_ns / 1e9)
        if view is not None:
            collected.add(view)
    if collected.last is None:
        return None
    ranks = [w.rank for w in collected.last.frame.windows if w.rank is not None]
    shown = collected.focused or collected.last
    return Report(
        begin=begin,
        end=end,
        verdicts=verdicts,
        incidents=found,
        focus=focus.verdict if focus else None,
        event=focus.began if focus else None,
        view=shown,
        last=collected.last,
        timeline=collected.timeline,
        waits=matrix(collected.waits, ranks),
        now_waiting=pairs(shown.frame.samples, focus.verdict.victims if focus else ()),
        log=list(builder.log)[-MAX_LOG:],
        planes=planes,
        lost=lost,
        problems=recordings.problems,
        environment=[*([("layout", replay.layout)] if replay.layout else []), *environment(shown.frame.samples)],
        meta=[recording.meta for recording in recordings.files],
    )


def _log(builder: ViewBuilder, replay: Replay, update: Update, time_ns: int) -> None:
    builder.feed(replay, update, time_ns / 1e9)


def window(focus: Incident | None, begin: float, end: float) -> tuple[float, float]:
    """From when to when the timeline goes."""
    if focus is None:
        return max(begin, end - BEFORE_S - AFTER_S), end
    return max(begin, focus.began - BEFORE_S), min(end, (focus.ended or end) + 15.0, focus.began + AFTER_S)


class _Collected:
    """What is kept of the second pass."""

    def __init__(self, focus: Incident | None, first: float, last: float) -> None:
        self.builder = ViewBuilder()
        self.focused: View | None = None
        self.last: View | None = None
        self.timeline: list[TimelinePoint] = []
        self.waits: list[set[Pair]] = []
        self._focus = focus
        self._first, self._last = first, last

    def add(self, view: View) -> None:
        """Take a view."""
        self.last = view
        time = view.frame.time
        focus = self._focus
        stands = focus is not None and any(verdict.id == focus.verdict.id for verdict in view.frame.verdicts)
        if stands:
            self.focused = view
        if not self._first - 0.5 <= time <= self._last + 0.5:
            return
        keys = [window.process.key for window in view.frame.windows]
        operations = {
            key: window.operation.name + ("" if window.operation.sequence is None else f" #{window.operation.sequence}")
            for key, window in zip(keys, view.frame.windows, strict=True)
            if window.operation is not None
        }
        self.timeline.append(TimelinePoint(time, dict(zip(keys, view.letters, strict=True)), operations))
        if focus is None or stands:
            self.waits.append(pairs(view.frame.samples, focus.verdict.victims if focus else ()))
        if len(self.timeline) > 2 * MAX_POINTS:
            self.timeline = self.timeline[::2]
        if len(self.waits) > 2 * MAX_POINTS:
            self.waits = self.waits[::2]


def environment(samples: Mapping[ProcessKey, ProcessSample]) -> list[tuple[str, str]]:
    """What runs where, each fact once with the number of processes it holds for."""
    facts: dict[str, dict[str, int]] = {}

    def count(label: str, value: str) -> None:
        if value:
            values = facts.setdefault(label, {})
            values[value] = values.get(value, 0) + 1

    for sample in samples.values():
        info = sample.process
        count("NCCL", (".".join(map(str, info.version)) if info.version else "?") + f" ({info.version_source})")
        count("library", info.library + (" (linked statically)" if info.statically_linked else ""))
        count("build id", info.key.build_id)
        count("program", " ".join(info.command[:12]) or info.name)
        count("host", info.host)
        count("container", info.container_id[:12])
        for communicator in sample.communicators:
            for transport in {str(entry[3]) for entry in communicator.transports}:
                count("transport", transport)
            count("communicators", f"{communicator.nranks} ranks")
    return [(label, _counted(values)) for label, values in facts.items()]


def _counted(values: Mapping[str, int]) -> str:
    most = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{value} × {number}" if number > 1 else value for value, number in most[:8]]
    return "; ".join(shown) + (f"; … {len(most) - 8} more" if len(most) > 8 else "")
