"""How long a standstill must last before waits alone accuse a rank: learned for each kind of operation, size and group.

Jobs pause by themselves (checkpoints, evaluations, kernels that compile). How long an operation of the kind that waits lead to
has stood still and gone on is what is to be expected of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ncclwatch.collect.ledger import Ledger
from ncclwatch.engine.evidence.base import FactKind, LinkNode, Subject
from ncclwatch.model.job import Group, Job

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

HANG_FLOOR_S = 5.0
"""Unit: s; nothing moves for this long before waits alone accuse a rank, and what is said sooner, to who asks, is less sure.
From: chosen: five samples at the usual interval.
"""
EXPECTATION_FACTOR = 2.0
"""Unit: times the longest standstill that an operation was lately seen to end by itself, or the floor for what has no usual
duration: first operations, a barrier; never immunity. From: chosen: it may have gone on just after the last look; three are too
many: who comes to a job that hangs already sees first operations often, and waited 15 s (drawn 1301-138).
"""
LONGEST_PATIENCE_S = 600.0
"""Bound: seconds that any operation is given; twice the five minutes of CCL-D."""
UNTOUCHED_FACTOR = 3.0
"""Unit: floors that is given to the creation of a communicator, and where nothing has ever come through. From: chosen: ranks
still make their connections, which takes as long as making communicators.
"""
CREATION_S = UNTOUCHED_FACTOR * HANG_FLOOR_S
YOUNG_OPERATIONS = 3
"""Unit: operations; a communicator that has launched fewer has just begun. From: chosen: kernels load, caches are cold."""
BARRIER_ELEMENTS = 1
"""Fact: elements of the AllReduce that a barrier is in PyTorch (ProcessGroupNCCL.cpp, barrier), and by CCL-D 4.2.1."""
REMEMBERED, MAX_KINDS = 16, 4096
"""Bound: standstills that are remembered of a kind of operation, and kinds: those of jobs that are over are the longest unmet."""


class WaitKind(NamedTuple):
    """The kind of operation that waits lead to: its group, name, and size in steps (0 where no end of a transfer tells)."""

    group: int
    operation: str
    steps: int


@dataclass(slots=True)
class Patience:
    """What is known of a job's standstills. ``adaptive`` off: a fixed time, as CCL-D's five minutes."""

    floor_s: float = HANG_FLOOR_S
    adaptive: bool = True
    _learned: dict[WaitKind, tuple[float, ...]] = field(default_factory=dict)
    """The kind met last comes last."""
    _pending: dict[WaitKind, float] = field(default_factory=dict)
    _seen: set[WaitKind] = field(default_factory=set)

    def needed(self, case: Case) -> float:
        """Seconds that the standstill of a job must last, by what its waits lead to. How long it has lasted is remembered."""
        if not self.adaptive:
            return self.floor_s
        kinds = _wait_kinds(case)
        for kind in kinds:
            self._pending[kind] = max(self._pending.get(kind, 0.0), case.still)
        self._seen |= kinds
        groups = [case.job.groups[number] for number in {kind.group for kind in kinds} & case.job.groups.keys()]
        expected = [max(self._learned[kind]) for kind in kinds & self._learned.keys()]
        # A barrier beside an ordinary operation (the norm of the gradients) is no reason to wait longer for that.
        if groups and all(_is_young(group) or _is_barrier(group, case.known.ledger) for group in groups):
            expected.append(self.floor_s)
        floor = self.floor_s * (UNTOUCHED_FACTOR if groups and all(map(_is_untouched, groups)) else 1.0)
        return max(floor, min(LONGEST_PATIENCE_S, EXPECTATION_FACTOR * max(expected, default=0.0)))

    def halted(self, job: Job) -> None:
        """A stopped or ended process holds the job up: this standstill teaches nothing."""
        for kind in [kind for kind in self._pending if kind.group in job.groups]:
            del self._pending[kind]

    def end_round(self) -> None:
        """All jobs were looked at: whatever stood still in the round before and was not met in this one has gone on."""
        for kind in [kind for kind in self._pending if kind not in self._seen]:
            # It went on at some moment after the last look: the factor allows for that.
            lasted = self._pending.pop(kind)
            self._learned[kind] = (*self._learned.pop(kind, ())[1 - REMEMBERED :], lasted)
            if len(self._learned) > MAX_KINDS:
                del self._learned[next(iter(self._learned))]
        self._seen.clear()


def retry_patience(case: Case) -> float:
    """Seconds that a standstill must last that waits for links alone, of which one's sockets try again and may come through."""
    retrying = {fact.subject: fact.value or 0.0 for fact in case.facts.of(FactKind.RETRYING)}
    links = [end for sink in case.waits.sinks if isinstance(end := sink.nodes[0], LinkNode)]
    if not retrying or len(links) < len(case.waits.sinks):
        return 0.0
    ways: set[Subject] = set()
    for link in links:
        number = case.job.groups[link.group_id].hash
        ways |= {(number, link.source, link.destination), (number, link.destination, link.source)}
    return max((retrying[way] for way in ways & retrying.keys()), default=0.0)


def _wait_kinds(case: Case) -> set[WaitKind]:
    """Kinds of operation the waits end in, or stand still in; where memory shows none, the calls not made."""
    kinds: set[WaitKind] = set()
    for one in (one for sink in case.waits.sinks for part in (sink.waits, sink.inside, sink.stalls) for one in part):
        name = one.operation.name if one.operation else ""
        of_end = (one.end.operation.collective, one.end.sub.nsteps) if one.end is not None else (name, 0)
        kinds.add(WaitKind(one.key.group, *of_end))
    return kinds or {
        WaitKind(number, f"function {finding.called.function}", finding.called.count)
        for number, finding in case.findings.items() if finding.behind and finding.called
    }  # fmt: skip


def _is_young(group: Group) -> bool:
    """Whether it has launched too little for anything to be usual. From 2.26 on ``opCount`` stays 0 where no proxy takes part."""
    held = [own for _, own in group.members.values() if own.op_count is not None]
    counts = [max(own.op_count or 0, sum(own.sequence_numbers.values())) for own in held]
    return bool(counts) and max(counts) < YOUNG_OPERATIONS


def _is_untouched(group: Group) -> bool:
    """Whether nothing was ever received on its connections, however much was launched."""
    counts = [conn.head for _, own in group.members.values() for conn in own.host_connections if conn.head is not None]
    for member, own in group.members.values():
        counts += [sub.base + sub.done for op in member.last.operations if op.comm_hash == own.hash for sub in op.subs]
    return bool(counts) and not any(counts)


def _is_barrier(group: Group, ledger: Ledger | None) -> bool:
    rows = [row for row in ledger.rows_of(group).values() if ledger.called[row]] if ledger is not None else []
    newest = [ledger.operations[row, (ledger.called[row] - 1) % ledger.depth] for row in rows] if ledger is not None else []
    return bool(newest) and bool(max(newest, key=lambda operation: operation["time_ns"])["count"] <= BARRIER_ELEMENTS)
