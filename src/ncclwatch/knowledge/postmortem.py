"""A verdict on a job that came down, and what a verdict that stands gains from knowing what failed first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ncclwatch.knowledge.failures import Event, Incident, Known
from ncclwatch.model.cause import Cause
from ncclwatch.model.next_steps import STEPS
from ncclwatch.model.verdict import CommunicatorRef, Culprit, Verdict, VerdictClass
from ncclwatch.text import ranks as rank_words
from ncclwatch.text import time_text

HANGS = frozenset(
    {
        *(VerdictClass.STOPPED, VerdictClass.NOT_ENTERED, VerdictClass.INCONSISTENT, VerdictClass.HARDWARE),
        *(VerdictClass.DEADLOCK, VerdictClass.INIT_HANG),
    }
)
"""Who hangs is aborted in the end: what held the job up before explains the failures that follow."""
OF_ENDS = frozenset({VerdictClass.DEAD, VerdictClass.ERROR})
SURE, UNSURE = 0.9, 0.6
"""Confidence where one process was first, whatever the clocks are off by, and where several may have been."""
MOST_NAMED = 4
"""Of more that may have been first nobody is named."""


def after(incident: Incident, standing: Verdict | None, before: Verdict | None, time: float) -> Verdict | None:
    """What to say of a job in which something has failed; ``None``: nothing that accuses or explains.

    ``standing``: what the engine says of what is left of it, or what was said last; ``before``: the hang that stood before
    anything failed.
    """
    failures = incident.failures()
    named = {(event.host, event.pid) for event in incident.first}
    if before is not None and not any((one.host, one.pid) in named for one in before.culprits):
        return replace(before, failures=failures, time=time)
    whole = incident.over and not incident.outside and len(incident.first) <= MOST_NAMED
    if standing is not None and standing.verdict_class in OF_ENDS:
        kept = tuple(one for one in standing.culprits if (one.host, one.pid) in named)
        if kept and standing.verdict_class is VerdictClass.DEAD:
            return _narrowed(incident, standing, kept, time)
        if not whole:
            return replace(standing, failures=failures)
    elif standing is not None and standing.verdict_class.accuses:
        return replace(standing, failures=failures)
    if not incident.over:
        return replace(standing, failures=failures) if standing is not None else None
    if not whole:
        why = incident.outside or "clocks do not tell which of its processes failed first"
        summary = f"the job has ended: {why}"
        return Verdict(VerdictClass.UNKNOWN, summary, time=time, failures=failures, unobserved=_unobserved(incident))
    return _dead(incident, time)


def _narrowed(incident: Incident, standing: Verdict, kept: tuple[Culprit, ...], time: float) -> Verdict:
    """What the engine says of processes that have ended, of the first of them alone."""
    others = {one.rank for one in standing.culprits if one not in kept and one.rank is not None}
    told = replace(
        standing, culprits=kept, victims=tuple(sorted({*standing.victims, *others})), failures=incident.failures(), time=time
    )
    if incident.over or others or standing.failures:
        return replace(told, summary=_summary(incident))
    return replace(told, summary=f"{standing.summary} ({_words(incident.first)})")


def _dead(incident: Incident, time: float) -> Verdict:
    known = {one.life: one for one in incident.processes}
    culprits = [_culprit(known[event.life]) for event in incident.first if event.life is not None]
    first, others = culprits[0], {event.life for event in incident.first}
    victims = {one.sample.rank for one in incident.processes if one.life not in others}
    steps = [step.format(pid=first.pid, host=first.host) for step in STEPS[VerdictClass.DEAD]]
    return Verdict(
        VerdictClass.DEAD, _summary(incident), tuple(culprits), tuple(sorted(rank for rank in victims if rank is not None)),
        first.communicator, since=min(event.time for event in incident.first), time=time,
        confidence=SURE if len(culprits) == 1 else UNSURE, evidence=tuple(map(_evidence, incident.first)),
        unobserved=_unobserved(incident), next_steps=tuple(steps), failures=incident.failures(),
    )  # fmt: skip


def _culprit(known: Known) -> Culprit:
    sample, largest = known.sample, known.sample.largest
    return Culprit(
        sample.rank, largest.rank if largest else None, sample.process.host, sample.process.pid,
        largest.device if largest else None, CommunicatorRef(f"{largest.hash:016x}", largest.nranks) if largest else None,
        reason=str(Cause.ENDED),
    )  # fmt: skip


def _evidence(event: Event) -> str:
    return f"{event_name(event)}: {event.words}"


def event_name(event: Event) -> str:
    """``rank 2 (node1, pid 4711)``."""
    where = f"{event.host}, pid {event.pid}"
    return f"rank {event.rank} ({where})" if event.rank is not None else f"pid {event.pid} on {event.host}"


def _summary(incident: Incident) -> str:
    """``rank 2 (node1, pid 4711) was the first of 12 processes to fail: killed by SIGKILL; the next failed 0.3 s later``."""
    first, number = incident.first, len(incident.processes)
    of = f" of {number} processes" if number > 1 else ""
    if len(first) > 1:
        names = rank_words([event.rank for event in first if event.rank is not None]) or f"{len(first)} processes"
        return f"one of {names} was the first{of} to fail; the clocks of their hosts do not tell which ({_words(first)})"
    later = [event for event in incident.events if event.failed and event.life not in (None, first[0].life)]
    after_s = min((event.time for event in later), default=0.0) - first[0].time
    follows = f"; the next failed {time_text(max(after_s, 0.0) * 1e9)} later" if later else ""
    return f"{event_name(first[0])} was the first{of} to fail: {first[0].words}{follows}"


def _words(events: Sequence[Event]) -> str:
    return ", ".join(dict.fromkeys(event.words for event in events))


def _unobserved(incident: Incident) -> tuple[str, ...]:
    """Whose end nobody has seen: it may have been the first."""
    unheard = [one.sample.rank for one in incident.processes if one.end is None and one.sample.rank is not None]
    missing = {own.hash: own.nranks for one in incident.processes for own in one.sample.communicators}
    seen = {
        number: sum(own.hash == number for one in incident.processes for own in one.sample.communicators) for number in missing
    }
    lines = [f"how {rank_words(unheard)} ended"] if unheard else []
    return (
        *lines,
        *(f"communicator {number:016x}: {size - seen[number]} of {size} ranks were not observed"
          for number, size in missing.items() if seen[number] < size),
    )  # fmt: skip
