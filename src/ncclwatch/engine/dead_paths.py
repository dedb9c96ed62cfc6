"""A path over which nothing is acknowledged any more is the cause of a standstill, whoever the waits lead to.

Where a job creates connections while a path dies, or sends over it what nobody is waiting for yet, the waits end at a rank inside
NCCL that shows nothing. TCP knows better: segments that are sent again and again without an answer are a fact of the network, and
who has only stopped reading still acknowledges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ncclwatch.engine.hypotheses import Cause
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.ports import OPEN_TO_DOUBT, named_in
from ncclwatch.model.verdict import Culprit, LinkRef, Verdict, VerdictClass

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

ONE_END = "one end of a path over which nothing is acknowledged"


@dataclass(frozen=True, slots=True)
class DeadPath:
    """A connection of a communicator on which sockets get no answer: from ``rank`` to ``peer`` in it, by IP address.

    ``global_rank`` of who sends tells communicators of one hash apart; ``None`` where it is not known.
    """

    comm_hash: int
    rank: int
    peer: int
    local: str
    remote: str
    global_rank: int | None = None


@dataclass(frozen=True, slots=True)
class _Link:
    path: DeadPath
    group: Group
    ends: dict[str, int]
    """Address → rank in the communicator."""


def blame_dead_paths(case: Case, verdict: Verdict, dead: Collection[DeadPath]) -> Verdict:
    """The verdict, or one on the ends of dead paths, where it only says where the waits that can be seen end. Of a rank that data
    neither reaches nor leaves it is said that the network is why.

    Of several paths the address they share is named, of a single one both ends. O(paths x communicators of a hash).
    """
    from ncclwatch.engine.suspects import accused
    from ncclwatch.engine.verdict import REASONS, build

    job, NEITHER_WAY = case.job, REASONS[Cause.CUT_OFF]
    cut_off = any(culprit.reason == NEITHER_WAY for culprit in verdict.culprits)
    if not dead or not (cut_off or verdict.verdict_class in OPEN_TO_DOUBT):
        return verdict
    paths = sorted(dead, key=lambda p: (p.comm_hash, p.rank, p.peer))
    links = [link for path in paths if (link := _link_of(job, path)) is not None]
    if cut_off:
        return _not_acknowledged(verdict, links)
    culprits = _culprits(job, links)
    if not culprits:
        return verdict
    evidence = list(verdict.evidence)
    victims = {index for link in links for index in link.group.ranks} - accused(job, culprits)
    if verdict.culprits:
        evidence.insert(0, f"the waits that can be seen end at {named_in(verdict)}, which may itself wait for such a path")
    found = build(case, VerdictClass.HARDWARE, culprits, victims, evidence, verdict.unobserved)
    fellows = tuple(sorted({*found.victims, *verdict.victims} - {culprit.rank for culprit in culprits}))
    return replace(found, victims=fellows, planes=(*verdict.planes, "nic"))


def _not_acknowledged(verdict: Verdict, links: Sequence[_Link]) -> Verdict:
    """A verdict on who is cut off with the reason TCP knows, where a dead path ends at it."""
    from ncclwatch.engine.verdict import REASONS, steps_for

    NEITHER_WAY, NOT_ACKNOWLEDGED = REASONS[Cause.CUT_OFF], REASONS[Cause.PATH]
    ends = {member.rank for link in links for end in link.ends.values() if (member := link.group.holder(end)) is not None}
    if not all(culprit.rank in ends for culprit in verdict.culprits):
        return verdict
    culprits = tuple(replace(culprit, reason=NOT_ACKNOWLEDGED) for culprit in verdict.culprits)
    summary = verdict.summary.replace(NEITHER_WAY, NOT_ACKNOWLEDGED)
    steps = steps_for(verdict.verdict_class, culprits)
    return replace(verdict, culprits=culprits, summary=summary, next_steps=steps, planes=(*verdict.planes, "nic"))


def _link_of(job: Job, path: DeadPath) -> _Link | None:
    for group in job.groups.values() if path.local != path.remote else ():
        sender = group.holder(path.rank) if group.hash == path.comm_hash and path.peer < group.nranks else None
        if sender is not None and path.global_rank in (None, sender.rank):
            return _Link(path, group, {path.local: path.rank, path.remote: path.peer})
    return None


def _culprits(job: Job, links: Sequence[_Link]) -> list[Culprit]:
    """Greedily the address that most of the remaining paths share; where none is shared, both ends, if both were observed."""
    left, named = list(links), dict[int, Culprit]()
    while left:
        common = Counter(address for link in left for address in link.ends).most_common(2)
        alone = len(common) < 2 or common[0][1] > common[1][1]
        addresses = (common[0][0],) if alone else tuple(left[0].ends)
        for link in [link for link in left if set(addresses) <= link.ends.keys()]:
            left.remove(link)
            members = [held for address in addresses if (held := link.group.holder(link.ends[address])) is not None]
            for member in members if len(members) == len(addresses) else ():
                named.setdefault(member.index, _culprit(job, member, link, alone=alone))
    return list(named.values())


def _culprit(job: Job, member: Member, link: _Link, *, alone: bool) -> Culprit:
    reference = None if alone else LinkRef(link.path.rank, link.path.peer, "net")
    from ncclwatch.engine.suspects import observed
    from ncclwatch.engine.verdict import REASONS

    found = observed(job, member, (), (), Cause.PATH, link=reference).place
    found = replace(found, reason=REASONS[Cause.PATH] if alone else ONE_END)
    return replace(found, communicator=link.group.reference(), comm_rank=link.group.rank_of(member))
