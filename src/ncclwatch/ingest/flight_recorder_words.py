"""A verdict on Flight Recorder dumps in the words of PyTorch: its process groups, its numbers, and lines of the program.

The engine names processes and communicators, and numbers collectives from 0. A dump knows neither hosts nor pids; its groups have
names, and it numbers their collectives from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ncclwatch.collect.functions import function
from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.ingest.base import IngestError
from ncclwatch.ingest.flight_recorder_file import read_dump
from ncclwatch.ingest.flight_recorder_job import FIRST_PID, FlightJob, Group, host_of
from ncclwatch.ingest.flight_recorder_order import OpenCall, circle, end_of_waits, left_inside, oldest_open, unlike
from ncclwatch.model.verdict import CommunicatorRef, Culprit, OperationRef, Verdict, VerdictClass
from ncclwatch.text import clean, compressed

PLANE = "flight-recorder"
SHOWN = 3
"""Bound: ranks whose lines of the program are told, of those named and of those that wait."""
NAMED = 8
"""Bound: ranks without a dump that are named."""
LASTED_S, LACKING, ALL_INSIDE = 5.0, 0.4, 0.6
"""Chosen: seconds after which a missing dump is worth a word, as the engine's patience; and how sure that is: by elimination. How
sure it is that those are at fault who are together in an operation that does not end.
"""
CROSSED = 0.6
"""Chosen: how sure it is that who is at fault has called in another order: a GPU may have more than one operation begun."""
UNDATED = 0.4
"""Chosen: how sure it is where the files do not even say that the waits had lasted."""
NOT_DATED = "how long the waits had lasted: the files are newer than a watchdog's dump would be, so they were copied"
NOT_BEGUN = "which of its open operations each GPU is in: the oldest is taken for it (TORCH_NCCL_ENABLE_TIMING tells)"
NO_DUMP = "stopped, ended, cut off, or not asked"
FRAMES = 2
"""Bound: lines of a program that are told of one call."""
_NUMBER = re.compile(r"#(\d+)\b")
_HASHED = re.compile("communicator [0-9a-f]{16}")
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
    """The verdict in these words."""
    if wording is BEGUN and not all(_has_called(job, culprit) for culprit in verdict.culprits):
        wording = CALLED
    say = _translation(job, wording)
    named = verdict.verdict_class
    if wording.stands is not None and named is VerdictClass.NOT_ENTERED:
        named = wording.stands
    verdict = replace(
        verdict,
        verdict_class=named,
        summary=say(verdict.summary),
        culprits=tuple(_culprit(job, culprit, say) for culprit in verdict.culprits),
        communicator=_communicator(job, verdict.communicator),
        operation=_operation(verdict.operation, job.base),
        evidence=tuple(map(say, verdict.evidence)),
        unobserved=tuple(say(line) for line in verdict.unobserved if line not in _OF_TRANSPORTS),
        next_steps=tuple(map(say, verdict.next_steps)),
        planes=(PLANE,),
        trail=tuple(replace(step, text=say(step.text)) for step in verdict.trail),
    )
    verdict = _inside(job, _unlike(job, verdict))
    return verdict if verdict.culprits else _nobody(job, verdict)


def with_lines(job: FlightJob, verdict: Verdict) -> Verdict:
    """The verdict with lines of the program; dumps of ranks that are named are read once more for them."""
    with collector_at_rest():
        return replace(verdict, evidence=(*verdict.evidence, *_lines(job, verdict)))


def _translation(job: FlightJob, wording: Wording) -> Callable[[str], str]:
    labels = {f"communicator {group.hash:016x}": group.label for group in job.groups.values()}
    place = re.compile(rf" ?\(?{re.escape(host_of(0)[:-1])}\d+, pid \d+\)?|on {re.escape(host_of(0)[:-1])}\d+")

    def say(text: str) -> str:
        text = text.replace("no NCCL counter moved in any of", "no call, and no end of one, is recorded in any of")
        text = _HASHED.sub(lambda found: labels.get(found[0], found[0]), text)
        text = place.sub(lambda found: "on its host" if found[0].startswith("on ") else "", text)
        text = re.sub(rf"\b{FIRST_PID // 10_000}\d{{4}}\b", "PID", text) if "pid" in text else text
        text = _NUMBER.sub(lambda found: f"#{int(found[1]) + job.base}", text)
        if wording.reason:
            told = _REASONS.sub(wording.reason, text)
            text = told if told != text else re.sub(r"\bcalled\b", wording.verb, text)
        return text

    return say


def _culprit(job: FlightJob, culprit: Culprit, say: Callable[[str], str]) -> Culprit:
    operation, communicator = _operation(culprit.operation, job.base), _communicator(job, culprit.communicator)
    return replace(culprit, host="", pid=None, reason=say(culprit.reason), operation=operation, communicator=communicator)


def _has_called(job: FlightJob, culprit: Culprit) -> bool:
    """Whether a rank has called the operation it is named in (the engine's number, from 0)."""
    number = culprit.operation.sequence if culprit.operation is not None else None
    reference = culprit.communicator.hash if culprit.communicator is not None else ""
    parts = job.parts.get(culprit.rank if culprit.rank is not None else -1, [])
    counted = next((part.counted for part in parts if f"{part.group.hash:016x}" == reference), 0)
    return number is not None and counted > number


def _communicator(job: FlightJob, communicator: CommunicatorRef | None) -> CommunicatorRef | None:
    """With the name of the process group that it stands for."""
    group = next((g for g in job.groups.values() if communicator and f"{g.hash:016x}" == communicator.hash), None)
    return replace(communicator, role=group.label) if communicator is not None and group is not None else communicator


def _operation(operation: OperationRef | None, base: int) -> OperationRef | None:
    if operation is None or operation.sequence is None:
        return operation
    return replace(operation, sequence=operation.sequence + base)


def _inside(job: FlightJob, verdict: Verdict) -> Verdict:
    """Where those that are behind are all the ranks of another group, and all in the same operation of it, or wait for such ranks
    in the end: it is that which does not end, and these are in it. A dump does not tell which of them, or which link. Where
    others of that group have ended it, it tells: who has not.
    """
    named = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None}
    if verdict.verdict_class is not VerdictClass.NOT_ENTERED or "left-out" in verdict.rules:
        return verdict
    left = {rank: call for rank in sorted(named) if (call := left_inside(job, rank)) is not None}
    calls = {call.key: call for call in left.values()}
    for inside in calls.values() if len(calls) == 1 else ():
        if named <= {*left, *inside.group.ranks}:
            return _in_it(verdict, inside, [*left], alone=True)
    if len(named) < 2:
        return verdict
    for group in job.groups.values():
        number = job.all_inside(group) if len(group.ranks) > 1 and named == set(group.ranks) else None
        if number is not None:
            return _in_it(verdict, OpenCall(group, *number), group.ranks)
    found = end_of_waits(job)
    return _in_it(verdict, *found) if found is not None and named > set(found[1]) else verdict


def _in_it(verdict: Verdict, call: OpenCall, ranks: Sequence[int], *, alone: bool = False) -> Verdict:
    """These ranks are in an operation that does not end; ``alone``: on others it has."""
    group, name = call.group, function(call.function).name
    operation = OperationRef(name, call.sequence if call.sequence >= 0 else None)
    reference = CommunicatorRef(f"{group.hash:016x}", len(group.ranks), group.label)
    what = call.text if call.sequence >= 0 else f"a message between them on {group.label}"
    reason = f"is in {what}, which {'others have ended' if alone else 'all its ranks have called and none has ended'}"
    said = "others have ended it, and it does not end there" if alone else "all have called it, and none ends it"
    return replace(
        verdict, verdict_class=VerdictClass.HARDWARE, operation=operation, communicator=reference,
        culprits=tuple(
            Culprit(
                rank, group.places[rank], "", None, None, reason=reason, operation=operation, communicator=reference
            ) for rank in ranks
        ),
        victims=tuple(rank for rank in verdict.victims if rank not in ranks),
        summary=f"{_ranks(ranks)} {'hold' if len(ranks) > 1 else 'holds'} up the job in {what}: {said}",
        confidence=verdict.confidence if alone else min(verdict.confidence or ALL_INSIDE, ALL_INSIDE), stage=group.name.about,
        next_steps=("look for GPU and NIC errors on the hosts of these ranks: `dmesg -T | grep -iE 'xid|mlx5|link'`",),
    )  # fmt: skip


def _unlike(job: FlightJob, verdict: Verdict) -> Verdict:
    """Where the one who is behind has asked for something else than its peers in a call before: that is why. Those that asked for
    less go on, and wait in the next call.
    """
    rank = verdict.culprits[0].rank if len(verdict.culprits) == 1 else None
    behind = verdict.verdict_class is VerdictClass.NOT_ENTERED and "left-out" not in verdict.rules
    found = unlike(job, rank) if behind and rank is not None else None
    if found is None:
        return verdict
    call, own, peers = found
    operation = OperationRef(function(call.function).name, call.sequence)
    reference = CommunicatorRef(f"{call.group.hash:016x}", len(call.group.ranks), call.group.label)
    reason = f"called {own} as #{call.sequence}, unlike its peers: {peers}"
    return replace(
        verdict, verdict_class=VerdictClass.INCONSISTENT, operation=operation, communicator=reference,
        stage=call.group.name.about,
        summary=f"rank {rank} holds up the job in {operation.name} #{call.sequence} of {call.group.label}: {reason}",
        culprits=(replace(verdict.culprits[0], reason=reason, operation=operation, communicator=reference),),
        evidence=(f"rank {rank}: {reason}", *verdict.evidence),
        next_steps=("compare what the ranks call there: sizes, types and order must be the same on all of them",),
    )  # fmt: skip


def _nobody(job: FlightJob, verdict: Verdict) -> Verdict:
    """Where nobody is named: who wrote no dump, and what all that did are in."""
    waiting = job.waiting
    if not waiting or verdict.verdict_class is not VerdictClass.UNKNOWN:
        return verdict
    if job.missing and _lasted(job):
        return replace(
            verdict,
            summary=f"{_ranks(waiting)} may wait for {_ranks(job.missing)}, of which there is no dump: {NO_DUMP}",
            culprits=tuple(
                Culprit(rank, None, "", None, None, reason=_no_dump(job, rank), observed=False) for rank in job.missing[:NAMED]
            ),
            victims=tuple(waiting),
            confidence=LACKING,
            next_steps=(f"look whether {_ranks(job.missing)} still runs, and where it stands", *verdict.next_steps[:1]),
        )  # fmt: skip
    if 2 * len(job.missing) > len(job.world):
        return _too_few(job, verdict, waiting)
    if not job.missing and not job.partial and job.waited_s >= LASTED_S:
        if not job.dated:
            verdict = replace(verdict, confidence=UNDATED, unobserved=(NOT_DATED, *verdict.unobserved))
        if crossed := circle(job):
            return _crossed(job, verdict, crossed)
        if found := end_of_waits(job):
            verdict = replace(verdict, unobserved=(NOT_BEGUN, *verdict.unobserved)) if not job.begun_known else verdict
            return _in_it(replace(verdict, victims=tuple(waiting)), *found)
    alike = "in their newest operations" if job.ended_known else "alike in what they have called, which may or may not be open"
    summary = f"{_ranks(waiting)} are all {alike}, and none is behind: {verdict.summary}"
    if not job.partial:
        return replace(verdict, summary=summary)
    # By its log it has called all: that it wrote no dump as the others did may still be why they wait.
    logged = _ranks(job.partial)
    return replace(
        verdict, summary=f"{summary}; {logged} wrote no dump: {NO_DUMP}",
        next_steps=(f"look whether {logged} still runs, and where it stands", *verdict.next_steps),
    )  # fmt: skip


def _no_dump(job: FlightJob, rank: int) -> str:
    """Why a rank is named of which no dump tells."""
    if rank in job.unread:
        return "there is a dump of it, which could not be read"
    return f"there is no dump of it: {NO_DUMP}"


def _too_few(job: FlightJob, verdict: Verdict, waiting: Sequence[int]) -> Verdict:
    """Of most ranks there is no dump: what those wait in of which there is one."""
    rank, call = next(((rank, call) for rank in waiting if (call := oldest_open(job, rank)) is not None), (waiting[0], None))
    what = f": the oldest open operation of rank {rank} is {call.text}" if call is not None and call.sequence >= 0 else ""
    verdict = replace(
        verdict, victims=tuple(waiting),
        summary=f"{_ranks(waiting)} may wait for any of {len(job.missing)} ranks of which there is no dump{what}",
        next_steps=("gather the dumps of all ranks, and give their folder", *verdict.next_steps[:1]),
    )  # fmt: skip
    if call is None or call.sequence < 0:
        return verdict
    reference = CommunicatorRef(f"{call.group.hash:016x}", len(call.group.ranks), call.group.label)
    return replace(verdict, operation=OperationRef(function(call.function).name, call.sequence), communicator=reference)


def _crossed(job: FlightJob, verdict: Verdict, crossed: Sequence[tuple[int, OpenCall]]) -> Verdict:
    """Ranks that wait for each other, as nobody is behind: by the order in which each has called what is open."""
    ranks = [rank for rank, _ in crossed]
    evidence = []
    for at, (rank, own) in enumerate(crossed):
        other, inside = crossed[(at + 1) % len(crossed)]
        evidence.append(f"rank {rank} is in {own.text}, which rank {other} has called only behind {inside.text}")
    culprits = tuple(
        Culprit(
            rank, own.group.places[rank], "", None, None, reason=f"waits in {own.text}, its oldest that is open",
            operation=OperationRef(function(own.function).name, own.sequence),
            communicator=CommunicatorRef(f"{own.group.hash:016x}", len(own.group.ranks), own.group.label),
        ) for rank, own in crossed
    )  # fmt: skip
    others = {*job.waiting} - {*ranks}
    return replace(
        verdict, verdict_class=VerdictClass.DEADLOCK, culprits=culprits, victims=tuple(sorted(others)),
        confidence=min(verdict.confidence or CROSSED, CROSSED),
        summary=f"{_ranks(sorted(ranks))} wait for each other: they have called operations of several groups in different orders",
        operation=culprits[0].operation, communicator=culprits[0].communicator, evidence=(*evidence, *verdict.evidence),
        unobserved=(NOT_BEGUN, *verdict.unobserved),
        next_steps=("make every rank call the operations of these groups in one order",),
    )  # fmt: skip


def _lasted(job: FlightJob) -> bool:
    """Whether waits have lasted, and so few dumps are missing that it says something of those."""
    return job.waited_s >= LASTED_S and 2 * len(job.missing) <= len(job.world)


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {compressed(numbers)}"


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
