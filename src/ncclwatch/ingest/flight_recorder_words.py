"""A verdict on Flight Recorder dumps in the words of PyTorch: its process groups, its numbers, and lines of the program.

The engine names processes and communicators, and numbers collectives from 0. A dump knows neither hosts nor pids; its groups have
names, and it numbers their collectives from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ncclwatch.ingest.base import IngestError
from ncclwatch.ingest.flight_recorder_file import read_dump
from ncclwatch.ingest.flight_recorder_job import FIRST_PID, FlightJob, Group, host_of
from ncclwatch.model.verdict import Culprit, OperationRef, Verdict, VerdictClass
from ncclwatch.text import clean, compressed

PLANE = "flight-recorder"
SHOWN = 3
"""Bound: ranks whose lines of the program are told, of those named and of those that wait."""
FRAMES = 2
"""Bound: lines of a program that are told of one call."""
_NUMBER = re.compile(r"#(\d+)\b")
_REASONS = re.compile("has not (called the operation the others have called|entered the operation the others wait in)")
"""What the engine says of who is behind."""
_LIBRARY = re.compile(r"(^|/)(torch|transformer_engine|deepspeed)/|/contextlib\.py$|^<frozen ")
"""Files of frames that are not the program's own."""
_OF_TRANSPORTS = ("connections of a transport that was not recognised",)
"""What the engine says of communicators of which nobody looked at the connections."""


@dataclass(frozen=True, slots=True)
class Wording:
    """How a view is told. ``verb`` takes the place of "called"; ``stands``: class of who is behind by it."""

    verb: str
    reason: str = ""
    stands: VerdictClass | None = None


CALLED = Wording("called")
BEGUN = Wording("begun", "its host has called the operation, but its GPU has not begun it, as others have")
ENDED = Wording("ended", "is in an operation that the others have ended", VerdictClass.HARDWARE)
"""Who has not ended what all must take part in, and others have ended, is in it: the rule for ``HARDWARE`` of verdict.py."""


def amend(job: FlightJob, wording: Wording, verdict: Verdict) -> Verdict:
    """The verdict in these words, with lines of the program."""
    say = _translation(job, wording)
    named = verdict.verdict_class
    if wording.stands is not None and named is VerdictClass.NOT_ENTERED:
        named = wording.stands
    verdict = replace(
        verdict,
        verdict_class=named,
        summary=say(verdict.summary),
        culprits=tuple(_culprit(culprit, say, job.base) for culprit in verdict.culprits),
        operation=_operation(verdict.operation, job.base),
        evidence=tuple(map(say, verdict.evidence)),
        unobserved=tuple(say(line) for line in verdict.unobserved if line not in _OF_TRANSPORTS),
        next_steps=tuple(map(say, verdict.next_steps)),
        planes=(PLANE,),
        trail=tuple(replace(step, text=say(step.text)) for step in verdict.trail),
    )
    verdict = replace(verdict, evidence=(*verdict.evidence, *_lines(job, verdict)))
    return verdict if verdict.culprits else _nobody(job, verdict)


def _translation(job: FlightJob, wording: Wording) -> Callable[[str], str]:
    labels = {f"communicator {group.hash:016x}": group.label for group in job.groups.values()}
    place = re.compile(rf" ?\(?{re.escape(host_of(0)[:-1])}\d+, pid \d+\)?|on {re.escape(host_of(0)[:-1])}(\d+)")
    known = re.compile("|".join(map(re.escape, labels)) or "(?!)")

    def say(text: str) -> str:
        text = text.replace("no NCCL counter moved in any of", "no call, and no end of one, is recorded in any of")
        text = known.sub(lambda found: labels[found[0]], text)
        text = place.sub(lambda found: f"on the host of rank {found[1]}" if found[1] else "", text)
        text = re.sub(rf"\b{FIRST_PID // 10_000}\d{{4}}\b", "PID", text) if "pid" in text else text
        text = _NUMBER.sub(lambda found: f"#{int(found[1]) + job.base}", text)
        if wording.reason:
            told = _REASONS.sub(wording.reason, text)
            text = told if told != text else re.sub(r"\bcalled\b", wording.verb, text)
        return text

    return say


def _culprit(culprit: Culprit, say: Callable[[str], str], base: int) -> Culprit:
    operation = _operation(culprit.operation, base)
    return replace(culprit, host="", pid=None, reason=say(culprit.reason), operation=operation)


def _operation(operation: OperationRef | None, base: int) -> OperationRef | None:
    if operation is None or operation.sequence is None:
        return operation
    return replace(operation, sequence=operation.sequence + base)


def _nobody(job: FlightJob, verdict: Verdict) -> Verdict:
    """Where nobody is named: who wrote no dump, and what all that did are in."""
    ranks = [one.rank for one in job.ranks if any(job.is_open(one, part.rows) for part in job.parts[one.rank])]
    if not ranks or verdict.verdict_class is not VerdictClass.UNKNOWN or not job.ended_known | {"gloo"}:
        return verdict
    who = f"rank{'s' if len(ranks) > 1 else ''} {compressed(ranks)}"
    if job.missing:
        lost = f"rank{'s' if len(job.missing) > 1 else ''} {compressed(job.missing)}"
        summary = f"{who} may wait for {lost}, which wrote no dump: stopped, ended, or not asked"
        return replace(verdict, summary=summary)
    return replace(verdict, summary=f"{who} are all in their newest operations, and none is behind: {verdict.summary}")


# --- lines of the program ------------------------------------------------------------------------------------------------


def _lines(job: FlightJob, verdict: Verdict) -> Iterator[str]:
    """Where in the program the newest calls were made: of ranks that are named, and of some that wait for them."""
    reference = verdict.communicator
    group = next((g for g in job.groups.values() if reference and f"{g.hash:016x}" == reference.hash), None)
    named = [culprit.rank for culprit in verdict.culprits if culprit.rank is not None][:SHOWN]
    waiting = [rank for rank in verdict.victims if group is None or rank in group.ranks][:1]
    number = verdict.operation.sequence if verdict.operation is not None else None
    for rank in named:
        yield from _calls_of(job, rank, group, number, "newest call")
    for rank in waiting:
        yield from _calls_of(job, rank, group, number, "waits in")


def _calls_of(job: FlightJob, rank: int, group: Group | None, number: int | None, what: str) -> Iterator[str]:
    one = next((one for one in job.ranks if one.rank == rank), None)
    if one is None:
        return
    try:
        entries = read_dump(one.path).entries
    except IngestError:
        return
    own = [entry for entry in entries if group is None or _is_of(entry, group)]
    same = [entry for entry in own if number is not None and entry.get("collective_seq_id") == number]
    for entry in (same or own or entries)[-1:]:
        where = _program(entry)
        name = clean(str(entry.get("profiling_name")), 60)
        about = f" of {group.label}" if group is not None and own else ""
        if where:
            yield f"rank {rank}, {what}: {name} #{entry.get('collective_seq_id')}{about}, at {where}"


def _is_of(entry: Mapping[str, Any], group: Group) -> bool:
    named = entry.get("process_group")
    return (named[0] if isinstance(named, tuple | list) and named else named) == group.name.name


def _program(entry: Mapping[str, Any]) -> str:
    """The innermost lines of the program itself, below PyTorch's own: ``step (train.py:88) < main (train.py:120)``."""
    frames = entry.get("frames")
    if not isinstance(frames, list):
        return ""
    told: list[str] = []
    for frame in frames[:256]:
        if not isinstance(frame, dict):
            continue
        file, name, line = str(frame.get("filename", "")), str(frame.get("name", "")), frame.get("line")
        if not _LIBRARY.search(file) and len(told) < FRAMES:
            told.append(f"{clean(name, 60)} ({clean(file, 120)}:{line if isinstance(line, int) else '?'})")
    return " < ".join(told)
