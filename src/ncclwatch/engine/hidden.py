"""Ranks with nothing open where one can look, and joined to others by a transport nobody can look into (NVLink and the like).

Such a rank may wait inside its node for a fellow that is itself held up elsewhere. NCCL's counts of calls tell where it has
called what a fellow has not; where they do not, it is not accused of standing idle while a fellow waits for somebody else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from ncclwatch.engine.connections import ConnectionKey, is_hidden
from ncclwatch.engine.counted import launched
from ncclwatch.engine.dropped import not_begun
from ncclwatch.engine.edges import HiddenNode, Node, RankNode, Wait, Waits, Why, enough_pairs
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.locate import Sink
from ncclwatch.model.state import Communicator

MOST = 8
"""Fellows for which waits of one rank are drawn on one communicator."""


def follow_counts(job: Job, waits: Waits, sinks: Sequence[Sink]) -> bool:
    """Draw the waits of idle ranks for fellows that have called less on a communicator nobody can look into; whether there were
    any. O(idle ranks x their fellows).

    What a rank shows may come after what it stands in, where nothing of it is begun: then it waits for a fellow that shows
    nothing.
    """
    added = False
    busy: set[int] | None = None
    for member, idle in _may_wait_inside(job, sinks):
        for group, own in _hidden_groups(job, member):
            mine = launched(member, own)
            counts = {rank: launched(other, view) for rank, (other, view) in group.members.items()}
            known = {rank: count for rank, count in counts.items() if count is not None}
            least = min(known.values(), default=None)
            if mine is None or least is None or least >= mine:
                continue
            for rank in [rank for rank, count in known.items() if count == least][:MOST]:
                other = group.members[rank][0]
                if not idle and other.index in (busy := waits.busy() if busy is None else busy):
                    continue
                text = partial(_count_text, member, other, group, mine, least)
                _draw(waits, group, member, rank, RankNode(other.index), Why.NOT_CALLED, text)
                added = True
    return added


def add_counted_waits(job: Job, waits: Waits, told: Collection[int]) -> bool:
    """Where nothing is open that one can look at, draw the waits of ranks for those that have called less on a communicator
    nobody can look into, by NCCL's counts; whether there were any. Not on communicators of which the calls tell (``told``).
    O(ranks x their communicators).

    Only by counts of each collective: launches (``opCount``) count messages as well, of which the ranks of a pipeline make more
    or less by right.
    """
    added = False
    for group in job.groups.values():
        if group.id in told:
            continue
        seen = ((rank, *pair) for rank, pair in group.members.items())
        counts = {rank: launched(member, own) for rank, member, own in seen if own.sequence_numbers and is_hidden(own)}
        known = {rank: count for rank, count in counts.items() if count is not None}
        if not known or min(known.values()) == (most := max(known.values())):
            continue
        behind = [rank for rank, count in known.items() if count < most]
        ahead = [rank for rank, count in known.items() if count == most]
        for waiter, rank in enough_pairs(ahead, behind):
            member, other = group.members[waiter][0], group.members[rank][0]
            text = partial(_count_text, member, other, group, most, known[rank])
            _draw(waits, group, member, rank, RankNode(other.index), Why.NOT_CALLED, text)
            added = True
    return added


def follow_hidden(job: Job, waits: Waits, sinks: Sequence[Sink]) -> bool:
    """Draw what idle ranks may wait for unseen: fellows that have called as much, and that wait for somebody else."""
    added = False
    waiting: set[int] | None = None
    for member, sink in _idle(job, sinks):
        behind: set[int] | None = None
        for group, own in _hidden_groups(job, member):
            waiting = waits.waiting() if waiting is None else waiting
            for rank, (other, view) in group.members.items():
                if other.index == member.index or other.index not in waiting or _ahead(other, view, member, own):
                    continue
                behind = sink.behind() if behind is None else behind
                if other.index in behind:
                    continue
                text = partial(_hidden_text, member, other, group)
                _draw(waits, group, member, rank, HiddenNode(group.id, rank), Why.UNOBSERVED, text)
                added = True
                break
    return added


def _idle(job: Job, sinks: Sequence[Sink]) -> Iterator[tuple[Member, Sink]]:
    """The running processes that others wait for and that have nothing open."""
    for sink in sinks:
        member = sink.member(job)
        if member is not None and not member.halted and not sink.stalls:
            yield member, sink


def _may_wait_inside(job: Job, sinks: Sequence[Sink]) -> Iterator[tuple[Member, bool]]:
    """The idle ones, and those that have begun nothing of what they show; which of the two."""
    for sink in sinks:
        member = sink.member(job)
        if member is not None and not member.halted and all(not_begun(job, member, mark) for mark in sink.stalls):
            yield member, not sink.stalls


def _hidden_groups(job: Job, member: Member) -> Iterator[tuple[Group, Communicator]]:
    for own in member.last.communicators:
        group = job.groups[job.group_of[member.index, own.address]]
        if group.rank_of(member) is not None and is_hidden(own):
            yield group, own


def _ahead(other: Member, view: Communicator, member: Member, own: Communicator) -> bool:
    """Whether a fellow has called more: then it is not the fellow that is waited for."""
    theirs, mine = launched(other, view), launched(member, own)
    return theirs is not None and mine is not None and theirs > mine


def _draw(waits: Waits, group: Group, member: Member, rank: int, target: Node, why: Why, text: partial[str]) -> None:
    key = ConnectionKey(group.id, 0, rank, group.ranks[member.index], False)
    waits.added.append(Wait(RankNode(member.index), target, why, key, text))


def _count_text(member: Member, other: Member, group: Group, mine: int, theirs: int) -> str:
    numbers = f"{mine} calls on communicator {group.hash:016x}, {other.label} {theirs}"
    return f"{member.label} has made {numbers}: it waits for that one, {Why.NOT_CALLED}"


def _hidden_text(member: Member, other: Member, group: Group) -> str:
    return (
        f"{member.label} may wait on communicator {group.hash:016x} for {other.label}, which waits itself: "
        "what joins them cannot be looked into"
    )
